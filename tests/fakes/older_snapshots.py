"""Snapshots of the orchestrator as earlier formats wrote them."""


def before_requests(data):
    """Of format 11, from one of format 12 (as JSON) that has heard of no request."""
    queue = {name: value for name, value in data["queue"].items() if name != "untrained_unfinished"}
    queue["evaluation_unfinished"] = data["queue"]["untrained_unfinished"]
    kind, *lines = queue["lines"]
    queue["lines"] = [kind, *([version, [*row[:2], *row[3:]]] for version, row in lines)]
    kept = {name: value for name, value in data.items() if name not in ("asked_s", "superseded_s")}
    return kept | {"format": 11, "queue": queue}
