"""What a run wears around its engines and its trainer, asked for by its configuration."""

import dataclasses

import pytest

from dora_jax import config as configs
from dora_jax.config import Config, ConfigError
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.plan import validate
from dora_jax.runtime.observe import emulated_timing
from dora_jax.runtime.observe import recorder as recording
from dora_jax.runtime.observe.emulated_timing import PacedEngine, PacedTrainer, PacedWeights
from dora_jax.runtime.observe.recorder import TimedEngine


@dataclasses.dataclass(frozen=True)
class Side:
    trainer: object
    pack: object


SIDE = Side("trainer", list)


class Instance:
    def __init__(self):
        self.engine, self.weights = "engine", "weights"

    def wrap_engine(self, around, weights):
        self.engine, self.weights = around(self.engine), weights


def put_on(tmp_path, orchestrator=None, **changes):
    instance, notes = Instance(), []
    orchestrator = orchestrator or Orchestrator(OrchestratorConfig(groups_per_step=1, group_size=1, total_steps=1))
    side, recorder = recording.instrument(
        dataclasses.replace(Config(), **changes), tmp_path, [instance], "weights", SIDE, orchestrator, notes.append
    )
    return instance, side, recorder, notes


def test_nothing_is_worn_unasked(tmp_path):
    instance, side, recorder, notes = put_on(tmp_path)
    assert (instance.engine, instance.weights, side, recorder, notes) == ("engine", "weights", SIDE, None, [])


def test_a_pace_is_worn_by_all_and_reported(tmp_path):
    instance, side, recorder, (notes,) = put_on(tmp_path, pace="h800")
    assert isinstance(instance.engine, PacedEngine) and isinstance(instance.weights, PacedWeights)
    assert isinstance(side.trainer, PacedTrainer) and side.pack == side.trainer.pack
    assert recorder is None and notes.startswith("PACED") and "h800" in notes


def test_a_recorder_watches_what_is_paced(tmp_path):
    journal = configs.JournalSection(record=True)
    instance, _, recorder, _ = put_on(tmp_path, pace="h800", journal=journal)
    assert isinstance(instance.engine, TimedEngine) and isinstance(instance.engine.engine, PacedEngine)
    recorder.close()
    assert (tmp_path / recording.RECORDED / "journal.jsonl").is_file()


def test_a_recording_begins_with_its_run(tmp_path):
    begun = Orchestrator(OrchestratorConfig(groups_per_step=1, group_size=1, total_steps=9), start_version=3)
    with pytest.raises(ConfigError, match="journal.record: the run in .* has begun already"):
        put_on(tmp_path, begun, journal=configs.JournalSection(record=True))


def test_a_chip_that_cannot_hold_the_model_is_no_pace():
    with pytest.raises(ConfigError, match="pace: .* leave no KV cache on 4 v5e"):
        emulated_timing.costs_of("v5e", 2)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("pace", {"pace": "h800"}),
        ("journal.record", {"journal.record": True}),
        ("orchestrator.colocated", {"orchestrator.colocated": True}),
    ],
)
def test_a_cluster_has_none_of_it(name, changes):
    tree = configs.defaults()
    tree.model.path = "x"
    tree.cluster.launcher, tree.rollout.instances = "process", 2
    tree.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=f"{name}: belongs to a run in one process"):
        validate.from_config_dict(tree)
