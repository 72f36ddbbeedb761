"""Snapshots of the orchestrator as earlier formats wrote them."""

from dora_jax.orchestrate.snapshot import INSTANCE

BEFORE_LENDING = tuple(name for name in INSTANCE if name != "returning")


def before_drafts(data):
    """Of format 13, from one of format 14 (as JSON) of a run without drafts."""
    measured = {name: value for name, value in data["fleet"]["measured"].items() if name != "drafts"}
    return data | {"format": 13, "fleet": data["fleet"] | {"measured": measured}}


def before_lending(data):
    """Of format 12, from one of format 14 (as JSON) that has lent no chips."""
    data = before_drafts(data)
    instances = [[_without_returning(values), ids] for values, ids in data["instances"]]
    kept = {name: value for name, value in data.items() if name != "roles"}
    return kept | {"format": 12, "instances": instances}


def _without_returning(values):
    return [value for name, value in zip(INSTANCE, values, strict=True) if name != "returning"]


def before_requests(data):
    """Of format 11, from one of format 14 (as JSON) that has heard of no request and lent no chips."""
    data = before_lending(data)
    queue = {name: value for name, value in data["queue"].items() if name != "untrained_unfinished"}
    queue["evaluation_unfinished"] = data["queue"]["untrained_unfinished"]
    kind, *lines = queue["lines"]
    queue["lines"] = [kind, *([version, [*row[:2], *row[3:]]] for version, row in lines)]
    kept = {name: value for name, value in data.items() if name not in ("asked_s", "superseded_s")}
    return kept | {"format": 11, "queue": queue}
