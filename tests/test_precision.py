"""One function of the weights in engine and trainer: what is published gives the masters' values to the bit, and what a
docstring calls f32 is f32 on a TPU too, by the text that is lowered for one (a CPU cannot show it)."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.config import RolloutSection
from dora_jax.models import decoder, sharding
from dora_jax.models.attention import narrow_product
from dora_jax.models.families.config import Delta, Experts, Kind, Latent, Yarn
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.rollout import quantize
from dora_jax.rollout.device_calls import Calls
from dora_jax.trainer.recipe import abstract_inputs, new_recipe
from dora_jax.trainer.step import jitted_update
from tests.fakes import trainer_cases as cases

SIZES = dict(vocab_size=40, d_model=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=24, d_ff=64)
WIDE = SIZES | {"n_kv_heads": 4, "latent": Latent(kv_rank=16, rope_dim=8, nope_dim=16, v_dim=16, q_rank=24)}
MIXTURE = Experts(count=8, per_token=2, width=16)
CONFIGS = {
    "qwen2": decoder.new_config("qwen2", **SIZES),
    "qwen3": decoder.new_config("qwen3", **SIZES),
    "qwen3_moe": decoder.new_config("qwen3_moe", **SIZES, experts=MIXTURE),
    "deepseek_v3": decoder.new_config(
        "deepseek_v3",
        **WIDE,
        experts=Experts(count=8, per_token=2, width=16, shared=1, first_dense=1, router="sigmoid", corrected=True),
        rope_scaling=Yarn(factor=40.0, original_max_position=64, mscale=1.0, mscale_all_dim=1.0),
    ),
    "longcat_flash": decoder.new_config(
        "longcat_flash", **WIDE, experts=Experts(count=8, per_token=2, width=16, zero=2, corrected=True)
    ),
}
WINDOWED = SIZES | {"kinds": (Kind(window=5, theta=1e4), Kind())}
NEWER = {
    "gemma3_text": decoder.new_config("gemma3_text", **WINDOWED, query_scale=11.0, embed_scale=48**0.5),
    "gemma4_text": decoder.new_config(
        "gemma4_text",
        **WINDOWED,
        embed_scale=48**0.5,
        per_layer=8,
        logit_cap=3.0,
        experts=Experts(count=8, per_token=2, width=16, beside=True),
    ),
    "olmo3": decoder.new_config("olmo3", **WINDOWED),
    "glm4_moe": decoder.new_config(
        "glm4_moe",
        **SIZES,
        rope_part=0.5,
        qk_norm=True,
        experts=Experts(count=8, per_token=2, width=16, shared=1, first_dense=1, router="sigmoid", corrected=True),
    ),
    "gpt_oss": decoder.new_config("gpt_oss", **WINDOWED, experts=Experts(count=8, per_token=2, width=16, biased=True)),
    "qwen3_5_moe_text": decoder.new_config(
        "qwen3_5_moe_text",
        **SIZES,
        kinds=(Kind(linear=True), Kind()),
        delta=Delta(key_heads=2, value_heads=4, key_dim=8, value_dim=6),
        experts=Experts(count=8, per_token=2, width=16, shared=1, shared_gate=True),
    ),
}
OTHER_WIDE = {"sinks", "delta_rate", "delta_bias"}  # scores, and exponents of a decay


def test_narrow_products_round_their_factors_and_sum_in_float32():
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=size).astype(np.float32) for size in ((5, 300), (300, 7), (5, 7)))
    rounded = lambda a: a.astype(jnp.bfloat16).astype(np.float64)
    expected = rounded(x) @ rounded(w), rounded(dy) @ rounded(w).T, rounded(x).T @ rounded(dy)
    y, gradients = jax.vjp(jax.jit(narrow_product), x, w)
    for found, right in zip((y, *gradients(dy)), expected, strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, right, atol=1e-4)
    turned = quantize.Turned(jnp.asarray(w.T, jnp.bfloat16))
    for rows in (1, 5):
        np.testing.assert_allclose(jax.jit(lambda x: x @ turned)(x[:rows]), expected[0][:rows], atol=1e-4)


@pytest.mark.parametrize("family", [*CONFIGS, *NEWER])
def test_a_published_copy_is_the_same_function_as_the_masters_to_the_bit(family):
    cfg, tokens = (CONFIGS | NEWER)[family], jnp.arange(24).reshape(2, 12)
    at = jnp.broadcast_to(jnp.arange(12), (2, 12))
    attend = segment_attention(jnp.zeros_like(at), at)

    @jax.jit
    def outputs(params):
        hidden = decoder.forward(cfg, params, tokens, at, attend, dtype=jnp.bfloat16)
        return decoder.logits(cfg, params, hidden)

    masters = cases.params(model=cfg)  # none of them is a bfloat16
    copy = decoder.copied(masters, jnp.bfloat16)
    np.testing.assert_array_equal(outputs(masters), outputs(copy))
    wide = {name for name, x in copy[decoder.LAYERS].items() if x.dtype == jnp.float32}
    assert {name for name in copy[decoder.LAYERS] if "norm" in name or "router" in name} == wide - OTHER_WIDE


@functools.cache
def lowered(family, dtype):
    """The engine's decode call and the trainer's update, as text for a TPU, by name."""
    cfg, mesh = CONFIGS[family], sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    section = RolloutSection(
        slots=4,
        pages=32,
        page_size=8,
        prefill_tokens=32,
        prefill_chunk=16,
        prefill_call_tokens=32,
        max_prompt_tokens=16,
        max_new_tokens=16,
        decode_steps=2,
        attention="reference",
        expert_matmul="ragged_dot",
        late_results="on",
    )
    calls = Calls(cfg, section, mesh, seed=0, eos_ids=(1,), vocab_limit=40, dtype=jnp.dtype(dtype))
    recipe = new_recipe(cfg, cases.SECTION, mesh, total_steps=2, dtype=dtype)
    programs = {name.split()[0]: program for name, program in calls.programs().items()}
    programs = {name: programs[name] for name in ("decode", "prefill")}
    programs["update"] = jitted_update(recipe), abstract_inputs(recipe, 2, 32), {}
    return {
        name: call.trace(*arguments, **static).lower(lowering_platforms=("tpu",)).as_text()
        for name, (call, arguments, static) in programs.items()
    }


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_f32_are_of_full_precision_on_a_tpu(family, dtype):
    for name, text in lowered(family, dtype).items():
        products = [line for line in text.splitlines() if "dot_general" in line and "(tensor<" in line]
        wide = [line for line in products if re.search(r"\(tensor<[^>]*f32>, tensor<[^>]*f32>\) ->", line)]
        assert products and all("precision = [HIGHEST, HIGHEST]" in line for line in wide), name
        # in bfloat16 those of routers; nobody needs what the last layer's chooses of a prompt
        assert len(wide) == len(products) if dtype == "float32" else len(wide) < len(products), name
        assert wide or family == "qwen3" or name == "prefill", name


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_scores_are_scaled_and_angles_made_in_f32(family):
    scale = CONFIGS[family].scores(CONFIGS[family].kind(0)).scale
    for name, text in lowered(family, "bfloat16").items():
        constants = re.findall(r"stablehlo.constant dense<(-?[\d.]+(?:e[+-]\d+)?)> : tensor<(\w+)>", text)
        found = {kind for value, kind in constants if abs(float(value) / scale - 1) < 4e-3}
        assert found == {"f32"}, (name, found)
        assert name == "update" or "stablehlo.power" not in text  # frequencies are constants
