"""A run of many processes on this machine, whose listening ports are sent garbage without a pause, then its books.

    python -m tests.soak.fuzz_ports [--minutes=10] [--seed=0] [--threads=4] [--workdir=DIR]
                                    [--config=configs/quickstart.py:tiny] [-- --config.field=value ...]

Every port on which the controller or a process of a gang listens is found anew each second, whatever opened it: links
and wires (runtime/common/listener.py), the coordination service of jax.distributed, collectives between the trainer's
two processes. A connection says nothing, closes at once, sends zeros, noise, HTTP, TLS, lengths that cannot be, halves
of a handshake, or its bytes one by one. One row a listener: connections, what was sent, and the most file numbers that
the process had open. At the end the gangs that were lost, and the books of the whole run, from its journal:
    issued = trained + filtered + failed + in flight; lost, trained twice, generated again: 0
"""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from tests.soak.gang_run import LOST, WatchedRun, new_parser, running, settle

HELD = 64  # connections that a thread keeps open and silent
HELD_S = 20.0
CLUSTER = (
    "--config.cluster.trainer_hosts=2",
    "--config.cluster.devices_per_host=1",
    "--config.cluster.wire=transfer",
    "--config.rollout.tensor=1",
    "--config.cluster.heartbeat_timeout_s=60.0",
)


def _client_hello() -> bytes:
    """How a handshake begins that every listener of a run answers."""
    context, sent = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


HELLO = _client_hello()
PAYLOADS: dict[str, Callable[[random.Random], bytes]] = {
    "nothing": lambda draw: b"",
    "zeros": lambda draw: bytes(draw.randrange(1, 256)),
    "noise": lambda draw: draw.randbytes(draw.choice((3, 64, 4096, 1 << 20))),
    "http": lambda draw: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "http2": lambda draw: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(draw.randrange(200)),
    "tls": lambda draw: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(32),
    "hello": lambda draw: HELLO + draw.randbytes(draw.choice((0, 40, 4096))),
    "half": lambda draw: HELLO[: draw.randrange(1, len(HELLO))],
    "length": lambda draw: struct.pack("!i", draw.choice((-1, -(2**31), 2**31 - 1, 257, 0, -7))) + draw.randbytes(40),
}


class Fuzzer:
    """Sends garbage from `threads` threads to `targets`, which may change, until it is closed."""

    def __init__(self, seed: int, threads: int):
        self.targets: list[tuple[str, int]] = []
        self.connections: collections.Counter[tuple[str, int]] = collections.Counter()
        self.sent_bytes: collections.Counter[tuple[str, int]] = collections.Counter()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{i}"),), name="fuzzer")
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _run(self, draw: random.Random) -> None:
        held: collections.deque[tuple[float, socket.socket]] = collections.deque()
        while not self._closed.wait(1e-3):
            while held and (len(held) > HELD or time.monotonic() - held[0][0] > HELD_S):
                held.popleft()[1].close()
            if self.targets and (raw := self._strike(draw.choice(self.targets), draw)) is not None:
                held.append((time.monotonic(), raw))
        while held:
            held.popleft()[1].close()

    def _strike(self, target: tuple[str, int], draw: random.Random) -> socket.socket | None:
        """The connection, where it is to stay open."""
        data, how = PAYLOADS[draw.choice(list(PAYLOADS))](draw), draw.random()
        with contextlib.suppress(OSError):  # it is hung up on, or the process has gone
            raw = socket.create_connection(target, timeout=2.0)
            self.connections[target] += 1
            for part in [data[i : i + 1] for i in range(min(len(data), 64))] if how < 0.1 else [data]:
                raw.sendall(part)
                self.sent_bytes[target] += len(part)
            if how > 0.6:
                return raw
            if how > 0.4:  # with a reset
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.close()
        return None


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses where this process takes TCP connections; none, where it has gone."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return set()
    return {_reached(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


def main() -> None:
    parser = new_parser(__doc__, "runs/fuzz_ports", gangs=3)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=4)
    flags = parser.parse_args()
    owners: dict[tuple[str, int], str] = {}
    files: collections.Counter[str] = collections.Counter()
    flags.overrides = [*CLUSTER, *flags.overrides]
    with running(flags) as run:
        run.ready(flags.gangs)
        fuzzer, steps = Fuzzer(flags.seed, flags.threads), run.steps
        try:
            until = time.monotonic() + 60 * flags.minutes
            while time.monotonic() < until:
                _look(run, fuzzer, owners, files)
                time.sleep(1.0)
        finally:
            fuzzer.close()
        run.ready(flags.gangs)
    _table(fuzzer, owners, files)
    lost = [found.group(0) for found in LOST.finditer(run.console.read_text())]
    print("\n".join(lost) or "no gang was lost")
    summary = f"{sum(fuzzer.connections.values())} connections in {flags.minutes:g} minutes, {run.steps - steps} steps"
    settle(run, summary)


def _look(run: WatchedRun, fuzzer: Fuzzer, owners: dict[tuple[str, int], str], files: collections.Counter[str]) -> None:
    run.look()
    if run.process.poll() is not None:
        raise RuntimeError(f"the controller has ended: {run.console.read_text()[-3000:]}")
    pids = {
        "controller": run.process.pid,
        **{f"{gang}.{i}": pid for gang, gang_pids in run.pids.items() for i, pid in enumerate(gang_pids)},
    }
    now = {address: name for name, pid in pids.items() for address in listening(pid)}
    owners.update(now)
    fuzzer.targets = list(now)
    for name, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            files[name] = max(files[name], psutil.Process(pid).num_fds())


def _table(fuzzer: Fuzzer, owners: dict[tuple[str, int], str], files: collections.Counter[str]) -> None:
    print(f"{'listener':16} {'address':24} {'connections':>11} {'MB sent':>8} {'files at most':>13}")
    for (ip, port), name in sorted(owners.items(), key=lambda item: (item[1], item[0])):
        sent = fuzzer.sent_bytes[ip, port] / 1e6
        print(f"{name:16} {f'{ip}:{port}':24} {fuzzer.connections[ip, port]:>11} {sent:>8.1f} {files[name]:>13}")


def _reached(address: Any) -> tuple[str, int]:
    """Where a listener is reached from this machine."""
    return {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(address.ip, address.ip), address.port


if __name__ == "__main__":
    main()
