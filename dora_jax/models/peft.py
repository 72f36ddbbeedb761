"""Adapters as Hugging Face PEFT folders: adapter_config.json beside adapter_model.safetensors.

Consumes such a folder, or an adapter of lora.py; a matrix's tensor is named as its own in the model's folder, behind
`base_model.model.`. Laws: a folder that asks for what the decoder does not compute is refused by a sentence that names
the field; no tensor of a folder is passed over; a folder appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

from dora_jax.models import decoder, lora
from dora_jax.models.families import TEXT, family
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.hf import check_vacant
from dora_jax.models.hf_config import ADAPTER, read_json
from dora_jax.models.lora_config import Lora

CONFIG, TENSORS = ADAPTER, "adapter_model.safetensors"
PREFIX = "base_model.model."
TEXT_PREFIX = f"{PREFIX}model.language_model."  # where the base is more than a text model
# Fields that change no number, or that are read here; any other one has to be empty
READ: tuple[str, ...] = ("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "lora_dropout")
READ += ("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version")
READ += ("layers_pattern", "megatron_core", "qalora_group_size", "target_parameters")  # see `check` of the last
PLAIN: dict[str, tuple[Any, ...]] = {  # what the decoder computes of the others
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # ways to begin that leave the base as it is; pissa, olora, corda and others change it
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
NOTHING: tuple[object, ...] = (None, False, [], {}, "")


def check(path: str | Path, shape: Lora) -> None:
    """ValueError names the field of the folder that differs from `shape`, or that the decoder does not compute."""
    file = Path(path) / CONFIG
    if not file.is_file():
        raise ValueError(f"{path} holds no {CONFIG}, so it is no PEFT folder")
    raw = read_json(file)
    for field in {**PLAIN, **raw}:
        computed = PLAIN.get(field, NOTHING)
        if field not in READ and raw.get(field, None if field == "peft_type" else computed[0]) not in computed:
            only = "adapters without it" if computed is NOTHING else f"{computed[0]!r}"
            raise ValueError(f"{file} has {field}={raw.get(field)!r:.60}; the decoder computes {only} only")
    for parameter in raw.get("target_parameters") or []:  # of experts that are one tensor: no matrix has this name here
        if not str(parameter).endswith(".weight"):
            raise ValueError(f"{file} has target_parameters={parameter!r}; only adapters of matrices are read")
    for field, ours, value in (("r", "lora.rank", shape.rank), ("lora_alpha", "lora.alpha", shape.alpha)):
        if raw.get(field) != value:
            raise ValueError(f"{file} has {field}={raw.get(field)!r:.60}, and {ours} is {value:g}: they must be equal")


def load(path: str | Path, cfg: ModelConfig, shape: Lora, seed: int) -> lora.Adapter:
    """The folder's adapter, f32 and stacked, on the host. A matrix that the folder leaves out has a fresh adapter of
    this seed, which changes nothing. ValueError: a sentence."""
    check(path, shape)
    if "attention" in shape.targets and any(tensor.rows for tensor in family(cfg.family).tensors.values()):
        raise ValueError(f"lora.path: {path} has adapters of tensors that {cfg.family} holds in several matrices")
    file = Path(path) / TENSORS
    try:
        tensors = {name.replace(TEXT_PREFIX, f"{PREFIX}model."): x for name, x in load_file(file).items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{file} is missing or not a safetensors file: {error}") from error
    adapter = {
        stack: {name: {x: np.array(factor) for x, factor in factors.items()} for name, factors in layers.items()}
        for stack, layers in lora.init(cfg, shape, seed).items()
    }
    for name, target in _places(cfg, adapter):
        if name not in tensors:
            continue
        value = tensors.pop(name).astype(np.float32).T
        if value.shape != target.shape:
            raise ValueError(f"{file} holds {name} of shape {value.T.shape}; the model implies {target.T.shape}")
        target[...] = value
    if tensors:
        raise ValueError(f"{file} holds {min(tensors)}, which is no matrix of lora.targets={','.join(shape.targets)}")
    return adapter


def save(path: str | Path, cfg: ModelConfig, shape: Lora, adapter: lora.Adapter, base: str, dtype: Any = None) -> None:
    """Writes a stacked adapter as a folder; base: the folder of the weights beside it. ValueError if `path` already
    holds something, or peft would not read it."""
    path = Path(path)
    check_vacant(path)
    if "attention" in shape.targets and any(tensor.rows for tensor in family(cfg.family).tensors.values()):
        raise ValueError(
            f"lora.targets: peft has no adapters of the attention of {cfg.family}, several of whose matrices are one "
            "tensor; the merged weights can be exported"
        )
    if cfg.experts and "experts" in shape.targets:
        fused = any(tensor.half is not None for tensor in family(cfg.family).tensors.values())
        why = "some of which compute nothing" if cfg.experts.zero else "which are one tensor" if fused else ""
        if why:
            raise ValueError(
                f"lora.targets: peft has no adapters of the experts of {cfg.family}, {why}; the merged weights can be "
                "exported"
            )
    host = {
        stack: {name: {x: np.asarray(factor) for x, factor in factors.items()} for name, factors in layers.items()}
        for stack, layers in adapter.items()
    }
    tensors = {name: np.ascontiguousarray(value.T, dtype or np.float32) for name, value in _places(cfg, host)}
    modules = {name.removeprefix(PREFIX).split(".lora_")[0].split(".", 3)[3] for name in tensors}
    more = (Path(base) / "config.json").is_file() and read_json(Path(base) / "config.json").get("model_type") in TEXT
    if more:
        tensors = {name.replace(f"{PREFIX}model.", TEXT_PREFIX): x for name, x in tensors.items()}
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # what a killed save left
    part.mkdir(parents=True)
    save_file(tensors, part / TENSORS, metadata={"format": "pt"})
    (part / TENSORS).chmod(part.stat().st_mode & 0o666)  # safetensors lets the owner alone read
    # peft takes gate_proj, up_proj and down_proj of a mixture for those of its experts, wherever they stand: of the
    # other feed-forwards it is given the parameters
    beside = {name for name in modules if cfg.experts and name.startswith("mlp") and ".experts." not in name}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "target_modules": sorted({name.split(".")[-1] for name in modules - beside}),
        "exclude_modules": r"(?!.*language_model\.).*" if more else None,  # a vision tower has matrices of these names
        "target_parameters": sorted(f"{name}.weight" for name in beside) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    part.replace(path)


def _places(cfg: ModelConfig, adapter: Any) -> Iterator[tuple[str, np.ndarray]]:
    """(name on disk, where its transpose lies) of every factor of every layer, and expert, of an adapter on the
    host."""
    tensors = family(cfg.family).tensors
    for key, stack in decoder.stacks(cfg).items():
        for name, factors in adapter[key].items():
            module = tensors[name].name.removesuffix(".weight")
            for x, factor in factors.items():
                for layer, number in enumerate(stack.layers):
                    place = f"{PREFIX}model.layers.{number}.{module}.lora_{x.upper()}.weight"
                    if not tensors[name].per_expert:
                        yield place, factor[layer]
                    for e in range(factor.shape[1]) if tensors[name].per_expert else ():
                        yield place.format(e=e), factor[layer, e]
