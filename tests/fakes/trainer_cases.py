"""A tiny model, section and scored groups, shared by the trainer's tests."""

import dataclasses

import jax
import numpy as np

from dora_jax import config
from dora_jax.buffer import layout as batch_layout
from dora_jax.buffer import pack
from dora_jax.models import decoder, sharding
from dora_jax.plan import presets
from dora_jax.trainer.advantage import Prepare
from dora_jax.types import Sample, SampleId, ScoredGroup, Span

MODEL = decoder.new_config("qwen3", vocab_size=48, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=32)
SECTION = presets.on_cpu(config.TrainerSection(pack_tokens=32, warmup_steps=0, learning_rate=1e-2, share_prompts="off"))
MAX_PROMPT, MAX_NEW = 8, 12


def mesh(data=1, fsdp=1, tensor=1, context=1):
    return sharding.make_mesh(jax.devices()[: data * fsdp * tensor * context], data, fsdp, tensor, context)


def params(seed=3, model=MODEL):
    """Stacked weights as numpy: the values do not matter, and nothing has to be compiled for them."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (rng.normal(size=leaf.shape) * leaf.shape[-1] ** -0.5).astype(np.float32),
        decoder.abstract_params(model),
    )


def section(**changes):
    return dataclasses.replace(SECTION, **changes)


def sample(rng, group_id, index, prompt, version=0, length=None, finish="stop"):
    n = int(rng.integers(1, MAX_NEW + 1)) if length is None else length
    return Sample(
        id=SampleId(group_id, index),
        prompt_ids=prompt,
        out_ids=rng.integers(0, MODEL.vocab_size, n).astype(np.int32),
        logprobs=rng.normal(-4, 0.1, n).astype(np.float32),
        mask=np.ones(n, bool),
        spans=(Span(version=version, start=0, stop=n),),
        finish=finish,
    )


def groups(n=4, size=4, seed=0, version=0):
    rng = np.random.default_rng(seed)
    out = []
    for group_id in range(n):
        prompt = rng.integers(0, MODEL.vocab_size, int(rng.integers(2, MAX_PROMPT + 1))).astype(np.int32)
        samples = tuple(sample(rng, group_id, i, prompt, version) for i in range(size))
        out.append(
            ScoredGroup(
                group_id=group_id,
                version=version,
                samples=samples,
                rewards=rng.normal(size=size).astype(np.float32),
                parts={},
            )
        )
    return out


def batch(trainer, scored=None, score=None, **layout):
    """The packed step of these groups for this trainer, in the rows that its process holds."""
    scored = groups() if scored is None else scored
    section = trainer.section
    sizes = {
        "pack_tokens": section.pack_tokens,
        "rows": section.rows,
        "max_tokens": MAX_PROMPT + MAX_NEW,
        "micro_batches": section.micro_batches,
        "shards": trainer.shards,
        "samples": sum(len(g.samples) for g in scored),
    }
    held = None if "shards" in layout else getattr(trainer, "held", None)  # of the trainer's own shards
    shape = dataclasses.replace(batch_layout.layout(**(sizes | layout)), held=held)
    return pack.pack(scored, shape, Prepare(section, MAX_NEW), score)


def kinds_of(trainer):
    return {x.sharding.memory_kind for x in jax.tree.leaves((trainer.state, trainer.base))}


def ends_of(trainer, first, batches, between):
    """The state after a step of these updates, between which something happens; its metrics."""
    trainer.load(*jax.tree.map(np.array, (first.params, first.opt_state)), 0)
    for batch in batches:
        trainer.learn([batch])
        between(trainer)
    metrics = trainer.finish()
    return jax.tree.map(np.asarray, trainer.state), {
        name: x for name, x in metrics.items() if "loss" in name or "grad" in name
    }


def to_host_and_back(trainer):
    before = jax.tree.leaves((trainer.state, trainer.base))
    trainer.to_host()
    assert kinds_of(trainer) == {"pinned_host"}
    assert all(x.is_deleted() for x in before if x.sharding.memory_kind != "pinned_host")
    trainer.to_devices()
