"""The fleet: what every instance holds and where every unfinished sample is; indexes that make a decision cheap.

Consumes reservations (made when a command is issued) and releases (made when an event answers it).
Law: a slot and its pages are reserved from the command to the event that frees them, at both ends of a move.

Measured speeds: how fast an instance decodes, against the fleet's median at equal load.

Consumes what instances report of their ticks; produces the speeds that placement, shares and moves count with. Load is
what decides a decode step's time: the versions that are decoded side by side (a call each), the rows, and the tokens of
KV that they read. The line through the whole fleet's reports (`Line`) says how long a step of a median instance takes
at a load; an instance's pace is by how much it beats that. Reports enter the line as a median instance would have made
them: a fast one is given more rows, and the line would else say that rows cost nothing. Ticks with drafts have a line
of their own; by how much they beat the other says what drafts are worth (`DraftGain`).
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from dora_jax.orchestrate.events import InstanceReported
from dora_jax.orchestrate.measured import DRAFTS_KEPT, Measured
from dora_jax.types import GroupId, Incarnation, InstanceId, SampleId, Version

# Reports of an instance after which what its samples have outgrown is reserved: an estimate does not get better by a
# look at every sample each time.
REPORTS_A_LOOK = 16

PENDING = "pending"  # waits for its first slot
STARTING, RUNNING, MOVING, PARKING, RESUMING = "starting", "running", "moving", "parking", "resuming"
STEADY, CLEARING, LOADING = "steady", "clearing", "loading"  # of a instance's weights
PARKED = "parked"  # its tokens are recorded outside any instance; waits for a slot
WAITING = "waiting"  # for its environment, outside any instance
CANCELLING = "cancelling"
ENDED = "ended"


@dataclass(slots=True, eq=False, repr=False)
class Unit:
    """One unfinished sample."""

    group: Group
    id: SampleId
    version: Version  # of its weights now: the group's, except in mode `partial`
    state: str = PENDING
    started: bool = False  # SampleStarted has come, so that SampleDone or SampleCancelled must
    tokens: int = 0
    pages: int = 0  # reserved where it is
    instance: InstanceId | None = None
    ran: tuple[Incarnation, ...] = ()  # that have sampled tokens of it
    restarts: bool = False  # one of them is in quarantine: it begins again from its prompt
    home: InstanceId | None = None  # has kept its KV while it waited
    dst: Instance | None = None  # while MOVING
    dst_pages: int = 0
    placed: int = 0  # the attempt that brought it where it is, or was before it waited
    attempt: int = 0  # of its present move
    failed_moves: int = 0
    began_s: float = 0.0  # when it started, put off by the time for which it waited
    waits_s: float = 0.0  # when it began to wait
    moved_s: float = 0.0  # when its present move was asked for


class Group:
    """One prompt with its G samples; `units[i]` is None once sample i has ended."""

    __slots__ = ("abandoned", "begins_again", "id", "left", "ran", "units", "version")

    def __init__(self, group_id: GroupId, version: Version, samples: int):
        self.id = group_id
        self.version = version
        self.left = samples
        self.abandoned: str | None = None  # "failed" or "evicted" while its last samples are being cancelled
        self.ran: tuple[Incarnation, ...] = ()  # that have sampled tokens of those which have ended
        self.begins_again = (
            False  # one of its samples does: what is reported of the whole group may be of an earlier one
        )
        self.units: list[Unit | None] = [Unit(self, SampleId(group_id, i), version) for i in range(samples)]


@dataclass(slots=True, eq=False, repr=False)
class Instance:
    """One incarnation of an instance that is up.

    Its weights: STEADY -> CLEARING (it starts nothing of `leaving`, which makes room for `coming`, where it has to)
    -> LOADING (`coming` is on its way, and nothing leaves) -> STEADY. `Fleet.turn` is the only way from one to another.
    """

    id: InstanceId
    incarnation: int
    slots: int
    pages: int
    page_size: int
    residents: int
    speed: float  # as reported when it came up, then as measured
    pace: float = 0.0  # octaves by which it beats the fleet's line
    paced_steps: float = 0.0  # decode steps that say so
    versions: list[Version] = field(default_factory=list)  # loaded
    phase: str = STEADY
    coming: Version | None = None
    leaving: Version | None = None
    units: dict[SampleId, Unit] = field(default_factory=dict)
    counts: dict[Version, int] = field(default_factory=dict)  # samples by version, incoming moves included
    pages_used: int = 0
    report: InstanceReported | None = None  # that units have not received
    reports: int = 0
    tokens: int = 0  # of all its samples, in its last report
    incoming: int = 0
    free_reported: int = field(init=False)
    pressed: bool = False  # short of pages: starts nothing until enough are free
    returning: bool = False  # gives its chips back to the trainer: starts nothing more

    def __post_init__(self) -> None:
        self.free_reported = self.pages

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
    CONFIGURED = ("instances", "alone")

    def __init__(self, prompt_tokens: int, new_tokens: int, expected_tokens: int):
        self.measured = Measured(prompt_tokens, new_tokens, expected_tokens)
        self.instances: dict[InstanceId, Instance] = {}
        self.alone: dict[InstanceId, tuple[Incarnation, ...]] = {}  # the one that is up: most samples share it as `ran`
        self.incarnations: dict[InstanceId, int] = {}  # the latest reported, over or not
        self.unhealthy: dict[InstanceId, int] = {}  # the latest incarnation that is not believed, nor any before it
        self.open: dict[Version, list[tuple[float, InstanceId]]] = {}  # heaps; entries may be stale
        self.holders: dict[Version, dict[InstanceId, None]] = {}  # instances that serve or load a version
        self.promised: dict[Version, int] = {}  # instances that load a version or make room for it
        self.arriving: dict[Version, int] = {}  # weight of instances that load a version
        self.capacity: dict[Version, int] = {}  # weight of instances that hold a version
        self.drains: dict[Version, int] = {}  # instances on which a version drains
        self.outdated: dict[InstanceId, None] = {}  # whose samples go on under newer weights
        self.asked: dict[InstanceId, tuple[int, float]] = {}  # the load in progress: its number, and since when

    # ------------------------------------------------------------------ pages

    def has_room(self, instance: Instance, tokens: int = 0) -> bool:
        if instance.pressed or instance.returning or len(instance.units) + instance.incoming >= instance.slots:
            return False
        return instance.pages_used + self.measured.pages(instance.page_size, tokens) <= instance.pages

    def reported(self, instance: Instance, event: InstanceReported) -> None:
        """What the samples of the instance have by now. Units are updated when a decision looks at them (`settle`):
        most reports are followed by another one first."""
        instance.report, instance.tokens = event, sum(event.tokens)
        if 2 * len(event.tokens) > len(instance.units):  # else most of the pages are of samples that it does not list
            used = (instance.pages - event.free) * instance.page_size
            self.measured.held(len(event.tokens), instance.tokens, used, instance.page_size)
        if instance.reports >= REPORTS_A_LOOK:
            instance.reports = 0
            # Raise the reservations of samples that have outgrown theirs
            size, prompt = instance.page_size, int(self.measured.prompt_tokens)
            for unit in self.settle(instance):
                if unit.tokens > unit.pages * size - prompt:
                    pages = self.measured.pages(instance.page_size, unit.tokens)
                    if pages > unit.pages:
                        instance.pages_used += pages - unit.pages
                        unit.pages = pages

    def settle(self, instance: Instance) -> Iterable[Unit]:
        """The instance's samples, with the tokens that were reported last. Law: whatever reads `tokens` of a unit that
        holds a slot settles its instance first, so that nothing depends on when that was done before."""
        units, report, instance.report = instance.units, instance.report, None
        if report is not None:
            for id, tokens in zip(zip(report.groups, report.indices, strict=True), report.tokens, strict=True):
                unit = units.get(id)  # type: ignore[call-overload]  # a pair is found as its SampleId
                if unit is not None:
                    unit.tokens = tokens
        return units.values()

    # ------------------------------------------------------------------ reserve and release

    def reserve(self, unit: Unit, instance: Instance, state: str, attempt: int) -> None:
        """The sample holds a slot of `instance` from now on; `offer` the instance when its last one is placed."""
        unit.placed = attempt
        if state != STARTING:  # it may have been here before: what was reported of it then is over
            self.settle(instance)
        unit.state, unit.instance, unit.home = state, instance.id, None
        pages = unit.pages = self.measured.pages(instance.page_size, unit.tokens)
        instance.units[unit.id] = unit
        instance.pages_used += pages
        instance.counts[unit.version] = instance.counts.get(unit.version, 0) + 1

    def release(self, unit: Unit) -> Instance | None:
        """Free the sample's slot (at both ends of a move); returns its instance, None if that is gone. What has not
        ended knows its tokens then."""
        if unit.dst is not None:
            self.end_move(unit)
        instance = None if unit.instance is None else self.instances.get(unit.instance)
        unit.instance = None
        if instance is None or unit.id not in instance.units:
            return None
        if unit.state != ENDED:
            self.settle(instance)
        del instance.units[unit.id]
        instance.pages_used -= unit.pages
        add(instance.counts, unit.version, -1)
        if not instance.units:
            instance.pressed = False  # nothing is left that could hold its pages
        self.offer(instance)
        return instance

    def reserve_move(self, unit: Unit, dst: Instance, attempt: int, now_s: float) -> None:
        """The sample holds a slot at both ends until the move is answered."""
        unit.attempt, unit.moved_s = attempt, now_s
        unit.state, unit.dst, unit.dst_pages = MOVING, dst, self.measured.pages(dst.page_size, unit.tokens)
        dst.incoming += 1
        dst.pages_used += unit.dst_pages
        add(dst.counts, unit.version, 1)
        self.offer(dst)

    def end_move(self, unit: Unit) -> Instance | None:
        """Release the slot reserved at the destination; returns the destination, None if that is gone."""
        dst, unit.dst = unit.dst, None
        if dst is None or self.instances.get(dst.id) is not dst:
            return None
        dst.incoming -= 1
        dst.pages_used -= unit.dst_pages
        add(dst.counts, unit.version, -1)
        self.offer(dst)
        return dst

    # ------------------------------------------------------------------ instances by version

    def offer(self, instance: Instance) -> None:
        """Enter an instance with room into the heap of each version that it may start samples of."""
        if not self.has_room(instance):
            return
        entry = ((len(instance.units) + instance.incoming) / (instance.slots * instance.speed), instance.id)
        for version in instance.versions:
            if version != instance.leaving:
                heap = self.open.setdefault(version, [])
                heapq.heappush(heap, entry)
                if len(heap) > 4 * len(self.holders[version]) + 64:
                    held = [self.instances[id] for id in self.holders[version]]
                    heap[:] = [(h.load, h.id) for h in held if _serves(h, version) and self.has_room(h)]
                    heapq.heapify(heap)

    def place(self, unit: Unit) -> Instance | None:
        """Where a waiting sample goes on: where its KV is, or else where there is most room."""
        home = None if unit.home is None else self.instances.get(unit.home)
        if home is not None and _serves(home, unit.version) and self.has_room(home, unit.tokens):
            return home
        return self.best(unit.version, unit.tokens)

    def best(self, version: Version, tokens: int = 0) -> Instance | None:
        """The least loaded instance (ties by id) of a version with room for a sample of `tokens`."""
        heap = self.open.get(version, [])
        found, too_small = None, []
        while heap:
            load, id = heap[0]
            instance = self.instances.get(id)
            if (
                instance is None
                or instance.load != load
                or not self.has_room(instance)
                or not _serves(instance, version)
            ):
                heapq.heappop(heap)
            elif not tokens or self.has_room(instance, tokens):
                found = instance
                break
            else:
                too_small.append(heapq.heappop(heap))
        for entry in too_small:
            heapq.heappush(heap, entry)
        return found

    # ------------------------------------------------------------------ weights

    def begin_load(self, instance: Instance, version: Version, drop: Version | None) -> None:
        self.turn(instance, LOADING, version)
        if drop is not None:
            self._drop(instance, drop)
        self.holders.setdefault(version, {})[instance.id] = None

    def end_load(self, instance: Instance) -> None:
        version = instance.coming
        assert version is not None
        self.turn(instance, STEADY)
        self._keep(instance, version)
        self.offer(instance)

    def turn(
        self, instance: Instance, phase: str, coming: Version | None = None, leaving: Version | None = None
    ) -> None:
        """The instance's weights enter a phase; what is counted by version follows."""
        self._count_phase(instance, -1)
        instance.phase, instance.coming, instance.leaving = phase, coming, leaving
        self._count_phase(instance, 1)
        if phase != CLEARING or instance.residents > 1:  # else it starts nothing: its only version leaves
            self.offer(instance)

    def _count_phase(self, instance: Instance, sign: int) -> None:
        if instance.coming is not None:
            add(self.promised, instance.coming, sign)
            if instance.phase == LOADING:
                add(self.arriving, instance.coming, sign * instance.weight)
        if instance.leaving is not None:
            add(self.drains, instance.leaving, sign)

    def weigh(self, instance: Instance, sign: int) -> None:
        """Count the instance's weight in or out, wherever it counts."""
        self._count_phase(instance, sign)
        for version in instance.versions:
            add(self.capacity, version, sign * instance.weight)

    def _keep(self, instance: Instance, version: Version) -> None:
        instance.versions.append(version)
        add(self.capacity, version, instance.weight)

    def _drop(self, instance: Instance, version: Version) -> None:
        instance.versions.remove(version)
        add(self.capacity, version, -instance.weight)
        self._unhold(instance, version)

    def _unhold(self, instance: Instance, version: Version) -> None:
        instances = self.holders[version]
        del instances[instance.id]
        if not instances:
            del self.holders[version]
            self.open.pop(version, None)

    # ------------------------------------------------------------------ instances come and go

    def add(self, instance: Instance, versions: tuple[Version, ...]) -> None:
        self.instances[instance.id] = instance
        self.alone[instance.id] = ((instance.id, instance.incarnation),)
        for version in versions:
            self._keep(instance, version)
            self.holders.setdefault(version, {})[instance.id] = None
        self.offer(instance)

    def remove(self, instance: Instance) -> None:
        """Forget an instance; its samples are the caller's to place again."""
        if instance.phase == LOADING and instance.coming is not None:
            self._unhold(instance, instance.coming)
        self.turn(instance, STEADY)
        for version in list(instance.versions):
            self._drop(instance, version)
        del self.instances[instance.id], self.alone[instance.id]
        self.asked.pop(instance.id, None)


def _serves(instance: Instance, version: Version) -> bool:
    return version in instance.versions and version != instance.leaving


def add(counts: dict[Version, int], version: Version, by: int) -> None:
    """Add; a count of zero is not kept."""
    left = counts.get(version, 0) + by
    if left:
        counts[version] = left
    else:
        counts.pop(version, None)


SMOOTHED_STEPS = 1024  # decode steps over which a pace is averaged
MOST_AT_ONCE = 0.5  # a report's part in a pace: one that fell into a compilation is not believed
MEASURED_STEPS = 256  # before a pace counts
FARTHEST = 3.0  # octaves from the line that one report may be
DIFFERENCE = (
    0.25  # octaves by which a speed must be off before it is changed: less is noise, and each change moves work
)
ROWS = 1  # where a load has its rows
LINE_REPORTS = 8  # before the line says anything


def observe_ticks(fleet: Fleet, instance: Instance, event: InstanceReported) -> None:
    """A report of ticks that only decoded: by how much they beat the line of their kind, which they then enter. What
    drafts gained is known once the line says what decode calls take."""
    line, drafts = fleet.measured.line, fleet.measured.drafts
    context = float(max(0, instance.pages - event.free) * instance.page_size)
    for ticks, kind in ((event, line), (event.drafted, drafts.line)):
        if ticks is None or not (ticks.sampled and ticks.row_s > 0 and ticks.busy_s > 0):
            continue
        load = float(max(1, len(instance.counts))), ticks.row_s / ticks.busy_s, context
        step_s, steps = ticks.row_s / ticks.sampled, ticks.sampled / load[ROWS]
        if kind.reports >= LINE_REPORTS:
            octaves = max(-FARTHEST, min(FARTHEST, math.log2(max(kind.step_s(load), 1e-12) / step_s)))
            instance.paced_steps += steps
            instance.pace += (octaves - instance.pace) * min(
                MOST_AT_ONCE, steps / min(SMOOTHED_STEPS, instance.paced_steps)
            )
        kind.add(load, step_s * 2.0**instance.pace)
        if isinstance(ticks, InstanceReported):
            drafts.decoded(load[ROWS], ticks.row_s)
            continue
        drafts.guesses = DRAFTS_KEPT * drafts.guesses + ticks.guesses
        drafts.held = DRAFTS_KEPT * drafts.held + ticks.held
        if line.reports >= LINE_REPORTS:
            plain_s = ticks.sampled * line.step_s(load) / 2.0**instance.pace
            least_s, most_s = ticks.row_s / 2**FARTHEST, ticks.row_s * 2**FARTHEST
            drafts.drafted(load[ROWS], ticks.sampled, max(least_s, min(most_s, plain_s)), ticks.row_s)


def renew_speeds(fleet: Fleet) -> None:
    """Every measured instance's speed follows its pace, where they differ."""
    measured = [instance for instance in fleet.instances.values() if instance.paced_steps >= MEASURED_STEPS]
    if len(measured) < 2:
        return
    median = statistics.median(instance.pace for instance in measured)
    for instance in measured:
        instance.pace -= median
        if abs(instance.pace - math.log2(instance.speed)) >= DIFFERENCE:
            fleet.weigh(instance, -1)
            instance.speed = 2.0**instance.pace
            fleet.weigh(instance, 1)
            fleet.offer(instance)
