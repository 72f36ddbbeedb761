"""Where the trainer's state rests between updates, and while its devices are lent."""

import dataclasses

import jax
import numpy as np
import pytest

from dora_jax.models.lora_config import Lora
from dora_jax.trainer import objective, optim, step
from tests.fakes import trainer_cases as cases


@pytest.mark.slow
def test_moments_in_host_memory_give_the_same_step():
    after, kinds = [], []
    for memory in ("device", "host"):
        section = cases.section(optimizer_memory=memory, advantage="gae", value_learning_rate=1e-2, micro_batches=2)
        trainer = step.Trainer(
            dataclasses.replace(cases.MODEL, n_layers=1),
            section,
            cases.mesh(fsdp=2, tensor=2),
            cases.params(3, dataclasses.replace(cases.MODEL, n_layers=1)),
            total_steps=5,
        )
        batch = cases.batch(trainer, score=trainer.score)
        trainer.step(batch)
        trainer.step(batch)
        moments = [
            s for s in jax.tree.leaves(trainer.state.opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu")
        ]
        kinds.append({x.sharding.memory_kind for adam in moments for x in jax.tree.leaves((adam.mu, adam.nu))})
        assert len(moments) == 2  # of the policy and of the value model
        assert {x.sharding.memory_kind for x in jax.tree.leaves(trainer.params)} == {"device"}
        after.append(jax.tree.map(np.asarray, (trainer.params, trainer.state.opt_state["critic"].params)))
    assert kinds == [{"device"}, {"pinned_host"}]
    jax.tree.map(np.testing.assert_array_equal, *after)


def adam_of(trainer):
    """The state with both moments."""
    (adam,) = (
        s for s in jax.tree.leaves(trainer.state.opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu")
    )
    return adam


@pytest.mark.slow
def test_moments_in_bfloat16_are_half_as_large_and_the_trainer_learns_as_well():
    model = dataclasses.replace(cases.MODEL, n_layers=1)
    sizes, gained = [], []
    for moments in ("float32", "bfloat16"):
        trainer = step.Trainer(
            model,
            cases.section(moments=moments, max_grad_norm=0.0),
            cases.mesh(),
            cases.params(3, model),
            total_steps=20,
        )
        batch = cases.batch(trainer)
        before = trainer.logprobs(batch)
        for _ in range(8):
            trainer.step(batch)
        adam = adam_of(trainer)
        sizes.append(sum(x.nbytes for x in jax.tree.leaves((adam.mu, adam.nu))))
        gained.append(float(((trainer.logprobs(batch) - before) * batch.advantages * batch.mask).sum()))
    assert {x.dtype.name for x in jax.tree.leaves((adam.mu, adam.nu))} == {"bfloat16"} and adam.count.dtype == np.int32
    assert sizes[0] == 2 * sizes[1]
    assert gained[1] == pytest.approx(gained[0], rel=0.05) and gained[0] > 1


def test_bfloat16_moments_refuse_a_decay_that_they_would_round_away():
    assert objective.check(cases.section(moments="bfloat16")) == []
    (problem,) = objective.check(cases.section(moments="bfloat16", b2=0.999))
    assert problem.startswith("trainer.b2=0.999: a second moment in bfloat16")


@pytest.mark.parametrize("field", ["optimizer_memory", "lent_memory"])
def test_a_backend_without_host_memory_is_named(monkeypatch, field):
    monkeypatch.setattr(optim, "HOST", "pinned_elsewhere")
    with pytest.raises(ValueError, match=f"trainer.{field}='host': cpu devices have no pinned_elsewhere memory, only"):
        step.Trainer(cases.MODEL, cases.section(**{field: "host"}), cases.mesh(), cases.params(), total_steps=5)


@pytest.mark.slow
def test_all_that_is_not_decoded_with_leaves_the_devices():
    """Also a frozen base, a value model and moments that rest in host memory."""
    model = dataclasses.replace(cases.MODEL, n_layers=1)
    section = cases.section(optimizer_memory="host", lent_memory="host", advantage="gae", value_learning_rate=1e-2)
    options = {"total_steps": 5, "lora": Lora(rank=2)}
    trainer = step.Trainer(model, section, cases.mesh(fsdp=2, tensor=2), cases.params(3, model), **options)
    first = jax.tree.map(np.array, trainer.state)
    batches = [cases.batch(trainer, score=trainer.score)] * 2
    ends = [
        cases.ends_of(trainer, first, batches, between) for between in (lambda trainer: None, cases.to_host_and_back)
    ]
    jax.tree.map(np.testing.assert_array_equal, *(state for state, _ in ends))
    assert ends[0][1] == ends[1][1] and cases.kinds_of(trainer) == {"device", "pinned_host"}
