"""The engine's calls compiled for TPUs that are not here: that they compile, and what they hold on each chip.

    python -m dora_jax.bench.decode_tpu [--models=qwen3-8b,qwen3-32b] [--topologies=v5e,v5p,v6e,tpu7x]
                                          [--calls=decode,prefill] [--layers=0]

Needs libtpu (`pip install libtpu`, the version that this jax's `tpu` extra names) and no TPU. One tensor-parallel
instance over the smallest slice that holds the model, bf16, `rollout.attention = tpu`; the calls are those that an
engine of this configuration makes. A call that compiles has been neither run nor timed.
  weights, KV   what the call takes (GiB): prefill leaves out the head; the pool is donated, so it counts once
  scratch       what the call needs beside them, as the compiler says (on tpu7x it tiles the weights anew in each call)
  of HBM        all of it, as a share of the chip's memory
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time

SLOTS, PAGE, CONTEXT, PROMPT, STEPS, PREFILL, CHUNK = 32, 32, 4096, 1024, 8, 1024, 512
GIB = 2**30

QWEN3 = dict(vocab_size=151936, head_dim=128, n_kv_heads=8, rope_theta=1e6, tie_embeddings=False)
MODELS = {  # Hugging Face's config.json of the same names
    "qwen3-8b": dict(d_model=4096, n_layers=36, n_heads=32, d_ff=12288, **QWEN3),
    "qwen3-32b": dict(d_model=5120, n_layers=64, n_heads=64, d_ff=25600, **QWEN3),
}
VOCAB = 151669  # ids that Qwen3's tokenizer has
SLICES = {  # generation -> (devices a chip, the slice for each model); 8 KV heads allow 8 devices at most
    "v5e": (1, {"qwen3-8b": "v5e:2x2", "qwen3-32b": "v5e:2x4"}),
    "v5p": (1, {"qwen3-8b": "v5p:2x2x1", "qwen3-32b": "v5p:2x2x1"}),
    "v6e": (1, {"qwen3-8b": "v6e:2x2", "qwen3-32b": "v6e:2x2"}),
    "tpu7x": (2, {"qwen3-8b": "tpu7x:2x2x1", "qwen3-32b": "tpu7x:2x2x1"}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes on one device."""

    devices: int
    call: str
    weights: int
    kv: int
    scratch: int
    compile_s: float


def prepare() -> None:
    """libtpu reads these when it is loaded: no metadata server is asked, no TPU looked for, no lock taken on one."""
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4", TPU_WORKER_HOSTNAMES="localhost",
                      ALLOW_MULTIPLE_LIBTPU_LOAD="1", JAX_PLATFORMS="cpu")


def compile_calls(model: str, topology: str, names: list[str], layers: int):
    """Yields a Row per named call of an engine of this model on all devices of this topology."""

    import jax.numpy as jnp
    from jax.experimental import topologies

    from dora_jax.config import RolloutSection
    from dora_jax.models import decoder, sharding
    from dora_jax.rollout.engine import new_calls

    sizes = MODELS[model] | ({"n_layers": layers} if layers else {})
    cfg = decoder.new_config("qwen3", **sizes)
    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    section = RolloutSection(
        tensor=len(devices), slots=SLOTS, pages=SLOTS * CONTEXT // PAGE, page_size=PAGE, max_prompt_tokens=PROMPT,
        max_new_tokens=CONTEXT - PROMPT, decode_steps=STEPS, prefill_tokens=PREFILL, prefill_chunk=CHUNK,
        attention="tpu")
    mesh = sharding.make_mesh(devices, 1, 1, len(devices))
    calls = new_calls(cfg, section, mesh, seed=0, eos_ids=(1,), vocab_limit=VOCAB, dtype=jnp.bfloat16)
    programs = {name.split()[0]: program for name, program in calls.programs().items()}
    for name in names:
        call, args, static = programs[name]
        began = time.perf_counter()
        memory = call.trace(*args, **static).lower(lowering_platforms=("tpu",)).compile().memory_analysis()
        kv = memory.alias_size_in_bytes
        yield Row(devices=len(devices), call=name, weights=memory.argument_size_in_bytes - kv, kv=kv,
                  scratch=memory.temp_size_in_bytes, compile_s=time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--topologies", default=",".join(SLICES))
    parser.add_argument("--calls", default="decode,prefill")
    parser.add_argument("--layers", type=int, default=0, help="instead of the model's own; 0: all of them")
    args = parser.parse_args()
    prepare()
    from dora_jax.chips import CHIPS

    print(f"{SLOTS} slots, pages for {SLOTS} x {CONTEXT} tokens, {STEPS} decode steps a call, prefill {PREFILL} tokens")
    print(f"{'model':10s}{'slice':>13s}{'chips':>6s}{'call':>9s}{'weights':>9s}{'KV':>7s}{'scratch':>9s}{'of HBM':>8s}"
          f"{'compile s':>11s}")
    for model in args.models.split(","):
        for generation in args.topologies.split(","):
            per_chip, slices = SLICES[generation]
            for row in compile_calls(model, slices[model], args.calls.split(","), args.layers):
                print_row(model, slices[model], row, per_chip, CHIPS[generation].hbm_bytes)


def print_row(model: str, topology: str, row: Row, per_chip: int, hbm_bytes: float) -> None:
    weights, kv, scratch = (n * per_chip for n in (row.weights, row.kv, row.scratch))
    print(f"{model:10s}{topology:>13s}{row.devices // per_chip:6d}{row.call:>9s}{weights / GIB:9.2f}{kv / GIB:7.2f}"
          f"{scratch / GIB:9.2f}{(weights + kv + scratch) / hbm_bytes:8.0%}{row.compile_s:11.1f}", flush=True)


if __name__ == "__main__":
    main()
