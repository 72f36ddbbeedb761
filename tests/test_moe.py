"""Mixtures of experts: the router's rules, replayed choices, what multiplies, experts over a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models import decoder, expert_parallel, hf, moe, sharding
from dora_jax.models.families import new_config
from dora_jax.models.families.config import Experts, Latent, check_mesh
from dora_jax.models.routes import RouteShape
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.publish import DeviceWeights
from dora_jax.runtime.transfer.weight_receiver import like

SIZES = dict(vocab_size=64, d_model=32, n_layers=3, n_heads=4, d_ff=48, tie_embeddings=False)
LATENT = Latent(kv_rank=16, q_rank=16, rope_dim=4, nope_dim=8, v_dim=8)
CONFIGS = {
    "qwen3_moe": new_config(
        "qwen3_moe", **SIZES, n_kv_heads=4, head_dim=8, experts=Experts(count=8, per_token=2, width=16, first_dense=1)
    ),
    "deepseek_v3": new_config(
        "deepseek_v3",
        **SIZES,
        n_kv_heads=4,
        head_dim=12,
        latent=LATENT,
        experts=Experts(
            count=8, per_token=3, width=16, shared=1, router="sigmoid", corrected=True, groups=4, top_groups=2
        ),
    ),
    "longcat_flash": new_config(
        "longcat_flash",
        **SIZES | {"n_layers": 2},
        n_kv_heads=4,
        head_dim=12,
        latent=LATENT,
        experts=Experts(count=8, per_token=3, width=16, zero=4, corrected=True, renormalize=False, scale=6.0),
    ),
}


def noisy(cfg):
    rng = np.random.default_rng(0)

    def draw(path, x):
        name = jax.tree_util.keystr(path)
        return jnp.asarray(rng.normal("norm" in name, 0.2, x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(draw, decoder.abstract_params(cfg))


def batch(rows=8, length=8):
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (rows, length)))
    return tokens, jnp.broadcast_to(jnp.arange(length), (rows, length))


def hidden(cfg, params, **options):
    tokens, positions = batch()
    attend = segment_attention(jnp.zeros_like(tokens), positions)
    return decoder.forward_routed(cfg, params, tokens, positions, attend, **options)


# ------------------------------------------------------------------ router


def scored(e, logits, bias=None, forced=None):
    """`route` where the hidden state is the logits themselves."""
    h = jnp.asarray(logits, jnp.float32)[None, None]
    bias = None if bias is None else jnp.asarray(bias, jnp.float32)
    forced = None if forced is None else jnp.asarray(forced)[None, None]
    weights, routed = moe.route(e, h, jnp.eye(len(logits)), bias, forced)
    return routed.ids[0, 0].tolist(), weights[0, 0]


def test_a_softmax_router_takes_the_most_probable_and_divides_by_their_sum():
    logits = np.log([0.1, 0.4, 0.3, 0.2])
    ids, weights = scored(Experts(count=4, per_token=2, width=1), logits)
    assert ids == [1, 2]
    np.testing.assert_allclose(weights, [4 / 7, 3 / 7], rtol=1e-6)
    ids, weights = scored(Experts(count=4, per_token=2, width=1, renormalize=False, scale=6.0), logits)
    np.testing.assert_allclose(weights, [2.4, 1.8], rtol=1e-6)


def test_a_bias_selects_and_never_weighs():
    e = Experts(count=3, per_token=1, width=1, zero=1, corrected=True, renormalize=False)
    ids, weights = scored(e, np.log([0.1, 0.2, 0.3, 0.4]), [1.0, 0, 0, 0])
    assert ids == [0]
    np.testing.assert_allclose(weights, [0.1], rtol=1e-6)


def test_only_the_groups_whose_two_best_add_up_to_most_take_part():
    e = Experts(count=6, per_token=2, width=1, router="sigmoid", corrected=True, groups=3, top_groups=1)
    scores = np.array([0.9, 0.1, 0.6, 0.6, 0.7, 0.2])
    ids, weights = scored(e, np.log(scores / (1 - scores)), np.zeros(6))
    assert sorted(ids) == [2, 3]  # 1.2 against 1.0 and 0.9, although 0.9 is the best of all
    np.testing.assert_allclose(weights, [0.5, 0.5], rtol=1e-5)


def test_forced_experts_are_weighed_by_the_gate_and_teach_it():
    e = Experts(count=4, per_token=2, width=1)
    logits = np.log([0.1, 0.4, 0.3, 0.2])
    ids, weights = scored(e, logits, forced=[0, 3])
    assert ids == [0, 3]
    np.testing.assert_allclose(weights, [1 / 3, 2 / 3], rtol=1e-6)
    gradient = jax.grad(lambda x: scored_weight(e, x))(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(gradient, [2 / 9, 0, 0, -2 / 9], atol=1e-6)
    assert scored(e, logits, forced=[moe.MISSING, moe.MISSING])[0] == [1, 2]


def scored_weight(e, logits):
    weights, _ = moe.route(e, logits[None, None], jnp.eye(4), None, jnp.asarray([[[0, 3]]]))
    return weights[0, 0, 0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"per_token": 9}, "experts.per_token 9 is more than the 8 experts"),
        ({"groups": 3}, "experts.count 8 does not fall into 3 groups"),
        ({"groups": 4, "per_token": 3}, "experts.top_groups 1 hold fewer experts than per_token 3"),
        ({"router": "hash"}, "experts.router 'hash' is unknown; known: softmax, sigmoid"),
        ({"width": 0}, "experts.width is 0"),
    ],
)
def test_sizes_that_make_no_mixture_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Experts(**{"count": 8, "per_token": 2, "width": 4} | sizes)


def test_biases_that_bfloat16_could_not_tell_apart_reach_engine_and_disk_as_they_are(tmp_path):
    """Each of 8 experts is above the next by a 2000th: in bfloat16 all of these biases are one number."""
    cfg = CONFIGS["deepseek_v3"]
    params = noisy(cfg)
    steps = 1 + jnp.arange(8)[::-1] / 2000
    params["layers"]["router_bias"] = jnp.broadcast_to(steps, params["layers"]["router_bias"].shape)
    assert len(set(steps.astype(jnp.bfloat16).tolist())) == 1
    mesh = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    store = DeviceWeights("bfloat16")
    store.put(0, jax.device_put(params, sharding.param_specs(cfg, mesh)))
    specs = sharding.param_specs(cfg, mesh, "serving")
    published = store.get(0, specs)
    wanted = jax.eval_shape(decoder.serving_layout, decoder.abstract_params(cfg, jnp.bfloat16))
    jax.tree.map(lambda x, of_calls: np.testing.assert_equal(x.dtype, of_calls.dtype), published, wanted)
    assert {x.dtype for x in jax.tree.leaves(like(cfg, specs, decoder.abstract_params(cfg, jnp.bfloat16)))} == {
        np.dtype(jnp.bfloat16),
        np.dtype("f4"),
    }
    hf.save(tmp_path / "bf16", cfg, params, dtype=jnp.bfloat16)
    read = decoder.serving_layout(hf.load(tmp_path / "bf16", dtype=jnp.bfloat16)[1])
    for layer in (*published["layers"], *read["layers"]):
        assert layer["router"].dtype == jnp.float32 and layer["attn_norm"].dtype == jnp.float32
        np.testing.assert_array_equal(layer["router_bias"], steps)


# ------------------------------------------------------------------ forward


@pytest.mark.parametrize("name", ["qwen3_moe", "longcat_flash", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_layouts_and_products_agree(name):
    """Stacked, unrolled and looped; one expert after another and grouped: states, choices and what the routers
    count."""
    cfg = CONFIGS[name]
    params, (tokens, positions) = noisy(cfg), batch()
    expected, routed = jax.jit(functools.partial(hidden, cfg))(params)
    e = cfg.experts
    assert routed.ids.shape == (cfg.expert_layers, *tokens.shape, e.per_token)
    np.testing.assert_array_equal(routed.load.sum(-1), np.full(cfg.expert_layers, tokens.size * e.per_token))
    np.testing.assert_allclose(routed.scores.sum(-1), np.full(cfg.expert_layers, tokens.size), rtol=1e-5)

    for compute in (moe.ragged_dot, moe.blocks):
        grouped = jax.jit(functools.partial(hidden, cfg, compute=compute))
        np.testing.assert_allclose(grouped(decoder.serving_layout(params))[0], expected, atol=2e-5)
    back = decoder.stacked_layout(cfg, decoder.serving_layout(params))
    jax.tree.map(np.testing.assert_array_equal, back, params)
    if cfg.latent:  # which is absorbed where an engine carries its cache
        return
    attend = segment_attention(jnp.zeros_like(tokens), positions)
    looped = jax.jit(
        lambda p: decoder.forward_carrying(cfg, p, tokens, positions, lambda state: attend, [jnp.zeros(1)])
    )
    states, _, ids = looped(params)
    np.testing.assert_allclose(states, expected, atol=2e-5)
    np.testing.assert_array_equal(ids, routed.ids)


def test_own_routes_replayed_change_nothing_and_others_do():
    cfg = CONFIGS["longcat_flash"]
    params = noisy(cfg)
    expected, routed = jax.jit(functools.partial(hidden, cfg))(params)
    run = jax.jit(lambda p, routes: hidden(cfg, p, routes_BxLxMxk=routes))
    own = jnp.moveaxis(routed.ids, 0, 2)
    same, replayed = run(params, own)
    np.testing.assert_allclose(same, expected, atol=1e-6)
    np.testing.assert_array_equal(replayed.changed, np.zeros(cfg.expert_layers))
    other, replayed = run(params, (own + 1) % cfg.experts.choices)
    assert float(jnp.abs(other - expected).max()) > 0.1 and float(replayed.changed.sum()) > 0


@pytest.mark.parametrize("first", [0, 2])
def test_blocks_of_tokens_are_whole_whatever_the_load(first):
    """Loads of 0 to all tokens an expert; experts that are elsewhere; a token's result has the same bits beside
    others."""
    rng = np.random.default_rng(0)
    matrices = [jnp.asarray(rng.normal(0, 0.2, shape), jnp.float32) for shape in ((6, 16, 8), (6, 16, 8), (6, 8, 16))]
    h, weights = (jnp.asarray(rng.normal(size=(1, 40, n)), jnp.float32) for n in (16, 2))
    run = jax.jit(functools.partial(moe.blocks, first=first))
    results = []
    for ids in ([0, 1], [0, 5], rng.integers(0, 9, (39, 2)), [7, 8]):
        ids_1xTxk = jnp.asarray(np.broadcast_to(ids, (39, 2)), jnp.int32)[None]
        ids_1xTxk = jnp.concatenate([jnp.full((1, 1, 2), 3), ids_1xTxk], axis=1)
        results.append(run(h, weights, ids_1xTxk, *matrices))
        np.testing.assert_allclose(results[-1], moe.scan(h, weights, ids_1xTxk, *matrices, first), atol=1e-5)
    for result in results[1:]:
        np.testing.assert_array_equal(result[0, 0], results[0][0, 0])


@functools.cache
def one_device(name):
    """(loss, gradients, router's figures) without a mesh."""
    cfg = CONFIGS[name]
    return jax.jit(jax.value_and_grad(functools.partial(mean_square, cfg), has_aux=True))(noisy(cfg))


def mean_square(cfg, params, **options):
    """A loss that every part of the model has a share in, the scores that balance the load included."""
    states, routed = hidden(cfg, params, **options)
    return jnp.mean(jnp.sin(3 * states)) + jnp.mean(jnp.square(routed.scores)) / 1e3, routed.load


MESHES = [  # data, fsdp, tensor, context, expert
    ("qwen3_moe", "ragged_dot", (1, 2, 2, 1, 2)),
    pytest.param("qwen3_moe", "scan", (1, 1, 1, 1, 2), marks=pytest.mark.slow),
    pytest.param("longcat_flash", "scan", (1, 2, 1, 1, 4), marks=pytest.mark.slow),
    pytest.param("qwen3_moe", "scan", (1, 1, 1, 1, 8), marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "scan", (2, 1, 2, 1, 2), marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "ragged_dot", (1, 1, 2, 2, 2), marks=pytest.mark.slow),
    pytest.param("longcat_flash", "ragged_dot", (1, 1, 2, 1, 4), marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "megablox", (1, 2, 1, 1, 4), marks=pytest.mark.slow),
    pytest.param("longcat_flash", "megablox all_to_all", (1, 2, 2, 1, 2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "kind", "axes"), MESHES)
def test_experts_over_a_mesh_give_the_same_loss_and_gradients(name, kind, axes):
    cfg = CONFIGS[name]
    mesh = sharding.make_mesh(jax.devices()[: int(np.prod(axes))], *axes)
    matmul, *dispatch = kind.split()
    compute = expert_parallel.compute(matmul, mesh, *dispatch)
    options = dict(compute=compute, constrain=sharding.constrain_rows(mesh), merge=axes[3] == 1)
    params = jax.device_put(noisy(cfg), specs := sharding.param_specs(cfg, mesh))
    run = jax.value_and_grad(functools.partial(mean_square, cfg, **options), has_aux=True)
    (loss, load), grads = jax.jit(run, out_shardings=(None, specs))(params)
    (expected, expected_load), expected_grads = one_device(name)
    np.testing.assert_array_equal(load, expected_load)
    np.testing.assert_allclose(loss, expected, atol=1e-5)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        like = functools.reduce(lambda tree, key: tree[key.key], path, expected_grads)
        np.testing.assert_allclose(grad, like, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(("kind", "whole"), [("scan", True), ("blocks", True), ("ragged_dot", False)])
def test_an_engines_devices_share_the_experts(kind, whole):
    """Each of four devices has two whole experts, or a part of all eight."""
    cfg = CONFIGS["qwen3_moe"]
    params, (tokens, positions) = noisy(cfg), batch()
    mesh = sharding.serving_mesh(cfg, sharding.make_mesh(jax.devices()[:4], 1, 1, 4), 4 if whole else 1)
    specs = sharding.param_specs(cfg, mesh, "serving", whole_experts=whole)
    axis = specs["layers"][1]["experts_gate"].spec.index("tensor")
    assert axis == (0 if whole else 2)
    attend = segment_attention(jnp.zeros_like(tokens), positions)
    compute = expert_parallel.serving(kind, mesh, whole=whole)
    served = jax.jit(
        lambda p: decoder.forward_carrying(cfg, p, tokens, positions, lambda state: attend, [], compute=compute)[0]
    )
    placed = jax.device_put(decoder.serving_layout(params), specs)
    np.testing.assert_allclose(served(placed), jax.jit(functools.partial(hidden, cfg))(params)[0], atol=2e-5)


@pytest.mark.parametrize(
    ("name", "axes", "message"),
    [
        (
            "qwen3_moe",
            {"fsdp": 1, "tensor": 1, "expert": 3},
            "d_model 32 is not divisible by mesh axis fsdp x expert=3",
        ),
        (
            "qwen3_moe",
            {"fsdp": 1, "tensor": 1, "expert": 16},
            "experts.count 8 is not divisible by mesh axis expert=16",
        ),
        (
            "qwen3_moe",
            {"fsdp": 1, "tensor": 16, "expert": 16, "serving": True},
            "n_heads 4 is not divisible by mesh axis",
        ),
        ("deepseek_v3", {"fsdp": 32, "tensor": 1}, "latent.kv_rank 16 is not divisible by mesh axis fsdp=32"),
    ],
)
def test_a_mesh_that_does_not_divide_the_mixture_is_refused(name, axes, message):
    with pytest.raises(ValueError, match=message):
        check_mesh(CONFIGS[name], **axes)
    dense = new_config("qwen3", **SIZES, n_kv_heads=4, head_dim=8)
    with pytest.raises(ValueError, match="expert=2 needs a model with experts, and qwen3 here has none"):
        check_mesh(dense, fsdp=1, tensor=1, expert=2)


# ------------------------------------------------------------------- routes


def test_routes_take_a_byte_up_to_256_experts_and_a_missing_row_is_an_error():
    assert RouteShape(58, 8, 256).token_bytes == 464 and RouteShape(28, 12, 768).token_bytes == 672
    shape = RouteShape(2, 2, 4)
    routes = np.zeros((3, 2, 2), np.uint8) + np.array([0, 3], np.uint8)
    assert shape.check(routes, 3, "0 of group 7") is routes
    lost = routes.copy()
    lost[1, 0] = shape.missing()[0]
    for wrong, message in [
        (None, "sample 0 of group 7 carries no expert routes"),
        (routes[:2], "expert routes of 2 tokens, of the 3 that ran forward"),
        (lost, "lacks the expert routes of 1 of its 3 tokens"),
        (routes + np.uint8(1), "a route to expert 4; the model has 4"),
        (routes.astype(np.int32), "carries expert routes int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            shape.check(wrong, 3, "0 of group 7")
