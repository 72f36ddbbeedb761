"""What 8 bits cost in log-prob: samples of engines with narrow weights or KV, scored again in f32 as the trainer does.

    python -m dora_jax.bench.drift [--model=FOLDER] [--samples=32] [--tokens=128]

Without a folder, a small model with random weights: those are harder on rounding than trained ones of this size.
  drift        engine log-prob minus the trainer's, of the sampled tokens: mean and largest size, and mean
  bytes        of the projections and of the KV of one position, as held
The row without options is the rounding of f32 itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax import devices
from dora_jax.bench.decode import MODEL
from dora_jax.config import Config, RolloutSection
from dora_jax.models import decoder, hf, sharding
from dora_jax.models.logits import target_logprobs
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.rollout.quantize import KV, PROJECTIONS, WEIGHTS
from dora_jax.runtime.build import engine_of
from dora_jax.types import Sample, SampleId

PROMPT = 32
OPTIONS = (("", ""), ("int8", ""), ("float8", ""), ("", "float8"), ("int8", "float8"), ("float8", "float8"))


def samples_of(cfg: decoder.ModelConfig, params, weights: str, kv: str, count: int, tokens: int) -> list[Sample]:
    section = RolloutSection(slots=count, pages=count * (-(-(PROMPT + tokens) // 16) + 1), max_prompt_tokens=PROMPT,
                             max_new_tokens=tokens, prefill_tokens=512, weights=weights, kv=kv)
    engine = engine_of(devices.filled(Config(rollout=section)), cfg, sharding.make_mesh(jax.devices()[:1], 1, 1, 1))
    engine.load(0, jax.device_put(decoder.serving_layout(params), engine.param_shardings))
    rng = np.random.default_rng(0)
    for index in range(count):
        engine.submit(SampleId(0, index), rng.integers(3, cfg.vocab_size, PROMPT), 0, tokens)
    done = {}
    while not engine.idle:
        done |= {sample.id.index: sample for sample in engine.tick().finished}
    return [done[index] for index in range(count)]


def drift_of(cfg: decoder.ModelConfig, params, samples: list[Sample]) -> np.ndarray:
    """Engine minus trainer, f32[samples * tokens]."""
    rows = np.stack([np.concatenate([s.prompt_ids, s.out_ids]) for s in samples])
    positions = np.tile(np.arange(rows.shape[1]), (len(rows), 1))

    @jax.jit
    def score(params, rows, positions):
        attend = segment_attention(jnp.zeros_like(positions), positions)
        hidden = decoder.forward(cfg, params, rows, positions, attend)
        return target_logprobs(cfg, params, hidden[:, :-1], rows[:, 1:], vocab_limit=cfg.vocab_size)[0]

    trainer = np.asarray(score(params, jnp.asarray(rows), jnp.asarray(positions)))[:, PROMPT - 1 :]
    return (np.stack([s.logprobs for s in samples]) - trainer).reshape(-1)


def held_bytes(cfg: decoder.ModelConfig, weights: str, kv: str) -> tuple[int, int]:
    """(projections, KV of one position); f32 where nothing is asked for. Scales are one f32 an output channel."""
    layer = decoder.abstract_params(cfg)["layers"]
    shapes = [layer[name].shape for name in PROJECTIONS]
    size = jnp.dtype(WEIGHTS[weights] or jnp.float32).itemsize
    projections = sum(n * (d * f * size + (4 * f if weights else 0)) for n, d, f in shapes)
    return projections, 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * jnp.dtype(KV[kv] or jnp.float32).itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="a Hugging Face folder")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    cfg, params = hf.load(Path(args.model)) if args.model else (MODEL, decoder.init_params(MODEL, 0))
    print(f"{'weights':9s}{'KV':9s}{'mean |drift|':>14s}{'largest':>10s}{'mean':>11s}{'projections MB':>16s}"
          f"{'KV B/token':>12s}")
    for weights, kv in OPTIONS:
        drift = drift_of(cfg, params, samples_of(cfg, params, weights, kv, args.samples, args.tokens))
        projections, position = held_bytes(cfg, weights, kv)
        print(f"{weights or 'f32':9s}{kv or 'f32':9s}{np.abs(drift).mean():14.2e}{np.abs(drift).max():10.2e}"
              f"{drift.mean():11.1e}{projections / 1e6:16.2f}{position:12d}", flush=True)


if __name__ == "__main__":
    main()
