"""The sinks; the console that moves."""

import contextlib
import fcntl
import io
import json
import math
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest

from dora_jax.base.console import Console, step_line
from dora_jax.base.metrics import Writer
from tests.fakes.sinks import lines, quiet, scalars, texts

ROOT = Path(__file__).parents[1]


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


# ---------------------------------------------------------------- sinks


def test_every_line_is_strict_json(tmp_path):
    with Writer(tmp_path, quiet()) as writer:
        writer.write(
            3,
            {
                "nan": math.nan,
                "inf": np.float32(np.inf),
                "f32": np.float32(0.5),
                "i64": np.int64(7),
                "yes": np.bool_(True),
                "mean": 0.25,
                "empty": math.nan,
            },
            waits=["trainer idle 9%", "rollouts idle 1%"],
        )
    (line,) = lines(tmp_path)
    assert line == {
        "step": 3,
        "nan": None,
        "inf": None,
        "f32": 0.5,
        "i64": 7,
        "yes": 1,
        "mean": 0.25,
        "empty": None,
        "waits": "trainer idle 9%; rollouts idle 1%",
    }


def test_lines_are_there_before_the_file_is_closed(tmp_path):
    with Writer(tmp_path, quiet()) as writer:
        writer.write(1, {"x": 1})
        assert lines(tmp_path) == [{"step": 1, "x": 1}]


def test_resume_cuts_what_came_later_and_appends(tmp_path):
    with Writer(tmp_path, quiet()) as writer:
        for step in (0, 1, 2, 3):
            writer.write(step, {"x": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "x"')  # the crash
    with Writer(tmp_path, quiet()) as writer:
        writer.resume(1)
        writer.write(2, {"x": 20})
    assert [(line["step"], line["x"]) for line in lines(tmp_path)] == [(0, 0), (1, 1), (2, 20)]


def test_a_resumed_run_knows_the_evaluations_up_to_where_it_goes_on(tmp_path):
    with Writer(tmp_path, quiet()) as writer:
        assert writer.evaluations == {}
        for step in (0, 1, 2, 3):
            writer.write(step, {"reward/mean": 0.1})
            writer.write(step, {"eval/prompts": 2, "eval/accuracy": step / 4, "eval/reward/mean": 0.5})
    with Writer(tmp_path, quiet()) as writer:
        writer.resume(2)
        assert {v: m["eval/accuracy"] for v, m in writer.evaluations.items()} == {0: 0.0, 1: 0.25, 2: 0.5}


def test_a_line_that_a_crash_cut_short_does_not_swallow_the_next(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x"')
    with Writer(tmp_path, quiet()) as writer:
        writer.write(2, {"x": 2})
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1]) == {"step": 2, "x": 2}


def test_resume_after_a_write_is_refused(tmp_path):
    with Writer(tmp_path, quiet()) as writer:
        writer.write(1, {"x": 1})
        with pytest.raises(RuntimeError, match="before the first write"):
            writer.resume(0)


def test_tensorboard_holds_the_same_scalars(tmp_path):
    with Writer(tmp_path, quiet()) as writer:
        writer.write(3, {"reward/mean": 0.25, "bad": math.nan})
    assert list(scalars(tmp_path / "tensorboard")) == [(3, "reward/mean", 0.25)]


def test_samples_are_text_in_tensorboard_and_rows_in_the_other_sinks(tmp_path):
    reason, group = [], {"group": 3, "prompt": "a | b\n<b>", "expected": "2"}
    group["samples"] = [{"reward": 1.0, "text": "x" * 5000, "tokens": 9}, {"reward": 0.0, "text": "no", "tokens": 1}]
    sink = types.SimpleNamespace(write=lambda *_: None, samples=lambda *row: reason.append(row))
    with Writer(tmp_path, quiet(), [sink]) as writer:
        writer.write(3, {"reward/mean": 0.25})
        for kind in ("heldout", "trained"):
            writer.samples(4, kind, [group])
        writer.samples(4, "heldout", [])
    assert [(step, kind, [row["text"][:2] for row in rows]) for step, kind, rows in reason] == [
        (4, "heldout", ["xx"]),
        (4, "trained", ["xx", "no"]),
    ]
    assert reason[0][2][0].keys() == {"group", "prompt", "expected", "reward", "text"}
    (_, _), (_, text) = texts(tmp_path / "tensorboard")
    lines = text.splitlines()
    assert lines[0] == "| group | prompt | expected | reward | text |" and len(lines) == 4 and len(lines[2]) < 4100
    assert lines[3] == "| 3 | a &#124; b<br>&lt;b&gt; | 2 | 0.0 | no |"


# ---------------------------------------------------------------- console


STEP = {
    "reward/mean": 0.4321,
    "groups/failed_share": 0.0,
    "prompts/skipped_share": 0.0,
    "response/length": 33.4,
    "lag/mean": 0.75,
    "versions/live": 3,
    "rollout/tokens_per_s": 1234.4,
    "time/left_s": 300.0,
}
WAITS = ["trainer idle 34%: waiting for rollouts", "rollouts idle 2%"]


def test_the_step_line_shows_what_a_person_watches():
    assert step_line(12, STEP, WAITS[:1]) == (
        "step   12  reward 0.432  length 33  lag 0.8  3 versions  1,234 tok/s  ETA 5 min  trainer idle 34%: waiting "
        "for rollouts"
    )
    assert step_line(1, {"reward/mean": None}) == "step    1"


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"versions/live": 1}, "  1 version  "),
        ({"groups/failed_share": 0.76}, "reward 0.432  failed 76%  "),
        ({"prompts/skipped_share": 0.9}, "  skipped 90%  "),
        ({"time/left_s": 44.4}, "  ETA 44 s  "),
        ({"time/left_s": 7200.0}, "  ETA 2 h  "),
        ({"time/left_s": 86400 * 3.2}, "  ETA 3 days  "),
    ],
)
def test_a_step_line_says(changed, reason):
    assert reason in step_line(12, STEP | changed, WAITS)


def test_a_step_line_that_is_too_long_loses_what_matters_least():
    long = STEP | {
        "reward/mean": -1234.5,
        "groups/failed_share": 1.0,
        "prompts/skipped_share": 1.0,
        "response/length": 31_072.0,
        "lag/mean": 31.0,
        "versions/live": 12,
        "rollout/tokens_per_s": 12_345_678.0,
    }
    line = step_line(100_000, long, ["trainer idle 100%: waiting for a rollout instance", WAITS[1]])
    assert (
        line
        == (
            "step 100000  reward -1234.500  failed 100%  skipped 100%  ETA 5 min  "
            "trainer idle 100%: waiting for a rollout instance"
        )
        and len(line) <= 120
    )
    assert "rollouts idle" not in step_line(12, STEP, WAITS) and "3 versions" in step_line(12, STEP, WAITS)


EVAL = {
    "eval/prompts": 64,
    "eval/accuracy": 0.25,
    "eval/pass_at_k": 0.5,
    "eval/k": 4,
    "eval/reward/mean": 0.2,
    "eval/reward/term/right": 0.25,
    "eval/response_length": 20.4,
}


def test_an_evaluation_has_a_line_of_its_own():
    file = io.StringIO()
    console = Console(file, tty=False)
    console.step(7, EVAL)
    console.step(8, EVAL | {"eval/reward/term/short": -0.05, "eval/failed": 3, "eval/k": 1})
    console.step(8, EVAL | {"eval/accuracy_low": 0.146, "eval/accuracy_high": 0.3951})
    console.step(9, {name: value for name, value in EVAL.items() if name not in ("eval/accuracy", "eval/pass_at_k")})
    assert file.getvalue().splitlines() == [
        "eval    7  accuracy 25.0%  pass@4 50.0%  reward 0.200  length 20  64 prompts",
        (
            "eval    8  accuracy 25.0%  reward 0.200  (right 0.250, short -0.050)  length 20  64 prompts  3 without a "
            "score"
        ),
        "eval    8  accuracy 25.0% (14.6% to 39.5%)  pass@4 50.0%  reward 0.200  length 20  64 prompts",
        "eval    9  reward 0.200  length 20  64 prompts",
    ]


def test_the_progress_line_says_who_does_what_and_how_fast():
    clock = Clock()
    console = Console(io.StringIO(), tty=False, clock=clock)
    assert console.progress() == "0:00  starting"
    console.phase("all", "compiling")
    clock.now_s = 61
    assert console.progress() == "1:01  compiling"
    console.phase("trainer", "step 3")
    console.phase("instance 0", "generating")
    console.status({"versions": {4: 20, 2: 12}, "waits": "trainer on rollout"})
    console.count(500)
    assert console.progress() == (
        "1:01  500 tokens, 50 tokens/s | trainer: step 3 | instance 0: generating | samples v2:12 v4:20 | "
        "trainer on rollout"
    )
    clock.now_s = 80  # nothing for more than the window
    console.phase("trainer", "")
    assert "500 tokens, 0 tokens/s | instance 0" in console.progress()


def screen(text):
    """The lines of a terminal that was sent this text, as far as `Console` uses it, and whether its cursor is shown."""
    lines, row, column, shown = [""], 0, 0, True
    for code, words in re.findall(r"(\x1b\[[?0-9;]*[A-Za-z]|[\r\n])|([^\x1b\r\n]+)", text):
        lines[row] = lines[row][:column] + words if words else lines[row]
        column += len(words)
        if code in ("\r", "\n"):
            row, column = row + (code == "\n"), 0
            lines += [""] * (row - len(lines) + 1)
        elif code == "\x1b[2K":
            lines[row] = ""
        elif code == "\x1b[1A":
            row -= 1
        elif code in ("\x1b[?25l", "\x1b[?25h"):
            shown = code.endswith("h")
        else:
            assert not code, "what no terminal needs"
    return [line for line in lines if line], shown


TALK = """
import os, sys, time
from dora_jax.base.console import Console
console = Console()
console.start()
console.phase("trainer", "compiling " + "for a long time " * 9)
for n in range(3):
    while not os.path.exists(f"{sys.argv[1]}/{n}"):
        time.sleep(0.02)
    console.note(f"line {n}")
console.stop()
"""


def test_a_terminal_keeps_the_lines_that_stay_and_nothing_of_the_moving_one_however_wide_it_becomes(tmp_path):
    pid, ours = pty.fork()
    if not pid:
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        os.execve(sys.executable, [sys.executable, "-c", TALK, str(tmp_path)], env | {"PYTHONPATH": str(ROOT)})
    sent, widths = b"", [100, 44, 200]
    for n, columns in enumerate(widths):
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        drawn = sent.count(b"trainer:")
        while sent.count(b"trainer:") < drawn + 4:
            sent += os.read(ours, 1 << 16)
        (tmp_path / str(n)).touch()
        while f"line {n}".encode() not in sent:
            sent += os.read(ours, 1 << 16)
    with contextlib.suppress(OSError):  # as Linux says that nobody writes any more
        while more := os.read(ours, 1 << 16):
            sent += more
    os.close(ours)
    assert os.waitpid(pid, 0)[1] == 0
    text = sent.decode()
    assert screen(text) == (["line 0", "line 1", "line 2"], True)
    last = [re.findall("trainer: [^\r\x1b]*", part)[-1] for part in re.split(r"line \d", text)[:3]]
    assert [len(f"⠋ 0:00  {drawn}") for drawn in last] == [100, 44, 171] and last[1].endswith("…")


def test_on_a_terminal_the_line_moves_while_the_run_is_busy():
    file = io.StringIO()
    console = Console(file, tty=True)
    console.start()
    console.phase("all", "compiling")
    until_s = time.monotonic() + 0.6
    while time.monotonic() < until_s:
        sum(range(1000))
    console.note("a line that stays")
    console.stop()
    console.stop()
    drawn = file.getvalue()
    assert len({frame for frame in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏" if frame in drawn}) >= 3
    assert "compiling" in drawn and "a line that stays" in drawn


def test_elsewhere_a_line_comes_only_when_nothing_else_did():
    file = io.StringIO()
    clock = Clock()
    console = Console(file, tty=False, period_s=0.02, clock=clock)
    console.start()
    console.phase("all", "compiling")
    clock.now_s = 1.0
    deadline_s = time.monotonic() + 5
    while not file.getvalue() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    time.sleep(0.1)  # the clock stands: no second line
    console.stop()
    assert file.getvalue() == "... 0:01  compiling\n"


def test_notes_from_many_threads_and_the_redrawing_one_do_not_lock_up(monkeypatch):
    monkeypatch.setattr("dora_jax.base.console.REFRESHES_PER_S", 5000)  # both locks are wanted all the time
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    console = Console(io.StringIO(), tty=True)
    console.start()

    def talk(role):
        for i in range(60):
            console.note(f"{role} {i}")
            console.phase(role, str(i))
            console.count(1)

    threads = [threading.Thread(target=talk, args=(f"role {i}",), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=5)
    sys.setswitchinterval(switch_s)
    assert not any(thread.is_alive() for thread in threads)
    console.stop()
    assert "240 tokens" in console.progress()
