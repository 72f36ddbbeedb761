"""The supervisor of a sandboxed program: `python supervisor.py SPEC`, started by sandbox.py, which says what the
forms are.

Consumes {"form", "leash", "fds", "memory_bytes", "argv"}; ends when the program ends, when the leash ends, or on
SIGTERM. It kills every descendant of the program first, and exits with the program's exit code.
Laws: one thread; the standard library only, so that it starts in hundredths of a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

STRIKES_S = 3.0  # it kills for so long
STRIKE_PERIOD_S = 0.002
SETUP_FAILED = 125  # exit code where the sandbox cannot be set up


class _Supervisor:
    """Starts the program behind its sandbox, waits, and leaves nothing of it behind."""

    def __init__(self, spec: dict[str, Any]):
        self._spec = spec
        self._stopping = False  # to end, by SIGTERM
        self._first = 0  # process 1 of its own namespace
        self._program = 0
        self._status: int | None = None  # of the program, as waitpid gives it

        def on_sigterm(*_: object) -> None:
            self._stopping = True

        readable, wake = os.pipe()
        os.set_blocking(readable, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, on_sigterm)
        self._readable = readable
        os.set_inheritable(spec["leash"], False)

    def run(self) -> NoReturn:
        try:
            forms = {"namespaces": self._namespaces, "landlock": self._landlock, "weak": self._weak}
            enter, strike = forms[self._spec["form"]]()
            self._program = os.fork()
            if not self._program:
                self._become_program(enter)
        except OSError as error:
            self._fail(error)
        for fd in self._spec["fds"]:  # whose other end is to see when the program is gone
            os.close(fd)
        leash = self._spec["leash"]
        while self._status is None and not self._stopping:  # until the program has ended, or is to end
            ready, _, _ = select.select([leash, self._readable], [], [])
            if leash in ready:
                break  # its writers have closed it
            os.read(self._readable, 4096)
            self._reap()
        over_s = time.monotonic() + STRIKES_S
        while not self._reap():
            if time.monotonic() > over_s:
                print("sandbox: descendants are left that start others faster than they are killed", file=sys.stderr)
                break
            strike()
            time.sleep(STRIKE_PERIOD_S)
        # As the program did.
        code = SETUP_FAILED if self._status is None else os.waitstatus_to_exitcode(self._status)
        sys.stderr.flush()
        if code < 0:
            if code != -signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)

    def _reap(self) -> bool:
        """Whether no child is left, adopted ones included."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return False
                if pid == self._program:
                    self._status = status
                if pid == self._first:
                    self._first = 0  # another process may get its number
        except ChildProcessError:
            return True

    def _fail(self, error: OSError) -> NoReturn:
        where = f"{error.filename}: " if error.filename else ""
        print(f"sandbox: {where}{error.strerror or error}", file=sys.stderr, flush=True)
        os._exit(SETUP_FAILED)

    def _become_program(self, enter: Callable[[], None]) -> NoReturn:
        try:
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            enter()
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            limit_bytes = self._spec["memory_bytes"]
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if limit_bytes:
                _, hard = resource.getrlimit(resource.RLIMIT_DATA)
                limit = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
                resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program inherits that
                signal.signal(number, signal.SIG_DFL)
        except OSError as error:
            self._fail(error)
        argv = self._spec["argv"]
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            self._fail(OSError(error.errno, error.strerror, argv[0]))

    # ------------------------------------------------------------ forms: what the program does first, how all are
    # killed

    def _namespaces(self) -> tuple[Callable[[], None], Callable[[], None]]:
        flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC
        new_namespaces(flags, os.geteuid(), os.getegid())
        held, alive = os.pipe()
        self._first = os.fork()
        if not self._first:  # adopts and forgets; its end is the end of the namespace
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            for fd in (alive, *self._spec["fds"]):
                os.close(fd)
            os.read(held, 1)  # until the supervisor is gone
            os._exit(0)

        def enter() -> None:
            call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
            _drop_capabilities()  # with which it could take that mount away again

        def strike() -> None:
            if self._first:
                os.kill(self._first, signal.SIGKILL)

        return enter, strike

    def _landlock(self) -> tuple[Callable[[], None], Callable[[], None]]:
        _restrict(
            hide_proc=False
        )  # the supervisor's own signals reach nothing outside, so that -1 means its descendants
        if not _confined():
            raise OSError(0, "Landlock lets signals through")
        prctl(PR_SET_CHILD_SUBREAPER, 1)

        def enter() -> None:
            _restrict(hide_proc=True)  # within the supervisor's domain: the supervisor is out of reach
            _drop_capabilities()

        return enter, _strike_domain

    def _weak(self) -> tuple[Callable[[], None], Callable[[], None]]:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        return lambda: None, lambda: _strike_children(self._program if self._status is None else 0)


def _confined() -> bool:
    """Whether a signal to our parent is refused. A signal to 0, our own group, would show nothing."""
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return True
    return False


def _strike_domain() -> None:
    if not _confined():
        raise RuntimeError("sandbox: Landlock no longer holds signals back")  # -1 would reach other processes
    try:
        os.kill(-1, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # only zombies are left


def _strike_children(program: int) -> None:
    """Children only: theirs become ours as they die, and are met at the next strike."""
    found = [-program] if program else []  # with its group
    # Every process whose parent we are; where there is no /proc, none.
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has just ended
        if parent == os.getpid():
            found.append(int(name))
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


# ---------------------------------------------------------------- the kernel, through ctypes

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000
CAPABILITY_VERSION_3 = 0x20080522
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446  # on every architecture
LANDLOCK_ABI = 6  # the first that holds signals back
LANDLOCK_READ_FILE, LANDLOCK_READ_DIR = 0x4, 0x8
LANDLOCK_SCOPE_SOCKETS, LANDLOCK_SCOPE_SIGNALS = 0x1, 0x2
LANDLOCK_BENEATH = 1
# Of the machine, not of a process: what libraries read there to count processors and memory. And one's own.
PROC_ALLOWED = ("cpuinfo", "filesystems", "loadavg", "meminfo", "self", "stat", "sys", "uptime", "version")


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("fd", ctypes.c_int32)]


def call(name: str, *arguments: Any) -> int:
    """A function of the C library; a negative result raises OSError."""
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def new_namespaces(flags: int, uid: int, gid: int) -> None:
    """Namespaces of this process' own, a user namespace among them, in which it has these ids; mounts stay within."""
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    call("unshare", flags)
    maps = (("setgroups", "deny"), ("uid_map", f"{uid} {outer_uid} 1"), ("gid_map", f"{gid} {outer_gid} 1"))
    for name, line in maps:
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)


def _landlock_call(number: int, *arguments: Any) -> int:
    try:
        return call("syscall", ctypes.c_long(number), *arguments)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0)) from error


def prctl(option: int, *arguments: int) -> None:
    if sys.platform == "linux":
        call("prctl", option, *(ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]))


def _drop_capabilities() -> None:
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last one, or without the right to: then there are none to drop
            break
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())


def _restrict(*, hide_proc: bool) -> None:
    """A Landlock domain for this process and its descendants: no ptrace, no signal, no abstract socket leaves it."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    abi = _landlock_call(SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if abi < LANDLOCK_ABI:
        raise OSError(0, f"Landlock of this kernel is ABI {abi}, and {LANDLOCK_ABI} is needed")
    reading = LANDLOCK_READ_FILE | LANDLOCK_READ_DIR if hide_proc else 0
    asked = _Ruleset(fs=reading, scoped=LANDLOCK_SCOPE_SOCKETS | LANDLOCK_SCOPE_SIGNALS)
    size = ctypes.c_size_t(ctypes.sizeof(asked))
    ruleset = _landlock_call(SYS_LANDLOCK_CREATE, ctypes.byref(asked), size, ctypes.c_uint32(0))
    if hide_proc:
        outside_proc = [f"/{name}" for name in os.listdir("/") if name != "proc"]
        for path in [*outside_proc, *(f"/proc/{name}" for name in PROC_ALLOWED)]:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # not there, or not for us
            try:
                allowed = LANDLOCK_READ_FILE | (LANDLOCK_READ_DIR if os.path.isdir(f"/proc/self/fd/{fd}") else 0)
                rule = _Beneath(allowed=allowed, fd=fd)
                _landlock_call(SYS_LANDLOCK_ADD, ruleset, LANDLOCK_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0))
            finally:
                os.close(fd)
    _landlock_call(SYS_LANDLOCK_RESTRICT, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)


if __name__ == "__main__":
    _Supervisor(json.loads(sys.argv[1])).run()
