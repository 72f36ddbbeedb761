"""Programs that a model wrote, run in the strongest sandbox that a machine has: for rewards and tools.

    run(program, stdin) --> the sandbox server (program_server.py; bubblewrap.py says how they are confined) --> Ran

The server is outside the sandbox of a reward worker, because what it needs (another user id, namespaces) is what that
sandbox takes away; a worker reaches it by a descriptor that VARIABLE names. A process without one starts a server of
its own. Laws: what the program does is a Ran; what the machine does wrong is SandboxError, and never a Ran. `lack`
tries each part of the sandbox with a program that attacks it; where one does not hold, `check` refuses, and nothing
weaker runs.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from dora_jax.tasks import sandbox
from dora_jax.tasks.sandbox import bubblewrap

VARIABLE = "DORA_SANDBOX_FD"
MIB = 2**20


class SandboxError(Exception):
    """The machine could not run a program: one sentence. It says nothing about the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Each is above 0 and at most what program_server.MOST allows; SandboxError for others."""

    cpu_s: float = 5.0  # of each process, rounded up to whole seconds
    wall_s: float = 10.0  # from the first instruction on, without the time that it waited for a core
    memory_bytes: int = 512 * MIB  # of each process' addresses, and of what all of them hold, sockets included: by a
    # group of cgroup v2 where one can be made beside that of the run, else as it is seen from time to time
    files_bytes: int = 16 * MIB  # in /tmp, which is memory too
    output_bytes: int = MIB  # stdout and stderr together
    processes: int = 64  # threads included


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a program did. Bytes that are no UTF-8 are replaced in the texts."""

    stdout: str
    stderr: str
    exit_code: int  # negative: the signal; 130, 141 and 143, which may be either, count as signals
    ended_by: str  # "": itself; else the limit that ended it: time, cpu, memory, output
    wall_s: float
    spent_s: float  # of wall_s, what its limit counts


class Server:
    """A sandbox server of this process. `client` is the descriptor to pass on to those that may run programs. python:
    the interpreter that runs them, which they then see with its packages; empty: that of /usr."""

    def __init__(self, python: str = "") -> None:
        ours, theirs = socket.socketpair()
        module = "dora_jax.tasks.sandbox.program_server"
        with theirs:
            self._walled = sandbox.start(
                [sys.executable, "-P", "-S", "-m", module, str(theirs.fileno()), python],
                form=sandbox.WEAK,  # our own code; its programs have a sandbox of their own
                env={"PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONDONTWRITEBYTECODE": "1"},
                pass_fds=(theirs.fileno(),),
            )
        self.client, self.pid = ours, self._walled.pid

    def run(self, program: str, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Ran:
        return ask(self.client, program, stdin, limits)

    def end(self) -> None:
        """Every program of it is killed and gone when this returns."""
        self.client.close()
        self._walled.end()


def run(program: str, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Ran:
    """Runs a Python program to its end, from any thread; SandboxError where this machine or the server cannot."""
    return ask(_client(), program, stdin, limits)


def check(python: str = "") -> None:
    """Raises NoSandbox with the reason where this machine cannot sandbox programs of this interpreter."""
    if reason := lack(python):
        raise sandbox.NoSandbox(f"this machine cannot sandbox programs: {reason}")


@functools.cache
def lack(python: str = "") -> str:
    """ "" where every part of the sandbox holds against a program that tries it, else which one does not."""
    server = Server(python)
    try:
        shown = {folder.split("/")[1] for folder in bubblewrap.interpreter(python)[1]}
        ran = server.run(
            _TRY_SANDBOX % " ".join(shown), limits=Limits(processes=PROBE_PROCESSES, files_bytes=PROBE_FILES_BYTES)
        )
    except SandboxError as error:
        return str(error)
    except bubblewrap.Unavailable as error:
        return str(error.strerror)
    finally:
        server.end()
    if ran.ended_by or ran.exit_code:
        last = ran.stderr.strip().splitlines()[-1:] or [f"exit code {ran.exit_code}"]
        return f"the program that tries the sandbox ended by {ran.ended_by or 'itself'}: {last[0]}"
    return ran.stdout.strip()


PROBE_PROCESSES, PROBE_FILES_BYTES = 16, MIB
_TRY_SANDBOX = f"""
import os, socket, time
def tried(attack):
    try:
        return attack() is not False
    except OSError:
        return False
def status(name):
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith(name))
def flood():
    with open("/tmp/flood", "wb") as file:
        for _ in range(2):
            file.write(bytes({PROBE_FILES_BYTES}))
def fork():
    for _ in range({PROBE_PROCESSES}):
        if not os.fork():
            time.sleep(60)
holes = {{
    "it is root": os.getuid() == 0,
    "it has capabilities": int(status("CapEff"), 16) or int(status("CapBnd"), 16),
    "it may gain privileges": status("NoNewPrivs") != "1",
    "system calls are not filtered": status("Seccomp:") != "2",
    "it sees other processes": len([name for name in os.listdir("/proc") if name.isdigit()]) > 3,
    "it sees the machine's files": set(os.listdir("/")) - set("usr bin sbin lib lib32 lib64 etc proc tmp dev".split())
        - set("%s".split()),
    "it may write outside /tmp": tried(lambda: open("/file", "w")),
    "its files are not limited": tried(flood),
    "it reaches the network": tried(lambda: socket.socket(socket.AF_INET)),
    "its processes are not limited": tried(fork),
}}
print(*[hole for hole, open_ in holes.items() if open_], sep=", ")
"""


# ---------------------------------------------------------------- the wire


@functools.cache
def _client() -> socket.socket:
    given = os.environ.get(VARIABLE)
    if given is not None:
        return socket.socket(fileno=int(given))
    try:
        check()
    except sandbox.NoSandbox as error:
        raise SandboxError(str(error)) from error
    server = Server()
    atexit.register(server.end)
    return server.client


def ask(client: socket.socket, program: str, stdin: str, limits: Limits) -> Ran:
    """`run` by the server at the other end of `client`."""
    ours, theirs = socket.socketpair()
    request = {"program": program, "stdin": stdin, "limits": dataclasses.asdict(limits)}
    reply = bytearray()
    with ours:
        try:
            with theirs:
                socket.send_fds(client, [b"."], [theirs.fileno()])
            ours.sendall(json.dumps(request).encode())
            ours.shutdown(socket.SHUT_WR)
            while part := ours.recv(MIB):
                reply += part
        except OSError as error:
            raise SandboxError(f"the sandbox server is gone ({error.strerror})") from error
    if not reply:
        raise SandboxError("the sandbox server is gone")
    answer = json.loads(reply)
    if "error" in answer:
        raise SandboxError(answer["error"])
    return Ran(**answer)
