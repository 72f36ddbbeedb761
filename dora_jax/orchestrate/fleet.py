"""The fleet: what every instance holds and where every unfinished sample is; indexes that make a decision cheap.

Consumes reservations (made when a command is issued) and releases (made when an event answers it).
Law: a slot and its pages are reserved from the command to the event that frees them, at both ends of a move.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from dora_jax.orchestrate.events import InstanceReported
from dora_jax.orchestrate.measured import Measured
from dora_jax.types import GroupId, InstanceId, SampleId, Version

# Reports of an instance after which what its samples have outgrown is reserved: an estimate does not get better by a look
# at every sample each time.
REPORTS_A_LOOK = 16

PENDING = "pending"  # waits for its first slot
STARTING, RUNNING, MOVING, PARKING, RESUMING = "starting", "running", "moving", "parking", "resuming"
STEADY, CLEARING, LOADING = "steady", "clearing", "loading"  # of a host's weights
PARKED = "parked"  # its tokens are recorded outside any instance; waits for a slot
CANCELLING = "cancelling"
ENDED = "ended"


class Unit:
    """One unfinished sample."""

    __slots__ = (
        "attempt", "began_s", "dst", "dst_pages", "failed_moves", "group", "id", "instance", "moved_s", "pages",
        "state", "tokens", "version",
    )  # fmt: skip

    def __init__(self, group: Group, index: int):
        self.group = group
        self.id = SampleId(group.id, index)
        self.version: Version = group.version  # of its weights now: the group's, except in mode `partial`
        self.state = PENDING
        self.tokens = 0
        self.pages = 0  # reserved where it is
        self.instance: InstanceId | None = None
        self.dst: Host | None = None  # while MOVING
        self.dst_pages = 0
        self.attempt = 0  # of its present move
        self.failed_moves = 0
        self.began_s = 0.0  # when it started
        self.moved_s = 0.0  # when its present move was asked for

    @property
    def index(self) -> int:
        return self.id.index


class Group:
    """One prompt with its G samples; `units[i]` is None once sample i has ended."""

    __slots__ = ("abandoned", "id", "left", "units", "version")

    def __init__(self, group_id: GroupId, version: Version, samples: int):
        self.id = group_id
        self.version = version
        self.left = samples
        self.abandoned: str | None = None  # "failed" or "evicted" while its last samples are being cancelled
        self.units: list[Unit | None] = [Unit(self, i) for i in range(samples)]


class Host:
    """One life of an instance that is up.

    Its weights: STEADY -> CLEARING (it starts nothing of `leaving`, which makes room for `coming`, where it has to)
    -> LOADING (`coming` is on its way, and nothing leaves) -> STEADY. `Fleet.turn` is the only way from one to another.
    """

    __slots__ = (
        "coming", "counts", "free_reported", "id", "incoming", "leaving", "life", "pace", "paced_steps", "page_size",
        "pages", "pages_used", "phase", "pressed", "report", "reports", "residents", "slots", "speed", "tokens", "units",
        "versions",
    )  # fmt: skip

    def __init__(self, id: InstanceId, life: int, slots: int, pages: int, page_size: int, residents: int,
                 speed: float):  # fmt: skip
        self.id = id
        self.life = life
        self.slots = slots
        self.pages = pages
        self.page_size = page_size
        self.residents = residents
        self.speed = speed  # as it said when it came up, then as measured
        self.pace = self.paced_steps = 0.0  # octaves by which it beats the fleet's line, by so many decode steps
        self.versions: list[Version] = []  # loaded
        self.phase = STEADY
        self.coming: Version | None = None
        self.leaving: Version | None = None
        self.units: dict[SampleId, Unit] = {}
        self.counts: dict[Version, int] = {}  # samples by version, incoming moves included
        self.pages_used = 0
        self.report: InstanceReported | None = None  # that units were not told of
        self.reports = 0
        self.tokens = 0  # of all its samples, in its last report
        self.incoming = 0
        self.free_reported = pages
        self.pressed = False  # short of pages: starts nothing until enough are free

    @property
    def used(self) -> int:
        """Slots, those of incoming moves included."""
        return len(self.units) + self.incoming

    @property
    def load(self) -> float:
        return (len(self.units) + self.incoming) / (self.slots * self.speed)

    @property
    def weight(self) -> int:
        """Its part of the work: slots by speed, in sixteenths, so that sums stay exact."""
        return max(1, round(16 * self.slots * self.speed))

    @property
    def serving(self) -> Version | None:
        """The version that it was given last."""
        if self.phase == LOADING:
            return self.coming
        return self.versions[-1] if self.versions else None


class Fleet:
    CONFIGURED = ("hosts",)

    def __init__(self, prompt_tokens: int, new_tokens: int, expected_tokens: int):
        self.measured = Measured(prompt_tokens, new_tokens, expected_tokens)
        self.hosts: dict[InstanceId, Host] = {}
        self.lives: dict[InstanceId, int] = {}  # the latest that was heard of, over or not
        self.open: dict[Version, list[tuple[float, InstanceId]]] = {}  # heaps; entries may be stale
        self.holders: dict[Version, dict[InstanceId, None]] = {}  # instances that serve or load a version
        self.promised: dict[Version, int] = {}  # hosts that load a version or make room for it
        self.arriving: dict[Version, int] = {}  # weight of hosts that load a version
        self.capacity: dict[Version, int] = {}  # weight of hosts that hold a version
        self.drains: dict[Version, int] = {}  # hosts on which a version drains

    # ------------------------------------------------------------------ pages

    def has_room(self, host: Host, tokens: int = 0) -> bool:
        if host.pressed or len(host.units) + host.incoming >= host.slots:
            return False
        return host.pages_used + self.measured.pages(host.page_size, tokens) <= host.pages

    def reported(self, host: Host, event: InstanceReported) -> None:
        """What the samples of the host have by now. Units are told when a decision looks at them (`settle`): most reports
        are followed by another one first."""
        host.report, host.tokens = event, sum(event.tokens)
        host.reports += 1
        if 2 * len(event.tokens) > len(host.units):  # else most of the pages are of samples that it does not list
            used = (host.pages - event.free) * host.page_size
            self.measured.held(len(event.tokens), host.tokens, used, host.page_size)
        if not host.reports % REPORTS_A_LOOK:
            self._raise(host)

    def _raise(self, host: Host) -> None:
        """Raise the reservations of samples that have outgrown theirs."""
        size, prompt = host.page_size, int(self.measured.prompt_tokens)
        for unit in self.settle(host):
            if unit.tokens > unit.pages * size - prompt:
                pages = self.measured.pages(host.page_size, unit.tokens)
                if pages > unit.pages:
                    host.pages_used += pages - unit.pages
                    unit.pages = pages

    def settle(self, host: Host) -> Iterable[Unit]:
        """The host's samples, with the tokens that were reported last. Law: whatever reads `tokens` of a unit that holds
        a slot settles its host first, so that nothing depends on when that was done before."""
        units, report, host.report = host.units, host.report, None
        if report is not None:
            for id, tokens in zip(zip(report.groups, report.indices, strict=True), report.tokens, strict=True):
                unit = units.get(id)  # type: ignore[call-overload]  # a pair is found as its SampleId
                if unit is not None:
                    unit.tokens = tokens
        return units.values()

    # ------------------------------------------------------------------ reserve and release

    def reserve(self, unit: Unit, host: Host, state: str) -> None:
        """The sample holds a slot of `host` from now on; `offer` the host when its last one is placed."""
        if state != STARTING:  # it may have been here before: what was reported of it then is over
            self.settle(host)
        unit.state, unit.instance = state, host.id
        pages = unit.pages = self.measured.pages(host.page_size, unit.tokens)
        host.units[unit.id] = unit
        host.pages_used += pages
        host.counts[unit.version] = host.counts.get(unit.version, 0) + 1

    def release(self, unit: Unit) -> Host | None:
        """Free the sample's slot (at both ends of a move); returns its host, None if that is gone. What has not ended
        knows its tokens then."""
        if unit.dst is not None:
            self.end_move(unit)
        host = None if unit.instance is None else self.hosts.get(unit.instance)
        unit.instance = None
        if host is None or unit.id not in host.units:
            return None
        if unit.state != ENDED:
            self.settle(host)
        del host.units[unit.id]
        _count(host, unit.version, -1, -unit.pages)
        if not host.units:
            host.pressed = False  # nothing is left that could hold its pages
        self.offer(host)
        return host

    def reserve_move(self, unit: Unit, dst: Host, attempt: int, now_s: float) -> None:
        """The sample holds a slot at both ends until the move is answered."""
        unit.attempt, unit.moved_s = attempt, now_s
        unit.state, unit.dst, unit.dst_pages = MOVING, dst, self.measured.pages(dst.page_size, unit.tokens)
        dst.incoming += 1
        _count(dst, unit.version, 1, unit.dst_pages)
        self.offer(dst)

    def end_move(self, unit: Unit) -> Host | None:
        """Give back the slot reserved at the destination; returns the destination, None if that is gone."""
        dst, unit.dst = unit.dst, None
        if dst is None or self.hosts.get(dst.id) is not dst:
            return None
        dst.incoming -= 1
        _count(dst, unit.version, -1, -unit.dst_pages)
        self.offer(dst)
        return dst

    # ------------------------------------------------------------------ hosts by version

    def offer(self, host: Host) -> None:
        """Enter a host with room into the heap of each version that it may start samples of."""
        if not self.has_room(host):
            return
        entry = ((len(host.units) + host.incoming) / (host.slots * host.speed), host.id)
        for version in host.versions:
            if version != host.leaving:
                heap = self.open.get(version)
                if heap is None:
                    heap = self.open[version] = []
                heapq.heappush(heap, entry)
                if len(heap) > 4 * len(self.holders[version]) + 64:
                    self._compact(version)

    def best(self, version: Version, tokens: int = 0) -> Host | None:
        """The least loaded host (ties by id) of a version with room for a sample of `tokens`."""
        heap = self.open.get(version, [])
        found, too_small = None, []
        while heap:
            load, id = heap[0]
            host = self.hosts.get(id)
            if host is None or host.load != load or not self.has_room(host) or not _serves(host, version):
                heapq.heappop(heap)
            elif not tokens or self.has_room(host, tokens):
                found = host
                break
            else:
                too_small.append(heapq.heappop(heap))
        for entry in too_small:
            heapq.heappush(heap, entry)
        return found

    def _compact(self, version: Version) -> None:
        hosts = [self.hosts[id] for id in self.holders[version]]
        heap = [(h.load, h.id) for h in hosts if _serves(h, version) and self.has_room(h)]
        heapq.heapify(heap)
        self.open[version] = heap

    # ------------------------------------------------------------------ weights

    def begin_load(self, host: Host, version: Version, drop: Version | None) -> None:
        self.turn(host, LOADING, version)
        if drop is not None:
            self._drop(host, drop)
        self.holders.setdefault(version, {})[host.id] = None

    def end_load(self, host: Host) -> None:
        version = host.coming
        assert version is not None
        self.turn(host, STEADY)
        self._keep(host, version)
        self.offer(host)

    def turn(self, host: Host, phase: str, coming: Version | None = None, leaving: Version | None = None) -> None:
        """The host's weights enter a phase; what is counted by version follows."""
        self._count_phase(host, -1)
        host.phase, host.coming, host.leaving = phase, coming, leaving
        self._count_phase(host, 1)
        self.offer(host)

    def _count_phase(self, host: Host, sign: int) -> None:
        if host.coming is not None:
            add(self.promised, host.coming, sign)
            if host.phase == LOADING:
                add(self.arriving, host.coming, sign * host.weight)
        if host.leaving is not None:
            add(self.drains, host.leaving, sign)

    def weigh(self, host: Host, sign: int) -> None:
        """Count the host's weight in or out, wherever it counts."""
        self._count_phase(host, sign)
        for version in host.versions:
            add(self.capacity, version, sign * host.weight)

    def _keep(self, host: Host, version: Version) -> None:
        host.versions.append(version)
        add(self.capacity, version, host.weight)

    def _drop(self, host: Host, version: Version) -> None:
        host.versions.remove(version)
        add(self.capacity, version, -host.weight)
        self._unhold(host, version)

    def _unhold(self, host: Host, version: Version) -> None:
        hosts = self.holders[version]
        del hosts[host.id]
        if not hosts:
            del self.holders[version]
            self.open.pop(version, None)

    # ------------------------------------------------------------------ instances come and go

    def add(self, host: Host, versions: tuple[Version, ...]) -> None:
        self.hosts[host.id] = host
        for version in versions:
            self._keep(host, version)
            self.holders.setdefault(version, {})[host.id] = None
        self.offer(host)

    def remove(self, host: Host) -> None:
        """Forget an instance; its samples are the caller's to place again."""
        if host.phase == LOADING and host.coming is not None:
            self._unhold(host, host.coming)
        self.turn(host, STEADY)
        for version in list(host.versions):
            self._drop(host, version)
        del self.hosts[host.id]


def _serves(host: Host, version: Version) -> bool:
    return version in host.versions and version != host.leaving


def _count(host: Host, version: Version, samples: int, pages: int) -> None:
    host.pages_used += pages
    add(host.counts, version, samples)


def add(counts: dict[Version, int], version: Version, by: int) -> None:
    """Add; a count of zero is not kept."""
    left = counts.get(version, 0) + by
    if left:
        counts[version] = left
    else:
        counts.pop(version, None)
