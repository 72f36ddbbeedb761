"""bench.race: its accuracy to reach, its clock, what each side is given, and its table; no rival is installed."""

import json
import math
import os
import time

import pytest

from dora_jax.bench import race, race_trl
from dora_jax.bench.race import Point
from dora_jax.config import files
from dora_jax.plan import validate
from dora_jax.tasks import rewards

CURVE = [Point(0.0, 0, 0.1), Point(10.0, 4, 0.3), Point(20.0, 8, 0.7), Point(30.0, 12, 0.6)]


def test_the_accuracy_to_reach_is_a_gain_or_the_highest():
    assert race.target_of(CURVE, 0.4) == 0.5
    assert race.target_of(CURVE, 0.0) == 0.7


def test_the_first_time_at_an_accuracy_is_on_a_straight_line():
    assert race.first_at(CURVE, 0.5) == pytest.approx(15.0)
    assert race.first_at(CURVE, 0.3) == pytest.approx(10.0)
    assert race.first_at(CURVE, 0.7) == pytest.approx(20.0)
    assert race.first_at(CURVE, 0.1) == 0.0
    assert math.isinf(race.first_at(CURVE, 0.71))


def test_a_checkpoint_counts_from_its_newest_file(tmp_path):
    now = time.time()
    for step, file, age in ((4, "a", 60.0), (4, "b", 50.0), (12, "a", 20.0)):
        path = tmp_path / f"checkpoint-{step}" / "deep" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        os.utime(path, (now - age, now - age))
        os.utime(path.parent, (now - age, now - age))
    (tmp_path / "checkpoint-part").mkdir()
    saved = race.saved_of(tmp_path, "checkpoint-", 100.0)
    assert list(saved) == ["4", "12"] and list(saved.values()) == pytest.approx([50.0, 80.0], abs=1.0)
    assert race.step_s(saved) == pytest.approx(30 / 8)


@pytest.mark.parametrize(
    "text", ["6 + 1 = 7", "It is -12.", "1,234", "none", "3.0", "7 then 8", "", "x7", "10-7", "$7", "(1)-12"]
)
@pytest.mark.parametrize("answer", ["7", "-12", "1234", "3"])
def test_the_scorer_judges_as_the_reward_of_ours(text, answer):
    assert race_trl.right(text, answer) == rewards.numeric("", text, answer)


@pytest.fixture
def subject(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}", "answer": "1"}}\n' for i in range(300)))
    return race.Race(race.CASES["smollm"], tmp_path, tmp_path / "base", tmp_path / "python", 64)


def test_rows_are_trained_on_or_held_out(subject):
    train, heldout = (path.read_text().splitlines() for path in (subject.rows, subject.heldout))
    assert len(heldout) == race.HELD_OUT and len(train) + len(heldout) == len({*train, *heldout}) == 300


def test_both_sides_have_the_same_sizes(subject, tmp_path):
    """Ours are the shipped configuration's fields, and nothing but the shared ones and paths is given."""
    fields = subject.fields(3)
    config = files.load_file(subject.case.config)
    config.update_from_flattened_dict({name: str(v) if name.endswith("path") else v for name, v in fields.items()})
    ours = validate.from_config_dict(config, "train")
    work = subject.work_of(tmp_path, 3, "float32", 64, 4, 60.0)
    assert work["template"] == ours.task.template == "chat"
    assert (work["groups"], work["group_size"]) == (ours.orchestrator.groups_per_step, ours.orchestrator.group_size)
    assert work["max_new_tokens"] == ours.rollout.max_new_tokens
    assert (work["learning_rate"], work["warmup_steps"]) == (ours.trainer.learning_rate, ours.trainer.warmup_steps)
    assert (work["rows"], work["model"], work["seed"]) == (ours.task.path, ours.model.path, ours.seed)
    given = {"seed", "steps", "model.path", "task.path", "task.heldout_path", "checkpoint.every", "checkpoint.keep"}
    assert fields.keys() == given | race.sizes(1, 1, 1, 1.0).keys()


def test_the_table(tmp_path, monkeypatch):
    """The faster type is taken; ours is measured against the accuracy of TRL's own curve, seed by seed."""
    made = []

    def trl(self, name, seed, dtype, *_):
        made.append(name)
        slow = 2.0 if dtype == "float32" else 1.0
        return {"load": 0.5, "saved": {"1": slow, "3": 3 * slow}}

    def ours(self, name, cache, fields):
        made.append(name)
        (self.folder / name).mkdir()
        sections = {"orchestrator": {"mode": "dora", "filter_zero_variance": False}}
        (self.folder / name / "config.json").write_text(
            json.dumps(sections | {"trainer": {"skip_zero_advantage": True}})
        )
        return {"load": 0.5, "saved": {"4": 1.0, "8": 5.0}}

    monkeypatch.setattr(race.harness, "interpreter", lambda library, install: tmp_path)
    monkeypatch.setattr(race.Race, "trl", trl)
    monkeypatch.setattr(race.Race, "ours", ours)
    monkeypatch.setattr(
        race.Race, "curve", lambda self, name, _: CURVE if name.startswith("trl") else [CURVE[0], Point(3, 4, 0.5)]
    )
    (tmp_path / "config.json").write_text("{}")
    lines = list(race.race(seeds=(5, 6), workdir=tmp_path, base=str(tmp_path)))
    of_ours = ["ours-cold-seed5", "ours-warm-seed5", "ours-plain-seed5"]
    assert made == ["tried-float32", "tried-bfloat16", "trl-seed5", *of_ours, "trl-seed6",
                    "ours-cold-seed6", "ours-warm-seed6"]  # fmt: skip
    assert "orchestrator.mode=dora" in "".join(lines) and "trainer.skip_zero_advantage=True" in "".join(lines)
    rows = [line.split() for line in lines[-7:]]
    assert rows[0] == ["TRL", "bfloat16", "5", "0.5", "10.0%", "70.0%", "50.0%", "15.0", "1.00", "1.00"]
    assert rows[1] == ["ours", "cold", "5", "0.5", "10.0%", "50.0%", "50.0%", "3.0", "0.20", "1.00"]
    assert (tmp_path / "toy" / "curves.csv").read_text().splitlines()[1] == "TRL bfloat16,5,0.0,0,0.1"
