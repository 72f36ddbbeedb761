"""Stage 6, publish, between worlds: which world brings which version where. PURE: facts in, commands out; time is a
fact.

    Wanted -> Offer -> Offered* -> Pull -> Staged* -> Commit, Release -> Committed* -> Loaded
              (from storage: Read -> Staged*)                            * of every process of that world

A world is the processes of one trainer or of one instance; what each of them is sent of a version is known since it
came up. Consumes facts about worlds and answers of their processes;
produces commands, each for all processes of one world, and outcomes: the records of weight_messages.py.
`weight_receiver.WeightEndpoint` executes the commands.
Laws: no process commits before all of its world have staged the same transfer, and what they staged has the digest of
the version, where that is known; a transfer that fails or is late is
aborted everywhere, its world keeps the versions it had, and others go on; every attempt has a key of its own, and facts
under any other key change nothing, so that they may come twice, late, or from a world that is gone; a world serves at
most `fanout` transfers at once, and every world that has a version serves it: instances before the trainer; a version
that is due is waited for while its trainer is lost or storage has yet to take it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from dora_jax.base.box_digest import Sums, added, combined
from dora_jax.orchestrate.events import TimePassed
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.transfer_manifest import GRACE_S, Key, Shard, box_words, deadline_s, words
from dora_jax.types import Version

STORAGE = "storage"
WIRE = "wire"
FANOUT = 2  # transfers that one world serves at once; more would share its link
ATTEMPTS = 3  # from different sources; the fault of a transfer that fails three times is not the source's


@dataclasses.dataclass
class _Endpoint:
    epoch: int
    shards: tuple[tuple[Shard, ...], ...]  # that each process is sent
    bytes: int  # the most that one process is sent
    trainer: bool
    holds: set[Version] = dataclasses.field(default_factory=set)
    wanted: dict[Version, dict[str, str]] = dataclasses.field(default_factory=dict)  # -> failed source -> reason


@dataclasses.dataclass
class _Transfer:
    key: Key
    source: str  # a world, or STORAGE
    phase: type[ex.Answer]  # the kind of answer that it waits for
    until_s: float
    answers: dict[int, ex.Answer] = dataclasses.field(default_factory=dict)  # of this phase, by process


class WeightDistribution:
    """`paths`: WIRE, STORAGE or both, tried in this order. `now_s`: on the clock of TimePassed. `sequence`: higher than
    any that a living world has seen."""

    def __init__(self, paths: Sequence[str] = (WIRE,), now_s: float = 0.0, sequence: int = 0, fanout: int = FANOUT):
        if not paths or any(path not in (WIRE, STORAGE) for path in paths):
            raise ValueError(f"weights travel by {WIRE}, by {STORAGE} or by both, not by {tuple(paths)}")
        self._paths = tuple(paths)
        self._sequence = sequence
        self._fanout = fanout
        self._worlds: dict[str, _Endpoint] = {}
        self._stored: set[Version] = set()
        self._due: set[Version] = set()
        self._digests: dict[Version, int] = {}  # where they are known
        self._transfers: dict[str, _Transfer] = {}  # receiver -> the one under way
        self._now_s = now_s

    def step(self, fact: ex.Fact) -> tuple[ex.Command | ex.Outcome, ...]:
        return (*self._facts(fact), *self._start_all())

    def holders(self, version: Version) -> tuple[str, ...]:
        return tuple(name for name, world in self._worlds.items() if version in world.holds)

    @property
    def transfers(self) -> dict[str, tuple[str, type]]:
        """The transfers under way: receiver -> (source, the kind of answer that is waited for)."""
        return {name: (transfer.source, transfer.phase) for name, transfer in self._transfers.items()}

    @property
    def busy(self) -> bool:
        return bool(self._transfers) or any(world.wanted for world in self._worlds.values())

    # ------------------------------------------------------------- facts

    def _facts(self, fact: ex.Fact) -> Iterator[ex.Command | ex.Outcome]:
        match fact:
            case TimePassed(now_s=now_s):
                self._now_s = max(now_s, self._now_s)
                for late in [t for t in self._transfers.values() if t.until_s < self._now_s]:
                    missing = sorted(set(range(len(self._worlds[self._answers(late)].shards))) - set(late.answers))
                    yield from self._fail(
                        late, f"process {missing[0]} of {self._answers(late)} is late with {late.phase.__name__}"
                    )
            case ex.WorldUp():
                known = self._worlds.get(fact.world)
                if known is not None and known.epoch >= fact.epoch:
                    return
                if known is not None:
                    yield from self._down(fact.world)
                most = max(sum(shard.bytes for shard in shards) for shards in fact.shards)
                self._worlds[fact.world] = _Endpoint(fact.epoch, fact.shards, most, fact.trainer)
                for other in self._worlds.values():
                    for failed in other.wanted.values():
                        failed.pop(fact.world, None)  # an earlier incarnation of this world failed, not this one
            case ex.WorldDown(world=name, epoch=epoch):
                if name in self._worlds and self._worlds[name].epoch == epoch:
                    yield from self._down(name)
            case ex.Holds(world=name, epoch=epoch, version=version):
                if name in self._worlds and self._worlds[name].epoch == epoch:
                    self._worlds[name].holds.add(version)
            case ex.Dropped(world=name, version=version):
                if name in self._worlds:
                    self._worlds[name].holds.discard(version)
            case ex.Stored(version=version, there=there):
                (self._stored.add if there else self._stored.discard)(version)
            case ex.VersionDue(version=version, due=due):
                (self._due.add if due else self._due.discard)(version)
            case ex.VersionDigest(version=version, digest=digest):
                self._digests[version] = digest
                if not digest:  # it is dropped, or an older format of the journal did not take it
                    del self._digests[version]
            case ex.Wanted(world=name, version=version):
                world = self._worlds.get(name)
                if world is None:
                    yield ex.NotLoaded(world=name, version=version, reason=f"{name} is not up")
                elif version in world.holds:
                    yield ex.Loaded(world=name, version=version)
                else:
                    world.wanted.setdefault(version, {})
            case _:
                transfer = self._transfers.get(fact.key.receiver)
                if transfer is not None and transfer.key == fact.key:
                    if isinstance(fact, ex.TransferFailed):
                        yield from self._fail(transfer, fact.reason)
                        return
                    if not isinstance(fact, transfer.phase):
                        return  # an answer of a phase that is over
                    hosts = len(self._worlds[self._answers(transfer)].shards)
                    if not 0 <= fact.host < hosts:
                        raise ValueError(
                            f"{self._answers(transfer)} has {hosts} processes, and number {fact.host} has answered"
                        )
                    transfer.answers[fact.host] = fact
                    if len(transfer.answers) == hosts:
                        yield from self._advance(transfer, [transfer.answers[host] for host in range(hosts)])

    def _down(self, name: str) -> Iterator[ex.Command | ex.Outcome]:
        if (transfer := self._transfers.pop(name, None)) is not None:
            yield from self._release(transfer)
        del self._worlds[name]
        for transfer in [t for t in self._transfers.values() if t.source == name]:
            if transfer.phase is not ex.Committed:  # by then the source is not needed any more
                yield from self._fail(transfer, f"{name} is gone")

    # ------------------------------------------------------------ phases

    def _advance(self, transfer: _Transfer, answers: list[Any]) -> Iterator[ex.Command | ex.Outcome]:
        """Every process has answered, in the kind of this phase."""
        key, receiver = transfer.key, transfer.key.receiver
        if transfer.phase is ex.Offered:
            timeout_s = deadline_s(self._worlds[receiver].bytes)
            # a process that is alive reports its own timeout before
            self._enter(transfer, ex.Staged, timeout_s + GRACE_S)
            manifests = tuple(zip(*(answer.manifests for answer in answers), strict=True))
            yield ex.Pull(world=receiver, key=key, timeout_s=timeout_s, manifests=manifests)
        elif transfer.phase is ex.Staged:
            digest = self._digests.get(key.version)
            shards = self._worlds[receiver].shards
            if digest and (fault := _fault(shards, [answer.sums for answer in answers], digest)):
                yield from self._fail(transfer, fault)
                return
            self._enter(transfer, ex.Committed, GRACE_S)
            yield ex.Commit(world=receiver, key=key)
            yield from self._release(transfer, staged=True)
        else:
            world = self._end(transfer)
            world.holds.add(key.version)
            del world.wanted[key.version]
            yield ex.Loaded(world=receiver, version=key.version)

    def _start_all(self) -> Iterator[ex.Command | ex.Outcome]:
        """Starts each transfer that waits and has a free source; gives up a version that no source can bring."""
        for name, world in self._worlds.items():
            for version, failed in list(world.wanted.items()):
                if name in self._transfers:
                    break
                sources = self._sources(version, failed)
                free = [source for source in sources or () if source == STORAGE or self._serving(source) < self._fanout]
                if free:
                    self._sequence += 1
                    key = Key(epoch=self._worlds[name].epoch, version=version, receiver=name, sequence=self._sequence)
                    source = min(free, key=self._cost)
                    if source == STORAGE:
                        until_s = self._now_s + deadline_s(world.bytes)
                        self._transfers[name] = _Transfer(key, source, ex.Staged, until_s)
                        yield ex.Read(world=name, key=key)
                    else:
                        self._transfers[name] = _Transfer(key, source, ex.Offered, self._now_s + GRACE_S)
                        yield ex.Offer(world=source, key=key, wanted=world.shards)
                elif sources == []:
                    del world.wanted[version]
                    reasons = [f"from {source}: {reason}" for source, reason in failed.items()]
                    yield ex.NotLoaded(
                        world=name, version=version, reason="; ".join(reasons) or f"no process holds version {version}"
                    )

    def _fail(self, transfer: _Transfer, reason: str) -> Iterator[ex.Command | ex.Outcome]:
        world, key = self._end(transfer), transfer.key
        if transfer.phase is ex.Committed:
            del world.wanted[key.version]
            yield ex.Broken(world=key.receiver, epoch=key.epoch, reason=f"{words(key)}: {reason}")
            return
        world.wanted[key.version][transfer.source] = reason
        yield ex.Abort(world=key.receiver, key=key, reason=f"from {transfer.source}: {reason}")
        yield from self._release(transfer)

    # ----------------------------------------------------------- private

    def _enter(self, transfer: _Transfer, phase: type[ex.Answer], timeout_s: float) -> None:
        transfer.phase, transfer.answers, transfer.until_s = phase, {}, self._now_s + timeout_s

    def _end(self, transfer: _Transfer) -> _Endpoint:
        del self._transfers[transfer.key.receiver]
        return self._worlds[transfer.key.receiver]

    def _release(self, transfer: _Transfer, staged: bool = False) -> Iterator[ex.Release]:
        asked = staged or transfer.phase in (ex.Offered, ex.Staged)  # else the source offers nothing yet, or no more
        if asked and transfer.source in self._worlds:
            yield ex.Release(
                world=transfer.source, key=transfer.key, hosts=len(self._worlds[transfer.key.receiver].shards)
            )

    def _answers(self, transfer: _Transfer) -> str:
        return transfer.source if transfer.phase is ex.Offered else transfer.key.receiver

    def _serving(self, name: str) -> int:
        return sum(transfer.source == name for transfer in self._transfers.values())

    def _sources(self, version: Version, failed: dict[str, str]) -> list[str] | None:
        """The sources of a version: all of the first path that has any; None: one that is not there yet will be."""
        if len(failed) >= ATTEMPTS:
            return []
        for path in self._paths:
            there = self.holders(version) if path == WIRE else (STORAGE,) * (version in self._stored)
            if sources := [source for source in there if source not in failed]:
                return sources
        if STORAGE in self._paths:
            gone = version in self._stored
        else:
            gone = any(world.trainer and version in world.holds for world in self._worlds.values())
        return None if version in self._due and not gone else []

    def _cost(self, source: str) -> tuple[int, bool]:
        return self._serving(source), source != STORAGE and self._worlds[source].trainer


# ---------------------------------------------------------------- private


def _fault(shards: Sequence[Sequence[Shard]], sums: Sequence[Sequence[Sums]], digest: int) -> str | None:
    """What is wrong with the bytes that the processes of a world have staged; None: they are the version's.

    shards: by process, in the order of the leaves; the boxes of any two processes are equal or disjoint."""
    leaves: dict[str, dict[tuple, Sums]] = {}
    for mine, found in zip(shards, sums, strict=True):
        if len(mine) != len(found):
            return f"{len(mine)} shards were staged with the sums of {len(found)}"
        for shard, each in zip(mine, found, strict=True):
            if leaves.setdefault(shard.path, {}).setdefault((shard.start, shard.stop), each) != each:
                return f"{box_words(shard)} did not arrive alike in two processes"
    staged = combined(added(boxes.values()) for boxes in leaves.values())
    if staged != digest:
        return f"the digest of what arrived is {staged:016x}, and the version was published with {digest:016x}"
    return None
