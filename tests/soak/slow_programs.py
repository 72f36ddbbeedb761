"""Environments that are slow, many at once: no episode fails, and a run's step takes as long as the simulator says.

    python -m tests.soak.slow_programs [--waits=1000] [--blocks=200] [--programs=64] [--seconds=5] [--steps=6]

waits     episodes at once whose tool awaits `seconds`
blocks    episodes at once whose tool blocks a thread for `seconds`; environment.threads of them do at a time
programs  episodes at once of the PythonTool whose programs compute for 1.5 s each, at environment.step_timeout_s = 5
step      the run of end_to_end.py at the pace of a chip, with the same environments in processes of their own in place
          of paced ones: two turns a sample in the mean, `seconds` between them, 2.4 times `waits` samples in flight.
          Both tools, each beside the simulator's prediction

Exits with 1 where an episode failed, or a step took over `most_off` longer or shorter than predicted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dora_jax.bench import harness
from dora_jax.config import EnvironmentSection
from dora_jax.sim import config as sims
from dora_jax.sim.config import Row, SimConfig
from dora_jax.sim.run import simulate
from dora_jax.tasks.environments import EnvironmentPool
from dora_jax.tasks.environments.bridge import Bridge
from dora_jax.types import EpisodeEnded, EpisodeFailed, EpisodeSoFar, Observed, Prompt, SampleId
from tests.fakes.episode_player import LETTERS, Player
from tests.soak import end_to_end
from tests.soak.end_to_end import TurnsOf

TOOLS = {"waits": "tests.fakes.environments.Obedient", "blocks": "tests.fakes.environments.Blocking"}
SAYS = {"waits": "sleep {} ", "blocks": "{} a"}
COMPUTES_S, DEADLINE_S = 1.5, 5.0
PROGRAM = """```python
import time
end = time.process_time() + {}
while time.process_time() < end: pass
print(42)
```"""


def pool_of(name: str, deadline_s: float, threads: int = 64) -> EnvironmentPool:
    section = EnvironmentSection(name=name, step_timeout_s=deadline_s, observation="{content}", threads=threads)
    letters: Any = LETTERS  # what a bridge asks of a tokenizer
    return EnvironmentPool(section, Bridge(letters, section.observation), seed=0)


def at_once(name: str, episodes: int, message: str, deadline_s: float) -> tuple[list[Any], float]:
    """The answers of so many episodes that are asked at once, and how long the last took."""
    pool = pool_of(name, deadline_s)
    try:
        pool.wait_ready()
        began_s, found = time.monotonic(), list[Any]()
        for i in range(episodes):
            Player(pool, SampleId(i, 0)).say(message)
        while len(found) < episodes:
            found += pool.poll()
            time.sleep(0.01)
        return found, time.monotonic() - began_s
    finally:
        pool.close()


class PooledEnvironments:
    """`Environments` of a paced run: what lies between two turns is asked of a pool's processes."""

    def __init__(self, turns: TurnsOf, pool: EnvironmentPool, message: str):
        self._turns, self._pool, self._message = turns, pool, np.array([ord(c) for c in message], np.int32)
        self._ended: list[EpisodeEnded] = []
        self._observed: dict[SampleId, int] = {}
        self.failed: list[EpisodeFailed] = []
        self.most = 0  # that have waited at once

    def open(self, id: SampleId, prompt: Prompt) -> None:
        self._pool.open(id, prompt)

    def turn(self, prompt: Prompt, so_far: EpisodeSoFar) -> None:
        """The message asks the tool for its wait, whatever the oracle sampled."""
        turn = self._turns.behind(so_far.id, len(so_far.mask))
        if turn is None:
            self._pool.drop(so_far.id)
            self._ended.append(EpisodeEnded(id=so_far.id, terms={}))
            return
        self._observed[so_far.id] = turn.observation_tokens
        tokens = np.append(prompt.token_ids, self._message)
        message = EpisodeSoFar(
            id=so_far.id,
            version=so_far.version,
            tokens=tokens,
            mask=np.ones(len(self._message), bool),
            logprobs=np.zeros(len(self._message), np.float32),
            room=so_far.room,
        )
        self._pool.turn(prompt, message)
        self.most = max(self.most, self._pool.waiting)

    def drop(self, id: SampleId) -> dict[str, float]:
        return self._pool.drop(id)

    def poll(self) -> Sequence[Any]:
        answers, self._ended = list[Any](self._ended), []
        for answer in self._pool.poll():
            if isinstance(answer, EpisodeFailed):
                self.failed.append(answer)
            elif isinstance(answer, Observed) and len(answer.token_ids):
                answer = Observed(id=answer.id, token_ids=np.zeros(self._observed[answer.id], np.int32))
            answers.append(answer)
        return answers

    def stats(self) -> dict[str, float]:
        return self._pool.stats()

    def close(self) -> None:
        self._pool.close()


def row_of(waits: int, seconds: float, steps: int) -> Row:
    """Two instances of a chip that decode for less time than the tool takes, so that the tool is what a step waits for;
    the trainer is quick."""
    groups = max(2, waits // 10)
    config = sims.replace(SimConfig(), {
        "steps": 2 + steps, "warmup_steps": 2, "report_tokens": 1, "model.params": 1.5e9, "model.n_layers": 28,
        "model.d_model": 1536, "model.n_heads": 12, "model.head_dim": 128, "model.kv_bytes_per_token": 28672.0,
        "hardware.chip": "v5e", "hardware.chips": 3, "hardware.rollout_chips": 2, "hardware.tensor": 1,
        "hardware.slots": max(8, waits // 2), "hardware.residents": 3, "cost.decode_overhead_s": 0.03,
        "workload.mean_tokens": 24.0, "workload.max_new_tokens": 96, "workload.sigma": 0.3,
        "workload.prompt_tokens": 16.0, "workload.max_prompt_tokens": 32, "workload.turns": 2.0,
        "workload.environment_s": seconds, "workload.environment_sigma": 0.0, "workload.observation_tokens": 4,
        "orchestrator.groups_per_step": groups, "orchestrator.group_size": 8, "orchestrator.inflight": 3.0})  # fmt: skip
    return Row(label="dora", mode="dora", config=config, published={})


def slow_programs(waits=1000, blocks=200, programs=64, seconds=5.0, steps=6, most_off=0.10) -> Iterator[str]:
    failed = 0
    asked = {
        "waits": (TOOLS["waits"], waits, SAYS["waits"].format(seconds), seconds + 3),
        "blocks": (TOOLS["blocks"], blocks, SAYS["blocks"].format(seconds), seconds + 3),
        "programs": ("dora_jax.tasks.code.PythonTool", programs, PROGRAM.format(COMPUTES_S), DEADLINE_S),
    }
    for kind, (name, episodes, message, deadline_s) in asked.items():
        if not episodes:
            continue
        answers, took_s = at_once(name, episodes, message, deadline_s)
        bad = [answer for answer in answers if not isinstance(answer, Observed)]
        failed += len(bad)
        yield f"{kind:9} {episodes:5} episodes at once, {len(bad)} failed, {took_s:6.1f} s" + f"   {bad[:1] or ''}"
    off = 0.0
    for kind, number in (("waits", waits), ("blocks", blocks)) if steps else ():
        row = row_of(number, seconds, steps)
        predicted = simulate(row).step_s
        pool = pool_of(TOOLS[kind], seconds + 3, threads=512)
        pool.wait_ready()
        made: list[PooledEnvironments] = []

        def environments(turns: TurnsOf, pool=pool, kind=kind, made=made) -> PooledEnvironments:
            made.append(PooledEnvironments(turns, pool, SAYS[kind].format(seconds)))
            return made[0]

        ran = end_to_end.run(row, 1.0, environments)
        failed += len(made[0].failed)
        off = max(off, abs(ran.step_s / predicted - 1))
        yield (
            f"step, {kind:6} predicted {predicted:.2f} s, run {ran.step_s:.2f} s ({ran.step_s / predicted - 1:+.1%}); "
            f"{made[0].most} episodes waited at once, {len(made[0].failed)} failed"
        )
    if failed or off > most_off:
        print(f"{failed} episodes failed; a step is {off:.1%} off", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    harness.run(slow_programs)
