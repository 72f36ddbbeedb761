"""Gangs that come and go during a run: with notice nothing is lost, not even a token; a later one takes work."""

import pytest

from dora_jax.config import ConfigError
from dora_jax.orchestrate import events as ev
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster_backend import InstanceScaler, wish_at
from dora_jax.runtime.journal.object_storage import WANTED
from dora_jax.runtime.journal.records import Partial
from tests.fakes.cluster import eventually
from tests.fakes.cluster_world import Porters, World, at_random, check, entries, events


@pytest.mark.parametrize("mode, max_versions, seed", [("dora", 3, 0), ("partial", 2, 1), ("sync", 1, 2)])
def test_gangs_that_come_and_go_lose_nothing_and_repeat_nothing(tmp_path, mode, max_versions, seed):
    world = World(tmp_path / "journal", mode, max_versions)
    preempt, left = at_random(world, seed, lambda host: host.link.send(messages.PreemptionNotice(reason="SIGTERM")))
    check(world, world.run([preempt]))
    reasons = [event.reason for event in events(world.folder) if isinstance(event, ev.InstanceDown)]
    assert len(left) > 1 and reasons and all(reason.startswith("preempted") for reason in reasons), world.notes


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_gang_that_leaves_takes_no_token_with_it(tmp_path, hosts):
    world = World(
        tmp_path / "journal",
        length=lambda version, group, index, limit: 60,
        instances=2,
        partial_s=1e9,
        hosts=hosts,
        porter=Porters(share=0.0),
    )
    started, seen = set(), []

    def preempt(event, commands):
        if isinstance(event, ev.SampleStarted) and event.instance == 0:
            started.add(event.id)
        elif (
            isinstance(event, ev.InstanceReported)
            and not seen
            and started.intersection(zip(event.groups, event.indices, strict=True))
        ):
            seen.append(event)
            world.hosts(0)[-1].link.send(messages.PreemptionNotice(reason="SIGTERM"))

    check(world, world.run([preempt]))
    down = next(event for event in events(world.folder) if isinstance(event, ev.InstanceDown))
    resumed = [in_flight for in_flight in world.launcher.imported if len(in_flight.out_ids)]
    assert down.reason.startswith("preempted") and resumed
    assert all(in_flight.kv_len for in_flight in resumed)  # and no KV is made again
    recorded = {entry.id for entry in entries(world.folder) if isinstance(entry, Partial)}
    assert {in_flight.id for in_flight in resumed} <= recorded  # a later death would not take them either


def test_a_gang_that_comes_later_takes_work(tmp_path):
    world, steps = World(tmp_path / "journal"), []
    world.remotes[2].supervisor.want(False)

    def resize(event, commands):
        if isinstance(event, ev.StepPublished):
            steps.append(event.version)
            world.remotes[2].supervisor.want(len(steps) >= 2)
            if len(steps) == 2:  # the other steps wait for it
                eventually(lambda: world.remotes[2].incarnation, timeout_s=60.0)

    check(world, world.run([resize]))
    kinds = ev.StepPublished, ev.InstanceUp, ev.SampleDone
    seen = [
        type(event) for event in events(world.folder) if isinstance(event, kinds) and getattr(event, "instance", 2) == 2
    ]
    up = seen.index(ev.InstanceUp)
    assert seen[:up].count(ev.StepPublished) >= 2 and ev.SampleDone in seen[up:] and ev.SampleDone not in seen[:up]


class Instance:
    wanted = True

    def want(self, wanted):
        self.wanted = wanted


@pytest.mark.parametrize("text, wanted", [(None, 3), ("2", 2), ("1\n", 1), ("3", 3), ("", 3)])
def test_a_number_in_the_workdir_says_how_many_there_are_to_be(tmp_path, text, wanted):
    if text is not None:
        (tmp_path / WANTED).write_text(text)
    instances, notes = [Instance() for _ in range(3)], []
    InstanceScaler(wish_at(str(tmp_path)), instances, notes.append).close()
    assert [instance.wanted for instance in instances] == [number < wanted for number in range(3)]
    assert notes == ([f"{wanted} of 3 rollout gangs are wanted from now on"] if text else [])


@pytest.mark.parametrize("content", [b"0", b"4", b"two", b"-1", b"1.5", b"9" * 5000, b"\xff\x00", b"[" * 10**5, None])
def test_what_is_no_number_is_refused_at_the_start_and_changes_nothing_later(tmp_path, content):
    def write():
        (tmp_path / WANTED).mkdir() if content is None else (tmp_path / WANTED).write_bytes(content)

    instances, notes = [Instance() for _ in range(3)], []
    scaler = InstanceScaler(wish_at(str(tmp_path)), instances, notes.append, look_s=0.01)
    write()
    eventually(lambda: notes)
    scaler.close()
    assert all(instance.wanted for instance in instances) and len(notes[0]) < 400
    with pytest.raises(ConfigError, match=f"{WANTED}.*write the number of rollout gangs into it, or remove it$"):
        InstanceScaler(wish_at(str(tmp_path)), instances, print)


def test_the_number_may_change_and_go_again(tmp_path):
    instances, notes = [Instance() for _ in range(3)], []
    scaler = InstanceScaler(wish_at(str(tmp_path)), instances, notes.append, look_s=0.01)
    (tmp_path / WANTED).write_text("1")
    eventually(lambda: [instance.wanted for instance in instances] == [True, False, False])
    (tmp_path / WANTED).write_text("many")
    eventually(lambda: "no number" in notes[-1])
    assert not instances[1].wanted
    (tmp_path / WANTED).unlink()
    eventually(lambda: all(instance.wanted for instance in instances))
    scaler.close()


def test_the_former_name_of_the_file_is_refused_with_the_name(tmp_path):
    (tmp_path / "replicas").write_text("1")
    with pytest.raises(ConfigError, match="/replicas is not read, for its name is wanted_instances; rename it"):
        InstanceScaler(wish_at(str(tmp_path)), [], print)
