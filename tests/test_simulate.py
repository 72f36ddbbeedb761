"""The entry point: starts without JAX, prints one table, refuses what it cannot read in one line."""

import pathlib
import subprocess
import sys

import pytest

from dora_jax.orchestrate.modes import MODES

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "configs" / "sim" / "demo.py"
QUICK = ["--config.steps=3", "--config.warmup_steps=1", "--config.orchestrator.groups_per_step=16"]


def simulate(*args):
    command = [sys.executable, "-m", "dora_jax.simulate", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_it_brings_in_neither_jax_nor_flax():
    code = "import sys, dora_jax.simulate; print([m for m in ('jax', 'jaxlib', 'flax', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_it_prints_the_table_and_writes_the_trace(tmp_path):
    trace = tmp_path / "trace.json"
    done = simulate(f"--config={DEMO}", *QUICK, f"--trace={trace}")
    assert done.returncode == 0, done.stderr
    for mode in MODES:
        assert sum(line.startswith(mode + " ") for line in done.stdout.splitlines()) == 3
    assert trace.stat().st_size > 10_000


def test_advice_names_settings_and_reasons():
    small = ["--config.hardware.chips=4", "--config.hardware.rollout_chips=2"]
    done = simulate(f"--config={DEMO}", *QUICK, "--advise", *small)
    assert done.returncode == 0, done.stderr
    assert "settings tried" in done.stdout and "x its tokens/s" in done.stdout
    assert done.stdout.count("K=") >= 20 and ("waits" in done.stdout or "balanced" in done.stdout)


@pytest.mark.slow
def test_advice_knows_sparse_models_by_name():
    cluster = ["hardware.chip=v5p", "hardware.chips=256", "hardware.rollout_chips=128", "hardware.tensor=32"]
    work = ["orchestrator.groups_per_step=16", "orchestrator.group_size=4", "workload.max_new_tokens=4096"]
    asked = [f"--config.{field}" for field in ("model.size=DeepSeek-V3", *cluster, *work)]
    done = simulate(f"--config={DEMO}", *QUICK, "--advise", *asked)
    assert done.returncode == 0, done.stderr
    assert "DeepSeek-V3: 671.0e9 parameters, of which a token meets 37.6e9; 70,272 bytes of KV a token" in done.stdout
    assert "on each of 32 chips" in done.stdout and done.stdout.count("K=") >= 10


@pytest.mark.parametrize(
    "args, sentence",
    [
        ([f"--config={DEMO}", "--config.model.size=Qwen4"], "model.size: 'Qwen4' is none of Qwen3-0.6B"),
        ([], "config: missing; name a file"),
        (["--config=configs/sim/absent.py"], "config: configs/sim/absent.py does not exist"),
        ([f"--config={DEMO}", "--config.hardware.chps=3"], "unknown field; the nearest is config.hardware.chips"),
        ([f"--config={DEMO}", "--config.hardware.chips=many"], "hardware.chips"),
        ([f"--config={DEMO}", "--config.hardware.chip=v9"], "hardware.chip: 'v9' is none of v4"),
        ([f"--config={DEMO}", "--config.hardware.rollout_chips=16"], "leave none to the trainer"),
        ([f"--config={DEMO}", "--config.orchestrator.inflight=0.001"], "could never progress"),
        ([f"--config={DEMO}", "--config.workload.max_new_tokens=9000000"], "cannot serve this run"),
        ([f"--config={DEMO}", "surplus"], "'surplus': not a flag"),
        ([f"--config={DEMO}", "--trce=x"], "trce"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args, sentence):
    done = simulate(*args)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert sentence in lines[0] and "Traceback" not in done.stderr


def test_a_mistake_in_the_file_names_its_line(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("from dora_jax.sim import config\ndef get_config():\n    c = config.defaults()\n    c.stepz = 3\n")
    done = simulate(f"--config={path}")
    assert done.returncode == 2 and "broken.py:4" in done.stderr and "stepz" in done.stderr


def test_a_replay_needs_no_configuration(tmp_path):
    journal = tmp_path / "absent.jsonl"
    done = simulate(f"--replay={journal}")
    assert done.returncode == 2 and "absent.jsonl does not exist" in done.stderr
