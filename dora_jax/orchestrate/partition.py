"""Partition: which instance serves which version. Values in, values out.

`plan_shares` divides instances among versions in proportion to their requests in flight; `plan_partition` picks the
instances, with the fewest reloads. Where there are fewer instances than versions, the oldest are served first: their
deadline is the nearest, and they can only shrink.
"""

from __future__ import annotations

from typing import NamedTuple

from dora_jax.types import InstanceId, Version


class Seat(NamedTuple):
    """An instance as the partition sees it."""

    id: InstanceId
    version: Version | None  # that it serves, loads, or made room for
    samples: int
    slots: int


def plan_shares(
    instances: int,
    demand: dict[Version, int],
    need: dict[Version, int],
    cap: dict[Version, int] | None = None,
    spread: str = "remainder",
) -> dict[Version, int]:
    """Instances for each version with demand. `need`: the least that its unfinished samples fit on; `cap`: the most
    that it has a use for (missing: any number)."""
    versions = sorted(v for v, n in demand.items() if n > 0)
    if instances <= len(versions):
        return {v: int(i < instances) for i, v in enumerate(versions)}
    if not versions:
        return {}
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


def _fit(shares: dict[Version, int], floors: dict[Version, int], instances: int) -> dict[Version, int]:
    """Make the sum equal `instances`: spare ones go to the newest, missing ones come from the newest above its floor,
    then from the newest above one."""
    newest_first = sorted(shares, reverse=True)
    excess = sum(shares.values()) - instances
    for least in (floors, dict.fromkeys(shares, 1)):
        for version in newest_first:
            give = min(max(0, excess), shares[version] - least[version])
            shares[version] -= max(0, give)
            excess -= max(0, give)
    shares[newest_first[0]] += max(0, -excess)
    return shares


def _capped(shares: dict[Version, int], floors: dict[Version, int], cap: dict[Version, int]) -> dict[Version, int]:
    """What a version has no use for goes to the newest that has no cap, or to nobody."""
    capped = {v: min(n, max(cap.get(v, n), floors[v])) for v, n in shares.items()}
    uncapped = [v for v in shares if v not in cap]
    if uncapped:
        capped[max(uncapped)] += sum(shares.values()) - sum(capped.values())
    return capped


def plan_partition(seats: list[Seat], shares: dict[Version, int]) -> dict[InstanceId, Version]:
    """{instance: version} for the instances that are to change.

    A version with more hosts than its share keeps those with the most samples; what it gives up goes to the versions
    short of hosts, oldest first. An instance that nobody asks for stays as it is.
    """
    hosts: dict[Version | None, list[Seat]] = {}
    for seat in sorted(seats, key=lambda s: (-s.samples, s.id)):
        hosts.setdefault(seat.version, []).append(seat)
    spare: list[Seat] = []
    for version, owned in hosts.items():
        spare += owned[shares.get(version, 0) :] if version is not None else owned
    spare.sort(key=lambda s: (s.samples, s.id), reverse=True)
    changes: dict[InstanceId, Version] = {}
    for version in sorted(shares):
        for _ in range(shares[version] - len(hosts.get(version, ()))):
            if not spare:
                return changes
            changes[spare.pop().id] = version
    return changes


class Berth(NamedTuple):
    """An instance that can hold several versions, as the partition sees it."""

    id: InstanceId
    samples: tuple[tuple[Version, int], ...]  # of each version it holds
    free: int  # versions it can still take
    slots: int


def plan_berths(
    berths: list[Berth], demand: dict[Version, int], newest: Version, loading: set[Version]
) -> dict[InstanceId, tuple[Version, Version | None]]:
    """{instance: (version to load, version that makes room or None)}.

    A version with samples and no instance comes first, oldest first, where it disturbs least. Then every instance
    takes the newest, if that is asked for: beside the others while there is room, else in place of its oldest, unless
    the samples of that one need this instance among the fewest that hold them.
    """
    changes: dict[InstanceId, tuple[Version, Version | None]] = {}
    held = {v for b in berths for v, _ in b.samples} | loading
    for version in sorted(v for v in demand if v not in held):
        open_berths = [b for b in berths if b.id not in changes]
        if open_berths:
            berth = min(open_berths, key=lambda b: (-b.free, min((n, v) for v, n in b.samples or ((0, 0),)), b.id))
            changes[berth.id] = (version, _makes_room(berth))
    if newest in demand:
        keepers = _keepers(berths)
        for berth in berths:
            if berth.id not in changes and newest not in dict(berth.samples):
                drop = None if berth.free else min(v for v, _ in berth.samples)
                if drop is None or berth.id not in keepers.get(drop, ()):
                    changes[berth.id] = (newest, drop)
    return changes


def _makes_room(berth: Berth) -> Version | None:
    return None if berth.free else min((n, v) for v, n in berth.samples)[1]


def _keepers(berths: list[Berth]) -> dict[Version, set[InstanceId]]:
    """For each version the fewest instances that its samples fit on: those that hold the most of it."""
    holders: dict[Version, list[tuple[int, InstanceId, int]]] = {}
    for berth in berths:
        for version, samples in berth.samples:
            if samples:
                holders.setdefault(version, []).append((-samples, berth.id, berth.slots))
    keepers = {}
    for version, rows in holders.items():
        left = -sum(row[0] for row in rows)
        keepers[version] = set()
        for _, id, slots in sorted(rows):
            if left > 0:
                keepers[version].add(id)
                left -= slots
    return keepers
