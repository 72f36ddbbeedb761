"""What a model's program tries in the sandbox, one attack a test, as root and as a plain user; and its limits."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dora_jax.tasks.sandbox import bubblewrap, programs
from dora_jax.tasks.sandbox.program_server import memory_group
from tests.fakes.sandbox import FORMS, SECRET, descendants, needs_sandbox, server


@pytest.fixture(scope="module", params=FORMS)
def opened(request):
    with server(request.param) as opened:
        yield opened


@pytest.fixture
def run(opened):
    def run(program, stdin="", **limits):
        ran = opened.run("import os, sys, time\n" + program, stdin, programs.Limits(**limits))
        assert len(descendants(opened.pid)) <= opened.own + 1, "more than the runner, which ends now, is left"
        return ran

    return run


OPEN = """
for path, mode in {attacks}:
    try: print(path, "open", open(path, mode).name)
    except OSError as error: print(path, type(error).__name__)
"""
CALL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, *arguments in {attacks}:
    result = getattr(libc, name)(*arguments)
    print(name, *arguments, errno.errorcode[ctypes.get_errno()] if result < 0 else "done")
"""


# ---------------------------------------------------------------- programs that mean well


@needs_sandbox
def test_a_program_reads_its_input_and_prints(run):
    ran = run("print(sum(map(int, sys.stdin.read().split())))\nprint('why', file=sys.stderr)\nexit(3)", "1 2\n3")
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.ended_by) == ("6\n", "why\n", 3, "")


@needs_sandbox
def test_what_programs_need_is_there(run):
    ran = run(
        """
import collections, decimal, fractions, hashlib, heapq, itertools, json, math, random, re, subprocess, tempfile, threading
with tempfile.NamedTemporaryFile() as file: file.write(b"x")
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(subprocess.run(["/bin/echo", "child"], capture_output=True, text=True).stdout, open("/dev/stdin").read())
print(len(open("/dev/urandom", "rb").read(4)), open("/dev/null", "w").write("gone"), os.getcwd(), sys.argv)
""",
        "in",
    )
    assert (ran.stdout, ran.stderr) == ("thread\nchild\n in\n4 4 /tmp ['/tmp/program.py']\n", "")


@needs_sandbox
def test_much_input_that_nothing_reads_and_much_that_something_reads(run):
    assert run("print('no')", "x" * 2**21).stdout == "no\n"
    assert run("print(len(sys.stdin.read()))", "x" * 2**21).stdout == f"{2**21}\n"


@needs_sandbox
def test_how_a_program_ended_is_reported(run):
    assert run("os.abort()").exit_code == -signal.SIGABRT
    assert "SyntaxError" in run("(").stderr
    assert run("sys.stdout.buffer.write(b'\\xff')").stdout == "\N{REPLACEMENT CHARACTER}"


@needs_sandbox
def test_programs_at_once_from_many_threads(opened):
    output = [""] * 8

    def one(i):
        output[i] = opened.run(f"print({i})").stdout

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert output == [f"{i}\n" for i in range(8)]


# ---------------------------------------------------------------- secrets, other processes, the machine


@needs_sandbox
def test_secrets_are_nowhere(run, monkeypatch):
    monkeypatch.setenv("MY_SECRET", SECRET)
    ran = run(
        f"""
print(*os.environ, end="; ")
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline", "maps", "mem"):
        try:
            with open(f"/proc/{{pid}}/{{name}}", "rb") as file: print("{SECRET[:3]}".encode() + b"ter2" in file.read(2**20))
        except OSError as error: print(int(pid) == 1 and name == "environ", end=" ")
print(sorted(os.listdir("/")), sorted(os.listdir("/dev")), os.listdir("/tmp"))
"""
    )
    names, *_ = ran.stdout.split("; ")
    assert set(names.split()) <= {"HOME", "LANG", "PATH", "PWD", "_"} | set(bubblewrap.ENVIRONMENT)
    assert "True" not in ran.stdout and "['bin', 'dev', " in ran.stdout
    assert ran.stdout.endswith(
        "['fd', 'full', 'null', 'random', 'stderr', 'stdin', 'stdout', 'urandom', 'zero'] ['program.py']\n"
    )


@needs_sandbox
def test_no_descriptor_but_its_own_three_is_open(run):
    assert (
        run("print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))").stdout == "[0, 1, 2, 3]\n"
    )  # 3: the listing


@needs_sandbox
def test_only_its_own_processes_are_seen_or_signalled(run):
    ran = run(
        """
print([int(pid) for pid in os.listdir("/proc") if pid.isdigit()], os.getuid(), os.getgroups())
os.kill(1, 9)
os.kill(1, 15)
print(os.getppid())
"""
    )
    seen, parent = ran.stdout.splitlines()
    assert seen in ("[1, 2, 3] 65534 [65534]", "[1, 2, 3] 65534 []") and parent == "2"


@needs_sandbox
def test_the_first_process_that_it_could_write_into_has_the_same_sandbox(run):
    """It is of the program's own user, so that its memory is open."""
    ran = run(
        """
for pid in (1, 2):
    with open(f"/proc/{pid}/status") as file: lines = dict(line.split(":", 1) for line in file)
    print(*[lines[name].strip() for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp")])
"""
    )
    assert ran.stdout == f"{'0' * 16} {'0' * 16} {'0' * 16} 1 2\n" * 2


@needs_sandbox
def test_files_of_the_machine_cannot_be_opened(run):
    read = ("/etc/passwd", str(Path.home() / ".bashrc"), "/proc/kcore", "/dev/tty", "/proc/1/root/etc/shadow")
    write = ("/file", "/usr/file", "/dev/file", "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/etc/passwd")
    attacks = [(path, "r") for path in read] + [(path, "w") for path in write]
    output = run(OPEN.format(attacks=attacks)).stdout.splitlines()
    assert len(output) == len(attacks)
    assert not [line for line in output if not line.endswith(("FileNotFoundError", "PermissionError", " OSError"))]


@needs_sandbox
def test_links_lead_nowhere(run):
    ran = run(
        """
for target in ("/etc/passwd", "/../../etc/passwd", "/proc/1/root/etc/passwd"):
    os.symlink(target, "link")
    try: print(open("link").read())
    except OSError as error: print(type(error).__name__)
    os.unlink("link")
try: os.link("/usr/bin/env", "hard")
except OSError as error: print(error.strerror)
try: print(set(os.listdir("/proc/1/root")) ^ set(os.listdir("/")))
except PermissionError: print("set()")
"""
    )
    output = ran.stdout.split("\n")
    assert output[:2] == ["FileNotFoundError"] * 2 and output[2] in ("FileNotFoundError", "PermissionError")
    assert output[4] == "set()" and output[3] in ("Invalid cross-device link", "Operation not permitted")


@needs_sandbox
def test_calls_that_open_the_sandbox_are_not_permitted(run):
    attacks = [("unshare", 0x10000000), ("mount", None, b"/tmp", b"tmpfs", 0, None), ("umount2", b"/proc", 2),
               ("ptrace", 0, 0, 0, 0), ("chroot", b"/tmp"), ("setns", 0, 0), ("memfd_create", b"x", 0),
               ("shmget", 0, 4096, 0o1600), ("ioctl", 1, 0x5412, b"x"), ("ioctl", 0, 0x541C, b"x")]  # fmt: skip
    if os.uname().machine == "x86_64":  # keyctl, bpf, userfaultfd, io_uring_setup
        attacks += [("syscall", 250, 0, 0), ("syscall", 321, 0, 0, 0), ("syscall", 323, 0), ("syscall", 425, 1, 0)]
    output = run(CALL.format(attacks=attacks)).stdout.splitlines()
    assert len(output) == len(attacks) and not [line for line in output if not line.endswith(" EPERM")]


@needs_sandbox
def test_nothing_is_reached_over_a_network_or_a_socket(run):
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as abstract:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        abstract.bind(f"\0dora-{os.getpid()}")
        abstract.listen()
        ran = run(
            f"""
import socket
for family, address in ((2, ("127.0.0.1", {listener.getsockname()[1]})), (10, ("::1", 80)), (16, (0, 0)), (17, ("lo", 0)), (40, (2, 1)),
                        (1, "\\0dora-{os.getpid()}"), (1, "/run/dbus/system_bus_socket")):
    try:
        socket.socket(family, socket.SOCK_RAW if family in (16, 17) else socket.SOCK_STREAM).connect(address)
        print("connected")
    except OSError as error:
        print(family, type(error).__name__)
"""
        )
    assert ran.stdout.split("\n")[:-1] == [
        *[f"{family} PermissionError" for family in (2, 10, 16, 17, 40)],
        "1 ConnectionRefusedError",
        "1 FileNotFoundError",
    ]


# ---------------------------------------------------------------- floods, and programs that will not end


@needs_sandbox
def test_a_fork_bomb_stops_at_its_limit(run):
    ran = run(
        """
n = 0
try:
    while True:
        if os.fork() == 0: time.sleep(60)
        n += 1
except OSError as error: print(n < 64, error.strerror)
"""
    )
    assert ran.stdout == "True Resource temporarily unavailable\n" and ran.exit_code == 0


@needs_sandbox
@pytest.mark.slow
def test_a_fork_bomb_of_which_every_part_goes_on_ends_with_the_time(run):
    assert run("while True:\n    try: os.fork()\n    except OSError: pass", wall_s=0.5).ended_by == "time"


@needs_sandbox
def test_a_daemon_ends_with_its_program(run):
    daemon = "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)\nos.wait(); print('done')"
    ran = run(daemon)
    assert (ran.stdout, ran.ended_by) == ("done\n", "") and ran.wall_s < 30


@needs_sandbox
def test_ignored_signals_do_not_help(run):
    ran = run(
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: "
        "pass\ntime.sleep(60)",
        wall_s=0.3,
    )
    assert (ran.ended_by, ran.exit_code) == ("time", -signal.SIGKILL)


@needs_sandbox
@pytest.mark.slow
def test_the_processor_s_time_is_limited(run):
    ran = run("while True: pass", cpu_s=1.0, wall_s=60.0)
    assert (ran.ended_by, ran.exit_code) == ("cpu", -signal.SIGXCPU)


@needs_sandbox
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_of_output_is_cut_at_the_cap_and_is_the_end(run, stream):
    ran = run(f"while True: sys.{stream}.write('x' * 65536)", wall_s=60.0)
    assert ran.ended_by == "output" and len(getattr(ran, stream)) == programs.Limits().output_bytes == 2**20
    assert run("print('x' * 1000)", output_bytes=100).ended_by == "output"  # what ends before it is read counts too


@needs_sandbox
def test_a_flood_of_memory_ends_one_process_or_all(run):
    assert "MemoryError" in run("x = bytearray(2**30)").stderr
    fork = "import mmap\nfor _ in range(8):\n    if os.fork() == 0: break\nx = mmap.mmap(-1, 2**24)\nx.write(bytes(2**24)); time.sleep(60)"
    assert run(fork, memory_bytes=2**27, wall_s=60.0).ended_by == "memory"


@needs_sandbox
def test_what_waits_in_sockets_is_memory(run):
    fill = """
import socket
for _ in range(3):
    if os.fork() == 0: break
pairs = [socket.socketpair() for _ in range(28)]
for one in (one for pair in pairs for one in pair):
    one.setblocking(False)
    try:
        while True: one.send(bytes(65536))
    except BlockingIOError: pass
time.sleep(60)
"""
    assert run(fill, memory_bytes=2**26, wall_s=60.0).ended_by == "memory"
    larger = "import socket\nsocket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)"
    assert "PermissionError" in run(larger).stderr


@needs_sandbox
def test_a_program_prints_the_same_each_time(run):
    program = """
import locale
class Plain: pass
print({"one", "two", "three", "four", "five"}, [id(x) for x in (object(), Plain(), len)], {Plain(): i for i in range(9)})
print(time.tzname, time.localtime(0).tm_hour, locale.getpreferredencoding(), sorted(map(hash, ("a", "b"))))
"""
    first, *others = [run(program) for _ in range(4)]
    assert first.exit_code == 0 and not first.stderr and [ran.stdout for ran in others] == [first.stdout] * 3


@needs_sandbox
def test_time_without_a_core_is_not_the_program_s(run):
    code = "print(flush=True)\nwhile True: pass"  # each in a session of its own, among which a kernel may share cores
    how = {"stdout": subprocess.PIPE, "start_new_session": True}
    busy = [subprocess.Popen([sys.executable, "-c", code], **how) for _ in range(4 * os.cpu_count())]
    try:
        for process in busy:
            process.stdout.readline()
        ran = run("end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint('done')", wall_s=0.7)
        assert (ran.stdout, ran.ended_by) == ("done\n", "") and ran.spent_s < 0.7 < ran.wall_s
        assert run("time.sleep(60)", wall_s=0.3).ended_by == "time"
        assert run("while True: pass", wall_s=0.3).ended_by == "time"
    finally:
        for process in busy:
            process.kill()
            process.communicate()


@needs_sandbox
def test_exit_codes_and_ignored_limits_are_named(run):
    """A program's own exit code and the signal that ended it are reported apart, but for three of which no shell speaks."""
    codes = (128, 129, 134, 137, 139, 152, 192, 200, 255)
    assert [run(f"exit({code})").exit_code for code in codes] == [*codes]
    for number in (signal.SIGHUP, signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGXCPU, signal.SIGRTMAX):
        assert run(f"os.kill(os.getpid(), {int(number)})").exit_code == -number
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM):
        assert run(f"exit({128 + number})").exit_code == -number
    ran = run("os.kill(os.getppid(), 9); time.sleep(60)")  # of what waits for it
    assert (ran.exit_code, ran.ended_by) == (-signal.SIGKILL, "")


def test_a_group_of_memory_is_made_beside_our_own_where_that_is_possible(tmp_path):
    """The rest needs a kernel whose memory controller is on cgroup v2."""
    above, own = tmp_path / "a", tmp_path / "own"
    (above / "b").mkdir(parents=True)
    own.write_text("4:memory:/other\n0::/a/b\n")
    assert not memory_group(99, str(tmp_path), str(own))  # there is no controller
    (above / "cgroup.subtree_control").write_text("cpu\n")
    assert not memory_group(99, str(tmp_path), str(own))
    (above / "cgroup.subtree_control").write_text("cpu memory pids\n")
    group = Path(memory_group(99, str(tmp_path), str(own)))
    assert group.parent == above and (group / "memory.max").read_text() == "99"
    assert (group / "memory.oom.group").read_text() == "1" and (group / "memory.swap.max").read_text() == "0"
    own.write_text("4:memory:/other\n")
    assert not memory_group(99, str(tmp_path), str(own))


@needs_sandbox
@pytest.mark.slow
def test_a_limit_that_is_ignored_is_still_the_one_that_ended_it(run):
    ran = run("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", cpu_s=1.0, wall_s=60.0)
    assert (ran.ended_by, ran.exit_code) == ("cpu", -signal.SIGKILL)


@needs_sandbox
def test_a_flood_of_files_fills_their_own_folder_only(run):
    ran = run(
        """
try:
    with open("big", "wb") as file:
        while True: file.write(bytes(2**20))
except OSError as error: print(error.strerror)
os.unlink("big")
try:
    for i in range(10**6): open(f"{i}", "w").close()
except OSError as error: print(i < 5000, error.strerror)
"""
    )
    output = ran.stdout.splitlines()
    assert output[0] in ("No space left on device", "File too large") and output[1] == "True No space left on device"
    assert run("print(os.listdir('/tmp'))").stdout == "['program.py']\n"


@needs_sandbox
@pytest.mark.parametrize(
    "limit", [{"processes": 10**6}, {"memory_bytes": 2**50}, {"wall_s": -1.0}, {"output_bytes": 0}]
)
def test_nobody_gets_limits_that_are_none(run, limit):
    (name,) = limit
    with pytest.raises(programs.SandboxError, match=f"{name}: .* is not between 0 and"):
        run("print(1)", **limit)
