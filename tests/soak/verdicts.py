"""Is the verdict on a program the same each time? And how much memory does a program hold that takes what it can?

    python -m tests.soak.verdicts [--number=200] [--times=20] [--load=0] [--at_once=2] [--no_attacks] [--attack_s=3] [--python=PATH]

verdicts  programs of ten kinds (KINDS): what they print follows from the order of sets, hashes, addresses, threads,
          dates, the names around them, or they compute, or sleep, for half of the time limit. Each is run `times` times in
          the sandbox; its verdict is what it printed, how it ended, and what the reward `stdio` would say of its first
          output as the expected one. With --load=N beside N processes that compute. --python: by this interpreter
attacks   programs that take memory in different ways (ATTACKS) at a limit of 256 MiB: how each ended, and the most that
          its processes, and the kernel for them, held at once, within attack_s seconds

Exits with 1 where a verdict differs or an attack held more than twice its limit, with 2 where the machine lacks a wall.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dora_jax.bench import harness
from dora_jax.tasks.sandbox import NoSandbox, programs
from dora_jax.tasks.sandbox.programs import MIB, Limits, Ran, Server
from tests.soak.sandbox import processes_below

LIMIT_S = 0.8  # of a program that computes or sleeps for half of it
KINDS = {
    "order of sets": "print(*{{str(i * {n}) for i in range(50)}}, *frozenset('abc{n}defgh'))",
    "hashes": "print(hash('{n}'), hash((b'{n}', '{n}', None, float('nan'))) % 97 >= 0, [hash(str(i)) % 7 for i in range({n})])",
    "addresses": "class A: pass\nprint([id(A()) % 4096 for _ in range({n} + 1)], repr(A()), id(print), id([{n}]))",
    "order by address": "class A: pass\nmade = {{A(): i for i in range({n} + 5)}}\nprint([made[x] for x in set(made)])",
    "threads": "import threading\nout, lock = {{}}, threading.Lock()\ndef work(i):\n    with lock: out[i] = sum(range(i * {n}))\n"
    "threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]\n"
    "[t.start() for t in threads]; [t.join() for t in threads]; print(sorted(out.items()))",
    "a pool of threads": "import concurrent.futures as f\nwith f.ThreadPoolExecutor(4) as pool: "
    "print(list(pool.map(lambda x: x ** 2 % {n} if {n} else x, range(100))))",
    "dates": "import datetime, locale, time\nwhen = datetime.datetime.fromtimestamp(86400 * {n} + 3600)\n"
    "print(when, when.strftime('%A %d %B %c'), time.tzname, time.localtime({n} * 10**7), locale.getpreferredencoding())",
    "names around it": "import os, sys, platform, getpass\nprint(os.getcwd(), os.listdir('.'), os.environ, sys.argv, "
    "os.getuid(), os.getpid(), platform.node(), os.umask(0), sys.flags, {n})",
    "computes for half of its time": "import time\nend = time.process_time() + {half}\nx = {n}\n"
    "while time.process_time() < end: x = x * 3 % 1000003\nprint('done', {n})",
    "sleeps for half of its time": "import time\ntime.sleep({half})\nprint('done', {n})",
}
LIMIT = 256 * MIB
FORK = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: break\n"
ATTACKS = {
    "one process": "x = [bytearray(2**20) for _ in range(4096)]",
    "four processes": FORK + "x = []\nwhile True:\n    try: x.append(bytearray(2**20))\n    except MemoryError: time.sleep(60)",
    "buffers of sockets of four processes": FORK + "import socket\nkept = []\ntry:\n    while True:\n"
    "        kept += socket.socketpair()\n        for one in kept[-2:]:\n            one.setblocking(False)\n            try:\n"
    "                while True: one.send(bytes(65536))\n            except BlockingIOError: pass\n"
    "except OSError: pass\ntime.sleep(60)",
    "sockets that are sent and closed": "import socket, array, time\nkept = []\ntry:\n    while True:\n        a, b = socket.socketpair()\n"
    "        a.setblocking(False)\n        try:\n            while True: a.send(bytes(65536))\n        except BlockingIOError: pass\n"
    "        c, d = socket.socketpair()\n        c.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [a.fileno(), b.fileno()]))])\n"
    "        a.close(); b.close(); kept += [c, d]\nexcept OSError: pass\ntime.sleep(60)",
    "pipes of four processes": FORK + "import fcntl\nkept = []\ntry:\n    while True:\n        r, w = os.pipe(); os.set_blocking(w, False)\n"
    "        try: fcntl.fcntl(w, 1031, 2**20)\n        except OSError: pass\n        try:\n            while True: os.write(w, bytes(65536))\n"
    "        except BlockingIOError: pass\nexcept OSError: pass\ntime.sleep(60)",
    "shared memory of four processes": FORK + "import mmap\nx = []\ntry:\n    while True:\n        m = mmap.mmap(-1, 2**22); m.write(bytes(2**22)); x.append(m)\n"
    "except (OSError, MemoryError): time.sleep(60)",
    "files": "import time\ntry:\n    for i in range(10**6): open(f'/tmp/{i}', 'wb').write(bytes(2**20))\nexcept OSError: time.sleep(60)",
    "stacks of threads": "import threading, time\nthreading.stack_size(2**26)\ntry:\n    while True: threading.Thread(target=time.sleep, args=(60,)).start()\n"
    "except (RuntimeError, MemoryError): time.sleep(60)",
}  # fmt: skip


def program_at(i: int) -> tuple[str, str]:
    """(its kind, the program)."""
    kind = list(KINDS)[i % len(KINDS)]
    return kind, KINDS[kind].format(n=i // len(KINDS), half=LIMIT_S / 2)


def verdict(ran: Ran) -> tuple[str, str, int, str]:
    return ran.stdout, ran.stderr, ran.exit_code, ran.ended_by


def verdicts_of(server: Server, number: int, times: int, at_once: int) -> dict[int, set[tuple[str, str, int, str]]]:
    """Program -> its verdicts. A time after the other, so that a moment meets all programs."""
    found: dict[int, set[tuple[str, str, int, str]]] = {i: set() for i in range(number)}
    limits = Limits(wall_s=LIMIT_S)
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for _ in range(times):
            ran = pool.map(lambda i: server.run(program_at(i)[1], limits=limits), range(number))
            for i, each in enumerate(ran):
                found[i].add(verdict(each))
    return found


def held_by(server: Server, program: str, wall_s: float = 3.0) -> tuple[Ran, float]:
    """How the program ended, and the most bytes that its processes and the kernel's unreclaimable memory and sockets
    grew by while it ran."""

    def kernel() -> int:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(fields["SUnreclaim"].split()[0])

    most, over, before = [0], threading.Event(), kernel()

    def watch() -> None:
        while not over.wait(0.01):
            held = 0
            for pid in processes_below(server.pid):
                try:
                    held += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                except OSError:
                    continue  # it has just ended
            most[0] = max(most[0], held + max(0, kernel() - before))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        ran = server.run(program, limits=Limits(memory_bytes=LIMIT, wall_s=wall_s))
    finally:
        over.set()
        watcher.join()
    return ran, most[0]


def verdicts(number=200, times=20, load=0, at_once=2, python="", no_attacks=False, attack_s=3.0) -> Iterator[str]:
    try:
        programs.check(python)
    except NoSandbox as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    server, wrong = Server(python), list[str]()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(load)]
    try:
        began_s = time.monotonic()
        found = verdicts_of(server, number, times, at_once)
        wrong += [
            f"{program_at(i)[0]}: {len(each)} verdicts: {sorted(each)[:2]}"
            for i, each in found.items()
            if len(each) > 1
        ]
        failed = [f"{program_at(i)[0]}: {each}" for i, each in found.items() if any(v[2] or v[3] for v in each)]
        yield (
            f"{number} programs, {times} times each, {'beside ' + str(load) + ' busy processes' if load else 'quiet'}: "
            f"{len(wrong)} whose verdict differs, {len(failed)} that did not end well; {time.monotonic() - began_s:.0f} s"
        )
        wrong += failed
        for process in busy:
            process.kill()
        for name, program in () if no_attacks else ATTACKS.items():
            ran, held = held_by(server, program, attack_s)
            ended = ran.ended_by or (ran.stderr.strip().splitlines() or [f"exit code {ran.exit_code}"])[-1]
            yield f"{name:38} held {held / MIB:5.0f} of {LIMIT / MIB:.0f} MiB; ended by: {ended}"
            wrong += [f"{name}: {held / MIB:.0f} MiB"] if held > 2 * LIMIT else []
    finally:
        for process in busy:
            process.kill()
            process.wait()
        server.end()
    if wrong:
        print(*wrong[:20], sep="\n", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    harness.run(verdicts)
