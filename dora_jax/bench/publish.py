"""A version from one trainer process to 1 to 4 replica processes, by both paths, against what this machine can do.

    python -m dora_jax.bench.publish [--mib=256] [--replicas=1,2,4] [--rounds=3] [--folder=FOLDER]

transfer   the two-phase publication over the wire: from Wanted until every replica has committed
storage    the trainer writes the version to FOLDER (default: a temporary one), then every replica reads it
first, all   when the first replica and the last one has it; GiB/s: all replicas' bytes over the time of the last
4 KiB      the same with almost no bytes: what the phases and the control plane cost
The floors: memcpy onto pages already there and onto fresh ones, and one TCP connection between two processes.
Medians of the rounds, after one that is not counted. Controller, trainer and replicas share the cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np

from dora_jax.orchestrate.events import TimePassed
from dora_jax.runtime import exchange as ex
from dora_jax.runtime.codec import Codec
from dora_jax.runtime.publication import STORAGE, WIRE, Publication
from dora_jax.types import Version, record

MIB = 1 << 20
GIB = 1 << 30
LEAVES = 64
SMALL_BYTES = 4096


@record
class Put:
    """The trainer makes a version; `write`: to storage too."""

    version: Version
    bytes: int
    write: bool


@record
class Forget:
    version: Version


@record
class Made:
    version: Version


CODEC = Codec(*ex.RECORDS, Put, Forget, Made)


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


# --------------------------------------------------------------- processes


def run_host(end: connection.Connection, size: int, folder: str) -> None:
    """The trainer or a replica: executes what comes and answers."""
    import jax

    from dora_jax.runtime.cluster.weights import StoredWeights
    from dora_jax.runtime import slices
    from dora_jax.runtime.parcels import HOST
    from dora_jax.runtime.staging import Versions, WeightHost
    from dora_jax.runtime.wire import Wire

    jax.config.update("jax_platforms", "cpu")
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    stored = StoredWeights(Path(folder))

    def new_host(total: int) -> WeightHost:
        like = {f"{i}": jax.ShapeDtypeStruct((total // LEAVES // 4,), np.float32, sharding=one) for i in range(LEAVES)}
        return WeightHost(0, wire, versions, like, stored.read)

    wire, versions = Wire(platform=HOST), Versions()
    host = new_host(size)
    while data := _next(end):
        match item := CODEC.decode(data):
            case Put(version=version, bytes=total, write=write):
                host = new_host(total)
                tree = {f"{i}": np.full(total // LEAVES // 4, version + i, np.float32) for i in range(LEAVES)}
                versions.keep(version, slices.offered(jax.device_put(tree, one)))
                if write:
                    stored.write(version, versions.get(version, None))
                answer = Made(version=version)
            case Forget(version=version):
                versions.drop(version)
                answer = Made(version=version)
            case _:
                answer = host.execute(item)
        if answer is not None:
            end.send_bytes(CODEC.encode(answer))


def _next(end: connection.Connection) -> bytes | None:
    try:
        return end.recv_bytes()
    except EOFError:
        return None


class Cluster:
    """A trainer and replicas as processes, and a controller here."""

    def __init__(self, replicas: int, size: int, path: str, folder: Path):
        context = multiprocessing.get_context("spawn")
        self.names = ["trainer", *(f"r{i}" for i in range(replicas))]
        self.path, self.folder = path, folder
        self.brain = Publication((path,), time.monotonic())
        self.ends, self.children = {}, []
        for name in self.names:
            self.ends[name], theirs = context.Pipe()
            self.children.append(context.Process(target=run_host, args=(theirs, size, str(folder))))
            self.children[-1].start()
            theirs.close()
            self.brain.step(ex.WorldUp(world=name, epoch=1, hosts=1, trainer=name == "trainer"))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *failure: Any) -> None:
        for end in self.ends.values():
            end.close()
        for child in self.children:
            child.join(20)

    def ask(self, name: str, what: Any) -> None:
        self.ends[name].send_bytes(CODEC.encode(what))
        CODEC.decode(self.ends[name].recv_bytes())

    def publish(self, version: Version, size: int) -> tuple[float, float]:
        """Seconds until the first replica has it, and until all have."""
        by_storage = self.path == STORAGE
        if not by_storage:
            self.ask("trainer", Put(version=version, bytes=size, write=False))
        began = time.perf_counter()
        if by_storage:
            self.ask("trainer", Put(version=version, bytes=size, write=True))
            (self.folder / f"v{version}.partial").rename(self.folder / f"v{version}")
            self.brain.step(ex.Stored(version=version, there=True))
        else:
            self.brain.step(ex.Holds(world="trainer", epoch=1, version=version))
        loaded = self._carry([ex.Wanted(world=name, version=version) for name in self.names[1:]])
        self._forget(version)
        return min(loaded) - began, max(loaded) - began

    def _carry(self, facts: list[ex.Fact]) -> list[float]:
        loaded: list[float] = []
        for fact in facts:
            self._tell(fact, loaded)
        while self.brain.busy:
            for end in connection.wait(self.ends.values()):
                self._tell(CODEC.decode(end.recv_bytes()), loaded)
            self._tell(TimePassed(now_s=time.monotonic()), loaded)
        return loaded

    def _tell(self, fact: ex.Fact, loaded: list[float]) -> None:
        for item in self.brain.step(fact):
            match item:
                case ex.Loaded():
                    loaded.append(time.perf_counter())
                case ex.NotLoaded() | ex.Broken():
                    raise RuntimeError(f"{item.world}: {item.reason}")
                case _:
                    self.ends[item.world].send_bytes(CODEC.encode(item))

    def _forget(self, version: Version) -> None:
        for name in self.names:
            self.ask(name, Forget(version=version))
            self.brain.step(ex.Dropped(world=name, version=version))
        self.brain.step(ex.Stored(version=version, there=False))


# -------------------------------------------------------------------- table


def measure(path: str, replicas: int, size: int, rounds: int, new_folder: Callable[[], Path]) -> tuple[float, float]:
    with Cluster(replicas, size, path, new_folder()) as cluster:
        times = [cluster.publish(version, size) for version in range(rounds + 1)][1:]
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder")
    args = parser.parse_args()
    size = args.mib * MIB
    tcp = tcp_bytes_s(size)
    print(f"floors, GiB/s: memcpy {memcpy_bytes_s(size, False) / GIB:.2f}, onto fresh pages "
          f"{memcpy_bytes_s(size, True) / GIB:.2f}, loopback TCP {tcp / GIB:.2f}")
    print(f"{'path':10s}{'replicas':>9s}{'4 KiB ms':>10s}{f'{args.mib} MiB: first s':>18s}{'all s':>8s}{'GiB/s':>8s}"
          f"{'of TCP':>8s}")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        numbers = iter(range(1 << 20))

        def new_folder() -> Path:
            path = Path(folder) / f"{next(numbers)}"
            path.mkdir()
            return path

        for name, path in (("transfer", WIRE), ("storage", STORAGE)):
            for replicas in [int(r) for r in args.replicas.split(",")]:
                _, small = measure(path, replicas, SMALL_BYTES, args.rounds, new_folder)
                first, last = measure(path, replicas, size, args.rounds, new_folder)
                speed = replicas * size / last
                print(f"{name:10s}{replicas:9d}{small * 1e3:10.1f}{first:18.2f}{last:8.2f}{speed / GIB:8.2f}"
                      f"{speed / tcp:8.0%}", flush=True)


if __name__ == "__main__":
    main()
