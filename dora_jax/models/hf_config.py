"""config.json of a Hugging Face folder <-> ModelConfig. Standard library only, so that it runs before JAX is imported.

Consumes and produces both spellings: that of transformers 4 (rope_theta, rope_scaling, torch_dtype) and that of
transformers 5 (rope_parameters, dtype). Law: what the decoder does not compute is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
from pathlib import Path
from typing import Any

from dora_jax.models.families import ALIASES, FAMILIES, NOT_COMPUTED, TEXT, family, own
from dora_jax.models.families.config import Linear, ModelConfig, Proportional, RopeScaling, Yarn
from dora_jax.models.families.family import DEFAULTS, FULL, SLIDING, Fields, Json, rotary_tables

# Switches that would change the function; the value here is the only one the decoder computes.
FIXED = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": None,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
}
YARN_NUMBERS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
SCORER = "ForSequenceClassification"  # ends the class name of a model whose head is a score, not a vocabulary
MAX_TEXT_BYTES = 128 << 20  # of a JSON file, a tokenizer, a template; the largest tokenizer.json in use has 33 MB

QUANTIZED = "quantization_config"
PACKED = ({"quant_method": "mxfp4"}, {"quant_method": "fp8", "weight_block_size": [128, 128]})  # what packed.py reads
ADAPTER = "adapter_config.json"  # of a PEFT folder


def not_a_model(path: str | Path) -> str:
    """What is wrong with a folder that has no config.json."""
    if (Path(path) / ADAPTER).is_file():
        return f"{path} is a PEFT folder, an adapter without its base: lora.path takes it, and model.path its base"
    return f"{path} holds no config.json, so it is no Hugging Face folder"


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


def text_fields(raw: Json, file: Path) -> Json:
    """The fields of the text model: those of its text_config where the folder has a tower beside it, else all."""
    if raw.get("model_type") not in TEXT:
        return raw
    text = Fields(raw, file).value("text_config", dict)
    if text is None:
        raise ValueError(f"{file} has model_type={raw['model_type']!r} and no text_config")
    above = {name: raw[name] for name in (QUANTIZED, "tie_word_embeddings") if name in raw}
    # the class with the tower ties by its own field
    tie = {name: x for name, x in above.items() if name.startswith("tie") and raw["model_type"].startswith("qwen")}
    return {**above, **text, **tie, "model_type": TEXT[raw["model_type"]], "architectures": None}


def read_config(path: str | Path, *, scorer: bool = False) -> ModelConfig:
    """ModelConfig of this folder; ValueError names the file and the field that the decoder cannot take.

    scorer: of a reward model, which has no head over the vocabulary (here: it counts as tied).
    """
    file = Path(path) / "config.json"
    raw = text_fields(read_json(file), file)
    fields = Fields(raw, file)
    given, listed = str(raw.get("model_type")), fields.value("architectures", list) or []
    shipped = any(each.model_type == ALIASES.get(given, given) for each in FAMILIES)
    families = FAMILIES if shipped else (*FAMILIES, *own())
    known = next((each for each in families if each.model_type == ALIASES.get(given, given)), None)
    endings = ("ForCausalLM", SCORER)[: 1 + scorer]
    architectures = {
        each.model_type: [each.architecture.replace("ForCausalLM", x) for x in endings] for each in families
    }
    if known is None or listed not in ([], *([name] for name in architectures[known.model_type])):
        named, every = (listed or [given])[0], ", ".join(itertools.chain(*architectures.values()))
        if lacking := NOT_COMPUTED.get(given):
            raise ValueError(f"{file} names the architecture {named!r}; the decoder does not compute {lacking}")
        nearest = difflib.get_close_matches(given, architectures, 1, cutoff=0.0)[0]
        raise ValueError(
            f"{file} has model_type={given!r} and names the architecture {named!r}; known: {every}. The nearest is "
            f"{nearest}, whose layers may be other ones all the same"
        )
    if given in ALIASES and (absent := [name for name in known.defaults if name not in {**DEFAULTS, **raw}]):
        raise ValueError(f"{file} leaves {absent[0]} out, and no class in transformers has a default of {given}")
    defaults = {known.names.get(name, name): value for name, value in known.defaults.items()}
    fields = Fields({**defaults, **raw}, file, known.names)
    for name, value in FIXED.items():
        if name in known.reads:
            continue
        unused = name == "sliding_window" and raw.get("use_sliding_window") is False
        if raw.get(name, value) not in (value, None) and not unused:
            raise ValueError(f"{file} has {name}={raw[name]!r:.60}; the decoder computes {name}={value!r} only")
    quantized = fields.value(QUANTIZED, dict)
    if quantized is not None and not any(packing.items() <= quantized.items() for packing in PACKED):
        raise ValueError(
            f"{file} has quantization_config={quantized!r:.120}; weights in mxfp4, and in fp8 with a scale for each "
            "square of 128, are read"
        )
    if "layer_types" not in known.reads and set(fields.value("layer_types", list) or ()) - {"full_attention"}:
        raise ValueError(f"{file} has layer_types other than full_attention; the decoder attends in full only")
    # Base and scaling of the rotary angles; where both spellings stand in one file they have to agree
    new, old = (fields.value(name, dict) or {} for name in ("rope_parameters", "rope_scaling"))
    for kind, table in rotary_tables(fields):  # of other layers they are the family's to read
        new = table.raw if kind == FULL else new
    thetas = {theta for entry in (raw, new) if (theta := Fields(entry, file).number("rope_theta")) is not None}
    try:
        its_own = known.read(fields)
        rotated = its_own.get("rope_part", 1.0)
        scalings = [_scaling(Fields(entry, file), fields, rotated) for entry in (new, old) if entry]
        if len(thetas) > 1 or len(set(scalings)) > 1:
            raise ValueError(f"{file} gives rope_parameters that disagree with its rope_theta or rope_scaling")
        d_model, n_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        sizes = {
            "vocab_size": fields.size("vocab_size"),
            "d_model": d_model,
            "n_heads": n_heads,
            "n_layers": fields.size("num_hidden_layers"),
            "n_kv_heads": fields.size("num_key_value_heads", n_heads),
            "head_dim": fields.size("head_dim", known.defaults.get("head_dim") or d_model // n_heads),
            "d_ff": fields.size("intermediate_size"),
            "max_position": fields.size("max_position_embeddings"),
            "rope_theta": thetas.pop() if thetas else known.defaults["rope_theta"],
            "rope_scaling": scalings[0] if scalings else None,
            "tie_embeddings": scorer or bool(fields.value("tie_word_embeddings", bool)),
            "norm_eps": fields.number("rms_norm_eps", known.defaults["rms_norm_eps"]),
        }
        return ModelConfig(family=known.model_type, **{**known.switches, **sizes, **its_own})
    except ValueError as error:
        raise error if str(error).startswith(str(file)) else ValueError(f"{file}: {error}") from error


def config_json(cfg: ModelConfig, dtype: str, base: dict[str, Any]) -> dict[str, Any]:
    """The object to write: `base` (a source's config.json, or empty) with every field of `cfg`, in both spellings."""
    known, scaling = family(cfg.family), None
    if TEXT.get(base.get("model_type", "")) == cfg.family:  # of a folder with a tower, which stays as it is
        text = config_json(cfg, dtype, base["text_config"])
        whole = {**base, "text_config": {**text, "architectures": None}, "torch_dtype": dtype, "dtype": dtype}
        return {name: value for name, value in whole.items() if name != QUANTIZED}
    if cfg.rope_scaling is not None:
        known_kinds = {RopeScaling: "llama3", Linear: "linear", Yarn: "yarn", Proportional: "proportional"}
        kind = known_kinds[type(cfg.rope_scaling)]
        kinds = {"rope_type": kind} if kind == "llama3" else {"rope_type": kind, "type": kind}
        entries = dataclasses.asdict(cfg.rope_scaling)
        if isinstance(cfg.rope_scaling, Proportional):
            entries = {"partial_rotary_factor": cfg.rope_scaling.share}
            entries |= {"factor": cfg.rope_scaling.factor} if cfg.rope_scaling.factor != 1.0 else {}
        elif kind != "linear":
            entries["original_max_position_embeddings"] = entries.pop("original_max_position")
        absent = [name for name in ("mscale", "mscale_all_dim", "attention_factor") if not entries.get(name)]
        scaling = kinds | {name: x for name, x in entries.items() if name not in absent}
    full = {"rope_type": "default", **(scaling or {}), "rope_theta": cfg.rope_theta}
    full |= {"partial_rotary_factor": cfg.rope_part} if cfg.rope_part != 1.0 else {}
    # how pictures' positions would turn, which text has none of
    full |= {name: x for name, x in (base.get("rope_parameters") or {}).items() if name.startswith("mrope_")}
    local = max(kind.theta for kind in cfg.kinds)  # base of the layers that have one of their own
    # of transformers 5, beside the hub's own; and how the source packed its weights
    respelled = (*(("num_local_experts",) if cfg.experts else ()), QUANTIZED)
    usual: Json = {
        "architectures": [known.architecture],
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
        "rope_parameters": {FULL: full} | {SLIDING: {"rope_type": "default", "rope_theta": local}} if local else full,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if isinstance(cfg.rope_scaling, Proportional):  # newer than the field, which would take its table's place
        del usual["rope_scaling"]
    return {
        **{name: value for name, value in base.items() if name not in respelled},
        **{known.names.get(name, name): value for name, value in usual.items()},
        **known.write(cfg),
    }


def _scaling(entry: Fields, fields: Fields, rotated: float) -> RopeScaling | Yarn | Linear | Proportional | None:
    """rotated: the share of a head that is."""
    file, kind = entry.file, entry.raw.get("rope_type") or entry.raw.get("type") or "default"
    if kind == "proportional" and rotated == 1.0:
        return Proportional(share=entry.number("partial_rotary_factor", 1.0), factor=entry.number("factor", 1.0))
    if entry.raw.get("partial_rotary_factor", rotated) != rotated:
        raise ValueError(f"{file} has partial_rotary_factor={entry.raw['partial_rotary_factor']!r}; heads rotate whole")
    if kind == "default":
        return None
    if kind not in ("llama3", "yarn", "linear"):
        raise ValueError(f"{file} asks for rope scaling {kind!r}; known: default, llama3, yarn, linear, proportional")
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    factors = {name: value for name in needed if (value := entry.number(name)) is not None}
    if lacking := [name for name in needed if name not in factors]:
        raise ValueError(f"{file} asks for rope scaling {kind} without {lacking[0]}")
    if kind == "linear":
        return Linear(**factors)
    original = entry.size("original_max_position_embeddings", fields.raw.get("max_position_embeddings"))
    if kind == "llama3":
        return RopeScaling(**factors, original_max_position=original)
    truncate = entry.value("truncate", bool)
    given = {name: value for name in YARN_NUMBERS if (value := entry.number(name)) is not None}
    return Yarn(**factors | given, original_max_position=original, truncate=truncate is None or truncate)
