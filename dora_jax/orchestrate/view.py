"""What a person sees: one line per event, and the live facts of a run. Reads the state, changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.fleet import LOADING
from dora_jax.orchestrate.state import State
from dora_jax.types import SampleId

UNSAID_ZEROS = ("incarnation", "sampled", "busy_s", "row_s")


def describe(item: ev.Event | ev.Command) -> str:
    """`Name a=1 b=2`, with samples as group.index and runs of samples shortened."""
    fields = []
    for name in type(item).__slots__:
        value = getattr(item, name)
        if (
            value is None
            or value == ()
            or name in ("attempt", "indices", "drafted")
            or (name in UNSAID_ZEROS and not value)
        ):
            continue
        if name == "groups":
            name, value = "ids", _ids(map(SampleId, value, getattr(item, "indices", ())))
        elif name == "ids":
            value = _ids(value)
        elif isinstance(value, SampleId):
            value = f"{value.group_id}.{value.index}"
        elif name == "group_ids":
            value = _numbers(value)
        fields.append(f"{name}={value}")
    return " ".join([type(item).__name__, *fields])


def _ids(ids: Iterable[SampleId]) -> str:
    groups: dict[int, list[int]] = {}
    for id in ids:
        groups.setdefault(id.group_id, []).append(id.index)
    return ",".join(f"{group}.{_numbers(tuple(indices))}" for group, indices in groups.items())


def _numbers(values: tuple[int, ...]) -> str:
    """1,2,3,7 -> 1-3/7"""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return "/".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def summary(s: State) -> dict[str, Any]:
    """Live facts for the console."""
    running, drafts = dict.fromkeys(sorted(s.alive), 0), s.fleet.measured.drafts
    for instance in s.fleet.instances.values():
        for version, samples in instance.counts.items():
            running[version] = running.get(version, 0) + samples
    return {
        "base": s.ledger.base,
        "training": bool(s.ledger.batch),
        "versions": running,  # live version -> samples that hold a slot
        "waiting": {v: n - running.get(v, 0) for v, n in sorted(s.queue.unfinished.items()) if n > running.get(v, 0)},
        "in_environment": dict(sorted(s.queue.in_environment.items())),
        "outstanding": dict(sorted(s.ledger.outstanding.items())),
        "stride": s.strides.stride,
        "groups": dict(s.ledger.counts),
        "lags": dict(sorted(s.ledger.lags.items())),
        "waits": waits(s),
        "moves": s.moves_total,
        "reloads": s.reloads_total,
        "metrics": {  # of the features in use
            **({"drafts/acceptance": drafts.acceptance, "drafts/gain": drafts.gain(1)} if drafts.guesses else {}),
            **({"lends/total": s.roles.lends_total, "lends/switch_s": s.roles.switch_s} if s.roles.lendable else {}),
        },
        "dropped": dict(s.dropped),
        "instances": {h.id: h.serving for h in s.fleet.instances.values()},
        "next_group_id": min(s.cursors.values()),
    }


def waiting(s: State) -> dict[str, str]:
    """What the trainer and the idle rollout instances wait for, in a word or two; "" where none of them is idle."""
    return {"trainer": _trainer_waits(s), "rollouts": _rollouts_wait(s)}


def waits(s: State) -> str:
    """The same as one line, with what is missing."""
    counts = s.ledger.counts
    missing = (
        f" ({counts['ready']} of {s.ledger.part} groups ready, {counts['scoring']} scoring)" if s.ledger.missing else ""
    )
    reasons = [
        f"{role} wait{'s' * (role == 'trainer')} for {cause}{missing if role == 'trainer' else ''}"
        for role, cause in waiting(s).items()
        if cause
    ]
    return "; ".join(reasons) or "trainer and rollouts work"


def _trainer_waits(s: State) -> str:
    if s.ledger.base >= s.config.total_steps:
        return "evaluation" if s.evaluating else ""
    if not s.ledger.missing:
        return ""
    if not s.fleet.instances:
        return "a rollout instance"
    members = s.ledger.oldest_ready(s.ledger.part)
    if not members:
        counts = s.ledger.counts
        return "rewards" if counts["scoring"] and counts["ready"] + counts["scoring"] >= s.ledger.part else "rollouts"
    version = s.ledger.blocking_version(members)
    if version is None:  # the batch is about to be taken
        return "rollouts"
    return "stragglers" if any(v <= version for v in s.queue.unfinished) else "rewards"


def _rollouts_wait(s: State) -> str:
    idle = [instance for instance in s.fleet.instances.values() if not instance.used]
    if not idle:
        return ""
    if s.paused:
        return "the trainer"
    if any(instance.phase == LOADING for instance in idle):
        return "weights"
    if s.queue.unfinished:
        return "stragglers" if s.ledger.missing else "the trainer"
    return "rewards" if s.ledger.counts["scoring"] else "the trainer"
