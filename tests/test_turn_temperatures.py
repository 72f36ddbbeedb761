"""A turn at its own temperature: the engine's log-probs of it are those that the trainer gives it, branches included."""

import dataclasses
import types

import numpy as np
import pytest

from dora_jax.buffer import layout, pack
from dora_jax.runtime.sample_registry import SampleRegistry
from dora_jax.trainer import step
from dora_jax.trainer.advantage import ZeroWeights
from dora_jax.types import Observed, Prompt, SampleId, ScoredGroup
from tests.fakes import trainer_cases as cases
from tests.fakes.engine_rig import CFG, VOCAB, loaded, params, prompt

TURNS = ((0.5, None), (None, None), (1.7, 6), (0.7, None))  # temperature, tokens that its template leaves
RUN = 1.0


def played(turns):
    """The sample of an episode of these turns, each behind three tokens that it observes."""
    id, rng = SampleId(3, 0), np.random.default_rng(0)
    text = prompt(id.group_id)
    asked = Prompt(group_id=3, task="", uid="", text="", token_ids=text, answer=None, max_new_tokens=24, turn_tokens=4)
    registry = SampleRegistry(types.SimpleNamespace(prompt_at=lambda group: asked))
    registry.opened(id.group_id)
    with loaded("a") as engine:
        registry.begin_again(id, 0)
        for temperature, keep in turns:
            keep = None if keep is None else len(text) + keep
            observed = Observed(
                id=id, token_ids=rng.integers(6, VOCAB, 3).astype(np.int32), keep=keep, temperature=temperature
            )
            engine.import_(registry.observe(observed)[0])
            waiting = next(waiting for _ in range(99) if (waiting := engine.tick().waiting))
            registry.park(engine.with_kept(waiting[0]))
    return registry.whole(registry.end(id, "stop"), {})


def packed(sample, temperature):
    shape = layout.layout(pack_tokens=48, rows=0, micro_batches=1, samples=2, max_tokens=44)
    group = ScoredGroup(group_id=3, version=0, samples=(sample,), rewards=np.ones(1, np.float32), parts={})
    return pack.pack([group], dataclasses.replace(shape, temperature=temperature), ZeroWeights())


@pytest.mark.parametrize(
    ("mesh", "logits_bytes"), [({}, None), ({}, 8 * 4 * 64), ({"tensor": 2}, None)], ids=["whole", "chunks", "shards"]
)
def test_the_trainer_scores_each_turn_at_the_temperature_that_it_was_drawn_at(mesh, logits_bytes):
    sample = played(TURNS)
    assert len(sample.branches) == 1 and sample.branches[0].mask.sum() + sample.mask.sum() > 2 * len(TURNS)
    batch = packed(sample, RUN)
    assert {*np.unique(batch.temperatures[batch.mask]).tolist()} == {np.float32(heat or RUN) for heat, _ in TURNS}
    section = cases.section(pack_tokens=48, logits_bytes=logits_bytes)
    options = {"total_steps": 1, "vocab_limit": VOCAB, "temperature": RUN, "tempered": True}
    trainer = step.Trainer(CFG, section, cases.mesh(**mesh), params(), **options)
    gap = np.abs(trainer.logprobs(batch) - batch.behavior_logprobs)[batch.mask]
    assert gap.max() < 1e-4
    cold = dataclasses.replace(batch, temperatures=np.full_like(batch.temperatures, RUN))
    assert (
        np.abs(trainer.logprobs(cold) - batch.behavior_logprobs)[batch.mask & (batch.temperatures != RUN)].max() > 0.05
    )
    metrics = trainer.step(batch)
    assert metrics["mismatch/max"] < 1e-4 and metrics["mismatch/tokens"] == batch.mask.sum()


def test_turns_as_the_run_draws_say_nothing():
    assert played(((None, None), (None, None))).table.temperatures is None
