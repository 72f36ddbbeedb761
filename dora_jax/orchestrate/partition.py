"""Partition: which instance serves which version. Values in, values out.

`plan_shares` divides instances among versions in proportion to their requests in flight; `plan_partition` picks the
instances by their capacity, with the fewest reloads. Where there is room for fewer than all versions, the oldest are
served first: their deadline is the nearest, and they can only shrink.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from dora_jax.types import InstanceId, Version


class Seat(NamedTuple):
    """An instance as the partition sees it."""

    id: InstanceId
    samples: tuple[tuple[Version, int], ...]  # of each version that it holds, or that is on its way
    free: int  # versions that it can still take
    capacity: float  # slots by speed
    speed: float = 1.0  # its class


def plan_shares(
    instances: int,
    demand: dict[Version, int],
    need: dict[Version, int],
    cap: dict[Version, int] | None = None,
    spread: str = "remainder",
    berths: int = 0,
) -> dict[Version, int]:
    """Instances for each version with demand. `need`: the least that its unfinished samples fit on; `cap`: the most
    that it has a use for (missing: any number); `berths`: versions that all instances hold together, where some hold
    more than one. A version without a cap is then wanted on every instance, an older one where its samples need it."""
    versions = sorted(v for v, n in demand.items() if n > 0)
    berths = max(berths, instances)
    if berths <= len(versions):
        return {v: int(i < berths) for i, v in enumerate(versions)}
    if not versions:
        return {}
    if berths > instances:
        floors = {v: min(instances, max(1, need.get(v, 0))) for v in versions}
        everywhere = {v: instances for v in versions if v not in (cap or {})}
        return _fit(floors | everywhere, floors, berths, spare_to_newest=False)
    total = sum(demand[v] for v in versions)
    if spread == "round":
        shares = {v: max(1, _half_up(instances * demand[v], total)) for v in versions}
    else:
        shares = _largest_remainder(instances, {v: demand[v] for v in versions}, total)
    floors = {v: max(1, need.get(v, 0)) for v in versions}
    shares = {v: max(shares[v], floors[v]) for v in versions}
    return _capped(_fit(shares, floors, instances), floors, cap or {})


def _half_up(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def _largest_remainder(instances: int, demand: dict[Version, int], total: int) -> dict[Version, int]:
    shares = {v: instances * n // total for v, n in demand.items()}
    by_remainder = sorted(demand, key=lambda v: (-(instances * demand[v] % total), v))
    for version in by_remainder[: instances - sum(shares.values())]:
        shares[version] += 1
    return shares


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


def _capped(shares: dict[Version, int], floors: dict[Version, int], cap: dict[Version, int]) -> dict[Version, int]:
    """What a version has no use for goes to the newest that has no cap, or to nobody."""
    capped = {v: min(n, max(cap.get(v, n), floors[v])) for v, n in shares.items()}
    uncapped = [v for v in shares if v not in cap]
    if uncapped:
        capped[max(uncapped)] += sum(shares.values()) - sum(capped.values())
    return capped


def plan_partition(
    seats: list[Seat], shares: dict[Version, int], newest: Version
) -> dict[InstanceId, tuple[Version, Version | None]]:
    """{instance: (version to load, version that makes room or None)} for the instances that are to change.

    A share is so many instances of mean capacity. A version with more than its share keeps those with the most samples;
    one older than the newest is at its tail and keeps the fast ones, if they are. What it gives up goes to the versions
    short of capacity, oldest first. An instance that nobody asks for stays as it is.
    """
    mean = sum(seat.capacity for seat in seats) / len(seats)
    missing = {version: share * mean for version, share in shares.items()}
    spare = [_Candidate(0, 0, seat, None) for seat in seats if seat.free > 0]
    kept: list[_Candidate] = []
    for version in sorted({v for seat in seats for v, _ in seat.samples}):
        instances = sorted((seat for seat in seats if version in dict(seat.samples)), key=_kept_first(version, newest))
        for i, seat in enumerate(instances):
            place = _Candidate(1, dict(seat.samples)[version], seat, version)
            if missing.get(version, 0.0) > (seat.capacity / 2 if i else 0.0):
                missing[version] -= seat.capacity
                kept.append(place)
            else:
                spare.append(place)
    spare.sort(key=lambda p: (p.taken, p.samples, p.seat.id, -1 if p.leaving is None else p.leaving))
    changes: dict[InstanceId, tuple[Version, Version | None]] = {}
    for version in sorted(shares):
        holders = sum(version in dict(seat.samples) for seat in seats)
        for place in spare:
            grows = (
                not holders or version >= newest or holders < shares[version]
            )  # an older one by heads: it only shrinks
            enough = place.seat.capacity / 2 if holders else 0.0
            if grows and missing[version] > enough and _may_load(version, place, changes):
                changes[place.seat.id] = (version, place.leaving)
                missing[version] -= place.seat.capacity
                holders += 1
        if not holders and shares[version]:  # none is spare: a younger version gives one up
            younger = [
                p for p in kept if p.leaving is not None and p.leaving > version and _may_load(version, p, changes)
            ]
            for place in sorted(younger, key=lambda p: (-(p.leaving or 0), p.samples, p.seat.id))[:1]:
                changes[place.seat.id] = (version, place.leaving)
    return changes


class _Candidate(NamedTuple):
    """Where a version may be loaded."""

    taken: int  # 0: beside what the instance holds
    samples: int
    seat: Seat
    leaving: Version | None


def _may_load(version: Version, place: _Candidate, changes: dict) -> bool:
    return place.seat.id not in changes and version not in dict(place.seat.samples)


def _kept_first(version: Version, newest: Version) -> Callable[[Seat], tuple]:
    if version < newest:
        return lambda seat: (-seat.speed, -dict(seat.samples)[version], seat.id)
    return lambda seat: (-dict(seat.samples)[version], seat.id)


def speed_class(speed: float) -> float:
    """The nearest of 1, 1.41, 2, ... and 0.71, 0.5, ...: for less of a difference moves cost more than they gain."""
    return 2 ** (round(2 * math.log2(speed)) / 2)
