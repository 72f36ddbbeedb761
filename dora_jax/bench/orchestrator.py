"""What share of one core the orchestrator takes in front of a fleet at work, in real time: its events, reports, ends,
moves, deaths, its snapshots and the cycle collector.

    python -m dora_jax.bench.orchestrator [--instances=10000] [--seconds=60] [--residents=1] [--updates=4]

A body in virtual time: 100 slots an instance, log-normal answers of 3,000 tokens on average (sigma 1, at most 12,000)
at 30 tokens/s: at a million live samples 10,000 start and as many end in a second. Every instance reports once in
`report_s`, and its samples as often as those of a run of that size (runtime/instances/rollout_worker.py,
`progress_period_s`); one is lost every `mtbf_s` of instance time, and a step takes a quarter of the groups that run.
The fleet works for `warm_s` first, without reports until the last seconds. With `aged` its first groups are found at
any point, as those of a fleet that has worked for long: steps follow each other from the start, versions
come and go, and samples move. Without, a group ends only once its longest answer does, minutes later.

Facts come together for as long as the coordinator of such a fleet waits (runtime/coordinator.py, `gather_s`). Timed is
the CPU of the thread in `commit` and `decide`; the share is that by the virtual time that went by. Kinds of facts are
distinguished in one batch of `SAMPLED`. A snapshot is made each `snapshot_s` as a controller makes it: by a forked
child (runtime/journal/event_log.py). `codec` adds what a controller's journal and wire do with the same facts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import heapq
import inspect
import itertools
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from dora_jax.bench import harness
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator, quiet_collector
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.coordinator import gather_s
from dora_jax.runtime.instances.rollout_worker import progress_period_s
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.records import CODEC, Fact, batches
from dora_jax.runtime.journal.recovery import head_records
from dora_jax.types import SampleId

SLOTS, GROUP_SIZE, IN_FLIGHT, STEPS_IN_FLIGHT, VERSIONS = 100, 16, 15.0, 4, 16
SIGMA, MU, MAX_TOKENS, MEAN_TOKENS, TOKENS_PER_S = 1.0, 7.59, 12_000, 3_000, 30.0
PROMPT_TOKENS, PAGE_SIZE, PAGES = 512, 64, 100 * 120
LOAD_S, MOVE_S, SCORE_S, STEP_S, BACK_S = 2.0, 0.2, 0.5, 10.0, 60.0
BEGIN_S, PARK_S, CLOCK_S, UP_S = 0.05, 0.02, 0.1, 5.0
LENGTHS = 1 << 16
REPORTS_BEFORE_S = 20.0  # the clock starts: instances look at their samples at their first reports
SYNC_S = 0.5  # as a run's journal
SAMPLED = 8
AGED_S = 12.0  # groups that are admitted in this time are of any age


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    instances: int = 10_000
    seconds: float = 60.0  # of the fleet, timed
    warm_s: float = 200.0  # of the fleet, before that
    residents: int = 1  # versions an instance holds (R)
    updates: int = 4  # parts of a step
    mode: str = "dora"
    report_s: float = 1.0
    aged: bool = False
    mtbf_s: float = 100_000.0  # of one instance; 0: none is lost
    snapshot_s: float = 60.0  # 0: none is made
    codec: bool = False  # what journal and wire cost, too


class Cost:
    """CPU of this thread, and the collector's passes."""

    def __init__(self) -> None:
        self.batch_ns = self.batches = 0
        self.kind_ns: collections.Counter[str] = collections.Counter()  # in one batch of SAMPLED; decisions are a kind
        self.sampled: collections.Counter[str] = collections.Counter()
        self.events: collections.Counter[str] = collections.Counter()
        self.worst_ns = self.worst_facts = 0
        self.encode_ns = self.decode_ns = self.bytes = 0
        self.snapshot_ns = self.snapshots = 0
        self.fork_s: list[float] = []  # that the loop stood still
        self.children_s = children_s()
        self.collector_ns = self.passes = 0
        self._began_ns = 0

    def codec(self, events: list[ev.Event], journal: EventLog) -> None:
        """The journal's record is written; of the wire, what came is read."""
        came = [messages.CODEC.encode(event) for event in events]
        began = time.thread_time_ns()
        for batch in batches([Fact(event=event, payload=None) for event in events]):
            data = CODEC.encode(batch)
            journal.append(data)
            self.bytes += len(data)
        encoded = time.thread_time_ns()
        for data in came:
            messages.CODEC.decode(data)
        self.encode_ns += encoded - began
        self.decode_ns += time.thread_time_ns() - encoded

    def collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_ns = time.thread_time_ns()
        else:
            self.collector_ns += time.thread_time_ns() - self._began_ns
            self.passes += 1


class Body:
    """Answers commands in virtual time."""

    def __init__(self, options: Options, folder: str, seed: int = 0):
        self.journal = EventLog(FileLogStore(folder), sync_s=SYNC_S)
        self.options, self.draw = options, random.Random(seed)
        groups = options.instances * SLOTS // GROUP_SIZE // STEPS_IN_FLIGHT
        per_step = max(1, groups // options.updates) * options.updates
        self.brain = Orchestrator(OrchestratorConfig(
            mode=options.mode, groups_per_step=per_step, group_size=GROUP_SIZE, total_steps=1000, inflight=IN_FLIGHT,
            updates=options.updates, max_versions=VERSIONS, max_prompt_tokens=PROMPT_TOKENS, max_new_tokens=MAX_TOKENS,
            expected_new_tokens=3000, rebalance_period_s=10.0))  # fmt: skip
        self.cost = Cost()
        self.lengths = [min(MAX_TOKENS, 1 + int(self.draw.lognormvariate(MU, SIGMA))) for _ in range(LENGTHS)]
        self.first_lengths = self.draw.choices(self.lengths, self.lengths, k=LENGTHS)  # of what runs at any moment
        self.first_groups = 0
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable, tuple]] = []
        self.facts: list[ev.Event] = []  # that come together
        self.gather_s = gather_s(options.instances)
        self.progress_s = progress_period_s(options.instances, SLOTS)
        self.listed_s = [self.draw.random() * self.progress_s - self.progress_s for _ in range(options.instances)]
        self.ages: dict[int, float] = {}  # of the first groups, in tokens
        self.count = itertools.count()
        # of each instance: sample -> tokens that it would have had at time 0
        self.runs: list[dict[SampleId, float]] = [{} for _ in range(options.instances)]
        self.incarnations = [0] * options.instances
        self.sampled: dict[SampleId, float] = {}  # of samples that run nowhere
        self.left: dict[int, int] = {}
        self.batch = 0
        self.at(0.0, self.clock)
        for i in range(options.instances):
            self.at(UP_S * self.draw.random(), self.up, i)
            self.at(max(0.0, options.warm_s - REPORTS_BEFORE_S) + self.draw.random() * options.report_s, self.report, i)
        self.journal.rotate(head_records(self.brain, PayloadState(), 0))
        if options.snapshot_s:
            self.at(options.warm_s + options.snapshot_s / 2, self.snapshot)

    def run(self, until_s: float) -> None:
        while self.heap[0][0] <= until_s:
            self.now, _, call, args = heapq.heappop(self.heap)
            call(*args)

    def at(self, delay_s: float, call: Callable, *args: Any) -> None:
        heapq.heappush(self.heap, (self.now + delay_s, next(self.count), call, args))

    def tell(self, event: ev.Event) -> None:
        if not self.facts:
            self.at(self.gather_s, self.hear)
        self.facts.append(event)

    def hear(self) -> None:
        events, self.facts, cost = self.facts, [], self.cost
        if self.options.codec:
            cost.codec(events, self.journal)
        began = time.thread_time_ns() - cost.collector_ns
        commands = self.timed(events) if not cost.batches % SAMPLED else self.brain.step(*events)
        took_ns = time.thread_time_ns() - cost.collector_ns - began
        cost.batch_ns += took_ns
        cost.batches += 1
        cost.events.update(type(event).__name__ for event in events)
        if took_ns > cost.worst_ns:
            cost.worst_ns, cost.worst_facts = took_ns, len(events)
        for command in commands:
            self.execute(command)

    def timed(self, events: list[ev.Event]) -> tuple[ev.Command, ...]:
        """Time one `step`."""
        cost, now_ns = self.cost, time.perf_counter_ns
        at = now_ns()
        for event in events:
            self.brain.commit(event)
            name, began, at = type(event).__name__, at, now_ns()
            cost.kind_ns[name] += at - began
            cost.sampled[name] += 1
        at = now_ns()
        commands = self.brain.decide()
        cost.kind_ns["decisions"] += now_ns() - at
        cost.sampled["decisions"] += 1
        return commands

    # ------------------------------------------------------------------ facts

    def clock(self) -> None:
        self.at(CLOCK_S, self.clock)
        self.tell(ev.TimePassed(now_s=self.now))
        if self.options.codec:
            began = time.thread_time_ns()
            self.journal.commit()
            self.cost.encode_ns += time.thread_time_ns() - began

    def snapshot(self) -> None:
        self.at(self.options.snapshot_s, self.snapshot)
        began, began_s = time.thread_time_ns(), time.monotonic()
        self.journal.rotate_behind(functools.partial(head_records, self.brain, PayloadState(), 0))
        self.cost.fork_s.append(time.monotonic() - began_s)
        self.cost.snapshot_ns += time.thread_time_ns() - began
        self.turn()

    def turn(self) -> None:
        began = time.thread_time_ns()
        if self.journal.rotated() is not None:
            self.cost.snapshots += 1
        self.cost.snapshot_ns += time.thread_time_ns() - began
        if self.journal.rotating:
            self.at(CLOCK_S, self.turn)

    def later(self, delay_s: float, event: type, i: int, **fields: Any) -> None:
        """An event of the instance as it is now."""
        self.at(delay_s, self.tell, event(instance=i, incarnation=self.incarnations[i], **fields))

    def up(self, i: int) -> None:
        self.incarnations[i] += 1
        if self.options.mtbf_s:
            self.at(self.draw.expovariate(1 / self.options.mtbf_s), self.down, i, self.incarnations[i])
        self.tell(ev.InstanceUp(
            instance=i, slots=SLOTS, pages=PAGES, page_size=PAGE_SIZE, residents=self.options.residents,
            incarnation=self.incarnations[i]))  # fmt: skip

    def down(self, i: int, incarnation: int) -> None:
        runs, self.runs[i] = self.runs[i], {}
        self.sampled |= {id: self.now * TOKENS_PER_S + zero for id, zero in runs.items()}
        self.at(BACK_S, self.up, i)
        self.tell(ev.InstanceDown(instance=i, reason="lost", incarnation=incarnation))

    def report(self, i: int) -> None:
        self.at(self.options.report_s, self.report, i)
        runs, incarnation = self.runs[i], self.incarnations[i]
        if self.now < self.listed_s[i] + self.progress_s:
            used = len(runs) * (PROMPT_TOKENS + MEAN_TOKENS) // PAGE_SIZE
            self.tell(ev.InstanceReported(instance=i, free=max(0, PAGES - used), incarnation=incarnation))
        elif runs:
            self.listed_s[i] = self.now
            now_tokens = self.now * TOKENS_PER_S
            tokens = tuple([int(now_tokens + zero) for zero in runs.values()])
            free = max(0, PAGES - (sum(tokens) + len(runs) * PROMPT_TOKENS) // PAGE_SIZE)
            groups, indices = zip(*runs, strict=True)
            self.tell(ev.InstanceReported(
                instance=i, free=free, groups=groups, indices=indices, tokens=tokens, incarnation=incarnation,
                sampled=int(len(runs) * TOKENS_PER_S), busy_s=1.0, row_s=float(len(runs))))  # fmt: skip

    def done(self, i: int, incarnation: int, id: SampleId, zero: float) -> None:
        if self.runs[i].get(id) != zero or self.incarnations[i] != incarnation:
            return
        del self.runs[i][id]
        self.left[id.group_id] -= 1
        if not self.left[id.group_id]:
            del self.left[id.group_id]
            self.at(SCORE_S, self.tell, ev.GroupScored(group_id=id.group_id, trainable=self.draw.random() > 0.02))
        self.tell(ev.SampleDone(id=id, instance=i, tokens=self.length(id), finish="stop", incarnation=incarnation))

    def length(self, id: SampleId) -> int:
        return (self.first_lengths if id.group_id < self.first_groups else self.lengths)[hash(id) % LENGTHS]

    def place(self, i: int, id: SampleId, sampled: float) -> None:
        first = not self.options.aged and self.now < UP_S + 2 * LOAD_S
        self.first_groups = max(self.first_groups, first * (id.group_id + 1))
        length = self.length(id)
        if first:  # the first samples are somewhere in their answers
            sampled = self.draw.random() * length
        elif self.options.aged:
            if id.group_id not in self.ages and self.now < AGED_S:
                self.ages[id.group_id] = self.draw.random() * MAX_TOKENS
            sampled = max(sampled, min(length - 1, self.ages.get(id.group_id, 0.0)))
        zero = self.runs[i][id] = sampled - self.now * TOKENS_PER_S
        self.at(max(2 * BEGIN_S, (length - sampled) / TOKENS_PER_S), self.done, i, self.incarnations[i], id, zero)

    # ------------------------------------------------------------------ commands

    def execute(self, command: ev.Command) -> None:
        """Retire and Discard ask nothing: weights take no room here."""
        match command:
            case ev.Start(instance=i):
                for id in command.ids:
                    self.left.setdefault(id.group_id, GROUP_SIZE)
                    self.place(i, id, 0.0)
                    self.later(BEGIN_S, ev.SampleStarted, i, id=id, version=command.version, attempt=command.attempt)
            case ev.Resume(instance=i):
                for id in command.ids:
                    self.place(i, id, self.sampled.pop(id, 0.0))
                    self.later(BEGIN_S, ev.SampleResumed, i, id=id, attempt=command.attempt)
            case ev.LoadWeights(instance=i, version=version, attempt=attempt):
                self.later(LOAD_S, ev.WeightsLoaded, i, version=version, attempt=attempt)
            case ev.Move(src=src, dst=dst):
                way = {"src": src, "dst": dst, "attempt": command.attempt}
                for id in command.ids:
                    if (zero := self.runs[src].pop(id, None)) is None:
                        self.at(0.0, self.tell, ev.MoveFailed(id=id, **way, reason="finished"))
                        continue
                    sampled = self.now * TOKENS_PER_S + zero
                    self.at(MOVE_S, self.moved, ev.SampleMoved(id=id, **way), sampled, self.incarnations[dst])
            case ev.Park(instance=i):
                for id in command.ids:
                    if (zero := self.runs[i].pop(id, None)) is not None:
                        self.sampled[id] = self.now * TOKENS_PER_S + zero
                        self.later(PARK_S, ev.SampleParked, i, id=id)
            case ev.Cancel(instance=i):
                for id in command.ids:
                    (self.sampled if i is None else self.runs[i]).pop(id, None)
                    self.at(0.0, self.tell, ev.SampleCancelled(id=id, reason=command.reason))
            case ev.Train():
                self.batch = (self.batch + len(command.group_ids)) % self.brain.state.config.groups_per_step
                if not self.batch:
                    self.at(STEP_S, self.tell, ev.StepPublished(version=command.base_version + 1))

    def moved(self, event: ev.SampleMoved, sampled: float, incarnation: int) -> None:
        if self.incarnations[event.dst] == incarnation:
            self.place(event.dst, event.id, sampled)
        else:
            self.sampled[event.id] = sampled
        self.tell(event)


def children_s() -> float:
    """CPU of children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(options: Options) -> Body:
    """The fleet after its time; `cost` is of the timed part."""
    with tempfile.TemporaryDirectory() as folder, quiet_collector():
        body = Body(options, folder)
        body.run(options.warm_s)
        cost = body.cost = Cost()
        gc.callbacks.append(cost.collected)
        body.run(options.warm_s + options.seconds)
        while body.journal.rotating:
            body.turn()
        gc.callbacks.remove(cost.collected)
        cost.children_s = children_s() - cost.children_s
        body.journal.close()
    return body


def report(body: Body) -> Iterator[str]:
    options, cost, summary = body.options, body.cost, body.brain.summary()
    seconds, live = options.seconds, sum(map(len, body.runs))
    events = sum(cost.events.values())
    share = {
        "the orchestrator": cost.batch_ns,
        "the collector": cost.collector_ns,
        "snapshots": cost.snapshot_ns,
        "their children": int(cost.children_s * 1e9),
    }
    yield (
        f"{options.instances:,} instances, {live:,} live samples, R = {options.residents}, {options.updates} parts, "
        f"{seconds:.0f} s of the fleet: {sum(share.values()) / 1e9 / seconds:.1%} of one core ("
        f"{', '.join(f'{name} {ns / 1e9 / seconds:.1%}' for name, ns in share.items())})"
    )
    yield (
        f"    {events / seconds:,.0f} events/s of {events / max(1, cost.batch_ns) * 1e9:,.0f} that one core takes, "
        f"{events / max(1, cost.batches):,.0f} a batch; slowest {cost.worst_ns / 1e6:.1f} ms "
        f"({cost.worst_facts} events); {cost.passes} passes of the collector"
    )
    yield (
        f"    {cost.snapshots} snapshots, for each of which the loop stood still for at most "
        f"{1e3 * max(cost.fork_s, default=0):.0f} ms and a child worked for "
        f"{cost.children_s / max(1, cost.snapshots):.1f} s"
    )
    yield (
        f"    base {summary['base']}, {len(summary['versions'])} versions, moves {summary['moves']}, reloads "
        f"{summary['reloads']}, dropped {summary['dropped']}"
    )
    yield (
        f"    the orchestrator's memory {_bytes(body.brain) / max(1, live):,.0f} bytes a live sample; the process with "
        f"its fleet {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )
    for name, n in sorted((cost.events | {"decisions": cost.batches}).items()):
        us = cost.kind_ns[name] / 1e3 / max(1, cost.sampled[name])
        yield f"    {name:<18} {n / seconds:>9,.0f}/s {us:>9.1f} us {us * n / 1e6 / seconds:>7.1%}"
    if options.codec:
        yield (
            f"    journal and wire: {cost.bytes / seconds / 1e6:.1f} MB/s, to write them "
            f"{cost.encode_ns / 1e9 / seconds:.1%}, to read them {cost.decode_ns / 1e9 / seconds:.1%} of one core"
        )


def _bytes(brain: Orchestrator) -> int:
    """Everything that the orchestrator's state holds."""
    seen, found, total = {id(brain.state.config)}, [brain.state], 0
    while found:
        item = found.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        found += gc.get_referents(item)
    return total


def orchestrator(**flags: Any) -> Iterator[str]:
    yield from report(measure(Options(**flags)))


orchestrator.__signature__ = inspect.signature(Options)  # type: ignore[attr-defined]

if __name__ == "__main__":
    harness.run(orchestrator)
