"""The port of a process: strangers are turned away, and what they hold of it is bounded in number and in time."""

import contextlib
import socket
import ssl
import threading
import time

import pytest

from dora_jax.runtime.common.listener import dial
from tests.fakes.cluster import eventually
from tests.fakes.members import ANOTHER_RUN, anyone, credential, dialled, new_listener


@pytest.fixture
def arrived():
    return []


@pytest.fixture
def door(arrived):
    door = new_listener(arrived.append)
    yield door
    door.close()


def unverified(door):
    ip, port = door.address.split(":")
    return socket.create_connection((ip, int(port)), timeout=10)


def ended(raw):
    """Whether the other side has ended it, after what it had sent before."""
    try:
        while raw.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_a_unverified_peer_is_turned_away_before_it_is_received(door, arrived):
    with pytest.raises(ssl.SSLError):
        dialled(door, authority=ANOTHER_RUN)
    with unverified(door):  # it does not hold up the others
        assert dialled(door)
        eventually(lambda: len(arrived) == 1)


def test_many_that_come_at_once_are_all_let_in(door, arrived):
    """With room for few, the kernel takes a connection for made of which the door never hears."""
    made = []
    threads = [threading.Thread(target=lambda: made.append(dialled(door))) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(made) == 200
    eventually(lambda: len(arrived) == 200)


def test_a_member_that_is_never_spoken_to_gives_up(monkeypatch):
    monkeypatch.setattr("dora_jax.runtime.common.listener.ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(OSError, match="has not sent anything"):
        dial(f"127.0.0.1:{mute.getsockname()[1]}", credential(), anyone)


def test_what_answers_in_another_protocol_is_no_process_of_the_run():
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b"\0\0\0\x19" + b"hello" * 5), daemon=True).start()
        with pytest.raises(ssl.SSLError):
            dial(f"127.0.0.1:{other.getsockname()[1]}", credential(), anyone)


@pytest.mark.parametrize("drips", [False, True])
def test_a_unverified_peer_has_so_long_to_answer_however_slowly_its_bytes_come(door, monkeypatch, drips):
    monkeypatch.setattr("dora_jax.runtime.common.listener.ANSWER_S", 0.3)
    with unverified(door) as raw:
        if drips:
            raw.sendall(b"\x16\x03\x01\0\xc8\1\0\0\xc4\3\3")  # a handshake of 200 bytes is to come

            def drip():
                with contextlib.suppress(OSError):
                    while raw.send(b"x"):
                        time.sleep(0.02)

            threading.Thread(target=drip, daemon=True).start()
        assert ended(raw)


def test_unverified_peers_are_bounded_and_members_come_through_between_them(door, arrived, monkeypatch):
    monkeypatch.setattr("dora_jax.runtime.common.listener.MAX_UNVERIFIED", 8)
    monkeypatch.setattr("dora_jax.runtime.common.listener.YIELD_S", 0.05)
    before = threading.active_count()
    idle = [unverified(door) for _ in range(40)]
    assert dialled(door)
    eventually(lambda: arrived)
    assert threading.active_count() <= before + 8 + 1  # a thread a stranger, of which one may be about to end
    assert all(ended(raw) for raw in idle[:24])
    for raw in idle:
        raw.close()


def test_a_machine_without_a_file_number_left_is_asked_again(door, arrived, monkeypatch):
    taken = iter([OSError(24, "Too many open files")] * 2)
    accept = socket.socket.accept

    def accepts(listener):
        if error := next(taken, None):
            raise error
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accepts)
    assert dialled(door)
    eventually(lambda: arrived and next(taken, None) is None)


def test_a_door_that_is_closed_lets_nobody_in(door):
    door.close()

    def shut():
        with contextlib.suppress(OSError):
            dialled(door)
            return False
        return True

    eventually(shut)
