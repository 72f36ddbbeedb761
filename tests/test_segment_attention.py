"""The kernels of the trainer's attention against the reference: values and gradients, in interpret mode on CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models import sharding
from dora_jax.ops import segment_attention as ops

L = 512
LENGTHS = ((200, 1, 183, 100), (512,))  # of each row's segments; the rest is padding, segment 0


def packed():
    """Segment ids, positions i32[2, L] and the mask of what stands in a segment."""
    segments, positions = np.zeros((2, L), np.int32), np.zeros((2, L), np.int32)
    for row, lengths in enumerate(LENGTHS):
        stops = np.cumsum(lengths)
        for i, (stop, n) in enumerate(zip(stops, lengths, strict=True)):
            segments[row, stop - n:stop], positions[row, stop - n:stop] = i + 1, np.arange(n)
    return segments, positions, segments > 0


def heads(dtype, n_heads, n_kv, dim):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, L, n, dim)), dtype) for n in (n_heads, n_kv, n_kv)]


def with_gradients(attend, inside, qkv):
    """Values inside the segments, and the gradients of a loss that reads those alone."""
    def loss(*qkv):
        o = jnp.where(inside[:, :, None, None], attend(None, *qkv).astype(jnp.float32), 0)
        return jnp.sum(jnp.sin(o)), o

    grads, o = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return o, *grads


@functools.cache
def reference(dtype, *shape):
    segments, positions, inside = packed()
    return with_gradients(ops.segment_attention(segments, positions), inside, heads(dtype, *shape))


# type, (heads, KV heads, width), context, tensor, one kernel for all gradients
CASES = [(jnp.float32, (4, 2, 128), 1, 1, True), (jnp.float32, (4, 2, 64), 2, 2, True),
         (jnp.float32, (4, 4, 64), 4, 1, False), (jnp.bfloat16, (4, 1, 128), 1, 1, False),
         (jnp.bfloat16, (4, 2, 64), 2, 1, True)]


@pytest.mark.parametrize("dtype,shape,context,tensor,fused", CASES)
def test_splash_gives_the_values_and_gradients_of_the_reference(monkeypatch, dtype, shape, context, tensor, fused):
    monkeypatch.setattr(ops, "SPLASH_BLOCK", 128)  # several blocks a shard, masked ones among them
    monkeypatch.setattr(ops, "SPLASH_FUSED", L if fused else 0)
    ops._splash_kernel.cache_clear()
    segments, positions, inside = packed()
    mesh = sharding.make_mesh(jax.devices()[:2 * context * tensor], 1, 2, tensor, context)
    attend = ops.splash_attention(segments, positions, mesh, interpret=True)
    found = with_gradients(attend, inside, heads(dtype, *shape))
    ops._splash_kernel.cache_clear()
    tolerance = 2e-5 if dtype == jnp.float32 else 6e-2
    for a, b in zip(found, reference(dtype, *shape), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance)
