"""Stage 6, publish, between worlds: which world brings which version where. PURE: facts in, commands out; time is a
fact.

    Wanted -> Propose -> Accepted* -> Offer -> Offered* -> Pull -> Staged* -> Commit, Release -> Committed* -> Loaded
                                      (from storage: Read -> Staged*)             * of every process of that world

A world is the processes of one trainer or of one instance. Consumes facts about worlds and answers of their processes;
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

from dora_jax.base.box_digest import Sums, added, combined
from dora_jax.orchestrate.events import TimePassed
from dora_jax.runtime.transfer.transfer_manifest import GRACE_S, Key, Shard, box_words, deadline_s, words
from dora_jax.runtime.transfer.weight_messages import (
    Abort,
    Accepted,
    Answer,
    Broken,
    Command,
    Commit,
    Committed,
    Dropped,
    Fact,
    Holds,
    Loaded,
    NotLoaded,
    Offer,
    Offered,
    Outcome,
    Propose,
    Pull,
    Read,
    Release,
    Staged,
    Stored,
    TransferFailed,
    VersionDigest,
    VersionDue,
    Wanted,
    WorldDown,
    WorldUp,
)
from dora_jax.types import Version

STORAGE = "storage"
WIRE = "wire"
FANOUT = 2  # transfers that one world serves at once; more would share its link
ATTEMPTS = 3  # from different sources; the fault of a transfer that fails three times is not the source's


@dataclasses.dataclass
class _Endpoint:
    epoch: int
    hosts: int
    trainer: bool
    holds: set[Version] = dataclasses.field(default_factory=set)
    wanted: dict[Version, dict[str, str]] = dataclasses.field(default_factory=dict)  # -> failed source -> reason


@dataclasses.dataclass
class _Transfer:
    key: Key
    source: str  # a world, or STORAGE
    phase: type[Answer]  # the kind of answer that it waits for
    until_s: float
    answers: dict[int, Answer] = dataclasses.field(default_factory=dict)  # of this phase, by process
    bytes: int = 0  # the most that one process is sent
    shards: tuple[tuple[Shard, ...], ...] = ()  # that each process is sent


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

    def step(self, fact: Fact) -> tuple[Command | Outcome, ...]:
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

    def _facts(self, fact: Fact) -> Iterator[Command | Outcome]:
        match fact:
            case TimePassed(now_s=now_s):
                self._now_s = max(now_s, self._now_s)
                for late in [t for t in self._transfers.values() if t.until_s < self._now_s]:
                    missing = sorted(set(range(self._worlds[self._answers(late)].hosts)) - set(late.answers))
                    yield from self._fail(
                        late, f"process {missing[0]} of {self._answers(late)} is late with {late.phase.__name__}"
                    )
            case WorldUp():
                known = self._worlds.get(fact.world)
                if known is not None and known.epoch >= fact.epoch:
                    return
                if known is not None:
                    yield from self._down(fact.world)
                self._worlds[fact.world] = _Endpoint(fact.epoch, fact.hosts, fact.trainer)
                for world in self._worlds.values():
                    for failed in world.wanted.values():
                        failed.pop(fact.world, None)  # an earlier incarnation of this world failed, not this one
            case WorldDown(world=name, epoch=epoch):
                if name in self._worlds and self._worlds[name].epoch == epoch:
                    yield from self._down(name)
            case Holds(world=name, epoch=epoch, version=version):
                if name in self._worlds and self._worlds[name].epoch == epoch:
                    self._worlds[name].holds.add(version)
            case Dropped(world=name, version=version):
                if name in self._worlds:
                    self._worlds[name].holds.discard(version)
            case Stored(version=version, there=there):
                (self._stored.add if there else self._stored.discard)(version)
            case VersionDue(version=version, due=due):
                (self._due.add if due else self._due.discard)(version)
            case VersionDigest(version=version, digest=digest):
                self._digests[version] = digest
                if not digest:  # it is dropped, or an older format of the journal did not take it
                    del self._digests[version]
            case Wanted(world=name, version=version):
                yield from self._want(name, version)
            case _:
                transfer = self._transfers.get(fact.key.receiver)
                if transfer is not None and transfer.key == fact.key:
                    if isinstance(fact, TransferFailed):
                        yield from self._fail(transfer, fact.reason)
                        return
                    if not isinstance(fact, transfer.phase):
                        return  # an answer of a phase that is over
                    hosts = self._worlds[self._answers(transfer)].hosts
                    if not 0 <= fact.host < hosts:
                        raise ValueError(
                            f"{self._answers(transfer)} has {hosts} processes, and number {fact.host} has answered"
                        )
                    transfer.answers[fact.host] = fact
                    if len(transfer.answers) == hosts:
                        yield from self._advance(transfer, [transfer.answers[host] for host in range(hosts)])

    def _down(self, name: str) -> Iterator[Command | Outcome]:
        if (transfer := self._transfers.pop(name, None)) is not None:
            yield from self._release(transfer)
        del self._worlds[name]
        for transfer in [t for t in self._transfers.values() if t.source == name]:
            if transfer.phase is not Committed:  # by then the source is not needed any more
                yield from self._fail(transfer, f"{name} is gone")

    def _want(self, name: str, version: Version) -> Iterator[Outcome]:
        world = self._worlds.get(name)
        if world is None:
            yield NotLoaded(world=name, version=version, reason=f"{name} is not up")
        elif version in world.holds:
            yield Loaded(world=name, version=version)
        else:
            world.wanted.setdefault(version, {})

    def _advance(self, transfer: _Transfer, answers: list[Answer]) -> Iterator[Command | Outcome]:
        """Every process has answered, in the kind of this phase."""
        if transfer.phase is Accepted:
            yield from self._accepted(transfer, [answer for answer in answers if isinstance(answer, Accepted)])
        elif transfer.phase is Offered:
            yield from self._offered(transfer, [answer for answer in answers if isinstance(answer, Offered)])
        elif transfer.phase is Staged:
            yield from self._staged(transfer, [answer for answer in answers if isinstance(answer, Staged)])
        else:
            world, version = self._end(transfer), transfer.key.version
            world.holds.add(version)
            del world.wanted[version]
            yield Loaded(world=transfer.key.receiver, version=version)

    # ------------------------------------------------------------ phases

    def _start_all(self) -> Iterator[Command | Outcome]:
        """Starts each transfer that waits and has a free source; gives up a version that no source can bring."""
        for name, world in self._worlds.items():
            for version, failed in list(world.wanted.items()):
                if name in self._transfers:
                    break
                sources = self._sources(version, failed)
                free = [source for source in sources if source == STORAGE or self._serving(source) < self._fanout]
                if free:
                    self._sequence += 1
                    key = Key(epoch=self._worlds[name].epoch, version=version, receiver=name, sequence=self._sequence)
                    self._transfers[name] = _Transfer(key, min(free, key=self._cost), Accepted, self._now_s + GRACE_S)
                    yield Propose(world=name, key=key)
                elif not sources and not self._is_to_come(version, failed):
                    del world.wanted[version]
                    reasons = [f"from {source}: {reason}" for source, reason in failed.items()]
                    yield NotLoaded(
                        world=name, version=version, reason="; ".join(reasons) or f"no process holds version {version}"
                    )

    def _accepted(self, transfer: _Transfer, answers: list[Accepted]) -> Iterator[Command]:
        transfer.shards = tuple(answer.shards for answer in answers)
        transfer.bytes = max(sum(shard.bytes for shard in answer.shards) for answer in answers)
        if transfer.source == STORAGE:
            self._enter(transfer, Staged, deadline_s(transfer.bytes))
            yield Read(world=transfer.key.receiver, key=transfer.key)
        else:
            self._enter(transfer, Offered, GRACE_S)
            yield Offer(world=transfer.source, key=transfer.key, wanted=tuple(answer.shards for answer in answers))

    def _offered(self, transfer: _Transfer, answers: list[Offered]) -> Iterator[Command]:
        timeout_s = deadline_s(transfer.bytes)
        self._enter(transfer, Staged, timeout_s + GRACE_S)  # a process that is alive reports its own timeout before
        yield Pull(
            world=transfer.key.receiver,
            key=transfer.key,
            timeout_s=timeout_s,
            manifests=tuple(zip(*(answer.manifests for answer in answers), strict=True)),
        )

    def _staged(self, transfer: _Transfer, answers: list[Staged]) -> Iterator[Command | Outcome]:
        digest = self._digests.get(transfer.key.version)
        if digest and (fault := _fault(transfer.shards, [answer.sums for answer in answers], digest)):
            yield from self._fail(transfer, fault)
            return
        self._enter(transfer, Committed, GRACE_S)
        yield Commit(world=transfer.key.receiver, key=transfer.key)
        yield from self._release(transfer, staged=True)

    def _fail(self, transfer: _Transfer, reason: str) -> Iterator[Command | Outcome]:
        world, key = self._end(transfer), transfer.key
        if transfer.phase is Committed:
            del world.wanted[key.version]
            yield Broken(world=key.receiver, epoch=key.epoch, reason=f"{words(key)}: {reason}")
            return
        world.wanted[key.version][transfer.source] = reason
        yield Abort(world=key.receiver, key=key, reason=f"from {transfer.source}: {reason}")
        yield from self._release(transfer)

    # ----------------------------------------------------------- private

    def _enter(self, transfer: _Transfer, phase: type[Answer], timeout_s: float) -> None:
        transfer.phase, transfer.answers, transfer.until_s = phase, {}, self._now_s + timeout_s

    def _end(self, transfer: _Transfer) -> _Endpoint:
        del self._transfers[transfer.key.receiver]
        return self._worlds[transfer.key.receiver]

    def _release(self, transfer: _Transfer, staged: bool = False) -> Iterator[Release]:
        asked = staged or transfer.phase in (Offered, Staged)  # else the source offers nothing yet, or no more
        if asked and transfer.source in self._worlds:
            yield Release(world=transfer.source, key=transfer.key, hosts=self._worlds[transfer.key.receiver].hosts)

    def _answers(self, transfer: _Transfer) -> str:
        return transfer.source if transfer.phase is Offered else transfer.key.receiver

    def _serving(self, name: str) -> int:
        return sum(transfer.source == name for transfer in self._transfers.values())

    def _sources(self, version: Version, failed: dict[str, str]) -> list[str]:
        """The sources of a version: all of the first path that has any."""
        if len(failed) >= ATTEMPTS:
            return []
        for path in self._paths:
            there = self.holders(version) if path == WIRE else (STORAGE,) * (version in self._stored)
            if sources := [source for source in there if source not in failed]:
                return sources
        return []

    def _is_to_come(self, version: Version, failed: dict[str, str]) -> bool:
        """Whether a source that is not there yet will be."""
        if version not in self._due or len(failed) >= ATTEMPTS:
            return False
        if STORAGE in self._paths:
            return version not in self._stored
        return not any(world.trainer and version in world.holds for world in self._worlds.values())

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
