"""The processes of bench.publish: a trainer that makes versions, instances that take them, and a controller here."""

from __future__ import annotations

import functools
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np

from dora_jax.models.families import new_config
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.lora_config import Lora, adapter_params
from dora_jax.orchestrate.events import TimePassed
from dora_jax.runtime.common.codec import Codec
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.weight_distribution import STORAGE, WeightDistribution
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
            self._engine.take_base(_nothing(model, self._engine.base_shardings))
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
