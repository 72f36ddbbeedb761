"""A run of many processes on this machine, whose processes and machines are taken away one by one, then its books.

    python -m tests.soak.gang_kills [--each=3 | --minutes=120] [--kinds=rollout-kill,...] [--seed=0] [--users=4]
                                    [--workdir=DIR] [--config=configs/quickstart.py:tiny] [-- --config.field=value ...]
    ... --kinds=node-kill,node-freeze [--hosts=2] [--spare=1]    on a local Ray cluster of fake TPU slices
    RAY_ADDRESS=HOST:PORT ... -- --config.cluster.launcher=ray --config.cluster.devices_per_host=1
                                                on a Ray cluster that is there, and outlives the controller

A kind names whose process it is and what happens to it: a kill is SIGKILL, a freeze SIGSTOP, a notice SIGTERM, upon
which a gang hands over and leaves; `resize` asks for one instance less, then for all again; `controller-kill` ends the
controller alone and starts the same command again, which must take over the gangs that are there; a node is a raylet
with all that it started, one host of a slice of `hosts`, and another slice takes the place of this one: with a spare
one afterwards, else the gang has to wait for it; a drain is what Ray learns of a node that is about to go. A blow
falls once all gangs are up and another step has been published. One row a kind: seconds until the loss is noted, until a
new gang is up, and until it does its work again (an instance is at once, the trainer when it is back at its version);
of a controller "noted" means that the next one has its first gang, and at work that another step is published.
At the end the books of the whole run, from its journal:
    issued = trained + filtered + failed + in flight; lost, trained twice, generated again: 0

--minutes: rounds of all kinds, each in an order of its own, until so many minutes have passed, or until Ctrl-C.
--users: clients of the run's endpoint, one short request after the other. Before each blow the processes are looked at;
per tenth of the time one row has the most memory, open descriptors and threads of a process by role, the processes that
there are, the bytes of the workdir, and the users' seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil

from dora_jax.runtime.journal.object_storage import WANTED
from tests.soak.gang_run import PROCESSES, WatchedRun, new_parser, running, settle
from tests.soak.hostile_clients import MB, Clients, percentiles

KINDS = (
    "rollout-kill",
    "rollout-freeze",
    "rollout-notice",
    "resize",
    "trainer-kill",
    "trainer-freeze",
    "trainer-notice",
    "controller-kill",
)
NODE_KINDS = ("node-kill", "node-freeze", "node-notice", "node-drain")
BLOWS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "notice": signal.SIGTERM}


def main() -> None:
    flags = _flags()
    draw = random.Random(flags.seed)
    kinds = flags.kinds.split(",")
    slices = _slices(flags) if set(kinds) & set(NODE_KINDS) else None
    launcher = _on_slices(slices.type, flags) if slices else PROCESSES
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    launcher = [*launcher, *([f"--config.serving.port={port}"] if flags.users else [])]
    times: dict[str, list[tuple[float, float, float]]] = {}
    looks: list[Look] = []
    began = time.monotonic()
    with contextlib.closing(slices) if slices else contextlib.nullcontext(), running(flags, launcher, slices) as run:
        users = Clients(port, flags.users)
        with contextlib.suppress(KeyboardInterrupt):
            for kind in _blows(kinds, flags, draw):
                run.ready(flags.gangs)
                looks.append(look(run))
                time.sleep(draw.uniform(0, 1))
                times.setdefault(kind, []).append(_strike(run, kind, draw))
                print(
                    f"  {kind:16} noted {times[kind][-1][0]:5.1f} s  up {times[kind][-1][1]:5.1f} s  at work "
                    f"{times[kind][-1][2]:5.1f} s",
                    flush=True,
                )
        run.ready(flags.gangs)
        looks.append(look(run))
        users.end()
    _table(times)
    _resources(looks, began, users)
    settle(run, f"{run.steps} steps")


def _blows(kinds: list[str], flags: argparse.Namespace, draw: random.Random) -> Iterator[str]:
    """Each kind `each` times, or rounds of all until the minutes are over."""
    blows = [kind for kind in kinds for _ in range(1 if flags.minutes else flags.each)]
    until = time.monotonic() + 60 * flags.minutes
    for number in itertools.count():
        draw.shuffle(blows)
        if number and not flags.minutes:
            return
        for kind in blows:
            if number and time.monotonic() >= until:
                return
            yield kind


@dataclasses.dataclass
class Look:
    """What the processes of a run hold at one time. most: memory in bytes, descriptors and threads of the process that
    has the most, by role."""

    at: float
    steps: int
    processes: int  # of this command, Ray's included
    workdir_bytes: int
    most: dict[str, tuple[int, int, int]]


def look(run: WatchedRun) -> Look:
    most: dict[str, tuple[int, int, int]] = {}
    for name, pids in {"controller": [run.process.pid], **run.pids}.items():
        for pid in pids:
            process = psutil.Process(pid)
            memory, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
            role = name.split()[0]
            other = most.get(role, (0, 0, 0))
            most[role] = max(memory, other[0]), max(files, other[1]), max(threads, other[2])
    held_bytes = 0
    for folder, _, names in os.walk(run.folder):  # which passes over what the run has just removed
        for each in names:
            with contextlib.suppress(FileNotFoundError):
                held_bytes += os.stat(os.path.join(folder, each)).st_size
    processes = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            processes += child.status() != psutil.STATUS_ZOMBIE  # Ray reads no exit code of what was killed
    return Look(time.monotonic(), run.steps, processes, held_bytes, most)


def _strike(run: WatchedRun, kind: str, draw: random.Random) -> tuple[float, float, float]:
    """Seconds until the loss is noted, a new gang is up, and at work."""
    role, _, blow = kind.partition("-")
    if role == "controller":
        return _strike_controller(run)
    if role == "resize":
        return _resize(run)
    gang = draw.choice(sorted(name for name in run.pids if role == "node" or name.startswith(role)))
    pid, back = draw.choice(run.pids[gang]), run.back
    if blow == "drain":
        began = run.slices.drain(pid)
    elif role == "node":
        began = run.slices.take(pid, BLOWS[blow])
    else:
        began = time.monotonic()
        os.kill(pid, BLOWS[blow])
    run.wait(f"{kind}: the loss of {gang}", lambda: gang not in run.pids)
    reported_s = time.monotonic() - began
    if role == "node" and not run.slices.spare:
        run.slices.replace()
    run.wait(f"a new {gang}", lambda: gang in run.pids)
    up_s = time.monotonic() - began
    if gang == "trainer":
        run.wait("the trainer's return", lambda: run.back > back)
    work_s = time.monotonic() - began
    if role == "node" and run.slices.spare:
        run.slices.replace()
    return reported_s, up_s, work_s


def _resize(run: WatchedRun) -> tuple[float, float, float]:
    """Change the number of instances; its seconds include the wait for the next look at that number."""
    file, wanted = run.folder / WANTED, sum(name.startswith("rollout") for name in run.pids)
    last = f"rollout {wanted - 1}"
    file.write_text(f"{wanted - 1}\n")
    left_s = run.wait(f"the end of {last}", lambda: last not in run.pids)
    file.write_text(f"{wanted}\n")
    up_s = run.wait(f"a new {last}", lambda: last in run.pids)
    return left_s, up_s, up_s


def _slices(flags: argparse.Namespace) -> Any:
    from tests.soak.fake_slices import FakeSlices  # needs Ray, an extra

    slices = FakeSlices(flags.gangs, flags.spare, flags.hosts)
    os.environ["RAY_ADDRESS"] = slices.address
    return slices


def _on_slices(slice_type: str, flags: argparse.Namespace) -> list[str]:
    """Every gang has a slice of its own, a device of each host, and a model that these can divide among them."""
    hosts = flags.hosts
    return [
        "--config.cluster.launcher=ray",
        f"--config.cluster.trainer_slice={slice_type}",
        f"--config.cluster.instance_slice={slice_type}",
        f"--config.cluster.trainer_hosts={hosts}",
        f"--config.cluster.hosts_per_instance={hosts}",
        "--config.cluster.devices_per_host=1",
        f"--config.rollout.tensor={hosts}",
        f"--config.sft.n_kv_heads={hosts}",
        f"--config.sft.out={flags.workdir / 'base'}",
        f"--config.model.path={flags.workdir / 'base'}",
    ]


def _strike_controller(run: WatchedRun) -> tuple[float, float, float]:
    """The same command again; the gangs are those that were there."""
    before = dict(run.pids)
    began = time.monotonic()
    run.process.kill()
    run.process.wait()
    run.start()
    run.wait("a gang", lambda: bool(run.pids))
    reported_s = time.monotonic() - began
    run.wait("all gangs", lambda: len(run.pids) == len(before))
    up_s = time.monotonic() - began
    if run.pids != before:
        raise RuntimeError(f"the controller has not taken over {before}: there are {run.pids}")
    steps = run.steps
    run.wait("a step", lambda: run.steps > steps)
    return reported_s, up_s, time.monotonic() - began


def _table(times: dict[str, list[tuple[float, float, float]]]) -> None:
    print(
        f"{'kind':16} {'blows':>5}  {'noted s: median':>15} {'max':>5}  {'up s: median':>12} {'max':>5}  "
        f"{'at work s: median':>17} {'max':>5}"
    )
    for kind, rows in times.items():
        reported, up, work = (sorted(column) for column in zip(*rows, strict=True))
        middle = len(rows) // 2
        print(
            f"{kind:16} {len(rows):>5}  {reported[middle]:>15.2f} {reported[-1]:>5.1f}  {up[middle]:>12.1f} {up[-1]:>5.1f}  "
            f"{work[middle]:>17.1f} {work[-1]:>5.1f}"
        )


def _resources(looks: list[Look], began: float, users: Clients) -> None:
    """One row a tenth of the time."""
    ends = [began + (looks[-1].at - began) * (i + 1) / 10 for i in range(10)]
    roles = sorted(looks[0].most)
    print(
        f"{'minute':>6} {'steps':>6} {'processes':>9} {'workdir MiB':>11}  "
        + "  ".join(f"{role + ': MiB files threads':>28}" for role in roles)
    )
    for since, until in itertools.pairwise([began, *ends]):
        part = [each for each in looks if since < each.at <= until]
        if not part:
            continue
        columns = [tuple(map(max, *(each.most[role] for each in part * 2))) for role in roles]
        print(
            f"{(until - began) / 60:>6.0f} {part[-1].steps:>6} {max(each.processes for each in part):>9} "
            f"{part[-1].workdir_bytes / MB:>11.1f}  "
            + "  ".join(f"{held / MB:>14.0f} {files:>5} {threads:>7}" for held, files, threads in columns)
        )
        if taken := users.of(since, until):
            print(percentiles("  users", taken))
    print(f"users: {len(users.times)} requests, failed {dict(users.failed) or 'none'}")


def _flags() -> argparse.Namespace:
    parser = new_parser(__doc__, "runs/gang_kills", gangs=3)
    parser.add_argument("--each", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--users", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--spare", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
