"""What moves between processes: versions from a trainer to instances, and the KV of samples.

    python -m dora_jax.bench.transfer publish [--mib=1024] [--instances=1,2] [--rounds=3] [--folder=FOLDER] [--rank=0]
                                              [--plain]
    python -m dora_jax.bench.transfer wire [--mib=1024] [--rounds=3]
    python -m dora_jax.bench.transfer migrate [--contexts=512,2048,8192,32768] [--others=8] [--rounds=3]
    python -m dora_jax.bench.transfer migrate --processes [--contexts=512,2048,8192] [--rounds=3] [--latent]
    python -m dora_jax.bench.transfer migrate --waiting [--contexts=512,2048,4096] [--observed=64] [--rounds=3]
                                                        [--seconds=0]

publish: a version from a trainer to instances, in processes of their own, by both wires: what each stage takes, and
what the model of the simulator says to that.
The trainer casts its masters (f32, fsdp=4) as a run does, the instances have the engine of a run (tensor=2); a version
for n instances has mib/n MiB in bfloat16, so that all fit. With a rank a version is an adapter of such a model.
copy       the cast on the trainer's shards; the next step waits for it
transfer   from Wanted until every instance has committed: `first` and `all`; GiB/s of all instances together
empty      the same with almost no bytes, for one instance: what the phases and the control plane cost
storage    the trainer writes the version to FOLDER (default: a temporary one), then every instance reads it
pause      the engine takes the version that lies in host memory; h2d: the same bytes onto the same devices, alone
model      `sim.network.publication` with the speeds of a quarter of the size and one instance, over what is measured
The floors: memcpy onto pages already there and onto fresh ones, and one TCP connection between two processes.
With --plain as under `cluster.encrypt=control`.
Medians of the rounds, after one that is not counted. Controller, trainer and instances share the cores.

wire: an array from one process to another, encrypted, and plain with keyed checksums; GiB/s, the share of one TCP
connection's, and the CPU seconds that each side spends on a GiB. Checksums of whole shards are a part of the receiver's.

migrate: what becomes of a sample's KV: moved to another engine, sent to another process, kept in host memory, or
computed again.
move      export from one engine, import into another, until the sample's next tokens are back
prefill   the same sample imported as tokens only, until its next tokens are back
stay      the sample's next tokens where it is: the part of both that is no moving at all
share     (move - stay) / (prefill - stay); move / prefill between processes
out, in   by how much slower the other samples of the source and of the destination decode while it leaves and arrives,
          and how many ticks that is
Both engines stand on one device, and host memory lies between them: what one process does. Best of the rounds.

With --processes the destination is another process, and there is one sample and nothing else; of a move is then
wire      from the export's end until the pages have arrived: offer, control plane, fetch
With --latent: of a mixture with latent attention, whose pages hold one latent a token in the place of every head's K
and V.

With --waiting: what it costs an episode to go on once its environment has answered, by where its KV was meanwhile.
kept    its pages stayed on the device: only what it observed is prefilled
out     its pages are copied to host memory
in      they come back, and what it observed is prefilled
again   its KV was dropped: all of its tokens are prefilled
swap    (out + in - kept) / (again - kept): the share of a second prefill that host memory costs
Times are in milliseconds until the episode's next tokens are back, the best of the rounds. `same` says whether the
tokens and log-probs of the next turn are those of the episode that kept its pages, bit by bit. --seconds: how long it
waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.bench import harness
from dora_jax.bench.decode import MODEL
from dora_jax.models import decoder, sharding
from dora_jax.models.families.config import Experts, Latent, ModelConfig
from dora_jax.models.lora_config import Lora, adapter_params
from dora_jax.orchestrate.events import TimePassed
from dora_jax.publish import HostWeights, Slices
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import InFlightSample, observed, without_pages
from dora_jax.runtime.assembly import run as build
from dora_jax.runtime.common.codec import Codec
from dora_jax.runtime.common.credentials import Authority, Credential
from dora_jax.runtime.transfer import slices
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.device_transfer import Wire
from dora_jax.runtime.transfer.kv_transfer import CODEC as KV_CODEC
from dora_jax.runtime.transfer.kv_transfer import fetch, layout_of, offer
from dora_jax.runtime.transfer.slices import shard_of
from dora_jax.runtime.transfer.transfer_manifest import Key
from dora_jax.runtime.transfer.weight_distribution import STORAGE, WIRE, WeightDistribution
from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint, like
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from dora_jax.sim.network import Speeds, publication
from dora_jax.types import SampleId, Version

# -------------------------------------------------------------- versions

FSDP, TENSOR = 4, 2
DTYPE: Literal["bfloat16"] = "bfloat16"
LAYER_MIB, EMBED_MIB = 25.2, 64.0  # of `model_of`, in DTYPE
CODEC = Codec(*ex.RECORDS)


def model_of(mib: float) -> ModelConfig:
    """About so large; tiny for 0."""
    if not mib:
        return decoder.new_config(
            "qwen3", vocab_size=256, d_model=64, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=64
        )
    layers = max(1, round((mib - EMBED_MIB) / LAYER_MIB))
    return decoder.new_config(
        "qwen3", vocab_size=32768, d_model=1024, n_layers=layers, n_heads=16, n_kv_heads=8, head_dim=64, d_ff=3072
    )


def size_of(model: ModelConfig, rank: int = 0) -> int:
    """Bytes in DTYPE; rank: of an adapter, which is the version then."""
    if rank:
        return round(2 * adapter_params(model, Lora(rank=rank)))
    return 2 * sum(x.size for x in jax.tree.leaves(decoder.abstract_params(model)))


def run_host(
    end: connection.Connection, trainer: bool, mib: float, folder: str, rank: int, credential: str, plain: bool
) -> None:
    """The trainer or an instance: calls the method of its side that is named, and answers with what it returns."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", FSDP if trainer else TENSOR)
    config = harness.config_of(DTYPE, {"lora": Lora(rank=rank)}, slots=1, max_prompt_tokens=16, max_new_tokens=16)
    wire = Wire("127.0.0.1", Credential(credential), not plain)
    side = (PublishingSide if trainer else InstanceSide)(config, model_of(mib), folder, wire)
    end.send(side.host.wanted)
    while True:
        try:
            name, *arguments = end.recv()
        except EOFError:
            return
        answer = getattr(side, name)(*arguments)
        if answer is not None:
            end.send(answer)


class Side:
    """What both have: weights by version, and what the controller sends is executed."""

    host: WeightEndpoint

    def execute(self, data: bytes) -> bytes | None:
        answer: Any = self.host.execute(CODEC.decode(data))
        return answer and CODEC.encode(answer)

    def forget(self, version: Version) -> tuple[float, ...]:
        self.host.weights.drop(version)
        return ()


class PublishingSide(Side):
    """Masters, their copy, and what is offered of it."""

    def __init__(self, config: Any, model: ModelConfig, folder: str, wire: Wire):
        mesh = sharding.make_mesh(jax.devices(), 1, FSDP, 1)
        self._like = build.publishing_inputs(model, mesh, config.lora)
        copy: Any = build.publishing_copy(config, model, mesh)
        self._copy = copy.lower(self._like).compile()
        self._stored = StoredWeights(folder)
        self.host = WeightEndpoint(0, wire, HostWeights())

    def put(self, version: Version, write: bool) -> tuple[float, ...]:
        """Makes a version. Seconds of the copy, of its way to the host and to storage."""

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
        self.host.weights.put(version, given)
        home = time.perf_counter()
        if write:
            self._stored.put(version, given)
        return copied - began, home - copied, time.perf_counter() - home


class InstanceSide(Side):
    """An engine, and what it is sent."""

    def __init__(self, config: Any, model: ModelConfig, folder: str, wire: Wire):
        self._engine = build.engine_of(config, model, sharding.make_mesh(jax.devices(), 1, 1, TENSOR))
        if config.lora.on:  # on a base of zeros, as an engine takes it
            shardings = self._engine.base_shardings
            laid_out = functools.partial(decoder.serving_layout, layout=decoder.layout_of(shardings))
            base = jax.eval_shape(laid_out, decoder.abstract_params(model, DTYPE))
            zeros = lambda x, where: jnp.zeros(x.shape, x.dtype, device=where)
            self._engine.residents.take_base(jax.tree.map(zeros, base, shardings))
        wanted = like(model, self._engine.param_shardings, build.published(config, model))
        self.host = WeightEndpoint(0, wire, HostWeights(), wanted, StoredWeights(folder))

    def put(self, version: Version, write: bool) -> tuple[float, ...]:
        """Takes a version into the engine. Seconds that it stands still for it, and that the devices take for as many
        bytes."""
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


class Cluster:
    """A trainer and instances as processes, and a controller here."""

    def __init__(self, instances: int, mib: float, path: str, folder: Path, rank: int = 0, plain: bool = False):
        """rank: of the adapters that versions are; 0: they are all weights. plain: they are not encrypted."""
        self.names = ["trainer", *(f"r{i}" for i in range(instances))]
        self.path = path
        self.brain = WeightDistribution((path,), time.monotonic())
        self.ends, self.children, authority = {}, [], Authority()
        for name in self.names:
            its = name == "trainer", mib, str(folder), rank, authority.issue(name, 1), plain
            self.ends[name], child = harness.spawned(run_host, *its)
            self.children.append(child)
        for name in self.names:
            shards = (self.ends[name].recv(),)
            self.brain.step(ex.WorldUp(world=name, epoch=1, shards=shards, trainer=name == "trainer"))

    def close(self) -> None:
        for end in self.ends.values():
            end.close()
        for child in self.children:
            child.join(20)

    def ask(self, name: str, *what: Any) -> Any:
        self.ends[name].send(what)
        return self.ends[name].recv()

    def publish(self, version: Version) -> dict[str, float]:
        """Seconds of each stage."""
        by_storage = self.path == STORAGE
        copy_s, home_s, write_s = self.ask("trainer", "put", version, by_storage)
        began = time.perf_counter()
        if by_storage:
            self.brain.step(ex.Stored(version=version, there=True))
        else:
            self.brain.step(ex.Holds(world="trainer", epoch=1, version=version))
        loaded: list[float] = []
        self._tell(TimePassed(now_s=time.monotonic()), loaded)  # how late it is: deadlines count from there
        for name in self.names[1:]:
            self._tell(ex.Wanted(world=name, version=version), loaded)
        while self.brain.busy:
            for end in cast("list[connection.Connection]", connection.wait(self.ends.values())):
                self._tell(CODEC.decode(end.recv()), loaded)
            self._tell(TimePassed(now_s=time.monotonic()), loaded)
        paused = [self.ask(name, "put", version, False) for name in self.names[1:]]
        for name in self.names:
            self.ask(name, "forget", version)
            self.brain.step(ex.Dropped(world=name, version=version))
        self.brain.step(ex.Stored(version=version, there=False))
        return {
            "copy": copy_s,
            "home": home_s,
            "write": write_s,
            "first": min(loaded) - began,
            "all": max(loaded) - began,
            "pause": max(pause for pause, _ in paused),
            "h2d": min(h2d for _, h2d in paused),
        }

    def _tell(self, fact: ex.Fact, loaded: list[float]) -> None:
        for item in self.brain.step(fact):
            match item:
                case ex.Loaded():
                    loaded.append(time.perf_counter())
                case ex.NotLoaded() | ex.Broken():
                    raise RuntimeError(f"{item.world}: {item.reason}")
                case _:
                    self.ends[item.world].send(("execute", CODEC.encode(item)))


MIB = 1 << 20
GIB = 1 << 30


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


def stages(
    path: str, instances: int, mib: float, rounds: int, folder: str | None, rank: int, plain: bool
) -> dict[str, float]:
    """Median seconds of each stage."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        cluster = stack.enter_context(contextlib.closing(Cluster(instances, mib, path, place, rank, plain)))
        times = [cluster.publish(version) for version in range(rounds + 1)][1:]
    return {name: statistics.median(each[name] for each in times) for name in times[0]}


def publish(mib=1024, instances=(1, 2), rounds=3, folder=None, rank=0, plain=False) -> Iterator[str]:
    floor = min(mib, 256) * MIB
    source, target = np.ones(floor, np.uint8), np.ones(floor, np.uint8)
    onto, fresh = (
        floor / GIB / min(harness.timed(*copy)[0] for _ in range(3))
        for copy in ((np.copyto, target, source), (source.copy,))
    )
    yield (
        f"floors, GiB/s: memcpy {onto:.2f}, onto fresh pages {fresh:.2f}, loopback TCP {tcp_bytes_s(floor) / GIB:.2f}"
    )
    quarter, times = size_of(model_of(mib / 4), rank), stages(WIRE, 1, mib / 4, rounds, folder, rank, plain)
    copy, home, out, place = (quarter / times[name] for name in ("copy", "home", "all", "pause"))
    # of this machine, whose cores carry both ends: a transfer and the joining behind it are one figure
    calibrated = Speeds(copy=copy, home=home, out=out, into=out, join=float("inf"), place=place)
    yield (
        f"speeds at {quarter / MIB:.0f} MiB, GiB/s: copy {copy / GIB:.2f}, wire {out / GIB:.2f}, "
        f"pause {place / GIB:.2f}"
    )
    table = harness.Table({"path": "10s", "instances": "9d", "MiB": "6.0f", "empty ms": "10.1f", "copy s": "8.2f",
                           "write s": "9.2f", "first s": "9.2f", "all s": "8.2f", "GiB/s": "7.2f", "pause s": "9.2f",
                           "h2d s": "7.2f", "model/measured all": "20.2f", "pause": "7.2f"})  # fmt: skip
    yield table.head
    for name, path in (("transfer", WIRE), ("storage", STORAGE)):
        empty_ms = 1e3 * stages(path, 1, 0, rounds, folder, rank, plain)["all"]
        for count in instances:
            size = size_of(model_of(mib / count), rank)
            t = stages(path, count, mib / count, rounds, folder, rank, plain)
            predicted = publication(size, calibrated, count)
            ratio = (predicted.last_s - predicted.copy_s - predicted.home_s) / t["all"] if path == WIRE else ""
            yield table.row(name, count, size / MIB, empty_ms, t["copy"], t["write"], t["first"], t["all"],
                            count * size / t["all"] / GIB, t["pause"], t["h2d"], ratio,
                            predicted.pause_s / t["pause"])  # fmt: skip


def run_sender(end: connection.Connection, credential: str, encrypted: bool, size: int) -> None:
    """Offers an array under each number that comes, and says what the CPU has spent by then."""
    wire, data = Wire("127.0.0.1", Credential(credential), encrypted), np.ones(size, np.uint8)
    while number := end.recv():
        wire.release(key(number - 1))
        offer = wire.give(key(number), {shard_of("w", data): data})
        end.send((KV_CODEC.encode(offer), time.process_time()))
    end.send((b"", time.process_time()))


def wire(mib=1024, rounds=3) -> Iterator[str]:
    size, authority = mib * MIB, Authority()
    wanted, gib = (shard_of("w", np.empty(size, np.uint8)),), mib / 1024
    floor = tcp_bytes_s(size)
    yield f"one TCP connection, into memory that is there: {floor / GIB:.2f} GiB/s"
    table = harness.Table({"path": "9s", "GiB/s": "7.2f", "of TCP": "7.2f", "sender s/GiB": "13.2f",
                           "receiver s/GiB": "15.2f"})  # fmt: skip
    yield table.head
    for name, encrypted in (("TLS", True), ("plain", False)):
        end, child = harness.spawned(run_sender, authority.issue("trainer", 1), encrypted, size)
        receiver = Wire("127.0.0.1", Credential(authority.issue("there", 1)))
        took, spent, sent = [], [], []
        for number in range(1, rounds + 2):
            end.send(number)
            offer, sender_s = end.recv()
            sent.append(sender_s)
            began, own_s = time.perf_counter(), time.process_time()
            receiver.take(KV_CODEC.decode(offer), wanted, key(number))
            took.append(time.perf_counter() - began)
            spent.append(time.process_time() - own_s)
        end.send(0)
        sent.append(end.recv()[1])
        child.join()
        sender_s = statistics.median(b - a for a, b in itertools.pairwise(sent[1:]))
        seconds = statistics.median(took[1:])
        yield table.row(name, gib / seconds, size / seconds / floor, sender_s / gib,
                        statistics.median(spent[1:]) / gib)  # fmt: skip


# ------------------------------------------------------- KV of samples

NEW = 128  # tokens that the moved sample may still sample: enough to measure a few ticks
OTHERS_NEW = 1280  # tokens of the others: they decode all the while
MOVED = SampleId(0, 0)
TURN = 16  # tokens of a turn
LATENT = decoder.new_config(
    "deepseek_v3",
    **harness.TOY | {"n_kv_heads": 8},
    latent=Latent(kv_rank=48, rope_dim=16, nope_dim=16, v_dim=32),
    experts=Experts(count=8, per_token=2, width=192, shared=1, router="sigmoid", corrected=True),
)


def new_engine(context: int, others: int, params, model: ModelConfig = MODEL) -> Engine:
    longest = OTHERS_NEW if others else NEW
    engine = harness.new_engine(
        model,
        params,
        slots=1 + others,
        decode_rows=1,
        pages=(context + longest) // 16 + 2 + others * (OTHERS_NEW // 16 + 3),
        max_prompt_tokens=context,
        max_new_tokens=longest,
        prefill_tokens=1 << 20,
        prefill_chunk=512,
        context_block=max(128, context // 16),
    )
    engine.warmup()
    return engine


def next_tokens_s(engine: Engine, request: InFlightSample) -> float:
    """Seconds from the import until the sample has sampled again; takes it out afterwards."""
    began = time.perf_counter()
    engine.import_(request)
    sampled_s(engine)
    took = time.perf_counter() - began
    engine.cancel(MOVED)
    return took


def sampled_s(engine: Engine) -> float:
    """Seconds until the sample has new tokens."""
    began = time.perf_counter()
    while MOVED not in engine.tick().progress:
        pass
    return time.perf_counter() - began


def slowed(engine: Engine, request: InFlightSample, others: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """((share by which others decode slower while the sample arrives, ticks), the same while it leaves again)."""
    ids = [SampleId(1, index) for index in range(others)]
    median_s = lambda ticks: statistics.median(harness.timed(engine.tick)[0] for _ in range(ticks))
    for id in ids:
        engine.submit(id, np.arange(3, 35), 0, OTHERS_NEW)
    engine.tick()
    before = median_s(5)
    engine.import_(request)
    arriving = [harness.timed(engine.tick)[0]]
    while not len(engine.sampled(MOVED)[0]) > len(request.out_ids):
        arriving.append(harness.timed(engine.tick)[0])
    both = median_s(3)
    sampled = len(engine.sampled(ids[0])[0])
    took, _ = harness.timed(engine.export, MOVED)
    leaving = max(1, (len(engine.sampled(ids[0])[0]) - sampled) // engine.shapes.steps)
    after = median_s(5)
    ticks = len(arriving) + 3 + leaving

    def alone(tick: float) -> float:
        """Seconds a tick of the others by themselves: they grow, and slow down, all the while."""
        return before + (after - before) * tick / ticks

    own = max(0.0, both - alone(len(arriving) + 1.5))  # the moved sample decodes too, once it is there
    came = (sum(arriving) - own) / (len(arriving) * alone(len(arriving) / 2)) - 1
    left = took / (leaving * alone(ticks - leaving / 2)) - 1
    for id in ids:
        engine.cancel(id)
    return (came, len(arriving)), (left, leaving)


def measure(context: int, others: int, rounds: int, params) -> list[Any]:
    """One line of the page."""
    here, there = (new_engine(context, others, params) for _ in range(2))
    prompt = np.random.default_rng(0).integers(3, MODEL.vocab_size, context)
    moves, prefills, stays, comes, leaves = [], [], [], [], []
    for _ in range(rounds):
        here.submit(MOVED, prompt, 0, NEW)
        sampled_s(here)
        stays.append(harness.timed(here.tick)[0])
        exported, request = harness.timed(here.export, MOVED)
        moves.append(exported + next_tokens_s(there, request))
        harness.reload(there, params)
        came, left = slowed(there, request, others)
        comes.append(came)
        leaves.append(left)
        harness.reload(there, params)
        prefills.append(next_tokens_s(there, without_pages(request)))
        harness.reload(there, params)
    move, prefill, stay = min(moves), min(prefills), min(stays)
    (out, out_ticks), (into, in_ticks) = min(leaves), min(comes)
    return [context, request.kv_bytes / 1e6, 1e3 * move, 1e3 * prefill, 1e3 * stay, (move - stay) / (prefill - stay),
            f"{out:.1%} /{out_ticks:3d}", f"{into:.1%} /{in_ticks:3d}"]  # fmt: skip


def key(sequence: int) -> Key:
    return Key(epoch=1, version=0, receiver="there/0", sequence=sequence)


def run_there(end: connection.Connection, context: int, model: ModelConfig, credential: str) -> None:
    """The destination: fetches and imports what is offered; says when it has the pages, and when it has sampled."""
    params, wire = harness.serving_params(model), Wire("127.0.0.1", Credential(credential))
    engine = new_engine(context, 0, params, model)
    layout = layout_of(engine.page(), engine.calls.kv)
    end.send_bytes(b"ready")
    number = 0
    while data := end.recv_bytes():
        number += 1
        request = fetch(wire, KV_CODEC.decode(data), key(number), layout)
        end.send_bytes(b"fetched")
        next_tokens_s(engine, request)
        end.send_bytes(b"sampled")
        harness.reload(engine, params)
        end.send_bytes(b"forgotten")


def measure_there(context: int, rounds: int, model: ModelConfig) -> list[Any]:
    """One line of the page."""
    authority, params = Authority(), harness.serving_params(model)
    end, child = harness.spawned(run_there, context, model, authority.issue("there", 1))
    here, sequence = new_engine(context, 0, params, model), 0
    layout = layout_of(here.page(), here.calls.kv)
    wire = Wire("127.0.0.1", Credential(authority.issue("here", 1)))

    def expect(word: bytes) -> float:
        if (received := end.recv_bytes()) != word:
            raise RuntimeError(f"the other process sent {received!r} where {word!r} was expected")
        return time.perf_counter()

    def goes_on(request: InFlightSample, began: float) -> tuple[float, float]:
        """Seconds from now until the request is there, and from `began` until its sample has sampled there."""
        nonlocal sequence
        sequence += 1
        offering = time.perf_counter()
        end.send_bytes(KV_CODEC.encode(offer(wire, key(sequence), request, layout)))
        fetched, took = expect(b"fetched") - offering, expect(b"sampled") - began
        wire.release(key(sequence))
        expect(b"forgotten")
        return fetched, took

    expect(b"ready")
    prompt = np.random.default_rng(0).integers(3, model.vocab_size, context)
    moves, prefills, stays = [], [], []
    for _ in range(rounds):
        here.submit(MOVED, prompt, 0, NEW)
        sampled_s(here)
        stays.append(sampled_s(here))
        began = time.perf_counter()
        request = here.export(MOVED)
        moves.append(goes_on(request, began))
        prefills.append(goes_on(without_pages(request), time.perf_counter())[1])
        harness.reload(here, params)
    end.send_bytes(b"")
    child.join(30)
    (wire_s, move), prefill, stay = map(min, zip(*moves, strict=True)), min(prefills), min(stays)
    return [context, request.kv_bytes / 1e6, 1e3 * move, 1e3 * wire_s, request.kv_bytes / wire_s / 2**30, 1e3 * prefill,
            1e3 * stay, move / prefill]  # fmt: skip


def turn_over(engine: Engine) -> InFlightSample:
    while not (waiting := engine.tick().waiting):
        pass
    return waiting[0]


def measure_wait(context: int, n_observed: int, rounds: int, seconds: float, params) -> list[Any]:
    """One line of the page."""
    engine = new_engine(context, 0, params)
    rng = np.random.default_rng(0)
    prompt, answer = rng.integers(3, MODEL.vocab_size, context), rng.integers(3, MODEL.vocab_size, n_observed)
    times: dict[str, list[float]] = {name: [] for name in ("kept", "out", "in", "again")}
    same = True
    for _ in range(rounds):
        turns = {}
        for name in ("kept", "in", "again"):
            engine.submit(MOVED, prompt, 0, 3 * TURN, turn_tokens=TURN)
            held = turn_over(engine)
            if name != "kept":
                out_s, held = harness.timed(engine.with_kept, held)
                harness.reload(engine, params)  # of the prompt's prefix too nothing stays
            if name == "in":
                times["out"].append(1e3 * out_s)
                kv_bytes = held.kv_bytes
            engine.submit(SampleId(1, 0), np.arange(3, 11), 0, 1)
            harness.finished(engine)  # weights that were just loaded lie as they are used
            time.sleep(seconds)
            began = time.perf_counter()
            engine.import_(observed(without_pages(held) if name == "again" else held, answer))
            while not (result := engine.tick()).progress:
                pass
            times[name].append(1e3 * (time.perf_counter() - began))
            turns[name] = result.waiting[0] if result.waiting else turn_over(engine)
            engine.forget(MOVED)
            harness.reload(engine, params)
        kept, back = (dataclasses.astuple(turns[name])[3:5] for name in ("kept", "in"))
        same &= all(np.array_equal(x, y) for x, y in zip(kept, back, strict=True))
    best = {name: min(each) for name, each in times.items()}
    share = (best["out"] + best["in"] - best["kept"]) / (best["again"] - best["kept"])
    return [context, kv_bytes / 1e6, *best.values(), share, "yes" if same else "NO"]


def migrate(
    contexts=(0,), others=8, rounds=3, processes=False, latent=False, waiting=False, observed=64, seconds=0.0
) -> Iterator[str]:
    by_default: tuple[int, ...] = (512, 2048, 8192)
    if processes:
        head = {"move ms": "9.1f", "wire ms": "9.1f", "GiB/s": "7.2f", "prefill ms": "12.1f", "stay ms": "9.1f",
                "share": "8.1%"}  # fmt: skip
        row = functools.partial(measure_there, rounds=rounds, model=LATENT if latent else MODEL)
    elif waiting:
        by_default, params = (512, 2048, 4096), harness.serving_params(MODEL)
        head = {**dict.fromkeys(("kept", "out", "in", "again"), "9.1f"), "swap": "8.1%", "same": ">6s"}
        row = functools.partial(measure_wait, n_observed=observed, rounds=rounds, seconds=seconds, params=params)
    else:
        by_default, params = (*by_default, 32768), harness.serving_params(MODEL)
        head = {"move ms": "9.1f", "prefill ms": "12.1f", "stay ms": "9.1f", "share": "8.1%", "out / ticks": ">14s",
                "in / ticks": ">14s"}  # fmt: skip
        row = functools.partial(measure, others=others, rounds=rounds, params=params)
    table = harness.Table({"context": "8d", "KV MB": "8.1f"} | head)
    yield table.head
    for context in contexts if any(contexts) else by_default:
        yield table.row(*row(context))


if __name__ == "__main__":
    harness.run(publish, wire, migrate)
