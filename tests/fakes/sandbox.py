"""Sandbox servers: as the user who runs the tests (root where the machine is CI's), and as a plain user."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dora_jax.tasks.sandbox import programs

PLAIN_ID = 23457  # no process of the machine has it
SECRET = "hunter2"
PLAIN_SERVER = """
import os, socket, sys
from dora_jax.tasks.sandbox import program_server, supervisor
given = socket.socket(fileno=int(sys.argv[1]))
given.set_inheritable(False)
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(*[int(sys.argv[2])] * 3)
    os.setresuid(*[int(sys.argv[2])] * 3)
    supervisor.prctl(supervisor.PR_SET_DUMPABLE, 1)
program_server.serve(given)
"""

LACK = programs.lack() if shutil.which("bwrap") else "bwrap is not installed (package bubblewrap)"
needs_sandbox = pytest.mark.skipif(bool(LACK), reason=LACK)


IS_ROOT = os.geteuid() == 0
FORMS = [
    pytest.param("root", marks=pytest.mark.skipif(not IS_ROOT, reason="the tests do not run as root")),
    pytest.param("plain", marks=[pytest.mark.slow] if IS_ROOT else []),  # the same walls but for the user id
]


class Plain:
    """A server as a plain user, with a secret in its environment; what programs.Server is otherwise."""

    own = 0  # processes below `pid` that are there without a program

    def __init__(self):
        self.client, theirs = socket.socketpair()
        with theirs:
            root = str(Path(__file__).parents[2])
            self._process = subprocess.Popen(
                [sys.executable, "-c", PLAIN_SERVER, str(theirs.fileno()), str(PLAIN_ID)],
                env={"PYTHONPATH": root, "MY_SECRET": SECRET},
                pass_fds=(theirs.fileno(),),
            )
        self.pid = self._process.pid

    def run(self, program, stdin="", limits=programs.DEFAULT_LIMITS):
        return programs.ask(self.client, program, stdin, limits)

    def end(self):
        self.client.close()
        self._process.wait()


class Own(programs.Server):
    own = 1  # `pid` is the supervisor's


@contextlib.contextmanager
def server(form):
    opened = Plain() if form == "plain" else Own()
    try:
        yield opened
    finally:
        opened.end()


def descendants(pid):
    """Numbers of every process below `pid`, as the kernel tells them at this moment."""
    found, parents = [], {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    layer = {pid}
    while layer := {child for child, parent in parents.items() if parent in layer}:
        found += layer
    return sorted(found)


def alive(pid):
    """A process that has ended and waits for a parent of the machine's to notice is not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False
