"""The start of a run on the journal of a killed one: which steps are made again, and what is said of them."""

import types

import pytest

from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.durability import resume
from dora_jax.runtime.durability.event_log import EventLog
from dora_jax.runtime.durability.recovery import recover
from tests.fakes.journal_world import History
from tests.fakes.orchestrator_shape import Shape

CONFIG = OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=6)


class Trainer:
    """The weights of a version are its number."""

    def __init__(self):
        self.params = 0

    def step(self, base):
        assert base == self.params, "steps come in order"
        self.params += 1


class Sink(dict):
    """Stands for the checkpoints, the weight store and the console: keeps what it is told."""

    def steps(self):
        return []

    def put(self, version, weights):
        self[version] = weights

    def undo_after(self, version):
        self["undone after"] = version

    def note(self, text):
        self.setdefault("notes", []).append(text)

    def resume(self, step):
        self["resumed"] = step

    def phase(self, name, text):
        self["phase"] = text


@pytest.fixture
def killed():
    """(the journal of a run that was killed after several steps, what it recovers to)"""
    history = History(CONFIG, Shape(), every=10)
    assert history.live(kill_fact=118) is None
    found = recover(EventLog(history.disk), CONFIG, [0], lambda version: True, print)
    assert len(found.steps) > 1 and found.payloads.partial
    return history.disk, found


def begun(disk, digest):
    rig = types.SimpleNamespace(trainer=Trainer(), weights=Sink(), checkpoints=Sink(), writer=Sink())
    rig.begun = resume.begin(
        EventLog(disk), rig.checkpoints, rig.trainer, rig.weights, lambda groups, base: base, digest, CONFIG, rig.writer
    )
    return rig


def test_the_steps_since_the_start_are_made_again_and_live_versions_are_in_the_store(killed):
    disk, found = killed
    digests = {step.base + 1: step.published.digest for step in found.steps}
    rig = begun(disk, lambda version: digests.get(version, 0))
    assert rig.trainer.params == found.base == rig.writer["resumed"] and rig.begun.epoch == found.epoch
    assert rig.weights == {version: version for version in found.debts.versions}
    assert rig.begun.debts == found.debts and rig.begun.segments == found.segments
    assert "resuming at step" in rig.writer["notes"][-1]


def test_a_step_that_comes_out_with_other_weights_begins_an_epoch_and_running_samples_start_over(killed):
    disk, found = killed
    rig = begun(disk, lambda version: 7 if version else 0)
    assert rig.begun.epoch == found.epoch + 1 and not rig.begun.payloads.partial
    assert rig.checkpoints["undone after"] == found.start
    assert "came out with other weights" in rig.writer["notes"][0]
