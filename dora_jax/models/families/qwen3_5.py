"""Qwen3.5 and 3.6, dense and with experts, and Qwen3-Next: three layers of four are linear attention by the gated delta
rule, the fourth attends in full with gated outputs and heads that rotate by a quarter; gains are 1 + w."""

import dataclasses
import functools
from collections.abc import Callable

from dora_jax.models.families.config import Delta, Experts, Kind, ModelConfig
from dora_jax.models.families.family import (
    DEFAULTS,
    EXPERTS,
    FULL,
    GQA,
    MLP,
    NORMS,
    Family,
    Fields,
    Json,
    Tensor,
    repeated,
    rotated_part,
)  # fmt: skip
from dora_jax.models.families.qwen3_moe import FAMILY as QWEN3_MOE

LINEAR = "linear_attention"  # in layer_types, beside FULL
_SIZES = {  # fields of config.json -> fields of Delta
    "linear_num_key_heads": "key_heads",
    "linear_num_value_heads": "value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "taps",
}
_EVERY = 4  # layers, of which the last attends in full


def _read(fields: Fields) -> Json:
    for name, value in (("attn_output_gate", True), ("mamba_ssm_dtype", "float32"), ("output_gate_type", "swish")):
        fields.only(name, value)
    n, every = fields.size("num_hidden_layers"), fields.size("full_attention_interval", _EVERY)
    names = fields.value("layer_types", list) or [FULL if (i + 1) % every == 0 else LINEAR for i in range(n)]
    if len(names) != n or set(names) - {FULL, LINEAR}:
        raise ValueError(f"{fields.file} has layer_types that are not {n} of {FULL} and {LINEAR}")
    return {
        "kinds": repeated(tuple(Kind(linear=name == LINEAR) for name in names)),
        "delta": Delta(**{ours: fields.size(theirs) for theirs, ours in _SIZES.items()}),
        "rope_part": rotated_part(fields, 0.25),
    }


def _read_experts(fields: Fields) -> Json:
    width, shared = (fields.size(x) for x in ("moe_intermediate_size", "shared_expert_intermediate_size"))
    if shared % width:
        raise ValueError(
            f"{fields.file} has shared_expert_intermediate_size={shared}; the decoder computes multiples of "
            f"moe_intermediate_size, {width}"
        )
    return {"shared": shared // width, "shared_gate": True}


def _read_moe(fields: Fields) -> Json:
    count, each = fields.either("num_local_experts", "num_experts"), fields.size("num_experts_per_tok")
    of_experts = _read_experts(fields) | {"width": fields.size("moe_intermediate_size")}
    return _read(fields) | {"experts": Experts(count=count, per_token=each, **of_experts)}


def _read_next(fields: Fields) -> Json:
    experts = dataclasses.replace(QWEN3_MOE.read(fields)["experts"], **_read_experts(fields))
    return _read(fields) | {"experts": experts}


def _write(cfg: ModelConfig) -> Json:
    written: Json = {theirs: getattr(cfg.rule, ours) for theirs, ours in _SIZES.items()}
    written |= {
        "layer_types": [LINEAR if kind.linear else FULL for kind in cfg.every_kind],
        "partial_rotary_factor": cfg.rope_part,
    }
    if e := cfg.experts:
        written |= QWEN3_MOE.write(cfg) if cfg.family == "qwen3_next" else {}
        written |= {"num_experts": e.count, "num_experts_per_tok": e.per_token, "moe_intermediate_size": e.width}
        written |= {"shared_expert_intermediate_size": e.shared * e.width}
    return written


def _of_parts(name: str, first: str, *others: str) -> Callable[[ModelConfig], list[int]]:
    """Rows of one tensor that a parameter has, of a tensor that holds these parts one behind the other; q, k, v, z are
    as long as what they make."""

    def rows(cfg: ModelConfig) -> list[int]:
        widths = dict(zip("qkvz", (*cfg.rule.widths, cfg.rule.widths[2])))
        start = sum(widths[x] for x in (first, *others)[: (first, *others).index(name)])
        return list(range(start, start + widths[name]))

    return rows


def _of_key_heads(name: str, cfg: ModelConfig) -> list[int]:
    """The same where each key head has its own q, k, v and z, or b and a, side by side."""
    m = cfg.rule
    own = m.value_heads // m.key_heads
    sizes = {"q": m.key_dim, "k": m.key_dim, "v": own * m.value_dim, "z": own * m.value_dim}
    sizes = {"b": own, "a": own} if name in "ba" else sizes
    start, total = sum(sizes[x] for x in list(sizes)[: list(sizes).index(name)]), sum(sizes.values())
    return [head * total + start + i for head in range(m.key_heads) for i in range(sizes[name])]


def _of_heads(which: int, cfg: ModelConfig) -> list[int]:
    """Rows of the queries, or of their gates, which stand side by side in each head."""
    dim = cfg.head_dim
    return [head * 2 * dim + which * dim + i for head in range(cfg.n_heads) for i in range(dim)]


_QKV, _CONV = "linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"
_ATTENTION = (
    NORMS
    | {name: tensor for name, tensor in GQA.items() if not name.endswith("bias")}
    | {
        "q_proj": Tensor("self_attn.q_proj.weight", rows=functools.partial(_of_heads, 0)),
        "attn_gate_proj": Tensor("self_attn.q_proj.weight", rows=functools.partial(_of_heads, 1)),
        **{f"delta_{x}_taps": Tensor(_CONV, rows=_of_parts(x, *"qkv"), channels=True) for x in "qkv"},
        "delta_rate": Tensor("linear_attn.A_log", False),
        "delta_bias": Tensor("linear_attn.dt_bias", False),
        "delta_norm": Tensor("linear_attn.norm.weight", False),
        "delta_o_proj": Tensor("linear_attn.out_proj.weight"),
    }
)
_FLAT = {
    **{f"delta_{x}_proj": Tensor(_QKV, rows=_of_parts(x, *"qkv")) for x in "qkv"},
    "delta_z_proj": Tensor("linear_attn.in_proj_z.weight"),
    "delta_beta": Tensor("linear_attn.in_proj_b.weight"),
    "delta_decay": Tensor("linear_attn.in_proj_a.weight"),
}
_GROUPED = {
    f"delta_{ours}": Tensor(f"linear_attn.in_proj_{of}.weight", rows=functools.partial(_of_key_heads, name))
    for ours, name, of in (*((f"{x}_proj", x, "qkvz") for x in "qkvz"), ("beta", "b", "ba"), ("decay", "a", "ba"))
}
_FUSED = {  # as the hub spells the experts
    "experts_gate": Tensor("mlp.experts.gate_up_proj", half=0),
    "experts_up": Tensor("mlp.experts.gate_up_proj", half=1),
    "experts_down": Tensor("mlp.experts.down_proj"),
}
_MIXTURE = {
    "router": Tensor("mlp.gate.weight"),
    "router_shared": Tensor("mlp.shared_expert_gate.weight"),
    **{name: dataclasses.replace(tensor, other=_FUSED[name]) for name, tensor in EXPERTS.items()},
    **{f"shared_{x}": Tensor(f"mlp.shared_expert.{x}_proj.weight") for x in ("gate", "up", "down")},
}


def _fresh(sizes: Json) -> Json:
    """States as wide as the heads that attend; of fewer layers than a period has, the last one attends."""
    dim, linear = sizes["head_dim"], min(sizes["n_layers"], _EVERY) - 1
    heads = {"key_heads": sizes["n_kv_heads"], "value_heads": sizes["n_heads"]}
    kinds = (*[Kind(linear=True)] * linear, Kind())
    return {"delta": Delta(**heads, key_dim=dim, value_dim=dim), "rope_part": 0.25, "kinds": kinds}


def _family(model_type: str, architecture: str, own: Json) -> Family:
    sizes = {"num_attention_heads": 16, "head_dim": 256, "max_position_embeddings": 32768, "vocab_size": 248320}
    linear = {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}
    sizes |= {f"linear_{name}": value for name, value in linear.items()} | {"linear_conv_kernel_dim": 4}
    own["defaults"] = DEFAULTS | sizes | own["defaults"]
    return Family(
        model_type=model_type,
        architecture=architecture,
        qk_norm=True,
        further={"gain_offset": 1.0, "gated": True, "kinds": (*[Kind(linear=True)] * (_EVERY - 1), Kind())},
        reads=("layer_types", "partial_rotary_factor"),
        write=_write,
        fresh=_fresh,
        ahead=("mtp.",),
        **own,
    )


FAMILY = _family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    {
        "defaults": {
            "num_key_value_heads": 4,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
        },
        "read": _read,
        "tensors": _ATTENTION | _FLAT | MLP,
    },
)
MOE = _family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    {
        "defaults": {
            "num_key_value_heads": 2,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        "names": {"intermediate_size": "shared_expert_intermediate_size"},  # no layer is dense
        "mixture": {"shared_gate": True},
        "read": _read_moe,
        "tensors": _ATTENTION | _FLAT | _MIXTURE,
    },
)
NEXT = _family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    {
        "defaults": {
            "num_key_value_heads": 2,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 48,
            "vocab_size": 151936,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
        "mixture": {"shared_gate": True},
        "read": _read_next,
        "tensors": _ATTENTION | _GROUPED | MLP | _MIXTURE,
    },
)


def _known(sizes: Json, value_heads: int = 32) -> Json:
    delta = Delta(key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128)
    ends = {"vocab_size": 248320, "max_position": 262144, "rope_theta": 1e7, "rope_part": 0.25, "head_dim": 256}
    return ends | {"n_heads": 16, "n_kv_heads": 4, "delta": delta} | sizes


KNOWN = {  # sizes as in the config.json of the same name at Hugging Face
    "Qwen3.5-4B": _known(dict(d_model=2560, n_layers=32, d_ff=9216)),
    "Qwen3.5-9B": _known(dict(d_model=4096, n_layers=32, d_ff=12288, tie_embeddings=False)),
    "Qwen3.5-27B": _known(dict(d_model=5120, n_layers=64, n_heads=24, d_ff=17408, tie_embeddings=False), 48),
}
KNOWN_MOE = {
    "Qwen3.5-35B-A3B": _known(
        dict(
            d_model=2048,
            n_layers=40,
            n_kv_heads=2,
            d_ff=512,
            tie_embeddings=False,
            experts=Experts(count=256, per_token=8, width=512, shared=1, shared_gate=True),
        )
    )
}
