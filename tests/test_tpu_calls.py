"""The calls of an engine, compiled for a TPU that is not here: nothing of the size of the pool or of a weight is
copied."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from dora_jax.aot import slices as aot_slices
from dora_jax.config import RolloutSection
from dora_jax.models import decoder, sharding
from dora_jax.models.families.config import Delta, Latent
from dora_jax.rollout.device_calls import Calls
from dora_jax.rollout.shapes import TOP_COLUMNS
from dora_jax.trainer import hlo

pytestmark = pytest.mark.skipif(not aot_slices.installed(), reason="libtpu is not installed: the extra aot")
CFG = decoder.new_config(
    "qwen3", vocab_size=1024, d_model=512, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=128, d_ff=1536
)
LATENT = decoder.new_config(
    "deepseek_v3",
    vocab_size=1024,
    d_model=512,
    n_layers=3,
    n_heads=8,
    n_kv_heads=8,
    head_dim=192,
    d_ff=1536,
    latent=Latent(kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=256),
)
HYBRID = decoder.new_config(
    "qwen3_5_text",
    vocab_size=1024,
    d_model=512,
    n_layers=8,
    n_heads=4,
    n_kv_heads=1,
    head_dim=256,
    d_ff=1536,
    rope_part=0.25,
    delta=Delta(key_heads=4, value_heads=8, key_dim=128, value_dim=128),
)
WEIGHTS = ("512,512", "512,256", "512,1536", "1536,512")  # shapes of the projections


def calls(attention, cfg=CFG, **changes):
    section = RolloutSection(
        **{
            **dict(
                attention=attention,
                slots=8,
                pages=256,
                page_size=64,
                max_prompt_tokens=512,
                max_new_tokens=1536,
                decode_steps=4,
                prefill_chunk=256,
                prefill_tokens=512,
                late_results="on",
            ),
            **changes,
        }
    )
    return Calls(
        cfg,
        section,
        sharding.make_mesh(aot_slices.slice_devices("v5e-4")[:1], 1, 1, 1),
        seed=0,
        eos_ids=(1,),
        vocab_limit=1000,
        dtype=jnp.bfloat16,
    )


def made(text, kinds, shapes):
    """Instructions of these kinds that make an array of such a shape, with any leading ones."""
    return [
        line for line in text.splitlines() if re.search(rf"= \w+\[(1,)*({'|'.join(shapes)})\]\S* ({kinds})\(", line)
    ]


@pytest.mark.parametrize(
    "attention,weights,scratch",
    [
        ("tpu", "", 6 * 2**20),  # half of it for rows with sampling values of their own
        ("tpu", "int8", 6 * 2**20),  # less than the weights of one layer
        pytest.param("tokamax", "", 8 * 2**20, marks=pytest.mark.slow),
    ],
)  # its schedule takes 5 MiB
def test_decode_holds_neither_a_second_pool_nor_wide_weights(attention, weights, scratch):
    if attention == "tokamax":
        pytest.importorskip("tokamax", reason="tokamax is not installed: the extra tpu-kernels, Python 3.12")
    made_calls = calls(attention, weights=weights)
    decode = made_calls.decode_chosen
    text, memory = decode.as_text(), decode.memory_analysis()
    pool = f"{CFG.n_layers * 257},64,4,128"
    assert f"bf16[{pool}]" in text and not made(text, "copy|copy-start", (pool,))
    assert memory.alias_size_in_bytes >= CFG.n_layers * 257 * 64 * 4 * 128 * 2
    assert memory.temp_size_in_bytes < scratch
    wide = [f"{layers}{shape}" for shape in WEIGHTS for layers in ("", f"{CFG.n_layers},")]
    if weights:
        assert "s8[" in text and not re.search(rf"(bf16|f32)\[(1,)*({'|'.join(wide)})\]", text)


def test_prefill_takes_the_weights_as_decode_likes_them():
    made_calls = calls("tpu")
    ((call, arguments, static),) = (program for name, program in made_calls.programs().items() if "prefill" in name)
    compiled = call.trace(*arguments, **static).lower(lowering_platforms=("tpu",)).compile()
    assert compiled.input_formats[0][0]["layers"] == made_calls.param_formats["layers"]
    assert sorted(name.split()[0] for name in made_calls.programs()) == ["decode", "prefill", "read", "write"]


@pytest.mark.parametrize("kv,pages", [("", 512), ("float8", 1024)])  # pools of 120 MiB: less may move onto the chip
def test_latent_pages_are_read_by_their_own_kernel_and_copied_nowhere(kv, pages):
    """640 numbers a token: 512 + 64, and the rest of the last vector."""
    decode = calls("tpu", LATENT, kv=kv, pages=pages).decode_chosen
    text, memory = decode.as_text(), decode.memory_analysis()
    pool, kind, size = f"{LATENT.n_layers * (pages + 1)},64,640", *(("f8e4m3fn", 1) if kv else ("bf16", 2))
    assert f"{kind}[{pool}]" in text and not made(text, "copy|copy-start", (pool,))
    assert "latent_attention" in text and not made(text, "gather", ("8,2048,640", "8,32,64,640"))
    assert memory.alias_size_in_bytes >= LATENT.n_layers * (pages + 1) * 64 * 640 * size
    top_bytes = 8 * 8 * TOP_COLUMNS * 4  # of 8 rows and 8 steps
    assert memory.temp_size_in_bytes < 6 * 2**20 + top_bytes


def test_latent_pages_on_their_way_to_the_host_are_gathered_and_nothing_else_is_copied():
    programs = calls("tpu", dataclasses.replace(LATENT, n_layers=28), pages=4000).programs()
    ((call, arguments, static),) = (program for name, program in programs.items() if name.startswith("read"))
    compiled = call.trace(*arguments, **static).lower(lowering_platforms=("tpu",)).compile()
    pages = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(compiled.out_info))
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * pages


def test_recurrent_states_stay_where_they_are():
    """A call reads and writes the states of its rows, and neither all states of a layer nor the pool of pages."""
    made_calls = calls("tpu", HYBRID, slots=32, pages=2048)  # pools of 200 MB: less may move onto the chip
    pages, states = made_calls.abstract_pool["pages"], made_calls.abstract_pool["states"]
    pools = {x.shape: HYBRID.linear_layers for x in states.values()} | {x.shape: HYBRID.kv_layers for x in pages}
    held = sum(x.size * x.dtype.itemsize for x in [*states.values(), *pages])
    for name, (call, arguments, static) in made_calls.programs().items():
        if name.startswith(("decode", "prefill", "read state", "write state")):
            compiled = call.trace(*arguments, **static).lower(lowering_platforms=("tpu",)).compile()
            text, memory = compiled.as_text(), compiled.memory_analysis()
            assert "f32[6,65,8,128,128]" in text and hlo.CompiledText(text, 4).copies(pools) == hlo.Traffic(), name
            assert name == "read state" or memory.alias_size_in_bytes >= held, name
