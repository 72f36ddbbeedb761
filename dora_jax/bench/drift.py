"""What narrow types cost in log-prob: samples of the engine, scored again as the trainer does.

    python -m dora_jax.bench.drift [--model=FOLDER] [--samples=32] [--tokens=128]

Without a folder, a small model with random weights: those are harder on rounding than trained ones of this size.
  gap          engine log-prob minus the trainer's, of the sampled tokens: mean size, 99th percentile, largest, mean
  forward      mean size of one forward pass in the trainer's type minus one in f32, of the same tokens
  bytes        of the projections and of the KV of one position, as held
The first row is the rounding of f32 itself. Where engine and trainer both compute in bfloat16, each rounds for itself,
so that the gap is at most about 1.4 times one forward pass's rounding; `gap / forward` says how much it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax import presets
from dora_jax.bench.decode import MODEL
from dora_jax.config import Config, ModelSection, RolloutSection
from dora_jax.models import decoder, hf, sharding
from dora_jax.models.config import ModelConfig
from dora_jax.publish import placed, sliced
from dora_jax.rollout.quantize import KV, PROJECTIONS, WEIGHTS
from dora_jax.runtime.run import engine_of, publishing_copy, trainer_recipe
from dora_jax.types import Sample, SampleId

PROMPT = 32
OPTIONS = (
    ("float32", "", ""),
    ("bfloat16", "", ""),
    ("float32", "int8", ""),
    ("float32", "float8", ""),
    ("float32", "", "float8"),
    ("bfloat16", "int8", ""),
    ("bfloat16", "int8", "float8"),
)


def config_of(dtype: str, weights: str, kv: str, count: int, tokens: int) -> Config:
    section = RolloutSection(
        slots=count, max_prompt_tokens=PROMPT, max_new_tokens=tokens, prefill_tokens=512, weights=weights, kv=kv
    )
    return presets.filled(Config(model=ModelSection(dtype=dtype), rollout=section))


def samples_of(config: Config, cfg: ModelConfig, params: Any, count: int) -> list[Sample]:
    """Samples of the run's engine, under weights as it gets them: published in its type."""
    mesh = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    engine = engine_of(config, cfg, mesh)
    engine.load(0, placed(sliced(publishing_copy(config, cfg, mesh)(params)), engine.param_shardings))
    rng = np.random.default_rng(0)
    for index in range(count):
        engine.submit(SampleId(0, index), rng.integers(3, cfg.vocab_size, PROMPT), 0, config.rollout.max_new_tokens)
    done: dict[int, Sample] = {}
    while not engine.idle:
        done |= {sample.id.index: sample for sample in engine.tick().finished}
    return [done[index] for index in range(count)]


def trainer_logprobs(config: Config, cfg: ModelConfig, params: Any, samples: list[Sample]) -> np.ndarray:
    """The trainer's log-probs of the sampled tokens, f32[samples * tokens]; `params` are its f32 masters."""
    mesh = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    model = trainer_recipe(config, cfg, mesh, cfg.vocab_size).model
    rows = np.stack([np.concatenate([s.prompt_ids, s.out_ids]) for s in samples]).astype(np.int32)
    positions = np.tile(np.arange(rows.shape[1] - 1, dtype=np.int32), (len(rows), 1))
    arrays = {
        "tokens": rows[:, :-1],
        "targets": rows[:, 1:],
        "positions": positions,
        "segment_ids": np.ones_like(positions),
    }
    score = jax.jit(lambda params, arrays: model.logprobs(params, arrays)[0])
    return np.asarray(score(params, arrays))[:, PROMPT - 1 :].reshape(-1)


def measure(
    cfg: ModelConfig, params: Any, options: tuple[str, str, str], count: int, tokens: int
) -> tuple[np.ndarray, float]:
    """(engine minus trainer of each sampled token, the mean rounding of one forward pass in the trainer's type)."""
    config = config_of(*options, count, tokens)
    samples = samples_of(config, cfg, params, count)
    trainer = trainer_logprobs(config, cfg, params, samples)
    exact = trainer_logprobs(config_of("float32", "", "", count, tokens), cfg, params, samples)
    return np.concatenate([s.logprobs for s in samples]) - trainer, float(np.abs(trainer - exact).mean())


def held_bytes(cfg: ModelConfig, dtype: str, weights: str, kv: str) -> tuple[int, int]:
    """(projections, KV of one position); of `dtype` where nothing is asked for. Scales are one f32 an output channel."""
    layer = decoder.abstract_params(cfg)["layers"]
    shapes = [layer[name].shape for name in PROJECTIONS if name in layer]
    size = jnp.dtype(WEIGHTS[weights] or dtype).itemsize
    projections = sum(n * (d * f * size + (4 * f if weights else 0)) for n, d, f in shapes)
    return projections, 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * jnp.dtype(KV[kv] or dtype).itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="a Hugging Face folder")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    cfg, params = hf.load(Path(args.model)) if args.model else (MODEL, decoder.init_params(MODEL, 0))
    print(
        f"{'compute':10s}{'weights':9s}{'KV':9s}{'gap: mean':>11s}{'p99':>10s}{'largest':>10s}{'signed':>10s}"
        f"{'forward':>10s}{'gap / forward':>15s}{'projections MB':>16s}{'KV B/token':>12s}"
    )
    for dtype, weights, kv in OPTIONS:
        gap, forward = measure(cfg, params, (dtype, weights, kv), args.samples, args.tokens)
        projections, position = held_bytes(cfg, dtype, weights, kv)
        size = np.abs(gap)
        ratio = f"{size.mean() / forward:.2f}" if forward else "-"
        print(
            f"{dtype:10s}{weights or '-':9s}{kv or '-':9s}{size.mean():11.2e}{np.quantile(size, 0.99):10.2e}"
            f"{size.max():10.2e}{gap.mean():10.1e}{forward:10.2e}{ratio:>15s}{projections / 1e6:16.2f}{position:12d}",
            flush=True,
        )


if __name__ == "__main__":
    main()
