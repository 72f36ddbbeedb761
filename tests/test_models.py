"""The decoder without files: layouts, shards, causality, segments, initial values."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models import decoder, sharding
from dora_jax.models.families import new_config
from dora_jax.models.families.config import Scores, check_mesh
from dora_jax.ops import segment_attention as ops
from dora_jax.ops.segment_attention import context_attention, segment_attention

SIZES = dict(vocab_size=64, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48)
ROPE = decoder.RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16)
CONFIGS = {
    "qwen3": new_config("qwen3", **SIZES, tie_embeddings=False),
    "qwen2": new_config("qwen2", **SIZES),
    "llama": new_config("llama", **SIZES, rope_scaling=ROPE),
}
B, L = 4, 16


@functools.cache
def noisy(cfg):
    """Random weights with every gain and bias away from its first value; drawn by numpy, which compiles nothing."""
    rng = np.random.default_rng(0)

    def draw(path, x):
        return jnp.asarray(rng.normal("norm" in jax.tree_util.keystr(path), 0.15, x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(draw, decoder.abstract_params(cfg))


def batch(length=L):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, SIZES["vocab_size"], (B, length)))
    return tokens, jnp.broadcast_to(jnp.arange(length), (B, length)), jnp.zeros((B, length), jnp.int32)


def run(cfg, params, tokens, positions, segments, **options):
    attend = segment_attention(segments, positions)
    return decoder.logits(cfg, params, decoder.forward(cfg, params, tokens, positions, attend, **options))


@functools.cache
def jitted(cfg):
    """Shared by the tests: compiling is what they spend their time on."""
    return jax.jit(functools.partial(run, cfg))


@functools.cache
def loss_gradient(cfg, remat):
    return jax.jit(jax.grad(lambda *inputs: jnp.mean(run(cfg, *inputs, remat=remat) ** 2)))


@functools.cache
def initial(cfg):
    return decoder.init_params(cfg, 7)


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_layouts_and_shards_agree(cfg):
    params, inputs, plain = noisy(cfg), batch(), jitted(cfg)
    expected = plain(params, *inputs)
    np.testing.assert_allclose(plain(decoder.serving_layout(params), *inputs), expected, atol=1e-6)

    mesh = sharding.make_mesh(jax.devices(), 2, 2, 2)
    sharded = jax.device_put(params, sharding.param_specs(cfg, mesh))
    rows = sharding.constrain_rows(mesh)
    trained = jax.jit(lambda p: run(cfg, p, *inputs, constrain=rows))(sharded)
    np.testing.assert_allclose(trained, expected, atol=1e-5)

    serving = sharding.param_specs(cfg, mesh, "serving")
    served = jax.jit(decoder.serving_layout, out_shardings=serving)(sharded)
    np.testing.assert_allclose(plain(served, *inputs), expected, atol=1e-5)
    assert {str(axis) for s in jax.tree.leaves(serving) for axis in s.spec} <= {"None", "tensor"}


def test_a_loop_over_layers_takes_each_once_and_in_order(monkeypatch):
    """Three passes of two layers; what a layer's attention leaves behind is handed on."""
    cfg = new_config("qwen2", **SIZES | {"n_layers": 6})
    params, (tokens, positions, segments) = noisy(cfg), batch()
    monkeypatch.setattr(decoder, "TOGETHER", 2)

    def attend_with(state):
        def attend(layer, *inputs):
            state[0] = state[0].at[layer].add(1 + state[0].sum())
            return segment_attention(segments, positions)(layer, *inputs)

        return attend

    run = jax.jit(functools.partial(decoder.forward_carrying, cfg, attend_with=attend_with))
    outputs = []
    for layout in ("serving", "scanned"):
        hidden, state, _ = run(decoder.serving_layout(params, layout), tokens, positions, state=[jnp.zeros(6)])
        np.testing.assert_array_equal(state[0], 2.0 ** np.arange(6))
        outputs.append(hidden)
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-5)


def test_an_engine_with_more_devices_than_kv_heads_lets_neighbours_share_one():
    cfg, mesh = CONFIGS["qwen2"], sharding.make_mesh(jax.devices()[:4], 1, 1, 4)
    serving = sharding.param_specs(cfg, mesh, "scanned")["layers"]
    for name, shared in {"k_proj": True, "v_bias": True, "q_proj": False, "o_proj": False, "up_proj": False}.items():
        shape = decoder.abstract_params(cfg)["layers"][name].shape
        where = serving[name].devices_indices_map(shape)
        assert len({str(where[device]) for device in jax.devices()[:4]}) == (2 if shared else 4)
        assert (where[jax.devices()[0]] == where[jax.devices()[1]]) == shared


@pytest.mark.usefixtures("full_compile")
def test_initial_values_depend_on_no_mesh():
    cfg, mesh = CONFIGS["qwen2"], sharding.make_mesh(jax.devices(), 1, 4, 2)
    plain, placed = initial(cfg), decoder.init_params(cfg, 7, sharding.param_specs(cfg, mesh))
    jax.tree.map(np.testing.assert_array_equal, plain, placed)
    jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(f"{x.sharding} is not {s}"),
        placed,
        sharding.param_specs(cfg, mesh),
    )
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), plain)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), decoder.abstract_params(cfg))


@pytest.mark.usefixtures("full_compile")
def test_a_new_parameter_or_layer_shifts_no_other():
    deep = initial(CONFIGS["qwen2"])  # three biases and a layer more
    shallow = initial(new_config("llama", **SIZES | {"n_layers": 2}))
    for name, weight in shallow["layers"].items():
        factor = (2 / 3) ** 0.5 if name in ("o_proj", "down_proj") else 1.0  # these shrink with the depth
        np.testing.assert_allclose(deep["layers"][name][:2], factor * weight, rtol=1e-6)
    weight = deep["layers"]["up_proj"]
    assert not np.array_equal(weight[0], weight[1]) and not np.array_equal(weight, deep["layers"]["gate_proj"])
    assert abs(float(jnp.std(weight)) * SIZES["d_model"] ** 0.5 - 1) < 0.05


@functools.cache
def gradient(cfg):
    """d sin(hidden state at a position of row 0) / d embedding."""
    tokens = jnp.broadcast_to(jnp.arange(L), (B, L))  # all distinct: one embedding row per position

    def hidden(embed, params, position, segments, positions):
        attend = segment_attention(segments, positions)
        out = decoder.forward(cfg, {**params, "embed": embed}, tokens, positions, attend)
        return jnp.sum(jnp.sin(out[0, position]))

    return jax.jit(jax.grad(hidden))


def seen_by(cfg, position, segments, positions):
    """bool[L]: which tokens of row 0 the hidden state at `position` depends on."""
    grad = gradient(cfg)(noisy(cfg)["embed"], noisy(cfg), position, segments, positions)
    return np.any(np.asarray(grad[:L]) != 0, axis=-1)


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)
def test_a_token_sees_exactly_its_own_past(cfg):
    _, positions, segments = batch()
    np.testing.assert_array_equal(seen_by(cfg, 9, segments, positions), np.arange(L) <= 9)


def test_segments_of_a_row_do_not_see_each_other():
    cfg, (tokens, _, _) = CONFIGS["qwen3"], batch()
    segments = jnp.broadcast_to(jnp.repeat(jnp.arange(2), L // 2), (B, L))
    positions = jnp.broadcast_to(jnp.tile(jnp.arange(L // 2), 2), (B, L))
    np.testing.assert_array_equal(seen_by(cfg, 3, segments, positions), np.arange(L) <= 3)
    np.testing.assert_array_equal(seen_by(cfg, 11, segments, positions), (np.arange(L) >= 8) & (np.arange(L) <= 11))

    packed = jitted(cfg)(noisy(cfg), tokens, positions, segments)
    moved = jnp.roll(tokens, 8, axis=1)  # the second segment alone at the front, something else behind it
    alone = jitted(cfg)(noisy(cfg), moved.at[:, 8:].set(5), positions, segments)
    np.testing.assert_allclose(packed[:, 8:], alone[:, :8], atol=1e-5)


@pytest.mark.parametrize("length", [100, 300, 1030])  # one query block, several with a ragged last, the most blocks
def test_query_blocks_equal_plain_attention(length):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, length, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, length, 2, 8)).astype(np.float32)
    segments, positions = np.divmod(np.arange(length)[None], 70)
    found = jax.jit(lambda *qkv: segment_attention(segments, positions)(None, *qkv, Scores(8**-0.5)))(q, k, v)

    k, v = (np.repeat(x, 2, axis=2) for x in (k, v))
    scores = np.einsum("blhd,bmhd->bhlm", q, k) / 8**0.5
    allowed = (segments[:, :, None] == segments[:, None]) & np.tri(length, dtype=bool)
    weights = np.where(allowed[:, None], np.exp(scores), 0)
    expected = np.einsum("bhlm,bmhd->blhd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_padding_makes_no_nan():
    cfg, (tokens, _, _) = CONFIGS["qwen2"], batch()
    positions = jnp.zeros((B, L), jnp.int32)
    segments = jnp.maximum(jnp.broadcast_to(jnp.arange(L), (B, L)) - 2, 0)  # some share a segment, some are alone
    grad = loss_gradient(cfg, "none")(noisy(cfg), tokens, positions, segments)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(grad))


def test_remat_changes_no_gradient():
    cfg, inputs = CONFIGS["qwen2"], batch()
    plain, full, dots = (loss_gradient(cfg, remat)(noisy(cfg), *inputs) for remat in ("none", "full", "dots"))
    for grad in (full, dots):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), grad, plain)
    with pytest.raises(ValueError, match="remat 'some' is unknown; known: none, full, dots"):
        loss_gradient(cfg, "some")(noisy(cfg), *inputs)


def test_bfloat16_activations_with_f32_masters():
    cfg, (tokens, positions, segments) = CONFIGS["llama"], batch()
    params, attend = noisy(cfg), segment_attention(segments, positions)

    @jax.jit
    def narrow(params):
        hidden = decoder.forward(cfg, params, tokens, positions, attend, dtype=jnp.bfloat16)
        return hidden, decoder.logits(cfg, params, hidden)

    hidden, logits = narrow(params)
    expected = jitted(cfg)(params, tokens, positions, segments)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(logits, expected, atol=0.1 * float(jnp.std(expected)))


def test_attend_learns_its_layer_from_the_list_layout_only():
    cfg, (tokens, positions, segments) = CONFIGS["qwen3"], batch()
    plain, calls = segment_attention(segments, positions), []

    def attend(layer, q, k, v, scores):
        calls.append((layer, q.shape, k.shape, v.shape))
        return plain(layer, q, k, v, scores)

    params = noisy(cfg)
    forward = functools.partial(decoder.forward, cfg, attend=attend)
    jax.eval_shape(lambda p: forward(decoder.serving_layout(p), tokens, positions), params)
    shapes = (B, L, 4, 8), (B, L, 2, 8), (B, L, 2, 8)
    assert calls == [(i, *shapes) for i in range(3)]
    calls.clear()
    jax.eval_shape(lambda p: forward(p, tokens, positions), params)
    assert set(calls) == {(None, *shapes)}


@pytest.mark.parametrize(
    "fsdp, tensor, message",
    [
        (3, 1, "model d_model 32 is not divisible by mesh axis fsdp=3"),
        (1, 4, "model n_kv_heads 2 is not divisible by mesh axis tensor=4"),
        (1, 3, "model n_heads 4 is not divisible by mesh axis tensor=3"),
    ],
)
def test_a_mesh_that_does_not_divide_is_named(fsdp, tensor, message):
    with pytest.raises(ValueError, match=message):
        check_mesh(CONFIGS["qwen3"], fsdp=fsdp, tensor=tensor)
    mesh = sharding.make_mesh(jax.devices()[: fsdp * tensor], 1, fsdp, tensor)
    with pytest.raises(ValueError, match=message):
        sharding.param_specs(CONFIGS["qwen3"], mesh)


def test_devices_that_cannot_share_kv_heads_evenly_are_refused():
    cfg = new_config("qwen3", **SIZES | {"n_heads": 12, "n_kv_heads": 4})
    check_mesh(cfg, fsdp=1, tensor=4, serving=True)
    with pytest.raises(ValueError, match="model n_kv_heads 4 is not divisible by mesh axis tensor=6"):
        check_mesh(cfg, fsdp=1, tensor=6, serving=True)


def test_a_mesh_of_the_wrong_size_is_named():
    with pytest.raises(ValueError, match="mesh data=1 x fsdp=2 x context=1 x tensor=2 needs 4 devices, not 8"):
        sharding.make_mesh(jax.devices(), 1, 2, 2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_kv_heads": 3}, "n_heads 4 is not a multiple of n_kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"n_layers": 0}, "n_layers is 0; it must be at least 1"),
    ],
)
def test_sizes_that_make_no_model(change, message):
    with pytest.raises(ValueError, match=message):
        new_config("qwen3", **SIZES | change)


def test_an_unknown_family_lists_the_known():
    with pytest.raises(ValueError, match="unknown model family 'gpt2'; known: qwen3, qwen2, llama"):
        new_config("gpt2", **SIZES)


def test_configs_are_read_without_jax():
    code = "import sys, dora_jax.models.hf_config, dora_jax.models.tokenizer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("context", [1, 2])
def test_long_rows_attend_block_by_block_to_the_same_values(monkeypatch, context):
    """Values and gradients against the short rows' way; the scores of one block at a time."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 32, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    segments = jnp.asarray(np.repeat([[1, 2, 2, 0], [1, 1, 1, 2]], 8, axis=1))
    positions = jnp.asarray([[*range(8), *range(16), *range(8)], [*range(24), *range(8)]])
    mesh = sharding.make_mesh(jax.devices()[:context], 1, 1, 1, context)

    def gradients():
        def loss(*qkv):
            attend = (
                segment_attention(segments, positions)
                if context == 1
                else context_attention(segments, positions, mesh=mesh)
            )
            return jnp.sum(jnp.sin(attend(None, *qkv, Scores(0.3))))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)

    short = gradients()
    monkeypatch.setattr(ops, "LONG_ROW", 32)
    monkeypatch.setattr(ops, "LONG_BLOCK", 7)  # 4 divides, 7 does not
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), gradients(), short)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 4e-2)])
def test_attention_and_its_gradient_are_those_of_a_plain_softmax(dtype, tolerance):
    """Two query heads on one KV head, two segments, large scores."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    q, k, v, do = 3 * draw(1, 1, 2, 6, 4), 3 * draw(1, 1, 4, 6), draw(1, 1, 6, 4), draw(1, 1, 2, 6, 4)
    segments, at = np.array([1, 1, 1, 2, 2, 2]), np.arange(6)
    mask = jnp.asarray((segments[:, None] == segments) & (at[:, None] >= at))[None, None, None]

    def plain(q, k, v):
        scores = jnp.where(
            mask, 0.6 * jnp.einsum("bkgld,bkdm->bkglm", q, k, preferred_element_type=jnp.float32), -jnp.inf
        )
        return jnp.einsum("bkglm,bkmd->bkgld", jax.nn.softmax(scores, axis=-1), v.astype(jnp.float32)).astype(dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradient(attend, q, k, v, do):
        found, vjp = jax.vjp(attend, q, k, v)
        return found, *vjp(do)

    found = with_gradient(lambda q, k, v: ops.attend_block(0.6, q, k, v, mask), q, k, v, do)
    for a, b in zip(found, with_gradient(plain, q, k, v, do), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())
