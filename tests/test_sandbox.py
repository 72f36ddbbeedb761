"""Walls, one attack a test, each in every form that promises to refuse it; the weak form shows that the attack
works."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest

from dora_jax.tasks import sandbox

PROC_SCAN = """
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "mem", "maps"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                if name != "environ" or b"hunter2" in file.read():
                    found.append(name) if int(pid) == stranger else None
        except OSError:
            pass
print(sorted(found))
"""
KILL = """
for number in (0, 19, 18, 9):
    os.kill(stranger, number)
print("killed")
"""
KILL_SUPERVISOR = """
daemon()
print("daemon", flush=True)
os.kill(os.getppid(), 9)
print("killed", flush=True)
"""
DAEMON = """
daemon()
print("daemon", flush=True)
"""
HOP = """
def hop():
    while True:  # a new process every time, so that no list of them is ever right
        if os.fork():
            os._exit(0)
        os.setsid()
        beat()
if os.fork() == 0:
    hop()
while not os.path.exists(beats):
    time.sleep(0.01)
print("daemon", flush=True)
"""
REGAIN = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
with open("/proc/self/status") as file:
    print([line.split()[1].strip("0") for line in file if line.startswith(("CapEff", "CapPrm", "CapBnd"))])
print(libc.umount2(b"/proc", 2))
"""
PRELUDE = """
import os, sys, time
stranger, beats = int(sys.argv[1]), sys.argv[2]

def beat():
    with open(beats, "a") as file:
        file.write(".")

def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            while True:
                beat()
                time.sleep(0.01)
        os._exit(0)
    os.wait()
    while not os.path.exists(beats):
        time.sleep(0.01)
"""


def missing(form):
    try:
        return "" if form == sandbox.WEAK else sandbox.lack_of(form)
    except OSError as error:
        return str(error)


MISSING = {form: missing(form) for form in (*sandbox.FULL, sandbox.WEAK)}


def forms(*names):
    return pytest.mark.parametrize(
        "form",
        [pytest.param(form, marks=pytest.mark.skipif(bool(MISSING[form]), reason=MISSING[form])) for form in names],
    )


full, every = forms(*sandbox.FULL), forms(*sandbox.FULL, sandbox.WEAK)


@pytest.fixture
def unverified():
    """A process of the same user, with a secret in its environment."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
        env={"MY_SECRET": "hunter2"},
        stdout=subprocess.PIPE,
    )
    process.stdout.readline()
    yield process.pid
    process.kill()
    process.communicate()


@pytest.fixture
def run(unverified, tmp_path):
    """run(code, form) -> (exit code, what it printed), when all of it has ended."""
    started = []

    def run(code, form, wait=True, **more):
        out = tmp_path / f"out{len(started)}"
        with out.open("w") as file:
            started.append(
                sandbox.start(
                    [sys.executable, "-c", PRELUDE + code, str(unverified), str(tmp_path / "beats")],
                    form=form,
                    env=sandbox.clean_environment(),
                    stdout=file,
                    **more,
                )
            )
        if wait:
            return started[-1].wait(30.0), out.read_text()
        while "daemon" not in out.read_text():
            assert started[-1].poll() is None, out.read_text()
            time.sleep(0.01)
        return started[-1], out

    yield run
    for walled in started:
        walled.end()


def beating(tmp_path):
    """Whether anything still writes."""
    before = (tmp_path / "beats").stat().st_size
    time.sleep(0.2)
    return (tmp_path / "beats").stat().st_size > before


def wait_for_beats(tmp_path):
    end_s = time.monotonic() + 60
    while not beating(tmp_path):
        assert time.monotonic() < end_s


# ---------------------------------------------------------------- other processes


@full
def test_other_processes_cannot_be_read(run, form):
    code, out = run(PROC_SCAN, form)
    assert code == 0 and out == "[]\n" or "PermissionError" in out and "'/proc'" in out


def test_in_the_weak_form_they_can(run):
    assert run(PROC_SCAN, sandbox.WEAK) == (0, "['environ', 'maps', 'mem']\n")


@full
def test_other_processes_cannot_be_signalled(run, form, unverified):
    code, out = run(KILL, form)
    assert code == 1 and ("ProcessLookupError" in out or "PermissionError" in out)
    os.kill(unverified, 0)


@full
def test_nothing_is_left_to_open_the_sandbox_with(run, form):
    code, out = run(REGAIN, form)
    assert (code, out) == (0, "['', '', '']\n-1\n")


@every
def test_only_descriptors_that_are_passed_are_open(run, form, tmp_path):
    with (tmp_path / "secret").open("w") as file, (tmp_path / "given").open("w") as given:
        os.set_inheritable(file.fileno(), True)
        code, out = run(
            """
for fd in range(3, 4096):
    try:
        print(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
    except FileNotFoundError:
        pass
""",
            form,
            pass_fds=(given.fileno(),),
        )
    assert (code, out) == (0, "given\n")


# ---------------------------------------------------------------- the end


@every
def test_a_daemon_ends_with_the_program_that_started_it(run, form, tmp_path):
    assert run(DAEMON, form) == (0, "daemon\n")
    assert not beating(tmp_path)


@every
def test_a_daemon_ends_when_the_caller_ends_the_program(run, form, tmp_path):
    walled, _ = run(DAEMON + "\nimport signal; signal.signal(15, signal.SIG_IGN)\ntime.sleep(60)", form, wait=False)
    wait_for_beats(tmp_path)
    walled.end()
    walled.end()
    assert walled.poll() == -signal.SIGKILL and not beating(tmp_path)


@full
def test_processes_that_only_ever_fork_and_exit_end_too(run, form, tmp_path):
    walled, _ = run(HOP + "\ntime.sleep(60)", form, wait=False)
    wait_for_beats(tmp_path)
    walled.end()
    assert not beating(tmp_path)


@full
def test_a_program_that_strikes_at_its_supervisor_hits_nothing(run, form, tmp_path):
    code, out = run(KILL_SUPERVISOR, form)
    # behind namespaces the parent's number is 0, which is the program's own group
    assert (code == 1 and "PermissionError" in out) or (form == "namespaces" and code == -signal.SIGKILL)
    assert "killed" not in out and not beating(tmp_path)


CALLER = """
import os, sys, time
sys.path.insert(0, {root!r})
from dora_jax.tasks import sandbox
walled = sandbox.start([sys.executable, "-c", {code!r}, "0", {beats!r}], form={form!r}, env=dict(os.environ))
while not os.path.exists({beats!r}):
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


@every
def test_all_of_it_ends_with_a_caller_that_is_killed(form, tmp_path):
    root, beats = os.path.dirname(os.path.dirname(__file__)), str(tmp_path / "beats")
    script = CALLER.format(root=root, code=PRELUDE + DAEMON + "\ntime.sleep(60)", form=form, beats=beats)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    end_s = time.monotonic() + 60
    while beating(tmp_path):
        assert time.monotonic() < end_s


@every
def test_the_exit_code_is_the_program_s(run, form):
    assert run("os._exit(7)", form)[0] == 7
    assert run("os.kill(os.getpid(), 11)", form)[0] == -signal.SIGSEGV
    assert run("os.abort()", form)[0] == -signal.SIGABRT


@every
def test_memory_is_limited(run, form):
    code, out = run("x = bytearray(2**30)", form, memory_bytes=2**28)
    assert code == 1 and "MemoryError" in out


# ---------------------------------------------------------------- what a machine lacks


@every
def test_a_program_that_cannot_be_started_is_reported(form, tmp_path):
    with (tmp_path / "out").open("w+") as out:
        walled = sandbox.start(["/no/such/program"], form=form, env={}, stdout=out)
        assert walled.wait(30.0) == 125
        assert (tmp_path / "out").read_text() == "sandbox: /no/such/program: No such file or directory\n"
        walled.end()


def test_a_machine_without_a_sandbox_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(sandbox, "lack_of", {"namespaces": "unshare: not permitted", "landlock": "ABI 4"}.get)
    sandbox.full.cache_clear()
    with pytest.raises(sandbox.NoSandbox) as error:
        sandbox.full()
    assert str(error.value) == (
        "this machine cannot hide other processes from a program (namespaces: unshare: not permitted; landlock: ABI 4)"
    )
    monkeypatch.setattr(sandbox, "lack_of", {"namespaces": "unshare: not permitted", "landlock": ""}.get)
    assert sandbox.full() == "landlock"
    sandbox.full.cache_clear()


@pytest.mark.skipif(bool(MISSING["namespaces"]), reason=MISSING["namespaces"])
def test_a_kernel_without_user_namespaces_is_found_out():
    """In a namespace of our own, where we may say that there are to be no further ones."""
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.fork()
    if pid == 0:
        uid = os.getuid()
        libc.unshare(0x10000000)
        with open("/proc/self/uid_map", "w") as file:
            file.write(f"0 {uid} 1")
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
        os._exit(0 if "unshare: No space left on device" in sandbox.lack_of("namespaces") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_no_form_is_missing_because_its_sandbox_do_not_hold():
    """What the machine lacks is skipped above; walls that it has, and that hide nothing, are our fault."""
    assert "other processes are still seen" not in MISSING.values()
