"""evaluate --follow: each checkpoint once, oldest first, until the run's last step has its record."""

import json
from types import SimpleNamespace

import pytest

from dora_jax.config import Config
from dora_jax.runtime import evaluation_job
from dora_jax.runtime.assembly.checkpoint_weights import ParamsChanged
from dora_jax.runtime.evaluation_job import follow


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that saves its next checkpoint, and forgets its oldest, whenever it is waited for. Evaluations are recorded."""
    printed, coming = [], [(4, None), (6, 2)]

    def save(step):
        (tmp_path / f"checkpoints/{step}").mkdir(parents=True)
        (tmp_path / f"checkpoints/{step}/manifest.json").write_text(json.dumps({"files": {}}))

    def wait(seconds):
        step, gone = coming.pop(0)
        save(step)
        if gone:
            (tmp_path / f"checkpoints/{gone}/manifest.json").unlink()

    def one(config, workdir, step):
        printed.append(step)
        (workdir / "evaluations").mkdir(exist_ok=True)
        (workdir / f"evaluations/{step}.json").write_text(
            json.dumps({"step": step, "eval/prompts": 8, "eval/reward/mean": 0.5, "eval/accuracy": 0.25}) + "\n"
        )

    save(2)
    monkeypatch.setattr(evaluation_job, "time", SimpleNamespace(sleep=wait))
    monkeypatch.setattr(evaluation_job, "settled", lambda config: config)
    monkeypatch.setattr(evaluation_job, "evaluate_one", one)
    monkeypatch.setattr(evaluation_job.checkpoint, "verify", lambda directory, step, full: None)
    return tmp_path, printed


def test_every_checkpoint_is_evaluated_once_until_the_last(run):
    workdir, printed = run
    assert follow(Config(steps=6), workdir) == 0 and printed == [2, 4, 6]
    assert follow(Config(steps=6), workdir) == 0 and printed == [2, 4, 6], "a second time there is nothing to do"


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b'{"step": 4, "eval/accuracy": 0.5}', b"folder"])
def test_a_damaged_record_is_set_aside_and_made_again(run, damage, capsys):
    workdir, printed = run
    assert follow(Config(steps=6), workdir) == 0
    record = workdir / "evaluations/4.json"
    if damage == b"folder":
        record.unlink()
        record.mkdir()
    else:
        record.write_bytes(damage)
    assert follow(Config(steps=6), workdir) == 0 and printed == [2, 4, 6, 4]
    assert json.loads(record.read_text())["step"] == 4 and (workdir / "evaluations/4.json.damaged").exists()
    assert "evaluations/4.json is damaged: it is moved aside as" in capsys.readouterr().out


def test_a_checkpoint_that_cannot_be_trusted_is_passed_over(run, monkeypatch):
    workdir, printed = run
    monkeypatch.setattr(
        evaluation_job.checkpoint, "verify", lambda directory, step, full: "a byte differs" if step == 4 else None
    )
    assert follow(Config(steps=6), workdir) == 0 and printed == [2, 6]


def test_a_checkpoint_whose_params_the_journal_does_not_know_is_passed_over_with_a_line(run, monkeypatch, capsys):
    workdir, printed = run

    def one(config, workdir, step, then=evaluation_job.evaluate_one):
        if step == 4:
            raise ParamsChanged("step: checkpoint 4 cannot be trusted")
        then(config, workdir, step)

    monkeypatch.setattr(evaluation_job, "evaluate_one", one)
    assert follow(Config(steps=6), workdir) == 0 and printed == [2, 6]
    assert capsys.readouterr().out == "step: checkpoint 4 cannot be trusted\n"
