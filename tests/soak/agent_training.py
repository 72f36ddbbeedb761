"""Does an agent of openai-agents with two tools get better on a live run that trains on its sessions?

    python -m tests.soak.agent_training --envs=DIR [--install] [--seeds=0,1,2] [--controls=0] [--steps=30] [--workdir=DIR]

A tiny model is warm-started on worked dialogues, most of which answer one call too early. Then one run a seed: the agent, an
unchanged library in an environment of its own (DIR/openai-agents, as of agent_clients.py; tests/data/clients/sums_agent.py),
works on sums and posts whether it was right; sessions take turns with temperatures of their own. Controls: the same with each
step's rewards permuted. Held-out sums, which no training session asks, are worked on before and after, by `dora_jax.serve`.

Checked of each run, against what the agent itself was answered: every trained token is of the version that the answer named, with the
log-probs that it had, and every reward is the posted one, once; and at their own temperature trained turns of the first version
have the log-probs that the endpoint gives a whole text as its prompt. Exits with 1 where something of it does not hold, where a
seed does not learn, or where a control does.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dora_jax.bench.learning import serving
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.recovery import replay
from dora_jax.tasks.environment import EpisodePrompt, Message
from tests.soak.agent_clients import install

ROOT = Path(__file__).parents[2]
PROGRAM, CLIENT = ROOT / "tests/data/clients/sums_agent.py", ROOT / "dora_jax/serving/client.py"
SHOWN = "\n[add, subtract] "  # what the chat template puts in front of a question
CALL = '<tool_call>{{"name": "{}", "arguments": {{"a": {}, "b": {}}}}}</tool_call>'
TEMPLATE = (
    "{{ '\\n' }}{% if tools %}[{% for tool in tools %}{{ tool.function.name }}{{ ', ' if not loop.last }}{% endfor %}] "
    "{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|endoftext|>{% elif m.role == 'tool' %}-> {{ m.content }}{{ '\\n' }}"
    "{% else %}{{ m.content }}{{ '\\n' }}{% endif %}{% endfor %}"
)
TURN_TOKENS, GROUPS, SIZE, HELDOUT = 56, 8, 8, 192
TEMPERATURES = (None, 0.7, 1.3, None)  # of a group's sessions, in turn; None: the run's
CONFIG = """
from dora_jax import config

def get_config():
    c = config.defaults()
    c.steps, c.seed = {steps}, {seed}
    c.task.name = "reasoning_gym:chain_sum"
    c.task.params = {{"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}}
    c.task.extract, c.task.template = r": (.*?) =$", {shown!r} + "{{prompt}}\\n"
    c.environment.max_turns, c.environment.turn_tokens = 6, {turn_tokens}
    c.sft.out = c.model.path = {base!r}
    c.sft.examples, c.sft.slip_rate, c.sft.steps = 20480, 0.7, {warm_steps}
    c.sft.batch_rows, c.sft.pack_tokens, c.sft.learning_rate, c.sft.warmup_steps = 8, 256, 5e-3, 100
    c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 64, 2, 192
    c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 4, 2, 32
    c.rollout.slots, c.rollout.decode_steps, c.rollout.residents = 64, 4, 3
    c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 32, 288
    c.orchestrator.groups_per_step, c.orchestrator.group_size = {groups}, {size}
    c.orchestrator.inflight = 1.5
    c.trainer.pack_tokens, c.trainer.micro_batches = 320, 8
    c.checkpoint.every, c.eval.every = {steps}, 0
    c.journal.keep_all = True
    return c
"""
WARM = ("--config.environment.name=tests.soak.agent_training.Tools", "--config.environment.observation=-> {content}\n")
TRAIN = (
    "--config.task.rewards=()",
    "--config.serving.train=True",
    "--config.serving.reward_s=60",
    "--config.serving.session_idle_s=60",
    "--config.serving.port={port}",
)
ENGINE = (  # of `dora_jax.serve`, as the run's
    "--config.rollout.slots=64",
    "--config.rollout.decode_steps=4",
    "--config.rollout.max_prompt_tokens=32",
    "--config.rollout.max_new_tokens=288",
)


class Tools:
    """What a policy that calls `add` and `subtract` says, for the warm start: an environment that only shows dialogues."""

    terms = ("right",)
    replays = True

    @staticmethod
    def worked(prompt: EpisodePrompt, slips: bool) -> list[str]:
        """One call after the other, then the number. The slip is to stop one early."""
        first, *rest = prompt.text.removeprefix(SHOWN).split()
        total, turns = int(first), []
        pairs = list(zip(rest[::2], map(int, rest[1::2]), strict=True))
        for sign, number in pairs[:-1] if slips else pairs:
            turns.append(CALL.format("add" if sign == "+" else "subtract", total, number))
            total += number if sign == "+" else -number
        return [*turns, f"#### {total}"]

    async def reset(self, prompt: EpisodePrompt) -> list[Message]:
        return []

    async def step(self, message: Message) -> tuple[list[Message], bool, dict[str, float]]:
        text = str(message["content"])
        if text.startswith("#"):
            return [], True, {"right": 0.0}
        call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        a, b = call["arguments"].values()
        return [{"role": "tool", "content": str(a + b if call["name"] == "add" else a - b)}], False, {}

    async def close(self) -> None:
        """Nothing is open."""


class Run:
    """One run in a folder, and what its agent was answered."""

    def __init__(self, args: argparse.Namespace, name: str, seed: int, shuffled: bool = False):
        self.folder, self.python = args.workdir / name, args.envs / "openai-agents" / "bin" / "python"
        self.seed, self.shuffled, self.base = seed, shuffled, args.workdir / "base"
        self.workdir, self.steps = self.folder / "run", args.steps
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config = self.folder / "config.py"
        sizes = {"groups": GROUPS, "size": SIZE, "turn_tokens": TURN_TOKENS, "warm_steps": args.warm_steps}
        self.config.write_text(
            CONFIG.format(steps=args.steps, seed=seed, shown=SHOWN, base=str(self.base.resolve()), **sizes)
        )

    def warm(self) -> None:
        """Makes the base where it is missing."""
        if not (self.base / "config.json").exists():
            folders = (f"--config={self.config}", f"--workdir={self.folder}/sft")
            subprocess.run([sys.executable, "-m", "dora_jax.sft", *folders, *WARM], check=True, env=_environment())
        (self.base / "chat_template.jinja").write_text(TEMPLATE)

    @contextlib.contextmanager
    def agent(self, port: int, log: str, **asked: Any) -> Iterator[subprocess.Popen[bytes]]:
        """The agent at work; what it hears goes to the log."""
        plan = self.folder / f"{log}.asked.json"
        plan.write_text(json.dumps({"turn_tokens": TURN_TOKENS, "seed": self.seed} | asked))
        command = [self.python, "-P", PROGRAM, f"http://127.0.0.1:{port}", CLIENT, plan]
        with (self.folder / f"{log}.jsonl").open("wb") as out, (self.folder / f"{log}.err").open("wb") as err:
            process = subprocess.Popen([*map(str, command)], stdout=out, stderr=err)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()

    def answers(self, log: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / f"{log}.jsonl").read_text().splitlines()]

    def train(self, questions: list[str]) -> None:
        shutil.rmtree(self.workdir, ignore_errors=True)
        command = ["dora_jax.train", f"--config={self.config}", f"--workdir={self.workdir}", *TRAIN]
        command.append(f"--config.task.shuffle_rewards={self.shuffled}")
        with serving(self.folder / "train.log", *command) as (port, process):
            asked = {"questions": questions, "sessions": SIZE, "at_once": GROUPS, "temperatures": TEMPERATURES}
            with self.agent(port, "train", train=True, **asked):
                code = process.wait()
        if code:
            raise SystemExit(f"the run ended with exit code {code}: see {self.folder}/train.log")

    def heldout(self, log: str, source: str, questions: list[str]) -> float:
        """The share of these sums that the agent gets right, by what `source` serves."""
        with serving(self.folder / f"{log}.log", "dora_jax.serve", source, "--port={port}", *ENGINE) as (port, _):
            asked = {"questions": questions, "sessions": 1, "at_once": 32, "temperatures": [None]}
            with self.agent(port, log, train=False, **asked) as agent:
                if agent.wait():
                    raise SystemExit(f"the agent failed: see {self.folder}/{log}.err")
        right = [session["right"] for session in self.answers(log)]
        assert len(right) == len(questions), f"{len(right)} of {len(questions)} sums were answered: {log}.err"
        return sum(right) / len(right)

    def proved(self) -> str:
        """What of the journal agrees with what the agent was answered. AssertionError: not all of it."""
        answered: collections.Counter[Any] = collections.Counter()
        for session in self.answers("train"):
            versions = {turn["version"] for turn in session["turns"]}
            heat = float(np.float32(session["temperature"] or 0.0))
            turns = tuple((tuple(turn["ids"]), tuple(turn["logprobs"]), heat) for turn in session["turns"])
            if len(versions) == 1:
                answered[(versions.pop(), turns), float(session["right"])] += 1
        made = trained(self.workdir)
        assert len(made) == self.steps * GROUPS * SIZE, f"{len(made)} trajectories were trained"
        taken = collections.Counter((trajectory, reward) for trajectory, reward, _ in made)
        assert not taken - answered, (
            f"{(taken - answered).total()} trained trajectories are not what the agent was answered"
        )
        every = [turn for (_, turns), _, _ in made for turn in turns]
        tokens, own = sum(len(ids) for ids, _, _ in every), sum(heat > 0 for _, _, heat in every)
        by = len({version for (version, _), _, _ in made})
        return (
            f"{len(made)} trajectories of {len(every)} turns and {tokens} tokens by {by} versions: each token's "
            f"version and log-prob, each temperature ({own} turns had their own) and each reward is what the agent was answered"
        )

    def rescored(self) -> float:
        """The largest difference between log-probs of trained turns of version 0 and those that the endpoint gives their
        text as a prompt, at the temperature of each turn, where it was not the run's."""
        found, gaps = [sample for _, _, sample in trained(self.workdir) if sample.version == 0], []
        with serving(self.folder / "again.log", "dora_jax.serve", f"--model={self.base}", "--port={port}", *ENGINE) as (
            port,
            _,
        ):
            for sample in found[:32]:
                heats = sample.table.temperatures
                if heats is None:
                    continue
                own = heats[len(sample.prompt_ids) - 1 :]
                for heat in {float(x) for x in own[own > 0]}:
                    body = {"prompt": [*sample.prompt_ids.tolist(), *sample.out_ids.tolist()], "temperature": heat}
                    body |= {"echo": True, "logprobs": 1, "max_tokens": 0}
                    asked = urllib.request.Request(
                        f"http://127.0.0.1:{port}/v1/completions",
                        json.dumps(body).encode(),
                        {"content-type": "application/json"},
                    )
                    with urllib.request.urlopen(asked) as answer:
                        again = json.load(answer)["choices"][0]["logprobs"]["token_logprobs"][len(sample.prompt_ids) :]
                    gaps.append(np.abs(np.array(again, np.float32) - sample.logprobs)[sample.mask & (own > 0)].max())
        assert gaps, "no trained turn of version 0 had a temperature of its own"
        return float(max(gaps))


def trained(workdir: Path) -> list[tuple[Any, float, Any]]:
    """(version, turns and their log-probs and temperatures), reward and sample of every trained trajectory."""
    journal = EventLog(FileLogStore(workdir / "journal", read_only=True))
    found = []
    for step in replay(journal, journal.segments(), lambda sentence: None).steps:
        for group in step.groups:
            for sample, reward in zip(group.samples, group.rewards, strict=True):
                edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.mask, [False]]).astype(int)))
                heats = sample.table.temperatures
                turns = tuple(
                    (
                        tuple(sample.out_ids[start:stop].tolist()),
                        tuple(sample.logprobs[start:stop].tolist()),
                        0.0 if heats is None else float(heats[len(sample.prompt_ids) - 1 + start]),
                    )
                    for start, stop in edges.reshape(-1, 2).tolist()
                )
                assert not sample.branches and len(sample.spans) == 1
                found.append(((sample.version, turns), float(reward), sample))
    return found


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def sums() -> tuple[list[str], list[str]]:
    """(for training, held out)."""
    every = [
        f"{a} {s} {b} {t} {c}" for a, b, c in itertools.product(range(1, 10), repeat=3) for s in "+-" for t in "+-"
    ]
    random.Random(0).shuffle(every)
    return every[HELDOUT:], every[:HELDOUT]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, required=True, help="folder of the clients' environments")
    parser.add_argument("--install", action="store_true", help="make the environment where it is missing")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--controls", default="0", help="seeds of runs whose rewards are permuted")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm_steps", type=int, default=1500)
    parser.add_argument("--workdir", type=Path, default=Path("runs/agent_training"))
    args = parser.parse_args()
    if args.install:
        install(args.envs, ["openai-agents"])
    os.environ["PYTHONPATH"] = str(ROOT)
    questions, held_out = sums()
    seeds = [(int(seed), kind) for kind in ("seeds", "controls") for seed in getattr(args, kind).split(",") if seed]
    first = Run(args, "before", 0)
    first.warm()
    before = first.heldout("heldout", f"--model={first.base}", held_out)
    print(f"held-out sums right, of {HELDOUT}: {before:.1%} before", flush=True)
    wrong = 0
    for seed, kind in seeds:
        shuffled = kind == "controls"
        run, began_s = Run(args, f"{kind}{seed}", seed, shuffled), time.monotonic()
        run.train(questions)
        took_s = time.monotonic() - began_s
        after = run.heldout("heldout", f"--workdir={run.workdir}", held_out)
        name = f"rewards permuted, seed {seed}" if shuffled else f"seed {seed}"
        print(f"{name}: {after:.1%} after {args.steps} steps ({took_s:.0f} s)", flush=True)
        print(f"  {run.proved()}", flush=True)
        gap = run.rescored()
        print(
            f"  turns of version 0 at their own temperature, scored again: log-probs differ by {gap:.1e} at most",
            flush=True,
        )
        wrong += gap > 1e-4 or (after > before + 0.1) == shuffled
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
