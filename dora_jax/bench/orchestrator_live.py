"""What share of one core the orchestrator takes in a fleet at work, in real time: reports, ends, moves, deaths, R, parts.

    python -m dora_jax.bench.orchestrator_live [--instances=10000] [--seconds=60] [--residents=1] [--updates=4]

A body in virtual time: 100 slots an instance, log-normal answers of about 3,000 tokens on average (sigma 1, at most
12,000) at 30 tokens/s, every instance reports its samples and its pages once a second, an instance is lost every `mtbf_s`
of instance time. The load keeps every slot busy, and a step takes a quarter of the groups that run. Samples of the first
second are somewhere in their answers, so that the fleet is at work from the start. Only `Orchestrator.step` is timed, in CPU time of its thread; the share is that time by the virtual time that went by
since the fleet was full. The collector runs as in production (runtime/loop.py).
"""

from __future__ import annotations

import argparse
import collections
import heapq
import itertools
import random
import time
from typing import Any

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.loop import quiet_collector
from dora_jax.types import SampleId

SLOTS, GROUP_SIZE, IN_FLIGHT, STEPS_IN_FLIGHT = 100, 16, 15.0, 4
MEAN_TOKENS, MAX_TOKENS, TOKENS_PER_S, VERSIONS = 3000, 12_000, 30.0, 16
PROMPT_TOKENS, PAGE_SIZE, PAGES = 512, 64, 100 * 120
LOAD_S, MOVE_S, SCORE_S, BACK_S, REPORT_S = 2.0, 0.2, 0.5, 60.0, 1.0


class Body:
    """Answers commands in virtual time."""

    def __init__(self, instances: int, residents: int, updates: int, mtbf_s: float, seed: int = 0):
        groups = max(updates, instances * SLOTS // GROUP_SIZE // STEPS_IN_FLIGHT // updates * updates)
        self.config = OrchestratorConfig(
            groups_per_step=groups, group_size=GROUP_SIZE, total_steps=1000, inflight=IN_FLIGHT, updates=updates,
            max_versions=VERSIONS,
            max_prompt_tokens=PROMPT_TOKENS, max_new_tokens=MAX_TOKENS, expected_new_tokens=MEAN_TOKENS,
            rebalance_period_s=10.0)
        self.brain = Orchestrator(self.config)
        self.draw = random.Random(seed)
        self.residents, self.mtbf_s = residents, mtbf_s
        self.now = 0.0
        self.heap: list[tuple[float, int, Any, tuple]] = []
        self.count = itertools.count()
        self.runs: list[dict[SampleId, float]] = [{} for _ in range(instances)]  # sample -> when it had no token
        self.lives = [0] * instances
        self.sampled: dict[SampleId, int] = {}  # of samples that run nowhere
        self.left: dict[int, int] = {}
        self.batch = 0
        self.cpu: collections.Counter[str] = collections.Counter()  # ns
        self.events: collections.Counter[str] = collections.Counter()
        self.worst = (0, "")
        for i in range(instances):
            self.at(0.0, self.up, i)
            self.at(self.draw.random() * REPORT_S, self.report, i)
        self.at(0.0, self.clock)

    def run(self, until_s: float) -> None:
        while self.heap[0][0] <= until_s:
            self.now, _, call, args = heapq.heappop(self.heap)
            call(*args)

    def at(self, delay_s: float, call: Any, *args: Any) -> None:
        heapq.heappush(self.heap, (self.now + delay_s, next(self.count), call, args))

    def tell(self, event: ev.Event) -> None:
        name = type(event).__name__
        began = time.thread_time_ns()
        commands = self.brain.step(event)
        took = time.thread_time_ns() - began
        self.cpu[name] += took
        self.events[name] += 1
        self.worst = max(self.worst, (took, name))
        for command in commands:
            self._COMMANDS[type(command)](self, command)

    # ------------------------------------------------------------------ facts

    def clock(self) -> None:
        self.at(0.1, self.clock)
        self.tell(ev.TimePassed(now_s=self.now))

    def up(self, i: int) -> None:
        self.lives[i] += 1
        if self.mtbf_s:
            self.at(self.draw.expovariate(1 / self.mtbf_s), self.down, i, self.lives[i])
        self.tell(ev.InstanceUp(instance=i, slots=SLOTS, pages=PAGES, page_size=PAGE_SIZE, residents=self.residents,
                                life=self.lives[i]))

    def down(self, i: int, life: int) -> None:
        runs, self.runs[i] = self.runs[i], {}
        self.sampled |= {id: self.tokens(began) for id, began in runs.items()}
        self.at(BACK_S, self.up, i)
        self.tell(ev.InstanceDown(instance=i, reason="lost", life=life))

    def report(self, i: int) -> None:
        self.at(REPORT_S, self.report, i)
        if runs := self.runs[i]:
            tokens = tuple(map(self.tokens, runs.values()))
            self.tell(ev.SamplesProgressed(instance=i, ids=tuple(runs), tokens=tokens, life=self.lives[i]))
            free = max(0, PAGES - sum(tokens) // PAGE_SIZE - len(runs) * PROMPT_TOKENS // PAGE_SIZE)
            self.tell(ev.PagesReported(instance=i, free=free, life=self.lives[i]))

    def tokens(self, began: float) -> int:
        return int((self.now - began) * TOKENS_PER_S)

    def done(self, i: int, life: int, id: SampleId, began: float) -> None:
        if self.runs[i].get(id) != began or self.lives[i] != life:
            return
        del self.runs[i][id]
        self.left[id.group_id] -= 1
        if not self.left[id.group_id]:
            del self.left[id.group_id]
            self.at(SCORE_S, self.tell, ev.GroupScored(group_id=id.group_id, trainable=self.draw.random() > 0.02))
        self.tell(ev.SampleDone(id=id, instance=i, tokens=self.tokens(began), finish="stop", life=life))

    def place(self, i: int, id: SampleId, sampled: int) -> None:
        length = min(MAX_TOKENS, random.Random(hash(id)).lognormvariate(7.55, 1.0))
        if self.now < 3.0:  # LOAD_S, and a little
            sampled = int(self.draw.random() * length)
        began = self.runs[i][id] = self.now - sampled / TOKENS_PER_S
        self.at(max(0.0, began + length / TOKENS_PER_S - self.now), self.done, i, self.lives[i], id, began)

    # ------------------------------------------------------------------ commands

    def _start(self, command: ev.Start) -> None:
        for id in command.ids:
            self.left.setdefault(id.group_id, GROUP_SIZE)
            self.place(command.instance, id, 0)
            self.at(0.05, self.tell, ev.SampleStarted(id=id, instance=command.instance, version=command.version,
                                                      life=self.lives[command.instance]))

    def _resume(self, command: ev.Resume) -> None:
        for id in command.ids:
            self.place(command.instance, id, self.sampled.pop(id, 0))
            self.at(0.05, self.tell, ev.SampleResumed(id=id, instance=command.instance, life=self.lives[command.instance]))

    def _load(self, command: ev.LoadWeights) -> None:
        i = command.instance
        self.at(LOAD_S, self.tell, ev.WeightsLoaded(instance=i, version=command.version, life=self.lives[i]))

    def _move(self, command: ev.Move) -> None:
        for id in command.ids:
            began = self.runs[command.src].pop(id, None)
            if began is not None:
                self.at(MOVE_S, self.moved, command, id, began, self.lives[command.dst])
            else:
                self.at(0.0, self.tell, ev.MoveFailed(id=id, src=command.src, dst=command.dst, attempt=command.attempt,
                                                      reason="finished"))

    def moved(self, command: ev.Move, id: SampleId, began: float, life: int) -> None:
        if self.lives[command.dst] == life:
            self.place(command.dst, id, self.tokens(began))
        else:
            self.sampled[id] = self.tokens(began)
        self.tell(ev.SampleMoved(id=id, src=command.src, dst=command.dst, attempt=command.attempt))

    def _park(self, command: ev.Park) -> None:
        for id in command.ids:
            began = self.runs[command.instance].pop(id, None)
            if began is not None:
                self.sampled[id] = self.tokens(began)
                self.at(0.02, self.tell, ev.SampleParked(id=id, instance=command.instance, life=self.lives[command.instance]))

    def _train(self, command: ev.Train) -> None:
        self.batch += len(command.group_ids)
        if self.batch == self.config.groups_per_step:
            self.batch = 0
            self.at(20.0, self.tell, ev.StepPublished(version=command.base_version + 1))

    def _nothing(self, command: ev.Command) -> None:
        """Weights take no room here."""

    _COMMANDS = {ev.Start: _start, ev.Resume: _resume, ev.LoadWeights: _load, ev.Move: _move, ev.Park: _park,
                 ev.Train: _train, ev.Retire: _nothing}  # fmt: skip


def measure(instances: int, seconds: float, residents: int, updates: int, mtbf_s: float, fill_s: float) -> str:
    body = Body(instances, residents, updates, mtbf_s)
    with quiet_collector():
        body.run(fill_s)
        body.cpu.clear(), body.events.clear()
        body.worst = (0, "")
        body.run(fill_s + seconds)
    live, summary = sum(map(len, body.runs)), body.brain.summary()
    share = sum(body.cpu.values()) / 1e9 / seconds
    lines = [f"{instances} instances, {live} live samples, R = {residents}, {updates} parts, {seconds:.0f} s of the fleet: "
             f"{share:.1%} of one core, {sum(body.events.values()) / seconds:,.0f} events/s, slowest step "
             f"{body.worst[0] / 1e6:.0f} ms ({body.worst[1]}); base {summary['base']}, moves {summary['moves']}, reloads "
             f"{summary['reloads']}, dropped {summary['dropped']}"]
    lines += [f"    {name:<18} {n / seconds:>9,.0f}/s {body.cpu[name] / 1e3 / n:>9.1f} us {body.cpu[name] / 1e9 / seconds:>7.1%}"
              for name, n in sorted(body.events.items())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--fill_s", type=float, default=60.0, help="until the fleet is full, not timed")
    parser.add_argument("--residents", type=int, default=1)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--mtbf_s", type=float, default=100_000.0, help="of one instance; 0: none is lost")
    print(measure(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
