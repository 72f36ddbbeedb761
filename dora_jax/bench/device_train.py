"""The stages of bench.device that train: the gap between engine and trainer, updates, both roles on one device."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dora_jax.bench import device_kernels
from dora_jax.bench.device_models import GIB, one_device, peak_gib, published
from dora_jax.bench.device_record import Record
from dora_jax.config import Config, ModelSection, OrchestratorSection, RolloutSection, TrainerSection
from dora_jax.models import decoder
from dora_jax.models.families.config import ModelConfig
from dora_jax.plan import budget, memory, presets
from dora_jax.publish import placed
from dora_jax.rollout.engine import Engine
from dora_jax.runtime.assembly.run import engine_of, packer, trainer_of
from dora_jax.trainer.flops import model_flops, segment_lengths
from dora_jax.types import Sample, SampleId, ScoredGroup, Span


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
    engine = engine_of(config, cfg, one_device())
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
            trainer = trainer_of(changed, cfg, one_device(), masters)
            [batch] = packer(changed, trainer)(groups, 0)
            exactly = jax.default_matmul_precision("float32" if dtype == "float32" else None)
            with exactly:  # a GPU rounds factors of f32 to 10 bits unless told
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
        _scored([done[SampleId(group, index)] for index in range(work.group_size)], rng) for group in range(work.groups)
    ]


def ragged(cfg: ModelConfig, work: DeviceWork) -> list[ScoredGroup]:
    """Groups of random tokens, responses of any length up to the longest."""
    rng = np.random.default_rng(4)

    def sample(group: int, index: int, prompt: np.ndarray) -> Sample:
        n = int(rng.integers(1, work.new + 1))
        return Sample(
            id=SampleId(group, index),
            prompt_ids=prompt,
            mask=np.ones(n, bool),
            finish="length",
            out_ids=rng.integers(0, cfg.vocab_size, n).astype(np.int32),
            logprobs=np.full(n, -np.log(cfg.vocab_size), np.float32),
            spans=(Span(version=0, start=0, stop=n),),
        )

    prompts = rng.integers(0, cfg.vocab_size, (work.groups, work.prompt)).astype(np.int32)
    return [
        _scored([sample(group, index, prompt) for index in range(work.group_size)], rng)
        for group, prompt in enumerate(prompts)
    ]


def _scored(samples: list[Sample], rng: np.random.Generator) -> ScoredGroup:
    return ScoredGroup(
        group_id=samples[0].id.group_id,
        version=0,
        samples=tuple(samples),
        parts={},
        rewards=rng.normal(size=len(samples)).astype(np.float32),
    )


def train(record: Record, cfg: ModelConfig, tiny: bool) -> None:
    work = TRAIN[tiny]
    groups, masters = ragged(cfg, work), decoder.init_params(cfg, 0)
    for attention, remat in TRAINED[-1:] if tiny else TRAINED:
        name = f"{attention}, remat {remat}"
        if record.has(name):
            continue
        with record.attempt(name):
            config = train_config(work, attention=attention, remat=remat)
            trainer = trainer_of(config, cfg, one_device(), masters)
            [batch] = packer(config, trainer)(groups, 0)
            began = time.perf_counter()
            trainer.warmup(*batch.tokens.shape)
            warmup_s = time.perf_counter() - began
            seconds = best_step_s(functools.partial(trainer.step, batch))
            needed = model_flops(cfg, segment_lengths(batch.segment_ids))
            peak = record.value("read", device_kernels.MATMUL)
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


def best_step_s(step: Callable[[], Any], rounds: int = 3) -> float:
    """Of an update, host work included."""
    step()
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return min(taken)


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
    trainer = trainer_of(config, cfg, one_device(), decoder.init_params(cfg, 0))
    params = published(config, cfg, trainer.params)
    engine = engine_of(config, cfg, one_device())
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
