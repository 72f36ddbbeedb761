"""The orchestrator: one event in, the commands that follow from it out.

Consumes the facts of `events.py` one at a time and produces requests. No clock, no I/O, no randomness: the same
configuration and events give the same commands.

    fact -> commit (facts.py) -> [end of a step] -> take -> rebalance, if triggered -> fill free slots
         -> give emptied instances their next weights -> retire versions -> halt

Laws: a command reserves, the event that answers it commits. Every started sample ends in exactly one SampleDone or
SampleCancelled. Triggers of a rebalance: a step's end, a batch taken, an instance that comes or goes, KV pressure, a
period.
What the body owes: a Move answers each id with SampleMoved or MoveFailed (or SampleDone by the source), even if an
end dies; MoveFailed means that the sample runs at the source again, or that its tokens are recorded if the source is
down. A Cancel with instance None discards recorded tokens and is answered by SampleCancelled as any other.
"""

from __future__ import annotations

from dora_jax.orchestrate import admission, migration, partition, snapshot, view
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import fleet as fl
from dora_jax.orchestrate.facts import COMMIT
from dora_jax.orchestrate.fleet import Host, Unit
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.orchestrate.state import State
from dora_jax.types import GroupId, InstanceId, SampleId, Version, is_eval

# A mass migration is spread over several rebalances: each planned sample costs a few microseconds of this step.
MOVES_A_STEP = 4096
# A sample whose moves failed this often stays where it is.
MOVE_ATTEMPTS = 3


class Orchestrator:
    """`redo`: groups to issue again before new ones (resume). `evaluate_start`: False when the start version's
    evaluation is already recorded."""

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        start_version: Version = 0,
        next_group_id: GroupId = 0,
        redo: tuple[GroupId, ...] = (),
        evaluate_start: bool = True,
    ):
        problems = config.problems()
        if problems:
            raise ValueError("this run could never progress: " + "; ".join(problems))
        self.state = State(config, start_version, next_group_id)
        self.state.redo += redo
        self._starts: dict[tuple[InstanceId, Version], list[SampleId]] = {}
        self._renew_budget()
        if evaluate_start:
            self._evaluate(start_version)
        self.state.retire_due = True  # nothing to do at all: halt at the first event

    def step(self, event: ev.Event) -> tuple[ev.Command, ...]:
        s = self.state
        if s.halted:
            return ()
        COMMIT[type(event)](s, event)
        if s.woken or s.take_due or s.rebalance_due or s.emptied or s.retire_due:
            self._decide()
        out, s.out = s.out, []
        return tuple(out)

    def summary(self) -> dict:
        """Live facts for the console."""
        return view.summary(self.state)

    def snapshot(self) -> dict:
        """The whole state as JSON; taken between events."""
        return snapshot.save(self.state)

    @classmethod
    def restore(cls, config: OrchestratorConfig, data: dict) -> Orchestrator:
        """Go on from a snapshot: the same later events give the same later commands."""
        orchestrator = cls(config, evaluate_start=False)
        snapshot.load(orchestrator.state, data)
        return orchestrator

    def _decide(self) -> None:
        s = self.state
        if s.halted:
            return
        if s.step_ended:
            s.step_ended = False
            self._end_step()
        if s.take_due:
            s.take_due = False
            self._take()
        if s.rebalance_due:
            s.rebalance_due = False
            self._rebalance()
        if s.woken:
            self._fill_woken()
        if s.emptied:
            self._settle_emptied()
        if s.retire_due:
            s.retire_due = False
            self._retire()
            self._halt_if_done()

    # ------------------------------------------------------------------ end of a step

    def _end_step(self) -> None:
        s = self.state
        self._renew_budget()
        if s.config.evaluation_due(s.ledger.base):
            self._evaluate(s.ledger.base)
        if s.decisions.on_publish == "swap":
            s.queue.retag_waiting(s.ledger.base)
        elif s.decisions.on_publish == "evict":
            self._evict()
        s.wake_all()

    def _renew_budget(self) -> None:
        s = self.state
        if s.decisions.admit_on == "publish":
            in_flight = s.queue.training_unfinished
            s.budget = admission.publish_budget(s.decisions, s.config.group_size, in_flight)

    def _evaluate(self, version: Version) -> None:
        s = self.state
        if s.config.evaluation_due(version):
            s.evaluating[version] = s.config.eval_groups
            for group_id in s.config.evaluation_ids(version):
                s.open_group(group_id, version)

    def _evict(self) -> None:
        """Mode `evict`: groups that no step may take any more are given up, their prompts issued again."""
        s = self.state
        oldest = s.ledger.base - s.decisions.max_lag
        for group_id in [g for g, (_, version) in s.ledger.live.items() if version < oldest]:
            s.ledger.evicted(group_id)
            group = s.groups.get(group_id)
            reason = f"its version is more than {s.decisions.max_lag} behind version {s.ledger.base}"
            if group is None:  # scored: only its payload is left
                ids = tuple(SampleId(group_id, i) for i in range(s.config.group_size))
                s.out.append(ev.Cancel(ids=ids, instance=None, reason=reason))
                s.redo.append(group_id)
            else:
                s.doom(group, "evicted", reason, never_start=False)

    # ------------------------------------------------------------------ take

    def _take(self) -> None:
        s = self.state
        batch = s.ledger.take() if s.ledger.base < s.config.total_steps else ()
        if not batch:
            return
        for lag, groups in s.ledger.batch_lags.items():
            s.lags[lag] = s.lags.get(lag, 0) + groups
        s.out.append(ev.Train(group_ids=batch, base_version=s.ledger.base))
        s.wake_all()
        s.rebalance_due = True

    # ------------------------------------------------------------------ fill

    def _fill_woken(self) -> None:
        """Waiting samples first, the oldest version first; then new groups, the version they are meant for first."""
        s = self.state
        versions, s.woken = sorted(s.woken), {}
        for version in versions:
            self._place_waiting(version)
        meant = admission.admission_version(s.decisions, s.ledger)
        if meant in versions:
            self._admit(meant, reserve=0)
        for version in reversed(versions):
            if version < meant and version in s.alive and not s.fleet.drains.get(version):
                if admission.may_refill(s.decisions, s.ledger, version):
                    self._admit(version, reserve=s.fleet.promised.get(meant, 0) // s.config.group_size)
        for (instance, version), ids in self._starts.items():
            s.out.append(ev.Start(ids=tuple(ids), instance=instance, version=version))
        self._starts.clear()
        s.woken.clear()

    def _place_waiting(self, version: Version) -> bool:
        """Give slots to the waiting samples of a version; True when none waits any more."""
        s = self.state
        while (unit := s.queue.first(version)) is not None:
            host = s.fleet.best(version, unit.tokens)
            if host is None:
                return False
            self._place(unit, host)
        return True

    def _place(self, unit: Unit, host: Host) -> None:
        """Put `unit`, and what else of its group can start now, on `host`: a group shares its prompt's pages."""
        s = self.state
        if unit.state == fl.PARKED:
            s.queue.pop(unit)
            s.fleet.reserve(unit, host, fl.RESUMING)
            s.out.append(ev.Resume(ids=(unit.id,), instance=host.id, version=unit.version))
        else:
            group, version = unit.group, unit.version
            started = self._starts.setdefault((host.id, version), [])
            while unit is not None and unit.group is group and unit.state == fl.PENDING and s.fleet.has_room(host):
                s.queue.pop(unit)
                s.fleet.reserve(unit, host, fl.STARTING)
                started.append(unit.id)
                unit = s.queue.first(version)
        s.fleet.offer(host)

    def _admit(self, version: Version, reserve: int) -> None:
        """Admit groups while the rule, the load target and a free slot allow. `reserve`: groups of credit kept for
        slots that are about to take the newest version."""
        s = self.state
        if s.queue.first(version) is not None:
            return
        while self._credit(version) > reserve and s.fleet.best(version) is not None:
            group_id = self._next_group()
            s.ledger.admit(group_id, version)
            if s.budget is not None:
                s.budget -= 1
            s.open_group(group_id, version)
            if not self._place_waiting(version):
                return

    def _credit(self, version: Version) -> int:
        s = self.state
        return admission.credit(s.decisions, s.ledger, version, s.config.total_steps, s.budget)

    def _next_group(self) -> GroupId:
        s = self.state
        if s.redo:
            return s.redo.pop(0)
        s.next_group_id += 1
        return s.next_group_id - 1

    # ------------------------------------------------------------------ rebalance

    def _rebalance(self) -> None:
        s = self.state
        s.rebalanced_s = s.now_s
        if not s.fleet.hosts:
            return
        demand = self._demand()
        seats = [partition.Seat(h.id, h.serving, h.used, h.slots) for h in s.fleet.hosts.values()]
        shares = partition.plan_shares(len(seats), demand, self._need(demand), s.decisions.spread)
        changes = partition.plan_partition(seats, shares)
        for host in s.fleet.hosts.values():
            target = changes.get(host.id)
            if host.loading is None:
                s.fleet.set_target(host, target, host.serving if target is not None else None)
                if target is not None or not host.used:
                    s.emptied[host.id] = None
        if s.decisions.on_publish == "swap":
            self._swap()
        for version in sorted(s.fleet.drains):
            self._move(version)
        s.wake_all()

    def _demand(self) -> dict[Version, int]:
        """Requests in flight by version, and those that credit allows at the version meant for them."""
        s = self.state
        meant = admission.admission_version(s.decisions, s.ledger)
        if s.decisions.on_publish == "swap":  # training samples follow the newest weights
            demand = dict(s.queue.evaluation_unfinished)
            demand[meant] = demand.get(meant, 0) + s.queue.training_unfinished
        else:
            demand = dict(s.queue.unfinished)
        credit = self._credit(meant)
        if credit:
            demand[meant] = demand.get(meant, 0) + credit * s.config.group_size
        return demand

    def _need(self, demand: dict[Version, int]) -> dict[Version, int]:
        """Hosts of mean size that the unfinished samples of each version fit on."""
        s = self.state
        slots = sum(h.slots for h in s.fleet.hosts.values())
        hosts = len(s.fleet.hosts)
        return {v: -(-min(n, s.queue.unfinished.get(v, 0)) * hosts // slots) for v, n in demand.items()}

    def _swap(self) -> None:
        """Mode `partial`: training samples under older weights are put aside, to go on under the newest."""
        s = self.state
        for host in s.fleet.hosts.values():
            if host.serving is not None and host.serving < s.ledger.base:
                self._park(host, [u for u in host.units if u.state == fl.RUNNING and not is_eval(u.group.id)])

    def _park(self, host: Host, units: list[Unit]) -> None:
        if units:
            for unit in units:
                unit.state = fl.PARKING
            self.state.out.append(ev.Park(ids=tuple(u.id for u in units), instance=host.id))

    def _move(self, version: Version) -> None:
        """Empty the hosts on which `version` drains, onto those that stay."""
        s = self.state
        sources, sinks = [], []
        for id in sorted(s.fleet.holders.get(version, ())):
            host = s.fleet.hosts[id]
            if host.draining == version:
                units = [u for u in host.units if u.version == version]
                if units and not host.incoming and all(_movable(u) for u in units):
                    movers = [migration.Mover(u.id, u.tokens, s.fleet.page_need(host, u.tokens)) for u in units]
                    sources.append(migration.Source(id, movers))
            elif host.loading is None and s.fleet.has_room(host):
                free_pages = host.pages - host.pages_used
                sinks.append(migration.Sink(id, host.used, host.slots, free_pages, host.speed))
        moves: dict[tuple[InstanceId, InstanceId], list[SampleId]] = {}
        for id, src, dst in migration.plan_moves(sources, sinks, MOVES_A_STEP):
            s.fleet.reserve_move(s.unit(id), s.fleet.hosts[dst])
            moves.setdefault((src, dst), []).append(id)
        for (src, dst), ids in moves.items():
            s.out.append(ev.Move(ids=tuple(ids), src=src, dst=dst))

    # ------------------------------------------------------------------ weights

    def _settle_emptied(self) -> None:
        """Hosts with nothing left to run of their version take the weights meant for them, or else the newest."""
        s = self.state
        emptied, s.emptied = sorted(s.emptied), {}
        for id in emptied:
            host = s.fleet.hosts.get(id)
            if host is None or host.loading is not None:
                continue
            target, drop = host.target, host.draining
            if target is None:
                target = self._wanted()
                drop = host.versions[0] if len(host.versions) >= host.residents else None
            if target not in host.versions and (drop is None or not host.counts.get(drop)):
                self._load(host, target, drop)

    def _wanted(self) -> Version:
        """What an idle host should hold: the oldest version that has samples and no host, or else the newest."""
        s = self.state
        unhosted = [v for v in s.queue.unfinished if v not in s.fleet.holders]
        return min(unhosted, default=s.ledger.base)

    def _load(self, host: Host, version: Version, drop: Version | None) -> None:
        s = self.state
        source = None
        if s.config.peer_weights:
            peers = [id for id in s.fleet.holders.get(version, ()) if version in s.fleet.hosts[id].versions]
            source = peers[s.reloads_total % len(peers)] if peers else None
        s.fleet.begin_load(host, version, drop)
        s.reloads_total += 1
        s.out.append(ev.LoadWeights(instance=host.id, version=version, source=source, drop=drop))

    def _retire(self) -> None:
        s = self.state
        for version in sorted(s.alive):
            needed = version in s.queue.unfinished or s.fleet.promised.get(version)
            if version < s.ledger.base and not needed:
                del s.alive[version]
                s.out.append(ev.Retire(version=version))

    def _halt_if_done(self) -> None:
        s = self.state
        if s.ledger.base >= s.config.total_steps and not s.evaluating and not s.queue.unfinished:
            s.halt(True, f"version {s.ledger.base} is published and every evaluation due is done")


def _movable(unit: Unit) -> bool:
    return unit.state == fl.RUNNING and unit.failed_moves < MOVE_ATTEMPTS
