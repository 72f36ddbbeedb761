"""dora_jax.fit and load_policy: what a script says becomes a run's configuration, and what came of it comes back."""

import datetime
import functools
import inspect
import json
import pkgutil
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow
import pytest

import dora_jax
from dora_jax.base import callables
from dora_jax.cli import parents
from dora_jax.config import ConfigError
from dora_jax.config import files as config_files
from dora_jax.runtime.journal import workdir_mirror
from dora_jax.trainer import manifest
from tests.fakes.command_line import parse, write_workspace
from tests.fakes.hf_models import MODEL

ROWS = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(20)]


def right(prompt, response, answer):
    return float(response == answer)


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """Runs are recorded, not made: each call of `train` is (config, workdir)."""
    from dora_jax.runtime import job

    monkeypatch.chdir(tmp_path)
    write_workspace()
    Path("model/config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": 512}))
    ran = []
    monkeypatch.setattr(job, "train", lambda config, workdir, **_: ran.append((config, workdir)) or 0)
    return ran


def test_no_function_has_the_name_of_a_module():
    modules = {module.name for module in pkgutil.iter_modules(dora_jax.__path__)}
    assert not modules & set(dora_jax.__all__)


def test_the_signatures_are_typed():
    for function in (dora_jax.fit, dora_jax.load_policy):
        signature = inspect.signature(function)
        assert all(parameter.annotation is not inspect.Parameter.empty for parameter in signature.parameters.values())
        assert signature.return_annotation is not inspect.Signature.empty


def test_a_configuration_comes_as_a_file_a_tree_a_config_or_fields(workspace):
    config = parse("--config=c.py").config
    for given in ("c.py", config_files.load_file("c.py"), config):
        assert dora_jax.fit(given, "w").exit_code == 0
    assert all(run == (config, Path("w")) for run in workspace)
    assert json.loads(Path("w/config.json").read_text())["steps"] == 7
    dora_jax.fit(
        {"steps": 3, "trainer": {"learning_rate": 0.5}, "trainer.micro_batches": 4}, "v", model="model", prompts=ROWS
    )
    made, trainer = workspace[-1][0], workspace[-1][0].trainer
    assert (made.steps, trainer.learning_rate, trainer.micro_batches, trainer.pack_tokens) == (3, 0.5, 4, 0), (
        "over rows.py"
    )
    assert (made.task.heldout, made.eval.prompts) == (5, 5), "a quarter of the rows"


def test_rows_and_rewards_given_as_objects_are_found_by_every_process(workspace, monkeypatch):
    dora_jax.fit(None, "w", model="model", prompts=[*ROWS, "a text"], reward=[right, "dora_jax.tasks.rewards.exact"])
    task = workspace[-1][0].task
    assert task.rewards == (f"{__name__}.right", "dora_jax.tasks.rewards.exact")
    rows = [json.loads(line) for line in Path(task.path).read_text().splitlines()]
    assert rows == [*ROWS, {"prompt": "a text", "answer": ""}]
    Path("w/metrics.jsonl").touch()  # the run has begun
    with pytest.raises(ConfigError, match=r"workdir: w belongs to another config, which differs in task.path"):
        dora_jax.fit(None, "w", model="model", prompts=[*ROWS, "text"], reward=[right, "dora_jax.tasks.rewards.exact"])
    dora_jax.fit(None, "w", model="model", prompts=[*ROWS, "text"], reward=right, accept_changes=True)
    assert workspace[-1][0].task.rewards == (f"{__name__}.right",)


def test_a_run_s_workdir_given_as_the_model_and_a_section_that_is_none(workspace, monkeypatch):
    made = []
    monkeypatch.setattr(parents, "make", made.append)
    dora_jax.fit(None, "x", model="model", prompts=ROWS)
    step = Path("x/checkpoints/4")
    step.mkdir(parents=True)
    manifest.write(step)
    with pytest.raises(ConfigError, match="model.path: x/hf/4 does not exist"):  # nothing was exported
        dora_jax.fit(None, "w", model="x", prompts=ROWS)
    assert made[0].folder == Path("x/hf/4")
    with pytest.raises(ConfigError, match="model: 3 is not a section"):
        dora_jax.fit({"model": 3}, "w", prompts=ROWS)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"model": "gone", "prompts": ROWS}, "model.path: gone does not exist"),
        ({"model": "model"}, "task.path: empty"),
        ({"model": "model", "prompts": []}, "prompts: there is no row"),
        ({"model": "model", "prompts": [{"prompt": {1}}]}, "prompts: a row cannot be written as JSON"),
        ({"config": {"trainer.rate": 1}, "model": "model", "prompts": ROWS}, "unknown field"),
        ({"config": 3, "model": "model", "prompts": ROWS}, "config: 3 is a int, no configuration: give"),
        ({"config": [("steps", 3)]}, r"config: \[\('steps', 3\)\] is a list, no configuration"),
        ({"model": "model", "prompts": 3}, "prompts: 3 is a int, neither rows nor the name of a file of them"),
        ({"model": "model", "prompts": {"train": ROWS, "test": ROWS}}, "prompts: a dict of train, test is no list of"),
        (
            {"model": "model", "prompts": [[{"role": "user", "content": "a"}]]},
            "prompts: row 0 is a list, neither a text",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(workspace, given, message):
    with pytest.raises(ConfigError, match=message):
        dora_jax.fit(workdir="w", **given)


class Frame:
    """A table like those of pandas: it iterates over the names of its columns."""

    def __iter__(self):
        return iter(ROWS[0])

    def iterrows(self): ...

    def to_json(self, *, orient, date_format, double_precision):
        assert (orient, date_format, double_precision) == ("records", "iso", 15)
        return json.dumps(ROWS)


class Dataset:
    """A table like datasets.Dataset with arrays as its format: it iterates over rows, and its to_json takes a file."""

    def __iter__(self):
        return iter({**row, "tokens": np.arange(2), "day": datetime.date(2026, 1, 2)} for row in ROWS)

    def to_json(self, file): ...


@pytest.mark.parametrize(
    "prompts, more",
    [
        (Frame(), {}),
        (Dataset(), {"tokens": [0, 1], "day": "2026-01-02"}),
        (pyarrow.Table.from_pylist(ROWS), {}),
        (types.SimpleNamespace(to_dicts=lambda: ROWS), {}),
        (iter(ROWS), {}),
    ],
)
def test_tables_of_rows_are_taken_row_by_row(workspace, prompts, more):
    dora_jax.fit(None, "w", model="model", prompts=prompts)
    rows = [json.loads(line) for line in Path(workspace[-1][0].task.path).read_text().splitlines()]
    assert rows == [row | more for row in ROWS]


class Judge:
    def score(self, prompt, response, answer):
        return 1.0

    def __call__(self, prompt, response, answer):
        return 1.0


JUDGE, SHORT = Judge(), functools.partial(right, "a")
brief = lambda prompt, response, answer: 1.0


@pytest.mark.parametrize("reward, name", [(JUDGE, "JUDGE"), (SHORT, "SHORT"), (brief, "brief")])
def test_a_callable_with_a_global_name_is_found_by_it(workspace, reward, name):
    dora_jax.fit(None, "w", model="model", prompts=ROWS, reward=reward)
    (path,) = workspace[-1][0].task.rewards
    assert path == f"{__name__}.{name}" and callables.imported(path) is reward


def nested():
    def inner(prompt, response, answer):
        return 1.0

    return inner


@pytest.mark.parametrize(
    "reward, why",
    [
        (lambda p, r, a: 1.0, "a lambda has no name"),
        (nested(), "inner is defined inside nested"),
        (Judge().score, "Judge.score belongs to a class"),
        (Judge(), "an object of the class Judge has no name to import"),
        (functools.partial(right, "a"), "an object of the class partial has no name to import"),
        (3, "3 is a int, neither a callable nor an import path"),
    ],
)
def test_a_callable_that_no_worker_can_import_is_refused_with_the_reason(workspace, reward, why):
    with pytest.raises(ConfigError, match=f"^reward: {why}"):
        dora_jax.fit(None, "w", model="model", prompts=ROWS, reward=[reward])


@pytest.mark.parametrize(
    "name, message",
    [
        (None, "defined in a notebook or at a prompt, .* %%writefile"),
        ("my-run.py", "my-run.py, which is no name of a module"),
        ("json.py", "a worker process that imports json finds .*rename the file"),
        ("my_run.py", None),
    ],
)
def test_a_function_of_the_program_that_runs_is_named_by_its_file(tmp_path, monkeypatch, name, message):
    main = types.ModuleType("__main__")
    if name:
        main.__file__ = str(tmp_path / name)
        (tmp_path / name).touch()
    main.mine = types.FunctionType(right.__code__, main.__dict__, "mine")
    main.mine.__qualname__ = "mine"
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.syspath_prepend(tmp_path)
    if message is None:
        assert callables.path_of(main.mine) == "my_run.mine"
        return
    with pytest.raises(ValueError, match=message):
        callables.path_of(main.mine)


def test_a_worker_runs_a_script_down_to_its_call_of_fit(tmp_path, monkeypatch):
    (tmp_path / "script_of_a_run.py").write_text(
        "import dora_jax\ndef mine(prompt, response, answer): return 1.0\n"
        "try:\n    dora_jax.fit(reward=mine)\nexcept Exception:\n    pass\nmine = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = callables.import_module("script_of_a_run")
    assert module.mine("", "", "") == 1.0 and sys.modules.pop("script_of_a_run") is module


def test_the_result_has_the_run_s_figures_as_arrays(workspace):
    Path("w").mkdir()
    rows = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "waits": "x"},
        {"step": 2, "lag/max": 1},
    ]
    Path("w/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("w/checkpoints/2").mkdir(parents=True)
    Path("w/checkpoints/2/manifest.json").touch()
    made = dora_jax.fit("c.py", "w")
    assert sorted(made.metrics) == ["lag/max", "reward/mean", "step"] and made.checkpoints == (2,)
    np.testing.assert_array_equal(made.metrics["reward/mean"], [0.5, np.nan])
    np.testing.assert_array_equal(made.evaluations["eval/accuracy"], [0.25])


def test_rows_of_a_run_in_a_bucket_are_in_the_folder_that_stands_for_it(workspace, tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_mirror.tempfile, "gettempdir", lambda: str(tmp_path / "scratch"))
    (tmp_path / "store").mkdir()
    url = f"file://{tmp_path}/store"
    assert dora_jax.fit({"steps": 3}, url, model="model", prompts=ROWS).workdir == url
    ((config, folder),) = workspace
    assert Path(config.task.path).parent == folder and Path(config.task.path).read_text().count("\n") == len(ROWS)
    assert json.loads((tmp_path / "store/config.json").read_text())["task"]["path"] == config.task.path


def test_a_policy_of_no_run_is_refused(workspace):
    with pytest.raises(ConfigError, match="workdir: gone holds no run"):
        dora_jax.load_policy("gone")
