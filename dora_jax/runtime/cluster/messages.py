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

from typing import Any

from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.transfer import weight_messages
from dora_jax.runtime.durability.payload_state import Partial
from dora_jax.runtime.codec import Codec
from dora_jax.runtime.transfer.transfer_manifest import Lent
from dora_jax.runtime.workers import Ended, Exported, Finished, HandedOver
from dora_jax.types import InstanceId, Prompt, SampleId, ScoredGroup, Version, record

# ----------------------------------------------------------- joining


@record
class Hello:
    gang: str
    epoch: int
    pid: int
    worker: int  # TPU_WORKER_ID, which decides its rank; -1: there is none
    coordinator: str  # where a world would meet, were this its first process
    leader: str  # where the others would get their turns
    rank: int = -1  # of one that has begun under an earlier controller


@record
class Begin:
    config: Any
    workdir: str
    instance: InstanceId | None  # None: the trainer
    rank: int
    hosts: int
    coordinator: str  # of the gang's first process
    leader: str
    epoch: int = 0  # of the gang, and the life of its instance


@record
class Again:
    """To every process of a gang that all have come back: end what the earlier controller asked for."""


@record
class Ready:
    holds: tuple[Version, ...] = ()  # weights from before; of a new gang none


@record
class Beat:
    progress: int  # rises whenever something is done
    busy: bool  # there is something to do
    waited_s: float  # in all, with nothing to do


@record
class Notice:
    """The machine under this process is about to be taken away."""

    reason: str


@record
class Failed:
    """The process ends now; its gang with it."""

    error: str
    final: bool = False  # a process started in its place would end over the same


@record
class Note:
    """A sentence for the console of the run."""

    text: str


# ------------------------------------------------------------- calls


@record
class Learn:
    """Trainer: updates on some groups of a step, or on all of them."""

    base: Version
    groups: tuple[ScoredGroup, ...]


@record
class Make:
    """Trainer: a version of the step whose groups it has learned from."""

    base: Version


@record
class Publish:
    """Trainer: keep the weights of the version that it is at, to be served and written."""

    version: Version


@record
class Write:
    """Trainer: this process's part of a version that is kept, into storage."""

    version: Version


@record
class Restore:
    """Trainer: go on from a checkpoint."""

    step: int


@record
class Save:
    """Trainer: start a checkpoint, where it is at this version."""

    version: Version
    rl_state: Any
    metrics: dict[str, float]


@record
class PollCheckpoint:
    """Trainer: look after what is being saved; samples need the checkpoint before `floor`."""

    floor: Version
    wait: bool


@record
class Fingerprint:
    """Trainer: the digest of the version that it is at."""


@record
class Call:
    number: int
    what: Learn | Make | Publish | Write | Restore | Save | PollCheckpoint | Fingerprint


@record
class Made:
    digest: int
    metrics: dict[str, float]
    recalled: bool = False  # it had been made for an earlier controller


@record
class Done:
    value: int


@record
class Part:
    """Done, and what this process has put into the bucket of the newest step that it has all put of."""

    step: Version
    files: Any  # name -> [bytes, crc32]


@record
class Refused:
    """Not done, and nothing has changed."""

    error: str


@record
class Answer:
    number: int
    what: Made | Done | Part | Refused


@record
class Forget:
    """Trainer, without an answer: nobody will want this version any more."""

    version: Version


# ------------------------------------------------------------- posts


@record
class Swap:
    """Take weights into use that every process of the gang holds."""

    version: Version
    drop: Version | None


@record
class Submit:
    id: SampleId
    prompt: Prompt
    version: Version


@record
class GiveUp:
    id: SampleId
    reason: str


@record
class MoveOut:
    id: SampleId
    dst: InstanceId
    epoch: int  # of dst
    number: int  # of this move, higher than that of any before
    attempt: int  # the orchestrator's number of it


@record
class Receive:
    parcel: InFlightSample  # with the KV that every process has fetched under `number`
    src: InstanceId
    attempt: int
    number: int  # 0: with what it has here


@record
class TakeOut:
    id: SampleId


@record
class GoOn:
    parcel: InFlightSample
    number: int  # of the KV that every process has here; 0: with what it kept when the sample left


@record
class HandOver:
    """Give all samples back, then do nothing more."""


Post = Swap | Submit | GiveUp | MoveOut | Receive | TakeOut | GoOn | HandOver | Again | Call


@record
class Turn:
    """What every process of a gang does before its next tick."""

    posts: tuple[Post, ...]


# ------------------------------------------------------------- facts


@record
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


@record
class Carry:
    """Rollout, every process: fetch the part of the process of the same number."""

    number: int
    epoch: int  # of the gang that fetches
    lent: tuple[Lent, ...]


@record
class Carried:
    number: int
    host: int
    fault: str  # empty: it is here


@record
class Bring:
    """Rollout, every process: its part of the pages of a sample that is to go on here. Answered as Carry is."""

    number: int
    parcel: InFlightSample


@record
class Leave:
    """What was fetched under this number is not wanted: another process could not."""

    number: int


@record
class GiveBack:
    """What was offered under this number is over."""

    number: int


@record
class PartHanded:
    """One process's part of a sample that its gang hands over: its own heads' pages."""

    parcel: InFlightSample
    host: int
    hosts: int
    alike: int = 1  # neighbouring processes whose heads are the same ones


@record
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
