"""The records that travel between the controller and the processes of its gangs, and inside a gang.

Hello -> Begin -> Ready              a process joins its gang, and the gang its jax.distributed world
Hello -> Rejoin -> Ready             a gang that has outlived its controller joins the next one
Call -> Answer                       to the trainer's first process, which shares it as TickCommands; each answers
weight_messages.py                   between the controller and every process: how a version travels
Command                              to the first process of a rollout gang, which shares it as TickCommands
events, Finished, ...                back from the first process of a rollout gang
MoveStarted, StageKV, ...            between the controller and every process: how the KV of a sample travels
Heartbeat                            from every process: it is alive, and how far it is
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Any

from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.common.codec import Codec
from dora_jax.runtime.common.sample_gaps import SampleGap
from dora_jax.runtime.common.sample_log import TokenView
from dora_jax.runtime.common.worker import Exported, Finished, ForgetSample, Message, TokensElsewhere, TopTokens
from dora_jax.runtime.journal.records import Partial, Saved
from dora_jax.runtime.transfer import weight_messages
from dora_jax.runtime.transfer.transfer_manifest import KVOffer, Shard
from dora_jax.types import InstanceId, Prompt, ScoredGroup, Version

# ----------------------------------------------------------- joining


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
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
    epoch: int = 0  # of the gang, and the incarnation of its instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoin:
    """To every process of a gang, once all have come back: end what the earlier controller asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    holds: tuple[Version, ...] = ()  # weights from before; of a new gang none
    wanted: tuple[Shard, ...] = ()  # of a version, that this process is sent; of a trainer none


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    progress: int  # rises whenever something is done
    busy: bool  # there is something to do
    spent_s: dict[str, float]  # in all, by what the role's thread did


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionNotice:
    """The machine under this process is about to be taken away."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFailed:
    """The process ends now, and its gang with it."""

    error: str
    final: bool = False  # a process started in its place would end over the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A sentence for the console of the run."""

    text: str


# ------------------------------------------------------------- calls


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainGroups:
    """Trainer: make the updates of some groups of a step, or of all."""

    base: Version
    groups: tuple[ScoredGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishStep:
    """Trainer: finish the step whose groups it has trained on; that is a new version."""

    base: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishWeights:
    """Trainer: keep the weights of the version that it is at, to be served and written."""

    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteWeights:
    """Trainer: write this process's shard of a kept version into storage."""

    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreCheckpoint:
    """Trainer: go on from a checkpoint. Declined where it cannot be read, or its digests are others; 0: not known."""

    step: int
    params: int = 0
    opt_state: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCheckpoint:
    """Trainer: read a checkpoint that has no manifest, and change nothing. Declined as RestoreCheckpoint is."""

    step: int
    params: int
    opt_state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Trainer: start to save a checkpoint of this version; declined where the trainer is at another. The answer is
    Saved where it was started."""

    version: Version
    rl_state: Any
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PollCheckpoint:
    """Trainer: finish the checkpoint that is being saved; keep the one that samples of `floor` need."""

    floor: Version
    wait: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeDigest:
    """Trainer: the digest of the version that it is at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LendDevices:
    """Trainer: the devices of the processes from `first` on make up an instance, until it hands over; see
    lent_role.py."""

    instance: InstanceId
    controller: str  # where these processes join the instance's gang
    credential: str = field(repr=False)  # of that gang and this incarnation
    first: int
    hosts: int


TrainerCall = (
    TrainGroups
    | FinishStep
    | PublishWeights
    | WriteWeights
    | RestoreCheckpoint
    | CheckCheckpoint
    | SaveCheckpoint
    | PollCheckpoint
    | ComputeDigest
    | LendDevices
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    number: int
    what: TrainerCall


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    digest: int
    metrics: dict[str, float]
    recalled: bool = False  # it had been made for an earlier controller
    views: tuple[TokenView, ...] = ()  # of the samples that a person reads
    gaps: tuple[SampleGap, ...] = ()  # by which instances are judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """Done; lists the checkpoint files that this process uploaded for its newest complete step."""

    step: Version
    files: Any  # name -> [bytes, crc32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDeclined:
    """The call was not done, and nothing has changed."""

    error: str


CallResult = StepFinished | Done | CheckpointFiles | Saved | CallDeclined


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAnswer:
    number: int
    what: CallResult


@dataclass(frozen=True, slots=True, kw_only=True)
class DropWeights:
    """Trainer: forget this version. There is no answer."""

    version: Version


# ------------------------------------------------------------- posts


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Rollout: what an instance is sent. LoadWeights follows once every process of the gang holds the weights."""

    what: Message
    payload: Prompt | InFlightSample | None = None  # of a Start; of a Resume, or of a Move where it arrives
    # of a Move where it leaves: higher than that of any before; else of the KV that every process has here, 0: the
    # sample goes on with what it has, and with what it kept here when it left
    number: int = 0
    epoch: int = 0  # of a Move's destination


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Hand all samples over, then stop."""


GangCommand = Command | HandOver | Rejoin | Call


@dataclass(frozen=True, slots=True, kw_only=True)
class TickCommands:
    """The commands that every process of a gang carries out before its next tick."""

    posts: tuple[GangCommand, ...]


# ------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveStarted:
    """A sample has left its engine for another one. Where its KV is offered, every process says so of its own shard."""

    offered: KVOffer
    number: int
    host: int
    hosts: int  # that say it


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOverShard:
    """One process's shard of a sample that its gang hands over: the pages of its own heads."""

    in_flight: InFlightSample
    host: int
    hosts: int
    alike: int = 1  # neighbouring processes whose heads are the same ones


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverDone:
    """The process has handed everything over; the controller has it by now."""

    hosts: int  # that say it


# ----------------------------------------------- the KV of a sample


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKV:
    """Rollout, each process its own shard: fetch what the process of the same rank offers, or keep what the controller
    has put into it (no manifest). KVStaged answers it."""

    number: int
    epoch: int  # of the gang that takes it
    offered: KVOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStaged:
    number: int
    host: int
    fault: str  # empty: it is here


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseKV:
    """Drop the KV that was offered here under this number, or staged: another process could not fetch its shard."""

    number: int


CODEC = Codec(
    *typing.get_args(TrainerCall),
    *typing.get_args(CallResult),
    *typing.get_args(GangCommand),
    *(Hello, Begin, Ready, Heartbeat, PreemptionNotice, ProcessFailed, Note, CallAnswer, TickCommands),
    *(TokensElsewhere, ForgetSample, Finished, Exported, HandedOverShard, HandOverDone),
    *(Partial, InFlightSample, TopTokens),
    *(SampleGap, TokenView, MoveStarted, KVOffer, StageKV, KVStaged, ReleaseKV, DropWeights),
    *weight_messages.RECORDS,
)
