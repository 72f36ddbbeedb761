"""config.json of a Hugging Face folder <-> ModelConfig. Standard library only, so that it runs before JAX is imported.

Consumes and produces both spellings: that of transformers 4 (rope_theta, rope_scaling, torch_dtype) and that of
transformers 5 (rope_parameters, dtype). Law: what the decoder does not compute is refused by name, never ignored.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dora_jax.models.config import FAMILIES, Family, ModelConfig, RopeScaling

# Switches that would change the function; the value here is the only one the decoder computes.
FIXED = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
SCORER = "ForSequenceClassification"  # ends the class name of a model whose head is a score, not a vocabulary
MAX_TEXT_BYTES = 128 << 20  # of a JSON file, a tokenizer, a template; the largest tokenizer.json in use has 33 MB
JSON_NAMES = {list: "array", dict: "object", bool: "true or false"}
QWEN3_HEAD_DIM = 128  # Qwen3's own default where config.json leaves head_dim out


def read_text(file: Path) -> str:
    """All of it; ValueError names the file when it is missing, larger than such a file ever is, or no text."""
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    if (size := file.stat().st_size) > MAX_TEXT_BYTES:
        raise ValueError(f"{file} holds {size >> 20} MiB; more than {MAX_TEXT_BYTES >> 20} MiB are not read")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in this file; ValueError names the file when it is missing, too large or malformed."""
    text = read_text(file)
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{file} is nested too deep to be read") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a JSON {type(value).__name__}, not an object")
    return value


def read_config(path: str | Path, *, scorer: bool = False) -> ModelConfig:
    """ModelConfig of this folder; ValueError names the file and the field that the decoder cannot take.

    scorer: of a reward model, which has no head over the vocabulary (here: it counts as tied).
    """
    file = Path(path) / "config.json"
    raw = read_json(file)
    known = _family(raw, file, scorer)
    for name, value in FIXED.items():
        if raw.get(name, value) not in (value, None):
            raise ValueError(f"{file} has {name}={raw[name]!r}; the decoder computes {name}={value!r} only")
    if set(_of(raw, "layer_types", list, file) or ()) - {"full_attention"}:
        raise ValueError(f"{file} has layer_types other than full_attention; the decoder attends in full only")
    theta, scaling = _rope(raw, file)
    d_model, n_heads = _size(raw, "hidden_size", file), _size(raw, "num_attention_heads", file)
    head_dim = QWEN3_HEAD_DIM if known.model_type == "qwen3" else d_model // n_heads
    sizes = {
        "vocab_size": _size(raw, "vocab_size", file),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_layers": _size(raw, "num_hidden_layers", file),
        "n_kv_heads": _size(raw, "num_key_value_heads", file, n_heads),
        "head_dim": _size(raw, "head_dim", file, head_dim),
        "d_ff": _size(raw, "intermediate_size", file),
        "max_position": _size(raw, "max_position_embeddings", file),
    }
    tied, norm_eps = _of(raw, "tie_word_embeddings", bool, file), _number(raw, "rms_norm_eps", file)
    try:
        return ModelConfig(
            family=known.model_type,
            qk_norm=known.qk_norm,
            qkv_bias=known.qkv_bias,
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=scorer or bool(tied),
            norm_eps=1e-6 if norm_eps is None else norm_eps,
            **sizes,
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def config_json(cfg: ModelConfig, dtype: str, base: dict[str, Any]) -> dict[str, Any]:
    """The object to write: `base` (a source's config.json, or empty) with every field of `cfg`, in both spellings."""
    (architecture,) = (known.architecture for known in FAMILIES if known.model_type == cfg.family)
    scaling = _scaling_json(cfg.rope_scaling)
    return {
        **base,
        "architectures": [architecture],
        "model_type": cfg.family,
        "hidden_act": "silu",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.d_ff,
        "rms_norm_eps": cfg.norm_eps,
        "max_position_embeddings": cfg.max_position,
        "tie_word_embeddings": cfg.tie_embeddings,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": cfg.rope_theta},
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _family(raw: dict, file: Path, scorer: bool) -> Family:
    listed = _of(raw, "architectures", list, file) or []
    endings = ("ForCausalLM", SCORER) if scorer else ("ForCausalLM",)
    names = {known: [known.architecture.replace("ForCausalLM", ending) for ending in endings] for known in FAMILIES}
    for known, its_own in names.items():
        if raw.get("model_type") == known.model_type and listed in ([], *([name] for name in its_own)):
            return known
    names = ", ".join(name for its_own in names.values() for name in its_own)
    raise ValueError(f"{file} names the architecture {(listed or [raw.get('model_type')])[0]!r}; known: {names}")


def _of(raw: dict, name: str, kind: type, file: Path) -> Any:
    """The value of a field that may be left out (None)."""
    value = raw.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{file} has {name}={value!r:.60}; a JSON {JSON_NAMES[kind]} is needed")
    return value


def _size(raw: dict, name: str, file: Path, absent: int | None = None) -> int:
    value = absent if raw.get(name) is None else raw[name]
    if type(value) is not int or value < 1:  # a bool is an int too
        raise ValueError(f"{file} has {name}={value!r:.60}; a whole number of at least 1 is needed")
    return value


def _number(raw: dict, name: str, file: Path) -> float | None:
    value = raw.get(name)
    if value is not None and not (type(value) in (int, float) and math.isfinite(value)):
        raise ValueError(f"{file} has {name}={value!r:.60}; a number is needed")
    return None if value is None else float(value)


def _rope(raw: dict, file: Path) -> tuple[float, RopeScaling | None]:
    """Base and scaling; where both spellings stand in one file they have to agree."""
    new, old = (_of(raw, name, dict, file) or {} for name in ("rope_parameters", "rope_scaling"))
    thetas = {theta for told in (raw, new) if (theta := _number(told, "rope_theta", file)) is not None}
    scalings = [_scaling(entry, raw, file) for entry in (new, old) if entry]
    if len(thetas) > 1 or len(set(scalings)) > 1:
        raise ValueError(f"{file} gives rope_parameters that disagree with its rope_theta or rope_scaling")
    theta = thetas.pop() if thetas else 10000.0  # the default of all three families
    return theta, scalings[0] if scalings else None


def _scaling(entry: dict, raw: dict, file: Path) -> RopeScaling | None:
    kind = entry.get("rope_type") or entry.get("type") or "default"
    if entry.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{file} has partial_rotary_factor={entry['partial_rotary_factor']!r}; heads rotate whole")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{file} asks for rope scaling {kind!r}; known: default, llama3")
    factors = {name: _number(entry, name, file) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    if lacking := [name for name, value in factors.items() if value is None]:
        raise ValueError(f"{file} asks for rope scaling llama3 without {lacking[0]}")
    original = _size(entry, "original_max_position_embeddings", file, raw.get("max_position_embeddings"))
    return RopeScaling(**factors, original_max_position=original)


def _scaling_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
