"""How a program of ours ends upon a signal: in time, with code 42, one line and no trace, whatever it is doing."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from dora_jax.base.exits import RETRY, Stop
from dora_jax.runtime.common.shutdown import STAGE_END_S, Guard

ROOT = Path(__file__).parent.parent
ITSELF = "import os, signal, time; os.kill(os.getpid(), signal.{}); time.sleep(60)\n"
OURS = ("train", "sft", "evaluate", "export_hf", "sweep", "simulate")


def python(*args, cwd, path="", code=RETRY, timeout=60):
    """Runs Python; what it printed on stderr."""
    done = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": f"{path}:{ROOT}"},
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.mark.parametrize("program", OURS)
def test_a_signal_while_a_program_is_imported(tmp_path, program):
    (tmp_path / "absl").mkdir()
    (tmp_path / "absl/__init__.py").write_text(ITSELF.format("SIGINT"))
    (tmp_path / "numpy.py").write_text(ITSELF.format("SIGINT"))
    output = python("-m", f"dora_jax.{program}", cwd=tmp_path, path=tmp_path)
    assert output == "SIGINT: stopped before a run began (exit code 42)\n"


def test_a_signal_while_jax_is_imported(tmp_path):
    (tmp_path / "jax.py").write_text(ITSELF.format("SIGTERM"))
    output = python("-m", "dora_jax.train", f"--config={ROOT}/configs/quickstart.py:tiny", cwd=tmp_path, path=tmp_path)
    assert output == "SIGTERM: stopped before a run began (exit code 42)\n"


STUCK = """
    import hashlib, os, signal, sys, threading
    from dora_jax.runtime.common import shutdown
    shutdown.GRACE_S = 0.2
    with shutdown.Guard(0.0, owner=True):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in C, in which no Python handler runs
    """


def test_a_main_thread_that_is_stuck_in_a_call_is_left_behind_at_the_deadline(tmp_path):
    (tmp_path / "stuck.py").write_text(textwrap.dedent(STUCK))
    output = python("stuck.py", cwd=tmp_path)
    assert output.startswith("SIGTERM: ") and output.endswith("(exit code 42)\n") and output.count("\n") == 1


COMPILING = """
    import threading
    from dora_jax import flags
    from dora_jax.base.exits import RETRY
    def main(config, workdir):
        import jax
        import jax.numpy as jnp
        def slow(x):
            for _ in range(60):
                x = jnp.sort(jnp.sin(x) @ x)
            return x
        for lowered in [jax.jit(slow).lower(jnp.ones((n, n))) for n in range(6, 12)]:
            threading.Thread(target=lowered.compile, daemon=True).start()
        return RETRY
    flags.run(main)
    """


def test_a_stopped_program_does_not_abort_over_what_still_compiles(tmp_path):
    (tmp_path / "compiling.py").write_text(textwrap.dedent(COMPILING))
    assert python("compiling.py", f"--config={ROOT}/configs/quickstart.py:tiny", cwd=tmp_path) == ""


def test_a_caller_of_the_library_is_interrupted_and_keeps_its_process():
    old = signal.getsignal(signal.SIGTERM)
    with Guard(0.0) as guard:
        with pytest.raises(Stop, match="SIGTERM"):  # before the loop: at once
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stop):
            guard.look()
        with pytest.raises(Stop):  # in the loop, asked twice
            signal.raise_signal(signal.SIGTERM)
        assert guard.patience_s == STAGE_END_S  # its interpreter must not end over a thread that computes
    assert signal.getsignal(signal.SIGTERM) == old and signal.set_wakeup_fd(-1) == -1


@pytest.mark.filterwarnings("error")
def test_the_loop_of_a_program_is_not_cut_in_half():
    with Guard(0.0, owner=True) as guard:
        guard.look()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert guard.patience_s == 0
        with pytest.raises(Stop, match="the same command goes on"):
            guard.look()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_inside_a_callback_that_drops_it_leaves_no_trace_and_is_raised_again():
    class Collected:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    with Guard(0.0, owner=True) as guard:
        Collected()
        with pytest.raises(Stop, match="SIGTERM"):
            guard.look()


def test_off_the_main_thread_signals_are_left_alone():
    old, found = signal.getsignal(signal.SIGTERM), []

    def run():
        with Guard(600.0, owner=True) as guard:
            guard.stepped()
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [old]
