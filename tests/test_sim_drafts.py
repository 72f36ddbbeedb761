"""Drafts in the simulator: tokens of few rows come sooner, by the share of guesses that hold; many rows are as they
were."""

import pytest

from dora_jax.config import ConfigError
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.sim import config, run
from dora_jax.sim.drafts import DecodeTimes, DraftSection
from dora_jax.sim.run import simulate
from dora_jax.sim.world import SimWorld
from tests.fakes import sim_runs


class Steps:
    """A decode step takes 10 ms, and 1 ms more for each row beyond 8."""

    def decode_base_s(self, batch):
        return 0.010 + 0.001 * max(0, batch - 8)


def test_a_call_verifies_as_many_tokens_as_pay():
    one, reads = DecodeTimes(Steps(), DraftSection(tokens=7, acceptance=0.5)).token(1)
    drawn = 2 - 0.5**7
    assert (one, reads) == (pytest.approx(0.010 / drawn), pytest.approx(1 / drawn))  # 8 rows' worth costs no more
    four, _ = DecodeTimes(Steps(), DraftSection(tokens=7, acceptance=0.5)).token(4)
    assert four == pytest.approx(0.010 / 1.5)  # k = 1: 4 x 2 rows
    assert DecodeTimes(Steps(), DraftSection(tokens=7, acceptance=0.0)).token(4) == (0.010, 1.0)
    assert DecodeTimes(Steps(), DraftSection(tokens=7, rows=4, acceptance=0.9)).token(5) == (0.010, 1.0)
    assert DecodeTimes(Steps(), DraftSection()).token(1) == (0.010, 1.0)
    given = DecodeTimes(Steps(), DraftSection(tokens=1, acceptance=0.5, cost=1.2)).token(1)
    assert given == (pytest.approx(0.012 / 1.5), pytest.approx(1 / 1.5))


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"acceptance": 1.5}, {"cost": -1.0}])
def test_what_cannot_be_is_refused(wrong):
    c = config.defaults()
    c.draft.update(wrong)
    with pytest.raises(ConfigError, match="draft: .* an acceptance that is no share"):
        config.from_config_dict(c)


def test_a_tail_of_few_samples_is_over_sooner():
    c = config.defaults()
    c.steps, c.warmup_steps = 3, 1
    c.hardware.chips, c.hardware.rollout_chips, c.hardware.tensor = 8, 4, 4
    c.workload.mean_tokens, c.workload.max_new_tokens = 400.0, 4000
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 2, 4
    took = []
    for tokens in (0, 7):
        c.draft.tokens = tokens
        (row,) = [row for row in config.rows(config.from_config_dict(c)) if row.mode == "dora"]
        took.append(simulate(row).step_s)
    assert took[1] < 0.8 * took[0]


def test_a_run_learns_what_the_model_says():
    """Within a tenth, at every number of rows that drafts were tried with; decode calls of few rows are never seen."""
    row = sim_runs.row("dora", draft__tokens=3, draft__rows=8, draft__acceptance=0.8, draft__cost=1.5)
    policy = run.orchestrator_config(row.config, row.mode)
    brain = Orchestrator(policy, evaluate_start=False)
    world = SimWorld(row.config, policy.decisions, until=5)
    with pytest.raises(run.EndOfMeasurement):
        run.run(brain, world)
    learned, times = brain.state.fleet.measured.drafts, DecodeTimes(world.costs, row.config.draft)
    for rows in (1, 2, 4, 8):
        assert learned.gain(rows) == pytest.approx(world.costs.decode_base_s(rows) / times.token(rows)[0], rel=0.1)
    assert learned.gain(1) > 1.8 and learned.gain(9) == 1.0
    assert learned.acceptance == pytest.approx(0.8, abs=0.01)
