"""Attention over blocks of the past: the plain formula, and no bit depends on how many masked blocks follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.ops.attention import chunk_attention

B, H, K, D, BLOCK = 5, 6, 2, 16, 32


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


def plain(q, past, past_len, k_new, v_new, mask):
    """Softmax over what each query sees, one query at a time, in f64."""
    k = np.concatenate([*(k for k, _ in past), k_new], axis=3).astype(np.float64)
    v = np.concatenate([*(v for _, v in past), v_new], axis=2).astype(np.float64)
    out = np.zeros(q.shape)
    n_past = BLOCK * len(past)
    for b, i, h in np.ndindex(q.shape[:3]):
        seen = np.concatenate([np.arange(n_past) < past_len[b], mask[i]])
        kv = h // (q.shape[2] // k.shape[1])
        scores = q[b, i, h].astype(np.float64) @ k[b, kv][:, seen] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights @ v[b, kv][seen] / weights.sum()
    return out


@pytest.mark.parametrize("length", [1, 7])
def test_equals_the_plain_formula(length):
    q, past, past_len, k_new, v_new = arrays(length, 2)
    mask = np.tril(np.ones((length, length), bool))
    got = chunk_attention(q, past, jnp.asarray(past_len), k_new, v_new, mask)
    np.testing.assert_allclose(got, plain(q, past, past_len, k_new, v_new, mask), rtol=0, atol=2e-6)


@pytest.mark.parametrize("heads,kv,dim", [(6, 2, 16), (16, 8, 128)])
def test_masked_blocks_change_no_bit(heads, kv, dim):
    """Where the kernel is one long product instead, the larger of these models differ from 512 positions on."""
    q, past, past_len, k_new, v_new = arrays(1, 8, heads=heads, kv=kv, dim=dim)
    run = jax.jit(lambda *args: chunk_attention(*args, np.ones((1, 1), bool)))
    shortest = run(q, past[:2], past_len, k_new, v_new)
    for blocks in (3, 8):
        np.testing.assert_array_equal(shortest, run(q, past[:blocks], past_len, k_new, v_new))


def test_garbage_keys_beyond_the_past_do_not_matter():
    q, past, past_len, k_new, v_new = arrays(1, 2)
    mask = np.ones((1, 1), bool)
    clean = chunk_attention(q, past, past_len, k_new, v_new, mask)
    past = [(np.where(j * BLOCK + np.arange(BLOCK) < past_len[:, None, None, None], k, np.nan), v)
            for j, (k, v) in enumerate(past)]
    np.testing.assert_array_equal(clean, chunk_attention(q, past, past_len, k_new, v_new, mask))
