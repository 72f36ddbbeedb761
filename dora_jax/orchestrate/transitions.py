"""Whether a fact counts: before anything changes, and the same while a run works and when its journal is replayed.

`counts(state, event)` is True for a fact that answers what the orchestrator has asked for; False for one that is late
or repeated (of an earlier incarnation of its instance, of an earlier attempt to place or to move, of a sample or a
group that has ended):
it is dropped. A fact that no order of delivery can explain raises ImpossibleFact.

Commits: what each event that counts (`counts`) changes in the state. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import fleet, quarantine, state
from dora_jax.orchestrate import fleet as fl
from dora_jax.orchestrate.fleet import Instance, Unit
from dora_jax.orchestrate.state import RATE_GROUPS, State
from dora_jax.types import is_eval, is_served, is_training


def counts(s: State, event: ev.Event) -> bool:
    counts, _ = FACTS[type(event)]
    return counts(s, event)


def _instance_counts(s: State, event: ev.InstanceFact) -> bool:
    """What an instance reports of itself counts where it is of the present incarnation."""
    instance = s.fleet.instances.get(event.instance)
    present = instance is not None and instance.incarnation == event.incarnation
    match event:
        case ev.InstanceReported():
            if not len(event.groups) == len(event.indices) == len(event.tokens):
                raise ev.ImpossibleFact(
                    f"instance {event.instance} reports columns of {len(event.groups)}, {len(event.indices)} and "
                    f"{len(event.tokens)} rows"
                )
        case ev.WeightsLoaded():
            if event.version > s.ledger.base:
                raise ev.ImpossibleFact(
                    f"instance {event.instance} loaded version {event.version}, which is not published"
                )
            if present and instance is not None:
                asked, _ = s.fleet.asked.get(event.instance, (None, 0.0))
                answers = event.attempt == asked or None in (event.attempt, asked)
                return instance.phase == fl.LOADING and instance.coming == event.version and answers
        case ev.InstanceUp():
            if event.incarnation <= s.fleet.incarnations.get(event.instance, -1):
                return False
            if event.instance in s.roles.lendable and s.roles.lent.get(event.instance) != state.ASKED:
                raise ev.ImpossibleFact(f"instance {event.instance} came up, but the trainer's chips were not lent")
            return True
        case ev.InstanceDown():
            return present or event.incarnation > s.fleet.incarnations.get(event.instance, -1)
        case ev.InstanceUnhealthy():  # of an incarnation that has come up, over or not, which is believed so far
            latest, suspect = s.fleet.incarnations.get(event.instance, -1), s.fleet.unhealthy.get(event.instance, -1)
            return suspect < event.incarnation <= latest
    return present


# What the instance that has a sample reports, and the states of the sample in which it may.
_REPORTED_IN: dict[type, tuple[str, ...]] = {
    ev.SampleStarted: (fl.STARTING,),
    ev.SampleDone: (fl.STARTING, fl.RUNNING, fl.MOVING, fl.PARKING, fl.RESUMING, fl.CANCELLING),
    ev.SampleParked: (fl.PARKING,),
    ev.SampleResumed: (fl.RESUMING,),
    ev.SampleWaiting: (fl.RUNNING, fl.MOVING, fl.PARKING),
}


def _attempt_counts(s: State, event: ev.AttemptFact) -> bool:
    """What the instance that has the sample reports counts where it is of what placed the sample there. An end needs
    no attempt: no sample has two."""
    group = s.groups.get(event.id.group_id)
    unit = None if group is None else group.units[event.id.index]
    if unit is None or unit.instance != event.instance:
        return False
    if unit.instance is None:  # a sample that waits has no instance that reports its end, and may be given up meanwhile
        return unit.state in (fl.WAITING, fl.CANCELLING)
    if unit.state not in _REPORTED_IN[type(event)]:
        return False
    if not isinstance(event, ev.SampleDone) and event.attempt not in (None, unit.placed):
        return False
    instance = s.fleet.instances.get(unit.instance)
    if instance is None or instance.incarnation != event.incarnation:
        return False
    if isinstance(event, ev.SampleStarted) and unit.version != event.version:
        raise ev.ImpossibleFact(f"sample {tuple(event.id)} started at version {event.version}, not {unit.version}")
    return True


def _answer_counts(s: State, event: ev.AnswerFact) -> bool:
    unit = s.unit(event.id)
    match event:
        case ev.SampleCancelled():
            if unit is not None and unit.state != fl.CANCELLING:
                raise ev.ImpossibleFact(f"sample {tuple(event.id)} was cancelled without a command: {event.reason}")
            return unit is not None
        case ev.SampleMoved() | ev.MoveFailed():
            return unit is not None and unit.state == fl.MOVING and unit.attempt == event.attempt
        case ev.SampleReady():
            if unit is None or unit.state != fl.WAITING or event.attempt not in (None, unit.placed):
                return False
            # It only grows: where no wait is named, fewer tokens than the sample waits with answer an earlier one
            return event.tokens >= unit.tokens or not event.tokens


def _progress_counts(s: State, event: ev.ProgressFact) -> bool:
    ledger = s.ledger
    match event:
        case ev.GroupScored():
            group = s.groups.get(event.group_id)
            if group is not None and group.left:
                if group.begins_again:
                    return False
                raise ev.ImpossibleFact(
                    f"group {event.group_id} is scored, but {group.left} of its samples have not ended"
                )
            return group is not None
        case ev.GroupFailed():
            group = s.groups.get(event.group_id)
            return group is not None and not (group.abandoned is not None and group.left)
        case ev.RequestCame():
            if not is_served(event.group_id) or event.version > ledger.base:
                raise ev.ImpossibleFact(f"a request came as group {event.group_id}, for version {event.version}")
            return event.group_id not in s.groups and (event.attempt is None or event.attempt > s.requests)
        case ev.StepPublished():
            if event.version > ledger.base and (ledger.missing or event.version != ledger.base + 1):
                raise ev.ImpossibleFact(
                    f"version {event.version} is published, but the trainer has {len(ledger.batch)} of "
                    f"{ledger.groups_per_step} groups of base {ledger.base}"
                )
            return event.version > ledger.base
        case ev.PartTrained():
            if event.base_version == ledger.base and event.groups > len(ledger.batch):
                raise ev.ImpossibleFact(
                    f"{event.groups} groups of base {event.base_version} are trained, but the trainer has "
                    f"{len(ledger.batch)}"
                )
            return event.base_version == ledger.base and event.groups > s.roles.trained
        case ev.TimePassed():
            return event.now_s >= s.now_s


# ---------------------------------------------------------------- instances


def instance_up(s: State, event: ev.InstanceUp) -> None:
    """Take in an instance. The end of its earlier incarnation may still arrive, and is then dropped as late."""
    if event.instance in s.fleet.instances:
        lost(s, s.fleet.instances[event.instance])
    s.fleet.incarnations[event.instance] = event.incarnation
    problem = s.config.instance_problem(event.pages, event.page_size, event.slots)
    if problem:
        s.halt(False, f"instance {event.instance} cannot serve this run: {problem}")
        return
    instance = Instance(
        event.instance, event.incarnation, event.slots, event.pages, event.page_size, event.residents, event.speed
    )
    s.fleet.add(instance, event.versions)
    roles = s.roles
    if roles.lent.get(instance.id) == state.ASKED:
        roles.lent[instance.id] = state.LENT
        roles.out_s += (s.now_s - roles.asked_s.pop(instance.id) - roles.out_s) / 4
    if s.paused:
        s.out.append(ev.Pause(instance=instance.id))
    s.due.emptied[instance.id] = None
    s.due.rebalance = True
    s.due.versions_to_fill.update(dict.fromkeys(event.versions))


def instance_down(s: State, event: ev.InstanceDown) -> None:
    s.fleet.incarnations[event.instance] = event.incarnation
    instance = s.fleet.instances.get(event.instance)
    if instance is not None:
        lost(s, instance)
    s.roles.came_home(event.instance, s.now_s)


def lost(s: State, instance: Instance) -> None:
    s.fleet.remove(instance)
    s.roles.came_home(instance.id, s.now_s)
    unstarted = []
    for unit in s.fleet.settle(instance):
        unit.instance = None
        if unit.state == fl.STARTING:
            unstarted.append(unit)
        elif unit.state == fl.CANCELLING:
            s.out.append(ev.Cancel(ids=(unit.id,), instance=None, reason="its instance is lost"))
        elif unit.state != fl.MOVING:  # a move is answered even so
            s.recorded(unit)
    s.queue.put_back(unstarted)
    s.due.versions_to_fill.update(dict.fromkeys(unit.version for unit in instance.units.values()))
    s.due.rebalance = True


def instance_unhealthy(s: State, event: ev.InstanceUnhealthy) -> None:
    """Accepted of an incarnation that has ended, too: only what it has left is in quarantine then."""
    quarantine.name(s, event)
    s.fleet.unhealthy[event.instance] = event.incarnation
    instance = s.fleet.instances.get(event.instance)
    if instance is not None and instance.incarnation == event.incarnation:
        lost(s, instance)
    quarantine.begin_again(s, event, f"instance {event.instance} is in quarantine: {event.reason}")


def weights_loaded(s: State, event: ev.WeightsLoaded) -> None:
    instance = s.fleet.instances[event.instance]
    _, asked_s = s.fleet.asked.pop(event.instance, (0, s.now_s))
    s.fleet.measured.loaded(s.now_s - asked_s)
    s.fleet.end_load(instance)
    s.due.versions_to_fill[event.version] = None
    s.due.emptied[instance.id] = None


def instance_reported(s: State, event: ev.InstanceReported) -> None:
    instance = s.fleet.instances[event.instance]
    instance.reports += 1
    if event.tokens:
        s.fleet.reported(instance, event)
    if event.sampled or event.drafted is not None:
        fleet.observe_ticks(s.fleet, instance, event)
    instance.free_reported = event.free
    if s.short_of_pages(instance) and instance.units:
        instance.pressed = True
        s.due.pressed[instance.id] = None
    elif instance.pressed and not s.short_of_pages(instance, times=2):
        instance.pressed = False
        s.fleet.offer(instance)
        s.wake_all()


def time_passed(s: State, event: ev.TimePassed) -> None:
    s.now_s = event.now_s
    if event.now_s - s.rebalanced_s >= s.config.rebalance_period_s:
        s.due.rebalance = True


# ---------------------------------------------------------------- samples


def sample_runs(s: State, event: ev.SampleStarted | ev.SampleResumed) -> None:
    """Modes `partial` and `staleflow`: what begins to run under weights that were replaced meanwhile is parked at
    once."""
    unit = s.live_unit(event.id)
    trained = is_training(unit.group.id)
    if isinstance(event, ev.SampleStarted):
        unit.started = True
        unit.began_s, unit.ran = s.now_s, s.fleet.alone[event.instance]
        if trained:
            s.ledger.running(unit.group.id)
    unit.state = fl.RUNNING
    _ran(s, unit)
    if unit.restarts or (s.decisions.mixes_versions and unit.version < s.ledger.base and trained):
        quarantine.set_aside(s, unit)


def sample_done(s: State, event: ev.SampleDone) -> None:
    unit = s.live_unit(event.id)
    if unit.state == fl.WAITING:
        unit.began_s += s.now_s - unit.waits_s
    group = unit.group
    if not is_served(group.id):  # how long answers to requests are says nothing of the task's
        s.fleet.measured.ended(event.tokens, s.now_s - unit.began_s)
    s.end_unit(unit)
    if unit.ran != group.ran:
        more = tuple(i for i in unit.ran if i not in group.ran)
        group.ran = group.ran + more if group.ran else unit.ran
    if unit.restarts:
        quarantine.give_up(s, group, "an instance that sampled a part of it is in quarantine")
    elif group.left == 0 and group.abandoned is None:
        if is_training(group.id):
            s.ledger.scoring(group.id)
        elif is_served(group.id):
            del s.groups[group.id]


def sample_cancelled(s: State, event: ev.SampleCancelled) -> None:
    s.end_unit(s.live_unit(event.id))


def sample_moved(s: State, event: ev.SampleMoved | ev.MoveFailed) -> None:
    """It goes on at the end of the move that has it, if that is there."""
    unit = s.live_unit(event.id)
    dst = s.fleet.end_move(unit)
    if isinstance(event, ev.MoveFailed):
        unit.failed_moves += 1
        s.freed(dst, unit.version)
        unit.state = fl.RUNNING
    else:
        s.freed(s.fleet.release(unit), unit.version)
        s.fleet.measured.moved(s.now_s - unit.moved_s)
        s.moves_total += 1
        if dst is not None:
            s.fleet.reserve(unit, dst, fl.RUNNING, event.attempt)
            s.fleet.offer(dst)
    if unit.instance is None or unit.group.abandoned is not None:
        s.recorded(unit)
    elif unit.restarts:
        quarantine.set_aside(s, unit)
    else:
        _ran(s, unit)


def sample_left(s: State, event: ev.SampleParked | ev.SampleWaiting) -> None:
    """Its slot: its tokens are recorded."""
    unit = s.live_unit(event.id)
    s.freed(s.fleet.release(unit), unit.version)
    if isinstance(event, ev.SampleWaiting):
        unit.tokens, unit.waits_s = event.tokens, s.now_s
        unit.home = event.instance if event.kept else None
        if unit.group.abandoned is None and not unit.restarts:
            unit.state = fl.WAITING
            fl.add(s.queue.in_environment, unit.version, 1)
            return
    s.recorded(unit)


def sample_ready(s: State, event: ev.SampleReady) -> None:
    unit = s.live_unit(event.id)
    unit.tokens = event.tokens
    unit.began_s += s.now_s - unit.waits_s
    s.queue.end_wait(unit, fl.PARKED)
    s.recorded(unit)


def _ran(s: State, unit: Unit) -> None:
    """The incarnation that has the sample samples tokens of it from now on."""
    assert unit.instance is not None
    here = s.fleet.alone[unit.instance]
    if here[0] not in unit.ran:
        unit.ran += here


# ---------------------------------------------------------------- groups and steps


def request_came(s: State, event: ev.RequestCame) -> None:
    s.requests = event.attempt or s.requests
    if event.version not in s.alive:
        s.discard(event.group_id, f"version {event.version} has retired")
        return
    s.asked_s[event.version] = s.now_s
    s.open_group(event.group_id, event.version)
    if event.version not in s.fleet.holders and event.version not in s.fleet.promised:
        s.due.rebalance = True


def group_scored(s: State, event: ev.GroupScored) -> None:
    group = s.groups.pop(event.group_id)
    if is_eval(group.id):
        s.evaluated(group.version)
    else:
        s.ledger.scored(group.id, event.trainable)
        if event.trainable:
            s.sampled_by[group.id] = group.ran
        if s.config.task_adaptive:  # the tasks' shares of the load follow
            task = s.config.task(group.id)
            s.task_rates[task] += (event.trainable - s.task_rates[task]) / RATE_GROUPS
            s.task_limits = s.config.adapted_limits(s.task_rates)
        if not event.trainable:
            s.group_lost(group.id)
            limit = s.config.max_filtered_rounds * s.config.groups_per_step
            if s.ledger.filtered_in_a_row >= limit:
                s.halt(
                    False,
                    f"{limit} groups in a row were filtered out: the task gives this policy no signal to learn from",
                )


def group_failed(s: State, event: ev.GroupFailed) -> None:
    group = s.groups[event.group_id]
    if is_eval(group.id):
        s.evaluated(group.version)
    elif is_training(group.id) and group.abandoned is None:
        s.ledger.failed(group.id)
        s.group_lost(group.id)
    if group.left == 0:
        s.discard(group.id, event.reason)
    else:
        s.abandon(group, "failed", event.reason)


def part_trained(s: State, event: ev.PartTrained) -> None:
    s.roles.trained = event.groups


def step_published(s: State, event: ev.StepPublished) -> None:
    quarantine.remember(s, event.version)
    s.ledger.published(event.version, s.strides.adapt(s.config, s.ledger, s.fleet, s.now_s))
    s.superseded_s[event.version - 1] = s.now_s
    s.alive[event.version] = None
    s.due.rebalance = True


# Of each fact: whether it counts, and what it changes.
FACTS: dict[type, tuple[Callable[..., bool], Callable[..., None]]] = {
    ev.InstanceUp: (_instance_counts, instance_up),
    ev.InstanceDown: (_instance_counts, instance_down),
    ev.InstanceUnhealthy: (_instance_counts, instance_unhealthy),
    ev.WeightsLoaded: (_instance_counts, weights_loaded),
    ev.InstanceReported: (_instance_counts, instance_reported),
    ev.TimePassed: (_progress_counts, time_passed),
    ev.SampleStarted: (_attempt_counts, sample_runs),
    ev.SampleDone: (_attempt_counts, sample_done),
    ev.SampleCancelled: (_answer_counts, sample_cancelled),
    ev.SampleMoved: (_answer_counts, sample_moved),
    ev.MoveFailed: (_answer_counts, sample_moved),
    ev.SampleParked: (_attempt_counts, sample_left),
    ev.SampleResumed: (_attempt_counts, sample_runs),
    ev.SampleWaiting: (_attempt_counts, sample_left),
    ev.SampleReady: (_answer_counts, sample_ready),
    ev.GroupScored: (_progress_counts, group_scored),
    ev.GroupFailed: (_progress_counts, group_failed),
    ev.RequestCame: (_progress_counts, request_came),
    ev.StepPublished: (_progress_counts, step_published),
    ev.PartTrained: (_progress_counts, part_trained),
}
# After these a batch may be taken that could not be before; after these no version and no run can be over.
CHANGES_READY = {ev.GroupScored, ev.GroupFailed, ev.StepPublished, ev.InstanceUp, ev.InstanceDown, ev.InstanceUnhealthy}
FREES_TRAINER = {ev.PartTrained, ev.StepPublished}
ENDS_NOTHING = {ev.InstanceReported, ev.SampleStarted, ev.SampleWaiting, ev.SampleReady}
