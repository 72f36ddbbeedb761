"""Versions from the trainer's gang to the others: what `weight_distribution.WeightDistribution` decides, carried out
over links.

    trainer's gang: PublishWeights, WriteWeights -> Holds, Stored      an instance: `want` -> Wanted ... Loaded ->
    `then`

Consumes facts from every process of every gang; sends commands to all processes of the gang that they name. Used by any
thread. Laws: an instance takes a version into use only after every process of its gang has committed it; a gang that
cannot be brought what it must serve, or may have committed by halves, is ended; a version is committed only where it
has the digest that its publisher took, or the journal knows; storage takes one version at a time and
skips versions that are not wanted any more, so a slow storage holds nothing up; weights left by an earlier controller
are used only where the trainer that made them has been taken over too.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from dora_jax.orchestrate.events import TimePassed
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.gang import CallRefused, Gang, GangDied
from dora_jax.runtime.common.seams import Tree
from dora_jax.runtime.journal.object_storage import StoreError
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.weight_distribution import WIRE, WeightDistribution
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from dora_jax.types import Version

TIME_PERIOD_S = 0.5
TRAINER = "trainer"


class WeightPublisher:
    """`PublishedWeights` of the controller, to which weights never come: the trainer's processes hold them for the
    instances. past: gangs and storage may hold weights left by an earlier controller."""

    def __init__(self, stored: StoredWeights, paths: Sequence[str], notify: Callable[[str], None], past: bool = False):
        self.stored = stored
        self.by_wire = WIRE in paths
        self._notify = notify
        self._publication = WeightDistribution(paths, now_s=time.monotonic(), sequence=time.time_ns())
        self._trusted = past  # weights left by the previous controller are valid
        self._settled = False  # it is known what is live of them
        self._live: set[Version] = set()  # published and not dropped
        self.digests: dict[Version, int] = {}  # of their copies; 0: unknown
        self._unwritten: list[Version] = []  # kept by the trainer's gang, to be stored in this order
        self._writing: Version | None = None
        self._write: Any = None  # the call; once it is done, it was refused where `_writing` is still set
        self._gangs: dict[str, Gang] = {}
        self._then: dict[tuple[str, Version], Callable[[], None]] = {}
        self._lock = threading.RLock()  # taken where a gang's own may be held, so nothing in it takes one
        self._closed = threading.Event()
        self._clock = threading.Thread(target=self._pass_time, name="publisher", daemon=True)
        self._clock.start()

    def close(self) -> None:
        self._closed.set()
        self._clock.join()

    def up(self, gang: Gang) -> None:
        with self._lock:
            if gang.name == TRAINER and self._trusted and not self._settled and not gang.again:
                self._trusted = False  # what it makes may differ in the last bit
                self.stored.clear()
                for version in self._live:
                    self.tell(ex.Stored(version=version, there=False))
            self._gangs[gang.name] = gang
            trainer = gang.name == TRAINER
            self.tell(ex.WorldUp(world=gang.name, epoch=gang.epoch, shards=gang.wanted, trainer=trainer))

    def down(self, gang: Gang) -> None:
        with self._lock:
            self.tell(ex.WorldDown(world=gang.name, epoch=gang.epoch))
            if gang.name != TRAINER:
                return
            half, self._writing, self._unwritten = self._writing, None, []  # the next gang begins with what is live
            wanted = half in self._live
        if half is not None and not wanted:
            self.stored.drop(half)

    def settle(self) -> None:
        """The run begins: drops the versions of an earlier controller that are not live."""
        with self._lock:
            self._settled = True
            self.stored.keep_only(self._live)
        if gang := self._gangs.get(TRAINER):
            self.recognise(gang)

    def recognise(self, gang: Gang) -> bool:
        """Uses the weights that a gang holds from before, or drops them; True where they may be used."""
        with self._lock:
            for version in gang.holds:
                if self._trusted and version in self._live:
                    self.tell(ex.Holds(world=gang.name, epoch=gang.epoch, version=version))
                else:
                    gang.tell_all(messages.DropWeights(version=version))
            return self._trusted

    def want(self, gang: Gang, version: Version, then: Callable[[], None]) -> None:
        """`then`, once every process of the gang holds the version."""
        with self._lock:
            self._then[gang.name, version] = then
            self.tell(ex.Wanted(world=gang.name, version=version))

    # ------------------------------------------------- of the trainer's gang

    def put(self, version: Version, weights: Tree, digest: int = 0, copy: int = 0) -> int:
        """weights: the RemoteTrainer, for its gang's."""
        return weights.publish(version, copy)

    def get(self, version: Version, shardings: Tree) -> Tree:
        raise KeyError(f"version {version} is in the trainer's processes, not in the controller's")

    def begin(self, version: Version, digest: int = 0) -> None:
        """The version is being published: until `drop`, a trainer gang that is lost leaves it to the next gang.

        digest: of its copy, where an earlier controller left it in storage and the journal knows it."""
        with self._lock:
            self._live.add(version)
            if version in self.stored.versions:
                self._known(version, digest)
            self.tell(ex.VersionDue(version=version, due=True))
            if version in self.stored.versions:  # from before
                self.tell(ex.Stored(version=version, there=True))

    @property
    def versions(self) -> tuple[Version, ...]:
        """The versions that are published and not dropped."""
        with self._lock:
            return tuple(sorted(self._live))

    def nowhere_else(self) -> list[Version]:
        """The live versions that only the trainer's gang is sure to have."""
        with self._lock:
            return sorted(version for version in self._live if version not in self.stored.versions)

    def kept(self, gang: Gang, version: Version, digest: int = 0) -> None:
        """Every process of the trainer keeps its shard: instances can fetch the version from now on. digest: of the
        copy."""
        with self._lock:
            self._known(version, digest)
        if self.by_wire:
            with self._lock:
                if version not in (*self._unwritten, self._writing):
                    self._unwritten.append(version)
                self.tell(ex.Holds(world=gang.name, epoch=gang.epoch, version=version))
            self._write_next(gang)
        else:
            try:
                gang.call(messages.WriteWeights(version=version))
            except CallRefused as error:
                raise StoreError(f"version {version} cannot be published: {error}") from error
            self._written(version)

    def drop(self, version: Version) -> None:
        """No instance will want this version any more."""
        with self._lock:
            self._live.discard(version)
            self.digests.pop(version, None)
            for fact in (
                ex.Stored(version=version, there=False),
                ex.VersionDue(version=version, due=False),
                ex.VersionDigest(version=version, digest=0),
                ex.Dropped(world=TRAINER, version=version),
            ):
                self.tell(fact)
            self._send(TRAINER, messages.DropWeights(version=version))
            writing = version == self._writing
        if not writing:  # else it is dropped when it is written
            self.stored.drop(version)

    def tell(self, fact: Any) -> None:
        with self._lock:
            for each in self._publication.step(fact):
                match each:
                    case ex.Loaded(world=world, version=version):
                        if then := self._then.pop((world, version), None):
                            then()
                    case ex.NotLoaded(world=world, version=version, reason=reason):
                        self._then.pop((world, version), None)
                        self._end(world, f"version {version} cannot be brought to it: {reason}")
                    case ex.Broken(world=world, reason=reason):
                        self._end(world, reason)
                    case ex.Abort(world=world, key=key, reason=reason):
                        self._notify(f"version {key.version} did not reach {world} at this attempt: {reason}")
                        self._send(world, each)
                    case _:
                        self._send(each.world, each)

    # ------------------------------------------------------------ private

    def _known(self, version: Version, digest: int) -> None:
        self.digests[version] = digest
        self.tell(ex.VersionDigest(version=version, digest=digest))

    def _write_next(self, gang: Gang) -> None:
        with self._lock:
            wanted = self._live.difference(self.stored.versions)
            self._unwritten = [version for version in self._unwritten if version in wanted]
            refused = self._writing if self._write is not None and self._write.done.is_set() else None
            if (self._writing is not None and refused is None) or not self._unwritten:
                return
            version, self._write = self._unwritten.pop(0), None
            self._writing = version

        def written() -> None:
            self._written(version)
            self._write_next(gang)

        if refused is not None:
            self.stored.drop(refused)
        try:
            write = gang.cast(messages.WriteWeights(version=version), written)
        except GangDied:
            self._writing = None
            return
        with self._lock:
            if self._writing == version:  # it may have been written meanwhile, and the next begun
                self._write = write

    def _written(self, version: Version) -> None:
        """Every process of the trainer has written its shard."""
        with self._lock:
            self._writing = None
            wanted = version in self._live
            if wanted:
                self.stored.seal(version)
                self.tell(ex.Stored(version=version, there=True))
        if not wanted:
            self.stored.drop(version)

    def _send(self, world: str, command: Any) -> None:
        if gang := self._gangs.get(world):
            gang.tell_all(command)

    def _end(self, world: str, reason: str) -> None:
        """On a thread of its own: the reporting thread may hold the lock of another gang."""
        gang = self._gangs[world]
        threading.Thread(target=functools.partial(gang.die, reason), name="end of a gang", daemon=True).start()

    def _pass_time(self) -> None:
        while not self._closed.wait(TIME_PERIOD_S):
            self.tell(TimePassed(now_s=time.monotonic()))
