"""A run of many processes on this machine, whose processes and machines are taken away one by one, then its books.

    python -m tests.soak.gang_kills [--each=3] [--kinds=rollout-kill,...] [--seed=0] [--workdir=DIR]
                                    [--config=configs/quickstart.py:tiny] [-- --config.field=value ...]
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
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import time
from typing import Any

from dora_jax.runtime.journal.object_storage import WANTED
from tests.soak.gang_run import PROCESSES, WatchedRun, new_parser, running, settle

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
    blows = [kind for kind in flags.kinds.split(",") for _ in range(flags.each)]
    draw.shuffle(blows)
    slices = _slices(flags) if set(blows) & set(NODE_KINDS) else None
    launcher = _on_slices(slices.type, flags) if slices else PROCESSES
    times: dict[str, list[tuple[float, float, float]]] = {}
    with contextlib.closing(slices) if slices else contextlib.nullcontext(), running(flags, launcher, slices) as run:
        for kind in blows:
            run.ready(flags.gangs)
            time.sleep(draw.uniform(0, 1))
            times.setdefault(kind, []).append(_strike(run, kind, draw))
            print(
                f"  {kind:16} noted {times[kind][-1][0]:5.1f} s  up {times[kind][-1][1]:5.1f} s  at work "
                f"{times[kind][-1][2]:5.1f} s",
                flush=True,
            )
        run.ready(flags.gangs)
    _table(times)
    settle(run, f"{run.steps} steps")


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
    run.wait(f"the loss of {gang}", lambda: gang not in run.pids)
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


def _flags() -> argparse.Namespace:
    parser = new_parser(__doc__, "runs/gang_kills", gangs=3)
    parser.add_argument("--each", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--spare", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
