"""The orchestrator learns from reports what drafts are worth to few rows, and decides by it."""

import dataclasses
import json
import math

import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.lending import expected_wait
from dora_jax.orchestrate.measured import KNOWN_TOKENS, DraftGain
from dora_jax.orchestrate.modes import OrchestratorConfig
from tests.fakes.older_snapshots import before_drafts

CONFIG = OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=4, max_prompt_tokens=16, inflight=2.0,
                            max_new_tokens=1 << 15)  # fmt: skip
UP = {"slots": 8, "pages": 1 << 16, "page_size": 16}
PLAIN, FEW = 4 * (8, 12, 24), 4 * (2, 8)  # rows of reports without drafts, and with drafts
STEP_S, TOKENS = 0.01, 100  # of each row in a report


def test_a_number_of_rows_gains_as_much_as_the_next_greater_one_that_was_seen():
    drafts = DraftGain()
    assert drafts.gain(1) == 1.0 and drafts.acceptance == 0.0
    drafts.drafted(rows=3.5, tokens=KNOWN_TOKENS, plain_s=6.0, took_s=2.0)
    drafts.drafted(rows=6.0, tokens=KNOWN_TOKENS, plain_s=3.0, took_s=2.0)
    drafts.drafted(rows=1.0, tokens=KNOWN_TOKENS - 1, plain_s=100.0, took_s=1.0)  # too few to believe
    assert [drafts.gain(rows) for rows in (1, 3, 4, 5, 8)] == [3.0, 3.0, 3.0, 1.5, 1.5]
    assert [drafts.gain(rows) for rows in (9, 1000, math.inf)] == [1.0] * 3
    drafts.drafted(rows=1e9, tokens=10**6, plain_s=9.0, took_s=1.0)
    assert drafts.gain(1e9) == 1.0 and drafts.saved_s == 4.0 + 1.0 + 99.0


def test_ticks_without_drafts_lessen_what_rows_gain_that_had_them():
    drafts = DraftGain()
    drafts.decoded(rows=4, took_s=5.0)
    drafts.drafted(rows=4, tokens=KNOWN_TOKENS, plain_s=4.0, took_s=2.0)
    drafts.decoded(rows=4, took_s=2.0)
    assert drafts.gain(4) == pytest.approx(6.0 / 4.0, rel=0.02)


def report(rows, gain=1.0):
    """An instance decoded so many rows, which cost no more than one."""
    busy_s = TOKENS * STEP_S / gain
    took = {"sampled": rows * TOKENS, "busy_s": busy_s, "row_s": rows * busy_s}
    drafted = {"drafted": ev.Drafted(**took, guesses=400, held=300)} if gain != 1.0 else took
    return ev.InstanceReported(instance=0, free=UP["pages"] - 100, **drafted)


def learned(gain, config=CONFIG):
    """An orchestrator with 8 samples on one instance, of which few rows gain so much by drafts. One sample has ended,
    whose tokens took as long as those of the reports."""
    brain = Orchestrator(config, evaluate_start=False)
    commands = brain.step(ev.InstanceUp(instance=0, versions=(0,), **UP))
    ids = [id for command in commands if isinstance(command, ev.Start) for id in command.ids]
    brain.step(*(ev.SampleStarted(id=id, instance=0, version=0) for id in ids))
    brain.step(*map(report, PLAIN), *(report(rows, gain) for rows in FEW))
    took_s = (sum(PLAIN) + sum(FEW) / gain) * TOKENS * STEP_S
    brain.step(ev.TimePassed(now_s=took_s))
    brain.step(ev.SampleDone(id=ids.pop(), instance=0, tokens=(sum(PLAIN) + sum(FEW)) * TOKENS, finish="stop"))
    return brain


def test_speed_and_acceptance_are_learned_from_reports():
    drafts = learned(2.5).state.fleet.measured.drafts
    assert drafts.gain(1) == pytest.approx(2.5, rel=0.05) and drafts.gain(9) == 1.0
    assert drafts.acceptance == pytest.approx(0.75)
    facts = learned(2.5).summary()["metrics"]
    assert facts == {"drafts/acceptance": drafts.acceptance, "drafts/gain": drafts.gain(1)}
    assert not learned(1.0).summary()["metrics"]


def test_what_is_left_of_few_samples_is_expected_sooner():
    """What drafts have saved so far is no part of a token's time without them."""
    plain, sooner = learned(1.0).state, learned(2.5).state
    for state in (plain, sooner):
        assert state.fleet.measured.token_s() == pytest.approx(STEP_S, rel=0.02)
    assert expected_wait(sooner).seconds == pytest.approx(expected_wait(plain).seconds / 2.5, rel=0.05)


@pytest.mark.parametrize(("gain", "lent"), [(1.0, [1]), (2.5, [])])
def test_chips_are_not_lent_for_a_wait_that_drafts_make_short(gain, lent):
    brain = learned(gain, dataclasses.replace(CONFIG, lendable=(1,), switch_s=0.0))
    brain.state.roles.back_s = 0.2 * expected_wait(learned(1.0).state).seconds
    commands = brain.step(ev.TimePassed(now_s=1000.0))
    assert [command.instance for command in commands if isinstance(command, ev.Lend)] == lent


def test_a_snapshot_knows_what_drafts_are_worth_and_an_older_one_is_read():
    data = json.loads(json.dumps(learned(2.5).snapshot()))
    again = Orchestrator.restore(CONFIG, data)
    assert json.loads(json.dumps(again.snapshot())) == data and again.state.fleet.measured.drafts.gain(1) > 2
    older = Orchestrator.restore(CONFIG, before_drafts(data))
    assert older.state.fleet.measured.drafts.gain(1) == 1.0
    assert older.state.fleet.measured.line.weights == again.state.fleet.measured.line.weights
