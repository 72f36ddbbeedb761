"""Connections between members of a run against whatever else may stand at their ends or between them."""

import contextlib
import dataclasses
import datetime
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import msgpack
import numpy as np
import pytest

from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.connection import ControllerConnection
from dora_jax.runtime.cluster.gang import Gang, GangListener
from dora_jax.runtime.cluster.run_registry import RunRegistry
from dora_jax.runtime.common import credentials
from dora_jax.runtime.common.channel import LENGTH, PIECE_BYTES
from dora_jax.runtime.common.credentials import CONTROLLER, Authority, Credential
from dora_jax.runtime.common.listener import dial
from dora_jax.runtime.transfer.transfer_manifest import WireError
from tests.fakes.cluster import LIMITS, eventually
from tests.fakes.members import RUN, anyone, dialled, new_listener
from tests.fakes.wire_peer import NAMED, key, new_wire, takes, whole


class Relay:
    """A stranger at an address: it passes on what comes there to `target`, and back; it knows what it has seen."""

    def __init__(self, target, port=0):
        self.seen = {"in": b"", "out": b""}  # by the one that dialled, and by the target
        self.ends, self.damage = {}, None
        self._target = target.rpartition(":")
        self.listener = None
        while self.listener is None:
            with contextlib.suppress(OSError):  # the port is still taken
                self.listener = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        victim, _ = self.listener.accept()
        target = socket.create_connection((self._target[0], int(self._target[2])))
        self.ends = {"in": victim, "out": target}
        for name, source, sink in (("in", victim, target), ("out", target, victim)):
            threading.Thread(target=self._pump, args=(name, source, sink), daemon=True).start()

    def _pump(self, name, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen[name] += data
                sink.sendall(self.damage(name, data) if self.damage else data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def say(self, name, record):
        """Bytes of its own, as a member would frame a record."""
        frame = msgpack.packb([messages.CODEC.encode(record)])
        with contextlib.suppress(OSError):
            self.ends[name].sendall(LENGTH.pack(len(frame)) + frame)


def hello(pid):
    return messages.Hello(pid=pid, worker=-1, coordinator=f"coordinator of {pid}", leader="")


def test_a_relay_between_an_orphan_and_the_next_controller_hears_nothing_and_says_nothing(tmp_path, monkeypatch):
    """A stranger takes the port of a dead controller, whose address the orphan knows, and leads it to the next one."""
    monkeypatch.setattr("dora_jax.runtime.cluster.connection.LOOK_S", 0.02)
    registry = RunRegistry(str(tmp_path))
    first = GangListener("127.0.0.1", registry)
    gang = Gang("rollout 0", 1, 1, lambda item: None, lambda text: None, LIMITS)
    first.expect(gang)
    registry.announce(first.address)
    ended = threading.Event()
    orphan = ControllerConnection(first.address, Credential(registry.authority.issue("rollout 0", 1)), ended.set)
    orphan.hello(hello(1))
    orphan.wait_for_another(str(tmp_path), 0, 20.0)
    eventually(lambda: gang.processes)

    second = GangListener("127.0.0.1", RunRegistry(str(tmp_path)))
    joined = Gang("rollout 0", 1, 2, lambda item: None, lambda text: None, LIMITS, again=True)
    second.expect(joined)
    first.close()
    relay = Relay(second.address, int(first.address.rpartition(":")[2]))
    gang.processes[0].link.close("killed")
    eventually(lambda: joined.processes)  # through the relay: the two know each other
    assert [process.hello.pid for process in joined.processes] == [1]

    assert b"coordinator of" not in relay.seen["in"] + relay.seen["out"]
    relay.say("out", hello(666))
    relay.say("in", messages.Rejoin())
    eventually(joined.dead.is_set)  # what is no TLS ends the connection
    assert orphan.inbox.empty() and [process.hello.pid for process in joined.processes] == [1]
    second.close()


def test_the_bytes_of_a_handshake_are_of_no_use_again():
    arrived = []
    listener = new_listener(arrived.append)
    relay = Relay(listener.address)
    dialled(relay).send(b"a command")
    eventually(lambda: arrived)
    assert arrived[0].receive(99) == b"a command"
    with socket.create_connection(tuple(listener.address.split(":")), timeout=10) as again:
        again.sendall(relay.seen["in"])
        with contextlib.suppress(ConnectionError):
            while again.recv(1 << 16):
                pass
    assert len(arrived) == 1
    listener.close()


# ------------------------------------------------------ whom a certificate names


def controller_of(registry, *gangs):
    listener = GangListener("127.0.0.1", registry)
    for name, epoch in gangs:
        listener.expect(Gang(name, epoch, 1, lambda item: None, lambda text: None, LIMITS))
    return listener


@pytest.mark.parametrize("role, incarnation", [("rollout 1", 2), ("trainer", 2), (CONTROLLER, 2), ("rollout 0", 1)])
def test_another_role_or_an_earlier_incarnation_does_not_come_in(role, incarnation):
    registry = RunRegistry()
    listener = controller_of(registry, ("rollout 0", 2))
    with pytest.raises(ConnectionError):
        ControllerConnection(listener.address, Credential(registry.authority.issue(role, incarnation)))
    assert ControllerConnection(listener.address, Credential(registry.authority.issue("rollout 0", 2))).own_ip
    listener.close()


@pytest.mark.parametrize("role, incarnation", [("rollout 1", 3), (CONTROLLER, 1)])
def test_what_poses_as_the_controller_is_found_out(tmp_path, monkeypatch, role, incarnation):
    """It is a process of the run: another role, or the controller before the one that was seen last."""
    monkeypatch.setattr("dora_jax.runtime.cluster.connection.LOOK_S", 0.02)
    authority, came, ended = Authority(), [], threading.Event()
    real = new_listener(came.append, own=Credential(authority.issue(CONTROLLER, 2)))
    process = ControllerConnection(real.address, Credential(authority.issue("rollout 0", 1)), ended.set)
    process.hello(hello(1))
    registry = RunRegistry(str(tmp_path))
    received = []
    posing = new_listener(received.append, own=Credential(authority.issue(role, incarnation)))
    registry.announce(posing.address)
    process.wait_for_another(str(tmp_path), 0, 0.5)
    eventually(lambda: came)
    came[0].hang_up()
    assert ended.wait(10)
    time.sleep(0.1)
    assert all(_ended(channel) for channel in received)
    for listener in (real, posing):
        listener.close()


def _ended(channel):
    channel.until_s = time.monotonic() + 5
    try:
        channel.receive(1 << 20)
    except ConnectionError:
        return True
    return False


def test_a_run_that_has_ended_has_no_members(tmp_path):
    registry = RunRegistry(str(tmp_path))
    registry.announce("127.0.0.1:9")
    former = Credential(registry.authority.issue("rollout 0", 1))
    registry.close()
    later = RunRegistry(str(tmp_path))
    listener = controller_of(later, ("rollout 0", 1))
    with pytest.raises(OSError, match="certificate"):
        dial(listener.address, former, anyone)
    posing = new_listener(lambda channel: None, own=former)  # and it lets in nobody of the later run
    with pytest.raises(OSError, match="certificate"):
        ControllerConnection(posing.address, Credential(later.authority.issue("rollout 0", 1)))
    for each in (listener, posing):
        each.close()


def test_a_transfer_is_served_to_whom_it_is_for_alone():
    sender, k = new_wire(role="trainer"), key()
    manifest = sender.give(k, whole(NAMED))
    for role, incarnation in (("rollout1", 1), ("rollout0", 2), ("trainer", 1), (CONTROLLER, 1)):
        with pytest.raises(WireError, match="is not offered there any more"):
            new_wire(role=role, incarnation=incarnation).take(manifest, tuple(whole(NAMED)), k, 5)
    takes(new_wire(), manifest, NAMED, k)


def test_a_transfer_is_taken_from_whom_the_manifest_names_alone():
    for role, incarnation in (("rollout1", 1), ("trainer", 2)):
        sender, k = new_wire(role=role, incarnation=incarnation), key()
        manifest = sender.give(k, whole(NAMED))
        named = dict(sender="trainer", incarnation=1)
        with pytest.raises(WireError, match=f"is incarnation {incarnation} of {role}"):
            new_wire().take(dataclasses.replace(manifest, **named), tuple(whole(NAMED)), k, 5)


# ------------------------------------------------------------ clocks

SHIFTED = """
#include <time.h>
time_t time(time_t *out) { struct timespec now; clock_gettime(CLOCK_REALTIME, &now); now.tv_sec += OFFSET_S;
                           if (out) *out = now.tv_sec; return now.tv_sec; }
"""
DIALS = """
import sys
from dora_jax.runtime.common.credentials import Credential
from dora_jax.runtime.common.listener import dial
print(dial(sys.argv[1], Credential(sys.stdin.read()), lambda peer: True).peer.role)
"""


@pytest.fixture(scope="module", params=[3600, -3600])
def shifted(tmp_path_factory, request):
    """`dial` in a process for whose OpenSSL it is an hour later, or earlier."""
    if (compiler := shutil.which("cc")) is None or not sys.platform.startswith("linux"):
        pytest.skip("it takes a C compiler and LD_PRELOAD to give a process a clock of its own")
    library = tmp_path_factory.mktemp("clock") / "shifted.so"
    command = [compiler, "-shared", "-fPIC", f"-DOFFSET_S={request.param}", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=SHIFTED, text=True, check=True)

    def dials(address, pem):
        command, env = [sys.executable, "-c", DIALS, address], {**os.environ, "LD_PRELOAD": str(library)}
        return subprocess.run(command, input=pem, env=env, text=True, capture_output=True, check=False)

    return dials


def test_a_host_whose_clock_is_an_hour_off_is_let_in(shifted, monkeypatch):
    listener = new_listener(lambda channel: None)
    assert shifted(listener.address, RUN.issue("rollout 0", 1)).stdout == f"{CONTROLLER}\n"
    listener.close()

    now, half = datetime.datetime.now(datetime.UTC), datetime.timedelta(minutes=30)  # what would tell the hour
    monkeypatch.setattr(credentials, "BEGIN", now - half)
    monkeypatch.setattr(credentials, "END", now + half)
    brief = Authority()
    listener = new_listener(lambda channel: None, own=Credential(brief.issue(CONTROLLER, 1)))
    assert "certificate verify failed" in shifted(listener.address, brief.issue("rollout 0", 1)).stderr
    listener.close()


# ------------------------------------------------------------- plain


@pytest.fixture
def plain():
    """(one end, the relay, the other end) of a channel without encryption."""
    arrived = []
    listener = new_listener(arrived.append)
    relay = Relay(listener.address)
    here = dialled(relay)
    eventually(lambda: arrived)
    there = arrived[0]
    other = threading.Thread(target=there.go_plain, args=(bytes(32),))
    other.start()
    here.go_plain(bytes(32))
    other.join()
    yield here, relay, there
    listener.close()


def test_plain_pieces_arrive_and_can_be_read_between(plain):
    here, relay, there = plain
    sent, got = bytes(range(256)) * (PIECE_BYTES // 100), bytearray(PIECE_BYTES // 100 * 256)
    thread = threading.Thread(target=there.write, args=(sent,))
    thread.start()
    here.read(got)
    thread.join()
    assert got == sent and sent[:256] in relay.seen["out"]


@pytest.mark.parametrize("attack", ["a bit", "the order"])
def test_what_is_changed_between_ends_a_plain_transfer(plain, attack):
    here, relay, there = plain
    size = 1000
    total = bytearray()

    def damage(name, data):
        total.extend(data)
        if len(total) < 2 * (size + 16):
            return b""
        if attack == "a bit":
            total[10] ^= 1
            return bytes(total)
        return bytes(total[size + 16 :] + total[: size + 16])  # two pieces of one length

    relay.damage = damage
    there.write(bytes(size))
    there.write(b"\1" * size)
    with pytest.raises(ConnectionError, match="another keyed checksum"):
        here.read(bytearray(size))


def test_a_wire_that_may_send_plain_does_and_only_then():
    for encrypted, readable in ((True, False), (False, True)):
        sender, k = new_wire(role="trainer", encrypted=encrypted), key()
        named = {"w": np.full(4096, 7, np.uint8)}
        manifest = sender.give(k, whole(named))
        relay = Relay(manifest.address)
        takes(new_wire(), dataclasses.replace(manifest, address=relay.address), named, k)
        assert (bytes([7] * 4096) in relay.seen["out"]) == readable
