"""Admission: how many new groups may start, and at which version. Values in, values out.

The ledger's test bounds staleness; this page adds what is a matter of load: the target of groups outstanding
(the paper's RBS), and the number of groups that the remaining steps can still train. A group is admitted only when a
slot of its version is free, so its tag is never older than its start.
"""

from __future__ import annotations

from dora_jax.orchestrate.ledger import Ledger
from dora_jax.orchestrate.modes import Decisions
from dora_jax.types import Version


def groups_to_issue(ledger: Ledger, total_steps: int) -> int:
    """Groups that the steps not yet taken still lack: more would never be trained."""
    steps = total_steps - ledger.base
    return steps * ledger.groups_per_step - len(ledger.batch) - ledger.total_outstanding


def admission_version(decisions: Decisions, ledger: Ledger) -> Version:
    """The version that new groups are meant for."""
    if decisions.admit_at == "batch" and ledger.outstanding:
        return min(ledger.outstanding)
    return ledger.base


def credit(decisions: Decisions, ledger: Ledger, version: Version, total_steps: int, budget: int | None) -> int:
    """Groups that may be admitted at `version` now. `budget`: what a step's end left to admit (admit_on publish)."""
    target = decisions.target_groups
    if decisions.over_issued:  # of a round, which is over when the step has its batch
        target = ledger.missing and ledger.missing + (0 if ledger.long_round else decisions.over_issued)
    elif decisions.count_awaited:
        target += ledger.missing
    room = min(target - ledger.total_outstanding, groups_to_issue(ledger, total_steps))
    if budget is not None:
        room = min(room, budget)
    if room <= 0:
        return 0
    cap = ledger.admissible(version)
    return room if cap is None else min(room, cap)


def publish_budget(decisions: Decisions, group_size: int, samples_in_flight: int) -> int:
    """Groups to inject at the end of a step: what is missing to the target of requests in flight (algorithm 1)."""
    missing = decisions.target_groups * group_size - samples_in_flight
    return max(0, -(-missing // group_size))
