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
import sys
from typing import Any, NamedTuple

from dora_jax import aot
from dora_jax.aot import roles as aot_roles
from dora_jax.bench import harness
from dora_jax.config import Config
from dora_jax.costs import update as update_costs
from dora_jax.models.families import KNOWN
from dora_jax.models.families.config import ModelConfig
from dora_jax.plan import presets

VOCAB = 151669  # ids that Qwen3's tokenizer has
TRAIN = aot_roles.PROGRAMS[aot_roles.TRAINER]
ROLLOUT = aot_roles.PROGRAMS[aot_roles.INSTANCE]


class AotCase(NamedTuple):
    name: str
    config: Config
    programs: tuple[str, ...]


def _training(
    what: str, model: str, slice_name: str, *, rows: int, tokens: int, serving: int = 4, **trainer: Any
) -> AotCase:
    """A trainer that has the slice to itself, and instances of `serving` devices elsewhere."""
    section: dict[str, Any] = {"remat": "full", "micro_batches": 4, "rows": rows, "pack_tokens": tokens} | trainer
    config = Config()
    return AotCase(
        f"{model} {slice_name}{what}",
        _on(
            config,
            model,
            slice_name,
            trainer=dataclasses.replace(config.trainer, **section),
            rollout=dataclasses.replace(
                config.rollout, tensor=serving, max_prompt_tokens=1024, max_new_tokens=tokens - 1024
            ),
        ),
        TRAIN,
    )


def _decoding(
    what: str, model: str, slice_name: str, *, slots: int = 32, context: int = 4096, tensor: int = 4, **rollout: Any
) -> AotCase:
    section = {"slots": slots, "tensor": tensor, "max_prompt_tokens": 1024, "max_new_tokens": context - 1024} | rollout
    config = Config()
    return AotCase(
        f"{model} {slice_name} {slots} x {context}{what}",
        _on(
            config,
            model,
            slice_name,
            rollout=dataclasses.replace(config.rollout, **section),
            trainer=dataclasses.replace(config.trainer, pack_tokens=context),
        ),
        ROLLOUT,
    )


def _on(config: Config, model: str, slice_name: str, **sections: Any) -> Config:
    """The slice is the role's own: the other role is elsewhere."""
    cluster = dataclasses.replace(config.cluster, launcher="ray", trainer_slice=slice_name, instance_slice=slice_name)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, size=model), cluster=cluster, **sections)


_LARGE = {"micro_batches": 1, "serving": 32}
_DISPATCHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {"fsdp": 16, "expert": 16}),
    (", tokens by all-to-all", {"fsdp": 4, "expert": 64, "expert_dispatch": "all_to_all"}),
)
ROWS = (
    _training("", "Qwen3-8B", "v5e-64", fsdp=16, tensor=4, rows=64, tokens=4096),
    _training("", "Qwen3-8B", "v5p-16", fsdp=8, rows=32, tokens=4096),
    _training("", "Qwen3-32B", "v5p-128", fsdp=32, tensor=2, rows=128, tokens=4096),
    _training(", long rows", "Qwen3-8B", "v5e-64", fsdp=8, tensor=4, context=2, rows=32, tokens=16384),
    _training(", moments in host memory", "Qwen3-8B", "v5p-16", fsdp=8, rows=32, tokens=4096, optimizer_memory="host"),
    _training(", nothing recomputed", "Qwen3-8B", "v5e-64", fsdp=16, tensor=4, rows=64, tokens=4096, remat="none"),
    *(
        _decoding("", model, slice_name, tensor=tensor)
        for model, slice_name, tensor in (
            ("Qwen3-8B", "v5e-4", 4),
            ("Qwen3-8B", "v5p-8", 4),
            ("Qwen3-8B", "v6e-4", 4),
            ("Qwen3-8B", "tpu7x-8", 8),
            ("Qwen3-32B", "v5e-8", 8),
            ("Qwen3-32B", "v5p-8", 4),
            ("Qwen3-32B", "v6e-4", 4),
            ("Qwen3-32B", "tpu7x-8", 8),
        )
    ),
    *(
        _decoding("", "Qwen3-8B", slice_name, slots=256, context=32768, tensor=8)
        for slice_name in ("v5e-8", "v6e-8", "tpu7x-8")
    ),
    _decoding(", drafts and a narrow call", "Qwen3-8B", "v5e-4", tensor=4, drafts=7, narrow_rows=4),
    # mixtures: experts over the chips, whole
    _training("", "Qwen3-30B-A3B", "v5p-16", fsdp=1, expert=8, rows=32, tokens=4096, moments="bfloat16"),
    _training("", "Qwen3-30B-A3B", "v6e-64", fsdp=8, expert=8, rows=256, tokens=4096),
    *(_training(what, "DeepSeek-V3", "v5p-512", rows=256, tokens=4096, **_LARGE, **more) for what, more in _DISPATCHES),
    _training(
        ", moments in host memory",
        "DeepSeek-V3",
        "v5p-256",
        fsdp=1,
        expert=64,
        tensor=2,
        expert_dispatch="all_to_all",
        rows=64,
        tokens=4096,
        optimizer_memory="host",
        **_LARGE,
    ),
    _training("", "LongCat-Flash", "v5p-512", rows=256, tokens=4096, **_LARGE, **_DISPATCHES[1][1]),
    *(
        _decoding("", model, slice_name, slots=64, tensor=chips, expert=chips)
        for model, slice_name, chips in (
            ("Qwen3-30B-A3B", "v5p-8", 4),
            ("Qwen3-30B-A3B", "v6e-8", 8),
            ("DeepSeek-V3", "v5p-128", 64),
            ("LongCat-Flash", "v5p-128", 64),
        )
    ),
)


def main() -> int:
    args = harness.flags(__doc__, only="", programs=(), layers=0)
    fits = [run(row, args.layers, args.programs) for row in ROWS if args.only in row.name]
    return 0 if all(fits) else 1


def run(row: AotCase, layers: int, asked: tuple[str, ...]) -> bool:
    """Prints the row; whether it fits."""
    programs = tuple(name for name in row.programs if not asked or name in asked)
    if not programs:
        return True
    model = KNOWN[row.config.model.size]
    config, _ = presets.resolve(row.config, presets.machines(row.config), model)  # with the pages of the whole model
    if layers:
        model = dataclasses.replace(model, n_layers=layers)
    print(f"{row.name}{f', {layers} layers' if layers else ''}", flush=True)
    try:
        for role in aot.compile_roles(
            config,
            model,
            vocab_limit=VOCAB,
            eos_ids=(1,),
            only=programs,
            done=lambda one: print(*_lines(one, config, model), sep="\n", flush=True),
        ):
            print(aot_roles.describe_role(role), flush=True)
    except aot_roles.DoesNotFit as refusal:
        print(f"  {refusal}", flush=True)
        return False
    return True


def _lines(one: aot_roles.Compiled, config: Config, model: ModelConfig) -> list[str]:
    lines = aot_roles.describe(one)
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
    sys.exit(main())
