"""The kernels of the trainer's attention against the reference: values and gradients, in interpret mode on CPU."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.base import chips
from dora_jax.models import sharding
from dora_jax.models.families.config import Scores
from dora_jax.ops import segment_attention as ops
from dora_jax.trainer import objective, step
from dora_jax.trainer.model import Model
from tests.fakes import trainer_cases as cases

L = 512
LENGTHS = ((200, 1, 183, 100), (512,))  # of each row's segments; the rest is padding, segment 0


def packed():
    """Segment ids, positions i32[2, L] and the mask of what stands in a segment."""
    segments, positions = np.zeros((2, L), np.int32), np.zeros((2, L), np.int32)
    for row, lengths in enumerate(LENGTHS):
        stops = np.cumsum(lengths)
        for i, (stop, n) in enumerate(zip(stops, lengths, strict=True)):
            segments[row, stop - n : stop], positions[row, stop - n : stop] = i + 1, np.arange(n)
    return segments, positions, segments > 0


def heads(dtype, n_heads, n_kv, dim):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, L, n, dim)), dtype) for n in (n_heads, n_kv, n_kv)]


def with_gradients(attend, inside, qkv, window=0, sinks=()):
    """Values inside the segments, and the gradients of a loss that reads those alone."""
    scores = Scores(qkv[0].shape[-1] ** -0.5, window)

    def loss(*qkv):
        o = jnp.where(inside[:, :, None, None], attend(None, *qkv[:3], scores, *qkv[3:]).astype(jnp.float32), 0)
        return jnp.sum(jnp.sin(o)), o

    inputs = *qkv, *sinks
    grads, o = jax.jit(jax.grad(loss, argnums=tuple(range(len(inputs))), has_aux=True))(*inputs)
    return o, *grads


@functools.cache
def reference(dtype, *shape, window=0):
    segments, positions, inside = packed()
    return with_gradients(ops.segment_attention(segments, positions), inside, heads(dtype, *shape), window)


def plain_window(q, k, v, window):
    """The same in f32 numpy, one query's window at a time."""
    _, positions, inside = packed()
    k, v = (np.repeat(np.asarray(x), q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    out = np.zeros(q.shape, np.float32)
    for row, at in zip(*np.nonzero(inside)):
        first = at - min(window - 1, positions[row, at])
        scores = np.einsum("hd,mhd->hm", q[row, at], k[row, first : at + 1]) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[row, at] = np.einsum("hm,mhd->hd", weights / weights.sum(-1, keepdims=True), v[row, first : at + 1])
    return out


@pytest.mark.parametrize("window", [1, 37])
def test_a_query_sees_its_window_inside_its_segment(window):
    q, k, v = heads(jnp.float32, 4, 2, 16)
    found = reference(jnp.float32, 4, 2, 16, window=window)[0]
    np.testing.assert_allclose(found, plain_window(np.asarray(q), k, v, window), atol=1e-5)


# type, (heads, KV heads, width), context, tensor, one kernel for all gradients, window
CASES = [
    (jnp.float32, (4, 2, 128), 1, 1, True, 0),
    (jnp.float32, (4, 2, 64), 2, 2, True, 0),
    (jnp.float32, (4, 4, 64), 4, 1, False, 0),
    (jnp.bfloat16, (4, 1, 128), 1, 1, False, 0),
    (jnp.bfloat16, (4, 2, 64), 2, 1, True, 0),
    (jnp.float32, (4, 2, 64), 2, 1, True, 150),
]


@pytest.mark.parametrize("dtype,shape,context,tensor,fused,window", CASES)
def test_splash_gives_the_values_and_gradients_of_the_reference(
    monkeypatch, dtype, shape, context, tensor, fused, window
):
    monkeypatch.setattr(chips, "SPLASH_BLOCK", 128)  # several blocks a shard, masked ones among them
    monkeypatch.setattr(ops, "SPLASH_FUSED", L if fused else 0)
    ops.splash_kernel.cache_clear()
    segments, positions, inside = packed()
    mesh = sharding.make_mesh(jax.devices()[: 2 * context * tensor], 1, 2, tensor, context)
    attend = ops.splash_attention(segments, positions, mesh, interpret=True)
    found = with_gradients(attend, inside, heads(dtype, *shape), window)
    ops.splash_kernel.cache_clear()
    tolerance = 2e-5 if dtype == jnp.float32 else 6e-2
    for a, b in zip(found, reference(dtype, *shape, window=window), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance)


def plain(segments, positions, window):
    """The attention of one softmax over all keys and the sink, which autodiff goes through."""
    same = segments[:, :, None] == segments[:, None, :]
    behind = positions[:, :, None] - positions[:, None, :]
    seen = jnp.asarray(same & (behind >= 0) & (behind < window))

    def attend(layer, q, k, v, scores, sinks_H):
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        found = jnp.where(seen[:, None], jnp.einsum("blhd,bmhd->bhlm", q, k) * scores.scale, -jnp.inf)
        sinks = jnp.broadcast_to(sinks_H[None, :, None, None], (*found.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([found, sinks], axis=-1), axis=-1)[..., :-1]
        return jnp.einsum("bhlm,bmhd->blhd", weights, v)

    return attend


@pytest.mark.parametrize("kind", ["reference", "long rows", "context", "splash"])
def test_sinks_have_the_values_and_gradients_of_one_softmax(monkeypatch, kind):
    """A sink far below the scores, among them, and far above."""
    segments, positions, inside = packed()
    qkv, sinks = heads(jnp.float32, 4, 2, 64), (jnp.asarray([-50.0, -1.0, 1.5, 8.0]),)
    expected = with_gradients(plain(segments, positions, 150), inside, qkv, 150, sinks)
    mesh = sharding.make_mesh(jax.devices()[:8], 1, 2, 2, 2)
    if kind == "long rows":
        monkeypatch.setattr(ops, "LONG_ROW", L)
    attend = ops.splash_attention(segments, positions, mesh, interpret=True)
    if kind != "splash":
        one = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
        attend = ops.packed_attention("reference", segments, positions, mesh if kind == "context" else one)
    for a, b in zip(with_gradients(attend, inside, qkv, 150, sinks), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_cudnn_is_lowered_to_its_own_call(monkeypatch):
    """Without a GPU its values cannot be seen: the program for one holds cuDNN's call, forward and backward."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    segments, positions, _inside = packed()
    mesh = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    attend = ops.packed_attention("cudnn", segments, positions, mesh)
    grad = jax.jit(jax.grad(lambda *qkv: attend(None, *qkv, Scores(0.25)).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
    text = grad.trace(*heads(jnp.bfloat16, 4, 2, 64)).lower(lowering_platforms=("cuda",)).as_text()
    for call in ("__cudnn$fmhaScaleBiasSoftmax(", "__cudnn$fmhaScaleBiasSoftmaxBackward("):
        assert f"@{call}" in text, call


@pytest.mark.parametrize(
    "changes,platform,dtype,message",
    [
        (
            {"attention": "splash"},
            "cpu",
            "float32",
            "trainer.attention=splash is a kernel for TPUs; the trainer's devices are cpu",
        ),
        (
            {"attention": "splash", "pack_tokens": 384, "context": 2},
            "tpu",
            "bfloat16",
            "multiples of 128 positions a shard, not",
        ),
        ({"attention": "cudnn"}, "tpu", "bfloat16", "trainer.attention=cudnn is a kernel for NVIDIA GPUs"),
        ({"attention": "cudnn"}, "gpu", "float32", "not in model.dtype=float32"),
        ({"attention": "cudnn", "context": 2}, "gpu", "bfloat16", "trainer.context=2 needs reference"),
        ({"attention": "cudnn", "pack_tokens": 32768}, "gpu", "bfloat16", "which must be even and at most 16384"),
        ({"attention": "auto"}, "cpu", "float32", "trainer.attention=auto is open"),
    ],
)
def test_what_cannot_run_as_asked_is_refused(changes, platform, dtype, message):
    section = cases.section(**({"pack_tokens": 512} | changes))
    assert message in next(objective.attention_problems(section, platform, dtype))
    if platform == "cpu":
        with pytest.raises(ValueError, match=message.split(";")[0]):
            step.Trainer(cases.MODEL, section, sharding.make_mesh(jax.devices()[:1], 1, 1, 1), None, total_steps=1)


@pytest.mark.parametrize("kind,platform", [("reference", "cpu"), ("splash", "tpu"), ("cudnn", "gpu")])
def test_what_can_run_is_not(kind, platform):
    section = cases.section(pack_tokens=512, attention=kind, share_prompts="off" if kind == "splash" else "on")
    assert list(objective.attention_problems(section, platform, "bfloat16")) == []


@pytest.mark.parametrize("remat,d_model,forward", [("full", 128, 1), ("dots", 128, 1), ("full", 64, 2)])
def test_the_kernels_output_is_kept_where_the_layer_is_computed_again(remat, d_model, forward):
    """Under remat, the gradient of a layer still runs the kernel forward once and backward once; over context too.
    Heads that are wider than two of the layer's inputs together, as those of latent attention, are computed again."""
    cfg = dataclasses.replace(cases.MODEL, head_dim=64, n_layers=1, d_model=d_model)
    mesh = sharding.make_mesh(jax.devices()[:2], 1, 1, 1, 2)
    model = Model(cfg, mesh, jnp.float32, remat, 1.0, None, "splash")
    arrays = {name: jnp.zeros((1, L), jnp.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    grad = jax.jit(jax.grad(lambda p: model.logprobs(p, arrays)[0].sum()))
    text = grad.trace(step.decoder.abstract_params(cfg)).lower(lowering_platforms=("tpu",)).as_text()
    assert collections.Counter(re.findall('kernel_name = "splash_mqa_([a-z]+)', text)) == {"fwd": forward, "dkv": 1}
