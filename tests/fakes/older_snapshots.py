"""Snapshots of the orchestrator as earlier formats wrote them."""

from dora_jax.orchestrate.snapshot import INSTANCE, SINCE_ATTEMPTS, UNIT
from dora_jax.orchestrate.state import PLACEMENTS

BEFORE_LENDING = tuple(name for name in INSTANCE if name != "returning")


def forget_attempts(brain):
    """What no older format can say, and its upgrade cannot know."""
    brain.state.placements = PLACEMENTS
    for unit in (unit for group in brain.state.groups.values() for unit in group.units):
        unit.placed = 0


def before_strides(data):
    """A snapshot of format 17 (as JSON) of a run whose rollouts have taken every version, as format 16 wrote it."""
    kept = {name: value for name, value in data.items() if name != "strides"}
    fleet = {name: value for name, value in data["fleet"].items() if name not in ("asked", "outdated")}
    fleet["measured"] = {name: value for name, value in fleet["measured"].items() if name != "load_s"}
    ledger = {name: value for name, value in data["ledger"].items() if name != "taken"}
    return kept | {"format": 16, "fleet": fleet, "ledger": ledger}


def before_attempts(data):
    """Make a snapshot of format 14 from one of format 17."""
    data, groups = before_strides(data), []
    for *head, ran, begins_again, units in data["groups"]:
        rows = [[dst, _before_attempts(values), index] for dst, values, index in units]
        groups.append([*head, [instance for instance, _ in ran], begins_again, rows])
    kind, *steps = data["trained_by"]
    kept = {name: value for name, value in data.items() if name not in ("placements", "requests")}
    return kept | {
        "format": 14,
        "groups": groups,
        "fleet": {{"incarnations": "lives"}.get(k, k): v for k, v in data["fleet"].items() if k != "unhealthy"},
        "sampled_by": _instances(data["sampled_by"]),
        "trained_by": [kind, *([version, _instances(sampled)] for version, sampled in steps)],
    }


def _before_attempts(values):
    unit = dict(zip(UNIT, values, strict=True))
    unit["ran"] = [instance for instance, _ in unit["ran"]]
    return [value for name, value in unit.items() if name not in SINCE_ATTEMPTS]


def _instances(sampled):
    kind, *rows = sampled
    return [kind, *([id, ["tuple", *(instance for _, instance, _ in ran)]] for id, (_, *ran) in rows)]


def before_drafts(data):
    """Make a snapshot of format 13 from one of format 17 (as JSON) of a run without drafts."""
    data = before_attempts(data)
    measured = {name: value for name, value in data["fleet"]["measured"].items() if name != "drafts"}
    return data | {"format": 13, "fleet": data["fleet"] | {"measured": measured}}


def before_lending(data):
    """Make a snapshot of format 12 from one of format 17 (as JSON) that has lent no chips."""
    data = before_drafts(data)
    instances = [[_without_returning(values), ids] for values, ids in data["instances"]]
    kept = {name: value for name, value in data.items() if name != "roles"}
    return kept | {"format": 12, "instances": instances}


def _without_returning(values):
    return [value for name, value in zip(INSTANCE, values, strict=True) if name != "returning"]


def before_requests(data):
    """Make a snapshot of format 11 from one of format 17 (as JSON) that knows of no request and lent no chips."""
    data = before_lending(data)
    queue = {name: value for name, value in data["queue"].items() if name != "untrained_unfinished"}
    queue["evaluation_unfinished"] = data["queue"]["untrained_unfinished"]
    kind, *lines = queue["lines"]
    queue["lines"] = [kind, *([version, [*row[:2], *row[3:]]] for version, row in lines)]
    kept = {name: value for name, value in data.items() if name not in ("asked_s", "superseded_s")}
    return kept | {"format": 11, "queue": queue}
