"""Sandboxed programs: a clean environment, no view of other processes, and no descendant outlives its program.

    caller -- leash (a pipe) --> supervisor (supervisor.py) --> the program and its descendants

`start` returns at once; the supervisor sets the sandbox up, starts the program, waits for it or for the end of the
leash, kills what is left and exits as the program did. The end of the leash is also how the death of the caller
arrives.

    form        other processes                        its own descendants end          needs
    namespaces  are not there: /proc shows its own     by the kernel, all at once       user namespaces
    landlock    /proc, ptrace, signals are refused     by one signal to all of them     Linux 6.12 with Landlock
    weak        can be read and signalled              one by one, as often as needed   nothing

Every form: only the descriptors and variables that the caller names, no controlling terminal, no privileges by set-uid
programs, limited memory. The first two give up every capability as well. None of them hides files or the network: they
are for code of the user's and of ours, and programs.py, which builds on them, is for code that a model writes.
Laws: imports the standard library only; a form is what was asked for or NoSandbox, never another.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

FULL = ("namespaces", "landlock")  # in the order of preference: the kernel itself keeps the first one's books
WEAK = "weak"
SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
KEPT_VARIABLES = (
    "HOME",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "PYTHONHASHSEED",
    "SHELL",
    "TMPDIR",
    "TZ",
    "USER",
    "VIRTUAL_ENV",
)
PROBE_TIMEOUT_S = 30.0  # two interpreters start, on a machine that may be busy
END_TIMEOUT_S = 5.0  # for a supervisor whose leash is gone; then it is killed itself


class NoSandbox(RuntimeError):
    """What this machine lacks, in one sentence."""


class Walled:
    """A program that `start` has started. wait, poll: the program's exit code, negative for a signal; `wait` returns
    once every descendant is gone too, or raises subprocess.TimeoutExpired."""

    def __init__(self, supervisor: subprocess.Popen, leash: int):
        self.pid, self.poll, self.wait = supervisor.pid, supervisor.poll, supervisor.wait
        self._supervisor = supervisor
        self._leash = leash
        self._lock = threading.Lock()

    def end(self) -> None:
        """Kills the program and every descendant, and waits for that. May be called from any thread, and again."""
        with self._lock:
            if self._leash >= 0:
                os.close(self._leash)
                self._leash = -1
            try:
                self._supervisor.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()  # the kernel then ends the program, and behind namespaces its descendants
                self._supervisor.wait()


def start(
    argv: Sequence[str],
    *,
    form: str,
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    stdout: IO | None = None,
    memory_bytes: int = 0,
    cwd: str | None = None,
) -> Walled:
    """Starts argv in one of the forms; `stdout` takes stderr as well, None discards both. 0 bytes: no limit.

    memory_bytes: of the data of each process. What goes wrong before argv runs is on stdout, with exit code 125.
    """
    held, leash = os.pipe()
    spec = {"form": form, "leash": held, "fds": list(pass_fds), "memory_bytes": memory_bytes, "argv": list(argv)}
    try:
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", SUPERVISOR, json.dumps(spec)],
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env=dict(env),
            stdout=subprocess.DEVNULL if stdout is None else stdout,
            stderr=subprocess.STDOUT,
            pass_fds=(held, *pass_fds),
            start_new_session=True,
        )
    except BaseException:
        os.close(leash)
        raise
    finally:
        os.close(held)
    return Walled(supervisor, leash)


@functools.cache
def full() -> str:
    """The form of the full sandbox that this machine has, tried out once; NoSandbox says what each of them lacks."""
    lacks = []
    for form in FULL:
        reason = lack_of(form)
        if not reason:
            return form
        lacks.append(f"{form}: {reason}")
    raise NoSandbox("this machine cannot hide other processes from a program (" + "; ".join(lacks) + ")")


def best() -> str:
    """The strongest form of this machine: for what needs no sandbox."""
    try:
        return full()
    except NoSandbox:
        return WEAK


def clean_environment(more: Iterable[str] = ()) -> dict[str, str]:
    """Our variables for paths and language, and those named in `more`; nothing else, so no secret by accident."""
    kept = {*KEPT_VARIABLES, *more}
    return {name: value for name, value in os.environ.items() if name in kept or name.startswith("LC_")}


# What a program must not find: processes other than itself and, behind namespaces, the first one of its own.
_LOOK_AROUND = """
import os
try:
    seen = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1, os.getpid()}
except PermissionError:
    seen = set()
try:
    reached = os.getppid() and not os.kill(os.getppid(), 0)
except PermissionError:
    reached = False
raise SystemExit("other processes are still seen" if seen or reached else 0)
"""


def lack_of(form: str) -> str:
    """ "" where a program behind this form really sees no other process, else the reason."""
    with tempfile.TemporaryFile("w+") as report:
        walled = start(
            [sys.executable, "-I", "-S", "-c", _LOOK_AROUND], form=form, env=clean_environment(), stdout=report
        )
        try:
            code = walled.wait(PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"a program did not end within {PROBE_TIMEOUT_S:.0f} s"
        finally:
            walled.end()
        report.seek(0)
        lines = report.read().strip().splitlines() or [f"exit code {code}"]
    return "" if code == 0 else lines[-1].removeprefix("sandbox: ")
