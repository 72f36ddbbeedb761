"""Placement: free slots go to waiting samples, then to new groups. Issues Start and Resume.

Waiting samples of a version are placed on its least loaded hosts, those with recorded tokens first. A new group is
admitted only when its first sample gets a slot at once: that moment is its version tag.
"""

from __future__ import annotations

from dora_jax.orchestrate import admission
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import fleet as fl
from dora_jax.orchestrate.fleet import Host, Unit
from dora_jax.orchestrate.state import State
from dora_jax.types import GroupId, InstanceId, SampleId, Version

Starts = dict[tuple[InstanceId, Version], list[SampleId]]


def fill_woken(s: State) -> None:
    """Waiting samples first, the oldest version first; then new groups, the version they are meant for first."""
    versions, s.woken = sorted(s.woken), {}
    starts: Starts = {}
    for version in versions:
        _place_waiting(s, version, starts)
    meant = admission.admission_version(s.decisions, s.ledger)
    if meant in versions:
        _admit(s, meant, starts)
    for version in reversed(versions):
        if version < meant and _may_refill(s, version):
            kept = s.fleet.promised.get(meant, 0) // s.config.group_size
            _admit(s, version, starts, kept=kept, share=s.config.older_slots)
    for (instance, version), ids in starts.items():
        s.out.append(ev.Start(ids=tuple(ids), instance=instance, version=version))
    s.woken.clear()


def _may_refill(s: State, version: Version) -> bool:
    live = version in s.alive and version not in s.fleet.drains
    return live and admission.may_refill(s.decisions, s.ledger, version)


def _place_waiting(s: State, version: Version, starts: Starts) -> bool:
    """Give slots to the waiting samples of a version; True when none waits any more."""
    while (unit := s.queue.first(version)) is not None:
        host = s.fleet.best(version, unit.tokens)
        if host is None:
            return False
        if unit.state == fl.PARKED:
            s.queue.pop(unit)
            s.fleet.reserve(unit, host, fl.RESUMING)
            s.out.append(ev.Resume(ids=(unit.id,), instance=host.id, version=version))
        else:
            _start_siblings(s, unit, host, starts)
        s.fleet.offer(host)
    return True


def _start_siblings(s: State, unit: Unit | None, host: Host, starts: Starts) -> None:
    """Start `unit` on `host` and as many waiting samples of its group as fit: they share the prompt's pages."""
    group, version = unit.group, unit.version
    ids = starts.setdefault((host.id, version), [])
    while unit is not None and unit.group is group and unit.state == fl.PENDING and s.fleet.has_room(host):
        s.queue.pop(unit)
        s.fleet.reserve(unit, host, fl.STARTING)
        ids.append(unit.id)
        unit = s.queue.first(version)


def _admit(s: State, version: Version, starts: Starts, kept: int = 0, share: float = 1.0) -> None:
    """Admit groups while the rule, the load target and a free slot allow. `kept`: groups of credit that stay for
    slots about to take the newest version; `share`: of a host's slots that new groups may fill."""
    if s.queue.first(version) is not None:
        return
    while admission.credit(s.decisions, s.ledger, version, s.config.total_steps, s.budget) > kept:
        host = s.fleet.best(version)
        if host is None or host.used >= share * host.slots:
            return
        group_id = _next_group(s)
        if group_id is None:
            return
        s.ledger.admit(group_id, version)
        s.count_tasks((group_id,), 1)
        if s.budget is not None:
            s.budget -= 1
        s.open_group(group_id, version)
        if not _place_waiting(s, version, starts):
            return


def _next_group(s: State) -> GroupId | None:
    """Groups to redo first, then the prompt stream in order; a task at its own limit is passed over for a while."""
    if s.redo:
        return s.redo.pop(0)
    limits = s.config.task_limits
    group_id = s.next_group_id
    if limits:
        cycle = len(s.config.task_cycle)
        ids = (g for g in range(group_id, group_id + len(s.ahead) + cycle) if g not in s.ahead)
        group_id = next((g for g in ids if s.task_open.get(s.config.task(g), 0) < limits[s.config.task(g)]), None)
    if group_id is not None:
        s.ahead[group_id] = None
        while s.next_group_id in s.ahead:
            del s.ahead[s.next_group_id]
            s.next_group_id += 1
    return group_id
