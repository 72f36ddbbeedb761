"""A replay holds what the run held: also where a sample was cancelled, and of a sample whose moves have failed."""

import json
import types

import numpy as np

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.journal import journal_audit
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journaled_world import JournaledWorld
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.records import Fact, Partial, Published
from dora_jax.runtime.journal.recovery import replay
from dora_jax.types import SampleId, ScoredGroup
from tests.fakes.journal_world import History
from tests.fakes.orchestrator_by_hand import A, begin, make, ready
from tests.fakes.orchestrator_shape import Shape

ROLLPACKER = OrchestratorConfig(
    mode="rollpacker", groups_per_step=2, group_size=2, total_steps=4, max_versions=1, inflight=2.0
)


def test_the_tokens_of_a_cancelled_sample_are_forgotten():
    id, state, payloads = SampleId(1, 0), types.SimpleNamespace(unit=lambda id: object()), PayloadState()
    grown = Partial(id=id, version=0, start=0, out_ids=np.arange(3, dtype=np.int32), logprobs=np.zeros(3, np.float32))
    payloads.apply(grown, state)
    assert len(payloads.tokens(id)[0]) == 3
    payloads.apply(Fact(event=ev.SampleCancelled(id=id, reason="cancelled"), payload=None), state)
    assert not payloads.partial and len(payloads.tokens(id)[0]) == 0


def test_a_replay_follows_samples_that_were_cancelled():
    """Killed right after each of them: the replay gives the orchestrator that was killed."""
    whole, _ = killed_at(None)
    journal = EventLog(whole.disk)
    received = [fact.event for n in journal.segments() for fact in journal_audit.facts(journal.read(n).records)]
    cancelled = [i for i, event in enumerate(received, start=1) if isinstance(event, ev.SampleCancelled)]
    assert cancelled
    for kill in cancelled:
        history, brain = killed_at(kill)
        journal = EventLog(history.disk)
        end = replay(journal, journal.segments()[-1:], history.notes.append)
        assert json.dumps(end.orchestrator.snapshot()) == json.dumps(brain.snapshot()) and not history.notes


def killed_at(kill):
    """(a run in which samples are cancelled, killed at this fact; its orchestrator)"""
    history, brains = History(ROLLPACKER, Shape(instances=((3, 1.0, 1), (2, 0.5, 1)), seed=1), every=9), []
    arm = history.arm
    history.arm = lambda body, *rest: (brains.append(body.brain), arm(body, *rest))
    assert (history.live(kill_fact=kill) is None) == (kill is not None)
    return history, brains[0]


def test_a_snapshot_holds_all_of_a_sample():
    """Also what only a move that fails later reads."""
    brain = make()
    ready(brain)
    begin(brain, A)
    held = {
        "attempt": 3,
        "began_s": 1.5,
        "failed_moves": 2,
        "home": 7,
        "moved_s": 2.5,
        "ran": ((0, 0), (4, 1)),
        "restarts": True,
    }
    held |= {"placed": 6, "started": True, "tokens": 5, "waits_s": 3.5}
    for name, value in held.items():
        setattr(brain.state.unit(A), name, value)
    again = Orchestrator.restore(brain.state.config, json.loads(json.dumps(brain.snapshot())))
    unit = again.state.unit(A)
    assert {name: getattr(unit, name) for name in held} == held
    same = ("dst", "dst_pages", "id", "instance", "pages", "state", "version")
    assert {*held, *same, "group"} == set(unit.__slots__), "an attribute more: what does it need?"
    assert all(getattr(unit, name) == getattr(brain.state.unit(A), name) for name in same)


def test_a_group_that_was_trained_is_forgotten():
    payloads = PayloadState()
    for group_id in (4, 5):
        payloads.scored[group_id] = ScoredGroup(
            group_id=group_id, version=0, samples=(), rewards=np.zeros(0, np.float32), parts={}
        )
    state = types.SimpleNamespace(ledger=types.SimpleNamespace(batch=(4,)))
    fact = Fact(event=ev.StepPublished(version=1), payload=Published(epoch=0, digest=7))
    step = payloads.apply(fact, state)
    assert [group.group_id for group in step.groups] == [4]
    assert list(payloads.scored) == [5], "a restart would have it ready once more"


def test_a_fact_is_in_the_journal_before_the_orchestrator_has_it(tmp_path):
    brain = make()
    ready(brain)
    begin(brain, A)
    facts = [ev.GroupFailed(group_id=0, reason="?")]
    world = types.SimpleNamespace(listen=lambda listener: None, events=lambda: iter(facts))
    journal = EventLog(FileLogStore(tmp_path), sync_s=100.0)
    durable = JournaledWorld(world, journal, brain, PayloadState())
    assert next(durable.events()) == facts[0]
    assert b"GroupFailed" in journal.read(1).records[-1]
    journal.close()
