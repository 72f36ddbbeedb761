"""The wire between processes, of which one is killed, frozen and started again."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dora_jax.runtime.shards import CODEC, WireError
from tests import wire_peer
from tests.test_wire import assert_same, ends, key, like  # noqa: F401  (ends: a fixture)

class Peer:
    def __init__(self):
        env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
        self.process = subprocess.Popen([sys.executable, "-m", "tests.wire_peer"], env=env, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

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
    want = wire_peer.tree(version)
    assert_same(receiver.pull(peer.offer(k), like(want), k, timeout_s), want)


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
        receiver.pull(manifest, like(wire_peer.tree(8)), k, 1)
    assert time.monotonic() - began < 20
    os.kill(peer.process.pid, signal.SIGCONT)
    pulls(receiver, peer)  # over a new connection

    k = key(8)
    manifest = peer.offer(k)
    peer.kill()
    with pytest.raises(WireError):  # over the connection that was open, and over a new one
        receiver.pull(manifest, like(wire_peer.tree(8)), k, 5)
    with pytest.raises(WireError):
        receiver.pull(manifest, like(wire_peer.tree(8)), k, 1)
    pulls(receiver, next(peers))  # at another address


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.002, 0.02])
def test_a_peer_killed_while_it_sends(ends, peers, after_s):
    _, receiver = ends
    peer = next(peers)
    k = key(99)
    manifest, want = peer.offer(k), wire_peer.tree(99)
    threading.Timer(after_s, peer.process.kill).start()
    try:
        got = receiver.pull(manifest, like(want), k, 20)
    except WireError as error:
        assert "failed" in str(error)
    else:
        assert_same(got, want)  # it was faster
    peer.kill()
