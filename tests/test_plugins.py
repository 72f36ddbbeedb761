"""What a user brings by its import path: a policy loss, an advantage, a correction and a metric sink, without a change
of the package."""

import dataclasses
import json

import numpy as np
import pytest

import dora_jax
from dora_jax.config import ConfigError, RolloutSection, TrainerSection
from dora_jax.config.files import load_file
from dora_jax.runtime.observe import monitoring
from dora_jax.trainer import advantage, correction, loss, objective
from tests.fakes.tiny_run import CONFIG

OWN = "tests.fakes.plugins"
L, ANCHOR, BEHAVIOR = (np.log(np.array([[x, 0.5, 0.2]], np.float32)) for x in (0.9, 0.6, 0.3))
ADV, MASK = np.array([[1.0, -2.0, 3.0]], np.float32), np.array([[True, True, False]])


def check(**fields):
    return objective.check(TrainerSection(**fields), RolloutSection())


def test_a_policy_loss_by_its_import_path():
    got = loss.policy_loss(f"{OWN}.aipo", L, ANCHOR, ADV, MASK, behavior_logprobs=BEHAVIOR, rho=1.5)
    want = -np.minimum(np.exp(L - BEHAVIOR), 1.5) * ADV * L
    np.testing.assert_allclose(got, np.where(MASK, want, 0), rtol=1e-6)
    assert check(policy_loss=f"{OWN}.aipo", loss_params={"rho": 3.0}) == []
    assert check(policy_loss=f"{OWN}.aipo", loss_params={"rh": 3.0}) == [
        f"trainer.loss_params: rh not known to '{OWN}.aipo', which takes rho"
    ]


def test_a_correction_by_its_import_path():
    w, keep, metrics = correction.weights(f"{OWN}.near", L, BEHAVIOR, MASK, most=0.5)
    assert keep.tolist() == [[False, True, False]] and np.all(w == 1) and metrics["rejected_share"] == 0.5
    assert check(correction=f"{OWN}.near", correction_params={"most": 1.0}) == []


def test_an_advantage_by_its_import_path():
    @dataclasses.dataclass
    class Sequences:
        rewards = np.array([1.0, 0.0, 2.0, 0.0])
        group_ids = np.array([0, 0, 1, 1])
        mask = np.ones((4, 3), bool)
        lengths = np.array([3, 3, 3, 0])
        truncated = np.zeros(4, bool)

    section = TrainerSection(advantage=f"{OWN}.centred")
    assert advantage.Prepare(section, 3).estimate(Sequences()).advantages.tolist() == [0.5, -0.5, 1.0, 0.0]
    assert check(advantage=f"{OWN}.centred") == []
    assert not objective.may_start_early(dataclasses.replace(section, updates=2)), "it may look at the whole step"
    with pytest.raises(ValueError, match=r"trainer.advantage: .*flat returned an array of shape \(3,\) for 4 traj"):
        advantage.Prepare(TrainerSection(advantage=f"{OWN}.flat"), 3).estimate(Sequences())


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"policy_loss": "aipo"}, "trainer.policy_loss='aipo' is unknown: known are ppo, "),
        ({"policy_loss": f"{OWN}.aip"}, f"trainer.policy_loss: {OWN}.aip: {OWN} has no aip; the nearest is aipo"),
        ({"advantage": "no_such.module"}, "trainer.advantage: no_such.module: there is no module no_such"),
        (
            {"advantage": f"{OWN}.wrong"},
            f"trainer.advantage: {OWN}.wrong takes 1 arguments by position, not 2 (rewards",
        ),
        ({"correction": f"{OWN}.OWN_NUMBER"}, f"trainer.correction: {OWN}.OWN_NUMBER: {OWN} has no OWN_NUMBER"),
        (
            {"policy_loss": f"{OWN}.aipo", "skip_zero_advantage": True},
            "trainer.skip_zero_advantage: a sample of no advantage still counts",
        ),
    ],
)
def test_what_cannot_be_used_is_named(fields, sentence):
    assert check(**fields)[0].startswith(sentence)


@pytest.mark.slow
def test_a_run_with_a_loss_an_advantage_a_correction_and_a_sink_of_the_users(tmp_path, capsys):
    (tmp_path / "config.py").write_text(CONFIG.format(base=str(tmp_path / "base")))
    fields = {
        "steps": 1,
        "cluster.launcher": "",
        "cluster.trainer_hosts": 1,
        "cluster.devices_per_host": 0,
        "trainer.policy_loss": f"{OWN}.aipo",
        "trainer.advantage": f"{OWN}.centred",
        "trainer.correction": f"{OWN}.near",
        "monitor.sinks": (f"{OWN}.Lines", f"{OWN}.Raises"),
    }
    config = load_file(str(tmp_path / "config.py"))
    config.update_from_flattened_dict(fields)
    run = dora_jax.fit(config, tmp_path / "run")
    assert run.exit_code == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "own.jsonl").read_text().splitlines()]
    recorded = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [row["step"] for row in recorded]
    assert "monitor.sinks: tests.fakes.plugins.Raises.write raised OSError: no room; it gets nothing more" in (
        capsys.readouterr().err
    )


def test_a_sink_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"monitor.sinks: .*plugins has no Line; the nearest is Lines"):
        monitoring.UserSink("tests.fakes.plugins.Line", None, tmp_path)
    with pytest.raises(ConfigError, match=r"monitor.sinks: .*Writes has no status, close"):
        monitoring.UserSink(f"{OWN}.Writes", None, tmp_path)


def test_a_sink_gets_samples_where_it_has_a_method_for_them(tmp_path, capsys):
    for name in ("Lines", "Reads"):
        sink = monitoring.UserSink(f"{OWN}.{name}", None, tmp_path)
        sink.samples(3, "heldout", [{"text": "4"}])
        sink.close()
    (line,) = (tmp_path / "own.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 3, "kind": "heldout", "rows": [{"text": "4"}]} and not capsys.readouterr().err
