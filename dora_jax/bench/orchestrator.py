"""Events a second and the slowest single step of the orchestrator, with every slot of a fleet busy.

    python -m dora_jax.bench.orchestrator [--instances=100,1000,10000] [--mode=dora] [--steps=2]

A driver without time answers each command at once and ends samples in random order (fixed seed): all samples of a
fleet of `instances` x 100 slots run, groups are scored as they end, each training step ends after half of the next
one's groups are done. Only `Orchestrator.step` is timed, in CPU time of its thread, so that neighbours on the machine
do not show. The fleet fills before the clock starts; the slowest step of the fill has a column of its own.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import deque

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.types import SampleId

SLOTS = 100
GROUP_SIZE = 16
IN_FLIGHT = 1.25
TOKENS = 256  # of every sample; it says so twice before it ends


class Fleet:
    """Answers commands; ends running samples one by one."""

    def __init__(self, instances: int, mode: str, steps: int, seed: int):
        self.groups = max(1, int(instances * SLOTS / GROUP_SIZE / IN_FLIGHT))
        self.config = OrchestratorConfig(
            mode=mode, groups_per_step=self.groups, group_size=GROUP_SIZE, total_steps=steps, inflight=IN_FLIGHT,
            max_prompt_tokens=64, max_new_tokens=TOKENS, rebalance_period_s=10.0,
        )  # fmt: skip
        self.brain = Orchestrator(self.config)
        self.random = random.Random(seed)
        self.facts: deque[ev.Event] = deque()
        self.running: list[SampleId] = []
        self.place: dict[SampleId, list] = {}  # sample -> [instance, index in running, progress reports so far]
        self.left: dict[int, int] = {}
        self.training: int | None = None
        self.trained_after = 0
        self.now_s = 0.0
        self.halted = False
        self.times: dict[str, list[int]] = {}
        for i in range(instances):
            self.facts.append(ev.InstanceUp(instance=i, slots=SLOTS, pages=SLOTS * 20, page_size=16))

    def run(self, events: int | None) -> int:
        """Feed up to `events` events (None: until the run halts); returns how many."""
        fed = 0
        while not self.halted and (events is None or fed < events):
            event = self.facts.popleft() if self.facts else self._next()
            if event is None:
                break
            began = time.thread_time_ns()
            commands = self.brain.step(event)
            self.times.setdefault(type(event).__name__, []).append(time.thread_time_ns() - began)
            fed += 1
            for command in commands:
                getattr(self, "_" + type(command).__name__.lower())(command)
        return fed

    def _next(self) -> ev.Event | None:
        """The next fact of a body in which everything that was asked for has happened."""
        if self.training is not None and (self.trained_after <= 0 or not self.running):
            version, self.training = self.training, None
            return ev.StepPublished(version=version)
        if not self.running:
            return None
        id = self.running[self.random.randrange(len(self.running))]
        row = self.place[id]
        row[2] += 1
        if row[2] < 3:
            return ev.SamplesProgressed(instance=row[0], ids=(id,), tokens=(TOKENS * row[2] // 3,))
        self._drop(id)
        self._ended(id)
        self.now_s += 60.0 / (self.groups * GROUP_SIZE)
        if self.random.random() < 0.01:
            self.facts.append(ev.TimePassed(now_s=self.now_s))
        return ev.SampleDone(id=id, instance=row[0], tokens=TOKENS, finish="stop")

    def _drop(self, id: SampleId) -> None:
        index = self.place.pop(id)[1]
        last = self.running.pop()
        if last != id:
            self.running[index] = last
            self.place[last][1] = index

    def _ended(self, id: SampleId) -> None:
        self.left[id.group_id] -= 1
        if not self.left[id.group_id]:
            del self.left[id.group_id]
            self.facts.append(ev.GroupScored(group_id=id.group_id, trainable=self.random.random() > 0.02))
            self.trained_after -= 1

    def _start(self, command: ev.Start) -> None:
        for id in command.ids:
            self.left.setdefault(id.group_id, GROUP_SIZE)
            self.place[id] = [command.instance, len(self.running), 0]
            self.running.append(id)
            self.facts.append(ev.SampleStarted(id=id, instance=command.instance, version=command.version))

    def _loadweights(self, command: ev.LoadWeights) -> None:
        self.facts.append(ev.WeightsLoaded(instance=command.instance, version=command.version))

    def _move(self, command: ev.Move) -> None:
        for id in command.ids:
            self.place[id][0] = command.dst
            self.facts.append(ev.SampleMoved(id=id, src=command.src, dst=command.dst, attempt=command.attempt))

    def _park(self, command: ev.Park) -> None:
        for id in command.ids:
            self._drop(id)
            self.facts.append(ev.SampleParked(id=id, instance=command.instance))

    def _resume(self, command: ev.Resume) -> None:
        for id in command.ids:
            self.place[id] = [command.instance, len(self.running), 0]
            self.running.append(id)
            self.facts.append(ev.SampleResumed(id=id, instance=command.instance))

    def _cancel(self, command: ev.Cancel) -> None:
        for id in command.ids:
            if id in self.place:
                self._drop(id)
                self.left.pop(id.group_id, None)
                self.facts.append(ev.SampleCancelled(id=id, reason=command.reason))

    def _train(self, command: ev.Train) -> None:
        self.training = command.base_version + 1
        self.trained_after = self.groups // 2

    def _retire(self, command: ev.Retire) -> None:
        pass

    def _halt(self, command: ev.Halt) -> None:
        assert command.ok, command.reason
        self.halted = True


def measure(instances: int, mode: str, steps: int) -> dict[str, object]:
    gc.disable()  # the orchestrator leaves no reference cycles behind; a controller of this size runs without
    fleet = Fleet(instances, mode, steps, seed=0)
    fleet.run(instances * (2 + SLOTS))  # instances up, weights loaded, every slot taken
    filled = {name: max(values) for name, values in fleet.times.items()}
    fleet.times = {}
    events = fleet.run(None)
    every = sorted(t for values in fleet.times.values() for t in values)
    name, worst = max(((name, max(values)) for name, values in fleet.times.items()), key=lambda item: item[1])
    summary = fleet.brain.summary()
    return {
        "instances": instances,
        "events": events,
        "median_us": every[len(every) // 2] / 1e3,
        "mean_us": sum(every) / len(every) / 1e3,
        "p99_us": every[len(every) * 99 // 100] / 1e3,
        "worst_ms": worst / 1e6,
        "worst_event": name,
        "fill_worst_ms": max(filled.values()) / 1e6,
        "events_per_s": len(every) / (sum(every) / 1e9),
        "moves": summary["moves"],
        "reloads": summary["reloads"],
        "by_event": {k: (len(v), sorted(v)[len(v) // 2] / 1e3, max(v) / 1e6) for k, v in fleet.times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", default="100,1000,10000")
    parser.add_argument("--mode", default="dora")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--by_event", action="store_true", help="a line for each kind of event")
    args = parser.parse_args()
    columns = ("instances", "events", "median_us", "mean_us", "p99_us", "worst_ms", "worst_event", "fill_worst_ms",
               "events_per_s", "moves", "reloads")  # fmt: skip
    print("  ".join(f"{c:>13}" for c in columns))
    for count in (int(n) for n in args.instances.split(",")):
        row = measure(count, args.mode, args.steps)
        cells = (f"{row[c]:.1f}" if isinstance(row[c], float) else str(row[c]) for c in columns)
        print("  ".join(f"{cell:>13}" for cell in cells), flush=True)
        if args.by_event:
            for name, (n, median_us, worst_ms) in sorted(row["by_event"].items()):
                print(f"    {name:<16} {n:>9} events, median {median_us:7.1f} us, slowest {worst_ms:8.2f} ms")


if __name__ == "__main__":
    main()
