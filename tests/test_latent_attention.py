"""Attention over latent pages: the reference equals expanded attention, the kernel in interpret mode equals the
reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, PartitionSpec

from dora_jax.ops import latent_attention as latent

RANK, ROW = 16, 24  # a latent and its rotated key part; pages pad rows to 128
SCALE = 0.17


def case(length, lens, size, heads=4, rank=RANK, row=ROW, width=128, table_tokens=64, unwritten=0.0):
    """Queries, a pool, lengths and tables; `unwritten` stands wherever no sequence has written."""
    rng = np.random.default_rng(length + size)
    lens, table = np.array(lens, np.int32), table_tokens // size
    pool = np.full((1 + len(lens) * table, size, width), unwritten, np.float32)
    tables = rng.permutation(np.arange(1, len(pool), dtype=np.int32)).reshape(len(lens), table)
    for pages, n in zip(tables, lens, strict=True):
        for i in range(n):
            pool[pages[i // size], i % size] = np.pad(rng.normal(size=row), (0, width - row))
        pages[-(-n // size) :] = 0
    q = np.pad(rng.normal(size=(len(lens), length, heads, row)), [(0, 0)] * 3 + [(0, width - row)])
    return q.astype(np.float32), pool, lens, tables


def expanded(q, pool, lens, tables, w_k, w_v):
    """The published formula: each head's own keys and values, made from the latents; q is not absorbed."""
    out = np.zeros((*q.shape[:3], w_v.shape[-1]))
    for s, n in enumerate(lens):
        rows = pool[tables[s]].reshape(-1, pool.shape[-1])[:n, :ROW].astype(np.float64)
        for i, h in np.ndindex(q.shape[1:3]):
            own = rows[: n - q.shape[1] + i + 1]
            k = np.concatenate([own[:, :RANK] @ w_k[:, h], own[:, RANK:]], axis=1)
            scores = k @ q[s, i, h] * SCALE
            weights = np.exp(scores - scores.max())
            out[s, i, h] = weights @ (own[:, :RANK] @ w_v[:, h]) / weights.sum()
    return out


@pytest.mark.parametrize("length,lens", [(1, (1, 5, 24, 9)), (8, (8, 24, 17))])
def test_the_absorbed_form_equals_the_expanded_one(length, lens):
    nope, heads = 12, 4
    _, pool, lens, tables = case(length, lens, 4, unwritten=np.nan)
    rng = np.random.default_rng(1)
    w_k, w_v = rng.normal(size=(2, RANK, heads, nope))
    q = rng.normal(size=(len(lens), length, heads, nope + ROW - RANK))
    absorbed = np.concatenate([np.einsum("slhn,rhn->slhr", q[..., :nope], w_k), q[..., nope:]], axis=-1)
    absorbed = np.pad(absorbed, [(0, 0)] * 3 + [(0, 128 - ROW)]).astype(np.float32)
    o = latent.latent_reference(*map(jnp.asarray, (absorbed, pool, lens, tables)), SCALE, RANK)
    got = np.einsum("slhr,rhv->slhv", o, w_v)
    np.testing.assert_allclose(got, expanded(q, pool, lens, tables, w_k, w_v), rtol=0, atol=1e-4)


@pytest.mark.parametrize("size,dtype", [(8, "float32"), (32, "float32"), (16, "bfloat16"), (32, "float8_e4m3fn")])
@pytest.mark.parametrize("length,lens", [(1, (1, 64, 24, 33, 17)), (8, (8, 64, 33))])
def test_the_kernel_equals_the_reference_in_interpret_mode(size, dtype, length, lens, monkeypatch):
    """Blocks of 32 positions, so that sequences end inside a page, a block, and at their ends; two queries a
    program."""
    monkeypatch.setattr(latent, "BLOCK_TOKENS", 32)
    monkeypatch.setattr(latent, "MAX_ROWS", 8)
    q, pool, lens, tables = map(jnp.asarray, case(length, lens, size))
    q, pool = q.astype("bfloat16" if dtype != "float32" else dtype), pool.astype(dtype)
    with pltpu.force_tpu_interpret_mode():
        got = latent.latent_attention(q, pool, lens, tables, SCALE, RANK)
    want = latent.latent_reference(q, pool, lens, tables, SCALE, RANK)
    assert got.dtype == want.dtype and got.shape == want.shape == (*q.shape[:3], RANK)
    atol = 2e-6 if dtype == "float32" else 0.02
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=0, atol=atol)


def test_the_kernel_runs_on_shards_of_the_heads(monkeypatch):
    monkeypatch.setattr(latent, "BLOCK_TOKENS", 32)
    inputs = tuple(map(jnp.asarray, case(1, (1, 64, 17), 8)))
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Auto,))
    heads = PartitionSpec(None, None, "tensor")
    run = jax.shard_map(
        lambda *inputs: latent.latent_attention(*inputs, SCALE, RANK),
        mesh=mesh,
        in_specs=(heads, *(PartitionSpec(),) * 3),
        out_specs=heads,
        check_vma=False,
    )
    with pltpu.force_tpu_interpret_mode():
        got = jax.jit(run)(*inputs)
    np.testing.assert_allclose(got, latent.latent_reference(*inputs, SCALE, RANK), rtol=0, atol=2e-6)


def test_latent_pages_that_do_not_fit_are_refused():
    q, pool, lens, tables = map(jnp.asarray, case(1, (4, 7), 4))
    with pytest.raises(ValueError, match="rollout.page_size 4 is no multiple of 8.*float32"):
        latent.latent_attention(q, pool, lens, tables, SCALE, RANK)
    with pytest.raises(ValueError, match="queries of 100 numbers and latents of 16 do not fit rows of 128"):
        latent.latent_reference(q[..., :100], pool, lens, tables, SCALE, RANK)
    with pytest.raises(ValueError, match="2 sequences have lengths"):
        latent.latent_reference(q, pool, lens[:1], tables, SCALE, RANK)
