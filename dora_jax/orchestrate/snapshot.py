"""The orchestrator's whole state as JSON and back: snapshot + later events = all events.

Everything that any decision reads is written, the order of every queue and heap included.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from dora_jax.orchestrate.fleet import Fleet, Group, Host, Unit
from dora_jax.orchestrate.state import Due, State
from dora_jax.types import InstanceId, SampleId

FORMAT = 5
PLAIN = (
    "attempts", "budget", "now_s", "rebalanced_s", "halted", "moves_total", "reloads_total",
)  # fmt: skip
HOST_PLAIN = (
    "id", "life", "slots", "pages", "page_size", "residents", "speed", "phase", "coming", "leaving", "pages_used",
    "incoming", "free_reported", "pressed", "reports", "tokens",
)  # fmt: skip
UNIT_PLAIN = (
    "index", "version", "state", "tokens", "pages", "instance", "dst_pages", "attempt", "failed_moves", "began_s",
    "moved_s",
)  # fmt: skip
FLEET_COUNTS = ("promised", "arriving", "capacity", "drains")
LENGTHS = ("ended", "counts", "sums", "held_by", "left_by")
FLEET_PLAIN = ("finished", "finished_tokens", "finished_s", "likely_tokens", "move_s")


def save(s: State) -> dict[str, Any]:
    for host in s.fleet.hosts.values():
        s.fleet.settle(host)
    return {
        "format": FORMAT,
        "mode": s.config.mode,
        "ledger": s.ledger.snapshot(),
        "groups": [_save_group(group) for group in s.groups.values()],
        "queue": [[version, [_save_line(line) for line in lines]] for version, lines in s.queue.lines.items()],
        "counts": {name: _pairs(getattr(s.queue, name)) for name in ("unfinished", "evaluation_unfinished")},
        "fleet": _save_fleet(s.fleet),
        "redo": list(s.redo),
        "dropped": dict(s.dropped),
        "evaluating": _pairs(s.evaluating),
        "task_open": _pairs(s.task_open),
        "task_rates": _pairs(s.task_rates),
        "due": {name: _due(getattr(s.due, name)) for name in Due.__slots__},
        "cursors": _pairs(s.cursors),
        "alive": list(s.alive),
        "plain": {name: getattr(s, name) for name in PLAIN},
    }


def load(s: State, data: dict[str, Any]) -> None:
    """Fill a fresh state of the same configuration with what `save` wrote."""
    if data["format"] != FORMAT or data["mode"] != s.config.mode:
        found = f"format {data['format']} and mode {data['mode']}"
        raise ValueError(f"the snapshot is of {found}: this run cannot go on from it")
    s.ledger.load(data["ledger"])
    s.groups = {}
    _load_fleet(s.fleet, data["fleet"])
    for item in data["groups"]:
        group = _load_group(s.fleet, item)
        s.groups[group.id] = group
    for host, rows in zip(s.fleet.hosts.values(), data["fleet"]["hosts"], strict=True):
        host.units = {unit.id: unit for unit in (s.groups[g].units[i] for g, i in rows["units"])}
    s.queue.lines = {version: tuple(deque(s.groups[g].units[i] for g, i in line) for line in lines)
                     for version, lines in data["queue"]}
    for name, rows in data["counts"].items():
        setattr(s.queue, name, dict(rows))
    s.redo, s.evaluating = list(data["redo"]), dict(data["evaluating"])
    s.dropped = dict(data["dropped"])
    for name, value in data["due"].items():
        setattr(s.due, name, value if isinstance(value, bool) else dict(value))
    s.task_open, s.cursors = dict(data["task_open"]), dict(data["cursors"])
    s.task_rates = dict(data["task_rates"])
    if s.config.task_adaptive:
        s.task_limits = s.config.adapted_limits(s.task_rates)
    s.alive = dict.fromkeys(data["alive"])
    for name, value in data["plain"].items():
        setattr(s, name, value)


def _save_line(line: deque[Unit]) -> list[list]:
    """Without the samples that were cancelled while they waited: they are dropped when their turn comes."""
    return [[u.group.id, u.index] for u in line if u.group.units[u.index] is u]


def _due(value: bool | dict) -> bool | list[list]:
    return value if isinstance(value, bool) else _pairs(value)


def _pairs(counts: dict) -> list[list]:
    return [[key, value] for key, value in counts.items()]


def _save_group(group: Group) -> dict[str, Any]:
    return {
        "id": group.id,
        "version": group.version,
        "samples": len(group.units),
        "left": group.left,
        "doomed": group.doomed,
        "units": [_save_unit(unit) for unit in group.units if unit is not None],
    }


def _save_unit(unit: Unit) -> list:
    dst = None if unit.dst is None else [unit.dst.id, unit.dst.life]
    return [dst, *(getattr(unit, name) for name in UNIT_PLAIN)]


def _load_group(fleet: Fleet, data: dict[str, Any]) -> Group:
    group = Group(data["id"], data["version"], data["samples"])
    group.left, group.doomed = data["left"], data["doomed"]
    units, group.units = group.units, [None] * data["samples"]
    for dst, index, *values in data["units"]:
        unit = group.units[index] = units[index]
        for name, value in zip(UNIT_PLAIN[1:], values, strict=True):
            setattr(unit, name, value)
        unit.dst = None if dst is None else _destination(fleet, *dst)
    return group


def _destination(fleet: Fleet, id: InstanceId, life: int) -> Host:
    """Of a move under way. A life that ended before the snapshot is gone for good: a host that is not in the fleet stands
    for it."""
    host = fleet.hosts.get(id)
    return host if host is not None and host.life == life else Host(id, life, 1, 0, 1, 1, 1.0)


def _save_fleet(fleet: Fleet) -> dict[str, Any]:
    return {
        "plain": {name: getattr(fleet, name) for name in FLEET_PLAIN},
        "lengths": {name: getattr(fleet.lengths, name) for name in LENGTHS},
        "lives": _pairs(fleet.lives),
        "hosts": [
            {
                "plain": {name: getattr(host, name) for name in HOST_PLAIN},
                "versions": list(host.versions),
                "counts": _pairs(host.counts),
                "units": list(host.units),
            }
            for host in fleet.hosts.values()
        ],
        "open": [[v, [list(entry) for entry in heap]] for v, heap in fleet.open.items()],
        "holders": [[v, list(ids)] for v, ids in fleet.holders.items()],
        "counts": {name: _pairs(getattr(fleet, name)) for name in FLEET_COUNTS},
    }


def _load_fleet(fleet: Fleet, data: dict[str, Any]) -> None:
    for name, value in data["plain"].items():
        setattr(fleet, name, value)
    for name, value in data["lengths"].items():
        setattr(fleet.lengths, name, value if isinstance(value, int) else list(value))
    fleet.lives = dict(data["lives"])
    fleet.hosts = {}
    for item in data["hosts"]:
        plain = item["plain"]
        host = Host(*(plain[name] for name in ("id", "life", "slots", "pages", "page_size", "residents", "speed")))
        for name, value in plain.items():
            setattr(host, name, value)
        host.versions, host.counts = list(item["versions"]), dict(item["counts"])
        fleet.hosts[host.id] = host
    fleet.open = {v: [(load, id) for load, id in heap] for v, heap in data["open"]}
    fleet.holders = {v: dict.fromkeys(ids) for v, ids in data["holders"]}
    for name, rows in data["counts"].items():
        setattr(fleet, name, dict(rows))
