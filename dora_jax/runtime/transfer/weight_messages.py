"""The messages that carry a version between worlds: records, no behaviour.

    facts      to `weight_distribution.WeightDistribution`: worlds that come and go, versions, and answers of processes
    commands   from it, each for all processes of one world; `weight_receiver.WeightEndpoint` executes them
    outcomes   for the callers that wanted a version

`CODEC` writes and reads the records that travel. `host` is the number of a process in its world.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass

from dora_jax.orchestrate.events import TimePassed
from dora_jax.runtime.common.codec import Codec
from dora_jax.runtime.transfer.transfer_manifest import Key, Manifest, Shard
from dora_jax.types import Version

# ------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldUp:
    world: str
    epoch: int  # rises with every gang of this name
    shards: tuple[tuple[Shard, ...], ...]  # of a version, that each of its processes is sent; of a trainer none
    trainer: bool = False  # asked last: it has other work


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldDown:
    world: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """A world can serve a version: the trainer that has published it, or an instance found after a restart."""

    world: str
    epoch: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    world: str
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A version is whole in storage; `there` False: it is no more."""

    version: Version
    there: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDue:
    """The trainer has published a version: where no world holds it, the next trainer will. `due` False: it will not."""

    version: Version
    due: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDigest:
    """The digest of a version's stacked copy, which the bytes that a world stages must have; 0: it is not known."""

    version: Version
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A world is to load a version."""

    world: str
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    key: Key
    host: int  # of the source
    manifests: tuple[Manifest, ...]  # one for each process of the receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    key: Key
    host: int
    sums: tuple[tuple[int, int], ...]  # of the bytes that arrived (box_digest.py), by shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    key: Key
    host: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFailed:
    """A process of the receiver or of the source could not do its part."""

    key: Key
    host: int
    reason: str


# ---------------------------------------------------------- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    world: str
    key: Key
    wanted: tuple[tuple[Shard, ...], ...]  # by process of the receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    world: str
    key: Key
    manifests: tuple[tuple[Manifest, ...], ...]  # by process of the receiver
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The receiver reads its shards from storage, and stages them."""

    world: str
    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    world: str
    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    world: str
    key: Key
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    world: str
    key: Key
    hosts: int  # of the receiver


# ---------------------------------------------------------- outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Every process of this world can now take the version into use."""

    world: str
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLoaded:
    """Nothing has changed in this world."""

    world: str
    version: Version
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Some processes of this world may have committed and others not: it must be built again."""

    world: str
    epoch: int
    reason: str


Answer = Offered | Staged | Committed
Fact = (
    WorldUp
    | WorldDown
    | Holds
    | Dropped
    | Stored
    | VersionDue
    | VersionDigest
    | Wanted
    | Answer
    | TransferFailed
    | TimePassed
)
Command = Offer | Pull | Read | Commit | Abort | Release
Outcome = Loaded | NotLoaded | Broken
RECORDS = (Key, Shard, Manifest, *typing.get_args(Answer), TransferFailed, *typing.get_args(Command))  # that travel
CODEC = Codec(*RECORDS)
