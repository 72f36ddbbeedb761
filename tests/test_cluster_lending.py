"""The trainer's gang is an instance's gang while its devices are lent: the real thing, small, and what dies
meanwhile."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from dora_jax.config import ClusterSection, Config, ModelSection, OrchestratorSection, RolloutSection, RunError
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import lending
from dora_jax.plan import devices, presets, validate
from dora_jax.runtime.instances.instance_proxy import RETURNED
from dora_jax.runtime.journal.journal_audit import audit
from tests.fakes import faults
from tests.fakes.cluster_world import World, check, events
from tests.fakes.tiny_run import CONFIG

LENT = 2  # the first instance of the trainer's devices


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Lend whenever the trainer waits, in this process too, which follows the run's journal."""
    monkeypatch.setattr(lending, "worth_lending", lambda *expected: True)


def start(folder, console, **env):
    """On policy, so that the trainer waits before every step."""
    flags = ["steps=10", "orchestrator.elastic", "orchestrator.max_versions=1", "trainer.lent_memory=host"]
    flags += ["rollout.max_prompt_tokens=64", "rollout.max_new_tokens=96"]
    with console.open("a") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.fakes.eager_lender",
                f"--config={folder}/config.py",
                f"--workdir={folder}/run",
                *(f"--config.{flag}" for flag in flags),
            ],
            stdout=log,
            stderr=log,
            env={**os.environ, **env},
        )


def incarnations(folder):
    """InstanceUp and InstanceDown of the trainer's devices, as far as the journal knows."""
    known = events(folder / "run" / "journal") if (folder / "run" / "journal").exists() else []
    return [event for event in known if isinstance(event, ev.InstanceUp | ev.InstanceDown) and event.instance >= LENT]


def lent(folder):
    return any(
        isinstance(newest, ev.InstanceUp)
        for newest in {incarnation.instance: incarnation for incarnation in incarnations(folder)}.values()
    )


def cut_short(folder):
    """Lives that another end came to than a Return."""
    return [
        incarnation
        for incarnation in incarnations(folder)
        if isinstance(incarnation, ev.InstanceDown) and incarnation.reason != RETURNED
    ]


def notes(console, pattern):
    return re.findall(f"^{pattern}.*$", console.read_text(), re.MULTILINE)


def configured(hosts=1, trainer_hosts=1, tensor=1, launcher="ray", **slices):
    return Config(
        model=ModelSection(path="m", size="Qwen3-0.6B"),
        orchestrator=OrchestratorSection(elastic=True),
        rollout=RolloutSection(tensor=tensor, instances=3),
        cluster=ClusterSection(launcher=launcher, hosts_per_instance=hosts, trainer_hosts=trainer_hosts, **slices),
    )


def test_processes_that_make_up_no_whole_instance_are_refused():
    assert devices.lendable(configured(2, 4)) == (3, 4) and devices.lendable(configured(4, 4)) == (3,)
    (problem,) = [line for line in validate.problems(configured(2, 3)) if "elastic" in line]
    assert problem.startswith("orchestrator.elastic: the trainer's 3 processes make up no whole number of instances of")


@pytest.mark.parametrize(
    "instance, tensor, wrong", [("v5e-4", 4, ""), ("v5e-4", 2, "have 4 devices"), ("v6e-4", 4, "of v6e-4")]
)
def test_devices_that_are_no_instance_s_are_refused(instance, tensor, wrong):
    config = configured(trainer_hosts=2, tensor=tensor, trainer_slice="v5e-8", instance_slice=instance)
    problems = presets.problems(presets.plan(config, presets.machines(config)))
    assert [wrong in line for line in problems if "elastic" in line] == ([True] if wrong else []), problems


@pytest.fixture
def passes():
    """Passes of the two fault points."""
    seen = {"chips.lent": [], "chips.returned": []}
    with contextlib.ExitStack() as points:
        for name, times in seen.items():
            points.enter_context(faults.wrap(name, lambda times=times: times.append(0)))
        yield seen


@pytest.mark.parametrize("dies", ["a process", "the trainer"])
def test_instances_have_a_incarnation_for_each_lend(tmp_path, monkeypatch, dies, passes):
    """Threads stand for processes; where the trainer's gang is not there, no process comes."""
    world = World(tmp_path / "journal", max_versions=1, lendable=(3,))
    blows, asked, struck = [], [], []  # struck: of each incarnation that lost a process, what ended it, as it came

    def watch(event, commands):
        asked.extend(command for command in commands if isinstance(command, ev.Lend | ev.Return))
        if isinstance(event, ev.InstanceUp) and event.instance == 3 and dies == "a process" and len(blows) < 2:
            blows.append(world.hosts(3)[1].die())
            struck.append([])
        elif struck:
            ends = [command for command in commands if isinstance(command, ev.Return)]
            struck[-1] += [event] * (isinstance(event, ev.InstanceDown) and event.instance == 3) + ends

    if dies == "the trainer":
        start = world.launcher.start
        monkeypatch.setattr(world.launcher, "start", lambda ticket, *args: begun(start, blows, ticket, *args))
    check(world, world.run([watch]))
    facts = [event for event in events(world.folder) if getattr(event, "instance", None) == 3]
    ups, downs = ([event for event in facts if isinstance(event, kind)] for kind in (ev.InstanceUp, ev.InstanceDown))
    lends = sum(isinstance(command, ev.Lend) for command in asked)
    assert 1 <= len(ups) <= len(passes["chips.lent"]) and len(downs) <= len(passes["chips.returned"])
    assert lends - 1 <= len(downs) <= lends and len(ups) >= 1 and all(len(up.versions) == 1 for up in ups)
    assert len(blows) == 2 and len(downs) - len(ups) <= 2, (blows, world.notes)
    lost = sum("rollout 3" in text and "is lost" in text for text in world.notes)
    asked_back = sum(not ends or isinstance(ends[0], ev.Return) for ends in struck)  # by then, or at the run's end
    assert len(struck) - asked_back <= lost <= len(struck), (world.notes, struck)


def test_an_instance_whose_every_incarnation_is_lost_stays_away(tmp_path, monkeypatch):
    world = World(tmp_path / "journal", max_versions=1, lendable=(3,), restarts=1)
    start, killed = world.launcher.start, []

    def stillborn(ticket, *args):
        started = start(ticket, *args)
        if ticket.gang == "rollout 3":
            killed.append(world.hosts(3)[0].die())
        return started

    monkeypatch.setattr(world.launcher, "start", stillborn)
    check(world, world.run())
    assert len(killed) == 2 and sum("and it stays away" in text for text in world.notes) == 1, world.notes


def begun(start, blows, ticket, *args):
    if ticket.gang == "rollout 3" and len(blows) < 2:
        blows.append(ticket)
        raise RunError("the trainer's gang cannot lend its devices: it is being started")
    return start(ticket, *args)


@pytest.mark.slow
@pytest.mark.alone  # a process that sends nothing for ten seconds is taken for dead
def test_the_trainer_s_gang_is_killed_while_it_is_lent_and_then_the_controller(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(base=str(tmp_path / "base")))
    console = tmp_path / "console.log"
    process = start(tmp_path, console, DORA_FAULT="chips.lent:12")
    try:
        for epoch in range(1, 6):  # what is lent now may be back before the blow
            while process.poll() is None and not (
                lent(tmp_path) and (up := notes(console, f"trainer .epoch {epoch}. is up"))
            ):
                time.sleep(0.01)
            os.kill(int(up[0].rpartition(", ")[2]), signal.SIGTERM if epoch == 1 else signal.SIGKILL)
            while process.poll() is None and not notes(console, f"trainer .epoch {epoch}. (is lost|has left)"):
                time.sleep(0.01)
            if cut_short(tmp_path) and epoch > 1:
                break
        assert process.wait(200) == -signal.SIGKILL, console.read_text()  # the controller alone
        process = start(tmp_path, console)
        assert process.wait(200) == 0, console.read_text()
    finally:
        process.kill()
    text = console.read_text()
    assert cut_short(tmp_path), incarnations(tmp_path)
    assert "trainer (epoch 1) has left: preempted" in text, text
    assert "is up, taken over" in text and "version 10 is published" in text, text
    sampled = [event for event in events(tmp_path / "run" / "journal") if isinstance(event, ev.SampleDone)]
    assert any(event.instance is not None and event.instance >= LENT for event in sampled)
    books = audit(tmp_path / "run" / "journal")
    assert books.ok and books.trained == 20, books
