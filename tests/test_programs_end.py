"""The end of programs in the sandbox, of their clients and of their server; and machines that lack a wall."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from dora_jax.config import ConfigError
from dora_jax.tasks import code, sandbox
from dora_jax.tasks.sandbox import programs
from dora_jax.tasks.sandbox.bubblewrap import interpreter
from tests.fakes.reward_pool import pools
from tests.fakes.sandbox import FORMS, alive, descendants, needs_sandbox, server
from tests.soak import sandbox as bench


@pytest.fixture(scope="module", params=FORMS)
def opened(request):
    with server(request.param) as opened:
        yield opened


# ---------------------------------------------------------------- the end


@needs_sandbox
def test_a_client_that_goes_away_takes_its_program_along(opened):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(opened.client, [b"."], [theirs.fileno()])
        limits = programs.dataclasses.asdict(programs.Limits(wall_s=600.0))
        ours.sendall(
            programs.json.dumps({"program": "import time; time.sleep(600)", "stdin": "", "limits": limits}).encode()
        )
        ours.shutdown(socket.SHUT_WR)
        while len(descendants(opened.pid)) < opened.own + 4:  # runner, bwrap, its first process, the program
            time.sleep(0.01)
    while len(descendants(opened.pid)) > opened.own:
        time.sleep(0.01)


@needs_sandbox
@pytest.mark.parametrize("form", FORMS)
def test_a_server_that_is_killed_takes_its_programs_along_and_is_an_error_never_a_result(form):
    received = []

    def ask():
        try:
            received.append(opened.run("import time; time.sleep(600)", limits=programs.Limits(wall_s=600.0)))
        except programs.SandboxError as error:
            received.append(str(error))

    with server(form) as opened:
        thread = threading.Thread(target=ask)
        thread.start()
        while len(below := descendants(opened.pid)) < opened.own + 4:
            time.sleep(0.01)
        os.kill(opened.pid, signal.SIGKILL)
        thread.join()
    assert received == ["the sandbox server is gone"]
    while any(map(alive, below)):
        time.sleep(0.01)


@needs_sandbox
@pytest.mark.slow
def test_many_runs_leave_nothing_behind():
    table = [line.split() for line in bench.sandbox(starts=3, runs=101)]  # exits where anything is wrong
    left = {row[0]: row[1:] for row in table if row and row[0] in ("processes", "mounts", "files", "descriptors")}
    assert len(left) == 4 and all(before == after for before, after in left.values())


# ---------------------------------------------------------------- what a machine lacks


@needs_sandbox
def test_a_sandbox_that_does_not_hold_is_named(monkeypatch):
    """The probe without its limit of processes is a machine on which that limit does not bind."""
    monkeypatch.setattr(programs, "PROBE_PROCESSES", 64)
    assert programs.lack.__wrapped__() == "its processes are not limited"


def test_without_bwrap_code_rewards_are_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(programs, "lack", lambda python: "bwrap is not installed (package bubblewrap)")
    sentence = "this machine cannot sandbox programs: bwrap is not installed"
    with pools() as open_pool:
        with pytest.raises(
            ConfigError, match=f"task.rewards: dora_jax.tasks.code.stdio runs what a model writes, and {sentence}"
        ):
            open_pool("dora_jax.tasks.code.stdio")
        with pytest.raises(ConfigError, match=f"task.sandbox = True, and {sentence}"):
            open_pool("dora_jax.tasks.rewards.exact", sandbox=True)
    with pytest.raises(ConfigError, match=f"environment.name: dora_jax.tasks.code.PythonTool runs .*, and {sentence}"):
        code.may_run("environment", "name", ("dora_jax.tasks.code.PythonTool",), False)


@needs_sandbox
def test_programs_have_the_packages_of_the_interpreter_that_is_named():
    """Its folders are read as a user who owns nothing: those of pytest are closed to that one."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        subprocess.run([interpreter("")[0], "-m", "venv", "--without-pip", f"{folder}/env"], check=True)
        (packages,) = Path(folder).glob("env/lib/python*/site-packages")
        (packages / "numbers_of_mine.py").write_text("SEVEN = 7")
        (Path(folder) / "secret").write_text("hunter2")
        python = f"{folder}/env/bin/python"
        assert programs.lack(python) == ""
        server = programs.Server(python)
        try:
            ran = server.run(
                "import os, sys, numbers_of_mine as n\nprint(n.SEVEN, sys.prefix, os.listdir(sys.argv[1:] or '..'))"
            )
            assert ran.stdout.startswith(f"7 {folder}/env") and not ran.stderr, ran
            assert "FileNotFoundError" in server.run(f"open('{folder}/secret')").stderr
            assert "Read-only file system" in server.run(f"open('{folder}/env/more', 'w')").stderr
        finally:
            server.end()
        with pytest.raises(ConfigError, match=f"task.sandbox_python = '{folder}/none', and .* is no Python that runs"):
            code.may_run("task", "rewards", (), True, f"{folder}/none")


@needs_sandbox
@pytest.mark.skipif(bool(sandbox.lack_of("namespaces")), reason="no user namespaces")
def test_a_machine_without_namespaces_is_found_out():
    script = """
import ctypes, os
from dora_jax.tasks import programs
uid = os.getuid()
ctypes.CDLL(None).unshare(0x10000000)
open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
open("/proc/sys/user/max_user_namespaces", "w").write("0")
print(programs.lack())
try: programs.run("print(1)")
except programs.SandboxError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    reason = "unshare: No space left on device"
    assert done.stdout == f"{reason}\nthis machine cannot sandbox programs: {reason}\n"
