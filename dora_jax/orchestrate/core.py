"""The orchestrator: a batch of events in, the commands that follow from it out.

Consumes the facts of `events.py` and produces requests. No clock, no I/O, no randomness: the same configuration and
batches of events give the same commands. A batch is what came in together; its facts are committed one by one, and the
decisions are made once. A batch of one is as good as any other, only dearer.

    commit, of each fact:   does it count? -> what it changes (transitions.py) -> [end of a step]
    decide, of each batch:  take -> relieve instances that run out of pages -> rebalance, if triggered (balance.py)
                            -> fill free slots (placement.py) -> give emptied instances their next weights
                            -> lend the chips of a trainer that waits (lending.py) -> retire versions -> halt

Laws: a command reserves, the event that answers it commits. Every sample of which SampleStarted counted ends in exactly
one SampleDone or SampleCancelled, however often it begins again. Every group of training and evaluation ends once,
behind its samples: by Train, by GroupScored(trainable=False), or by Discard, where it failed or was given up; a request
ends by its SampleDone or by Discard. Nothing is retained of a group that has ended and is not in training. Every prompt
that was issued ends before the run does: new ones never take the place of those that were given up.
Triggers of a rebalance: a step's end, a batch taken, an instance that comes or goes, KV pressure, a period; triggers of
a large fleet share one (balance.py). Moves alone are planned again whenever enough slots of a draining version have
come free.
What the body owes: a Move answers each id with SampleMoved or MoveFailed (or SampleDone by the source), even if an
end dies; MoveFailed means that the sample runs at the source again, or that its tokens are recorded if the source is
down. A Cancel is answered for each id with SampleCancelled unless it had ended, whether or not it had begun; with
instance None it is answered at once, and recorded tokens go. A Discard has no answer. What is reported of a sample
names the attempt that placed it (events.py). A group that is given up, by mode `evict` or because an instance in
quarantine sampled a part of it (quarantine.py), is issued again under a new group id.

`run` is the one loop, of production, tests and simulation:

    world.events() --a batch of facts--> orchestrator.commit each, then decide --requests--> world.execute
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from dora_jax.orchestrate import balance, ledger, lending, placement, snapshot, transitions, view
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.events import Command, Event, Halt
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.orchestrate.state import ASKED, State
from dora_jax.orchestrate.transitions import CHANGES_READY, ENDS_NOTHING, FACTS, FREES_TRAINER
from dora_jax.types import RENEWAL, GroupId, Version, is_served


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
        self._begin_step(evaluate=evaluate_start)

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
        counts, change = FACTS[kind]
        if not counts(s, event):
            s.dropped[kind.__name__] = s.dropped.get(kind.__name__, 0) + 1
            return
        s.due.received[kind] = s.due.received.get(kind, 0) + 1
        change(s, event)
        if kind is ev.StepPublished and not s.halted:
            s.roles.trained = 0
            if s.config.colocated:  # the batch is published: colocated instances go on
                s.out += [ev.Unpause(instance=id) for id in s.fleet.instances]
            self._begin_step()
            if s.decisions.mixes_versions:
                s.retag_waiting()
            elif s.decisions.on_publish == "evict":
                # Groups that no step may take any more are given up, their prompts issued again
                assert s.decisions.max_lag is not None  # a mode that evicts has a bound
                reason = f"its version is more than {s.decisions.max_lag} behind version {s.ledger.base}"
                oldest = s.ledger.base - s.decisions.max_lag
                for group_id in [g for g, (_, version) in s.ledger.live.items() if version < oldest]:
                    s.give_up(group_id, reason)
            s.wake_all()

    def decide(self) -> tuple[ev.Command, ...]:
        """What follows from the facts committed since the last decision."""
        s, received = self.state, self.state.due.received
        if received and not s.halted:
            if received.keys() & CHANGES_READY:
                self._take()
            if s.due.pressed:
                balance.relieve_pressed(s)
            least_s = balance.REBALANCE_S * (len(s.fleet.instances) - balance.FREE_INSTANCES)
            balanced = s.due.rebalance and s.now_s - s.rebalanced_s >= least_s
            if balanced:
                s.due.rebalance = False
                balance.rebalance(s)
            elif s.fleet.outdated:
                balance.swap(s)
            if s.due.versions_to_fill:
                placement.fill_woken(s)
            if s.due.drained:
                balance.consolidate(s)
            if s.due.emptied:
                balance.settle_emptied(s)
            if s.roles.lendable and (balanced or received.keys() & FREES_TRAINER):
                lending.lend(s)
            if not received.keys() <= ENDS_NOTHING:
                self._retire()
                over = s.ledger.base >= s.config.total_steps and not s.evaluating
                if over and not any(group.left and not is_served(group.id) for group in s.groups.values()):
                    # requests are cut off
                    s.halt(True, f"version {s.ledger.base} is published and every evaluation due is done")
        received.clear()
        out, s.out = s.out, []
        return tuple(out)

    def counts(self, event: ev.Event) -> bool:
        """Whether `commit` would take this fact in: a body asks before it keeps what came with it. ImpossibleFact."""
        return not self.state.halted and transitions.counts(self.state, event)

    # ------------------------------------------------------------------ the ends of a step

    def _take(self) -> None:
        s = self.state
        if s.ledger.base >= s.config.total_steps:
            return
        if s.roles.lent:
            members = s.ledger.oldest_ready(s.ledger.missing)
            if members and s.ledger.may_take(members):  # all groups that the step lacks
                lending.call_back(s)
            return
        batch = s.ledger.take()
        if batch:
            s.out.append(ev.Train(group_ids=batch, base_version=s.ledger.base))
            s.strides.took_s, s.strides.took = s.now_s, len(batch)
            if s.paused:  # a whole batch is with the trainer: colocated instances stand still
                s.out += [ev.Pause(instance=id) for id in s.fleet.instances]
            s.count_tasks(batch, -1)
            if s.decisions.over_issued and not s.ledger.missing:
                placement.end_round(s)
            s.wake_all()
            s.due.rebalance = True

    def _begin_step(self, evaluate: bool = True) -> None:
        s, version = self.state, self.state.ledger.base
        if s.decisions.admit_on == "publish":
            in_flight = s.queue.training_unfinished
            s.budget = ledger.publish_budget(s.decisions, s.config.group_size, in_flight)
        placement.begin_round(s)
        if evaluate and s.config.evaluation_due(version):
            s.evaluating[version] = s.config.eval_groups
            for group_id in s.config.evaluation_ids(version):
                s.open_group(group_id, version)

    # ------------------------------------------------------------------ the end of a version

    def _retire(self) -> None:
        s = self.state
        if ASKED in s.roles.lent.values():  # an instance is on its way that loads one of the versions
            return
        base, unfinished = s.ledger.base, s.queue.unfinished
        idle = [v for v in s.alive if v < base and v not in unfinished and v != s.ledger.taken]  # oldest first
        held = s.held if idle and s.asked_s else ()
        for version in [v for v in idle if v not in held]:
            topped_up = s.decisions.admit_at == "batch" and version in s.ledger.outstanding  # it may be
            if not topped_up and version not in s.fleet.promised:
                del s.alive[version]
                s.asked_s.pop(version, None)
                s.superseded_s.pop(version, None)
                s.out.append(ev.Retire(version=version))

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


YOUNG_OBJECTS = 50_000  # that come, beyond those that go, before the collector looks at them; most are gone by then
MIDDLE_PASSES = 1_000  # of those, before it looks again at what they left: seconds of work beside a million samples
FULL_PASSES = 1_000_000  # in practice none

Observer = Callable[[Sequence[Event], Sequence[Command]], None]


class World(Protocol):
    """Where commands become work and work becomes events."""

    def events(self) -> Iterable[Event]:
        """One batch: the facts since the last call; may wait a little, may be empty, raises what a stage raised. Each
        fact is committed before the next one is asked for; the decisions follow when there are no more."""

    def execute(self, command: Command) -> None:
        """Begin the work; its outcome is a later event."""


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """What is there now is never looked at by the cycle collector, and what comes is looked at once in many
    allocations.

    A full pass over a million live samples takes a second, and the orchestrator leaves no cycles behind (a test holds
    that); those of other stages are young when they are collected."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, MIDDLE_PASSES, FULL_PASSES)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def run(orchestrator: Orchestrator, world: World, observers: Sequence[Observer] = ()) -> Halt:
    """Run until the orchestrator halts.

    Observers see each batch with the commands it caused *before* those are executed: after
    `StepPublished` the trainer is still idle, so its state can be saved there without a race.
    """
    while True:
        events = []
        for event in world.events():
            orchestrator.commit(event)
            events.append(event)
        commands = orchestrator.decide()
        for observe in observers if events else ():
            observe(events, commands)
        for command in commands:
            if isinstance(command, Halt):
                return command
            world.execute(command)


def each(observe: Callable[[Event, Sequence[Command]], None]) -> Observer:
    """An observer of facts one by one: the last of a batch comes with the commands that the batch caused."""

    def observe_batch(events: Sequence[Event], commands: Sequence[Command]) -> None:
        for event in events[:-1]:
            observe(event, ())
        for event in events[-1:]:
            observe(event, commands)

    return observe_batch
