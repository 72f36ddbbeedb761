"""Balance: which instance serves which version, which samples move or are parked. Issues LoadWeights, Move, Park.

`rebalance` runs on triggers only and looks at every instance; the other functions look at one. An instance never
drops weights under running samples: it starts nothing more of the version that is leaving, the samples of that end or
move, and then it loads the one that is coming.

Partition: which instance serves which version. Values in, values out.

`plan_shares` divides instances among versions in proportion to their requests in flight; `plan_partition` picks the
instances by their capacity, with the fewest reloads. Where there is room for fewer than all versions, the oldest are
served first: their deadline is the nearest, and they can only shrink.

Migration: which samples move so that instances become free. Values in, values out.

An instance is emptied whole or not at all: a half-moved one frees nothing. Samples go only between instances of the
same version, and only onto slots and pages that are free now.
"""

from __future__ import annotations

import functools
import heapq
import math
from typing import NamedTuple

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import fleet, ledger
from dora_jax.orchestrate import fleet as fl
from dora_jax.orchestrate.fleet import Instance, Unit
from dora_jax.orchestrate.state import State
from dora_jax.types import InstanceId, SampleId, Version, is_training


class InstanceView(NamedTuple):
    """An instance as the partition sees it."""

    id: InstanceId
    versions: list[Version]  # that it holds, or that are on their way
    samples: dict[Version, int]
    free: int  # versions that it can still take
    capacity: float  # slots by speed
    speed: float = 1.0  # its class


def plan_shares(
    instances: int,
    demand: dict[Version, int],
    need: dict[Version, int],
    cap: dict[Version, int] | None = None,
    spread: str = "remainder",
    resident_slots: int = 0,
) -> dict[Version, int]:
    """Instances for each version with demand. `need`: the least that its unfinished samples fit on; `cap`: the most
    that it has a use for (missing: any number); `resident_slots`: versions that all instances hold together, where some
    hold more than one. A version without a cap is then wanted on every instance, an older one where its samples need
    it."""
    versions = sorted(v for v, n in demand.items() if n > 0)
    resident_slots = max(resident_slots, instances)
    if resident_slots <= len(versions):
        return {v: int(i < resident_slots) for i, v in enumerate(versions)}
    if not versions:
        return {}
    if resident_slots > instances:
        floors = {v: min(instances, max(1, need.get(v, 0))) for v in versions}
        everywhere = {v: instances for v in versions if v not in (cap or {})}
        return _fit(floors | everywhere, floors, resident_slots, spare_to_newest=False)
    total = sum(demand[v] for v in versions)
    if spread == "round":
        shares = {v: max(1, (2 * instances * demand[v] + total) // (2 * total)) for v in versions}
    else:
        shares = {v: instances * demand[v] // total for v in versions}
        by_remainder = sorted(versions, key=lambda v: (-(instances * demand[v] % total), v))
        for version in by_remainder[: instances - sum(shares.values())]:
            shares[version] += 1
    floors = {v: max(1, need.get(v, 0)) for v in versions}
    shares = {v: max(shares[v], floors[v]) for v in versions}
    shares = _fit(shares, floors, instances)
    # What a version has no use for goes to the newest that has no cap, or to nobody
    cap = cap or {}
    capped = {v: min(n, max(cap.get(v, n), floors[v])) for v, n in shares.items()}
    uncapped = [v for v in shares if v not in cap]
    if uncapped:
        capped[max(uncapped)] += sum(shares.values()) - sum(capped.values())
    return capped


def _fit(
    shares: dict[Version, int], floors: dict[Version, int], instances: int, spare_to_newest: bool = True
) -> dict[Version, int]:
    """Make the sum equal `instances`: spare ones go to the newest, missing ones come from the newest above its floor,
    then from the newest above one."""
    newest_first = sorted(shares, reverse=True)
    excess = sum(shares.values()) - instances
    for least in (floors, dict.fromkeys(shares, 1)):
        for version in newest_first:
            give = min(max(0, excess), shares[version] - least[version])
            shares[version] -= max(0, give)
            excess -= max(0, give)
    if spare_to_newest:
        shares[newest_first[0]] += max(0, -excess)
    return shares


def plan_partition(
    views: list[InstanceView], shares: dict[Version, int], newest: Version
) -> dict[InstanceId, tuple[Version, Version | None]]:
    """{instance: (version to load, version that makes room or None)} for the instances that are to change.

    A share is so many instances of mean capacity. A version with more than its share keeps those with the most samples;
    one older than the newest is at its tail and keeps the fast ones, if they are. What it gives up goes to the versions
    short of capacity, oldest first. An instance that nobody asks for stays as it is.
    """
    mean = sum(view.capacity for view in views) / len(views)
    missing = {version: share * mean for version, share in shares.items()}
    # Where a version may be loaded, in the order in which they are taken: (0 beside what the instance holds, samples,
    # instance, version that leaves or -1, view)
    spare = [(0, 0, view.id, -1, view) for view in views if view.free > 0]
    held: dict[Version, list[InstanceView]] = {}
    for view in views:
        for version in view.versions:
            held.setdefault(version, []).append(view)
    for version, holding in sorted(held.items()):
        wanted, capacity = missing.get(version, 0.0), sum(view.capacity for view in holding)
        if wanted <= 0:
            spare += [(1, view.samples.get(version, 0), view.id, version, view) for view in holding]
        elif wanted >= capacity:
            missing[version] -= capacity
        else:
            places = [(-v.speed * (version < newest), -v.samples.get(version, 0), v.id, v) for v in holding]
            for i, (_, samples, id, view) in enumerate(sorted(places)):
                if missing[version] > (view.capacity / 2 if i else 0.0):
                    missing[version] -= view.capacity
                else:
                    spare.append((1, -samples, id, version, view))
    spare.sort()
    changes: dict[InstanceId, tuple[Version, Version | None]] = {}
    for version in sorted(shares):
        holders = len(held.get(version, ()))
        for _, _, id, leaving, view in spare:
            if missing[version] <= 0 or (holders and version != newest and holders >= shares[version]):
                break  # an older one by heads: it only shrinks
            enough = missing[version] <= (view.capacity / 2 if holders else 0.0)
            if not enough and id not in changes and version not in view.versions:
                changes[id] = (version, None if leaving < 0 else leaving)
                missing[version] -= view.capacity
                holders += 1
        if not holders and shares[version]:  # none is spare: a younger version gives one up
            for younger in sorted((v for v in held if v > version), reverse=True):
                giving = [(v.samples.get(younger, 0), v.id) for v in held[younger] if v.id not in changes]
                if giving:
                    changes[min(giving)[1]] = (version, younger)
                    break
    return changes


@functools.lru_cache(maxsize=1 << 14)
def speed_class(speed: float) -> float:
    """The nearest of 1, 1.41, 2, ... and 0.71, 0.5, ...: for less of a difference moves cost more than they gain."""
    return 2 ** (round(2 * math.log2(speed)) / 2)


class Mover(NamedTuple):
    id: SampleId
    tokens: int
    pages: int  # it needs at its destination


class EmptiedInstance(NamedTuple):
    """An instance to be emptied."""

    id: InstanceId
    movers: list[Mover]


class StayingInstance(NamedTuple):
    """An instance of the same version that stays."""

    id: InstanceId
    used: int
    slots: int
    free_pages: int
    speed: float


def plan_moves(
    sources: list[EmptiedInstance], sinks: list[StayingInstance], limit: int
) -> list[tuple[SampleId, InstanceId, InstanceId]]:
    """(sample, src, dst): sources with the fewest samples first, the longest sample first onto the least loaded sink.
    `limit` bounds the moves of one step; the next trigger goes on."""
    heap = [(s.used / (s.slots * s.speed), s.id, s.used, s.slots, s.free_pages, s.speed) for s in sinks]
    heapq.heapify(heap)
    moves: list[tuple[SampleId, InstanceId, InstanceId]] = []
    for source in sorted(sources, key=lambda s: (len(s.movers), s.id)):
        if len(moves) + len(source.movers) > limit:
            break
        placed = []
        for mover in sorted(source.movers, key=lambda m: (-m.tokens, m.id)):
            while heap and (heap[0][2] >= heap[0][3] or heap[0][4] < mover.pages):
                heapq.heappop(heap)
            if not heap:  # they do not fit all
                return moves
            _, id, used, slots, pages, speed = heapq.heappop(heap)
            placed.append((mover.id, source.id, id))
            used, pages = used + 1, pages - mover.pages
            heapq.heappush(heap, (used / (slots * speed), id, used, slots, pages, speed))
        moves += placed
    return moves


def worth_moving(left_tokens: list[float], *, slots: int, token_s: float, move_s: float) -> bool:
    """Whether emptying an instance gains more than it costs, in slot-seconds, by what was measured so far.

    Gain: its slots are free for as long as the sample with the most tokens left would have run on. Cost: each moved
    sample stands still for one move.
    """
    return slots * max(left_tokens) * token_s >= len(left_tokens) * move_s


# A mass migration is spread over several rebalances: each planned sample costs a few microseconds of this step.
MOVES_A_STEP = 1024
# Of samples that go on under the newest weights: each is parked, reported and placed again.
SWAPPED_A_DECISION = 2048
# A sample whose moves failed this often stays where it is.
MOVE_ATTEMPTS = 3
# A rebalance looks at every instance: so much time lies between two of them for each beyond the first thousand. Ten
# thousand instances that come up one after the other ask for it ten thousand times.
REBALANCE_S, FREE_INSTANCES = 1e-4, 1000


def rebalance(s: State) -> None:
    s.rebalanced_s = s.now_s
    present = [instance for instance in s.fleet.instances.values() if not instance.returning]
    # lent ones keep the version that they were lent for, where there are others
    instances = [instance for instance in present if instance.id not in s.roles.lent] or present
    if not instances:
        return
    fleet.renew_speeds(s.fleet)
    demand = _demand(s)
    # {instance: (the version that it is to take, the one that makes room)}: shares in proportion to the requests. A
    # version of which every sample waits for its environment keeps an instance, to which they come back, where there
    # are enough for all versions
    slots, resident_slots = sum(h.slots for h in instances), sum(h.residents for h in instances)
    if len(demand) >= resident_slots:
        demand = {v: n for v, n in demand.items() if n > s.queue.in_environment.get(v, 0)}
    need = {v: -(-min(n, s.queue.wanting(v)) * len(instances) // slots) for v, n in demand.items()}
    # What a version's share of the instances is in proportion to: its samples, and the KV that they read
    weights = demand
    if s.decisions.kv_weight:
        tokens = dict.fromkeys(demand, 0)
        for instance in s.fleet.instances.values():
            if instance.serving in tokens:
                tokens[instance.serving] += instance.tokens
        of_mean = s.decisions.kv_weight / max(1.0, s.fleet.measured.mean_tokens)
        weights = {version: samples + round(of_mean * tokens[version]) for version, samples in demand.items()}
    # An older version only shrinks: what it has is enough for its samples, and more would soon have to be released.
    # A younger one than the rollouts take is there for its evaluation alone.
    taken = s.ledger.taken
    cap = {v: len(s.fleet.holders.get(v, ())) if v < taken else need[v] for v in demand if v != taken}
    shares = plan_shares(len(instances), weights, need, cap, s.decisions.spread, resident_slots)
    views = []
    for instance in instances:
        versions = instance.versions
        if instance.phase == fl.LOADING and instance.coming is not None:
            versions = [*versions, instance.coming]
        speed, free = speed_class(instance.speed), instance.residents - len(versions)
        views.append(InstanceView(instance.id, versions, instance.counts, free, instance.slots * speed, speed))
    changes = plan_partition(views, shares, taken)
    for instance in instances:
        if instance.phase != fl.LOADING:
            coming, leaving = changes.get(instance.id, (None, None))
            if (coming, leaving) != (instance.coming, instance.leaving):
                s.fleet.turn(instance, fl.STEADY if coming is None else fl.CLEARING, coming, leaving)
            if not instance.used or (coming is not None and leaving not in instance.counts):
                s.due.emptied[instance.id] = None
    if s.decisions.mixes_versions:
        s.fleet.outdated = {h.id: None for h in s.fleet.instances.values() if min(h.counts, default=taken) < taken}
        swap(s)
    for version in sorted(s.fleet.drains):
        _move(s, version)
    if s.roles.lent:
        _spread(s)
    for instance in s.fleet.instances.values() if s.ledger.missing else ():
        # The trainer is idle, and an older version has samples but no instance: those of the younger version that is to
        # make room are parked instead of waited for. Older over younger only, so no two versions trade places
        coming, leaving = instance.coming, instance.leaving
        if coming is not None and leaving is not None and coming < leaving and coming not in s.fleet.holders:
            _park(s, instance, [u for u in s.fleet.settle(instance) if u.version == leaving])
    s.wake_all()


def _demand(s: State) -> dict[Version, int]:
    """Requests in flight by version, and those that credit allows at the version meant for them."""
    meant = ledger.admission_version(s.decisions, s.ledger)
    if s.decisions.mixes_versions:  # training samples follow the newest weights
        demand = dict(s.queue.untrained_unfinished)
        demand[meant] = demand.get(meant, 0) + s.queue.training_unfinished
    else:
        demand = dict(s.queue.unfinished)
    credit = ledger.credit(s.decisions, s.ledger, meant, s.config.total_steps, s.budget)
    demand[meant] = demand.get(meant, 0) + credit * s.config.group_size
    return {version: samples for version, samples in demand.items() if samples}


# ---------------------------------------------------------------- samples


def _park(s: State, instance: Instance, units: list[Unit]) -> None:
    """Put running samples aside, the longest first: that is the order in which they go on."""
    running = sorted((u for u in units if u.state == fl.RUNNING), key=lambda u: (-u.tokens, u.id))
    if running and not instance.returning:
        for unit in running:
            unit.state = fl.PARKING
        s.out.append(ev.Park(ids=tuple(u.id for u in running), instance=instance.id))


def swap(s: State) -> None:
    """Modes `partial` and `staleflow`: training samples that run under older weights are parked, to go on under the
    newest; instance after instance, and so many in one decision that what follows from them is no stall either."""
    left = SWAPPED_A_DECISION
    for id in list(s.fleet.outdated):
        if left <= 0:
            return
        del s.fleet.outdated[id]
        if (instance := s.fleet.instances.get(id)) is not None:
            older = [u for u in s.fleet.settle(instance) if u.version < s.ledger.base and is_training(u.group.id)]
            _park(s, instance, older)
            left -= len(older)


def consolidate(s: State) -> None:
    """Plan moves of a draining version again once as many slots are free as it has instances: a look at each instance
    costs no more than that a slot then."""
    for version in sorted(s.due.drained):
        if version not in s.fleet.drains:
            del s.due.drained[version]
        elif s.due.drained[version] >= len(s.fleet.holders[version]):
            _move(s, version)


def _move(s: State, version: Version) -> None:
    """Empty the instances on which `version` drains, onto those that keep it."""
    s.due.drained.pop(version, None)
    measured = s.fleet.measured
    drained, roomy = [], []
    for id in s.fleet.holders.get(version, ()):
        instance = s.fleet.instances[id]
        if instance.leaving == version:
            drained.append(instance)
        elif version in instance.versions and s.fleet.has_room(instance):
            roomy.append((instance.load, id))
    # So many moves reach no others
    sinks = [_sink(s.fleet.instances[id]) for _, id in heapq.nsmallest(MOVES_A_STEP, roomy)]
    room = min(MOVES_A_STEP, sum(sink.slots - sink.used for sink in sinks))
    sources = []
    for instance in sorted(drained, key=lambda h: (h.counts.get(version, 0), h.id)) if roomy else ():
        room -= instance.counts.get(version, 0)
        if room < 0:
            break
        units = [u for u in s.fleet.settle(instance) if u.version == version]
        if not units or instance.returning or instance.incoming or not all(map(_movable, units)):
            continue
        left, token_s = [measured.left(u.tokens) for u in units], measured.token_s(len(instance.units)) / instance.speed
        if worth_moving(left, slots=instance.slots, token_s=token_s, move_s=measured.move_s):
            sources.append(_emptied(s, instance, units))
    if sources:
        _issue_moves(s, plan_moves(sources, sinks, MOVES_A_STEP))


def _spread(s: State) -> None:
    """Lent instances take their part of the samples that run at their versions, those with the least KV first."""
    lent = [s.fleet.instances[id] for id in s.roles.lent if id in s.fleet.instances]
    for version in sorted({v for instance in lent for v in instance.versions}):
        holders = [s.fleet.instances[id] for id in sorted(s.fleet.holders[version])]
        holders = [h for h in holders if version in h.versions and h.leaving != version and not h.returning]
        samples, weight = sum(h.counts.get(version, 0) for h in holders), sum(h.weight for h in holders)
        sources, sinks = [], []
        for instance in holders:
            over = instance.counts.get(version, 0) - -(-samples * instance.weight // weight)
            if instance.id in s.roles.lent and over < 0 and s.fleet.has_room(instance):
                sinks.append(_sink(instance))
            elif over > 0:
                units = sorted(
                    (u for u in s.fleet.settle(instance) if u.version == version and _movable(u)),
                    key=lambda u: (u.tokens, u.id),
                )
                sources.append(_emptied(s, instance, units[:over]))
        if sources and sinks:
            _issue_moves(s, plan_moves(sources, sinks, MOVES_A_STEP))


def _emptied(s: State, instance: Instance, units: list[Unit]) -> EmptiedInstance:
    size, pages = instance.page_size, s.fleet.measured.pages
    return EmptiedInstance(instance.id, [Mover(u.id, u.tokens, pages(size, u.tokens)) for u in units])


def _sink(instance: Instance) -> StayingInstance:
    free_pages = instance.pages - instance.pages_used
    return StayingInstance(instance.id, instance.used, instance.slots, free_pages, instance.speed)


def _movable(unit: Unit) -> bool:
    return unit.state == fl.RUNNING and unit.failed_moves < MOVE_ATTEMPTS


def _issue_moves(s: State, moves: list[tuple[SampleId, InstanceId, InstanceId]]) -> None:
    routes: dict[tuple[InstanceId, InstanceId], list[SampleId]] = {}
    s.attempts += 1
    for id, src, dst in moves:
        s.fleet.reserve_move(s.live_unit(id), s.fleet.instances[dst], s.attempts, s.now_s)
        routes.setdefault((src, dst), []).append(id)
    for (src, dst), ids in routes.items():
        s.out.append(ev.Move(ids=tuple(ids), src=src, dst=dst, attempt=s.attempts))


def relieve_pressed(s: State) -> None:
    """KV pressure: the youngest samples of an instance that runs out of pages move to another instance of their
    version, or are parked until pages are free. The longest stay: they are the tail that a step waits for."""
    for id in s.due.pressed:
        instance = s.fleet.instances.get(id)
        if (
            instance is None  # it was lost later in the batch
            or instance.returning
            or not s.short_of_pages(instance)
            or any(u.state in (fl.PARKING, fl.MOVING) for u in instance.units.values())
        ):
            continue
        running = [u for u in s.fleet.settle(instance) if u.state == fl.RUNNING]
        running.sort(key=lambda u: (u.tokens, -u.id.group_id, -u.id.index))
        missing = 2 * s.config.kv_pressure * instance.pages - instance.free_reported
        aside = []
        for unit in running[: max(0, len(instance.units) - 1)]:
            if missing <= 0:
                break
            missing -= -(-(unit.tokens + int(s.fleet.measured.prompt_tokens)) // instance.page_size)
            other = s.fleet.best(unit.version, unit.tokens)  # never this instance: it is pressed
            if other is not None and _movable(unit):
                _issue_moves(s, [(unit.id, instance.id, other.id)])
            else:
                aside.append(unit)
        _park(s, instance, aside)
    s.due.pressed.clear()


# ---------------------------------------------------------------- weights


def settle_emptied(s: State) -> None:
    """Instances with nothing left to run of their version take the weights meant for them, or else the newest."""
    emptied, s.due.emptied = sorted(s.due.emptied), {}
    for id in emptied:
        instance = s.fleet.instances.get(id)
        if instance is None or instance.returning or instance.phase == fl.LOADING:
            continue
        coming, drop = instance.coming, instance.leaving
        if coming is None:
            # The oldest version it holds that has no sample on it, and none that will come back to it alone
            last = [v for v in instance.versions if v in s.queue.in_environment and len(s.fleet.holders[v]) == 1]
            drop = min((v for v in instance.versions if v not in instance.counts and v not in last), default=None)
            # The oldest version that has samples and no instance, or else the newest if anything will run on it
            without = [v for v in s.queue.unfinished if v not in s.fleet.holders and s.queue.wanting(v)]
            taken = s.ledger.taken
            if without:
                coming = min(without)
            elif taken in s.queue.unfinished or ledger.groups_to_issue(s.ledger, s.config.total_steps) > 0:
                coming = taken
            else:
                continue
        full = len(instance.versions) >= instance.residents
        if coming not in instance.versions and not (full and (drop is None or drop in instance.counts)):
            drop = drop if full else None
            s.fleet.begin_load(instance, coming, drop)
            s.reloads_total += 1
            s.fleet.asked[id] = s.reloads_total, s.now_s
            s.out.append(ev.LoadWeights(instance=id, version=coming, drop=drop, attempt=s.reloads_total))
