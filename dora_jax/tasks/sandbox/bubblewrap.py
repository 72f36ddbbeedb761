"""The sandbox of a model's program (bubblewrap), set up by the process that becomes it: a runner's child
(program_server.py).

In the order in which they go up (`become_bwrap`):

    no variable but ENVIRONMENT, no descriptor but the program's own three    what `env -i` does, and more
    a user id that no other process has, where the server is root             what `setpriv` does
    a user namespace with a tmpfs of limited bytes and files on /tmp          the only place that can be written
    limits of each process (`_limit`)                                         what `prlimit` does
    bwrap: namespaces of every kind, a new session, /usr and devices read-only, no /etc, /home, /var
    seccomp.py

Without root the user namespace alone separates the program from the user's processes: its user id means nothing there.
Law: a wall that cannot be set up is the end of the child, before anything of the program runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import Any, NoReturn

from dora_jax.tasks.sandbox import seccomp, supervisor

ADDR_NO_RANDOMIZE = 0x0040000
NOBODY = 65534  # the user id that the program sees
FRESH_IDS = 2**22  # process numbers are below it, so that ids made of them differ
OPEN_FILES = 64
FILES = 4096  # in /tmp of the program
PROGRAM = "/tmp/program.py"
PYTHONS = ("/usr/local/bin/python3", "/usr/bin/python3")
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
SECCOMP_FD, STATUS_FD, STARTED_FD = 3, 4, 5
# Inside the sandbox: tells that it is up, runs the program, tells its exit code, behind a word where it was a signal
START = f'exec 6>&2 2>&{STARTED_FD}; echo >&2; (exec "$@" 2>&6 6>&- {STARTED_FD}>&-); echo $? >&2'
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # the order of sets is the same each time
    "PYTHONSAFEPATH": "1",
    "OPENBLAS_NUM_THREADS": "1",  # numpy: sums in one order, and few of the program's processes
    "OMP_NUM_THREADS": "1",
}


class Unavailable(OSError):
    """What the machine lacks, in one sentence."""


def interpreter(python: str) -> tuple[str, list[str]]:
    """(the command of an interpreter, the folders beside /usr that it needs). Empty: the first that read-only /usr
    holds, whatever the run's own is. Unavailable: there is none."""
    if not python:
        for path in PYTHONS:
            if os.path.realpath(path).startswith("/usr/") and os.access(path, os.X_OK):
                return path, []
        raise Unavailable(0, f"there is no Python among {', '.join(PYTHONS)}")
    asked = "import os, sys; print(sys.executable, *{sys.prefix, sys.base_prefix}, sep=chr(10))"
    try:
        done = subprocess.run([python, "-I", "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(0, f"{python} is no Python that runs: {error}") from error
    command, *folders = done.stdout.splitlines()
    if hidden := [folder for folder in folders if f"{folder}/".startswith("/tmp/")]:
        raise Unavailable(0, f"{hidden[0]} is in /tmp, where a program has files of its own")
    return command, sorted(folder for folder in folders if not f"{folder}/".startswith("/usr/"))


def become_bwrap(
    program: bytes, limits: dict[str, Any], fds: list[int], python: str, folders: Sequence[str]
) -> NoReturn:
    """fds: stdin, stdout, stderr, SECCOMP_FD, STATUS_FD, STARTED_FD. What fails is a line of JSON on STATUS_FD."""
    for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in fds]):
        os.dup2(fd, number)
    os.closerange(len(fds), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    try:
        os.setsid()
        os.umask(0o022)
        _take_fresh_ids()
        supervisor.new_namespaces(supervisor.CLONE_NEWUSER | supervisor.CLONE_NEWNS, NOBODY, NOBODY)
        options = f"size={limits['files_bytes']},nr_inodes={FILES},mode=700".encode()
        supervisor.call("mount", b"tmpfs", b"/tmp", b"tmpfs", supervisor.MS_NOSUID | supervisor.MS_NODEV, options)
        with open(PROGRAM, "xb") as file:
            file.write(program)
        # Of each process; the number of processes is of the user id within the namespace, so of this program alone.
        cpu_s = math.ceil(limits["cpu_s"])
        for kind, soft, hard in (
            (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),  # SIGXCPU, then SIGKILL
            (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
            (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
            (resource.RLIMIT_FSIZE, limits["files_bytes"], limits["files_bytes"]),
            (resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
            (resource.RLIMIT_MEMLOCK, 0, 0),
            (resource.RLIMIT_CORE, 0, 0),
        ):
            _, ours = resource.getrlimit(kind)
            most = hard if ours == resource.RLIM_INFINITY else min(hard, ours)
            resource.setrlimit(kind, (min(soft, most), most))
        supervisor.prctl(supervisor.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of the user id clears it
        for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):  # nohup ignores one
            signal.signal(number, signal.SIG_DFL)
        supervisor.call("personality", ADDR_NO_RANDOMIZE)  # the order of objects by address is the same each time
        command = [*_bwrap(folders), "--", "/bin/sh", "-c", START, "sh", python, "-s", PROGRAM]
        os.execve(command[0], command, ENVIRONMENT)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        os.write(STATUS_FD, json.dumps({"error": f"{where}{error.strerror or error}"}).encode() + b"\n")
    finally:
        os._exit(1)


def _take_fresh_ids() -> None:
    """A user and group id that no other process has, made of our process number; without root, our own remain."""
    if os.geteuid() != 0:
        return
    with open("/proc/self/uid_map") as file:
        lines = [tuple(map(int, line.split())) for line in file]
    # how many user ids from 0 on this user namespace has; the highest are the least likely to be in use
    ids = min(max((first + count for first, _, count in lines if first == 0), default=0), 2**31)
    if ids < 2:
        return
    fresh = ids - 1 - os.getpid() % min(ids // 2, FRESH_IDS)
    try:
        for fd in range(3):
            os.fchown(fd, fresh, fresh)  # a program may open /dev/stdin
        os.setgroups([])
        os.setresgid(fresh, fresh, fresh)
        os.setresuid(fresh, fresh, fresh)
    except PermissionError:  # a root without the right to; what its sandbox then lacks is found by programs.lack()
        return
    supervisor.prctl(supervisor.PR_SET_DUMPABLE, 1)  # our /proc/self/uid_map is ours again


def _bwrap(folders: Sequence[str]) -> list[str]:
    """Return bwrap's path and options; `folders` are shown read-only beside /usr."""
    path = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
    if path is None:
        raise Unavailable(0, "bwrap is not installed (package bubblewrap)")
    command = [path, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--new-session", "--die-with-parent", "--hostname", "sandbox"]
    command += ["--seccomp", str(SECCOMP_FD), "--json-status-fd", str(STATUS_FD), "--ro-bind", "/usr", "/usr"]
    for folder in folders:
        command += ["--ro-bind", folder, folder]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc", "--bind", "/tmp", "/tmp"]
    for name in DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in LINKS.items():
        command += ["--symlink", target, f"/dev/{name}"]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp"]


def machine() -> str:
    machine = platform.machine()
    if machine not in seccomp.AUDIT_ARCH or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise Unavailable(0, f"there is no seccomp filter for {machine} (only for {', '.join(seccomp.AUDIT_ARCH)})")
    return machine
