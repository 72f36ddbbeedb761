"""Balance: which instance serves which version, which samples move or are put aside. Issues LoadWeights, Move, Park.

`rebalance` runs on triggers only and looks at every instance; the other functions look at one. An instance never
drops weights under running samples: it starts nothing more of the version that is leaving, the samples of that end or
move, and then it loads the one that is coming.
"""

from __future__ import annotations

from dora_jax.orchestrate import admission, migration, partition, speeds
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import fleet as fl
from dora_jax.orchestrate.fleet import Instance, Unit
from dora_jax.orchestrate.state import State
from dora_jax.types import InstanceId, SampleId, Version, is_training

# A mass migration is spread over several rebalances: each planned sample costs a few microseconds of this step.
MOVES_A_STEP = 1024
# A sample whose moves failed this often stays where it is.
MOVE_ATTEMPTS = 3
# A rebalance looks at every instance: so much time lies between two of them for each beyond the first thousand.
REBALANCE_S, FREE_INSTANCES = 1e-4, 1000


def may_rebalance(s: State) -> bool:
    """Ten thousand instances that come up one after the other ask for it ten thousand times."""
    return s.now_s - s.rebalanced_s >= REBALANCE_S * (len(s.fleet.instances) - FREE_INSTANCES)


def rebalance(s: State) -> None:
    s.rebalanced_s = s.now_s
    present = [instance for instance in s.fleet.instances.values() if not instance.returning]
    # lent ones keep the version that they were lent for, where there are others
    instances = [instance for instance in present if instance.id not in s.roles.lent] or present
    if not instances:
        return
    speeds.renew(s.fleet)
    demand = _demand(s)
    changes = _plan(s, instances, demand)
    for instance in instances:
        if instance.phase != fl.LOADING:
            coming, leaving = changes.get(instance.id, (None, None))
            if (coming, leaving) != (instance.coming, instance.leaving):
                s.fleet.turn(instance, fl.STEADY if coming is None else fl.CLEARING, coming, leaving)
            if coming is not None or not instance.used:
                s.due.emptied[instance.id] = None
    if s.decisions.mixes_versions:
        _swap(s)
    for version in sorted(s.fleet.drains):
        _move(s, version)
    if s.roles.lent:
        _spread(s)
    _preempt(s)
    s.wake_all()


def _demand(s: State) -> dict[Version, int]:
    """Requests in flight by version, and those that credit allows at the version meant for them."""
    meant = admission.admission_version(s.decisions, s.ledger)
    if s.decisions.mixes_versions:  # training samples follow the newest weights
        demand = dict(s.queue.untrained_unfinished)
        demand[meant] = demand.get(meant, 0) + s.queue.training_unfinished
    else:
        demand = dict(s.queue.unfinished)
    credit = admission.credit(s.decisions, s.ledger, meant, s.config.total_steps, s.budget)
    demand[meant] = demand.get(meant, 0) + credit * s.config.group_size
    return {version: samples for version, samples in demand.items() if samples}


def _plan(
    s: State, instances: list[Instance], demand: dict[Version, int]
) -> dict[InstanceId, tuple[Version, Version | None]]:
    """{instance: (the version that it is to take, the one that makes room)}: shares in proportion to the requests.

    A version of which every sample waits for its environment keeps an instance, to which they come back, where there are
    enough for all versions."""
    slots, berths = sum(h.slots for h in instances), sum(h.residents for h in instances)
    if len(demand) >= berths:
        demand = {v: n for v, n in demand.items() if n > s.queue.in_environment.get(v, 0)}
    need = {v: -(-min(n, s.queue.wanting(v)) * len(instances) // slots) for v, n in demand.items()}
    # An older version only shrinks: what it has is enough for its samples, and more would soon have to be given back.
    cap = {v: len(s.fleet.holders.get(v, ())) for v in demand if v < s.ledger.base}
    shares = partition.plan_shares(len(instances), _weights(s, demand), need, cap, s.decisions.spread, berths)
    return partition.plan_partition([_seat(h) for h in instances], shares, s.ledger.base)


def _seat(instance: Instance) -> partition.Seat:
    versions = instance.versions
    if instance.phase == fl.LOADING and instance.coming is not None:
        versions = [*versions, instance.coming]
    samples = tuple((v, instance.counts.get(v, 0)) for v in versions)
    speed = partition.speed_class(instance.speed)
    return partition.Seat(instance.id, samples, instance.residents - len(versions), instance.slots * speed, speed)


def _weights(s: State, demand: dict[Version, int]) -> dict[Version, int]:
    """What a version's share of the instances is in proportion to: its samples, and the KV that they read."""
    if not s.decisions.kv_weight:
        return demand
    tokens = dict.fromkeys(demand, 0)
    for instance in s.fleet.instances.values():
        if instance.serving in tokens:
            tokens[instance.serving] += instance.tokens
    of_mean = s.decisions.kv_weight / max(1.0, s.fleet.measured.mean_tokens)
    return {version: samples + round(of_mean * tokens[version]) for version, samples in demand.items()}


# ---------------------------------------------------------------- samples


def _swap(s: State) -> None:
    """Mode `partial`: training samples that run under older weights are put aside, to go on under the newest."""
    for instance in s.fleet.instances.values():
        units = [u for u in s.fleet.settle(instance) if u.version < s.ledger.base and is_training(u.group.id)]
        _park(s, instance, units)


def _preempt(s: State) -> None:
    """The trainer is idle, and an older version has samples but no instance: those of the younger version that is to
    make room are put aside instead of waited for. Older over younger only, so no two versions trade places."""
    if not s.ledger.missing:
        return
    for instance in s.fleet.instances.values():
        coming, leaving = instance.coming, instance.leaving
        if coming is not None and leaving is not None and coming < leaving and coming not in s.fleet.holders:
            _park(s, instance, [u for u in s.fleet.settle(instance) if u.version == leaving])


def _park(s: State, instance: Instance, units: list[Unit]) -> None:
    """Put running samples aside, the longest first: that is the order in which they go on."""
    running = sorted((u for u in units if u.state == fl.RUNNING), key=lambda u: (-u.tokens, u.group.id, u.index))
    if running and not instance.returning:
        for unit in running:
            unit.state = fl.PARKING
        s.out.append(ev.Park(ids=tuple(u.id for u in running), instance=instance.id))


def consolidate(s: State) -> None:
    """Plan moves of a draining version again once as many slots are free as it has instances: a look at each instance costs
    no more than that a slot then."""
    for version in sorted(s.due.drained):
        if version not in s.fleet.drains:
            del s.due.drained[version]
        elif s.due.drained[version] >= len(s.fleet.holders[version]):
            _move(s, version)


def _move(s: State, version: Version) -> None:
    """Empty the instances on which `version` drains, onto those that keep it."""
    s.due.drained.pop(version, None)
    drained, sinks = [], []
    for id in sorted(s.fleet.holders.get(version, ())):
        instance = s.fleet.instances[id]
        if instance.leaving == version:
            drained.append(instance)
        elif version in instance.versions and s.fleet.has_room(instance):
            free_pages = instance.pages - instance.pages_used
            sinks.append(migration.Sink(id, instance.used, instance.slots, free_pages, instance.speed))
    room = min(MOVES_A_STEP, sum(sink.slots - sink.used for sink in sinks))
    sources = []
    for instance in sorted(drained, key=lambda h: (h.counts.get(version, 0), h.id)):
        room -= instance.counts.get(version, 0)
        if room < 0:
            break
        source = _source(s, instance, version)
        if source.movers:
            sources.append(source)
    if sources:
        _issue_moves(s, migration.plan_moves(sources, sinks, MOVES_A_STEP))


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
                free_pages = instance.pages - instance.pages_used
                sinks.append(migration.Sink(instance.id, instance.used, instance.slots, free_pages, instance.speed))
            elif over > 0:
                units = sorted(
                    (u for u in s.fleet.settle(instance) if u.version == version and _movable(u)),
                    key=lambda u: (u.tokens, u.id),
                )
                movers = [
                    migration.Mover(u.id, u.tokens, s.fleet.measured.pages(instance.page_size, u.tokens))
                    for u in units[:over]
                ]
                sources.append(migration.EmptiedInstance(instance.id, movers))
        if sources and sinks:
            _issue_moves(s, migration.plan_moves(sources, sinks, MOVES_A_STEP))


def _source(s: State, instance: Instance, version: Version) -> migration.EmptiedInstance:
    """The samples to take off `instance`: all of the version, or none where that is not possible or not worth it."""
    units = [u for u in s.fleet.settle(instance) if u.version == version]
    if (
        not units
        or instance.returning
        or instance.incoming
        or not all(map(_movable, units))
        or not _worth_moving(s, instance, units)
    ):
        return migration.EmptiedInstance(instance.id, [])
    movers = [migration.Mover(u.id, u.tokens, s.fleet.measured.pages(instance.page_size, u.tokens)) for u in units]
    return migration.EmptiedInstance(instance.id, movers)


def _movable(unit: Unit) -> bool:
    return unit.state == fl.RUNNING and unit.failed_moves < MOVE_ATTEMPTS


def _worth_moving(s: State, instance: Instance, units: list[Unit]) -> bool:
    measured = s.fleet.measured
    return migration.worth_moving(
        [measured.left(u.tokens) for u in units],
        slots=instance.slots,
        token_s=measured.token_s(len(instance.units)) / instance.speed,
        move_s=measured.move_s,
    )


def _issue_moves(s: State, moves: list[tuple[SampleId, InstanceId, InstanceId]]) -> None:
    routes: dict[tuple[InstanceId, InstanceId], list[SampleId]] = {}
    s.attempts += 1
    for id, src, dst in moves:
        s.fleet.reserve_move(s.live_unit(id), s.fleet.instances[dst], s.attempts, s.now_s)
        routes.setdefault((src, dst), []).append(id)
    for (src, dst), ids in routes.items():
        s.out.append(ev.Move(ids=tuple(ids), src=src, dst=dst, attempt=s.attempts))


def relieve_pressed(s: State) -> None:
    for id in s.due.pressed:
        if (instance := s.fleet.instances.get(id)) is not None:  # else it was lost later in the batch
            _relieve(s, instance)
    s.due.pressed.clear()


def _relieve(s: State, instance: Instance) -> None:
    """KV pressure: the youngest samples of an instance that runs out of pages move to another instance of their version,
    or are put aside until pages are free. The longest stay: they are the tail that a step waits for."""
    if (
        instance.returning
        or not s.short_of_pages(instance)
        or any(u.state in (fl.PARKING, fl.MOVING) for u in instance.units.values())
    ):
        return
    running = [u for u in s.fleet.settle(instance) if u.state == fl.RUNNING]
    running.sort(key=lambda u: (u.tokens, -u.group.id, -u.index))
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
            coming, drop = _wanted(s), _idle_resident(s, instance)
            if coming is None:
                continue
        full = len(instance.versions) >= instance.residents
        if coming not in instance.versions and not (full and (drop is None or drop in instance.counts)):
            _load(s, instance, coming, drop if full else None)


def _idle_resident(s: State, instance: Instance) -> Version | None:
    """The oldest version it holds that has no sample on it, and none that will come back to it alone."""
    last = [v for v in instance.versions if v in s.queue.in_environment and len(s.fleet.holders[v]) == 1]
    return min((v for v in instance.versions if v not in instance.counts and v not in last), default=None)


def _wanted(s: State) -> Version | None:
    """What an idle instance should hold: the oldest version that has samples and no instance, or else the newest if anything
    will run on it."""
    without_instance = [v for v in s.queue.unfinished if v not in s.fleet.holders and s.queue.wanting(v)]
    if without_instance:
        return min(without_instance)
    base = s.ledger.base
    return base if base in s.queue.unfinished or admission.groups_to_issue(s.ledger, s.config.total_steps) > 0 else None


def _load(s: State, instance: Instance, version: Version, drop: Version | None) -> None:
    s.fleet.begin_load(instance, version, drop)
    s.reloads_total += 1
    s.out.append(ev.LoadWeights(instance=instance.id, version=version, drop=drop))
