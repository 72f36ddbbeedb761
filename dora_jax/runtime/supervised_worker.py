"""A rollout instance of this process that may die, hang or return garbage: it leaves the pool, and may come back.

    commands (main thread) -> LocalInstance -> the EngineWorker of its present life -> LocalInstance -> outbox

Consumes the calls that an EngineWorker takes; produces its outbox items, InstanceDown where a life ends and `InstanceReady`
where the next one begins. Laws: nothing of a life is heard after its InstanceDown; what it owed an answer to is answered
right behind that; commands reach a life only once the orchestrator has heard of it; a sample that is not a sample
(log-probs that are no numbers, tokens that are no tokens) ends the life that made it and is never told; lives that come
to nothing are counted, and where no instance is left the run ends with the last error.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dora_jax.orchestrate import events as ev
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.durability.records import Partial
from dora_jax.runtime.rollout_worker import EngineWorker
from dora_jax.runtime.shutdown import STAGE_END_S
from dora_jax.runtime.worker import Crashed, Finished, InstanceReady
from dora_jax.types import InstanceId, Prompt, SampleId, Version

MAX_LOSSES = 3  # lives in a row that finished no sample, after which an instance stays away
LOOKS = 8  # at a life, in the time after which it counts as hung
MAX_LOGPROB = 0.01  # rounding may lift one over 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """What a life is made of, and when it is over."""

    new_engine: Callable[[], Any] | None  # None: an instance that is lost stays away
    vocab_size: int
    hung_s: float  # one call or tick lasts so long; 0: any time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaving:
    """A sample that has been asked to move."""

    dst: InstanceId
    life: _Life | None  # of dst
    attempt: int


class LocalInstance:
    """Called by the main thread; `heard`, `take` and `_watch` also by the threads of lives and by the watchdog."""

    def __init__(
        self,
        up: ev.InstanceUp,
        engine: Any,
        weights: Any,
        outbox: Any,
        partial_s: float,
        spare: RestartPolicy,
        peers: Mapping[InstanceId, LocalInstance],
        notify: Callable[[str], None],
    ):
        self.instance = up.instance
        self.role = f"rollout {up.instance}"
        self.gone = False  # for good
        self._event = up
        self._outbox = outbox
        self._spare = spare
        self._peers = peers
        self._notify = notify
        self._around: Callable[[Any], Any] = lambda engine: engine
        self._weights = weights
        self._new_life = lambda engine: _Life(self, self._around(engine), self._weights, partial_s, self._lives)
        self._lock = threading.Lock()
        self._lives = up.life
        self._life: _Life | None = self._new_life(engine)  # that the orchestrator knows of, or will
        self._leaving: dict[SampleId, _Leaving] = {}  # not yet out
        self._arriving: dict[
            SampleId, tuple[InstanceId, int]
        ] = {}  # handed over, not yet in; where from, which attempt
        self._losses = 0
        self._waited_s = 0.0  # of earlier lives
        self._tokens = 0
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []

    def wrap_engine(self, around: Callable[[Any], Any], weights: Any) -> None:
        """Before `start`: `around(engine)` stands for the engine of every life, `weights` for the store."""
        self._around, self._weights = around, weights
        self._life = self._new_life(self._life.engine)

    # ---------------------------------------------------------- as a worker

    def start(self) -> None:
        self._life.start()
        if self._spare.hung_s:
            self._begin(self._watch)

    def stop(self, timeout_s: float = STAGE_END_S) -> None:
        self._done.set()
        if life := self._life:
            life.stop(timeout_s)
        for thread in self._threads:  # one that wakes while the interpreter ends would abort the process
            thread.join(timeout_s)

    def post(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)

    @property
    def life(self) -> int:
        """The latest."""
        return self._lives

    @property
    def engine(self) -> Any:
        return self._life.engine

    @property
    def worker(self) -> EngineWorker | None:
        """Of the present life; None: the instance is lost."""
        return self._life

    @property
    def wait_s(self) -> float:
        return self._waited_s + (self._life.wait_s if self._life else 0.0)

    @property
    def tokens(self) -> int:
        return self._tokens + (self._life.tokens if self._life else 0)

    @property
    def state(self) -> str:
        return self._life.state if self._life else f"{self.role} is lost"

    def load(self, version: Version, drop: Version | None) -> None:
        self._send(_Life.bring, version, drop)

    def submit(self, sample: SampleId, prompt: Prompt, version: Version) -> None:
        self._send(EngineWorker.submit, sample, prompt, version)

    def cancel(self, sample: SampleId, reason: str) -> None:
        self._send(EngineWorker.cancel, sample, reason)

    def park(self, sample: SampleId) -> None:
        self._send(EngineWorker.park, sample)

    def resume(self, parcel: InFlightSample) -> None:
        self._send(EngineWorker.resume, parcel)

    def pause(self) -> None:
        self._send(EngineWorker.pause)

    def unpause(self) -> None:
        self._send(EngineWorker.unpause)

    def move(self, sample: SampleId, dst: LocalInstance, attempt: int) -> None:
        leaving = _Leaving(dst=dst.instance, life=dst._life, attempt=attempt)
        with self._lock:
            if self._life is not None:
                self._leaving[sample] = leaving
                self._life.do(EngineWorker.move, sample, _Way(self, self._life, dst), attempt)
                return
        self._move_failed(sample, leaving)

    def lose(self, reason: str) -> None:
        """Ends the present life, whatever it does."""
        if life := self._life:
            self.over(life, reason, RuntimeError(reason))

    # ----------------------------------------------- what lives say and do

    def heard(self, life: _Life, item: Any) -> None:
        match item:
            case Crashed(error=error):
                self.over(life, f"{type(error).__name__}: {error}", error)
                return
            case Finished(sample=sample):
                fault = self._fault(sample.out_ids, sample.logprobs)
                fault = fault or ("its log-probs are not finite" if sample.finish == "error" else None)
            case Partial():
                fault = self._fault(item.out_ids, item.logprobs)
            case _:
                fault = None
        if fault:
            self.over(life, reason := f"it returned garbage: {fault}", RuntimeError(reason))
            return
        with self._lock:
            if self._life is not life:
                return
            match item:
                case Finished():
                    self._losses = 0
                case ev.MoveFailed(id=id):
                    self._leaving.pop(id, None)
                case ev.SampleMoved(id=id):
                    self._arriving.pop(id, None)
            self._outbox.put(item)

    def left(self, life: _Life, id: SampleId) -> tuple[bool, _Life | None]:
        """(is this still to be heard, the life it was meant for)."""
        with self._lock:
            if self._life is not life:
                return False, None
            return True, self._leaving.pop(id).life

    def take(self, parcel: InFlightSample, src: InstanceId, attempt: int, life: _Life | None) -> None:
        """A sample from another instance, meant for this life; where that is over, its recorded tokens go on."""
        with self._lock:
            if life is not None and self._life is life:
                self._arriving[parcel.id] = src, attempt
                life.do(EngineWorker.receive, parcel, src, attempt)
                return
        self._outbox.put(ev.SampleMoved(id=parcel.id, src=src, dst=self.instance, attempt=attempt))

    def over(self, life: _Life, reason: str, error: BaseException) -> None:
        """The life has ended, or is treated so: its instance is down, its debts are paid, another life may begin."""
        with self._lock:
            if self._life is not life:
                return
            self._waited_s += life.wait_s
            self._tokens += life.tokens
            self._life = None
            self._losses += 1
            self.gone = life.hung or self._spare.new_engine is None or self._losses >= MAX_LOSSES
            self._outbox.put(ev.InstanceDown(instance=self.instance, reason=reason, life=life.life))
            for sample, leaving in self._leaving.items():
                self._move_failed(sample, leaving)
            for sample, (src, attempt) in self._arriving.items():
                self._outbox.put(ev.SampleMoved(id=sample, src=src, dst=self.instance, attempt=attempt))
            self._leaving, self._arriving = {}, {}
        self._notify(
            f"{self.role} is lost ({reason}); its samples go on elsewhere"
            f"{', and it stays away' if self.gone else ', and it is made again'}"
        )
        if self.gone:
            self._stay_away(error)
        else:
            self._begin(self._rise, life)

    # ------------------------------------------------------------ private

    def _move_failed(self, sample: SampleId, leaving: _Leaving) -> None:
        self._outbox.put(
            ev.MoveFailed(
                id=sample, src=self.instance, dst=leaving.dst, attempt=leaving.attempt, reason="its instance is lost"
            )
        )

    def _send(self, call: Callable[..., None], *args: Any) -> None:
        """To nobody where the life is over: InstanceDown is on its way, and gives back what was asked for."""
        if life := self._life:
            life.do(call, *args)

    def _fault(self, out_ids: np.ndarray, logprobs: np.ndarray) -> str | None:
        if len(out_ids) != len(logprobs):
            return f"{len(out_ids)} tokens have {len(logprobs)} log-probs"
        if not len(out_ids):
            return None
        if out_ids.min() < 0 or out_ids.max() >= self._spare.vocab_size:
            return f"token {out_ids.max() if out_ids.min() >= 0 else out_ids.min()} of {self._spare.vocab_size}"
        if not np.isfinite(logprobs).all():
            return "its log-probs are not finite"
        return f"a log-prob of {logprobs.max()}" if logprobs.max() > MAX_LOGPROB else None

    def _rise(self, ended: _Life) -> None:
        """On a thread of its own: frees the old engine, makes another."""
        ended.stop()
        ended.engine = None
        try:
            engine = self._spare.new_engine()
            engine.warmup()
        except Exception as error:  # whatever it is, the others go on, and the run ends where there are none
            self._notify(f"{self.role} could not be made again ({error}); it stays away")
            self._stay_away(error)
            return
        self._lives += 1
        life = self._new_life(engine)
        life.start()
        event = dataclasses.replace(self._event, life=life.life)
        self._outbox.put(InstanceReady(event=event, admit=lambda: self._admit(life)))

    def _begin(self, call: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=call, args=args, name=f"{self.role} {call.__name__}", daemon=True)
        thread.start()  # before `stop` can find it: one that has not begun cannot be waited for
        self._threads.append(thread)

    def _stay_away(self, error: BaseException) -> None:
        self.gone = True
        if all(peer.gone for peer in self._peers.values()):
            self._outbox.put(Crashed(role=self.role, error=error))

    def _admit(self, life: _Life) -> tuple[()]:
        with self._lock:
            self._life = life
        return ()

    def _watch(self) -> None:
        while not self._done.wait(self._spare.hung_s / LOOKS):
            life = self._life
            if life is not None and life.call_s > self._spare.hung_s:
                life.hung = True
                self.over(life, f"it has been in one call for {life.call_s:.0f} s", TimeoutError(self.role))


class _Life(EngineWorker):
    """One engine and its thread, from start to end."""

    def __init__(self, owner: LocalInstance, engine: Any, weights: Any, partial_s: float, life: int):
        super().__init__(owner.instance, engine, weights, _Tap(owner, self), partial_s, life)
        self.hung = False  # nothing can end it
        self._called_s: float | None = None
        self._bringing: threading.Thread | None = None
        self._brought_s: float | None = None  # since when it is bringing weights

    @property
    def call_s(self) -> float:
        """How long the present call or tick has lasted, or the weights are on their way."""
        began = [at for at in (self._called_s, self._brought_s) if at is not None]
        return time.monotonic() - min(began) if began else 0.0

    def do(self, call: Callable[..., None], *args: Any) -> None:
        """`call`: a method of EngineWorker, or `bring`."""
        self.post(call, self, *args)

    def bring(self, version: Version, drop: Version | None) -> None:
        """As `load`; samples go on while the weights come to the devices."""
        if self._bringing is not None and self._bringing.is_alive():
            self._bringing.join()
            self.post(self.bring, version, drop)  # behind what that one has brought
            return
        if drop is not None:
            self.engine.drop(drop)
        if self.engine.idle:
            self.load(version, None)
            return
        self._brought_s = time.monotonic()
        args = version, self.engine.param_shardings
        self._bringing = threading.Thread(target=self._bring, args=args, name=f"{self.role} weights", daemon=True)
        self._bringing.start()

    def _bring(self, version: Version, shardings: Any) -> None:
        try:
            weights = self._weights.get(version, shardings)
        except BaseException as error:  # raised on the worker's own thread
            self.post(self._fail, error)
        else:
            self.post(self.take_into_use, version, weights)
        self._brought_s = None

    def _fail(self, error: BaseException) -> None:
        raise error

    def work(self) -> None:
        self._called_s = time.monotonic()
        super().work()

    def _next(self) -> Any:
        self._called_s = None
        job = super()._next()
        self._called_s = time.monotonic()
        return job


class _Tap:
    """The outbox of a life."""

    def __init__(self, owner: LocalInstance, life: _Life):
        self._owner, self._life = owner, life

    def put(self, item: Any) -> None:
        self._owner.heard(self._life, item)


class _Way:
    """The destination of a move, as the life that gives the sample away sees it."""

    def __init__(self, src: LocalInstance, life: _Life, dst: LocalInstance):
        self._src, self._life, self._dst = src, life, dst
        self.instance = dst.instance

    def post(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)

    def receive(self, parcel: InFlightSample, src: InstanceId, attempt: int) -> None:
        heard, life = self._src.left(self._life, parcel.id)
        if heard:
            self._dst.take(parcel, src, attempt, life)
