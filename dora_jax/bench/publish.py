"""A version from a trainer to instances, in processes of their own, by both wires: what each stage takes, what the
model of the simulator says to that, and what it says of 8B, 32B and 560B.

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
import functools
import itertools
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np

from dora_jax.base.chips import CHIPS
from dora_jax.bench import harness
from dora_jax.models.families import new_config
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.lora_config import Lora, adapter_params
from dora_jax.orchestrate.events import TimePassed
from dora_jax.runtime.common.codec import Codec
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.weight_distribution import STORAGE, WIRE, WeightDistribution
from dora_jax.sim.network import Speeds, publication, speeds_of
from dora_jax.types import Version

FSDP, TENSOR = 4, 2
DTYPE: Literal["bfloat16"] = "bfloat16"
LAYER_MIB, EMBED_MIB = 25.2, 64.0  # of `model_of`, in DTYPE
HERE = "127.0.0.1", b"bench"  # where the wires listen, and what they know each other by


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """The trainer makes a version; `write`: to storage too. An instance takes it into its engine."""

    version: Version
    write: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    version: Version
    seconds: tuple[float, ...]


CODEC = Codec(*ex.RECORDS, Put, Forget, Made)


def model_of(mib: float) -> ModelConfig:
    """About so large; tiny for 0."""
    if not mib:
        return new_config(
            "qwen3", vocab_size=256, d_model=64, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=64
        )
    layers = max(1, round((mib - EMBED_MIB) / LAYER_MIB))
    return new_config(
        "qwen3", vocab_size=32768, d_model=1024, n_layers=layers, n_heads=16, n_kv_heads=8, head_dim=64, d_ff=3072
    )


def size_of(model: ModelConfig, rank: int = 0) -> int:
    """Bytes in DTYPE; rank: of an adapter, which is the version then."""
    if rank:
        return round(2 * adapter_params(model, Lora(rank=rank)))
    d, heads = model.d_model, model.head_dim * (model.n_heads + model.n_kv_heads)
    layer = 2 * d * heads + 3 * d * model.d_ff + 2 * d + 2 * model.head_dim
    return 2 * (model.n_layers * layer + model.vocab_size * d + d)


def run_host(end: connection.Connection, trainer: bool, mib: float, folder: str, rank: int) -> None:
    """The trainer or an instance: executes what comes and answers."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", FSDP if trainer else TENSOR)
    side = (PublishingSide if trainer else InstanceSide)(mib, folder, rank)
    answer: Any
    while data := _next(end):
        match item := CODEC.decode(data):
            case Put(version=version):
                answer = Made(version=version, seconds=side.put(version, item.write))
            case Forget(version=version):
                side.forget(version)
                answer = Made(version=version, seconds=())
            case _:
                answer = side.host.execute(item)
        if answer is not None:
            end.send_bytes(CODEC.encode(answer))


def _next(end: connection.Connection) -> bytes | None:
    try:
        return end.recv_bytes()
    except EOFError:
        return None


def _config(rank: int) -> Any:
    from dora_jax.config import Config, ModelSection, RolloutSection
    from dora_jax.plan import presets

    rollout = RolloutSection(slots=1, max_prompt_tokens=16, max_new_tokens=16)
    return presets.filled(Config(model=ModelSection(dtype=DTYPE), rollout=rollout, lora=Lora(rank=rank)))


def _nothing(model: ModelConfig, shardings: Any) -> Any:
    """A base of zeros, as an engine takes it."""
    import jax
    import jax.numpy as jnp

    from dora_jax.models import decoder

    laid_out = functools.partial(decoder.serving_layout, layout=decoder.layout_of(shardings))
    like = jax.eval_shape(laid_out, decoder.abstract_params(model, DTYPE))
    return jax.tree.map(lambda x, where: jnp.zeros(x.shape, x.dtype, device=where), like, shardings)


class PublishingSide:
    """Masters, their copy, and what is offered of it."""

    def __init__(self, mib: float, folder: str, rank: int):
        import jax

        from dora_jax.models import sharding
        from dora_jax.publish import HostWeights
        from dora_jax.runtime.assembly import run
        from dora_jax.runtime.transfer.device_transfer import Wire
        from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint
        from dora_jax.runtime.transfer.weight_storage import StoredWeights

        model, mesh, config = model_of(mib), sharding.make_mesh(jax.devices(), 1, FSDP, 1), _config(rank)
        self._like = run.publishing_inputs(model, mesh, config.lora)
        copy: Any = run.publishing_copy(config, model, mesh)
        self._copy = copy.lower(self._like).compile()
        self._stored, self._kept = StoredWeights(folder), HostWeights()
        self.host = WeightEndpoint(0, Wire(*HERE), self._kept)

    def put(self, version: Version, write: bool) -> tuple[float, ...]:
        """Seconds of the copy, of its way to the host and to storage."""
        import jax

        from dora_jax.publish import Slices
        from dora_jax.runtime.transfer import slices

        def full(x: jax.ShapeDtypeStruct) -> jax.Array:
            part = np.full(x.sharding.shard_shape(x.shape), version + 1, x.dtype)
            return jax.make_array_from_callback(x.shape, x.sharding, lambda index: part)

        masters = jax.tree.map(full, self._like)
        began = time.perf_counter()
        copy = jax.block_until_ready(self._copy(masters))
        copied = time.perf_counter()
        del masters
        given = slices.offered(copy)
        jax.tree.map(Slices.bring_home, given)
        self._kept.put(version, given)
        home = time.perf_counter()
        if write:
            self._stored.put(version, given)
        return copied - began, home - copied, time.perf_counter() - home

    def forget(self, version: Version) -> None:
        self._kept.drop(version)


class InstanceSide:
    """An engine, and what it is sent."""

    def __init__(self, mib: float, folder: str, rank: int):
        import jax

        from dora_jax.models import sharding
        from dora_jax.publish import HostWeights
        from dora_jax.runtime.assembly import run
        from dora_jax.runtime.transfer.device_transfer import Wire
        from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint, like
        from dora_jax.runtime.transfer.weight_storage import StoredWeights

        model, config = model_of(mib), _config(rank)
        self._engine = run.engine_of(config, model, sharding.make_mesh(jax.devices(), 1, 1, TENSOR))
        if rank:
            self._engine.residents.take_base(_nothing(model, self._engine.base_shardings))
        wanted = like(model, self._engine.param_shardings, run.published(config, model))
        self.host = WeightEndpoint(0, Wire(*HERE), HostWeights(), wanted, StoredWeights(folder))

    def put(self, version: Version, write: bool) -> tuple[float, ...]:
        """Seconds that the engine stands still for it, and that the devices take for as many bytes."""
        import jax

        began = time.perf_counter()
        self._engine.load(version, self.host.weights.get(version, self._engine.param_shardings))
        pause_s = time.perf_counter() - began
        here = self.host.weights.get(version, None)
        shards = {id(array): array for leaf in jax.tree.leaves(here) for array in leaf.boxes.values()}
        if any((array != version + 1).any() for array in shards.values()):
            raise RuntimeError(f"version {version} is not what was put")
        self._engine.drop(version)
        began = time.perf_counter()
        for array in shards.values():
            jax.block_until_ready(jax.device_put(array, jax.devices()[0], may_alias=False))
        return pause_s, time.perf_counter() - began

    def forget(self, version: Version) -> None:
        self.host.weights.drop(version)


class Cluster:
    """A trainer and instances as processes, and a controller here."""

    def __init__(self, instances: int, mib: float, path: str, folder: Path, rank: int = 0):
        """rank: of the adapters that versions are; 0: they are all weights."""
        context = multiprocessing.get_context("spawn")
        self.names = ["trainer", *(f"r{i}" for i in range(instances))]
        self.path, self.folder = path, folder
        self.brain = WeightDistribution((path,), time.monotonic())
        self.ends, self.children = {}, []
        for name in self.names:
            self.ends[name], theirs = context.Pipe()
            child = context.Process(target=run_host, args=(theirs, name == "trainer", mib, str(folder), rank))
            self.children.append(child)
            child.start()
            theirs.close()
            self.brain.step(ex.WorldUp(world=name, epoch=1, hosts=1, trainer=name == "trainer"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        for end in self.ends.values():
            end.close()
        for child in self.children:
            child.join(20)

    def ask(self, name: str, what: Any) -> tuple[float, ...]:
        self.ends[name].send_bytes(CODEC.encode(what))
        return CODEC.decode(self.ends[name].recv_bytes()).seconds

    def publish(self, version: Version) -> dict[str, float]:
        """Seconds of each stage."""
        by_storage = self.path == STORAGE
        copy_s, home_s, write_s = self.ask("trainer", Put(version=version, write=by_storage))
        began = time.perf_counter()
        if by_storage:
            self.brain.step(ex.Stored(version=version, there=True))
        else:
            self.brain.step(ex.Holds(world="trainer", epoch=1, version=version))
        loaded = self._carry([ex.Wanted(world=name, version=version) for name in self.names[1:]])
        paused = [self.ask(name, Put(version=version, write=False)) for name in self.names[1:]]
        self._forget(version)
        return {
            "copy": copy_s,
            "home": home_s,
            "write": write_s,
            "first": min(loaded) - began,
            "all": max(loaded) - began,
            "pause": max(pause for pause, _ in paused),
            "h2d": min(h2d for _, h2d in paused),
        }

    def _carry(self, facts: list[ex.Fact]) -> list[float]:
        loaded: list[float] = []
        for fact in (TimePassed(now_s=time.monotonic()), *facts):  # first how late it is: deadlines count from there
            self._tell(fact, loaded)
        while self.brain.busy:
            for end in cast("list[connection.Connection]", connection.wait(self.ends.values())):
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
        for instances in args.instances:
            mib = args.mib / instances
            size = size_of(model_of(mib), rank)
            t = measure(path, instances, mib, args.rounds, args.folder, rank)
            predicted = publication(size, calibrated, instances)
            ratios = (
                f"{(predicted.last_s - predicted.copy_s - predicted.home_s) / t['all']:20.2f}"
                if path == WIRE
                else " " * 20
            )
            yield (
                f"{name:10s}{instances:9d}{size / MIB:6.0f}{small * 1e3:10.1f}{t['copy']:8.2f}{t['write']:9.2f}"
                f"{t['first']:9.2f}{t['all']:8.2f}{instances * size / t['all'] / GIB:7.2f}{t['pause']:9.2f}"
                f"{t['h2d']:7.2f}{ratios}{predicted.pause_s / t['pause']:7.2f}"
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
    args = harness.flags(__doc__, mib=1024, instances=(1, 2), rounds=3, folder=None, rank=0)
    floor = min(args.mib, 256) * MIB
    print(
        f"floors, GiB/s: memcpy {memcpy_bytes_s(floor, False) / GIB:.2f}, onto fresh pages "
        f"{memcpy_bytes_s(floor, True) / GIB:.2f}, loopback TCP {tcp_bytes_s(floor) / GIB:.2f}"
    )
    for line in itertools.chain(table(args), at_size()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
