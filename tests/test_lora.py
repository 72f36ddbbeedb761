"""Adapters in the decoder: merged or beside, one or a row's own, both layouts, every family, any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models import decoder, lora, lora_config, moe, sharding
from dora_jax.models.families import new_config
from dora_jax.models.families.config import Experts, Kind, Latent
from dora_jax.models.lora_config import ADAPTED, Lora, adapter_params
from dora_jax.ops.segment_attention import segment_attention

SIZES = dict(vocab_size=64, d_model=32, n_layers=2, n_heads=4, d_ff=48, tie_embeddings=False)
LATENT = dict(head_dim=12, n_kv_heads=4, latent=Latent(kv_rank=16, q_rank=16, rope_dim=4, nope_dim=8, v_dim=8))
MIXTURE = dict(count=4, per_token=2, width=16)
CONFIGS = {
    "qwen3": new_config("qwen3", **SIZES, n_kv_heads=2, head_dim=8),
    "qwen3_moe": new_config("qwen3_moe", **SIZES, n_kv_heads=4, head_dim=8, experts=Experts(**MIXTURE, first_dense=1)),
    "deepseek_v3": new_config(
        "deepseek_v3", **SIZES, **LATENT, experts=Experts(**MIXTURE, shared=1, router="sigmoid", corrected=True)
    ),
    "longcat_flash": new_config(
        "longcat_flash", **SIZES, **LATENT, experts=Experts(**MIXTURE, zero=2, corrected=True, renormalize=False)
    ),
}
DENSE = "qwen3"
FAMILIES = [name if name == DENSE else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
LORA = Lora(rank=4, alpha=8.0, targets=ADAPTED)
B, L = 4, 8
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 64, (B, L)))
POSITIONS = jnp.broadcast_to(jnp.arange(L), (B, L))


def noisy(like, seed):
    rng = np.random.default_rng(seed)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.asarray(rng.normal("norm" in jax.tree_util.keystr(path), 0.2, x.shape), x.dtype), like
    )


@functools.cache
def params(name):
    return noisy(decoder.abstract_params(CONFIGS[name]), 0)


def adapter(name, seed, shape=LORA):
    return noisy(lora.abstract(CONFIGS[name], shape), seed)


@functools.cache
def jitted(name, compute=moe.scan):
    """Hidden states [B, L, D] of weights in any layout."""
    attend = segment_attention(jnp.zeros_like(TOKENS), POSITIONS)

    def hidden(params, adapters=None, index=None, tokens=TOKENS):
        options = dict(adapters=adapters, adapter_index=index, adapter_gain=LORA.gain, compute=compute)
        return decoder.forward(CONFIGS[name], params, tokens, POSITIONS, attend, **options)

    return jax.jit(hidden)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_beside_the_weights_is_the_adapter_added_up_into_them(name):
    run, weights, one = jitted(name), params(name), adapter(name, 1)
    expected = run(lora.merge(weights, one, LORA.gain))
    assert float(jnp.abs(expected - run(weights)).max()) > 0.1
    np.testing.assert_allclose(run(weights, one), expected, atol=2e-5)
    serving = decoder.serving_layout
    np.testing.assert_allclose(run(serving(weights), serving(one)), expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "longcat_flash"])
def test_each_row_takes_its_own_adapter(name):
    weights, many = params(name), [adapter(name, seed) for seed in range(3)]
    several, index = lora.stacked([*many, jax.tree.map(lambda x: x * jnp.nan, many[0])]), jnp.asarray([2, 0, 1, 2])
    run = jitted(name)
    alone = [run(weights, one) for one in many]
    expected = jnp.stack([alone[i][row] for row, i in enumerate(index.tolist())])
    np.testing.assert_allclose(run(weights, several, index), expected, atol=2e-5)
    by_layer = lora.stacked([decoder.serving_layout(one) for one in many])
    for compute in (moe.scan, moe.blocks, moe.ragged_dot)[: 3 if CONFIGS[name].experts else 1]:
        found = jitted(name, compute)(decoder.serving_layout(weights), by_layer, index)
        np.testing.assert_allclose(found, expected, atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_a_serving_pass_takes_them_in_both_layouts_and_absorbed(name):
    """Each token attends to itself alone, of latents in their own space."""
    cfg, weights, many = CONFIGS[name], params(name), [adapter(name, seed) for seed in range(2)]
    index = jnp.asarray([1, 0, 1, 1])

    def attend(layer, q, k, v, scores):
        if v is None:
            return jnp.repeat(k[..., : cfg.latent.kv_rank], cfg.n_heads, axis=2)
        return jnp.repeat(v, cfg.n_heads // v.shape[2], axis=2)

    def hidden(params, **options):
        return decoder.forward_carrying(
            cfg, params, TOKENS, POSITIONS, lambda state: attend, [jnp.zeros(1)], **options
        )[0]

    alone = [jax.jit(hidden)(lora.merge(weights, one, LORA.gain)) for one in many]
    expected = jnp.stack([alone[i][row] for row, i in enumerate(index.tolist())])
    for layout in ("serving", "scanned"):
        several = lora.stacked([decoder.serving_layout(one, layout) for one in many])
        options = dict(adapters=several, adapter_index=index)
        run = jax.jit(functools.partial(hidden, adapter_gain=LORA.gain))
        np.testing.assert_allclose(run(decoder.serving_layout(weights, layout), **options), expected, atol=5e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("full_compile")
def test_a_fresh_adapter_adds_zeros_and_depends_on_no_mesh():
    """XLA may round the same sum in another order where there is something to add, if only zeros."""
    cfg, mesh = CONFIGS[DENSE], sharding.make_mesh(jax.devices(), 1, 4, 2)
    fresh, placed = lora.init(cfg, LORA, 7), lora.init(cfg, LORA, 7, lora.specs(cfg, LORA, mesh))
    jax.tree.map(np.testing.assert_array_equal, fresh, placed)
    hidden = jitted.__wrapped__(DENSE)  # the shared one may have been compiled quickly
    np.testing.assert_allclose(hidden(params(DENSE), fresh), hidden(params(DENSE)), rtol=0, atol=5e-6)
    a, b = (fresh["layers"]["q_proj"][x] for x in "ab")
    assert 0.9 < float(jnp.abs(a).max()) * 32**0.5 <= 1 and not b.any() and not np.array_equal(a[0], a[1])


def test_a_pass_without_adapters_is_the_program_that_it_was():
    cfg = CONFIGS[DENSE]
    attend = segment_attention(jnp.zeros_like(TOKENS), POSITIONS)

    def text(**options):
        hidden = functools.partial(decoder.forward, cfg, attend=attend, **options)
        return str(jax.make_jaxpr(lambda p: hidden(p, TOKENS, POSITIONS))(decoder.abstract_params(cfg)))

    assert text() == text(adapters=None, adapter_index=None, adapter_gain=2.0)


def test_factors_lie_as_their_matrices_do():
    for name, cfg in CONFIGS.items():
        mesh = sharding.make_mesh(
            jax.devices(), 1, 2, 2, expert=2 if cfg.experts else 1, context=1 if cfg.experts else 2
        )
        for layout, where in (("stacked", mesh), ("serving", sharding.make_mesh(jax.devices()[:2], 1, 1, 2))):
            of_weights = sharding.param_specs(cfg, where, layout)["layers"]
            of_factors = lora.specs(cfg, LORA, where, layout)["layers"]
            for weights, factors in zip(*([x] if layout == "stacked" else x for x in (of_weights, of_factors))):
                for matrix, found in factors.items():
                    *leading, inner, outer = weights[matrix].spec
                    assert list(found["a"].spec) == [*leading, inner, None], (name, matrix)
                    assert list(found["b"].spec) == [*leading, None, outer], (name, matrix)


def test_experts_that_a_model_does_not_have_are_refused():
    named = Lora(rank=2, targets=("attention", "experts"))
    assert lora_config.model_problems(named, CONFIGS["qwen3"]) == [
        "lora.targets: experts are named, and this qwen3 model has none"
    ]
    assert not lora_config.model_problems(named, CONFIGS["qwen3_moe"])


def test_layers_that_no_target_names_are_an_error():
    with pytest.raises(ValueError, match=r"lora\.targets: experts name no matrix of the 1 dense layers"):
        lora.abstract(CONFIGS["qwen3_moe"], Lora(rank=2, alpha=2.0, targets=("experts",)))


def test_the_plan_of_memory_counts_what_there_is():
    for cfg in CONFIGS.values():
        for target in ("attention", "mlp", "experts"):
            shape = Lora(rank=3, targets=("attention", target) if target != "attention" else (target,))
            planned = adapter_params(cfg, shape)
            assert planned == sum(x.size for x in jax.tree.leaves(lora.abstract(cfg, shape))), (cfg.family, target)


def test_a_pass_beside_adapters_copies_none_of_the_weights():
    """Neither the layers of a run out of their stack, nor each layer's for the backward pass: of eight, in three kinds,
    two whole runs and a tail."""
    kinds = (Kind(window=6, theta=1e4), Kind(window=6, theta=1e4), Kind())
    sizes = dict(d_model=256, n_layers=8, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=1024, kinds=kinds)
    cfg, shape = new_config("gemma3_text", vocab_size=64, **sizes), Lora(rank=2, targets=("attention", "mlp"))
    attend = segment_attention(jnp.zeros_like(TOKENS), POSITIONS)

    def loss(adapters, params):
        options = dict(remat="full", adapters=adapters, adapter_gain=2.0)
        return jnp.mean(decoder.forward(cfg, params, TOKENS, POSITIONS, attend, **options) ** 2)

    base = decoder.abstract_params(cfg)
    compiled = jax.jit(jax.grad(loss)).lower(lora.abstract(cfg, shape), base).compile()
    held = sum(4 * x.size for x in jax.tree.leaves(base["layers"]))
    assert compiled.memory_analysis().temp_size_in_bytes < 0.7 * held
