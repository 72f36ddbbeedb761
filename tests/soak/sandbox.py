"""The sandbox of model-written programs: what a start costs beside bare Python, and what many runs leave behind.

    python -m tests.soak.sandbox [--starts=100] [--runs=1000] [--at_once=2]

starts   the same program of one line, by turns in the sandbox and by the bare interpreter that the sandbox uses
runs     PROGRAMS in turn, from `at_once` threads: programs that end well, fail, abort, leave daemons and files, fork to
         their limit, flood their output, and, each 100th, one that never ends
left     what is more after the runs than before them: processes below this one, mounts, files of the programs' user ids
         in the folders for temporary files, open descriptors of the server

Exits with 1 where a program's result is not the expected one or where anything is left, with 2 where the machine lacks
a wall.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dora_jax.bench import harness
from dora_jax.tasks.sandbox import NoSandbox, programs
from dora_jax.tasks.sandbox.bubblewrap import PYTHONS
from dora_jax.tasks.sandbox.programs import Limits, Server

ONE_LINE = "print(1)"
NEVER_EVERY = 100
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
print("daemon")
"""
FORKS = """
import os, time
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
except OSError:
    print("limit")
"""
# name: (program, its limits, (first characters of stdout, exit code, ended by))
PROGRAMS = {
    "hello": (ONE_LINE, Limits(), ("1\n", 0, "")),
    "fails": ("raise SystemExit(3)", Limits(), ("", 3, "")),
    "aborts": ("import os; os.abort()", Limits(), ("", -6, "")),
    "daemon": (DAEMON, Limits(), ("daemon\n", 0, "")),
    "files": ("for i in range(100): open(f'/tmp/{i}', 'w').write('x' * 1000)", Limits(), ("", 0, "")),
    "forks": (FORKS, Limits(processes=16), ("limit\n", 0, "")),
    "floods": ("while True: print('x' * 4096)", Limits(output_bytes=2**16), ("xxxxxxx", -9, "output")),
}
NEVER = ("while True: pass", Limits(wall_s=0.2), ("", -9, "time"))


IDS = range(2**31 - 2**22 - 1, 2**31)  # the user ids that programs have had, if the server is root


def one_run(server: Server, i: int) -> tuple[str, str]:
    """(name of the program, what is wrong with its result)."""
    name = "never" if i % NEVER_EVERY == NEVER_EVERY - 1 else list(PROGRAMS)[i % len(PROGRAMS)]
    program, limits, expected = PROGRAMS.get(name, NEVER)
    try:
        ran = server.run(program, limits=limits)
    except programs.SandboxError as error:
        return name, f"{name}: {error}"
    got = (ran.stdout[:7], ran.exit_code, ran.ended_by)
    return name, "" if got == expected else f"{name}: {got} {ran.stderr[-200:]!r}, not {expected}"


def books(server: Server) -> dict[str, int]:
    """What a run could leave, counted."""
    folders = {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"}
    files = 0
    for entry in (entry for folder in folders if os.path.isdir(folder) for entry in os.scandir(folder)):
        with contextlib.suppress(FileNotFoundError):
            files += entry.name == "program.py" or entry.stat(follow_symlinks=False).st_uid in IDS
    return {
        "processes": len(processes_below(os.getpid())),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "files": files,
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (server.pid, *processes_below(server.pid))),
    }


def processes_below(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(FileNotFoundError):  # the process has just ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError):  # or this thread of it
                for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
                    found += [child, *processes_below(child)]
    return found


def sandbox(starts=100, runs=1000, at_once=2) -> Iterator[str]:
    try:
        programs.check()
    except NoSandbox as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    python = next(path for path in PYTHONS if os.access(path, os.X_OK))
    bare = [python, "-I", "-B", "-c", ONE_LINE]
    server = Server()
    try:
        server.run(ONE_LINE)
        run_bare = functools.partial(subprocess.run, capture_output=True, check=True, env={})
        calls: dict[str, Any] = {"sandbox": (server.run, ONE_LINE), "bare python": (run_bare, bare)}
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for name, call in [*calls.items()] * starts:  # one after the other, so that a busy moment meets both
            taken[name].append(1000 * harness.timed(*call)[0])
        for name, times in taken.items():
            p50, p99 = statistics.median(times), sorted(times)[int(0.99 * (len(times) - 1))]
            yield f"{name:12} p50 {p50:6.1f} ms   p99 {p99:6.1f} ms   of {len(times)} starts"
        before = books(server)
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            took_s, results = harness.timed(lambda: list(pool.map(one_run, itertools.repeat(server), range(runs))))
        counts = collections.Counter(name for name, _ in results)
        counted = " ".join(f"{n} {name}" for name, n in counts.items())
        yield f"{runs} runs in {took_s:.1f} s, {runs / took_s:.0f}/s: {counted}"
        left_after_s = time.monotonic() + 10  # the last runner ends after its reply
        while (after := books(server)) != before and time.monotonic() < left_after_s:
            time.sleep(0.01)
        yield f"{'':12} before  after"
        for name, number in before.items():
            yield f"{name:12} {number:6}  {after[name]:5}"
    finally:
        server.end()
    wrong = [reason for _, reason in results if reason]
    wrong += [f"{after[name] - number} {name} are left" for name, number in before.items() if after[name] > number]
    if wrong:
        print(*wrong[:20], sep="\n", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    harness.run(sandbox)
