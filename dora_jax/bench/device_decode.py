"""The decode stages of bench.device: ragged rows in an engine that the assembly of a run makes."""

from __future__ import annotations

import dataclasses
import gc
import time
from typing import Any

import numpy as np

from dora_jax.bench import device_kernels
from dora_jax.bench.device_models import GIB, one_device, peak_gib, published
from dora_jax.bench.device_record import Record
from dora_jax.config import Config, ModelSection, RolloutSection
from dora_jax.models.families.config import ModelConfig
from dora_jax.plan import presets
from dora_jax.publish import placed
from dora_jax.rollout.engine import Engine
from dora_jax.runtime.assembly.run import engine_of
from dora_jax.types import SampleId

COMMAND_BUFFERS = {"none": "", "with loops": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
    """Sizes of the decode stages: prompts of up to `context` tokens, then new ones."""

    rows: int
    context: int
    new: int
    ticks: int  # of one round
    rounds: int


FULL = Decode(rows=64, context=3584, new=512, ticks=16, rounds=3)
SMALL = Decode(rows=4, context=48, new=80, ticks=2, rounds=2)


def decode_config(size: Decode, **rollout: Any) -> Config:
    """As presets fill it in, with pages for these rows and a page of each that a shared prompt may cost."""
    section = RolloutSection(slots=size.rows, max_prompt_tokens=size.context, max_new_tokens=size.new, **rollout)
    config = presets.filled(Config(model=ModelSection(dtype="bfloat16"), rollout=section))
    pages = size.rows * (-(-(size.context + size.new) // config.rollout.page_size) + 1)
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, pages=pages))


def decode(record: Record, cfg: ModelConfig, tiny: bool) -> None:
    size = SMALL if tiny else FULL
    variants: dict[str, dict[str, Any]] = {f"results late: {late}": {"late_results": late} for late in ("on", "off")}
    if cfg.d_model < 2048 and not tiny:
        variants |= {
            f"command buffers: {name}": {"compiler_options": {"xla_gpu_enable_command_buffer": value}}
            for name, value in COMMAND_BUFFERS.items()
        }
    params = None
    for name, options in variants.items():
        if record.has(name):
            continue
        with record.attempt(name):
            config = decode_config(size, **options)
            params = params or published(config, cfg)
            decode_variant(record, name, config, cfg, params, size)
        gc.collect()  # the engine's pool is the next one's memory


def decode_variant(record: Record, name: str, config: Config, cfg: ModelConfig, params: Any, size: Decode) -> None:
    engine = engine_of(config, cfg, one_device())
    began = time.perf_counter()
    engine.load(0, placed(params, engine.param_shardings))
    engine.warmup()
    warmup_s, compiled = time.perf_counter() - began, engine.compiled
    lengths = np.random.default_rng(1).integers(1, size.context + 1, size.rows)
    began = time.perf_counter()
    submit(engine, cfg, lengths, size.new)
    record.add(
        f"{name}: prefill", lengths.sum() / (time.perf_counter() - began), "tokens/s", note=f"{lengths.sum()} tokens"
    )
    calls: list[tuple[Any, ...]] = []
    recorded(engine, calls)
    taken = []
    for _ in range(size.rounds):
        began = time.perf_counter()
        tokens = sum(engine.tick().tokens for _ in range(size.ticks))
        taken.append((time.perf_counter() - began) * size.rows / tokens)
    step_s = float(np.median(taken))
    held = lengths.sum() + size.rows * (size.ticks * size.rounds // 2) * config.rollout.decode_steps
    live = int(held) * 2 * cfg.n_layers * cfg.kv_width * 2
    needed = weight_bytes(cfg) + live
    speed = record.value("read", device_kernels.READ)
    with record.attempt(f"{name}: idle"):
        device_s = device_seconds(engine, calls) / config.rollout.decode_steps
        record.add(
            f"{name}: idle", max(0.0, 1 - device_s / step_s), "of step", note=f"device {device_s * 1e3:.3f} ms a step"
        )
    record.add(
        f"{name}: warm-up",
        warmup_s,
        "s",
        note=f"{compiled} programs; attention {config.rollout.attention}, "
        f"page {config.rollout.page_size}, {config.rollout.pages} pages",
    )
    record.add(
        f"{name}: peak memory",
        peak_gib(),
        "GiB",
        note=f"since the process began; weights and live KV {needed / GIB:.2f}",
    )
    record.add(
        name,
        needed / step_s / 1e9 / speed if speed else None,
        "of read",
        seconds=step_s,
        note=f"{step_s * 1e3:.3f} ms a step, {size.rows / step_s:.0f} tokens/s, {live / 1e9:.2f} GB of KV",
    )


def submit(engine: Engine, cfg: ModelConfig, lengths: np.ndarray, new: int) -> None:
    """A sample a length, and ticks until all of them decode; a prompt is prefilled before its sample comes."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, cfg.vocab_size, n).astype(np.int32) for n in lengths]
    prefixes = [engine.prefill(prompt, 0) for prompt in prompts]
    for i, prompt in enumerate(prompts):
        engine.submit(SampleId(i, 0), prompt, 0, new)
    for _ in range(100):
        if len(engine.tick().progress) == len(prompts):
            break
    else:
        raise RuntimeError("the rows never decoded side by side")
    for prefix in prefixes:
        engine.release(prefix)


def recorded(engine: Engine, calls: list[tuple[Any, ...]]) -> None:
    """Keeps what the last decode call was given in `calls`."""
    generate = engine.device.generate

    def kept(*args: Any) -> Any:
        calls[:] = [args]
        return generate(*args)

    engine.device.generate = kept  # type: ignore[method-assign, assignment]


def device_seconds(engine: Engine, calls: list[tuple[Any, ...]], count: int = 10) -> float:
    """Of the decode call made last, made again and again with nothing between; its samples are worth nothing then."""
    run = lambda: engine.device.generate(*calls[0])
    return device_kernels.best_s(run, calls=count, rounds=2)


def weight_bytes(cfg: ModelConfig) -> int:
    """What a decode step reads of the weights in bf16: all, but of an embedding that is no head only the rows' own."""
    unread = 0 if cfg.tie_embeddings else cfg.vocab_size * cfg.d_model
    return 2 * (cfg.matrix_params + cfg.gain_params - unread)
