"""The seams of the runtime: a Protocol for each place where one implementation stands for another.

    orchestrator <-- World --> coordinator --+-- RolloutWorker --> RolloutEngine      Backend: one process, or a cluster
                                             +-- TrainerWorker --> PolicyTrainer
                                             +-- Prompts, Scorer

World           Coordinator; JournaledWorld and GuardedWorld in front of it; sim.world (orchestrate/core.py)
Backend         LocalBackend; cluster.backend.ClusterBackend
RolloutWorker   EngineWorker (a thread); LocalInstance and RemoteInstance, which may crash and restart
RolloutEngine   rollout.engine.Engine; PacedEngine and TimedEngine around one
PolicyTrainer   trainer.step.Trainer; cluster.RemoteTrainer; PacedTrainer around one
CheckpointStore trainer.checkpoint.Checkpoints; cluster.RemoteCheckpoints
Scorer          tasks.pool.ScorerPool; tasks.reward_model.ModelScorer; episodes.EpisodeScorer
Environments    tasks.environments.EnvironmentPool
GroupStore      buffer.pack.MemoryGroupStore
RunPlugin       what hangs on a run: log, timeline, storage, and each feature that listens
WeightStore     publish.HostWeights (memory), transfer.StoredWeights (storage), and of the trainer
PublishedWeights    publish.DeviceWeights, cluster.WeightPublisher (its processes, which send them over the wire)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dora_jax.buffer.pack import MemoryGroupStore as GroupStore
from dora_jax.orchestrate.core import each
from dora_jax.types import EpisodeSoFar, GroupId, InstanceId, Prompt, Sample, SampleId, Sampling, ScoredGroup, Version

if TYPE_CHECKING:
    import numpy as np

    from dora_jax.orchestrate.events import Command, Event, InstanceUp
    from dora_jax.rollout.migrate import InFlightSample, SampledTokens
    from dora_jax.rollout.ticks import TickResult
    from dora_jax.runtime.common.sample_gaps import SeenGaps
    from dora_jax.runtime.common.sample_log import SeenTokens
    from dora_jax.runtime.common.worker import Message, Worker
    from dora_jax.tasks.environments import Answer
    from dora_jax.tasks.pool import GroupFailure
    from dora_jax.trainer.checkpoint import Digests, Restored
    from dora_jax.trainer.step import Probe

__all__ = ["GroupStore"]

Tree = Any  # a pytree: arrays, `publish.Slices`, ShapeDtypeStructs or shardings
Batches = Any  # what `Pack` makes of a step's groups and `PolicyTrainer.step` takes
Pack = Callable[[Sequence[ScoredGroup], Version], Batches]  # (groups, base version) -> the step's batches
Digest = Callable[[Tree], int]  # a fingerprint of weights
MakeProbe = Callable[[ScoredGroup, Version, Tree], "Probe"]  # (group, its version, that version's weights)
Notify = Callable[[str], None]  # prints a sentence on the console of the run


class WeightStore(Protocol):
    """The weights of several versions. A version is immutable: its number is put once. Any thread may use the store."""

    @property
    def versions(self) -> tuple[Version, ...]:
        """The versions that are whole, oldest first."""

    def put(self, version: Version, weights: Tree) -> object:
        """Keeps these weights as `version`."""

    def get(self, version: Version, shardings: Tree | None) -> Tree:
        """The weights in the layout that `shardings` describe; None: as they are kept. KeyError: this process does not
        hold the version."""

    def drop(self, version: Version) -> None:
        """Forgets the version. A version that is not there is dropped already."""


class PublishedWeights(WeightStore, Protocol):
    """The trainer's store, to which its masters are published."""

    def put(self, version: Version, weights: Tree, digest: int = 0, copy: int = 0) -> int:
        """Publishes a copy of the masters in the engines' type; returns the digest of that copy, stacked (0: unknown).

        digest: of the masters, where it is known. copy: of an equal copy that the journal knows, for a version that is
        not copied again because storage has it."""


class RolloutEngine(Protocol):
    """Continuous batching of samples at several resident versions. One thread uses an engine."""

    param_shardings: Tree  # where the engine's weights lie

    @property
    def versions(self) -> tuple[Version, ...]:
        """The resident versions."""

    @property
    def idle(self) -> bool:
        """No sample is here."""

    def warmup(self) -> None:
        """Compiles."""

    def load(self, version: Version, params: Tree) -> None: ...

    def drop(self, version: Version) -> None: ...

    def submit(
        self,
        id: SampleId,
        prompt_ids: np.ndarray,
        version: Version,
        max_new_tokens: int,
        turn_tokens: int = 0,
        sampling: Sampling | None = None,
    ) -> None:
        """prompt_ids: i32[T]. turn_tokens: that one turn of an episode may sample; 0: the sample is one answer.
        sampling: None: as the run samples."""

    def cancel(self, id: SampleId) -> bool:
        """False: the sample is not here."""

    def holds(self, id: SampleId) -> bool: ...

    def version_of(self, id: SampleId) -> Version: ...

    def sampled(self, id: SampleId, start: int = 0, row: int = 0) -> SampledTokens:
        """A running sample's tokens from `start` on, and its table's rows from `row` on."""

    def export(self, id: SampleId) -> InFlightSample:
        """Takes the sample out, with its KV in host memory."""

    def import_(self, in_flight: InFlightSample) -> None:
        """What it has no KV for is prefilled: of an episode, what it observed since its turn ended."""

    def with_kept(self, in_flight: InFlightSample) -> InFlightSample:
        """An episode with the KV that the engine has kept of it, if any; the engine keeps it no longer."""

    def forget(self, id: SampleId) -> None:
        """Drops KV that the engine has kept of an episode that waits."""

    def know(self, id: SampleId, tokens: np.ndarray) -> None:
        """i32[U]: the response, so far, of a sample elsewhere, of which drafts for its siblings may be made."""

    def tick(self) -> TickResult: ...


class PolicyTrainer(Protocol):
    """Makes version base + 1 of the groups that were packed for it. One thread uses a trainer at a time."""

    state: Any  # `step`, `params` and `opt_state`

    @property
    def params(self) -> Tree: ...

    def step(self, batch: Batches, probe: Probe | None = None) -> Mapping[str, float]:
        """One optimizer step a batch; an iterator may wait for the next batch. probe: see MismatchProbe."""

    def load(self, params: Tree, opt_state: Tree, step: Version) -> None: ...

    def abstract_state(self) -> Any:
        """`state` as ShapeDtypeStructs with shardings."""


class Closable(Protocol):
    def close(self) -> None: ...


class CheckpointStore(Closable, Protocol):
    """The checkpoints of a run. OSError: the storage did not do it."""

    def save(
        self, step: Version, params: Tree, opt_state: Tree, rl_state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> object:
        """Starts to save; the trainer may go on."""

    def take_saves(self, wait: bool = False) -> Sequence[tuple[Version, Digests]]:
        """The saves that were started since the last call, with digests of what they were given. Cheap, unless it waits
        for digests that are being computed."""

    def protect(self, version: Version) -> None:
        """Samples of this version still run: the checkpoint before it is kept."""

    def poll(self) -> None:
        """Finishes what has been written, without waiting."""

    def wait(self) -> None: ...

    def steps(self) -> list[Version]:
        """Checkpoints with a manifest, oldest first."""

    def unsealed(self) -> list[Version]:
        """Checkpoints that are complete but for their manifest."""

    def adopt(self, step: Version, params: Tree, opt_state: Tree, digests: Digests) -> None:
        """Gives an unsealed checkpoint its manifest if what it restores to has these digests. UnusableCheckpoint: it
        has not; nothing changes."""

    def set_aside(self, step: Version, why: str) -> None:
        """Takes a checkpoint off the list; `why` is in the name of the folder that keeps it."""

    def aside(self) -> list[str]:
        """Names of the checkpoints that were moved aside, now or earlier."""

    def undo_after(self, version: Version) -> None:
        """Moves aside the checkpoints of later versions."""

    def restore(self, step: Version, params: Tree, opt_state: Tree, digests: Digests | None = None) -> Restored:
        """What `PolicyTrainer.load` takes. UnusableCheckpoint: it cannot be read, or has other digests; nothing
        changes."""


class Prompts(Protocol):
    def prompt_at(self, group_id: GroupId) -> Prompt:
        """A pure function of seed and group id. PromptTooLong: the prompt exceeds rollout.max_prompt_tokens."""


class Scorer(Closable, Protocol):
    """Law: an infrastructure error is a GroupFailure, never a reward."""

    def submit(self, prompt: Prompt, samples: tuple[Sample, ...]) -> None: ...

    def poll(self) -> Sequence[ScoredGroup | GroupFailure]:
        """The groups that ended since the last call, without waiting."""


class Environments(Closable, Protocol):
    """Law: an infrastructure error is an EpisodeFailed, never a reward; of an episode, the last question has an
    answer."""

    def open(self, id: SampleId, prompt: Prompt) -> None:
        """Asks what follows the prompt: Observed, perhaps of no tokens."""

    def turn(self, prompt: Prompt, so_far: EpisodeSoFar) -> None:
        """Asks for the answer to the last turn."""

    def drop(self, id: SampleId) -> dict[str, float]:
        """Forgets the episode; the reward terms so far."""

    def poll(self) -> Sequence[Answer]:
        """The answers since the last call, without waiting."""

    def stats(self) -> Mapping[str, float]: ...


class StageWorker(Protocol):
    """A stage with a thread of its own, here or elsewhere."""

    def spent(self) -> Mapping[str, float]:
        """Seconds by what it did since the start, the present moment included; see base/lanes.py."""

    @property
    def state(self) -> str:
        """A few words for a diagnosis."""

    def start(self) -> None: ...

    def stop(self, timeout_s: float = ...) -> None: ...


class Recipient(Protocol):
    """An instance, one incarnation of it, or what stands for one where a sample leaves another."""

    def send(self, message: Message, payload: Any = None, dst: Any = None) -> object:
        """Carry out a command on the instance's own thread, in the order of the calls.

        payload: the Prompt of a Start; the InFlightSample of a Resume, or of a Move where it arrives; the weights of
        LoadWeights (None: the instance fetches them). dst: the Recipient where the sample goes on, of a Move where it
        leaves, or of a Resume whose episode has left its KV here."""


class RolloutWorker(StageWorker, Recipient, Protocol):
    """One instance: commands go in by `send`, and events come out through its outbox."""

    instance: InstanceId
    incarnation: int  # the latest one

    def mark_unhealthy(self, incarnation: int, reason: str) -> None:
        """What the instance sampled up to the end of this incarnation is not believed: it ends, unless it has, and the
        instance is reported as unhealthy."""


@dataclass(frozen=True)
class TrainerSide:
    """What a run asks of its trainer."""

    trainer: PolicyTrainer
    checkpoints: CheckpointStore
    pack: Pack
    digest: Digest
    probe: MakeProbe | None = None  # see trainer_worker.MismatchProbe
    views: SeenTokens | None = None  # of the samples that a person reads
    gaps: SeenGaps | None = None  # by which instances are judged; None: they are not
    reload: Callable[[], None] = lambda: None  # returns when the trainer's state is on its devices


class RunPlugin:
    """A plug-in of a run: it overrides the hooks that it needs, each of which does nothing here."""

    does = "plug-ins"  # what the controller's lane does meanwhile

    def record(self, record: object) -> None:
        """Take a payload record: Finished, Partial, ScoredGroup, GroupFailure, StepDone or Quarantine."""

    def event(self, event: Event, commands: Sequence[Command]) -> None:
        """Take a fact; with the last one of a batch come the commands that the batch caused."""

    def observe(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Take a batch of facts with the commands that it caused, which are executed afterwards."""
        each(self.event)(events, commands)

    def close(self) -> None:
        """Let go of what is open: the stages have ended. It may be called twice."""


class Backend(Closable, Protocol):
    """Where the stages of a run compute."""

    @property
    def weights(self) -> PublishedWeights: ...

    def trainer_side(self) -> TrainerSide:
        """Loads the model."""

    def instances(self) -> Sequence[RolloutWorker]: ...

    def ready(self, instances: Sequence[Any], trainer: Worker | None) -> Sequence[InstanceUp]:
        """Compiles; the instances that are up on return. instances: what `instances` returned."""
