"""The trainer gang as the controller sees it: what TrainerWorker, resume and the saver of checkpoints ask of a trainer.

    step(parts)     -> TrainGroups for each, then FinishStep    weights.put(version, params) -> PublishWeights,
                    WriteWeights
    load(..., step) -> RestoreCheckpoint                        checkpoints.save(version, ...) -> SaveCheckpoint

Consumes groups and versions; produces metrics and digests: arrays never come here. Laws: a new gang is brought to where
the lost one was (newest checkpoint that verifies, then the steps since, from the journal, then the parts of the step
under way) before it is asked for anything else, so a caller never learns that a gang died; a version that is published
is never written again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dora_jax.base.lanes import doing
from dora_jax.config import CheckpointSection, RunError
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.checkpoint_shards import StepStore
from dora_jax.runtime.cluster.gang import CallRefused, Gang, GangDied
from dora_jax.runtime.cluster.gang_supervisor import GangSupervisor
from dora_jax.runtime.cluster.weight_publisher import TRAINER, WeightPublisher
from dora_jax.runtime.common.sample_gaps import SampleGap
from dora_jax.runtime.common.sample_log import TokenView
from dora_jax.runtime.common.seams import Tree
from dora_jax.runtime.journal.payload_state import Step
from dora_jax.runtime.journal.records import Saved
from dora_jax.runtime.journal.resume import INITIAL
from dora_jax.runtime.transfer.weight_messages import VersionDue
from dora_jax.trainer import checkpoint
from dora_jax.trainer.checkpoint import Digests, Restored, UnusableCheckpoint
from dora_jax.types import SampleId, ScoredGroup, Version

if TYPE_CHECKING:
    from dora_jax.trainer.step import Probe


@dataclasses.dataclass
class RemoteState:
    """The version of the gang's trainer; its arrays stay in the gang."""

    step: Version = INITIAL
    params: Tree = None
    opt_state: Tree = None


Part = tuple[Sequence[ScoredGroup], Version]  # groups of one step, and its base


def part(groups: Sequence[ScoredGroup], base: Version) -> tuple[Part]:
    """Stands for the packer of a local trainer: the gang packs its own groups."""
    return ((groups, base),)


class RemoteTrainer:
    """`PolicyTrainer` of a gang. One thread uses it at a time: the main thread until the run begins, then the
    worker's."""

    def __init__(
        self,
        checkpoints: StepStore,
        steps_since: Callable[[Version], Sequence[Step]],
        publisher: WeightPublisher,
        notify: Callable[[str], None],
        new_supervisor: Callable[..., GangSupervisor],
    ):
        self.state = RemoteState()
        self.gang: Gang | None = None  # brought to where the trainer is
        self.on_up: Callable[[], None] = lambda: None  # a new gang is there: asks for `catch_up`
        self._digest: int | None = None
        self._last: tuple[Version, tuple[ScoredGroup, ...]] | None = None  # the journal may not have this step yet
        self._newest: tuple[Version, messages.StepFinished] | None = None  # step
        self.digests: dict[Version, Digests] = {}  # of the checkpoints that were saved
        self._begun: tuple[ScoredGroup, ...] = ()  # of the step under way, that the gang has learned from
        self._checkpoints, self._steps_since, self._notify = checkpoints, steps_since, notify
        self._publisher = publisher
        self._ups: queue.SimpleQueue[Gang | RunError] = queue.SimpleQueue()
        self.params: RemoteTrainer = self  # what `weights.put` and `digest` take for the weights
        self.supervisor = new_supervisor(
            TRAINER, on_message=publisher.tell, up=self._up, down=publisher.down, failed=self._ups.put
        )

    # ----------------------------------------------------------- as a Trainer

    def step(self, batch: Iterable[Part], probe: Probe | None = None) -> Mapping[str, float]:
        """Asks an iterator for the next part when the gang has trained on the one before. The gang makes its own
        probe."""
        for groups, base in batch:
            with doing("update"):
                self._do(messages.TrainGroups(base=base, groups=tuple(groups)))
            self._begun += tuple(groups)
        with doing("update"):
            made = self._do(messages.FinishStep(base=base))
        self._last, self._begun = (base, self._begun), ()
        self._newest = base + 1, made
        self.state.step, self._digest = base + 1, made.digest
        return made.metrics

    def load(self, params: Tree, opt_state: Tree, step: Version) -> None:
        """The gang has loaded it (`restore`)."""
        if step != self.state.step:
            raise RuntimeError(f"version {step} is asked of a trainer that has restored version {self.state.step}")

    def abstract_state(self) -> RemoteState:
        return self.state

    def take(self, version: Version) -> dict[SampleId, TokenView]:
        """`SeenTokens` of the gang; empty of any step but the newest."""
        newest, made = self._newest or (INITIAL, None)
        return {view.id: view for view in made.views} if made and newest == version else {}

    def gaps(self, version: Version) -> tuple[SampleGap, ...]:
        """`SeenGaps` of the gang; empty of any step but the newest."""
        newest, made = self._newest or (INITIAL, None)
        return made.gaps if made and newest == version else ()

    # -------------------------------------------------------------- its own

    def restore(self, step: Version) -> None:
        """Makes the gang go on from this checkpoint. CallRefused: it cannot be used, and nothing has changed."""
        self._do(_restoring(step, self.digests))
        self.state.step, self._digest = step, None

    def check(self, step: Version) -> None:
        """CallRefused: the arrays of this checkpoint, which has no manifest, are not what was saved."""
        known = self.digests[step]
        self._do(messages.CheckCheckpoint(step=step, params=known.params, opt_state=known.opt_state))

    def digest(self) -> int:
        if self._digest is None:
            self._digest = self._do(messages.ComputeDigest()).value
        return self._digest

    def publish(self, version: Version, copy: int = 0) -> int:
        """Publishes the version: on return instances can load it, from the trainer's processes or from storage.

        Returns the digest of its copy. copy: what the journal has for it, where the version is in storage already."""
        if version != self.state.step:
            raise RuntimeError(f"version {version} cannot be published by a trainer at version {self.state.step}")
        self._publisher.begin(version, copy)
        while True:
            gang = self._brought()  # a gang that comes anew publishes what is live and nowhere
            with contextlib.suppress(GangDied):
                self._publish(gang, version)
                return self._publisher.digests.get(version, 0)

    def catch_up(self) -> None:
        """Brings a new gang to where the lost one was; any later call would, this one does it early."""
        with contextlib.suppress(GangDied):  # the next gang's turn
            self._brought()

    # -------------------------------------------------------------- private

    def _up(self, gang: Gang) -> None:
        self._publisher.up(gang)
        self._ups.put(gang)
        self.on_up()

    def _publish(self, gang: Gang, version: Version) -> None:
        """Publishes the version, unless it is in storage already."""
        if version in self._publisher.stored.versions:
            return
        copies = {answer.value for answer in gang.call(messages.PublishWeights(version=version))}
        known = self._publisher.digests.get(version, 0)
        if len(copies) > 1 or (known and known not in copies):
            found = ", ".join(f"{copy:016x}" for copy in sorted(copies))
            gang.die(
                f"its copy of version {version} has the digest {found}"
                + (f", and the one that was published {known:016x}" if known else ", which is not one number")
            )
            raise GangDied(gang.reason)
        self._publisher.kept(gang, version, copies.pop())

    def _do(self, what: messages.TrainerCall) -> Any:
        """The answer on which all processes agree. If the gang dies over it, the next gang is asked."""
        while True:
            try:
                answers = self._brought().call(what)
            except GangDied:
                continue
            digests = {answer.digest if isinstance(answer, messages.StepFinished) else answer for answer in answers}
            if len(digests) > 1:
                raise RuntimeError(f"the processes of the trainer disagree over {type(what).__name__}: {answers}")
            return answers[0]

    def _brought(self) -> Gang:
        while self.gang is None or self.gang.dead.is_set():
            self.gang = None
            gang = self._ups.get()
            if isinstance(gang, RunError):
                self._ups.put(gang)  # the next caller gets the error too
                raise gang
            with contextlib.suppress(GangDied):
                self._bring(gang)
                self.gang = gang
        return self.gang

    def _bring(self, gang: Gang) -> None:
        """From the weights of model.path to `self.state.step`."""
        at, nowhere = self.state.step, self._publisher.nowhere_else()
        oldest = min([at, *nowhere])
        start = INITIAL  # or that of the newest checkpoint that the gang can use
        for step in [step for step in reversed(self._checkpoints.steps()) if step <= oldest]:
            fault = self._checkpoints.fault(step)
            try:
                if fault is None:
                    gang.call(_restoring(step, self.digests))
                    start = step
                    break
            except CallRefused as error:
                fault = str(error)
            self._notify(f"checkpoint {step} cannot be trusted and is stepped over: {fault}")
        steps: dict[Version, tuple[tuple[ScoredGroup, ...], int | None]] = {
            made.base: (made.groups, made.published.digest) for made in self._steps_since(start)
        }
        if self._last is not None:
            steps.setdefault(self._last[0], (self._last[1], self._digest))
        if start in nowhere:
            self._publish(gang, start)
        recalled = 0
        for base in range(start, at):
            if base not in steps:
                raise RunError(
                    f"the trainer is lost at version {at}, and step {base + 1} cannot be made again: the "
                    f"journal does not hold its groups (journal.on keeps them)"
                )
            groups, published = steps[base]
            gang.call(messages.TrainGroups(base=base, groups=groups))
            answer = gang.call(messages.FinishStep(base=base))[0]
            recalled += answer.recalled
            if published is not None and answer.digest != published:
                self._notify(
                    f"version {base + 1} came out with other weights ({answer.digest:016x}, not {published:016x}); "
                    f"what was published stays, training goes on from here"
                )
                self._publisher.tell(VersionDue(version=base + 1, due=False))
            elif base + 1 in nowhere:
                self._publish(gang, base + 1)
        if self._begun:
            gang.call(messages.TrainGroups(base=at, groups=self._begun))
        if at != INITIAL:
            self._notify(
                f"the trainer is back at version {at}: checkpoint {start}, {at - start - recalled} steps made "
                f"again, {recalled} remembered"
            )


def _restoring(step: Version, digests: Mapping[Version, Digests]) -> messages.RestoreCheckpoint:
    known = digests.get(step, Digests(0, 0, 0))
    return messages.RestoreCheckpoint(step=step, params=known.params, opt_state=known.opt_state)


class RemoteCheckpoints:
    """The gang writes, the controller reads; in a bucket it makes a step of what the processes have put, and keeps the
    steps. Used by the main thread; what it asks for is done between two steps."""

    def __init__(
        self, stored: StepStore, section: CheckpointSection, trainer: RemoteTrainer, notify: Callable[[str], None]
    ):
        self._stored, self._section, self._trainer, self._notify = stored, section, trainer, notify
        self.steps, self.unsealed, self.aside = stored.steps, stored.unsealed, stored.aside
        self.set_aside = stored.set_aside
        self._floor: Version = INITIAL
        self._pending: list[Any] = []
        self._saves: list[tuple[Version, Digests]] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "seal")
        self._sealing: concurrent.futures.Future | None = None
        self._failing = False

    def save(
        self, step: Version, params: Tree, opt_state: Tree, rl_state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        floats = {name: float(value) for name, value in metrics.items()}
        self._ask(messages.SaveCheckpoint(version=step, rl_state=json.loads(json.dumps(rl_state)), metrics=floats))

    def take_saves(self, wait: bool = False) -> list[tuple[Version, Digests]]:
        self._look(wait)
        saves, self._saves = self._saves, []
        return saves

    def protect(self, version: Version) -> None:
        self._floor = version

    def poll(self) -> None:
        self._ask(messages.PollCheckpoint(floor=self._floor, wait=False))
        self._look()

    def _look(self, wait: bool = False) -> None:
        """Takes in the answers that have come, or all of them."""
        done = [pending for pending in self._pending if wait or pending.done.is_set()]
        self._pending = [pending for pending in self._pending if pending not in done]
        for pending in done:
            self._see(pending)

    def wait(self) -> None:
        self._ask(messages.PollCheckpoint(floor=self._floor, wait=True))
        while self._pending:
            self._see(self._pending.pop(0))
            concurrent.futures.wait([self._sealing] if self._sealing else [])
        self._check_sealing()

    def adopt(self, step: Version, params: Tree, opt_state: Tree, digests: Digests) -> None:
        self._read(self._trainer.check, step, digests)
        self._stored.seal(step)

    def undo_after(self, version: Version) -> None:
        for step in [step for step in self.steps() if step > version]:
            self._notify(f"checkpoint {step} is later than what can be recovered and is moved aside")
            self.set_aside(step, "undone")

    def restore(self, step: Version, params: Tree, opt_state: Tree, digests: Digests | None = None) -> Restored:
        """Its arrays go to the gang, which holds the version on return."""
        if fault := self._stored.fault(step):
            raise UnusableCheckpoint(fault)
        return Restored(None, None, *self._read(self._trainer.restore, step, digests))

    def close(self) -> None:
        self.wait()
        self._pool.shutdown()

    def _read(
        self, ask: Callable[[Version], None], step: Version, digests: Digests | None
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """What the checkpoint holds beside arrays, with which the gang does what `ask` says."""
        read = functools.partial(self._stored.read_json, step)
        texts = checkpoint.read_texts(read, digests.rl_state if digests else 0)
        if digests is not None:
            self._trainer.digests[step] = digests
        try:
            ask(step)
        except CallRefused as error:
            raise UnusableCheckpoint(str(error)) from error
        return texts

    def _ask(self, what: Any) -> None:
        gang = self._trainer.gang
        try:
            if gang is None:
                raise GangDied("it is being started again")
            self._pending.append(gang.cast(what))
        except GangDied as error:
            if isinstance(what, messages.SaveCheckpoint):
                self._notify(f"checkpoint {what.version} is left out: the trainer is lost ({error})")

    def _see(self, pending: Any) -> None:
        try:
            answers = pending.wait()
        except (GangDied, CallRefused) as error:
            self._notify(f"the trainer did not finish with its checkpoint: {error}")
            return
        if all(isinstance(answer, Saved) for answer in answers):
            # of all processes, which have computed the same
            if len(set(answers)) > 1:
                raise RuntimeError(f"the processes of the trainer disagree over SaveCheckpoint: {answers}")
            saved = answers[0]
            digests = Digests(params=saved.params, opt_state=saved.opt_state, rl_state=saved.rl_state)
            self._trainer.digests[saved.version] = digests
            self._saves.append((saved.version, digests))
        put = {answer.step: answer for answer in answers if isinstance(answer, messages.CheckpointFiles)}
        if len(put) == 1 and all(isinstance(answer, messages.CheckpointFiles) for answer in answers):
            step = answers[0].step
            # beside the run; a store that fails is asked again with the next poll
            if self._sealing is not None and not self._sealing.done():
                return
            self._check_sealing()
            if step not in self.steps():
                self._sealing = self._pool.submit(self._finish, step, [answer.files for answer in answers])

    def _finish(self, step: Version, parts: Sequence[Any]) -> None:
        self._stored.seal(step, parts)
        known = self.steps()
        kept = checkpoint.to_keep(known, self._section, self._floor, lambda s: self._stored.read_json(s, "metrics"))
        for old in known:
            if old not in kept:
                self.set_aside(old, "forgotten")

    def _check_sealing(self) -> None:
        if self._sealing is None:
            return
        error, self._sealing = self._sealing.exception(), None
        if error is not None and not isinstance(error, OSError):
            raise error
        if error is not None and not self._failing:
            self._notify(
                f"the bucket's checkpoints cannot be kept up ({error}): the newest that is whole is "
                f"{max(self.steps(), default=None)}"
            )
        self._failing = error is not None
