"""What a user brings by its import path, or by a name that an installed package registers, without a change of the
package."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dora_jax
from dora_jax.config import ConfigError, RolloutSection, TaskSection, TrainerSection
from dora_jax.config.files import load_file
from dora_jax.models import families, hf
from dora_jax.plan import validate
from dora_jax.runtime.observe import monitoring
from dora_jax.trainer import advantage, correction, loss, objective
from tests.fakes.tasks import opened
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
def test_a_run_with_objectives_a_sink_a_family_and_a_source_of_the_users(tmp_path, capsys):
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
        "model.family": f"{OWN}.RENAMED",
        "sft.family": "renamed",
        "task.name": f"{OWN}.Doubles",
        "task.params": {"start": 100},
    }
    config = load_file(str(tmp_path / "config.py"))
    config.update_from_flattened_dict(fields)
    run = dora_jax.fit(config, tmp_path / "run")
    assert run.exit_code == 0
    base = json.loads((tmp_path / "base" / "config.json").read_text())
    assert base["model_type"] == "renamed" and base["n_embd"] == 16 and "hidden_size" not in base
    assert any(" + " in file.read_text() for file in (tmp_path / "run" / "samples").glob("*.jsonl"))
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


@pytest.fixture
def renamed(monkeypatch):
    monkeypatch.setattr(families, "used", {f"{OWN}.RENAMED": None})


def test_a_family_by_its_import_path_reads_the_weights_of_the_one_whose_names_it_changes(tmp_path, renamed):
    """The golden llama under the names of the user's family, and back."""
    golden = Path(__file__).parent / "data" / "golden" / "llama"
    cfg, params = hf.load(golden)
    hf.save(tmp_path / "renamed", dataclasses.replace(cfg, family="renamed"), params, golden)
    written = json.loads((tmp_path / "renamed" / "config.json").read_text())
    assert written["architectures"] == ["RenamedForCausalLM"] and written["n_embd"] == cfg.d_model
    again, read = hf.load(tmp_path / "renamed")
    assert dataclasses.replace(again, family="llama") == cfg
    np.testing.assert_array_equal(read["layers"]["up_proj"], params["layers"]["up_proj"])
    del written["n_embd"]
    (tmp_path / "renamed" / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="config.json has n_embd=None; a whole number"):
        hf.read_config(tmp_path / "renamed")


def test_a_source_by_its_import_path():
    task = opened(TaskSection(name=f"{OWN}.Doubles", params={"start": 5}, template="{prompt}"), heldout=2)
    assert [task.prompt_at(i).text for i in (-1, 0)] == ["5 + 5 =", "7 + 7 ="] and task.prompt_at(0).answer == "14"
    with pytest.raises(ConfigError, match=r"task.params: .*Doubles refuses {'begin': 5}: .*argument 'begin'"):
        opened(TaskSection(name=f"{OWN}.Doubles", params={"begin": 5}))
    with pytest.raises(ConfigError, match="task.name: .*Half has no draw, exclude"):
        opened(TaskSection(name=f"{OWN}.Half"))


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"model.family": f"{OWN}.RENAME"}, f"model.family: {OWN}.RENAME: {OWN} has no RENAME; the nearest is RENAMED"),
        ({"model.family": f"{OWN}.aipo"}, f"model.family: {OWN}.aipo is a function, not a Family"),
        ({"model.family": f"{OWN}.SHIPPED"}, "model.family: a family of model_type 'llama' ships: give yours another"),
        ({"task.name": f"{OWN}.Double"}, f"and {OWN}.Double: {OWN} has no Double; the nearest is Doubles"),
        ({"task.name": "row"}, 'task.name: neither "rows" nor "reasoning_gym:<dataset>", and \'row\' is not an import'),
        (
            {"cluster.launcher": "rai"},
            "cluster.launcher: none of process, ray, and 'rai' is not an import path such as",
        ),
        (
            {"cluster.launcher": "no_such.L"},
            "cluster.launcher: none of process, ray, and no_such.L: there is no module",
        ),
        ({"task.rewards": ("ex",)}, "task.rewards: 'ex' is not an import path such as"),
        ({"environment.name": "calc"}, "environment.name: 'calc' is not an import path such as"),
    ],
)
def test_a_field_that_takes_an_import_path_says_what_it_lacks(tmp_path, monkeypatch, fields, sentence):
    monkeypatch.setattr(families, "used", {})
    (tmp_path / "config.py").write_text(CONFIG.format(base="base"))
    config = load_file(str(tmp_path / "config.py"))
    config.update_from_flattened_dict(fields)
    with pytest.raises(ConfigError) as error:
        validate.read(config)
    assert len(error.value.problems) == 1 and sentence in error.value.problems[0], error.value


REGISTERED = """
[dora_jax.policy_loss]
mine = tests.fakes.plugins:aipo
[dora_jax.correction]
mine = tests.fakes.plugins:near
[dora_jax.reward]
mine = dora_jax.tasks.rewards:exact
[dora_jax.environment]
mine = dora_jax.tasks.environments.calculator:Calculator
[dora_jax.sink]
mine = tests.fakes.plugins:Lines
[dora_jax.family]
renamed = tests.fakes.plugins:RENAMED
[dora_jax.launcher]
mine = tests.fakes.plugins:Announced
[dora_jax.source]
mine = tests.fakes.plugins:Doubles
"""
READ = """
import sys
from dora_jax.config.files import load_file
from dora_jax.models.families import family
from dora_jax.plan import validate
from dora_jax.tasks.environments.environment_worker import resolved
from dora_jax.tasks.rewards import resolve
config = load_file(sys.argv[1])
config.update_from_flattened_dict({
    "task.name": "mine", "task.rewards": ("mine",), "trainer.policy_loss": "mine", "trainer.correction": "mine",
    "environment.name": "mine", "monitor.sinks": ("mine",), "cluster.launcher": "mine", "sft.family": "renamed",
})
validate.read(config)
print(family("renamed").architecture, resolved("mine").__name__, *resolve(("mine",)))
"""


def test_an_installed_package_registers_names(tmp_path):
    """A distribution is a folder NAME.dist-info on the path."""
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(REGISTERED)
    (tmp_path / "config.py").write_text(CONFIG.format(base="base"))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", READ, str(tmp_path / "config.py")]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["RenamedForCausalLM", "Calculator", "mine"]
