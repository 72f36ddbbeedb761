"""The training step compiled for TPU slices, on a machine without one: what each chip holds, computes and sends.

    python -m dora_jax.bench.aot_train [--only=TEXT] [--slice=v5p-16 --config=configs/x.py]

Needs libtpu (the extra `aot`) and a minute or two a row. `state`: masters, moments and batch; `temporary`: gradients,
activations, gathered weights; both against the chip's memory. `useful`: the model's own share of the executed FLOPs
(the rest is recomputation and masked scores). Bytes sent are those of the results on one chip, an update; `compute`
and `sent` are floors at the chip's peak and at full bandwidth, so a step is compute-bound where the first is longer
and overlap works. It proves that the step compiles and fits, never that it is right or fast.
With --slice and --config the config's own trainer is compiled for a slice that it has to itself; the exit code is 1
where it does not fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any, NamedTuple

import jax

from dora_jax import config, flags, presets
from dora_jax.models.config import ModelConfig, new_config
from dora_jax.models.hf_config import read_config
from dora_jax.trainer import aot, expected

QWEN3 = {"vocab_size": 151936, "head_dim": 128, "n_kv_heads": 8, "rope_theta": 1e6, "tie_embeddings": False}
QWEN3_8B = new_config("qwen3", d_model=4096, n_layers=36, n_heads=32, d_ff=12288, **QWEN3)
QWEN3_32B = new_config("qwen3", d_model=5120, n_layers=64, n_heads=64, d_ff=25600, **QWEN3)


class Row(NamedTuple):
    name: str
    model: ModelConfig
    slice_name: str
    shape: aot.Shape
    changes: dict[str, Any]  # of the trainer's section
    dtype: str = "bfloat16"


def _row(name: str, model: ModelConfig, slice_name: str, changes: dict[str, Any] | None = None, **shape: int) -> Row:
    return Row(name, model, slice_name, aot.Shape(**shape), {"remat": "full", "micro_batches": 4} | (changes or {}))


ROWS = (
    _row("Qwen3-8B", QWEN3_8B, "v5e-64", fsdp=16, tensor=4, rows=64, tokens=4096),
    _row("Qwen3-8B", QWEN3_8B, "v5p-16", fsdp=8, rows=32, tokens=4096),
    _row("Qwen3-32B", QWEN3_32B, "v5p-128", fsdp=32, tensor=2, rows=128, tokens=4096),
    _row("Qwen3-8B, long rows", QWEN3_8B, "v5e-64", fsdp=8, tensor=4, context=2, rows=32, tokens=16384),
    _row("Qwen3-8B, moments in host memory", QWEN3_8B, "v5p-16", {"optimizer_memory": "host"}, fsdp=8, rows=32, tokens=4096),
    _row("Qwen3-8B, nothing recomputed", QWEN3_8B, "v5e-64", {"remat": "none"}, fsdp=16, tensor=4, rows=64, tokens=4096),
)
COLUMNS = f"{'model':34s}{'slice':9s}{'mesh':18s}{'batch':14s}{'state':>7s}{'temp.':>7s}{'of GiB':>8s}" \
          f"{'TFLOP':>7s}{'useful':>8s}{'compute':>9s}{'sent':>8s}  a chip and update, GB in runs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name or slice contains this")
    parser.add_argument("--slice", default="", help="compile a config's trainer for this slice instead")
    parser.add_argument("--config", default="", help="with --slice: path.py[:argument]")
    args = parser.parse_args()
    if bool(args.slice) != bool(args.config):
        parser.error("--slice and --config go together")
    jax.config.update("jax_platforms", "cpu")  # libtpu only compiles here: it must not look for chips
    rows = [_of_config(args.config, args.slice)] if args.slice else [r for r in ROWS if args.only in r.name + r.slice_name]
    print(COLUMNS, flush=True)
    fits = [run(row) for row in rows]
    return 0 if all(fits) or not args.slice else 1


def run(row: Row) -> bool:
    """Prints the row; whether it fits."""
    s = row.shape
    mesh = " ".join(f"{axis}{size}" for axis, size in
                    (("data", s.data), ("fsdp", s.fsdp), ("ctx", s.context), ("tp", s.tensor)) if size > 1)
    print(f"{row.name:34s}{row.slice_name:9s}{mesh or '1':18s}{f'{s.rows} x {s.tokens}':14s}", end="", flush=True)
    section = presets.on_cpu(config.TrainerSection(pack_tokens=s.tokens, **row.changes))
    try:
        c = aot.compile_update(row.model, section, row.slice_name, s, row.dtype)
    except ValueError as refusal:
        print(f"  {refusal}", flush=True)
        return False
    useful = expected.model_flops(row.model, [s.tokens] * s.rows) / c.flops
    sent = ", ".join(f"{kind} {t.bytes / 1e9:.1f} in {t.runs}" for kind, t in sorted(c.collectives.items()))
    host = f"; host {c.host_bytes / aot.GIB:.2f} GiB" if c.host_bytes else ""
    print(f"{c.state_bytes / aot.GIB:7.2f}{c.temporary_bytes / aot.GIB:7.2f}{c.chip.hbm_bytes / aot.GIB:8.1f}"
          f"{c.flops_per_chip / 1e12:7.0f}{useful:8.0%}{c.compute_s:8.2f}s{c.transfer_s:7.2f}s  {sent}{host}", flush=True)
    return True


def _of_config(spec: str, slice_name: str) -> Row:
    """The trainer of a config file, on a slice of its own."""
    found = config.from_config_dict(flags.load_file(spec))
    t, (_, chips) = found.trainer, aot.parse(slice_name)
    unit = t.data * t.tensor * t.context
    fsdp = t.fsdp if t.fsdp > 0 else max(chips // unit, 1)
    longest = found.rollout.max_prompt_tokens + found.rollout.max_new_tokens - 1
    samples = found.orchestrator.groups_per_step // t.updates * found.orchestrator.group_size
    rows = t.rows or -(-samples // (t.pack_tokens // longest))
    ways = t.micro_batches * t.data * fsdp
    shape = aot.Shape(data=t.data, fsdp=fsdp, tensor=t.tensor, context=t.context, rows=-(-rows // ways) * ways,
                      tokens=t.pack_tokens)
    changes = {"remat": t.remat, "micro_batches": t.micro_batches, "optimizer_memory": t.optimizer_memory}
    return Row(spec, read_config(found.model.path), slice_name, shape, changes, found.model.dtype)


if __name__ == "__main__":
    sys.exit(main())
