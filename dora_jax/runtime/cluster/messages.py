"""What travels between the controller and the processes of its gangs, and inside a gang: records, no behaviour.

Hello -> Begin -> Ready             a process joins its gang, and the gang its world
Hello -> Again -> Ready             a gang that has outlived its controller joins the next one
Call -> Answer                      to the trainer's first process, which shares it out as a Turn; each answers
weight_messages.py's commands and facts    between the controller and every process: how a version travels
posts (Submit, Swap, ...)           to the first process of a rollout gang, which shares them out as Turns
facts (events, Finished, ...)       back from the first process of a rollout gang
Moving, Carry, Carried, GiveBack    between the controller and every process: how a sample's KV travels
Beat                                from every process: it lives, and how far it is
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.codec import Codec
from dora_jax.runtime.durability.payload_state import Partial
from dora_jax.runtime.transfer import weight_messages
from dora_jax.runtime.transfer.transfer_manifest import Lent
from dora_jax.runtime.workers import Ended, Exported, Finished, HandedOver
from dora_jax.types import InstanceId, Prompt, SampleId, ScoredGroup, Version

# ----------------------------------------------------------- joining


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    gang: str
    epoch: int
    pid: int
    worker: int  # TPU_WORKER_ID, which decides its rank; -1: there is none
    coordinator: str  # where a world would meet, were this its first process
    leader: str  # where the others would get their turns
    rank: int = -1  # of one that has begun under an earlier controller


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    config: Any
    workdir: str
    instance: InstanceId | None  # None: the trainer
    rank: int
    hosts: int
    coordinator: str  # of the gang's first process
    leader: str
    epoch: int = 0  # of the gang, and the life of its instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """To every process of a gang that all have come back: end what the earlier controller asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    holds: tuple[Version, ...] = ()  # weights from before; of a new gang none


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    progress: int  # rises whenever something is done
    busy: bool  # there is something to do
    waited_s: float  # in all, with nothing to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The machine under this process is about to be taken away."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The process ends now; its gang with it."""

    error: str
    final: bool = False  # a process started in its place would end over the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A sentence for the console of the run."""

    text: str


# ------------------------------------------------------------- calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn:
    """Trainer: updates on some groups of a step, or on all of them."""

    base: Version
    groups: tuple[ScoredGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """Trainer: a version of the step whose groups it has learned from."""

    base: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Trainer: keep the weights of the version that it is at, to be served and written."""

    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Trainer: this process's part of a version that is kept, into storage."""

    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Trainer: go on from a checkpoint."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Trainer: start a checkpoint, where it is at this version."""

    version: Version
    rl_state: Any
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PollCheckpoint:
    """Trainer: look after what is being saved; samples need the checkpoint before `floor`."""

    floor: Version
    wait: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Trainer: the digest of the version that it is at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    number: int
    what: Learn | Make | Publish | Write | Restore | Save | PollCheckpoint | Fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    digest: int
    metrics: dict[str, float]
    recalled: bool = False  # it had been made for an earlier controller


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Done, and what this process has put into the bucket of the newest step that it has all put of."""

    step: Version
    files: Any  # name -> [bytes, crc32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Not done, and nothing has changed."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    number: int
    what: Made | Done | Part | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Trainer, without an answer: nobody will want this version any more."""

    version: Version


# ------------------------------------------------------------- posts


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Take weights into use that every process of the gang holds."""

    version: Version
    drop: Version | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    id: SampleId
    prompt: Prompt
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    id: SampleId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOut:
    id: SampleId
    dst: InstanceId
    epoch: int  # of dst
    number: int  # of this move, higher than that of any before
    attempt: int  # the orchestrator's number of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    parcel: InFlightSample  # with the KV that every process has fetched under `number`
    src: InstanceId
    attempt: int
    number: int  # 0: with what it has here


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOut:
    id: SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    parcel: InFlightSample
    number: int  # of the KV that every process has here; 0: with what it kept when the sample left


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Give all samples back, then do nothing more."""


Post = Swap | Submit | GiveUp | MoveOut | Receive | TakeOut | GoOn | HandOver | Again | Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What every process of a gang does before its next tick."""

    posts: tuple[Post, ...]


# ------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """A sample that has left its engine for another's; where its KV is offered, every process says so of its part."""

    lent: Lent
    src: InstanceId
    dst: InstanceId
    attempt: int
    number: int
    host: int
    hosts: int  # that say it


# ------------------------------------------------- KV of moving samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """Rollout, every process: fetch the part of the process of the same number."""

    number: int
    epoch: int  # of the gang that fetches
    lent: tuple[Lent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    number: int
    host: int
    fault: str  # empty: it is here


@dataclass(frozen=True, slots=True, kw_only=True)
class Bring:
    """Rollout, every process: its part of the pages of a sample that is to go on here. Answered as Carry is."""

    number: int
    parcel: InFlightSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """What was fetched under this number is not wanted: another process could not."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """What was offered under this number is over."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHanded:
    """One process's part of a sample that its gang hands over: its own heads' pages."""

    parcel: InFlightSample
    host: int
    hosts: int
    alike: int = 1  # neighbouring processes whose heads are the same ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Everything has been handed over, and was heard before this."""

    hosts: int  # that say it


CODEC = Codec(
    Hello,
    Begin,
    Again,
    Ready,
    Beat,
    Notice,
    Failed,
    Note,
    Call,
    Answer,
    Turn,
    InFlightSample,
    Partial,
    Finished,
    Exported,
    HandedOver,
    PartHanded,
    Ended,
    Moving,
    Left,
    Learn,
    Make,
    Publish,
    Write,
    Forget,
    Restore,
    Save,
    PollCheckpoint,
    Fingerprint,
    Made,
    Done,
    Part,
    Refused,
    Swap,
    Submit,
    GiveUp,
    MoveOut,
    Receive,
    TakeOut,
    GoOn,
    HandOver,
    Lent,
    Carry,
    Carried,
    Bring,
    Leave,
    GiveBack,
    *weight_messages.RECORDS,
)
