"""The published table: every configuration file loads, and the fit stands where paper.py says it does."""

import importlib.util
import pathlib

import pytest

from dora_jax.sim import config, paper, run

FILES = sorted((pathlib.Path(__file__).resolve().parent.parent / "configs" / "sim").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_configuration_file_is_valid(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert config.rows(config.from_config_dict(module.get_config()))
    assert f"--config=configs/sim/{path.name}" in path.read_text().splitlines()[0]


def test_rows_are_fed_the_tokens_that_the_paper_trained_on():
    for chips in (64, 128):
        for row in config.rows(config.from_config_dict(paper.published(chips))):
            if row.published:
                published = row.published["tokens_per_s"] * row.published["step_min"] * 60
                tokens = (row.config.workload.mean_tokens + paper.PROMPT_TOKENS) * paper.SAMPLES
                assert tokens == pytest.approx(published, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("chips", [64, 128])
def test_the_table_of_one_size(chips):
    """One table for all that is asserted of it: its rows take a minute."""
    rows = config.rows(config.from_config_dict(paper.published(chips)))
    table = {row.mode: (run.simulate(row), row.published) for row in rows}  # "dora" is ours
    seven_of_eight_rows_land_on_the_published_figures(chips, table)
    the_modes_come_in_the_published_order(chips, table)
    ours_beats_the_published_protocol_on_the_same_work(table)


# Rows that no set of the four parameters brings within 10 % of the step time or 5 points of the share (paper.py says
# why).
STEP_BEYOND = {(128, "one_step"): 0.15}
SHARE_BEYOND = {(64, "one_step"): 0.06, (128, "partial"): 0.06}


def seven_of_eight_rows_land_on_the_published_figures(chips, table):
    """Both sizes together have eight rows; the rollout-only share of the eighth, the misfit, is held too."""
    off = {(chips, mode): r.step_s / 60 / p["step_min"] - 1 for mode, (r, p) in table.items() if p}
    assert len(off) == 4
    misfit = {key for key in paper.MISFIT if key[0] == chips}
    assert {key for key, value in off.items() if abs(value) > STEP_BEYOND.get(key, 0.10)} == misfit, off
    for mode, (result, published) in table.items():
        if published:
            limit = SHARE_BEYOND.get((chips, mode), 0.05)
            assert result.rollout_only == pytest.approx(published["rollout_only"], abs=limit), mode


def the_modes_come_in_the_published_order(chips, table):
    tokens_per_s = {mode: result.tokens_per_s for mode, (result, _) in table.items()}
    assert tokens_per_s["sync"] < tokens_per_s["one_step"] < tokens_per_s["partial"] < tokens_per_s["dora_paper"]
    published = paper.PUBLISHED[chips, "dora_paper"][2] / paper.PUBLISHED[chips, "sync"][2]
    assert tokens_per_s["dora_paper"] / tokens_per_s["sync"] == pytest.approx(published, rel=0.08)


def ours_beats_the_published_protocol_on_the_same_work(table):
    ours, theirs = table["dora"][0], table["dora_paper"][0]
    assert ours.step_s < 0.9 * theirs.step_s and ours.rollout_only < theirs.rollout_only / 2
    assert max(ours.lags) <= 2
