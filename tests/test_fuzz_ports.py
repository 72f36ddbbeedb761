"""Garbage on the ports of a controller and of a wire for a second; tests.soak.fuzz_ports takes minutes."""

import os
import random
import time

from dora_jax.runtime.cluster import messages
from dora_jax.runtime.common import listener
from tests.fakes.cluster import FakeLauncher, Kept
from tests.fakes.wire_peer import NAMED, key, new_wire, takes, whole
from tests.soak.fuzz_ports import PAYLOADS, Fuzzer, listening


def test_a_gang_and_a_wire_work_on_while_unverified_peers_send_garbage_to_every_port():
    sender, receiver = new_wire(), new_wire()
    with Kept(FakeLauncher()) as kept:
        gang = kept.up()
        addresses = {kept.hub.address, sender.address, receiver.address}
        assert {f"{ip}:{port}" for ip, port in listening(os.getpid())} >= addresses
        files = len(os.listdir("/proc/self/fd"))
        fuzzer = Fuzzer(seed=0, threads=3)
        fuzzer.targets = [(ip, int(port)) for ip, port in (address.split(":") for address in addresses)]
        try:
            until, worked, most = time.monotonic() + 1.5, 0, 0
            while time.monotonic() < until or not worked:
                assert gang.call(messages.PublishWeights(version=1), 20.0) == [messages.Done(value=0)] * 2
                k = key()
                takes(receiver, sender.give(k, whole(NAMED)), NAMED, k, 20)
                worked += 1
                most = max(most, len(os.listdir("/proc/self/fd")))
        finally:
            fuzzer.close()
        assert not gang.dead.is_set() and kept.events == ["up 1"] and len(fuzzer.connections) == 3
        held_here = 3 * 65  # by the fuzzer's own threads
        assert most - files < held_here + 3 * 2 * (listener.MAX_UNVERIFIED + 8)
    sender.close()
    receiver.close()


def test_the_same_seed_sends_the_same_garbage():
    for name, payload in PAYLOADS.items():
        assert payload(random.Random(7)) == payload(random.Random(7)), name
