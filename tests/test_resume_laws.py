"""A restored checkpoint is what the trainer goes on with, and a run goes on from its own weights only."""

import types

import jax
import numpy as np
import pytest

from dora_jax.base.exits import Stop
from dora_jax.config import ConfigError
from dora_jax.models import sharding
from dora_jax.orchestrate.events import StepPublished
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.job import RunStorage
from dora_jax.runtime.journal import resume
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.records import Published
from dora_jax.runtime.journal.recovery import recover
from dora_jax.trainer import step
from tests.fakes import trainer_cases as cases
from tests.fakes.journal_world import History
from tests.fakes.orchestrator_shape import Shape

CONFIG = OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=6)


class Anything:
    """Checkpoints, weights and console of which a test looks at little."""

    def __init__(self, **known):
        vars(self).update(known)

    def __getattr__(self, name):
        return lambda *args, **named: ()


def test_other_weights_than_the_run_began_with_are_refused(monkeypatch):
    history = History(CONFIG, Shape(), every=10)
    assert history.live(kill_fact=118) is None
    found = recover(EventLog(history.disk), CONFIG, [0], lambda version: True, print)
    assert found.start == 0
    found.payloads.digests[0] = Published(epoch=found.epoch, digest=3)
    monkeypatch.setattr(resume, "recover", lambda *args: found)
    checkpoints, trainer = Anything(steps=list), Anything(params="params", state=types.SimpleNamespace(step=0))

    def begin(digest):
        return resume.begin(
            "journal", checkpoints, trainer, Anything(), lambda groups, base: base, lambda _: digest, CONFIG, Anything()
        )

    assert begin(3).orchestrator is found.orchestrator
    with pytest.raises(ConfigError, match="model.path holds other weights than the run of this workdir began with"):
        begin(5)


def test_all_that_was_saved_reaches_the_trainer():
    abstract = types.SimpleNamespace(params="shapes of params", opt_state="shapes of opt_state")
    loaded = []
    trainer = Anything(
        params=0,
        state=types.SimpleNamespace(step=4),
        abstract_state=lambda: abstract,
        load=lambda *what: loaded.append(what),
    )
    restored = types.SimpleNamespace(params="params", opt_state="opt_state", rl_state={}, metrics={})
    checkpoints = Anything(steps=lambda: [2, 4], usable=lambda step: True, restore=lambda *what: restored)
    begun = resume.begin(
        None, checkpoints, trainer, Anything(), lambda groups, base: base, lambda tree: 0, CONFIG, Anything()
    )
    assert loaded == [("params", "opt_state", 4)] and begun.payloads.digests


def test_a_trainer_goes_on_with_the_optimizer_state_that_it_was_given():
    mesh = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    trainer = step.Trainer(cases.MODEL, cases.SECTION, mesh, cases.params(), total_steps=9)
    given = jax.tree.map(lambda x: np.full(x.shape, 3, x.dtype), trainer.state.opt_state)
    trainer.load(jax.tree.map(np.array, trainer.params), given, 7)
    assert int(trainer.state.step) == 7
    jax.tree.map(np.testing.assert_array_equal, trainer.state.opt_state, given)


def storage(alive, known, **options):
    """The storage of a run with these live versions and these checkpoints."""
    trainer = types.SimpleNamespace(state=types.SimpleNamespace(step=4, params=0, opt_state=0))
    side = Anything(trainer=trainer, checkpoints=Anything(steps=lambda: known))
    begun = Anything(orchestrator=Anything(state=types.SimpleNamespace(alive=alive)))
    return RunStorage(side, None, begun, every=2, last=4, keep_all=False, **options)


@pytest.mark.parametrize(
    ("alive", "known", "synced", "forgotten"),
    [((2, 4), [3], True, []), ((3, 4), [3, 4], True, [3]), ((3, 4), [3, 4], False, []), ((3, 4), [], True, [])],
)
def test_the_journal_reaches_back_to_where_every_live_version_can_be_made_again(alive, known, synced, forgotten):
    """Version 2 lives, and its only start is the initial weights: what came since is needed. What is not on the disk
    comes back as it was before."""
    backing, dropped = storage(alive, known), []
    backing.journal = Anything(commit=lambda sync: synced)
    backing.durable = Anything(forget_before=dropped.append)
    backing.observe([StepPublished(version=5)], ())
    assert dropped == forgotten


def test_a_run_whose_last_checkpoint_is_not_there_does_not_end_well():
    backing = storage((4,), [2])
    backing.log = types.SimpleNamespace(metrics={})
    with pytest.raises(Stop, match="the checkpoint of version 4 is not saved; the same command makes it"):
        backing.save_last()
    storage((4,), [2, 4]).save_last()
