"""One stage of bench.device in this process: here those that run a model, decoding, the gap, training, both roles.

python -m dora_jax.bench.device_model STAGE OUT full|tiny
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.bench import device, harness
from dora_jax.bench.device import GIB, Record
from dora_jax.config import Config, ModelSection, OrchestratorSection, RolloutSection, TrainerSection
from dora_jax.models import decoder
from dora_jax.models.families import KNOWN, new_config
from dora_jax.models.families.config import ModelConfig
from dora_jax.plan import budget, devices, memory, presets
from dora_jax.publish import placed, sliced
from dora_jax.rollout.engine import Engine
from dora_jax.runtime.assembly.run import engine_of, packer, publishing_copy, trainer_of
from dora_jax.trainer.flops import model_flops, segment_lengths
from dora_jax.types import Sample, SampleId, ScoredGroup

TINY = new_config("qwen3", vocab_size=512, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=128)


def published(config: Config, cfg: ModelConfig, masters: Any = None) -> Any:
    """Weights as the run's trainer offers them, in host memory; random ones where there are no masters."""
    if masters is None:
        masters = decoder.init_params(cfg, 0, dtype=jnp.dtype(config.model.dtype))
    slices = sliced(publishing_copy(config, cfg, harness.one_device())(masters))
    jax.tree.map(lambda leaf: leaf.bring_home(), slices)
    return slices


def peak_gib() -> float | None:
    """The most that this process has held on the device so far."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats["peak_bytes_in_use"] / GIB if "peak_bytes_in_use" in stats else None


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
    engine = engine_of(config, cfg, harness.one_device())
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
    speed = record.value("read", device.READ)
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
    return device.best_s(run, calls=count, rounds=2)


def weight_bytes(cfg: ModelConfig) -> int:
    """What a decode step reads of the weights in bf16: all, but of an embedding that is no head only the rows' own."""
    unread = 0 if cfg.tie_embeddings else cfg.vocab_size * cfg.d_model
    return 2 * (cfg.matrix_params + cfg.gain_params - unread)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceWork:
    """Sizes of what is trained on: groups of samples, packed rows."""

    groups: int
    group_size: int
    prompt: int
    new: int
    pack: int
    micro_batches: int


GAP = {
    False: DeviceWork(groups=8, group_size=8, prompt=64, new=192, pack=2048, micro_batches=2),
    True: DeviceWork(groups=2, group_size=2, prompt=8, new=24, pack=64, micro_batches=1),
}
TRAIN = {
    False: DeviceWork(groups=8, group_size=8, prompt=256, new=1792, pack=4096, micro_batches=16),
    True: DeviceWork(groups=2, group_size=2, prompt=8, new=24, pack=64, micro_batches=1),
}
TRAINED = (("cudnn", "none"), ("cudnn", "dots"), ("cudnn", "full"), ("reference", "full"))


def train_config(work: DeviceWork, **changes: Any) -> Config:
    """changes: of the trainer; `dtype` of the model."""
    dtype = changes.pop("dtype", "bfloat16")
    return presets.filled(
        Config(
            model=ModelSection(dtype=dtype),
            rollout=RolloutSection(
                slots=work.groups * work.group_size, max_prompt_tokens=work.prompt, max_new_tokens=work.new
            ),
            orchestrator=OrchestratorSection(groups_per_step=work.groups, group_size=work.group_size),
            trainer=TrainerSection(
                pack_tokens=work.pack, micro_batches=work.micro_batches, learning_rate=1e-6, **changes
            ),
        )
    )


def gap(record: Record, cfg: ModelConfig, tiny: bool) -> None:
    work = GAP[tiny]
    config = train_config(work)
    masters = decoder.init_params(cfg, 0)
    engine = engine_of(config, cfg, harness.one_device())
    engine.load(0, placed(published(config, cfg, masters), engine.param_shardings))
    groups = sampled(engine, cfg, work)
    del engine
    gc.collect()
    behavior = None
    forward: dict[str, np.ndarray] = {}
    kernels = dict.fromkeys((config.trainer.attention, "reference"))
    for dtype, attention in (("float32", "reference"), *(("bfloat16", name) for name in kernels)):
        label = f"{dtype}, {attention}"
        with record.attempt(label):
            changed = train_config(work, dtype=dtype, attention=attention)
            trainer = trainer_of(changed, cfg, harness.one_device(), masters)
            [batch] = packer(changed, trainer)(groups, 0)
            exactly = jax.default_matmul_precision("float32" if dtype == "float32" else None)
            with exactly:  # a GPU rounds factors of f32 to 10 bits unless asked
                forward[label] = trainer.logprobs(batch)[batch.mask]
            behavior = batch.behavior_logprobs[batch.mask]
            del trainer
            gc.collect()
    exact = forward.get("float32, reference")
    for label, logprobs in forward.items():
        add_gap(record, f"engine against trainer in {label}", behavior - logprobs)
        if exact is not None and logprobs is not exact:
            add_gap(record, f"one forward pass in {label} against f32", logprobs - exact)
            ratio = np.abs(behavior - logprobs).mean() / np.abs(logprobs - exact).mean()
            record.add(f"ratio of the two, {label}", ratio, "times", note="at most 1.5")


def add_gap(record: Record, name: str, d: np.ndarray) -> None:
    size = np.abs(d)
    record.add(
        name,
        size.mean(),
        "mean",
        note=f"p99 {np.quantile(size, 0.99):.3g}, largest {size.max():.3g}, {size.size} tokens",
    )


def sampled(engine: Engine, cfg: ModelConfig, work: DeviceWork) -> list[ScoredGroup]:
    """Groups of the engine's own samples, with random rewards."""
    rng = np.random.default_rng(3)
    for group in range(work.groups):
        prompt = rng.integers(0, cfg.vocab_size, work.prompt).astype(np.int32)
        for index in range(work.group_size):
            engine.submit(SampleId(group, index), prompt, 0, work.new)
    done: dict[SampleId, Sample] = {}
    while not engine.idle:
        done |= {sample.id: sample for sample in engine.tick().finished}
    return [
        harness.scored([done[SampleId(group, index)] for index in range(work.group_size)], rng)
        for group in range(work.groups)
    ]


def ragged(cfg: ModelConfig, work: DeviceWork) -> list[ScoredGroup]:
    """Groups of random tokens, responses of any length up to the longest."""
    rng = np.random.default_rng(4)

    def sample(group: int, index: int, prompt: np.ndarray) -> Sample:
        n = int(rng.integers(1, work.new + 1))
        out_ids = rng.integers(0, cfg.vocab_size, n)
        return harness.sample_of(group, index, prompt, out_ids, np.full(n, -np.log(cfg.vocab_size)), "length")

    prompts = rng.integers(0, cfg.vocab_size, (work.groups, work.prompt)).astype(np.int32)
    return [
        harness.scored([sample(group, index, prompt) for index in range(work.group_size)], rng)
        for group, prompt in enumerate(prompts)
    ]


def train(record: Record, cfg: ModelConfig, tiny: bool) -> None:
    work = TRAIN[tiny]
    groups, masters = ragged(cfg, work), decoder.init_params(cfg, 0)
    for attention, remat in TRAINED[-1:] if tiny else TRAINED:
        name = f"{attention}, remat {remat}"
        if record.has(name):
            continue
        with record.attempt(name):
            config = train_config(work, attention=attention, remat=remat)
            trainer = trainer_of(config, cfg, harness.one_device(), masters)
            [batch] = packer(config, trainer)(groups, 0)
            began = time.perf_counter()
            trainer.warmup(*batch.tokens.shape)
            warmup_s = time.perf_counter() - began
            seconds = harness.best_s(functools.partial(trainer.step, batch))
            needed = model_flops(cfg, segment_lengths(batch.segment_ids))
            peak = record.value("read", device.MATMUL)
            tokens = int((batch.segment_ids > 0).sum())
            record.add(f"{name}: warm-up", warmup_s, "s")
            record.add(f"{name}: peak memory", peak_gib(), "GiB", note="since the process began")
            record.add(
                name,
                needed / seconds / 1e12 / peak if peak else None,
                "MFU",
                seconds=seconds,
                note=f"{seconds:.3f} s, {tokens} tokens, {tokens / seconds:.0f} tokens/s, {needed / 1e12:.1f} TFLOP",
            )
            del trainer
        gc.collect()


def shared_device(record: Record, cfg: ModelConfig, tiny: bool) -> None:
    """Trainer and engine on one device, with the pages that the memory plan leaves: their peak, against the plan's."""
    config = train_config(TRAIN[tiny], remat="full")
    config = presets.filled(
        dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, size="" if tiny else "Qwen3-0.6B"),
            rollout=dataclasses.replace(config.rollout, instances=1, pages=0),
        )
    )
    trainer = trainer_of(config, cfg, harness.one_device(), decoder.init_params(cfg, 0))
    params = published(config, cfg, trainer.params)
    engine = engine_of(config, cfg, harness.one_device())
    began = time.perf_counter()
    engine.load(0, placed(params, engine.param_shardings))
    engine.warmup()
    record.add("warm-up of the engine", time.perf_counter() - began, "s", note=f"{engine.compiled} programs")
    groups = sampled(engine, cfg, TRAIN[tiny])
    record.add("peak memory with the engine", peak_gib(), "GiB")
    [batch] = packer(config, trainer)(groups, 0)
    began = time.perf_counter()
    trainer.warmup(*batch.tokens.shape)
    record.add("warm-up of the trainer", time.perf_counter() - began, "s")
    trainer.step(batch)
    record.add(
        "peak memory with both", peak_gib(), "GiB", note=f"{config.rollout.pages} pages of {config.rollout.page_size}"
    )
    if planned := budget.of(config, presets.here(config), cfg):
        bytes_ = memory.total(planned.trainer) + memory.total(planned.instance) + planned.pages_bytes
        record.add("planned memory", bytes_ / GIB, "GiB")


def run(stage: str, record: Record, size: str) -> None:
    """One stage, in this process."""
    kind, _, model = stage.partition("-")
    tiny, bare = size == "tiny", {"read": device.read, "kernel": device.kernel}
    if kind == "flashinfer":
        return device.flashinfer(record, tiny)  # torch alone: where JAX is set up it takes the memory
    devices.setup_platform(Config())
    if kind in bare:
        return bare[kind](record, tiny)
    stages = {"decode": decode, "gap": gap, "train": train, "memory": shared_device}
    stages[kind](record, TINY if tiny else KNOWN[f"Qwen3-{model or '0.6B'}"], tiny)


if __name__ == "__main__":
    run(sys.argv[1], Record(Path(sys.argv[2]), sys.argv[1]), sys.argv[3])
