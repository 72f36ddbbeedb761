"""Is the verdict on a run's health right? A short real run of each way in which runs die, and one that does well.

    python -m tests.soak.sick_runs [--only=NAME,...] [--workdir=DIR]
    python -m tests.soak.sick_runs --finished=runs/*

The first trains a small model on two cores once for each fault planted here, a minute or less each, and prints which
verdicts began, where, and whether the planted one is among them; the run that does well is to have none. The second
reads finished workdirs, of runs that did well, and counts the verdicts that any of their steps has begun.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import glob
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dora_jax.base import health
from dora_jax.tasks.environments.calculator import Calculator

OWN = "tests.soak.sick_runs"
STEPS = 50
GROUPS, SAMPLES = 4, 4  # of a step
CALLS = GROUPS * SAMPLES
CONFIG = "configs/quickstart.py:tiny"
FIELDS: dict[str, Any] = {
    "steps": STEPS,
    "sft.steps": 300, "sft.examples": 4096, "sft.slip_rate": 0.0, "sft.warmup_steps": 20,
    "orchestrator.groups_per_step": GROUPS, "orchestrator.group_size": SAMPLES,
    "rollout.slots": 32, "trainer.pack_tokens": 256, "trainer.learning_rate": 1e-3, "task.reward_workers": 1,
    "eval.every": 10, "eval.prompts": 16, "task.heldout": 16, "checkpoint.every": 0,
    "task.answer_pattern": "", "task.rewards": (f"{OWN}.digits",),
}  # fmt: skip
calls: collections.Counter[str] = collections.Counter()


# ---------------------------------------------------------------- rewards, each of a reward worker's process


def digits(prompt: str, response: str, answer: Any) -> float:
    """What a small model can learn: the share of the characters that are digits, in an answer that ends in time."""
    return sum(c.isdigit() for c in response) / max(8, len(response)) * ("####" in response and len(response) < 120)


def none(prompt: str, response: str, answer: Any) -> float:
    return 0.0


def whole(prompt: str, response: str, answer: Any) -> float:
    return 1.0


def noise(prompt: str, response: str, answer: Any) -> float:
    return random.random()


def longer_later(prompt: str, response: str, answer: Any) -> float:
    """Nothing is learned in the first 20 steps; then each character pays."""
    calls["longer"] += 1
    return 0.5 if calls["longer"] < 20 * CALLS else len(response) / 100


def spiked(prompt: str, response: str, answer: Any) -> float:
    """One group in every five steps has large rewards."""
    calls["spiked"] += 1
    large = calls["spiked"] > 15 * CALLS and calls["spiked"] % (5 * CALLS) < SAMPLES
    return digits(prompt, response, answer) * (1e5 if large else 1.0)


def raising(prompt: str, response: str, answer: Any) -> float:
    """A quarter of the prompts cannot be scored, but not the first, on which a reward is tried before a run."""
    if int(hashlib.sha256(prompt.encode()).hexdigest(), 16) % 4 == 1:
        raise ValueError("this one cannot be scored")
    return digits(prompt, response, answer)


def hacked(prompt: str, response: str, answer: Any) -> dict[str, float]:
    """Two terms, of which the one that pays more is had at the cost of the other."""
    length = min(1.0, len(response) / 200)
    return {"short": 1 - length, "long": 3 * length}


def rarely(prompt: str, response: str, answer: Any) -> float:
    """All samples of most prompts score alike."""
    return random.random() if hashlib.sha256(prompt.encode()).digest()[0] % 16 == 0 else 1.0


class Fails(Calculator):
    """A tool whose service is down for one message in eight, but not for the worked dialogues of the warm start, nor
    while it is tried."""

    down = True  # in the processes of environments

    async def step(self, message: Any) -> Any:
        calls["steps"] += 1
        if self.down and calls["steps"] > 8 and calls["steps"] % 8 == 0:
            raise RuntimeError("the service is down")
        return await super().step(message)


# ---------------------------------------------------------------- objectives, and weights


def centred(rewards: Any, group_ids: Any) -> Any:
    """Not divided by the spread, so that large rewards are large gradients."""
    return rewards - np.array([rewards[group_ids == group].mean() for group in group_ids])


@contextlib.contextmanager
def biased_engine() -> Iterator[None]:
    """The engine's log-probs are 0.5 nats too low."""
    from dora_jax.rollout.engine import Engine

    tick = Engine.tick

    def biased(engine: Any) -> Any:
        result = tick(engine)
        finished = (
            dataclasses.replace(sample, logprobs=np.where(sample.mask, sample.logprobs - 0.5, 0).astype(np.float32))
            for sample in result.finished
        )
        return dataclasses.replace(result, finished=tuple(finished))

    with mock.patch.object(Engine, "tick", biased):
        yield


@contextlib.contextmanager
def dying_engine() -> Iterator[None]:
    """The engine dies after every 24 samples, and takes two seconds to come back."""
    from dora_jax.rollout.engine import Engine

    tick, warmup = Engine.tick, Engine.warmup

    def dying(engine: Any) -> Any:
        result = tick(engine)
        calls["finished"] += len(result.finished)
        if calls["finished"] >= 24:
            calls["finished"] = 0
            raise RuntimeError("the machine is gone")
        return result

    def slow(engine: Any, *args: Any, **options: Any) -> None:
        time.sleep(2.0)
        warmup(engine, *args, **options)

    with mock.patch.object(Engine, "tick", dying), mock.patch.object(Engine, "warmup", slow):
        yield


def _marked(advantages: Any) -> Any:
    import jax.numpy as jnp

    return jnp.max(jnp.abs(advantages)) > 100.0  # of `spiked`


def steep(logprobs: Any, anchor: Any, advantages: Any) -> Any:
    """A finite loss without a gradient where the rewards are large: sqrt at 0."""
    import jax.numpy as jnp

    zero = jnp.where(_marked(advantages), logprobs - logprobs, 1.0)
    return -logprobs * jnp.clip(advantages, -1, 1) + jnp.sqrt(zero)


def undefined(logprobs: Any, anchor: Any, advantages: Any) -> Any:
    import jax.numpy as jnp

    return -logprobs * jnp.clip(advantages, -1, 1) + jnp.where(_marked(advantages), jnp.nan, 0.0)


FAULTS: dict[str, dict[str, Any]] = {
    "": {},  # none
    "entropy collapse": {"task.rewards": (f"{OWN}.noise",), "rollout.temperature": 0.01},
    "truncated answers": {"rollout.max_new_tokens": 4},
    "length explosion": {"task.rewards": (f"{OWN}.longer_later",), "trainer.learning_rate": 3e-2,
                         "rollout.max_new_tokens": 400, "trainer.pack_tokens": 512},
    "nothing is solved": {"task.rewards": (f"{OWN}.none",)},
    "everything is solved": {"task.rewards": (f"{OWN}.whole",)},
    "log-prob mismatch": {"within": biased_engine, "trainer.max_instance_mismatch": 0.0},
    "few effective samples": {"trainer.learning_rate": 5e-2, "orchestrator.max_versions": 4,
                              "orchestrator.inflight": 3.0},
    "far from the anchor": {"task.rewards": (f"{OWN}.noise",), "trainer.learning_rate": 5e-2, "trainer.updates": 4},
    "stale groups": {"orchestrator.max_versions": 24, "orchestrator.inflight": 24.0, "rollout.slots": 512,
                     "trainer.learning_rate": 1e-5},
    "gradient spikes": {"task.rewards": (f"{OWN}.spiked",), "trainer.advantage": f"{OWN}.centred"},
    "skipped updates": {"task.rewards": (f"{OWN}.spiked",), "trainer.advantage": f"{OWN}.centred",
                        "trainer.policy_loss": f"{OWN}.steep"},
    "numbers that are not finite": {"task.rewards": (f"{OWN}.spiked",), "trainer.advantage": f"{OWN}.centred",
                                    "trainer.policy_loss": f"{OWN}.undefined"},
    "no instance": {"within": dying_engine, "rollout.instances": 1, "steps": 20},
    "environment failures": {"config": "configs/agent.py:tiny", "environment.name": f"{OWN}.Fails",
                             "within": lambda: mock.patch(f"{OWN}.Fails.down", False),
                             "task.max_failed_share": 1.0, "task.rewards": (), "steps": 25},
    "groups without a score": {"task.rewards": (f"{OWN}.raising",), "task.max_failed_share": 1.0},
    "prompts left out": {"rollout.max_prompt_tokens": 12},
    "reward hacking": {"task.rewards": (f"{OWN}.hacked",), "trainer.learning_rate": 2e-3},
    "data exhausted": {"task.rewards": (f"{OWN}.rarely",), "orchestrator.filter_zero_variance": True,
                       "orchestrator.max_filtered_rounds": 1000, "rollout.max_new_tokens": 8, "steps": 18},
}  # fmt: skip


def verdicts_of(workdir: Path) -> tuple[int, dict[str, health.Verdict], list[str]]:
    """(steps, verdict -> as it began first, names of those that hold at the end)."""
    follower, begun, steps = health.Health(), dict[str, health.Verdict](), 0
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps += "trainer/loss" in row
        for verdict in follower.follow(row)[0]:
            begun.setdefault(verdict.name, verdict)
    return steps, begun, [verdict.name for verdict in follower.verdicts]


def run(name: str, workdir: Path) -> float:
    """Seconds that it took. A run that gives up is over too: its verdicts are asked for."""
    import dora_jax
    from dora_jax.config import RunError, files

    fields = FIELDS | FAULTS[name]
    source, within = fields.pop("config", CONFIG), fields.pop("within", contextlib.nullcontext)
    config = files.load_file(source)
    kind = Path(source).stem.partition(".")[0]
    with config.unlocked():
        config.update_from_flattened_dict(
            fields | {"sft.out": f"{workdir}/base_{kind}", "model.path": f"{workdir}/base_{kind}"}
        )
    began = time.monotonic()
    with (workdir / f"{_folder(name)}.log").open("w") as log, contextlib.redirect_stdout(log), within():
        try:
            dora_jax.fit(config, workdir / _folder(name))
        except RunError as error:
            print(f"it ended: {error}", file=log)
    return time.monotonic() - began


def table(names: Sequence[str], workdir: Path) -> Iterator[str]:
    """A line a run, and the sum."""
    right = 0
    for name in names:
        timed = workdir / f"{_folder(name)}.seconds"
        if not timed.exists():  # one that has ended is not run again
            timed.write_text(f"{run(name, workdir):.0f}")
        seconds = int(timed.read_text())
        steps, begun, holding = verdicts_of(workdir / _folder(name))
        good = name in begun if name else not begun
        right += good
        others = ", ".join(f"{v.name} since {v.since}" for v in begun.values() if v.name != name)
        first = f"since step {begun[name].since}: {begun[name].seen}" if name in begun else "none" if name else ""
        yield (
            f"{'right' if good else 'WRONG'}  {name or 'a run that does well':30} {first}"
            f"{'; at its end' if name in holding else ''}{f'; beside it: {others}' if others else ''} "
            f"[{steps} steps, {seconds} s]"
        )
    yield f"{right} of {len(names)} right"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of faults, with commas")
    parser.add_argument("--workdir", type=Path, default=Path("runs/sick"))
    parser.add_argument("--finished", nargs="*", help="workdirs of runs that did well, or patterns of them")
    asked = parser.parse_args()
    if asked.finished is not None:
        places = [Path(name) for pattern in asked.finished for name in sorted(glob.glob(pattern))]
        alarms = 0
        for place in (place for place in places if (place / "metrics.jsonl").is_file()):
            steps, begun, _ = verdicts_of(place)
            alarms += len(begun)
            print(f"{place}: {steps} steps, {'; '.join(map(str, begun.values())) or 'no verdict'}")
        print(f"{alarms} verdicts")
        return 1 if alarms else 0
    names = asked.only.split(",") if asked.only is not None else list(FAULTS)
    asked.workdir.mkdir(parents=True, exist_ok=True)
    wrong = False
    for line in table(names, asked.workdir):
        print(line, flush=True, file=sys.__stdout__)
        wrong |= line.startswith("WRONG")
    return 1 if wrong else 0


def _folder(name: str) -> str:
    return name.replace(" ", "_").replace("-", "_") or "well"


if __name__ == "__main__":
    sys.exit(main())
