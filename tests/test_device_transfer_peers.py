"""The wire between processes, of which one is killed, frozen and started again."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dora_jax.runtime.transfer.transfer_manifest import CODEC, WireError
from tests.fakes import wire_peer
from tests.fakes.members import RUN
from tests.fakes.wire_peer import key, takes


@pytest.fixture(scope="module")
def ends():
    return wire_peer.new_wire(), wire_peer.new_wire()


class Peer:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.wire_peer"],
            env={**os.environ, "WIRE_PEER_CREDENTIAL": RUN.issue("trainer", 1)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ready(self):
        self.address = self.process.stdout.readline().strip()
        return self

    def offer(self, k):
        self.process.stdin.write(f"offer {k.epoch} {k.version} {k.receiver} {k.sequence}\n")
        self.process.stdin.flush()
        return CODEC.decode(bytes.fromhex(self.process.stdout.readline()))

    def kill(self):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


@pytest.fixture(scope="module")
def peers():
    """Started together: importing JAX is what takes the time."""
    started = [Peer() for _ in range(4)]
    yield iter([peer.ready() for peer in started])
    for peer in started:
        if peer.process.returncode is None:
            peer.kill()


def pulls(receiver, peer, version=7, timeout_s=20):
    k = key(version)
    takes(receiver, peer.offer(k), wire_peer.arrays(version), k, timeout_s)


def wanted(version):
    return tuple(wire_peer.whole(wire_peer.arrays(version)))


@pytest.mark.slow
def test_peers_that_die_freeze_and_come_back(ends, peers):
    _, receiver = ends
    peer = next(peers)
    pulls(receiver, peer)

    k = key(8)
    manifest = peer.offer(k)
    os.kill(peer.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(WireError, match="has not come within 1.0 s"):
        receiver.take(manifest, wanted(8), k, 1)
    assert time.monotonic() - began < 20
    os.kill(peer.process.pid, signal.SIGCONT)
    pulls(receiver, peer)  # over a new connection

    k = key(8)
    manifest = peer.offer(k)
    peer.kill()
    with pytest.raises(WireError):  # over the connection that was open, and over a new one
        receiver.take(manifest, wanted(8), k, 5)
    with pytest.raises(WireError):
        receiver.take(manifest, wanted(8), k, 1)
    pulls(receiver, next(peers))  # at another address


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.002, 0.02])
def test_a_peer_killed_while_it_sends(ends, peers, after_s):
    _, receiver = ends
    peer = next(peers)
    k = key(99)
    manifest, want = peer.offer(k), wire_peer.arrays(99)
    threading.Timer(after_s, peer.process.kill).start()
    try:
        takes(receiver, manifest, want, k, 20)  # it was faster
    except WireError as error:
        assert "failed" in str(error)
    peer.kill()
