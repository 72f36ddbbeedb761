"""The decode call of a long context as a share of the memory's speed: `python -m dora_jax.bench.decode --contexts=...`.

A decode step must read every weight once and the KV of every row once. The compiled call of an engine is timed with
all rows at the same context, on pages that were never filled (what a page holds does not change the cost), random weights; the share is
those bytes over the time, against the speed at which this device reads a matrix in a product with a vector.
Rows that the given memory cannot hold beside the weights are left out, and B says how many are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.config import Config, EngineKernel, ModelSection, RolloutSection
from dora_jax.models import decoder, sharding
from dora_jax.plan import presets
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.shapes import FRESH, HEADER, POSITION, REMAINING, SLOT, TOKEN
from dora_jax.runtime.assembly.run import engine_of

TOY = dict(vocab_size=512, d_model=256, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=32, d_ff=768)
SMALL = dict(
    vocab_size=151936, d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, d_ff=3072, rope_theta=1e6
)  # Qwen3-0.6B
LARGE = SMALL | dict(d_model=4096, n_layers=36, n_heads=32, d_ff=12288, tie_embeddings=False)  # Qwen3-8B
SIZES: dict[str, dict[str, Any]] = {"toy": TOY, "qwen3-0.6b": SMALL, "qwen3-8b": LARGE}
PAGE = {"reference": 16, "tpu": 32}
STEPS = 16


def step_bytes(cfg: decoder.ModelConfig, itemsize: int, rows: int, context: int) -> tuple[int, int]:
    """(weights, KV) that one step reads; of an embedding that is not the head too, only the rows' own lines."""
    sizes = {name: x.size for name, x in decoder.abstract_params(cfg).items() if name != "layers"}
    layers = sum(x.size for x in jax.tree.leaves(decoder.abstract_params(cfg)["layers"]))
    ends = sum(sizes.values()) - (0 if cfg.tie_embeddings else sizes["embed"])
    kv = 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * rows * context
    return (layers + ends) * itemsize, kv * itemsize


def new_engine(cfg: decoder.ModelConfig, rows: int, context: int, attention: EngineKernel, dtype) -> Engine:
    size = PAGE[attention]
    section = RolloutSection(
        slots=rows,
        pages=rows * (context // size),
        page_size=size,
        max_prompt_tokens=size,
        max_new_tokens=context - size,
        decode_steps=STEPS,
        prefill_tokens=size * rows,
        attention=attention,
        context_block=min(1024, context),
    )
    asked = Config(rollout=section, model=ModelSection(dtype=jnp.dtype(dtype).name))
    return engine_of(presets.filled(asked), cfg, sharding.make_mesh(jax.devices()[:1], 1, 1, 1))


def control_of(engine: Engine, context: int) -> tuple[np.ndarray, int]:
    """Every slot's last call before `context`, on pages of its own."""
    s = engine.shapes
    blocks, past, pages = s.decode_buckets[-1], context - STEPS, context // s.page_size
    control = np.zeros(s.decode_control(blocks), np.int32)
    control[:, SLOT] = np.arange(s.rows)
    control[:, [FRESH, TOKEN, POSITION, REMAINING]] = 1, 7, past, STEPS
    own_RxP = 1 + np.arange(s.rows * pages).reshape(s.rows, pages)
    held, first = s.pages_for(past), past // s.page_size
    control[:, HEADER : HEADER + held] = own_RxP[:, :held]
    write = HEADER + blocks * s.block_pages
    control[:, write : write + pages - first] = own_RxP[:, first:]
    return control, blocks


def table(
    model: str,
    contexts: list[int],
    rows: int,
    attention: EngineKernel,
    memory_bytes: float,
    read_speed: Callable[[int], float],
    best_s: Callable,
) -> Iterator[str]:
    """The page's lines. bf16, but f32 on CPUs, which have no fast bf16."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    cfg, itemsize = decoder.new_config("qwen3", **SIZES[model]), jnp.dtype(dtype).itemsize
    params = jax.jit(lambda: decoder.serving_layout(decoder.init_params(cfg, 0, dtype=dtype)))()
    speed = read_speed(min(1 << 30, int(memory_bytes / 4)))
    yield f"{model}, {jnp.dtype(dtype).name}, attention {attention}; this device reads {speed / 1e9:.0f} GB/s"
    yield f"{'context':>8s}{'B':>5s}{'weights MB':>12s}{'KV MB':>9s}{'ms a step':>11s}{'tokens/s':>10s}{'share':>8s}"
    for context in contexts:
        weights, kv = step_bytes(cfg, itemsize, 1, context)
        fit = min(rows, int((memory_bytes - weights) / (kv * (3 if attention == "reference" else 1.1))))
        if fit < 1:
            yield f"{context:8d}    0  one row of KV does not fit {memory_bytes / 1e9:.0f} GB beside the weights"
            continue
        engine = new_engine(cfg, fit, context, attention, dtype)
        engine.load(0, jax.device_put(params, engine.param_shardings))
        control, blocks = control_of(engine, context)
        weights_of = engine.residents.of(0)  # as the calls take them
        took = best_s(lambda: engine.device.generate(weights_of, control, blocks)[0].block_until_ready(), 5) / STEPS
        kv *= fit
        yield (
            f"{context:8d}{fit:5d}{weights / 1e6:12.1f}{kv / 1e6:9.1f}{took * 1e3:11.2f}{fit / took:10.0f}"
            f"{(weights + kv) / took / speed:8.0%}"
        )
