"""Gemma 4, text: norms before and behind both parts, windows whose layers have other heads than those that attend in
full, values normed, logits capped; in some sizes layers that read earlier layers' keys, a second embedding a layer, or
experts beside the dense feed-forward."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from dora_jax.models.families.config import Experts, Kind, ModelConfig, Proportional
from dora_jax.models.families.family import (
    DEFAULTS,
    FULL,
    Family,
    Fields,
    Json,
    Tensor,
    layer_types,
    repeated,
    windows,
)  # fmt: skip
from dora_jax.models.families.gemma3 import FAMILY as GEMMA3

_GELU = "gelu_pytorch_tanh"
_ROTARY = Proportional(share=0.25)  # of layers that attend in full


def _kinds(local: Kind, wide: Kind, of_layers: Sequence[bool], readers: int, double: int) -> tuple[Kind, ...]:
    """of_layers: whether each has a window. readers: the last so many layers read the keys of the last layer of their
    kind before them. double: the width of their feed-forwards; 0: that of the others."""
    kinds, own = [local if windowed else wide for windowed in of_layers], len(of_layers) - readers
    shared = {max(i for i in range(own) if of_layers[i] == windowed): "shared" for windowed in set(of_layers[own:])}
    mine = [dataclasses.replace(kind, kv=shared.get(i, "own")) for i, kind in enumerate(kinds[:own])]
    return repeated((*mine, *(dataclasses.replace(kind, kv="read", d_ff=double) for kind in kinds[own:])))


def _read(fields: Fields) -> Json:
    fields.only("hidden_activation", _GELU)
    fields.only("use_bidirectional_attention", None, "vision")  # which text has none of
    n, d_ff, second = (fields.size(x) for x in ("num_hidden_layers", "intermediate_size", "vocab_size_per_layer_input"))
    per_layer = fields.size("hidden_size_per_layer_input", 0, least=0)
    if per_layer and second != fields.size("vocab_size"):
        raise ValueError(
            f"{fields.file} has vocab_size_per_layer_input={second}; the decoder computes as many as vocab_size, "
            f"{fields.size('vocab_size')}"
        )
    readers, tied = fields.size("num_kv_shared_layers", 0, least=0), bool(fields.value("attention_k_eq_v", bool))
    kinds = windows(fields, 6, 1e4)
    of_layers = [bool(kinds[i % len(kinds)].window) for i in range(n - 1)] + [False]  # the last one attends in full
    local = next((kind for kind in kinds if kind.window), Kind())
    asked: Json = {"head_dim": fields.size("global_head_dim", 512)}
    if tied and fields.value("num_global_key_value_heads", int):
        asked["num_key_value_heads"] = fields.size("num_global_key_value_heads")
    each = fields.value("per_layer_config", dict)
    full = [i for i, windowed in enumerate(of_layers) if not windowed]
    if each is not None:
        asked, *others = (x if isinstance(x, dict) else {} for x in [*each.values(), {}][: max(len(each), 1)])
        if {int(i) if i.isdigit() else i for i in each} != set(full) or others != [asked] * len(others):
            raise ValueError(f"{fields.file} has a per_layer_config other than one for all layers of {FULL}")
    if unknown := set(asked) - {"head_dim", "num_key_value_heads"}:
        raise ValueError(f"{fields.file} has {min(unknown)} in per_layer_config; the decoder computes heads there only")
    of_full = Fields(asked, fields.file)
    wide = Kind(
        head_dim=of_full.size("head_dim", fields.size("head_dim")),
        kv_heads=of_full.size("num_key_value_heads", fields.size("num_key_value_heads")),
        tied_values=tied,
    )
    lacking = readers >= n or not set(of_layers[n - readers :]) <= set(of_layers[: n - readers])
    if readers and lacking:
        raise ValueError(f"{fields.file} has num_kv_shared_layers={readers}, and no earlier layer of a kind to read")
    double = 2 * d_ff if fields.value("use_double_wide_mlp", bool) else 0
    more = {
        "kinds": _kinds(local, wide, of_layers, readers, double),
        "embed_scale": fields.size("hidden_size") ** 0.5,
        "per_layer": per_layer,
        "logit_cap": fields.number("final_logit_softcapping", 0.0),
    }
    if fields.value("rope_parameters", dict) is None:
        more |= {"rope_theta": 1e6, "rope_scaling": _ROTARY}
    if fields.value("enable_moe_block", bool):
        more["experts"] = Experts(
            count=fields.size("num_experts"),
            per_token=fields.size("top_k_experts"),
            width=fields.size("moe_intermediate_size"),
            beside=True,
        )
    return more


def _write(cfg: ModelConfig) -> Json:
    every, e = cfg.every_kind, cfg.experts
    wide = next(kind for kind in every if not kind.window)
    of_full = {"head_dim": cfg.dim(wide), "num_key_value_heads": cfg.kv_heads(wide)}
    return {
        **layer_types(cfg),
        "hidden_activation": _GELU,
        "global_head_dim": cfg.dim(wide),
        "num_global_key_value_heads": cfg.kv_heads(wide) if wide.tied_values else None,
        "per_layer_config": {str(i): of_full for i, kind in enumerate(every) if not kind.window},
        "attention_k_eq_v": wide.tied_values,
        "num_kv_shared_layers": cfg.n_layers - cfg.kv_owners,
        "use_double_wide_mlp": every[-1].d_ff > 0,
        "hidden_size_per_layer_input": cfg.per_layer,
        "vocab_size_per_layer_input": cfg.vocab_size,
        "final_logit_softcapping": cfg.logit_cap or None,
        "enable_moe_block": e is not None,
        "num_experts": e and e.count,
        "top_k_experts": e and e.per_token,
        "moe_intermediate_size": e and e.width,
    }


def _windowed(sizes: Json, window: int) -> Json:
    """A fresh model: of the layers that attend in full, heads are twice as wide."""
    local, wide = Kind(window=window, theta=1e4), Kind(head_dim=2 * sizes["head_dim"])
    kinds = _kinds(local, wide, [(i + 1) % 6 > 0 for i in range(sizes["n_layers"] - 1)] + [False], 0, 0)
    return {"kinds": kinds, "rope_theta": 1e6, "rope_scaling": _ROTARY, "embed_scale": sizes["d_model"] ** 0.5}


FAMILY = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    defaults=DEFAULTS
    | {
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    qk_norm=True,
    windowed=_windowed,
    further={"norms": "both", "v_norm": True, "activation": "gelu_tanh", "layer_scale": True, "query_scale": 1.0},
    reads=("sliding_window", "layer_types"),
    read=_read,
    write=_write,
    tensors={
        **GEMMA3.tensors,
        "mlp_inner_norm": Tensor("post_feedforward_layernorm_1.weight", False),
        "mixture_norm": Tensor("pre_feedforward_layernorm_2.weight", False),
        "mixture_post_norm": Tensor("post_feedforward_layernorm_2.weight", False),
        "router": Tensor("router.proj.weight"),
        "router_scale": Tensor("router.scale", False),
        "router_gain": Tensor("router.per_expert_scale", False),
        "experts_gate": Tensor("experts.gate_up_proj", half=0),
        "experts_up": Tensor("experts.gate_up_proj", half=1),
        "experts_down": Tensor("experts.down_proj"),
        "per_layer_in": Tensor("per_layer_input_gate.weight"),
        "per_layer_out": Tensor("per_layer_projection.weight"),
        "per_layer_norm": Tensor("post_per_layer_input_norm.weight", False),
        "layer_scale": Tensor("layer_scalar", False),
    },
)


def _known(every: int, window: int, wide: Kind, readers: int = 0, **sizes: Any) -> Json:
    """Every so many-th layer attends in full."""
    n, d_ff = sizes["n_layers"], sizes["d_ff"]
    of_layers = [(i + 1) % every > 0 for i in range(n - 1)] + [False]
    kinds = _kinds(Kind(window=window, theta=1e4), wide, of_layers, readers, 2 * d_ff if readers else 0)
    rotary = {"rope_theta": 1e6, "rope_scaling": _ROTARY, "embed_scale": sizes["d_model"] ** 0.5}
    ends = {"vocab_size": 262144, "max_position": 262144, "logit_cap": 30.0, "head_dim": 256}
    return {"kinds": kinds, **rotary, **ends, **sizes}


KNOWN = {  # sizes as in the config.json of the same name at Hugging Face
    "Gemma-4-E2B": _known(
        5, 512, Kind(head_dim=512, kv_heads=1), 20, d_model=1536, n_layers=35, n_heads=8, n_kv_heads=1, d_ff=6144,
        per_layer=256, max_position=131072,
    ),
    "Gemma-4-31B": _known(
        6, 1024, Kind(head_dim=512, kv_heads=4, tied_values=True), d_model=5376, n_layers=60, n_heads=32, n_kv_heads=16,
        d_ff=21504,
    ),
    "Gemma-4-26B-A4B": _known(
        6, 1024, Kind(head_dim=512, kv_heads=2, tied_values=True), d_model=2816, n_layers=30, n_heads=16, n_kv_heads=8,
        d_ff=2112, experts=Experts(count=128, per_token=8, width=704, beside=True),
    ),
}  # fmt: skip
