"""A version from a trainer to instances, in processes of their own, by both wires: what each stage takes, what the model
of the simulator says to that, and what it says of 8B, 32B and 560B.

    python -m dora_jax.bench.publish [--mib=1024] [--instances=1,2] [--rounds=3] [--folder=FOLDER] [--rank=0]

The trainer casts its masters (f32, fsdp=4) as a run does, the instances have the engine of a run (tensor=2); a version
for n instances has mib/n MiB in bfloat16, so that all fit. With a rank a version is an adapter of such a model.
copy       the cast on the trainer's shards; the next step waits for it
transfer   from Wanted until every instance has committed: `first` and `all`; GiB/s of all instances together
empty      the same with almost no bytes, for one instance: what the phases and the control plane cost
storage    the trainer writes the version to FOLDER (default: a temporary one), then every instance reads it
pause      the engine takes the version that lies in host memory; h2d: the same bytes onto the same devices, alone
model      `sim.network.publication` with the speeds of a quarter of the size and one instance, over what is measured
The floors: memcpy onto pages already there and onto fresh ones, and one TCP connection between two processes.
Medians of the rounds, after one that is not counted. Controller, trainer and instances share the cores.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dora_jax.base.chips import CHIPS
from dora_jax.bench.publish_processes import Cluster, model_of, size_of
from dora_jax.runtime.transfer.weight_distribution import STORAGE, WIRE
from dora_jax.sim.network import Speeds, publication, speeds_of

MIB = 1 << 20
GIB = 1 << 30
SIZES = (
    ("8B", 8.2e9, "v5e", 64, 4, 16),
    ("8B", 8.2e9, "v6e", 64, 4, 16),
    ("32B", 32.8e9, "v5p", 64, 4, 16),
    ("560B", 560e9, "v5p", 512, 32, 16),
)  # parameters, chip, the trainer's, an instance's, instances
HOST_TCP_BYTES_PER_S = 3.6e9  # between two v6e hosts, as others measured it


# ------------------------------------------------------------------ floors


def memcpy_bytes_s(size: int, fresh: bool) -> float:
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        source.copy() if fresh else np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return size / min(times)


def tcp_bytes_s(size: int) -> float:
    """One connection over loopback, into memory that is there; best of three."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = multiprocessing.get_context("spawn").Process(target=_send, args=(server.getsockname(), size))
        child.start()
        target, times = memoryview(bytearray(size)), []
        peer, _ = server.accept()
        with peer:
            for _ in range(3):
                began, got = time.perf_counter(), 0
                peer.sendall(b"g")
                while got < size:
                    got += peer.recv_into(target[got:])
                times.append(time.perf_counter() - began)
        child.join()
    return size / min(times)


def _send(address: tuple[str, int], size: int) -> None:
    data = bytes(size)
    with socket.create_connection(address) as peer:
        while peer.recv(1):
            peer.sendall(data)


# -------------------------------------------------------------------- table


def measure(path: str, instances: int, mib: float, rounds: int, folder: str | None, rank: int) -> dict[str, float]:
    """Median seconds of each stage."""
    with tempfile.TemporaryDirectory(dir=folder) as place, Cluster(instances, mib, path, Path(place), rank) as cluster:
        times = [cluster.publish(version) for version in range(rounds + 1)][1:]
    return {name: statistics.median(each[name] for each in times) for name in times[0]}


def speeds_from(size: int, times: dict[str, float]) -> Speeds:
    """Of this machine, whose cores carry both ends: a transfer and the joining behind it are one figure."""
    return Speeds(
        copy=size / times["copy"],
        home=size / times["home"],
        out=size / times["all"],
        into=size / times["all"],
        join=float("inf"),
        place=size / times["pause"],
    )


def table(args: argparse.Namespace) -> Iterator[str]:
    """Lines, each as soon as it is measured."""
    rank = args.rank
    quarter = size_of(model_of(args.mib / 4), rank)
    calibrated = speeds_from(quarter, measure(WIRE, 1, args.mib / 4, args.rounds, args.folder, rank))
    yield (
        f"speeds at {quarter / MIB:.0f} MiB, GiB/s: copy {calibrated.copy / GIB:.2f}, wire "
        f"{calibrated.into / GIB:.2f}, pause {calibrated.place / GIB:.2f}"
    )
    yield (
        f"{'path':10s}{'instances':>9s}{'MiB':>6s}{'empty ms':>10s}{'copy s':>8s}{'write s':>9s}{'first s':>9s}"
        f"{'all s':>8s}{'GiB/s':>7s}{'pause s':>9s}{'h2d s':>7s}{'model/measured all':>20s}{'pause':>7s}"
    )
    for name, path in (("transfer", WIRE), ("storage", STORAGE)):
        small = measure(path, 1, 0, args.rounds, args.folder, rank)["all"]
        for instances in [int(r) for r in args.instances.split(",")]:
            mib = args.mib / instances
            size = size_of(model_of(mib), rank)
            t = measure(path, instances, mib, args.rounds, args.folder, rank)
            said = publication(size, calibrated, instances)
            ratios = f"{(said.last_s - said.copy_s - said.home_s) / t['all']:20.2f}" if path == WIRE else " " * 20
            yield (
                f"{name:10s}{instances:9d}{size / MIB:6.0f}{small * 1e3:10.1f}{t['copy']:8.2f}{t['write']:9.2f}"
                f"{t['first']:9.2f}{t['all']:8.2f}{instances * size / t['all'] / GIB:7.2f}{t['pause']:9.2f}"
                f"{t['h2d']:7.2f}{ratios}{said.pause_s / t['pause']:7.2f}"
            )


def at_size() -> Iterator[str]:
    """Nothing of it is measured: the model at the hardware table's speeds."""
    yield "model, bfloat16; links at 0.7 of the hardware table's / at 3.6 GB/s a host, as measured elsewhere on v6e"
    yield (
        f"{'':6s}{'trainer':>10s}{'instances':>14s}{'copy GiB/chip':>15s}{'copy ms':>9s}{'home s':>8s}"
        f"{'first s':>16s}{'all s':>16s}{'pause s':>9s}"
    )
    for name, params, chip, trainer, instance, count in SIZES:
        fast, slow = (
            publication(2 * params, speeds_of(CHIPS[chip], trainer, CHIPS[chip], instance, 0.7, link), count)
            for link in (0.0, HOST_TCP_BYTES_PER_S)
        )
        yield (
            f"{name:6s}{f'{trainer} {chip}':>10s}{f'{count} x {instance}':>14s}{2 * params / trainer / GIB:15.2f}"
            f"{fast.copy_s * 1e3:9.1f}{fast.home_s:8.2f}{f'{fast.first_s:.2f} / {slow.first_s:.2f}':>16s}"
            f"{f'{fast.last_s:.2f} / {slow.last_s:.2f}':>16s}{fast.pause_s:9.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--instances", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder")
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    floor = min(args.mib, 256) * MIB
    print(
        f"floors, GiB/s: memcpy {memcpy_bytes_s(floor, False) / GIB:.2f}, onto fresh pages "
        f"{memcpy_bytes_s(floor, True) / GIB:.2f}, loopback TCP {tcp_bytes_s(floor) / GIB:.2f}"
    )
    for line in itertools.chain(table(args), at_size()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
