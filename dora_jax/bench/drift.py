"""What narrow types cost in log-prob: samples of the engine, scored again as the trainer does.

    python -m dora_jax.bench.drift [--model=FOLDER] [--samples=32] [--tokens=128]
    python -m dora_jax.bench.drift --moe [--model=FOLDER] [--samples=32] [--tokens=128] [--seeds=0,1,2]
    python -m dora_jax.bench.drift --exact [--model=FOLDER] [--samples=32] [--tokens=128]

Without a folder, a small model with random weights: those are harder on rounding than trained ones of this size.
  gap          engine log-prob minus the trainer's, of the sampled tokens: mean size, 99th percentile, largest, mean
  forward      mean size of one forward pass in the trainer's type minus one in f32, of the same tokens
  bytes        of the projections and of the KV of one position, as held
The first row is the rounding of f32 itself. Where engine and trainer both compute in bfloat16, each rounds for itself,
so that the gap is at most about 1.4 times one forward pass's rounding; `gap / forward` says how much it is.

With --moe: a mixture of experts in bfloat16, whose trainer scores the same samples with experts of its own choice and
with those that sampling took (trainer.routing_replay=rollout). `changed` is the share of choices that differ.

With --exact: what rollout.exact is worth and what it costs. The samples are scored by the trainer's forward, and by the
engine's own calls; `sampling` is how long those samples took without the option and with it, `replay` how long their
scoring by the engine's calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.bench import harness
from dora_jax.bench.decode import MODEL
from dora_jax.config import Config, Dtype, KvBits, RoutingReplay, TrainerSection, WeightBits
from dora_jax.models import decoder, hf
from dora_jax.models.families.config import Experts, ModelConfig
from dora_jax.publish import placed
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.quantize import KV, PROJECTIONS, WEIGHTS
from dora_jax.runtime.assembly.run import Replay, engine_of, engine_options, trainer_recipe
from dora_jax.types import Sample, SampleId

PROMPT = 32
MIXTURE: dict[str, Any] = dict(
    vocab_size=512, d_model=128, n_layers=8, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=256,
    experts=Experts(count=64, per_token=8, width=32),
)  # fmt: skip
OPTIONS: tuple[tuple[Dtype, WeightBits, KvBits], ...] = (
    ("float32", "", ""),
    ("bfloat16", "", ""),
    ("float32", "int8", ""),
    ("float32", "float8", ""),
    ("float32", "", "float8"),
    ("bfloat16", "int8", ""),
    ("bfloat16", "int8", "float8"),
)
WIDE: tuple[Dtype, WeightBits, KvBits] = OPTIONS[0]


def config_of(
    dtype: Dtype, weights: WeightBits, kv: KvBits, count: int, tokens: int, routing_replay: RoutingReplay = "none"
) -> Config:
    return harness.config_of(dtype, {"trainer": TrainerSection(routing_replay=routing_replay)}, slots=count,
                             max_prompt_tokens=PROMPT, max_new_tokens=tokens, prefill_tokens=512, weights=weights,
                             kv=kv)  # fmt: skip


def loaded_engine(config: Config, cfg: ModelConfig, params: Any) -> Engine:
    """The run's engine, with weights as it gets them: published in its type."""
    engine = engine_of(config, cfg, harness.one_device())
    engine.load(0, placed(harness.published(config, cfg, params), engine.param_shardings))
    return engine


def sampled(engine: Engine, count: int) -> list[Sample]:
    rng, ids = np.random.default_rng(0), [SampleId(0, index) for index in range(count)]
    for id in ids:
        engine.submit(id, rng.integers(3, engine.cfg.vocab_size, PROMPT), 0, engine.section.max_new_tokens)
    done = harness.finished(engine)
    return [done[id] for id in ids]


def engine_logprobs(samples: list[Sample]) -> np.ndarray:
    return np.concatenate([sample.logprobs for sample in samples])


def scored(
    config: Config, cfg: ModelConfig, params: Any, samples: list[Sample], replay: bool = False
) -> tuple[np.ndarray, float]:
    """(the trainer's log-probs of the sampled tokens, f32[samples * tokens], the share of the samples' choices that the
    trainer's routers would not make).

    params: its f32 masters. replay: tokens go to the experts that sampling took, and not to those of the trainer's
    choice."""
    model = trainer_recipe(config, cfg, harness.one_device(), cfg.vocab_size).model
    rows = np.stack([np.concatenate([s.prompt_ids, s.out_ids]) for s in samples]).astype(np.int32)
    positions = np.tile(np.arange(rows.shape[1] - 1, dtype=np.int32), (len(rows), 1))
    arrays = {
        "tokens": rows[:, :-1],
        "targets": rows[:, 1:],
        "positions": positions,
        "segment_ids": np.ones_like(positions),
    }
    if replay:
        arrays["routes"] = np.stack([np.asarray(s.table.routes) for s in samples])

    @jax.jit
    def score(params, arrays):
        (logprobs, _), routed = model.logprobs_routed(params, arrays)
        return logprobs, routed.changed.sum() / routed.ids.size if routed else 0.0

    logprobs, changed = score(params, arrays)
    return np.asarray(logprobs)[:, PROMPT - 1 :].reshape(-1), float(changed)


def measure(
    cfg: ModelConfig, params: Any, options: tuple[Dtype, WeightBits, KvBits], count: int, tokens: int
) -> tuple[np.ndarray, float]:
    """(engine minus trainer of each sampled token, the mean rounding of one forward pass in the trainer's type)."""
    config = config_of(*options, count, tokens)
    samples = sampled(loaded_engine(config, cfg, params), count)
    trainer, exact = (scored(each, cfg, params, samples)[0] for each in (config, config_of(*WIDE, count, tokens)))
    return engine_logprobs(samples) - trainer, float(np.abs(trainer - exact).mean())


def replayed(cfg: ModelConfig, params: Any, count: int, tokens: int) -> tuple[np.ndarray, np.ndarray, float]:
    """(engine minus trainer of each sampled token in bfloat16, the same under replay, share of choices that change)."""
    config = config_of("bfloat16", "", "", count, tokens, routing_replay="rollout")
    samples = sampled(loaded_engine(config, cfg, params), count)
    (own, _), (replay, changed) = (scored(config, cfg, params, samples, replay=each) for each in (False, True))
    return engine_logprobs(samples) - own, engine_logprobs(samples) - replay, changed


def drift(model="", samples=32, tokens=128, moe=False, exact=False, seeds=(0, 1, 2)) -> Iterator[str]:
    if moe:
        mixture = decoder.new_config("qwen3_moe", **MIXTURE)
        models = [hf.load(Path(model))] if model else [(mixture, decoder.init_params(mixture, s)) for s in seeds]
        table = harness.Table({"seed": "6s", "own: mean": "12.2e", "worst": "10.2e", "replay: mean": "14.2e",
                               " worst": "10.2e", "mean": ">8s", "worst ": ">8s", "changed": "10.1%"})  # fmt: skip
        yield table.head
        for seed, (cfg, params) in zip(seeds, models, strict=False):
            own, replay, changed = replayed(cfg, params, samples, tokens)
            sizes = [f(np.abs(gap)) for gap in (own, replay) for f in (np.mean, np.max)]
            ratios = [f"{before / after:7.2f}x" for before, after in zip(sizes[:2], sizes[2:], strict=True)]
            yield table.row("-" if model else str(seed), *sizes, *ratios, changed)
        return
    cfg, params = hf.load(Path(model)) if model else (MODEL, decoder.init_params(MODEL, 0))
    if exact:
        yield from exact_table(cfg, params, samples, tokens)
        return
    table = harness.Table({"compute": "10s", "weights": "9s", "KV": "9s", "gap: mean": "11.2e", "p99": "10.2e",
                           "largest": "10.2e", "signed": "10.1e", "forward": "10.2e", "gap / forward": ">15s",
                           "projections MB": "16.2f", "KV B/token": "12d"})  # fmt: skip
    yield table.head
    layer = decoder.abstract_params(cfg)["layers"]
    shapes = [layer[name].shape for name in PROJECTIONS if name in layer]
    for dtype, weights, kv in OPTIONS:
        gap, forward = measure(cfg, params, (dtype, weights, kv), samples, tokens)
        narrow = jnp.dtype(WEIGHTS[weights] or dtype).itemsize
        held = sum(n * (d * f * narrow + (4 * f if weights else 0)) for n, d, f in shapes)  # a scale, f32, a channel
        position = 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * jnp.dtype(KV[kv] or dtype).itemsize
        size = np.abs(gap)
        ratio = f"{size.mean() / forward:.2f}" if forward else "-"
        yield table.row(dtype, weights or "-", kv or "-", size.mean(), np.quantile(size, 0.99), size.max(), gap.mean(),
                        forward, ratio, held / 1e6, position)  # fmt: skip


def exact_table(cfg: ModelConfig, params: Any, count: int, tokens: int) -> Iterator[str]:
    table = harness.Table({"compute": "10s", "weights": "9s", "KV": "9s", "tokens": "8d", "gap: mean": "11.2e",
                           "largest": "10.2e", "exact: largest": "16.1e", "differ": "8d", "sampling s": "12.2f",
                           "exact s": "9.2f", "replay s": "10.2f"})  # fmt: skip
    yield table.head
    for dtype, weights, kv in OPTIONS:
        plain = config_of(dtype, weights, kv, count, tokens)
        config = dataclasses.replace(plain, rollout=dataclasses.replace(plain.rollout, exact=True))
        engines = [loaded_engine(each, cfg, params) for each in (plain, config)]
        for engine in engines:
            sampled(engine, count)  # the first ones compile
        (plain_s, _), (exact_s, samples) = (harness.timed(sampled, each, count) for each in engines)
        replay = Replay(cfg, config.rollout, harness.one_device(), **engine_options(config, cfg, (), cfg.vocab_size))
        answers = [(sample.prompt_ids, sample.out_ids) for sample in samples]
        replay(params, answers)
        replay_s, scores = harness.timed(replay, params, answers)
        found, again = engine_logprobs(samples), np.concatenate(scores)
        gap, left = np.abs(found - scored(config, cfg, params, samples)[0]), np.abs(found - again)
        differ = int((found.view(np.int32) != again.view(np.int32)).sum())
        figures = (len(found), gap.mean(), gap.max(), left.max(), differ, plain_s, exact_s, replay_s)
        yield table.row(dtype, weights or "-", kv or "-", *figures)


if __name__ == "__main__":
    harness.run(drift)
