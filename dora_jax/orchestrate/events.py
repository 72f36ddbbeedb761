"""The two alphabets of the orchestrator: events are facts (past tense), commands are requests (imperative).

Only ids and counts travel here; payload (tokens, log-probs, rewards, weights) goes from stage to stage.
A command reserves, the event that answers it commits. A command to an instance is the message that travels to it.

Events of an instance carry its incarnation: a number that rises each time the instance comes up. Those of a sample name
the attempt that placed it, a Start, Resume or Move (None: a journal of an older format did not); an answer names its
Move or its wait. Facts of one incarnation come in order; what else is late or repeated is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dora_jax.types import GroupId, InstanceId, SampleId, Version


class ImpossibleFact(RuntimeError):
    """No body that does what it was asked can report this. Nothing has changed; the message is a sentence."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceUp:
    instance: InstanceId
    slots: int  # samples that decode at once
    pages: int  # KV pages it holds
    page_size: int  # tokens a page
    residents: int = 1  # versions it can hold at once (R)
    speed: float = 1.0  # relative decode speed
    versions: tuple[Version, ...] = ()  # already loaded
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDown:
    instance: InstanceId
    reason: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceUnhealthy:
    """What the instance sampled up to the end of this incarnation, which may be long over, cannot be believed: NaN,
    say."""

    instance: InstanceId
    reason: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    instance: InstanceId
    version: Version
    incarnation: int = 0
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStarted:
    id: SampleId
    instance: InstanceId
    version: Version
    incarnation: int = 0
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDone:
    id: SampleId
    instance: InstanceId | None  # None: it was waiting, and its environment ended it
    tokens: int
    finish: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCancelled:
    id: SampleId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMoved:
    id: SampleId
    src: InstanceId
    dst: InstanceId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFailed:
    id: SampleId
    src: InstanceId
    dst: InstanceId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleParked:
    id: SampleId
    instance: InstanceId
    incarnation: int = 0
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResumed:
    id: SampleId
    instance: InstanceId
    incarnation: int = 0
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWaiting:
    """Its turn has ended: from now on it waits for its environment, and holds neither slot nor pages. The answer is one
    of SampleReady, SampleDone(instance=None) and GroupFailed."""

    id: SampleId
    instance: InstanceId
    tokens: int  # so far, observed ones included
    kept: bool = False  # its KV stays on the instance until pages run short: it goes on there if it can
    incarnation: int = 0
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReady:
    """Its environment has answered: it goes on by Resume."""

    id: SampleId
    tokens: int  # so far, those just observed included; 0: nothing is left of it, and it begins again from its prompt
    attempt: int | None = None  # of the wait that it answers


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScored:
    """trainable = False: filtered (dynamic sampling); its credit returns to admission."""

    group_id: GroupId
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailed:
    """The prompt could not be used or scored (too long, reward error after retries); never a reward of 0."""

    group_id: GroupId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCame:
    """A client asks the endpoint of the run for one sample (see `is_served`). The answer is SampleDone, or
    Discard: the version has retired, or a GroupFailed reported that the client is gone."""

    group_id: GroupId
    version: Version
    attempt: int | None = None  # higher than that of any request before: a client may ask under an id again


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPublished:
    version: Version  # the new version; its batch was taken at base version - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTrained:
    """The trainer is done with all groups that it has, and the step lacks more. Sent where its chips can be lent."""

    base_version: Version
    groups: int  # of the step at this base, so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """Ticks that only decoded, and of which a call verified drafts from siblings (rollout/drafts.py)."""

    sampled: int  # tokens
    busy_s: float
    row_s: float  # of each sample, summed
    guesses: int  # tokens of the drafts, up to the first of each that did not hold
    held: int  # those of them that held


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReported:
    """How far an instance is, once a period: every sample that it runs and that has a token; or none of them, where
    none has grown since, or, in a large fleet, where it has listed them a short time ago. The tokens themselves stay in
    the engine. In columns: plain numbers cost journal and wire a third of what ids do."""

    instance: InstanceId
    free: int  # KV pages, evictable prefixes included
    groups: tuple[GroupId, ...] = ()  # of each sample: its group, its index in the group, its tokens so far
    indices: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    incarnation: int = 0
    # of the ticks since the last report that only decoded, without drafts: tokens sampled, their time, and that of each
    # sample, summed
    sampled: int = 0
    busy_s: float = 0.0
    row_s: float = 0.0
    drafted: Drafted | None = None  # of those since the last report

    @classmethod
    def of(
        cls,
        instance: InstanceId,
        free: int,
        progress: Mapping[SampleId, int],
        incarnation: int = 0,
        *,
        sampled: int = 0,
        busy_s: float = 0.0,
        row_s: float = 0.0,
        drafted: Drafted | None = None,
    ) -> InstanceReported:
        """progress: sample -> tokens so far."""
        groups, indices = zip(*progress, strict=True) if progress else ((), ())
        return cls(
            instance=instance, free=free, groups=groups, indices=indices, tokens=tuple(progress.values()),
            incarnation=incarnation, sampled=sampled, busy_s=busy_s, row_s=row_s, drafted=drafted,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    now_s: float


InstanceFact = InstanceUp | InstanceDown | InstanceUnhealthy | WeightsLoaded | InstanceReported
AttemptFact = SampleStarted | SampleDone | SampleParked | SampleResumed | SampleWaiting  # by the instance that has it
AnswerFact = SampleCancelled | SampleMoved | MoveFailed | SampleReady
ProgressFact = GroupScored | GroupFailed | RequestCame | StepPublished | PartTrained | TimePassed
Event = InstanceFact | AttemptFact | AnswerFact | ProgressFact

# -------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Load `version`, from wherever the body finds it; `drop` names the resident version that makes room (None: there
    is room)."""

    instance: InstanceId
    version: Version
    drop: Version | None = None
    attempt: int | None = None  # None: the body loads it of itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """The instance was unhealthy up to the end of an incarnation, which is over: nothing that it sampled until then
    will be trained, but for `group_ids`, of which it sampled a part and which trained in the steps that made
    `steps`."""

    instance: InstanceId
    reason: str
    group_ids: tuple[GroupId, ...]
    steps: tuple[Version, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Sample from the prompt. Whatever is left of a sample that began on an instance in quarantine is forgotten
    here."""

    ids: tuple[SampleId, ...]
    instance: InstanceId
    version: Version
    attempt: int = 0  # higher than that of any Start or Resume before; see the page


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    ids: tuple[SampleId, ...]
    src: InstanceId
    dst: InstanceId
    attempt: int  # higher than that of any Move before, and lower than that of any Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    ids: tuple[SampleId, ...]
    instance: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Continue at `version` from parked or journaled tokens (also: samples of a lost instance, and those whose
    environment has answered)."""

    ids: tuple[SampleId, ...]
    instance: InstanceId
    version: Version
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The samples end unfinished: SampleCancelled answers each that has not ended. instance None: they run nowhere."""

    ids: tuple[SampleId, ...]
    instance: InstanceId | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """A group that failed or was given up has ended, behind its last sample: nothing retained of it will be asked
    for."""

    group_id: GroupId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Part of a step, or all of it: the version is published once P groups of one base were trained."""

    group_ids: tuple[GroupId, ...]
    base_version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """No sample and no instance needs this version any more: its weights may be freed."""

    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    instance: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpause:
    instance: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Lend:
    """The trainer's state leaves these chips, and they decode as an instance that holds `version`, which does not
    retire meanwhile. The answer is InstanceUp, or InstanceDown of an incarnation that never came up."""

    instance: InstanceId
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """The instance gives its chips back: its samples are recorded, with their KV where possible, and the trainer's
    state comes back. The answer is InstanceDown."""

    instance: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """The run is over: all steps done (ok) or it cannot go on (not ok); `reason` is a sentence."""

    ok: bool
    reason: str


SampleCommand = Start | Move | Park | Resume | Cancel
InstanceCommand = LoadWeights | Pause | Unpause | Lend | Return
Command = SampleCommand | InstanceCommand | Quarantine | Discard | Train | Retire | Halt
