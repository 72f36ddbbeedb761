"""The ledger: the states of every training group, and the two tests that bound staleness.

Consumes admissions and facts about groups, produces batches. It is the only place that knows the deadline rule:

    b    base that batches are taken at: the newest published version
    outstanding(<= u)   groups of versions up to u, admitted and not yet taken, filtered, failed or evicted
    taken               groups of the step at base b that the trainer has: 0 to P

    take  the first P ready groups in order of (version, group_id), or the first P / parts of them, iff each member has
          b <= v + max_lag and for every live u <= b:
                                       outstanding_after(<= u) <= (u + max_lag - b) * P + (P - taken_after)
    admit at v iff for every u in [v, newest]:  outstanding(<= u) < (u + max_lag - b + 1) * P - taken

Law (`check`): admitted = waiting + running + scoring + ready + training + trained + filtered + failed + evicted.

Admission: how many new groups may start, and at which version. Values in, values out.

The ledger's test bounds staleness; this page adds what is a matter of load: the target of groups outstanding
(the paper's RBS), and the number of groups that the remaining steps can still train. A group is admitted only when a
slot of its version is free, so its tag is never older than its start.
"""

from __future__ import annotations

from dora_jax.orchestrate.modes import Decisions
from dora_jax.types import GroupId, Version

WAITING, RUNNING, SCORING, READY, TRAINING = "waiting", "running", "scoring", "ready", "training"
TRAINED, FILTERED, FAILED, EVICTED = "trained", "filtered", "failed", "evicted"
OUTSTANDING = (WAITING, RUNNING, SCORING, READY)
ENDS = (TRAINED, FILTERED, FAILED, EVICTED)
STATES = OUTSTANDING + (TRAINING,) + ENDS


class Ledger:
    """`max_lag` bounds staleness; `capped` = False drops the two sums and leaves the members' test (mode `evict`);
    `max_lag` = None bounds nothing (mode `partial`); a step is taken in up to `parts`."""

    CONFIGURED = ("groups_per_step", "part", "max_lag", "capped")

    def __init__(self, groups_per_step: int, max_lag: int | None, base: Version, *, capped: bool = True,
                 parts: int = 1):  # fmt: skip
        self.groups_per_step = groups_per_step
        self.part = groups_per_step // parts
        self.max_lag = max_lag
        self.capped = capped and max_lag is not None
        self.base = self.taken = base  # the newest version, and the newest that rollouts take (stride.py)
        self.batch: tuple[GroupId, ...] = ()  # in the trainer
        self.lags: dict[int, int] = {}  # lag -> groups taken so far
        self.admitted = 0
        self.counts = dict.fromkeys(STATES, 0)
        self.live: dict[GroupId, tuple[str, Version]] = {}  # groups that have not ended
        self.outstanding: dict[Version, int] = {}
        self.ready: dict[Version, list[GroupId]] = {}
        self.filtered_in_a_row = 0
        self.long_round = False  # the groups of the step at this base are prompts that short rounds gave up

    @property
    def missing(self) -> int:
        """Groups that the step at the present base still lacks."""
        return self.groups_per_step - len(self.batch)

    @property
    def next_base(self) -> Version:
        """At which the next group is taken."""
        return self.base if self.missing else self.base + 1

    @property
    def total_outstanding(self) -> int:
        counts = self.counts
        return counts[WAITING] + counts[RUNNING] + counts[SCORING] + counts[READY]

    # ------------------------------------------------------------------ admit

    def admissible(self, version: Version) -> int | None:
        """Groups that may be admitted at `version` now; None: any number."""
        lag = self.max_lag
        if not self.capped or lag is None:
            return None
        older = sum(n for v, n in self.outstanding.items() if v < version)
        rooms: list[int] = []
        for u in range(version, self.base + 1):
            older += self.outstanding.get(u, 0)
            rooms.append((u + lag - self.base) * self.groups_per_step + self.missing - older)
        return max(0, min(rooms))

    def admit(self, group_id: GroupId, version: Version) -> None:
        if group_id in self.live:
            raise RuntimeError(f"group {group_id} is admitted twice")
        if self.admissible(version) == 0:
            raise RuntimeError(f"group {group_id} is admitted at version {version} against the deadline rule")
        self.admitted += 1
        self.counts[WAITING] += 1
        self.live[group_id] = (WAITING, version)
        self.outstanding[version] = self.outstanding.get(version, 0) + 1

    # ------------------------------------------------------------------ facts about one group

    def running(self, group_id: GroupId) -> None:
        """One of its samples has begun."""
        self._move(group_id, (WAITING, RUNNING), RUNNING)

    def scoring(self, group_id: GroupId) -> None:
        self._move(group_id, (WAITING, RUNNING), SCORING)

    def scored(self, group_id: GroupId, trainable: bool) -> None:
        if trainable:
            version = self._move(group_id, (SCORING,), READY)
            self.ready.setdefault(version, []).append(group_id)
            self.filtered_in_a_row = 0
        else:
            self._end(group_id, (SCORING,), FILTERED)
            self.filtered_in_a_row += 1

    def failed(self, group_id: GroupId) -> None:
        self._end(group_id, (WAITING, RUNNING, SCORING), FAILED)

    def evicted(self, group_id: GroupId) -> None:
        state, version = self.live[group_id]
        if state == READY:
            self.ready[version].remove(group_id)
        self._end(group_id, OUTSTANDING, EVICTED)

    def _move(self, group_id: GroupId, sources: tuple[str, ...], target: str) -> Version:
        state, version = self.live.get(group_id, ("unknown", -1))
        if state not in sources:
            raise RuntimeError(f"group {group_id} is {state}: it cannot become {target}")
        self.counts[state] -= 1
        self.counts[target] += 1
        self.live[group_id] = (target, version)
        return version

    def _end(self, group_id: GroupId, sources: tuple[str, ...], target: str) -> None:
        version = self._move(group_id, sources, target)
        del self.live[group_id]
        self._release(version, 1)

    def _release(self, version: Version, groups: int) -> None:
        self.outstanding[version] -= groups
        if not self.outstanding[version]:
            del self.outstanding[version]

    # ------------------------------------------------------------------ take

    def take(self) -> tuple[GroupId, ...]:
        """What the trainer gets next, a part or the rest of the step's batch; () while the rule allows none."""
        taken: list[GroupId] = []
        while self.missing and (members := self.oldest_ready(self.part)) and self.may_take(members):
            part: list[GroupId] = []
            for version, groups in members.items():
                pool = sorted(self.ready[version])
                part += pool[:groups]
                self.ready[version] = pool[groups:]
                self._release(version, groups)
                lag = self.base - version
                self.lags[lag] = self.lags.get(lag, 0) + groups
            live, state = self.live, TRAINING
            for group_id in part:
                live[group_id] = (state, live[group_id][1])
            self.counts[READY] -= len(part)
            self.counts[TRAINING] += len(part)
            self.batch += tuple(part)
            taken += part
        return tuple(taken)

    def awaited(self) -> tuple[Version, int]:
        """(u, n): before the next part may be taken, n groups of versions up to u must end that run. Of the oldest
        versions, where the part's groups are ready and the rule forbids it; else of any."""
        members = self.oldest_ready(self.part)
        blocking = self.blocking_version(members) if members else None
        if blocking is None:
            return self.base, self.part - self.counts[READY] - self.counts[SCORING]
        assert self.max_lag is not None  # else nothing blocks
        room = (blocking + self.max_lag - self.base) * self.groups_per_step + self.missing - self.part
        unended = sum(v <= blocking and state in (WAITING, RUNNING) for state, v in self.live.values())
        return blocking, unended - room

    def oldest_ready(self, missing: int) -> dict[Version, int]:
        """{version: groups} of the first ready groups in order of (version, group_id); {} if there are fewer."""
        members: dict[Version, int] = {}
        for version in sorted(v for v, pool in self.ready.items() if pool):
            members[version] = min(missing, len(self.ready[version]))
            missing -= members[version]
            if not missing:
                return members
        return {}

    def may_take(self, members: dict[Version, int]) -> bool:
        """The take test at the present base."""
        in_time = self.max_lag is None or all(self.base <= v + self.max_lag for v in members)
        return in_time and self.blocking_version(members) is None

    def blocking_version(self, members: dict[Version, int]) -> Version | None:
        """The oldest u whose outstanding groups forbid this batch; None: nothing does."""
        lag = self.max_lag
        if not self.capped or lag is None:
            return None
        missing = self.missing - sum(members.values())
        after = sum(n for v, n in self.outstanding.items() if v < self.base - lag)
        for u in range(self.base - lag, self.base + 1):
            after += self.outstanding.get(u, 0) - members.get(u, 0)
            if after > (u + lag - self.base) * self.groups_per_step + missing:
                return u
        return None

    def published(self, version: Version, stride: int = 1) -> None:
        """The rollouts take the version, unless they pass over it by their stride."""
        if self.missing or version != self.base + 1:
            has = f"has {len(self.batch)} of {self.groups_per_step} groups of base {self.base}"
            raise RuntimeError(f"version {version} is published, but the trainer {has}")
        self.counts[TRAINING] -= len(self.batch)
        self.counts[TRAINED] += len(self.batch)
        for group_id in self.batch:
            del self.live[group_id]
        self.batch = ()
        self.base = version
        if version - self.taken >= stride:
            self.taken = version
        self.ready = {v: pool for v, pool in self.ready.items() if pool}

    # ------------------------------------------------------------------ law

    def check(self) -> None:
        """Raise unless the ledger balances and nothing in it is past its deadline."""
        if self.base - self.taken > (self.max_lag or 0):
            raise RuntimeError(f"rollouts still take version {self.taken} at base {self.base}")
        if self.admitted != sum(self.counts.values()):
            raise RuntimeError(f"the ledger does not balance: admitted {self.admitted}, states {self.counts}")
        counted = dict.fromkeys(STATES, 0)
        outstanding: dict[Version, int] = {}
        for state, version in self.live.values():
            counted[state] += 1
            if state in OUTSTANDING:
                outstanding[version] = outstanding.get(version, 0) + 1
        if any(counted[s] != self.counts[s] for s in OUTSTANDING + (TRAINING,)) or outstanding != self.outstanding:
            raise RuntimeError(f"the ledger's counters are off: {counted} against {self.counts}")
        lag = self.max_lag
        if self.capped and lag is not None and any(v + lag < self.next_base for v in self.outstanding):
            raise RuntimeError(f"a group is past its deadline: {self.outstanding} at base {self.next_base}")


def groups_to_issue(ledger: Ledger, total_steps: int) -> int:
    """Groups that the steps not yet taken still lack: more would never be trained."""
    steps = total_steps - ledger.base
    return steps * ledger.groups_per_step - len(ledger.batch) - ledger.total_outstanding


def admission_version(decisions: Decisions, ledger: Ledger) -> Version:
    """The version that new groups are meant for."""
    if decisions.admit_at == "batch" and ledger.outstanding:
        return min(ledger.outstanding)
    return ledger.taken


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
