"""The kernels that write a decode step's KV, in interpret mode: the same bits as by a scatter behind plain XLA."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dora_jax.config import RolloutSection
from dora_jax.models import decoder, sharding
from dora_jax.models.families.config import Kind, Latent
from dora_jax.ops import attention, latent_attention, paged_write
from dora_jax.rollout.kv_pallas import Paged
from dora_jax.rollout.shapes import kv_layout, shapes_of

SIZES = dict(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=128, d_ff=64)
QWEN3 = decoder.new_config("qwen3", **SIZES)
MODELS = {
    "normed and rotated": QWEN3,
    "rotated": decoder.new_config("llama", **SIZES),
    "of windows": decoder.new_config("gemma3_text", **SIZES, kinds=(Kind(window=6, theta=10_000.0), Kind())),
    "normed over all heads": decoder.new_config("olmo3", **SIZES),
    "narrow heads": dataclasses.replace(QWEN3, head_dim=64),
    "latent": decoder.new_config(
        "deepseek_v3",
        **SIZES | dict(n_kv_heads=4, head_dim=48),
        latent=Latent(kv_rank=64, rope_dim=16, nope_dim=32, v_dim=32, q_rank=32),
    ),
}
QUICK = ("normed and rotated", "float8"), ("latent", "")
EVERY = [(name, kv) for name in MODELS for kv in ("", "float8")]
PAST = np.array([5, 31, 16, 0, 40, 7, 0, 0], np.int32)  # the last two are padding
ACTIVE = np.array([1, 1, 1, 1, 0, 1, 0, 0], bool)


def bits(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("row", [(4, 128), (2, 128), (256,)])
@pytest.mark.parametrize("sequences", [3, 8, 48])
def test_rows_are_written_as_by_a_scatter(dtype, row, sequences):
    rng = np.random.default_rng(0)
    first = sequences + 2  # the layer's dummy page, to which the last two sequences write zeros
    pages = jnp.asarray(rng.normal(size=(2 * sequences + 3, 32, *row)), dtype).at[first].set(0)
    new = jnp.asarray(rng.normal(size=(sequences, 1, *row)), dtype).at[-2:].set(0)
    tables = jnp.asarray(rng.permutation(np.arange(1, sequences + 1))[:, None], jnp.int32).at[-2:].set(0)
    at = jnp.asarray(rng.integers(0, 32, size=(sequences, 1)), jnp.int32)
    where = paged_write.where_of(at, tables, 32)._replace(first=jnp.int32(first))
    want = paged_write.written(pages, new, where)
    with pltpu.force_tpu_interpret_mode():
        got = paged_write.write(pages, new, where)
    np.testing.assert_array_equal(bits(got), bits(want))
    changed = (bits(got) != bits(pages)).reshape(len(pages), 32, -1).any(-1)
    assert changed.sum() == sequences - 2, "other positions stay as they are"


@functools.cache
def params_of(cfg):
    return decoder.init_params(cfg, 0, dtype=jnp.bfloat16)


def stepped(cfg, kv: str, kernels: bool, monkeypatch):
    """(hidden states, pools) behind one decode step, with its kernels or without."""
    reference = functools.partial(latent_attention.latent_reference, rank=cfg.latent and cfg.latent.kv_rank)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "paged_kernel", lambda impl, rank: reference if rank else attention.paged_reference)
        if kernels:
            patch.setattr(jax.lax, "platform_dependent", lambda *given, tpu, default: tpu(*given))
        section = RolloutSection(
            **dict(attention="tpu", slots=8, pages=40, page_size=16, max_prompt_tokens=32, max_new_tokens=32),
            **dict(prefill_tokens=32, prefill_chunk=32, context_block=64, decode_steps=2, kv=kv),
        )
        shapes = shapes_of(section, window=cfg.local_window)
        of_pool = Paged(kv_layout(cfg), shapes, jnp.bfloat16, sharding.make_mesh(jax.devices()[:1], 1, 1, 1))
        rng = np.random.default_rng(1)
        pool = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in of_pool.empty()]
        pool = [x.at[0].set(0).at[41].set(0) for x in pool]  # the dummy page of each layer
        tables = np.zeros((1, 8, 4), np.int32)
        tables[0, :6] = rng.permutation(np.arange(1, 41))[:24].reshape(6, 4)

        @jax.jit
        def step(params, pool):
            attend_with = of_pool.attend_step(
                (jnp.asarray(tables), jnp.asarray(PAST)), jnp.int32(1), jnp.asarray(ACTIVE)
            )
            tokens, positions = jnp.arange(8)[:, None], jnp.asarray(PAST)[:, None] + 1
            options = dict(dtype=jnp.bfloat16, turns=of_pool.turns)
            return decoder.forward_carrying(cfg, params, tokens, positions, attend_with, pool, **options)[:2]

        with pltpu.force_tpu_interpret_mode() if kernels else contextlib.nullcontext():
            hidden, after = step(params_of(cfg), pool)
    assert of_pool.turns == (cfg.head_dim == 128)
    return hidden, after, pool


@pytest.mark.parametrize(
    "name,kv", [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.slow) for one in EVERY]
)
def test_a_step_by_kernels_is_the_step_without(name, kv, monkeypatch):
    """Each family's heads; rows that have ended and padding write zeros."""
    (plain, want, before), (hidden, got, _) = (stepped(MODELS[name], kv, each, monkeypatch) for each in (False, True))
    for mine, theirs, old in zip(got, want, before, strict=True):
        np.testing.assert_array_equal(bits(mine), bits(theirs))
        changed = (bits(mine) != bits(old)).reshape(*mine.shape[:2], -1).any(-1)
        assert 4 * 2 <= changed.sum() <= 6 * 2, "a row a layer and sequence"
        np.testing.assert_array_equal(mine[0].astype(jnp.float32), 0)
    np.testing.assert_array_equal(bits(hidden), bits(plain))
