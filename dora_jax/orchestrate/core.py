"""The orchestrator: a batch of events in, the commands that follow from it out.

Consumes the facts of `events.py` and produces requests. No clock, no I/O, no randomness: the same configuration and
batches of events give the same commands. A batch is what came in together; its facts are committed one by one, and the
decisions are made once. A batch of one is as good as any other, only dearer.

    commit, of each fact:   does it count? (verdict.py) -> what it changes (transitions.py) -> [end of a step]
    decide, of each batch:  take -> relieve instances that run out of pages -> rebalance, if triggered (rebalancing.py)
                            -> fill free slots (placement.py) -> give emptied instances their next weights
                            -> lend the chips of a trainer that waits (lending.py) -> retire versions -> halt

Laws: a command reserves, the event that answers it commits. Every sample of which SampleStarted counted ends in exactly
one SampleDone or SampleCancelled, however often it begins again. Every group of training and evaluation ends once, behind
its samples: by Train, by GroupScored(trainable=False), or by Discard, where it failed or was given up; a request ends by
its SampleDone or by Discard. Nothing is retained of a group that has ended and is not in training. Every prompt that was
issued ends before the run does: new ones never take the place of those that were given up.
Triggers of a rebalance: a step's end, a batch taken, an instance that comes or goes, KV pressure, a period; triggers of a
large fleet share one (rebalancing.py). Moves alone are planned again whenever enough slots of a draining version have
come free.
What the body owes: a Move answers each id with SampleMoved or MoveFailed (or SampleDone by the source), even if an
end dies; MoveFailed means that the sample runs at the source again, or that its tokens are recorded if the source is
down. A Cancel is answered for each id with SampleCancelled unless it had ended, whether or not it had begun; with
instance None it is answered at once, and recorded tokens go. A Discard has no answer. What is reported of a sample names
the attempt that placed it (events.py). A group that is given up, by mode `evict` or because an instance in quarantine
sampled a part of it (quarantine.py), is issued again under a new group id.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from dora_jax.orchestrate import admission, lending, placement, rebalancing, rounds, snapshot, verdict, view
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.orchestrate.roles import ASKED
from dora_jax.orchestrate.state import State
from dora_jax.orchestrate.transitions import COMMIT
from dora_jax.types import RENEWAL, GroupId, Version, is_served

# After these a batch may be taken that could not be before; after these no version and no run can be over.
CHANGES_READY = {ev.GroupScored, ev.GroupFailed, ev.StepPublished, ev.InstanceUp, ev.InstanceDown, ev.InstanceUnhealthy}
FREES_TRAINER = {ev.PartTrained, ev.StepPublished}
ENDS_NOTHING = {ev.InstanceReported, ev.SampleStarted, ev.SampleWaiting, ev.SampleReady}


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
        self._renew_budget()
        rounds.begin(self.state)
        if evaluate_start:
            self._evaluate(start_version)

    def step(self, *events: ev.Event) -> tuple[ev.Command, ...]:
        """Commits a batch of facts in their order, then decides."""
        for event in events:
            self.commit(event)
        return self.decide()

    def commit(self, event: ev.Event) -> None:
        """One fact of a batch. ImpossibleFact: it cannot be, and nothing has changed."""
        s, kind = self.state, type(event)
        if s.halted:
            return
        if not verdict.counts(s, event):
            s.dropped[kind.__name__] = s.dropped.get(kind.__name__, 0) + 1
            return
        s.due.heard[kind] = s.due.heard.get(kind, 0) + 1
        COMMIT[kind](s, event)  # type: ignore[operator]  # each takes the event that its key names
        if kind is ev.StepPublished and not s.halted:
            self._end_step()

    def decide(self) -> tuple[ev.Command, ...]:
        """What follows from the facts committed since the last decision."""
        s, heard = self.state, self.state.due.heard
        if heard and not s.halted:
            self._decide(heard.keys())
        heard.clear()
        out, s.out = s.out, []
        return tuple(out)

    def counts(self, event: ev.Event) -> bool:
        """Whether `commit` would take this fact in: a body asks before it keeps what came with it. ImpossibleFact."""
        return not self.state.halted and verdict.counts(self.state, event)

    def _decide(self, heard: AbstractSet[type]) -> None:
        s = self.state
        if heard & CHANGES_READY:
            self._take()
        if s.due.pressed:
            rebalancing.relieve_pressed(s)
        balanced = s.due.rebalance and rebalancing.may_rebalance(s)
        if balanced:
            s.due.rebalance = False
            rebalancing.rebalance(s)
        if s.due.versions_to_fill:
            placement.fill_woken(s)
        if s.due.drained:
            rebalancing.consolidate(s)
        if s.due.emptied:
            rebalancing.settle_emptied(s)
        if s.roles.lendable and (balanced or heard & FREES_TRAINER):
            lending.lend(s)
        if not heard <= ENDS_NOTHING:
            self._retire()
            self._halt_if_done()

    # ------------------------------------------------------------------ the ends of a step

    def _take(self) -> None:
        s = self.state
        if s.ledger.base >= s.config.total_steps:
            return
        if s.roles.lent:
            if s.ledger.may_end_step():
                lending.call_back(s)
            return
        batch = s.ledger.take()
        if batch:
            s.out.append(ev.Train(group_ids=batch, base_version=s.ledger.base))
            lending.trainer_takes(s)
            s.count_tasks(batch, -1)
            if s.decisions.over_issued and not s.ledger.missing:
                rounds.end(s)
            s.wake_all()
            s.due.rebalance = True

    def _end_step(self) -> None:
        s = self.state
        lending.trainer_ends(s)
        self._renew_budget()
        rounds.begin(s)
        self._evaluate(s.ledger.base)
        if s.decisions.mixes_versions:
            s.retag_waiting()
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
        assert s.decisions.max_lag is not None  # a mode that evicts has a bound
        oldest = s.ledger.base - s.decisions.max_lag
        for group_id in [g for g, (_, version) in s.ledger.live.items() if version < oldest]:
            s.give_up(group_id, f"its version is more than {s.decisions.max_lag} behind version {s.ledger.base}")

    # ------------------------------------------------------------------ the ends of a version and of the run

    def _retire(self) -> None:
        s = self.state
        if ASKED in s.roles.lent.values():  # an instance is on its way that loads one of the versions
            return
        base, unfinished = s.ledger.base, s.queue.unfinished
        idle = [v for v in s.alive if v < base and v not in unfinished]  # oldest first
        held = s.held if idle and s.asked_s else ()
        for version in [v for v in idle if v not in held]:
            topped_up = s.decisions.admit_at == "batch" and version in s.ledger.outstanding  # it may be
            if not topped_up and version not in s.fleet.promised:
                del s.alive[version]
                s.asked_s.pop(version, None)
                s.superseded_s.pop(version, None)
                s.out.append(ev.Retire(version=version))

    def _halt_if_done(self) -> None:
        s = self.state
        if s.ledger.base < s.config.total_steps or s.evaluating:
            return
        if not any(group.left and not is_served(group.id) for group in s.groups.values()):  # requests are cut off
            s.halt(True, f"version {s.ledger.base} is published and every evaluation due is done")

    # ------------------------------------------------------------------ seen from outside

    def summary(self) -> dict:
        """Live facts for the console."""
        return view.summary(self.state)

    def waiting(self) -> dict[str, str]:
        """What the trainer and the rollout instances wait for now; see view.py."""
        return view.waiting(self.state)

    def resume_state(self) -> dict:
        """Arguments for a new Orchestrator that goes on after a restart from the newest published version: every
        group that was issued and not trained, filtered or failed is issued again."""
        s = self.state
        furthest = max(s.cursors.values())
        skipped = {g for g in range(min(s.cursors.values()), furthest) if g >= s.cursors[s.config.task(g)]}
        evicted = {g + RENEWAL for g, group in s.groups.items() if group.abandoned == "evicted"}
        redo = sorted(set(s.ledger.live) | set(s.redo) | skipped | evicted)
        return {"start_version": s.ledger.base, "next_group_id": furthest, "redo": redo}

    def snapshot(self) -> dict:
        """The whole state as JSON; taken between events."""
        return snapshot.save(self.state)

    @classmethod
    def restore(cls, config: OrchestratorConfig, data: dict) -> Orchestrator:
        """Go on from a snapshot: the same later events give the same later commands."""
        orchestrator = cls(config, evaluate_start=False)
        snapshot.load(orchestrator.state, data)
        return orchestrator
