"""The orchestrator's whole state as JSON and back: snapshot + later events = all events.

Every attribute is written that does not follow from the configuration or from the others (`CONFIGURED` and `DERIVED` of
its class), the order of every queue and heap included: whatever a decision reads needs no line here. Of JSON, an object
is one with attributes, and a list is a container, whose kind comes first.

`restart`: what a new process owes an orchestrator that has outlived the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.fleet import CANCELLING, MOVING, PARKED, PENDING, STARTING, WAITING, Group, Instance, Unit
from dora_jax.orchestrate.measured import DraftGain, Line
from dora_jax.orchestrate.state import PLACEMENTS, State
from dora_jax.orchestrate.stride import Strides
from dora_jax.types import EARLIER, GroupId, Incarnation, SampleId, Version, is_served

FORMAT = 17
OLDEST = 6  # the first format that `_upgraded` knows
FORMER = {"incarnation": "life", "restarts": "spoilt"}  # a row keeps the order of its first names
UNIT = tuple(sorted(set(Unit.__slots__) - {"dst", "group", "id"}, key=lambda name: FORMER.get(name, name)))
INSTANCE = tuple(sorted(set(Instance.__slots__) - {"report", "units"}, key=lambda name: FORMER.get(name, name)))
SINCE_ATTEMPTS = {"placed", "started"}  # fields of a sample that format 15 added
SINCE_QUARANTINE = {"ran", "restarts"} | SINCE_ATTEMPTS
unit_values, instance_values = attrgetter(*UNIT), attrgetter(*INSTANCE)


def save(s: State) -> dict[str, Any]:
    for instance in s.fleet.instances.values():
        s.fleet.settle(instance)
    groups = []
    for group in s.groups.values():
        head = (group.id, group.version, len(group.units), group.left, group.abandoned, group.ran, group.begins_again)
        units = []
        for unit in filter(None, group.units):
            dst = None if unit.dst is None else [unit.dst.id, unit.dst.incarnation]
            units.append([dst, unit_values(unit), unit.id.index])
        groups.append([*head, units])
    return {
        "format": FORMAT,
        "mode": s.config.mode,
        "tasks": list(s.config.task_cycle),
        "instances": [
            [[_encode(value) for value in instance_values(instance)], list(instance.units)]
            for instance in s.fleet.instances.values()
        ],
        "groups": groups,
        **_encode(s),
    }


def load(s: State, data: dict[str, Any]) -> None:
    """Fill a fresh state of the same mode and tasks with what `save` wrote."""
    data = _upgraded(s, data)
    if (data["format"], data["mode"], data["tasks"]) != (FORMAT, s.config.mode, list(s.config.task_cycle)):
        found = f"format {data['format']}, mode {data['mode']} and tasks {data['tasks']}"
        raise ValueError(f"the snapshot is of {found}: this run cannot go on from it")
    for values, _ in data["instances"]:
        instance = Instance(0, 0, 1, 0, 1, 1, 1.0)
        for name, value in zip(INSTANCE, values, strict=True):
            setattr(instance, name, _decode(s, value))
        s.fleet.instances[instance.id] = instance
    s.fleet.alone = {id: ((id, instance.incarnation),) for id, instance in s.fleet.instances.items()}
    for id, version, samples, left, abandoned, ran, begins_again, rows in data["groups"]:
        group = s.groups[id] = Group(id, version, samples)
        group.left, group.abandoned, group.begins_again = left, abandoned, begins_again
        group.ran = tuple((instance, incarnation) for instance, incarnation in ran)
        units, group.units = group.units, [None] * samples
        for dst, values, index in rows:
            unit = group.units[index] = units[index]
            for name, value in zip(UNIT, values, strict=True):
                setattr(unit, name, value)
            unit.ran = tuple((instance, incarnation) for instance, incarnation in unit.ran)
            if dst is not None:
                # The instance of a move under way. An incarnation that ended before the snapshot is gone for good: an
                # instance that is not in the fleet stands for it
                there = s.fleet.instances.get(dst[0])
                present = there is not None and there.incarnation == dst[1]
                unit.dst = there if present else Instance(dst[0], dst[1], 1, 0, 1, 1, 1.0)
    for instance, (_, ids) in zip(s.fleet.instances.values(), data["instances"], strict=True):
        instance.units = {unit.id: unit for unit in (s.groups[g].units[i] for g, i in ids)}
    _fill(s, s, data)
    if s.config.task_adaptive:
        s.task_limits = s.config.adapted_limits(s.task_rates)


LOST = "the job was killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outstanding:
    """What an orchestrator waits for. A new process takes these on before its first event, then sends InstanceUp."""

    train: ev.Train | None  # a batch that was taken and not published
    score: tuple[GroupId, ...]  # whole groups without rewards
    cancel: ev.Cancel | None  # samples that must not go on, to be answered one by one
    groups: tuple[GroupId, ...]  # admitted and not scored; no requests, whose prompts nobody knows any more
    recorded: dict[SampleId, Version]  # started and not ended: a Resume will ask for their tokens
    waiting: dict[SampleId, Version]  # for their environments, which are asked again: they owe SampleReady, or an end
    versions: tuple[Version, ...]  # whose weights are needed, oldest first


def restart(s: State, step: Callable[[ev.Event], object]) -> Outstanding:
    """Takes every instance away, then lists the work that was promised and is nowhere now. The commands that this
    causes are in the list, or void. Laws: samples that had started go on at their own version; nothing that ended is
    asked for.

    step: of the orchestrator of this state. A run that had halted looks again: it goes on where more steps are asked
    for now, else it halts once more."""

    def commit(event: ev.Event) -> None:
        s.halted = False  # a halted orchestrator takes no facts
        step(event)

    for group_id in [g for g in s.groups if is_served(g)]:  # no client waits any more
        commit(ev.GroupFailed(group_id=group_id, reason=LOST))
    s.asked_s.clear()
    s.requests = 0
    for instance in list(s.fleet.instances.values()):
        commit(ev.InstanceDown(instance=instance.id, incarnation=instance.incarnation, reason=LOST))
    s.fleet.incarnations.clear()  # the next process counts anew
    s.fleet.unhealthy.clear()
    # What has sampled so far is of an earlier process: a new incarnation of the same number is another one

    def earlier(ran: tuple[Incarnation, ...]) -> tuple[Incarnation, ...]:
        return tuple(dict.fromkeys((instance, EARLIER) for instance, _ in ran))

    for group in s.groups.values():
        group.ran = earlier(group.ran)
    for unit in s.units():
        unit.ran = earlier(unit.ran)
    for groups in (s.sampled_by, *s.trained_by.values()):
        groups.update({group_id: earlier(ran) for group_id, ran in groups.items()})
    for unit, dst in [(u, u.dst) for u in s.units() if u.state == MOVING and u.dst is not None]:
        failed = ev.MoveFailed(id=unit.id, src=_NOWHERE, dst=dst.id, attempt=unit.attempt, reason=LOST)
        commit(failed)
    s.roles.restart()
    for unit in (u for u in s.units() if u.state == WAITING):
        unit.tokens = 0  # whatever is left of it may go on
        unit.placed = 0  # the wait that the next process answers
    s.halted = False
    s.due.rebalance = True
    s.wake_all()
    ledger = s.ledger
    units = list(s.units())
    abandoned = tuple(u.id for u in units if u.state == CANCELLING)
    return Outstanding(
        train=ev.Train(group_ids=ledger.batch, base_version=ledger.base) if ledger.batch else None,
        score=tuple(group.id for group in s.groups.values() if not group.left),
        cancel=ev.Cancel(ids=abandoned, instance=None, reason=LOST) if abandoned else None,
        groups=tuple(group_id for group_id in s.groups if not is_served(group_id)),
        recorded={u.id: u.version for u in units if u.state == PARKED},
        waiting={u.id: u.version for u in units if u.state == WAITING},
        versions=tuple(sorted(s.alive)),
    )


_NOWHERE = -1  # the source of a failed move is not looked at


def _upgraded(s: State, data: dict[str, Any]) -> dict[str, Any]:
    """What an older format wrote, as FORMAT has it; as it is, where that format is unknown."""
    data = dict(data)
    if "hosts" in data:  # what formats 6 and 7 called instances
        data["instances"] = data.pop("hosts")
    if data["format"] == 6:  # nothing was known of prompts, and the fleet kept what it had measured
        fleet = dict(data["fleet"])
        kept = {name: fleet.pop(name) for name in ("lengths", "finished_tokens", "finished_s", "move_s")}
        kept["new_tokens"], _ = fleet.pop("likely_tokens"), fleet.pop("fresh_pages")
        data |= {"format": 7, "fleet": fleet | {"measured": _encode(s.fleet.measured) | kept}}
    if data["format"] == 7:  # no speed was measured
        measured = data["fleet"]["measured"] | {"line": _encode(Line())}
        data |= {
            "format": 8,
            "instances": [
                [_fitted(INSTANCE, values, {"pace": 0.0, "paced_steps": 0.0}, {"returning"}), ids]
                for values, ids in data["instances"]
            ],
            "fleet": data["fleet"] | {"measured": measured},
        }
    if data["format"] == 8:  # no sample waited for an environment
        data |= {"format": 9, "groups": _with(data["groups"], {"home": None, "waits_s": 0.0}, SINCE_QUARANTINE)}
        data["queue"] = data["queue"] | {"in_environment": _encode({})}
    if data["format"] == 9:  # no instance was ever in quarantine, and nobody asked which ones had sampled what
        groups = _with(data["groups"], {"ran": (), "restarts": False}, SINCE_ATTEMPTS)
        data |= {"format": 10, "groups": [[*group, [], False, units] for *group, units in groups]}
        data |= {"sampled_by": _encode({}), "trained_by": _encode({})}
    if data["format"] == 10:  # no mode had rounds
        data |= {"format": 11, "ledger": data["ledger"] | {"long_round": False}}
    if data["format"] == 11:  # no request was answered
        queue = dict(data["queue"])
        untrained, (kind, *lines) = queue.pop("evaluation_unfinished"), queue["lines"]
        lines = [[version, [row[0], row[1], ["deque"], *row[2:]]] for version, row in lines]
        data |= {"format": 12, "queue": queue | {"untrained_unfinished": untrained, "lines": [kind, *lines]}}
        data |= {"asked_s": _encode({}), "superseded_s": _encode({})}
    if data["format"] == 12:  # no chips were lent
        rows = [[_fitted(INSTANCE, values, {"returning": False}, set()), ids] for values, ids in data["instances"]]
        data |= {"format": 13, "instances": rows, "roles": _encode(s.roles)}
    if data["format"] == 13:  # nothing was known of drafts
        measured = data["fleet"]["measured"] | {"drafts": _encode(DraftGain())}
        data |= {"format": 14, "fleet": data["fleet"] | {"measured": measured}}
    if data["format"] == 14:  # Start and Resume had no number, and provenance named instances without their incarnation
        data |= {"format": 15, "fleet": data["fleet"] | {"unhealthy": _encode({})}, "requests": 0}
        data |= {"placements": PLACEMENTS, "groups": [_with_attempts(group) for group in data["groups"]]}
        data["sampled_by"] = _with_incarnations(data["sampled_by"])
        kind, *steps = data["trained_by"]
        data["trained_by"] = [kind, *([version, _with_incarnations(groups)] for version, groups in steps)]
    if data["format"] == 15:  # incarnations had another name
        fleet = dict(data["fleet"])
        data |= {"format": 16, "fleet": fleet | {"incarnations": fleet.pop("lives")}}
    if data["format"] == 16:  # rollouts took every version, and nobody asked what a load takes
        measured = data["fleet"]["measured"] | {"load_s": 0.0}
        added = {"measured": measured, "asked": _encode({}), "outdated": _encode({})}
        data |= {"format": 17, "fleet": data["fleet"] | added}
        lags = sum(lag * n for lag, n in data["ledger"]["lags"][1:])
        strides = Strides(published_s=data["now_s"], lags=lags, took_s=data["now_s"])
        data |= {"ledger": data["ledger"] | {"taken": data["ledger"]["base"]}, "strides": _encode(strides)}
    return data


def _with_attempts(group: list) -> list:
    """The row of a group whose samples were placed without a number. A sample that may have started is one that has."""
    *head, ran, begins_again, units = group
    (group,) = _with([[units]], {"placed": 0, "started": False}, set())
    for _, values, _ in group[0]:
        unit = dict(zip(UNIT, values, strict=True))
        unit["started"] = begins_again or unit["state"] not in (PENDING, STARTING)
        unit["ran"] = [[instance, EARLIER] for instance in unit["ran"]]
        values[:] = [unit[name] for name in UNIT]
    return [*head, [[instance, EARLIER] for instance in ran], begins_again, group[0]]


def _with_incarnations(groups: list) -> list:
    """Encoded {group: instances that have sampled of it}, as incarnations: any of an instance, which none comes
    before."""
    kind, *rows = groups
    named = [(id, [["tuple", instance, EARLIER] for instance in ran]) for id, (_, *ran) in rows]
    return [kind, *([id, ["tuple", *ran]] for id, ran in named)]


def _fitted(columns: tuple[str, ...], values: list, unset: dict[str, Any], later: set[str]) -> list:
    """The row of an instance or a unit that was written without `unset`, and without what is later still."""
    names = [name for name in columns if name not in later]
    row = dict(zip((name for name in names if name not in unset), values, strict=True)) | unset
    return [row[name] for name in names]


def _with(groups: list, unset: dict[str, Any], later: set[str]) -> list:
    """The rows of groups whose units were written without `unset`, and without what is later still."""
    return [
        [*group, [[dst, _fitted(UNIT, values, unset, later), index] for dst, values, index in units]]
        for *group, units in groups
    ]


def _names(thing: Any) -> list[str]:
    return [
        name
        for name in getattr(thing, "__slots__", None) or vars(thing)
        if name not in (*getattr(thing, "CONFIGURED", ()), *getattr(thing, "DERIVED", ()))
    ]


def _encode(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case dict():
            return ["dict", *([key, _encode(each)] for key, each in value.items())]
        case deque():  # without the samples that were cancelled while they waited, which are dropped at their turn
            return ["deque", *(list(u.id) for u in value if u.group.units[u.id.index] is u)]
        case list() | tuple():
            return [type(value).__name__, *map(_encode, value)]
    return {name: _encode(getattr(value, name)) for name in _names(value)}


def _decode(s: State, data: Any, present: Any = None) -> Any:
    """`present`: the attribute of the fresh state, which is filled where it has attributes of its own."""
    match data:
        case ["dict", *pairs]:
            return {key: _decode(s, each) for key, each in pairs}
        case ["deque", *ids]:
            return deque(s.groups[g].units[i] for g, i in ids)
        case ["list", *items]:
            return [_decode(s, each) for each in items]
        case ["tuple", *items]:
            return tuple(_decode(s, each) for each in items)
        case dict():
            _fill(s, present, data)
            return present
    return data


def _fill(s: State, thing: Any, data: dict[str, Any]) -> None:
    for name in _names(thing):
        setattr(thing, name, _decode(s, data[name], getattr(thing, name)))
