"""Attention over blocks of the past: the plain formula, and no bit depends on how many masked blocks follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dora_jax.models.decoder import Scores
from dora_jax.ops import attention, paged_write

paged_reference = jax.jit(attention.paged_reference, static_argnums=4)
B, H, K, D, BLOCK = 5, 6, 2, 16, 32


def chunk_attention(*inputs, window=0):
    """Compiled as one, as the engine does it; which new position a query is, is a constant there."""
    at_L, scores = np.arange(inputs[0].shape[1]), Scores(inputs[0].shape[-1] ** -0.5, window)
    return jax.jit(lambda *inputs: attention.chunk_attention(*inputs, at_L, scores))(*inputs)


def arrays(length, blocks, seed=0, heads=H, kv=K, dim=D):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    q, k_new, v_new = draw(B, length, heads, dim), draw(B, kv, dim, length), draw(B, kv, length, dim)
    past_len = np.array([0, 1, BLOCK - 1, BLOCK, BLOCK + 5])[:B]
    past = []
    for j in range(blocks):
        seen = j * BLOCK + np.arange(BLOCK) < past_len[:, None]
        past.append((draw(B, kv, dim, BLOCK), draw(B, kv, BLOCK, dim) * seen[:, None, :, None]))
    return q, past, past_len, k_new, v_new


def plain(q, past, past_len, k_new, v_new, window):
    """Softmax over what each query sees, one query at a time, in f64."""
    k = np.concatenate([*(k for k, _ in past), k_new], axis=3).astype(np.float64)
    v = np.concatenate([*(v for _, v in past), v_new], axis=2).astype(np.float64)
    out = np.zeros(q.shape)
    n_past = BLOCK * len(past)
    for b, i, h in np.ndindex(q.shape[:3]):
        at = np.concatenate([np.arange(n_past), past_len[b] + np.arange(q.shape[1])])
        behind = past_len[b] + i - at
        seen = (behind >= 0) & (behind < window) & ((np.arange(len(at)) >= n_past) | (at < past_len[b]))
        kv = h // (q.shape[2] // k.shape[1])
        scores = q[b, i, h].astype(np.float64) @ k[b, kv][:, seen] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights @ v[b, kv][seen] / weights.sum()
    return out


@pytest.mark.parametrize("window", [0, 1, 4, BLOCK + 2])
@pytest.mark.parametrize("length", [1, 7])
def test_equals_the_plain_formula(length, window):
    q, past, past_len, k_new, v_new = arrays(length, 2)
    got = chunk_attention(q, past, jnp.asarray(past_len), k_new, v_new, window=window)
    want = plain(q, past, past_len, k_new, v_new, window or 1000)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("full_compile")
@pytest.mark.parametrize("heads,kv,dim", [(6, 2, 16), (16, 8, 128)])
def test_masked_blocks_change_no_bit(heads, kv, dim):
    """Where the kernel is one long product instead, the larger of these models differ from 512 positions on."""
    q, past, past_len, k_new, v_new = arrays(1, 8, heads=heads, kv=kv, dim=dim)
    run = jax.jit(lambda *args: attention.chunk_attention(*args, np.zeros(1, int), Scores(dim**-0.5)))
    shortest = run(q, past[:2], past_len, k_new, v_new)
    for blocks in (3, 8):
        np.testing.assert_array_equal(shortest, run(q, past[:blocks], past_len, k_new, v_new))


@pytest.mark.usefixtures("full_compile")
def test_garbage_keys_beyond_the_past_do_not_matter():
    q, past, past_len, k_new, v_new = arrays(1, 2)
    clean = chunk_attention(q, past, past_len, k_new, v_new)
    past = [
        (np.where(j * BLOCK + np.arange(BLOCK) < past_len[:, None, None, None], k, np.nan), v)
        for j, (k, v) in enumerate(past)
    ]
    np.testing.assert_array_equal(clean, chunk_attention(q, past, past_len, k_new, v_new))


# ------------------------------------------------------------------- pages


def pages_case(length, lens, heads=4, kv=2, dim=128, size=4, table=6, seed=0):
    """A pool with nan wherever no sequence has written: beyond its length, and in pages that are not its own."""
    rng = np.random.default_rng(seed)
    lens = np.array(lens, np.int32)
    pool = np.full((1 + len(lens) * table, size, 2 * kv, dim), np.nan, np.float32)
    pool[0] = 0
    tables = rng.permutation(np.arange(1, len(pool), dtype=np.int32)).reshape(len(lens), table)
    for pages, n in zip(tables, lens, strict=True):
        kv_rows = rng.normal(size=(n, 2 * kv, dim))
        for i in range(n):
            pool[pages[i // size], i % size] = kv_rows[i]
        pages[-(-n // size) :] = 0
    q = rng.normal(size=(len(lens), length, heads, dim)).astype(np.float32)
    return q, pool, lens, tables


def by_chunks(q, pool, lens, tables, window):
    """The same attention by `chunk_attention`."""
    dense = np.nan_to_num(pool[tables].reshape(len(lens), -1, *pool.shape[2:]))
    length = q.shape[1]
    past_len = lens - length
    width = dense.shape[1]
    new = np.stack([dense[s, n - length : n] for s, n in enumerate(lens)])
    seen = (np.arange(width)[None] < past_len[:, None])[:, :, None, None]
    k, v = dense[:, :, 0::2].transpose(0, 2, 3, 1), (dense * seen)[:, :, 1::2].transpose(0, 2, 1, 3)
    return chunk_attention(
        q,
        [(k, v)],
        jnp.asarray(past_len),
        new[:, :, 0::2].transpose(0, 2, 3, 1),
        new[:, :, 1::2].transpose(0, 2, 1, 3),
        window=window,
    )


CASES = [(1, (1, 5, 24, 9, 17)), (8, (8, 24, 17))]


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("length,lens", CASES)
def test_pages_hold_what_blocks_hold(length, lens, window):
    case, scores = pages_case(length, lens), Scores(128**-0.5, window)
    got = paged_reference(*map(jnp.asarray, case), scores)
    np.testing.assert_allclose(got, by_chunks(*case, window), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("length,lens", CASES)
def test_the_tpu_kernel_equals_the_reference_in_interpret_mode(length, lens, window, monkeypatch):
    """jax's interpreter cannot reshape what a copy has brought (a value can), and checks the mask of a store against
    the wrong axis unless a block has no more queries than a KV head has heads."""

    def wait(self):
        for copy in self._async_copies:
            copy.wait()
        return self._vmem_buf[...]

    monkeypatch.setattr(attention.ragged_paged_attention.MultiPageAsyncCopyDescriptor, "wait", wait)
    monkeypatch.setattr(attention, "BLOCK_QUERIES", 2)
    monkeypatch.setattr(attention, "BLOCK_TOKENS", (8, 16))
    case = tuple(map(jnp.asarray, pages_case(length, lens)))
    with pltpu.force_tpu_interpret_mode():
        got = attention.paged_attention(*case, Scores(128**-0.5, window))
    np.testing.assert_allclose(got, paged_reference(*case, Scores(128**-0.5, window)), rtol=0, atol=2e-6)


@pytest.mark.parametrize("length,lens", CASES)
@pytest.mark.parametrize("dtype,atol", [(jnp.float32, 2e-6), (jnp.bfloat16, 0.01)])
def test_tokamax_writes_and_attends_as_the_reference(length, lens, dtype, atol, monkeypatch):
    """Its plain XLA, of which its tests hold the kernel; the pool is finite, as the engine keeps it."""
    pytest.importorskip("tokamax", reason="tokamax is not installed: the extra tpu-kernels, Python 3.12")
    q, pool, lens, tables = pages_case(length, lens)
    new = np.random.default_rng(1).normal(size=(*q.shape[:2], *pool.shape[2:]))
    inputs = [jnp.asarray(x, dtype) for x in (q, new, np.nan_to_num(pool))]
    where = paged_write.where_of(lens[:, None] - length + jnp.arange(length)[None], jnp.asarray(tables), pool.shape[1])
    monkeypatch.setattr(attention, "paged_kernel", lambda impl, rank: attention.paged_reference)
    want, written = attention.paged_step(*inputs, where, Scores(128**-0.5), "tpu")
    got, pages = attention.tokamax_step(
        *inputs, where.lens_S, where.tables_SxM, Scores(128**-0.5), implementation="reference"
    )
    np.testing.assert_array_equal(pages, written)
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("context", "kv_heads", "dtype", "block"),
    [
        (4096 + 128, 2, jnp.bfloat16, 512),
        (32768, 2, jnp.bfloat16, 2048),
        (65536, 2, jnp.bfloat16, 2048),
        (32768, 8, jnp.bfloat16, 512),  # 4 KiB a position
        (32768, 8, jnp.int8, 1024),
        (64, 2, jnp.bfloat16, 512),
    ],
)
def test_blocks_of_a_kernel_grow_with_the_longest_context(context, kv_heads, dtype, block):
    tables = jax.ShapeDtypeStruct((64, context // 64), jnp.int32)
    pages = jax.ShapeDtypeStruct((1000, 64, 2 * kv_heads, 128), dtype)
    assert attention.block_tokens(tables, pages) == block


def test_pages_that_do_not_fit_the_queries_are_refused():
    q, pool, lens, tables = pages_case(1, (4, 7))
    with pytest.raises(ValueError, match="3 heads of 128 do not fit pages of 4 K and V heads"):
        attention.paged_attention(q[:, :, :3], pool, lens, tables, Scores(1.0))
    with pytest.raises(ValueError, match="2 sequences have lengths"):
        attention.paged_attention(q, pool, lens[:1], tables, Scores(1.0))
    with pytest.raises(ValueError, match="needs TPU devices; this instance's are cpu"):
        attention.check_platform("tpu", "cpu")


def test_a_kernel_whose_package_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tokamax needs that package.*tpu-kernels"):
        attention.check_platform("tokamax", "tpu")
