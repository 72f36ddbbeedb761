"""What share of one core the orchestrator takes in front of a fleet at work, in real time: its events, reports, ends, moves,
deaths, its snapshots and the cycle collector.

    python -m dora_jax.bench.orchestrator [--instances=10000] [--seconds=60] [--residents=1] [--updates=4]

A body in virtual time: 100 slots an instance, log-normal answers of 3,000 tokens on average (sigma 1, at most 12,000) at 30
tokens/s: at a million live samples 10,000 start and as many end in a second. Every instance reports once in `report_s`, and
its samples as often as those of a run of that size (runtime/rollout_worker.py, `progress_period_s`); one is lost every `mtbf_s` of instance time, and a step takes a quarter of the groups that run. The fleet works for
`warm_s` first, without reports until the last seconds. With `aged` its first groups are found at any point of their
lives, as those of a fleet that has worked for long: steps follow each other from the start, versions come and go, and
samples move. Without, a group ends only once its longest answer does, minutes later.

Facts come together for as long as the coordinator of such a fleet waits (runtime/coordinator.py, `gather_s`). Timed is the
CPU of the thread in `commit` and `decide`; the share is that by the virtual time that went by. Kinds of facts are told
apart in one batch of `SAMPLED`. A snapshot is made each `snapshot_s` as a controller makes it: by a forked child
(runtime/durability/event_log.py). `codec` adds what a controller's journal and wire do with the same facts.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import gc
import pstats
import resource
import sys
import tempfile
import time
from collections.abc import Iterator

from dora_jax.bench.orchestrator_fleet import Body, Cost, Options, children_s
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.loop import quiet_collector


def measure(options: Options) -> Body:
    """The fleet after its time; `cost` is of the timed part."""
    with tempfile.TemporaryDirectory() as folder, quiet_collector():
        body = Body(options, folder)
        body.run(options.warm_s)
        cost = body.cost = Cost()
        gc.callbacks.append(cost.collected)
        with _profile(options.profile):
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
        f"{1e3 * max(cost.fork_s, default=0):.0f} ms and a child worked for {cost.children_s / max(1, cost.snapshots):.1f} s"
    )
    yield (
        f"    base {summary['base']}, {len(summary['versions'])} versions, moves {summary['moves']}, reloads "
        f"{summary['reloads']}, dropped {summary['dropped']}"
    )
    yield (
        f"    the orchestrator's memory {_bytes(body.brain) / max(1, live):,.0f} bytes a live sample; the process with its "
        f"fleet {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )
    for name, n in sorted((cost.events | {"decisions": cost.batches}).items()):
        us = cost.kind_ns[name] / 1e3 / max(1, cost.sampled[name])
        yield f"    {name:<18} {n / seconds:>9,.0f}/s {us:>9.1f} us {us * n / 1e6 / seconds:>7.1%}"
    if options.codec:
        yield (
            f"    journal and wire: {cost.bytes / seconds / 1e6:.1f} MB/s, to write them {cost.encode_ns / 1e9 / seconds:.1%}, "
            f"to read them {cost.decode_ns / 1e9 / seconds:.1%} of one core"
        )


# ---------------------------------------------------------------- private


class _profile:
    """Prints the functions that took most of what is run inside."""

    def __init__(self, functions: int):
        self._functions, self._profile = functions, cProfile.Profile(time.thread_time)

    def __enter__(self) -> None:
        if self._functions:
            self._profile.enable()

    def __exit__(self, *error: object) -> None:
        self._profile.disable()
        if self._functions:
            pstats.Stats(self._profile).sort_stats("tottime").print_stats("orchestrate", self._functions)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Options):
        if field.type == "bool":
            parser.add_argument(f"--{field.name}", action="store_true")
        else:
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    for line in report(measure(Options(**vars(parser.parse_args())))):
        print(line)


if __name__ == "__main__":
    main()
