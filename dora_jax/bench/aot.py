"""A run's programs compiled for TPU slices, on a machine without one: what each chip holds, computes and sends.

    python -m dora_jax.bench.aot [--only=TEXT] [--programs=train,publish,decode,narrow,verify,prefill,read,write]
    [--layers=N]

Needs libtpu (the extra `aot`) and a minute or more a row. Each row is a configuration that names its slice, resolved by
the presets; its programs are those that `python -m dora_jax.train` would compile there (dora_jax/aot/). `model` is
XLA's own estimate of the cycles at the chip's clock. It counts no kernel: each has a line of its own and is charged
twice the larger of FLOPs over the chip's peak and bytes over its bandwidth. Nor does it count what is sent, which
overlap has to hide. It proves that the programs compile and fit, never that they are right or fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from dora_jax import aot as compilation
from dora_jax.aot import roles
from dora_jax.bench import harness
from dora_jax.config import Config
from dora_jax.costs import update as update_costs
from dora_jax.models.families import KNOWN
from dora_jax.models.families.config import ModelConfig
from dora_jax.plan import presets

VOCAB = 151669  # ids that Qwen3's tokenizer has


class AotCase(NamedTuple):
    name: str
    config: Config
    programs: tuple[str, ...]


def _case(
    what: str, role: str, model: str, slice_name: str, rollout: dict[str, Any], trainer: dict[str, Any]
) -> AotCase:
    """The slice is the role's own: the other role is elsewhere."""
    c = Config()
    cluster = dataclasses.replace(c.cluster, launcher="ray", trainer_slice=slice_name, instance_slice=slice_name)
    config = dataclasses.replace(c, model=dataclasses.replace(c.model, size=model), cluster=cluster,
                                 rollout=dataclasses.replace(c.rollout, max_prompt_tokens=1024, **rollout),
                                 trainer=dataclasses.replace(c.trainer, **trainer))  # fmt: skip
    return AotCase(f"{model} {slice_name}{what}", config, roles.PROGRAMS[role])


def _training(
    what: str, model: str, slice_name: str, *, rows: int, tokens: int = 4096, serving: int = 4, **trainer: Any
) -> AotCase:
    """A trainer that has the slice to itself, and instances of `serving` devices elsewhere."""
    section = {"remat": "full", "micro_batches": 4, "rows": rows, "pack_tokens": tokens} | trainer
    rollout = {"tensor": serving, "max_new_tokens": tokens - 1024}
    return _case(what, roles.TRAINER, model, slice_name, rollout, section)


def _decoding(
    what: str, model: str, slice_name: str, *, slots: int = 32, context: int = 4096, **rollout: Any
) -> AotCase:
    section = {"slots": slots, "max_new_tokens": context - 1024} | rollout
    name = f" {slots} x {context}{what}"
    return _case(name, roles.INSTANCE, model, slice_name, section, {"pack_tokens": context})


_LARGE: dict[str, Any] = {"micro_batches": 1, "serving": 32}
_BY_ALL_TO_ALL: dict[str, Any] = {"fsdp": 4, "expert": 64, "expert_dispatch": "all_to_all"}
_HOST = ", moments in host memory"
ROWS = (
    _training("", "Qwen3-8B", "v5e-64", fsdp=16, tensor=4, rows=64),
    _training("", "Qwen3-8B", "v5p-16", fsdp=8, rows=32),
    _training("", "Qwen3-32B", "v5p-128", fsdp=32, tensor=2, rows=128),
    _training(", long rows", "Qwen3-8B", "v5e-64", fsdp=8, tensor=4, context=2, rows=32, tokens=16384),
    _training(_HOST, "Qwen3-8B", "v5p-16", fsdp=8, rows=32, optimizer_memory="host"),
    _training(", nothing recomputed", "Qwen3-8B", "v5e-64", fsdp=16, tensor=4, rows=64, remat="none"),
    *(_decoding("", model, slice_name, tensor=tensor) for model, slice_name, tensor in (
        ("Qwen3-8B", "v5e-4", 4), ("Qwen3-8B", "v5p-8", 4), ("Qwen3-8B", "v6e-4", 4), ("Qwen3-8B", "tpu7x-8", 8),
        ("Qwen3-32B", "v5e-8", 8), ("Qwen3-32B", "v5p-8", 4), ("Qwen3-32B", "v6e-4", 4), ("Qwen3-32B", "tpu7x-8", 8))),
    *(_decoding("", "Qwen3-8B", slice_name, slots=256, context=32768, tensor=8)
      for slice_name in ("v5e-8", "v6e-8", "tpu7x-8")),
    _decoding(", drafts and a narrow call", "Qwen3-8B", "v5e-4", tensor=4, drafts=7, narrow_rows=4),
    # mixtures: experts over the chips, whole
    _training("", "Qwen3-30B-A3B", "v5p-16", fsdp=1, expert=8, rows=32, moments="bfloat16"),
    _training("", "Qwen3-30B-A3B", "v6e-64", fsdp=8, expert=8, rows=256),
    _training("", "DeepSeek-V3", "v5p-512", rows=256, fsdp=16, expert=16, **_LARGE),
    _training(", tokens by all-to-all", "DeepSeek-V3", "v5p-512", rows=256, **_BY_ALL_TO_ALL, **_LARGE),
    _training(_HOST, "DeepSeek-V3", "v5p-256", tensor=2, rows=64, optimizer_memory="host",
              **_BY_ALL_TO_ALL | {"fsdp": 1}, **_LARGE),
    _training("", "LongCat-Flash", "v5p-512", rows=256, **_BY_ALL_TO_ALL, **_LARGE),
    *(_decoding("", model, slice_name, slots=64, tensor=chips, expert=chips) for model, slice_name, chips in (
        ("Qwen3-30B-A3B", "v5p-8", 4), ("Qwen3-30B-A3B", "v6e-8", 8), ("DeepSeek-V3", "v5p-128", 64),
        ("LongCat-Flash", "v5p-128", 64))),
)  # fmt: skip


def aot(only="", programs=(), layers=0) -> Iterator[str]:
    """Exits with 1 where a row does not fit."""
    fits = True
    for row in ROWS:
        chosen = tuple(name for name in row.programs if not programs or name in programs)
        if only not in row.name or not chosen:
            continue
        model = KNOWN[row.config.model.size]
        config, _ = presets.resolve(
            row.config, presets.machines(row.config), model
        )  # with the pages of the whole model
        if layers:
            model = dataclasses.replace(model, n_layers=layers)
        yield f"{row.name}{f', {layers} layers' if layers else ''}"
        try:
            done = lambda one: print(*_lines(one, config, model), sep="\n", flush=True)
            for role in compilation.compile_roles(
                config, model, vocab_limit=VOCAB, eos_ids=(1,), only=chosen, done=done
            ):
                yield roles.describe_role(role)
        except roles.DoesNotFit as refusal:
            yield f"  {refusal}"
            fits = False
    if not fits:
        raise SystemExit(1)


def _lines(one: roles.Compiled, config: Config, model: ModelConfig) -> list[str]:
    lines = roles.describe(one)
    if one.name == "train":
        t = config.trainer
        chips = t.data * t.fsdp * t.tensor * t.context * t.expert
        useful = update_costs.model_flops(model, [t.pack_tokens] * t.rows) / chips
        seconds = one.model_s + sum(kernel.seconds for kernel in one.kernels)
        lines.append(
            f"    {useful / one.flops:.0%} of the FLOPs are the model's own; model and kernels {seconds:.2f} s, "
            f"sends {sum(kind.bytes for kind in one.sent.values()) / 1e9:.0f} GB"
        )
    return lines


if __name__ == "__main__":
    harness.run(aot)
