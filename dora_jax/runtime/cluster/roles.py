"""What a process of a gang does: one part of the trainer, or of a rollout instance.

Consumes calls and posts of the controller; produces answers and facts. The stages are those of one machine, unchanged:
`Trainer`, `Checkpoints`, `Engine`, `InstanceWorker`. Laws: every process of a gang makes the same jitted calls in the
same order (trainer: its calls come in one order; rollout: the first process decides what comes before each tick and
tells the others); only the first process speaks for an instance; who hands over has then done its last.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from dora_jax import devices
from dora_jax.config import Config, ConfigError
from dora_jax.digest import digest
from dora_jax.models import hf, sharding
from dora_jax.publish import serving_copy
from dora_jax.rollout.migrate import Parcel, without_pages
from dora_jax.runtime import build
from dora_jax.runtime.bucket import StoreError
from dora_jax.runtime.cluster import calls
from dora_jax.runtime.cluster.calls import Begin
from dora_jax.runtime.cluster.link import Link
from dora_jax.runtime.cluster.parts import home
from dora_jax.runtime.cluster.porter import Porter
from dora_jax.runtime.cluster.turns import Follower, Leader
from dora_jax.runtime.cluster.weights import weights_at
from dora_jax.runtime.exchange import Abort, Commit, Offer, Propose, Pull, Read, Release
from dora_jax.runtime.gap import GapProbe
from dora_jax.runtime.parcels import HOST, layout_of
from dora_jax.runtime.shards import Lent
from dora_jax.runtime.staging import Versions, WeightHost, like, serving_shardings
from dora_jax.runtime.wire import Wire
from dora_jax.runtime.workers import Exported, Handed, InstanceWorker
from dora_jax.tokenizer import Tokenizer
from dora_jax.trainer.checkpoint import Checkpoints
from dora_jax.types import Version


class TrainerRole:
    """Answers calls one after the other, on the main thread."""

    def __init__(self, begin: Begin, config: Config, link: Link, pulse: Any):
        self._config = config
        self._link, self._pulse = link, pulse
        self._home = home(begin)
        mesh = sharding.make_mesh(jax.devices(), *devices.trainer_mesh(len(jax.devices()), config))
        self._trainer = build.new_trainer(config, Tokenizer.load(config.model.path), mesh, self._home.folder)
        self._pack = build.packer(config, self._trainer)
        self._gap = GapProbe(build.prober(config, self._trainer) if config.orchestrator.mode != "sync" else None)
        self._newest: tuple[Version, Any] | None = None  # published last, on the trainer's own mesh
        self._own_copy = serving_copy(config.model.dtype)
        self._stored, self._kept = weights_at(begin.workdir), Versions()
        model = hf.read_config(config.model.path)
        layout = serving_shardings(model, jax.devices(), config.rollout.tensor)
        self._serving = serving_copy(config.model.dtype, layout)
        wire = Wire(link.own_ip) if config.cluster.wire == "transfer" else None
        self._courier = Courier(WeightHost(begin.rank, wire, self._kept), link, self._write)
        self._checkpoints: Checkpoints | None = None  # opened by the first save: nothing else writes there by then
        shape = build.batch_layout(config, self._trainer)
        self._trainer.warmup(shape.rows, shape.tokens)

    @property
    def _version(self) -> Version:
        return int(self._trainer.state.step)

    def run(self, inbox: queue.SimpleQueue) -> None:
        mine = self._courier.sort(inbox)
        while True:
            with self._pulse.waits:
                call = mine.get()
            if isinstance(call, calls.HandOver):  # whoever waits for a later call asks the next gang
                return self._link.send(calls.Left())
            self._pulse.busy = True
            self._link.send(calls.Answer(number=call.number, what=self._answer(call.what)))
            self._pulse.progress += 1
            self._pulse.busy = False

    def _answer(self, what: Any) -> calls.Made | calls.Done | calls.Part | calls.Refused:
        match what:
            case calls.Make(base=base, groups=groups):
                if base != self._version:
                    raise RuntimeError(f"a step at base {base} was asked of a trainer at version {self._version}")
                metrics = self._trainer.step(self._pack(groups, base), **self._gap.among(groups, base))
                return calls.Made(digest=digest(self._trainer.params),
                                  metrics={name: float(value) for name, value in metrics.items()})
            case calls.Publish(version=version):
                self._kept.keep(version, jax.block_until_ready(self._serving(self._trainer.params)))
                self._keep_for_gap(version)
            case calls.Restore(step=step):
                like = self._trainer.abstract_state()
                self._trainer.load(*self._home.restore(step, like.params, like.opt_state), step)
            case calls.Save(version=version, rl_state=rl_state, metrics=metrics):
                if version != self._version:
                    return calls.Refused(error=f"the trainer is at version {self._version}")
                state = self._trainer.state
                self._saver().save(version, state.params, state.opt_state, rl_state, metrics)
            case calls.Tend(floor=floor, wait=wait):
                if self._checkpoints is not None:
                    self._checkpoints.protect(floor)
                    (self._checkpoints.wait if wait else self._checkpoints.poll)()
                    if self._checkpoints.part is not None:
                        step, files = self._checkpoints.part
                        return calls.Part(step=step, files=files)
            case calls.Fingerprint():
                return calls.Done(value=digest(self._trainer.params))
        return calls.Done(value=self._version)

    def _keep_for_gap(self, version: Version) -> None:
        if not self._gap.wanted:
            return
        if self._newest is not None:
            self._gap.keep(*self._newest)
        self._newest = version, self._own_copy(self._trainer.params)

    def _write(self, version: Version) -> None:
        self._stored.write(version, self._kept.get(version, None))
        if self._config.cluster.wire == "storage":
            self._kept.drop(version)

    def _saver(self) -> Checkpoints:
        if self._checkpoints is None:
            def say(text: str, *_: Any) -> None:
                if self._home.speaks:
                    self._link.send(calls.Note(text=text))

            self._checkpoints = self._home.checkpoints(self._config.checkpoint, say)
        return self._checkpoints


def open_rollout(begin: Begin, config: Config, link: Link, pulse: Any, turns: Leader | Follower) -> RolloutRole:
    """Its engine is compiled on return."""
    n_devices = len(jax.devices())
    if n_devices != config.rollout.tensor:
        raise ConfigError(f"rollout.tensor: {config.rollout.tensor} is not the {n_devices} devices of a replica of "
                          f"{begin.hosts} processes")
    mesh = sharding.make_mesh(jax.devices(), 1, 1, n_devices)
    model = hf.read_config(config.model.path)
    engine = build.new_engine(config, Tokenizer.load(config.model.path), model, mesh)
    engine.warmup()
    stored, versions = weights_at(begin.workdir), Versions()
    wire = Wire(link.own_ip) if config.cluster.wire == "transfer" else None
    wanted = like(model, engine.param_shardings, config.model.dtype)
    weights = WeightHost(begin.rank, wire, versions, wanted, stored.read)
    porter = None
    if wire is not None:
        layout = layout_of(engine.page()[0])
        porter = Porter(begin.instance, begin.rank, Wire(link.own_ip, HOST), layout)
    return RolloutRole(begin, engine, weights, link, pulse, turns, build.partial_s(config), porter)


class RolloutRole:
    """Ticks on the main thread; weights and KV come in on others."""

    def __init__(self, begin: Begin, engine: Any, weights: WeightHost, link: Link, pulse: Any, turns: Leader | Follower,
                 partial_s: float, porter: Porter | None = None):
        self._pulse, self._turns, self._weights, self._porter = pulse, turns, weights, porter
        self._courier = Courier(weights, link, porter=porter)
        self._outlet = outlet = Outlet(link if begin.rank == 0 else None, whole=begin.hosts == 1)
        self._worker = InstanceWorker(begin.instance, engine, weights.weights, outlet, partial_s)
        self._elsewhere = (lambda move: Elsewhere(move, outlet)) if porter is None else (
            lambda move: Lender(move, link, porter, begin.rank, begin.hosts))

    def run(self, inbox: queue.SimpleQueue) -> None:
        posts = self._courier.sort(inbox)
        while True:
            with self._pulse.waits:
                turn = self._turns.next(posts, wait=not self._worker.busy)
            self._pulse.busy = True
            for post in turn:
                if isinstance(post, calls.HandOver):
                    return self._leave()
                self._do(post)
            if self._worker.busy:
                self._worker.work()
            self._pulse.progress += 1
            self._pulse.busy = self._worker.busy

    def _leave(self) -> None:
        self._worker.hand_over()
        self._outlet.put(calls.Left())
        self._pulse.busy = False

    def _do(self, post: calls.Post) -> None:
        worker = self._worker
        match post:
            case calls.Swap(version=version, drop=drop):
                worker.load(version, drop)
                if drop is not None:
                    self._weights.drop(drop)
            case calls.Submit(id=id, prompt=prompt, version=version):
                worker.submit(id, prompt, version)
            case calls.GiveUp(id=id, reason=reason):
                worker.cancel(id, reason)
            case calls.MoveOut(id=id):
                worker.move(id, self._elsewhere(post))
            case calls.Receive(parcel=parcel, src=src, unstarted=unstarted, number=number):
                worker.receive(self._porter.take(number) if number else parcel, src, unstarted)
            case calls.TakeOut(id=id):
                worker.park(id)
            case calls.GoOn(parcel=parcel):
                worker.resume(parcel)


class Courier:
    """Weights and KV in and out, beside what the main thread does. `write(version)`: a trainer's, into storage."""

    def __init__(self, weights: WeightHost, link: Link, write: Callable[[Version], None] | None = None,
                 porter: Porter | None = None):
        self._weights, self._link, self._write, self._porter = weights, link, write, porter
        self._own: queue.SimpleQueue = queue.SimpleQueue()

    def sort(self, inbox: queue.SimpleQueue) -> queue.SimpleQueue:
        """What is left for the main thread."""
        rest: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._sort, args=(inbox, rest), name="sorter", daemon=True).start()
        threading.Thread(target=self._run, name="courier", daemon=True).start()
        return rest

    def _sort(self, inbox: queue.SimpleQueue, rest: queue.SimpleQueue) -> None:
        while True:
            match item := inbox.get():
                case Pull() | Read() | calls.Carry():  # they take their time, and an Abort may come meanwhile
                    threading.Thread(target=self._do, args=(item,), name="pull", daemon=True).start()
                case Propose() | Offer() | Commit() | Abort() | Release():
                    self._own.put(item)
                case calls.Forget() | calls.GiveBack() | calls.Leave() | calls.Call(what=calls.Write()):
                    self._own.put(item)
                case _:
                    rest.put(item)

    def _run(self) -> None:
        while True:
            self._do(self._own.get())

    def _do(self, item: Any) -> None:
        try:
            match item:
                case calls.Call(number=number, what=calls.Write(version=version)):
                    self._link.send(calls.Answer(number=number, what=self._written(version)))
                case calls.Forget(version=version):
                    self._weights.drop(version)
                case calls.Carry():
                    self._link.send(self._porter.fetch(item))
                case calls.GiveBack(number=number, pulled=pulled):
                    self._porter.give_back(number, pulled)
                case calls.Leave(number=number):
                    self._porter.leave(number)
                case _:
                    if (fact := self._weights.execute(item)) is not None:
                        self._link.send(fact)
        except BaseException as error:  # a courier that fell silent would only look slow: its process ends, its gang
            self._link.send(calls.Failed(error=f"{type(error).__name__}: {error}"))

    def _written(self, version: Version) -> calls.Done | calls.Refused:
        try:
            self._write(version)
        except StoreError as error:
            self._link.send(calls.Note(text=f"version {version} does not come into storage: {error}"))
            return calls.Refused(error=str(error))
        return calls.Done(value=version)


class Outlet:
    """The outbox of an InstanceWorker; that of a process that does not speak swallows. `whole`: this process holds all
    of a sample's pages; parts of them are of no use elsewhere."""

    def __init__(self, link: Link | None, whole: bool):
        self._link, self._whole = link, whole

    def put(self, item: Any) -> None:
        if self._link is None:
            return
        if isinstance(item, Exported | Handed):
            item = dataclasses.replace(item, parcel=self.fit(item.parcel))
        self._link.send(item)

    def fit(self, parcel: Parcel) -> Parcel:
        return parcel if self._whole else without_pages(parcel)


class Elsewhere:
    """Where a sample goes, as its instance sees it: through the controller."""

    def __init__(self, move: calls.MoveOut, outlet: Outlet):
        self.instance = move.dst
        self._number, self._outlet = move.number, outlet

    def post(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)

    def receive(self, parcel: Parcel, src: int, unstarted: Version | None) -> None:
        lent = Lent(parcel=self._outlet.fit(parcel), kv_len=0, page_size=0, manifest=None)
        self._outlet.put(calls.Moving(lent=lent, src=src, dst=self.instance, unstarted=unstarted, number=self._number,
                                      host=0, hosts=1))


class Lender:
    """As `Elsewhere`; its KV goes from process to process."""

    def __init__(self, move: calls.MoveOut, link: Link, porter: Porter, host: int, hosts: int):
        self.instance = move.dst
        self._move, self._link, self._porter, self._host, self._hosts = move, link, porter, host, hosts

    def post(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)

    def receive(self, parcel: Parcel, src: int, unstarted: Version | None) -> None:
        lent = self._porter.lend(parcel, self._move)
        self._link.send(calls.Moving(lent=lent, src=src, dst=self.instance, unstarted=unstarted,
                                     number=self._move.number, host=self._host, hosts=self._hosts))
