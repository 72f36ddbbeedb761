"""The sandbox server: `python -m dora_jax.tasks.sandbox.program_server CHANNEL [PYTHON]`, started by programs.py
outside every wall; PYTHON runs the programs.

    client -- a connection's descriptor --> server -- fork --> runner -- fork --> bubblewrap.py --> bwrap --> the
    program
       <-- on the connection: {"program", "stdin", "limits"}, then {"stdout", ..., "ended_by"} or {"error"} -->

Laws: at most MOST_AT_ONCE runners; a result is sent when every process of its program is gone, and its mounts with
them; the death of client, server or runner ends the program. Imports the standard library and its neighbours only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, NamedTuple

from dora_jax.tasks.sandbox import seccomp
from dora_jax.tasks.sandbox.bubblewrap import OPEN_FILES, Unavailable, become_bwrap, interpreter, machine
from dora_jax.tasks.sandbox.supervisor import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl

MOST_AT_ONCE = max(2, os.cpu_count() or 1)
MOST = {  # whatever a client asks for; a client may be code that reads what a model wrote
    "cpu_s": 3600,
    "wall_s": 3600,
    "memory_bytes": 8 * 2**30,
    "files_bytes": 2**30,
    "output_bytes": 64 * 2**20,
    "processes": 256,
}
MAX_REQUEST_BYTES = 64 * 2**20
START_TIMEOUT_S = 20.0  # for the sandbox, on a machine that may be busy; no time of the program
LOOK_PERIOD_S = 0.05  # between two looks at what all processes of a program use
PATIENCE_S = 60.0  # beyond BUSY times its wall_s: a program that still has not had its time is the machine's fault
BUSY = 20
PIPE_BYTES = 2**16
SOCKET_BYTES = 212_992  # net.core.wmem_default of Linux; seccomp.py lets no program set another


def serve(channel: socket.socket, python: str = "") -> None:
    """Serve until the channel ends; this process then ends, and its runners with it."""
    by: tuple[str, list[str]] | Unavailable
    try:
        by = interpreter(python)
    except Unavailable as error:  # which every request is answered
        by = error
    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    runners = 0
    while True:
        sources = [woken, channel.fileno()] if runners < MOST_AT_ONCE else [woken]
        ready, _, _ = select.select(sources, [], [])
        if woken in ready:
            os.read(woken, 4096)
            while runners and os.waitpid(-1, os.WNOHANG)[0]:
                runners -= 1
        if channel.fileno() in ready:
            message, fds, _, _ = socket.recv_fds(channel, 1, 1)
            if not message:
                return
            if os.fork() == 0:
                channel.close()
                # The runner: one request, one reply.
                connection = socket.socket(fileno=fds[0])
                try:
                    signal.set_wakeup_fd(-1)
                    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                    prctl(PR_SET_CHILD_SUBREAPER, 1)
                    body = bytearray()
                    while part := connection.recv(PIPE_BYTES * 16):
                        body += part
                        if len(body) > MAX_REQUEST_BYTES:
                            raise Unavailable(0, f"a request of over {MAX_REQUEST_BYTES} bytes")
                    if isinstance(by, Unavailable):
                        raise by
                    reply = _Runner(connection, by, **json.loads(body)).run()
                except OSError as error:
                    reply = {"error": error.strerror or str(error)}
                except BaseException as error:  # the client reads the sentence
                    reply = {"error": f"{type(error).__name__}: {error}"}
                try:
                    connection.sendall(json.dumps(reply).encode())
                except OSError:
                    pass  # the client is gone
                os._exit(0)
            for fd in fds:
                os.close(fd)
            runners += 1


class _Runner:
    """One program from start to end. by: what `interpreter` returned. `limits`: see programs.Limits."""

    def __init__(
        self, connection: socket.socket, by: tuple[str, list[str]], program: str, stdin: str, limits: dict[str, Any]
    ):
        for name, most in MOST.items():
            if not 0 < limits[name] <= most:
                raise Unavailable(0, f"{name}: {limits[name]} is not between 0 and {most}")
        self._connection, self._by = connection, by
        self._program = program.encode(errors="replace")
        self._stdin = memoryview(stdin.encode(errors="replace"))
        self._limits = limits
        self._output = {1: bytearray(), 2: bytearray()}
        self._sources: dict[int, int] = {}  # reading end of a pipe -> the descriptor that it is to the program
        self._ended_by = ""
        self._started_s = math.inf
        self._seen, self._ran_s, self._spent_s, self._looked_s = _Usage(), 0.0, 0.0, 0.0  # as of the last look

    def run(self) -> dict[str, Any]:
        filter_fd, write_end = os.pipe()
        os.write(write_end, seccomp.compiled(machine()))  # which is less than a pipe holds
        os.close(write_end)
        taken, self._feed = os.pipe()
        (out, out_end), (err, err_end), (status, status_end), (started, started_end) = (os.pipe() for _ in range(4))
        theirs = [taken, out_end, err_end, filter_fd, status_end, started_end]
        self._group = memory_group(self._limits["memory_bytes"])
        bwrap = os.fork()
        if not bwrap:
            if self._group:
                with open(f"{self._group}/cgroup.procs", "w") as procs:
                    procs.write("0")  # this process
            become_bwrap(self._program, self._limits, theirs, *self._by)
        for fd in theirs:
            os.close(fd)
        self._sources = {out: 1, err: 2}
        for fd in (self._feed, out, err):
            os.set_blocking(fd, False)
        # Until the program has ended by itself, or has to be ended: `_ended_by` then says by which limit.
        ended = os.pidfd_open(bwrap)
        poll = select.poll()
        poll.register(self._connection, 0)  # only the client's going away
        poll.register(self._feed, select.POLLOUT)
        for fd in (ended, started, *self._sources):
            poll.register(fd, select.POLLIN)
        now_s = time.monotonic()
        start_by_s, look_s = now_s + START_TIMEOUT_S, now_s + LOOK_PERIOD_S
        over = False
        while not over and not self._ended_by:
            events = poll.poll(math.ceil(1000 * max(0.0, look_s - now_s)))
            now_s = time.monotonic()
            for fd, _ in events:
                if fd == started:
                    poll.unregister(fd)
                    if os.read(fd, 1):  # else bwrap has failed, and ends
                        self._started_s = now_s
                elif fd == ended:
                    over = True
                elif fd == self._connection.fileno():
                    self._ended_by = "client"
                elif not (self._write() if fd == self._feed else self._read(fd)):
                    poll.unregister(fd)
            if now_s >= look_s and not over:
                self._look(bwrap, now_s)
                look_s = now_s + min(LOOK_PERIOD_S, max(0.001, self._limits["wall_s"] - self._spent_s))
            if self._started_s == math.inf and now_s >= start_by_s and not over:
                self._ended_by = "time"
        if self._started_s < math.inf:
            self._spent_s += min(time.monotonic() - max(self._looked_s, self._started_s), LOOK_PERIOD_S)
        # Kills every child, adopted ones included, until none is left; a namespace ends when its first process has.
        with contextlib.suppress(ChildProcessError):
            while True:
                for pid in _children(os.getpid()):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
        for fd in list(self._sources):
            while not self._ended_by and self._read(fd):
                pass
        if self._group:
            with open(f"{self._group}/memory.events") as group_events:
                if re.search("^oom_kill [1-9]", group_events.read(), re.MULTILINE) and not self._ended_by:
                    self._ended_by = "memory"
            os.rmdir(self._group)
        with open(status, "rb") as file, open(started, "rb") as reported:
            return self._result(file.read(), reported.read().split(), time.monotonic() - self._started_s)

    def _look(self, bwrap: int, now_s: float) -> None:
        """Ends the program where it holds too much, or has had its time: that in which it waited for a core, beside
        whatever the machine does, is not its own. More processes than cores wait for each other, which is."""
        used, before = _usage(bwrap), self._seen
        self._seen = used
        if self._started_s == math.inf:
            return
        if used.held_bytes > self._limits["memory_bytes"] and not self._group:
            self._ended_by = "memory"
        # The kernel counts a wait when it ends: of what is ready to run now, all that it did not run was a wait.
        period_s, self._looked_s = now_s - max(self._looked_s, self._started_s), now_s
        ran_s, waited_s = max(0.0, used.ran_s - before.ran_s), max(0.0, used.waited_s - before.waited_s)
        self._ran_s += ran_s
        self._spent_s += min(period_s, ran_s) if used.ready else max(0.0, period_s - waited_s)
        if self._spent_s >= self._limits["wall_s"]:
            self._ended_by = "time"
        elif now_s - self._started_s > BUSY * self._limits["wall_s"] + PATIENCE_S:
            self._ended_by = "machine"

    def _write(self) -> bool:
        """Feeds the program's input; False where there is no more of it, or nothing reads it."""
        try:
            self._stdin = self._stdin[os.write(self._feed, self._stdin[:PIPE_BYTES]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self._stdin = self._stdin[:0]
        if not self._stdin:
            os.close(self._feed)
        return bool(self._stdin)

    def _read(self, fd: int) -> bool:
        """Takes what the program has written; False at its end."""
        try:
            part = os.read(fd, PIPE_BYTES)
        except BlockingIOError:
            return False
        self._output[self._sources[fd]] += part
        if sum(map(len, self._output.values())) > self._limits["output_bytes"]:
            self._ended_by = "output"
        return bool(part)

    def _result(self, status: bytes, reported: list[bytes], wall_s: float) -> dict[str, Any]:
        """status: of bwrap; reported: by START."""
        outcome: dict[str, Any] = {}
        for line in status.splitlines():
            outcome |= json.loads(line)
        code = outcome.get("exit-code")
        stdout, stderr = (
            bytes(self._output[fd][: self._limits["output_bytes"]]).decode(errors="replace") for fd in (1, 2)
        )
        if "error" in outcome:
            return {"error": outcome["error"]}
        if self._started_s == math.inf:
            waited = f"its sandbox was not up within {START_TIMEOUT_S:.0f} s"
            return {"error": waited if self._ended_by else (stderr.strip().splitlines() or ["bwrap ended"])[-1]}
        if self._ended_by == "machine":
            return {"error": f"a program of {self._limits['wall_s']:g} s had {self._spent_s:.1f} s in {wall_s:.0f} s"}
        signalled = True  # of START itself, by its program
        if reported and reported[-1].isdigit():
            code = int(reported[-1])
            signalled = len(reported) > 1 or code - 128 in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)
        if code is not None and 128 < code <= 128 + signal.SIGRTMAX and signalled:
            code = 128 - code
        cpu_s = math.ceil(self._limits["cpu_s"])
        if not self._ended_by and (
            code == -signal.SIGXCPU or code == -signal.SIGKILL and self._ran_s >= cpu_s - 2 * LOOK_PERIOD_S
        ):  # the second: of one that ignores the first
            self._ended_by = "cpu"
        return {
            "stdout": stdout,
            "stderr": stderr,
            "exit_code": -signal.SIGKILL if code is None else code,
            "ended_by": self._ended_by,
            "wall_s": wall_s,
            "spent_s": self._spent_s,
        }


# ---------------------------------------------------------------- processes


def memory_group(limit_bytes: int, cgroups: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> str:
    """A new group of cgroup v2 beside that of this process, which holds what is in it to so many bytes; empty where
    none can be made."""
    try:
        with open(own) as groups:
            ours = next((line[3:].strip() for line in groups if line.startswith("0::")), "")
        above = os.path.join(cgroups, os.path.dirname(ours)[1:])
        with open(f"{above}/cgroup.subtree_control") as control:
            if not ours or "memory" not in control.read().split():
                return ""
        group = os.path.join(above, f"dora-program-{os.getpid()}")
        with contextlib.suppress(OSError):
            os.rmdir(group)  # of a runner that was killed
        os.mkdir(group)
        for name, value in (("memory.oom.group", 1), ("memory.max", limit_bytes), ("memory.swap.max", 0)):
            with contextlib.ExitStack() as opened:
                if name == "memory.swap.max":
                    opened.enter_context(contextlib.suppress(OSError))  # where there is no swap
                opened.enter_context(open(f"{group}/{name}", "w")).write(str(value))
        return group
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            found += map(int, file.read().split())
    return found


class _Usage(NamedTuple):
    """What processes use."""

    held_bytes: int = 0  # what they share counts for each of them
    ran_s: float = 0.0
    waited_s: float = 0.0  # ready to run, without a core
    ready: int = 0  # threads that run now, or would if they had a core


def _usage(pid: int) -> _Usage:
    """Usage of a process and its descendants. A socket counts with all that may wait in it: the kernel's memory, which
    no limit of a process bounds. Where a process forbids the look, each of its files counts as one."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            held_bytes = int(file.read().split()[1]) * resource.getpagesize()
        try:
            files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            sockets = sum(name.startswith("socket:") for name in files)
        except PermissionError:
            sockets = OPEN_FILES
        held_bytes += SOCKET_BYTES * sockets
        ran_s = waited_s = 0.0
        ready = 0
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                ran, waited, _ = map(int, file.read().split())
            ran_s, waited_s = ran_s + ran / 1e9, waited_s + waited / 1e9
            with open(f"/proc/{pid}/task/{task}/stat", "rb") as stat:
                ready += stat.read().rpartition(b") ")[2].startswith(b"R")
        below = [_usage(child) for child in _children(pid)]
    except (FileNotFoundError, ProcessLookupError):
        return _Usage()  # it has just ended
    own = _Usage(held_bytes, ran_s, waited_s, ready)
    return _Usage(*map(sum, zip(own, *below, strict=True)))


if __name__ == "__main__":
    given = socket.socket(fileno=int(sys.argv[1]))
    given.set_inheritable(False)
    serve(given, *sys.argv[2:])
