"""The live view of a run: one picture of what the files say."""

import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from dora_jax import top
from dora_jax.report.load import load

ROOT = Path(__file__).parent.parent


def shown(folder, now_s=20.0):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 (for the test)
    console.print(top.picture(load(folder, "a"), now_s))
    return console.export_text()


def test_each_instance_shows_its_versions(tmp_path):
    rows = [{"t": 10.0, "up": 0, "slots": 8}, {"t": 10.0, "up": 1, "slots": 8}, {"t": 11.0, "busy": {"0": {"3": 2, "4": 6}}},
            {"t": 11.0, "load": 1, "version": 4}, {"t": 12.0, "busy": {"0": {"3": 2, "4": 6}}}]  # fmt: skip
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "reward/mean": 0.25}\n{"step": 6, "eval/accuracy": 0.5}\n')
    text = shown(tmp_path)
    assert "step 7" in text and "8 s ago" in text and "0.25" in text
    assert "v3: 2, v4: 6" in text and "loads weights" in text and text.count("█") == 24


def test_the_newest_step_says_where_its_seconds_went(tmp_path):
    rows = [{"t": 1.0, "step": n, "seconds": 4.0, "spent": {"trainer": {"update": n, "waiting for rollouts": 4.0 - n}, "0": {}}}
            for n in (1, 3)]  # fmt: skip
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "trainer 4 s a step: update 3, waiting for rollouts 1" in shown(tmp_path)


def test_an_empty_workdir_is_a_picture_too(tmp_path):
    assert "no timeline yet" in shown(tmp_path)


def test_the_command_prints_once_and_refuses_what_is_no_workdir(tmp_path):
    command = [sys.executable, "-m", "dora_jax.top", "--once", f"--workdir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "mean lag" in done.stdout, done.stderr
    done = subprocess.run([*command[:-1], "--workdir=nothing"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "is no folder" in done.stderr and "Traceback" not in done.stderr
