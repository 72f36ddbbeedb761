"""bench.learning: the clock without evaluation, differences by lag inside strata, intervals. By hand."""

import json

import numpy as np
import pytest

from dora_jax.bench import learning
from dora_jax.bench.learning import AnsweredGroup, Curve
from dora_jax.config import files
from dora_jax.plan import validate


def test_a_step_beside_an_evaluation_counts_as_its_neighbours():
    took = np.array([1.0, 1.0, 5.0, 3.0, 9.0])
    end = np.cumsum(took)
    quiet = learning.without(end - took, end, took, [(2.0, 6.5), (19.0, 19.0 + 1)])
    np.testing.assert_allclose(quiet, [1.0, 1.0, 2.0, 3.0, 9.0])
    np.testing.assert_allclose(learning.without(end - took, end, took, [(10.5, 11.0)]), [1.0, 1.0, 5.0, 3.0, 3.0])


def test_what_only_the_difficulty_does_vanishes_inside_its_strata():
    """Hard groups (7 terms) pass 2 of 8 and mostly come late, easy ones 6 of 8: lag itself does nothing."""
    groups = [
        AnsweredGroup(version=0, lag=lag, terms=terms, passed=2 if terms == 7 else 6, samples=8)
        for lag, hard in ((0, 1), (1, 3))
        for terms in [7] * hard + [3] * (4 - hard)
    ]
    raw, within, _ = learning.by_lag(groups, lag=1, than=0)
    assert raw == pytest.approx(12 / 32 - 20 / 32)
    assert within == pytest.approx(0.0)


def test_what_the_version_does_vanishes_inside_versions_alone():
    groups = [
        AnsweredGroup(version=v, lag=lag, terms=3, passed=1 + v, samples=8)
        for v in range(4)
        for lag in ([0] * (4 - v) + [1] * (1 + v))
    ]
    raw, within, fixed = learning.by_lag(groups, lag=1, than=0)
    assert raw == within > 0.1 and fixed == pytest.approx(0.0)
    assert np.isnan(learning.by_lag(groups, lag=2, than=0)).all()


def test_interval_by_hand():
    mean, half = learning.interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.3027 / np.sqrt(3), rel=1e-4)  # t of 2 degrees of freedom
    assert np.isnan(learning.interval([1.0])[1])


def test_a_run_in_numbers():
    n = 10
    reward = np.array([0.0] * 4 + [1.0] * 6)
    curve = Curve(
        np.arange(1, n + 1) * 2.0,
        np.arange(1, n + 1) * 1.0,
        reward,
        np.full(n, 0.5),
        np.full(n, 0.01),
        np.full(n, 0.25),
        np.full(n, 0.1),
        np.array([0, 5, 10]),
        np.array([0.2, 0.6, 0.8]),
        [
            AnsweredGroup(0, 0, 3, 1, 8),
            AnsweredGroup(0, 1, 3, 3, 8),
            AnsweredGroup(5, 0, 3, 8, 8),
            AnsweredGroup(9, 0, 3, 0, 8),
        ],
    )
    numbers = learning.figures(curve, seconds=10.0)
    assert numbers["reward"] == pytest.approx(0.6) and numbers["held-out"] == pytest.approx(0.7)
    assert numbers["by version"] == pytest.approx(np.mean(np.linspace(0.25, 1.0, 6)))  # versions 0 to 5 of 10 - 4
    assert numbers["s to learn"] == 9.0  # steps 5 to 9 are the first five of reward 1
    assert numbers["ms/step"] == pytest.approx(1000.0) and numbers["s in all"] == 20.0
    assert numbers["held-out/s"] == pytest.approx(np.mean([0.4, 0.7]), abs=1e-3)
    assert numbers["gap"] == pytest.approx(0.01) and not numbers["collapsed"]
    fallen = curve._replace(heldout=np.array([0.2, 0.8, 0.5]))
    assert learning.figures(fallen, seconds=10.0)["collapsed"]


def test_steps_by_the_lag_of_their_youngest_group():
    step = {
        "reward/mean": 0.5,
        "trainer/clip_fraction": 0.0,
        "trainer/ess_share": 1.0,
        "trainer/ratio_max": 1.0,
        "trainer/grad_norm": 0.1,
        "lag/max": 3,
        "lag/mean": 1.0,
        "lag/2": 0.25,
    }
    records = [
        {"eval/accuracy": 1.0},
        step | {"lag/3": 0.75},
        step | {"lag/0": 0.75, "mismatch/mean": 0.0},
        step | {"lag/3": 0.75, "reward/mean": 0.7},
    ]
    lines = [line.split() for line in learning.youngest_table({"dora": records}).splitlines()[1:]]
    assert [line[:4] for line in lines] == [["dora", "0", "33.3%", "0.5000"], ["dora", "2", "66.7%", "0.6000"]]
    assert [line[-1] for line in lines] == ["100%", "0%"]


def test_a_mode_names_its_settings():
    assert learning.settings_of("sync", 0.1) == {"orchestrator.mode": "sync", "orchestrator.max_versions": 3}
    lora = learning.settings_of("dora5-lora8", 0.1)
    assert lora["orchestrator.max_versions"] == 5 and (lora["lora.rank"], lora["lora.alpha"]) == (8, 16.0)
    assert lora["trainer.learning_rate"] == 0.1
    wide = learning.settings_of("dora6-s3-tis", 0.1)
    assert wide["orchestrator.stride"] == 3 and wide["trainer.correction"] == "tis" and "lora.rank" not in wide
    with pytest.raises(SystemExit, match="dora3-lora is no mode"):
        learning.settings_of("dora3-lora", 0.1)


@pytest.mark.parametrize("mode", [*learning.MODES, "partial-tis", "dora4-s2", "dora6-s3-tis", "dora3-lora16"])
def test_a_mode_is_one_that_a_run_takes(mode):
    config, settings = files.load_file("configs/quickstart.py"), learning.settings_of(mode, 0.1)
    config.update_from_flattened_dict(settings)
    assert validate.from_config_dict(config, "train").orchestrator.mode == settings["orchestrator.mode"]


def test_a_real_model_has_a_row_for_each_mode_and_seed(tmp_path, monkeypatch):
    """Read from what a run leaves; the second has a greater lag."""
    made = []

    def trained(folder, name, config, fields, read):
        made.append((folder.name, fields["orchestrator.mode"], fields["seed"]))
        folder.mkdir()
        steps = [
            {"eval/accuracy": 0.1},
            *[{"lag/mean": len(made), "trainer/kl_anchor": 0.002}] * 2,
            {"eval/accuracy": 0.5},
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
        return read(7.0)

    monkeypatch.setattr(learning.harness, "smollm_folder", lambda: tmp_path)
    monkeypatch.setattr(learning.harness, "trained", trained)
    head, *rows = learning.real_model(seeds=(4,), modes=("sync", "dora6-s3"), workdir=tmp_path)
    assert made == [("sync-seed4", "sync", 4), ("dora6-s3-seed4", "dora", 4)]
    assert head.split()[-4:] == ["gain", "lag", "gap", "seconds"]
    assert [row.split()[-4:] for row in rows] == [["+40.0", f"{lag}.00", "0.00200", "7"] for lag in (1, 2)]
