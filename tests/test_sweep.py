"""A sweep: which runs it asks for, what it refuses, which it skips, how it is stopped; with a trainer of paper."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from absl import flags as absl_flags

from dora_jax import sweep
from dora_jax.config import ConfigError
from tests.fakes.hf_models import MODEL

ROOT = Path(__file__).parent.parent

CONFIG = """
from dora_jax import config
def get_config(arg=None):
    c = config.defaults()
    c.model.path = "model"
    c.task.name = "reasoning_gym:chain_sum"
    return c
def sweep():
    for seed in (0, 1, 2):
        yield {"seed": seed, "trainer.learning_rate": 10.0 ** -seed}
"""
TRAINER = """
import json, pathlib, sys, time
args = dict(arg.split("=", 1) for arg in sys.argv[1:])
workdir = pathlib.Path(args["--workdir"])
workdir.mkdir(parents=True, exist_ok=True)
with open("log", "a") as log:
    print(json.dumps(sys.argv[1:]), file=log, flush=True)
code = pathlib.Path("code" + args["--config.seed"])
if code.exists() and code.read_text() == "wait":
    import signal
    received = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    (workdir / "waits").touch()
    while signal.SIGTERM not in received:
        time.sleep(0.1)
    pathlib.Path("received").write_text(str(list(map(int, received))))
    sys.exit(42)
sys.exit(int(code.read_text()) if code.exists() else 0)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DORA_DEVICES", raising=False)
    monkeypatch.setattr(sweep, "TRAIN", ("trainer.py",))
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL))
    Path("c.py").write_text(CONFIG)
    Path("trainer.py").write_text(TRAINER)
    old = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, old)


def points(*args):
    return sweep.parse(["sweep", *args], absl_flags.FlagValues())


def refusal(*args):
    with pytest.raises(ConfigError) as caught:
        points(*args)
    return caught.value.problems


def started():
    """The seeds of the runs that were started, in their order."""
    if not Path("log").exists():
        return []
    lines = [json.loads(line) for line in Path("log").read_text().splitlines()]
    return [int(arg.partition("=")[2]) for line in lines for arg in line if arg.startswith("--config.seed=")]


def test_every_point_gets_its_overrides_a_folder_of_its_own_and_all_other_flags(folder):
    found = points("--config=c.py", "--config.steps", "5", "--workdir=w")
    assert [point.args for point in found[:2]] == [
        (
            "--config=c.py",
            "--config.steps",
            "5",
            "--config.seed=0",
            "--config.trainer.learning_rate=1.0",
            "--workdir=w/seed=0,trainer.learning_rate=1.0",
        ),
        (
            "--config=c.py",
            "--config.steps",
            "5",
            "--config.seed=1",
            "--config.trainer.learning_rate=0.1",
            "--workdir=w/seed=1,trainer.learning_rate=0.1",
        ),
    ]
    assert json.loads(found[1].resolved)["steps"] == 5 and json.loads(found[1].resolved)["seed"] == 1
    assert [point.index for point in points("--config", "c.py", "--config.steps", "5", "--only", "2")] == [2]
    assert points("--config=c.py", "--only=1")[0].workdir == Path("runs/c_sweep/seed=1,trainer.learning_rate=0.1")


def test_what_ended_well_is_skipped_until_its_config_changes(folder):
    assert sweep.run(points("--config=c.py")) == 0
    assert started() == [0, 1, 2]
    assert sweep.run(points("--config=c.py")) == 0
    assert started() == [0, 1, 2]
    Path("c.py").write_text(CONFIG.replace("(0, 1, 2)", "(3, 2, 0)"))  # longer or reordered: the same folders
    assert sweep.run(points("--config=c.py")) == 0
    assert started() == [0, 1, 2, 3]
    assert sweep.run(points("--config=c.py", "--config.steps=200", "--only=1")) == 0  # longer: the run goes on
    assert started() == [0, 1, 2, 3, 2]


def test_a_run_that_fails_stops_no_other_and_is_tried_again(folder, capfd):
    Path("code1").write_text("3")
    assert sweep.run(points("--config=c.py")) == 1
    assert started() == [0, 1, 2]
    table = capfd.readouterr().out.splitlines()[-3:]
    assert [line.rpartition("  ")[2] for line in table] == ["ended well", "failed with exit code 3", "ended well"]
    Path("code1").unlink()
    assert sweep.run(points("--config=c.py")) == 0
    assert started() == [0, 1, 2, 1]


def test_a_run_that_asks_to_be_started_again_ends_the_sweep_with_the_same_wish(folder, capfd):
    Path("code1").write_text("42")
    assert sweep.run(points("--config=c.py")) == 42
    assert started() == [0, 1]
    assert capfd.readouterr().out.splitlines()[-1].endswith("not started")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_at_a_signal_it_signals_the_run_once_and_waits_for_it(folder, number):
    Path("code1").write_text("wait")
    program = textwrap.dedent("""
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal, whatever this was started from
        from absl import flags
        from dora_jax import sweep
        sweep.TRAIN = ("trainer.py",)
        sys.exit(sweep.run(sweep.parse(["sweep", "--config=c.py"], flags.FlagValues())))
        """)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until_s = time.monotonic() + 60
    while not Path("runs/c_sweep/seed=1,trainer.learning_rate=0.1/waits").exists() and time.monotonic() < until_s:
        time.sleep(0.02)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 42
    assert Path("received").read_text() == f"[{int(signal.SIGTERM)}]"
    assert [line.rpartition("  ")[2] for line in out.splitlines()[-3:]] == [
        "ended well",
        "stopped; the same command goes on from here",
        "not started",
    ]


@pytest.mark.parametrize(
    "args, why",
    [
        ((), "config: missing; name a file, e.g. --config=configs/quickstart.py"),
        (("--config=c.py", "--only=3"), "only: 3 is not below 3, the number of points of c.py"),
        (
            ("--config=c.py", "--config.seed=9", "--only=1"),
            "sweep, point 1: config.seed: the sweep sets it; leave it out of the command",
        ),
        (("--config=c.py", "--config.steps=0"), "sweep, point 0, 1, 2: steps: 0 is not at least 1"),
        (("--config=c.py", "--", "--only=1"), 'argument \'--\': nothing behind "--" is read; leave the "--" out'),
        (
            ("--config=c.py", "--ony=1", "--only=1"),
            "sweep, point 1: Unknown command line flag 'ony'. Did you mean: only ?",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_starts(folder, args, why):
    assert refusal(*args)[0].startswith(why.partition(". Did")[0])


@pytest.mark.parametrize(
    "body, why",
    [
        ("", "config: c.py has no sweep(); add one that returns a list of {field: value}"),
        ("def sweep(): return []", "config: sweep() of c.py returned no list of {field: value}"),
        ("def sweep(): return [1]", "config: sweep() of c.py returned no list of {field: value}"),
        ("def sweep(): return 1 / 0", "c.py:8: ZeroDivisionError: division by zero"),
        ("def sweep(): return [{'seed': 1}, {'seed': 1}]", "sweep: seed=1 is there twice"),
        ("def sweep(): return [{'sed': 1}]", "sweep, point 0: config.sed: unknown field; the nearest is config.seed"),
        ("def sweep(): return [{'steps': 1.0}]", "sweep, point 0: config.steps: '1.0' is not of its type, int"),
    ],
)
def test_sweeps_that_make_no_sense(folder, body, why):
    Path("c.py").write_text(CONFIG.partition("def sweep")[0] + body)
    assert refusal("--config=c.py") == (why,)


def test_folders_are_readable_and_differ_where_the_overrides_differ():
    assert sweep.run_name({"seed": 1, "orchestrator.mode": "dora"}) == "orchestrator.mode=dora,seed=1"
    assert sweep.run_name({"task.path": "a/b"}) != sweep.run_name({"task.path": "a_b"})
    long = [sweep.run_name({"task.template": "x" * 200 + end}) for end in "ab"]
    assert long[0] != long[1] and max(map(len, long)) < 140
    assert "sesame" not in sweep.run_name({"task.token": "sesame"})


@pytest.mark.slow
def test_two_points_of_the_quickstart_then_nothing_to_do(tmp_path):
    config = tmp_path / "c.py"
    config.write_text(
        textwrap.dedent(f"""
        import runpy
        def get_config(arg=None):
            c = runpy.run_path({str(ROOT / "configs/quickstart.py")!r})["get_config"]("tiny")
            c.steps = 2
            return c
        def sweep():
            return [{{"orchestrator.mode": mode}} for mode in ("sync", "dora")]
        """)
    )
    command = [sys.executable, "-m", "dora_jax.sweep", f"--config={config}", "--workdir=sweep"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for mode in ("sync", "dora"):
        records = (tmp_path / "sweep" / f"orchestrator.mode={mode}" / "metrics.jsonl").read_text().splitlines()
        assert any(json.loads(record).get("step") == 2 for record in records)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").rglob("metrics.jsonl")}
    again = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert again.returncode == 0 and again.stdout.count("had ended well") == 2
    assert written == {path: path.stat().st_mtime_ns for path in written}
