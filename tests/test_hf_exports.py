"""Checkpoints as Hugging Face folders beside the run: which steps, whole or not at all, and never in the run's way."""

import sys

import pytest

from dora_jax.config import CheckpointSection, Config
from dora_jax.plan import validate
from dora_jax.runtime.training import hf_exports
from dora_jax.runtime.training.hf_exports import HfExports

EXPORT = """#!{python}
import pathlib, sys
given = dict(arg.split("=", 1) for arg in sys.argv[3:])
out = pathlib.Path(given["--out"])
out.mkdir()
(out / "config.json").write_text(given["--workdir"] + " " + given["--step"])
if given["--step"] == "4":
    sys.exit("error: step: checkpoint 4 cannot be trusted")
"""


@pytest.fixture
def exports(tmp_path, monkeypatch):
    """A program in place of Python's writes the folder, and fails at step 4."""
    program = tmp_path / "python"
    program.write_text(EXPORT.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(hf_exports.sys, "executable", str(program))
    notes = []
    made = HfExports(tmp_path, lambda step: step % 2 == 0, notes.append)
    yield made, notes, tmp_path / "hf"
    made.close()


def test_the_steps_that_are_due_are_exported_and_a_failure_is_reported_once(exports):
    made, notes, folder = exports
    made.finish([1, 2, 3, 4])
    made.finish([2, 4, 6])
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4.partial", "6"]
    assert (folder / "6" / "config.json").read_text() == f"{folder.parent} 6"
    assert notes == ["step 4 is not exported as a Hugging Face folder: error: step: checkpoint 4 cannot be trusted"]


def test_a_rerun_makes_what_a_killed_one_left_in_half(exports):
    made, notes, folder = exports
    (folder / "2.partial" / "half").mkdir(parents=True)
    (folder / "6").mkdir()
    made.finish([2, 6])
    assert not notes and not (folder / "2" / "half").exists() and not list((folder / "6").iterdir())


def test_polling_waits_for_no_export(exports):
    made, _, folder = exports
    made.poll([2])
    made.close()
    assert not (folder / "2").exists()


@pytest.mark.parametrize("every, export, fits", [(20, 40, True), (20, 0, True), (20, 30, False), (0, 10, False)])
def test_only_what_is_saved_is_exported(every, export, fits):
    config = Config(checkpoint=CheckpointSection(every=every, export_hf_every=export))
    notes = [problem for problem in validate.problems(config) if problem.startswith("checkpoint.export_hf_every: ")]
    assert bool(notes) != fits
