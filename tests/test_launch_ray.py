"""Gangs in a Ray cluster of fake TPU slices of two hosts; skipped where Ray, an extra, is missing."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("ray", reason="ray is not installed: gangs on Ray are not tried")

import ray
from ray.util.placement_group import placement_group_table

from dora_jax.config import ConfigError
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.gang import Gang, GangListener
from dora_jax.runtime.cluster.launch_ray import FreeSlices, RayGang, RayLauncher, intact_slices
from dora_jax.runtime.cluster.run_registry import RunRegistry
from tests.fakes.cluster import LIMITS, eventually
from tests.soak.fake_slices import FakeSlices


def node(name, number, alive=True, slice_type="v4-16", chips=4.0):
    return {
        "NodeID": f"{name}.{number}",
        "Alive": alive,
        "Resources": {"TPU": chips},
        "Labels": {"ray.io/tpu-slice-name": name, "ray.io/tpu-pod-type": slice_type},
    }


def test_a_slice_is_intact_where_all_of_its_hosts_live_and_stay():
    nodes = [
        node("d", 0),
        node("d", 1),
        node("a", 0),
        node("a", 1, alive=False),
        node("b", 0),
        node("b", 1),
        node("c", 0),
        node("c", 1),
        node("e", 0, slice_type="v4-8"),
        {"NodeID": "head", "Alive": True, "Resources": {"CPU": 2.0}, "Labels": {}},
    ]
    assert intact_slices(nodes, ["c.1"], "v4-16", 2) == {"b": 4.0, "d": 4.0}
    assert list(intact_slices(nodes, [], "v4-16", 2)) == ["b", "c", "d"]
    assert intact_slices(nodes, [], "v4-8", 1) == {"e": 4.0}


def test_a_cluster_that_lets_nobody_in_is_named(monkeypatch):
    def refuses(**_):
        raise ConnectionError("Failed to connect to Ray cluster at 10.1.2.3:6379\nnone of the token")

    monkeypatch.setattr(ray, "init", refuses)
    monkeypatch.setenv("RAY_ADDRESS", "10.1.2.3:6379")
    with pytest.raises(ConfigError) as raised:
        RayLauncher(Path("."), "run")
    assert str(raised.value) == "RAY_ADDRESS: Failed to connect to Ray cluster at 10.1.2.3:6379"


def test_a_gang_without_a_place_says_what_it_waits_for(monkeypatch):
    monkeypatch.setattr(ray, "available_resources", dict)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    waiting = [RayGang(FreeSlices(), "run/trainer/1", 1, of, (mock.Mock(), False)).needs() for of in ("", "v4-8")]
    assert waiting[0].startswith("each of its processes needs a CPU of Ray, and 0 of 2 are free; ")
    assert waiting[1].startswith("Ray has no free slice v4-8 whose nodes are all up; ")
    assert all(each.endswith("fewer rollout.instances, makes room") for each in waiting)


@pytest.fixture(scope="module")
def slices():
    cluster = FakeSlices(2, 0, hosts=2)
    yield cluster
    cluster.close()


class Controller:
    """A launcher, and one that takes its processes' calls; `again` is the next controller after this one has died."""

    def __init__(self, hub):
        self.launcher, self.hub = RayLauncher(Path("."), "run"), hub

    def again(self):
        ray.shutdown()
        return Controller(self.hub)

    def expect(self, name, epoch=1):
        gang = Gang(name, epoch, 2, lambda item: None, lambda text: None, LIMITS)
        self.hub.expect(gang)
        return gang

    def start(self, name, epoch=1):
        """A gang that is there, and waits for its first command."""
        gang = self.expect(name, epoch)
        started = self.launcher.start(self.hub.ticket(name, epoch), 2, "v4-16")
        eventually(lambda: started.ended() is None and len(gang.processes) == 2, 120)
        return gang, started

    def find(self, name, epoch=1):
        return self.launcher.find(self.hub.ticket(name, epoch), 2, "v4-16", ())


@pytest.fixture
def controller(slices, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", slices.address)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    hub = GangListener("0.0.0.0", RunRegistry())
    first = Controller(hub)
    hub.address = f"{first.launcher.ip}:{hub.address.rpartition(':')[2]}"
    yield first
    if not ray.is_initialized():
        ray.init(address=slices.address, namespace="dora_jax")
    RayLauncher.close(first.launcher)
    hub.close()


def pids(gang):
    return [host.hello.pid for host in gang.processes]


def rooms():
    return sorted(room["name"] for room in placement_group_table().values() if room["state"] != "REMOVED")


@pytest.mark.slow
def test_the_next_controller_finds_a_gang_and_sees_it_die(controller):
    gang, _ = controller.start("rollout 1")
    _other, _ = controller.start("rollout 10")
    second = controller.again()
    found = second.find("rollout 1")
    assert found.placed and found.ended() is None and found.notice() is None
    assert len(rooms()) == 2, "another gang's name begins like this one's"
    assert second.find("rollout 10").ended() is None
    assert second.launcher.slices.take("another", "v4-16", 2) is None, "its slice is taken"
    os.kill(pids(gang)[1], signal.SIGKILL)
    eventually(found.ended, 20)
    assert found.ended().startswith(("ActorDiedError", "ActorUnavailableError"))  # the connection may be seen first
    found.kill()
    assert rooms() == ["run/rollout 10/1"] and len(ray.util.list_named_actors()) == 2
    assert second.find("rollout 10", epoch=2) is None
    assert rooms() == [] and ray.util.list_named_actors() == [], "of another epoch: it ends"
    second.start("rollout 1", epoch=2)
    second.launcher.close()


@pytest.mark.slow
def test_a_gang_of_which_a_part_is_there_ends(controller):
    gang, _ = controller.start("trainer")
    gang.die = lambda reason: None  # no controller is there to end the rest
    os.kill(pids(gang)[0], signal.SIGKILL)
    eventually(lambda: len(ray.util.list_named_actors()) == 1, 20)
    second = controller.again()
    assert second.find("trainer") is None and rooms() == [] and ray.util.list_named_actors() == []
    second.launcher.close()


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_ends(controller):
    controller.start("rollout 0")
    controller.launcher.close()
    controller.again()
    assert rooms() == [] and ray.util.list_named_actors() == []


@pytest.mark.slow
def test_a_gang_that_gives_up_gives_its_place_back(controller):
    gang, started = controller.start("rollout 0")
    gang.form(
        lambda rank, coordinator, leader: messages.Begin(
            config={}, workdir="", instance=0, rank=rank, hosts=2, coordinator=coordinator, leader=leader
        )
    )
    eventually(lambda: rooms() == [] and ray.util.list_named_actors() == [] and started.ended() is not None, 60)


@pytest.mark.slow
def test_a_node_that_is_drained_is_notice_and_its_slice_is_not_taken_again(controller, slices):
    gang, started = controller.start("rollout 0")
    assert started.notice() is None
    there = controller.launcher.slices.taken["run/rollout 0/1"]
    slices.drain(pids(gang)[0])
    eventually(started.notice)
    started.kill()
    controller.start("rollout 0", epoch=2)
    assert controller.launcher.slices.taken["run/rollout 0/2"] != there
