"""The public step-time ladder of a DAPO run on TPU7x, from chip constants."""

import pytest

from dora_jax.config.files import load_file
from dora_jax.costs import open_costs
from dora_jax.sim import config, run

POINTS = 0.10
STEP_S = (616, 369, 327, 299)
DECODE, TRAIN, SET_UP = 0.64, 0.24, 0.12  # of the last step


@pytest.mark.slow
def test_the_ladder_and_the_shares_of_its_last_step_come_out_within_ten_points():
    rows = config.rows(config.from_config_dict(load_file("sim/ladder")))
    results = [run.simulate(row) for row in rows]
    first, last = results[0], results[-1]
    for result, step_s in zip(results, STEP_S, strict=True):
        assert result.step_s / first.step_s == pytest.approx(step_s / STEP_S[0], abs=POINTS)
    cost = rows[-1].config.cost
    load_s = open_costs(rows[-1].config.model, rows[-1].config.hardware, cost).load_s()
    set_up = (load_s + cost.score_s + cost.publish_s) / last.step_s
    assert set_up == pytest.approx(SET_UP, abs=POINTS)
    assert last.trainer["train"] == pytest.approx(TRAIN, abs=POINTS)
    assert 1 - last.trainer["train"] - set_up == pytest.approx(DECODE, abs=POINTS)
    assert last.rollout["decode"] == pytest.approx(DECODE, abs=POINTS)  # of an average instance
