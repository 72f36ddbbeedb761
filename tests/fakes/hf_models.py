"""Tiny Hugging Face models: a random one of each family, and the config.json of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.config import RolloutSection
from dora_jax.models import decoder, hf, sharding
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.plan import presets
from dora_jax.rollout.engine import Engine
from dora_jax.types import SampleId

FAMILIES = ("qwen3", "qwen2", "llama")
OTHERS = ("mistral", "qwen3_moe", "deepseek_v3", "longcat_flash")


SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=1,
    bos_token_id=None,
    pad_token_id=0,
)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}


LATENT = {"q_lora_rank": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


EXTRAS = {
    "qwen3": {"head_dim": 6, "rope_theta": 1e6},
    "qwen2": {"rope_theta": 1e4},
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": None},
    "qwen3_moe": {
        "head_dim": 6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "deepseek_v3": LATENT
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 8,
        "rope_parameters": YARN_ROPE,
    },
    "longcat_flash": LATENT
    | {
        "num_layers": 2,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "ffn_hidden_size": 24,
        "expert_ffn_hidden_size": 8,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 3,
        "routed_scaling_factor": 6.0,
    },
}


GLM = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


GEMMA4 = {  # as the smallest sizes: windows and full layers of other heads, layers that read, a second embedding
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 7,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
# as the large ones: values from keys, fewer KV heads in full layers
GEMMA4_DENSE = GEMMA4 | {
    "num_hidden_layers": 7,
    "layer_types": None,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_MOE = GEMMA4_DENSE | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 8}


HYBRID = {  # three layers of four are linear attention, and what is left over
    "num_hidden_layers": 6,
    "head_dim": 8,
    "rms_norm_eps": 1e-3,  # what a head gives is normed: where a query and a key are at right angles, rounding shows
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
HYBRID_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16,
}


# families of layer patterns, of sizes at which text is longer than two windows
NEWER = {
    "gemma3_text": {
        "num_hidden_layers": 8,
        "head_dim": 8,
        "sliding_window": 7,
        "query_pre_attn_scalar": 11,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    },
    "olmo3": {
        "num_hidden_layers": 5,
        "sliding_window": 7,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            "full_attention": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 5e5, "attention_factor": 1.2079,
                               "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    },
    "smollm3": {"num_hidden_layers": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 2e6}},
    "glm4_moe": GLM
    | {
        "head_dim": 8,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "glm4_moe_lite": GLM | LATENT | {"num_key_value_heads": 4, "num_hidden_layers": 3},
    "gpt_oss": {
        "num_hidden_layers": 5,
        "head_dim": 8,
        "sliding_window": 7,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "rope_theta": 1.5e5, "truncate": False,
                            "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "gemma4_text": GEMMA4,
    "gemma4_text dense": GEMMA4_DENSE,
    "gemma4_text moe": GEMMA4_MOE,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID | HYBRID_MOE,
    "qwen3_next": HYBRID | HYBRID_MOE | {"mlp_only_layers": [1]},
}  # fmt: skip


def transformers():
    pytest.importorskip("torch", reason="torch is not installed: parity is checked against tests/data/golden instead")
    return pytest.importorskip("transformers", reason="transformers is not installed: see tests/data/golden")


def torch_model(family: str, *, tied: bool, seed: int = 0, **changes):
    """A tiny random model whose every parameter, gains and biases included, is away from its usual start; changes: of
    its config's fields."""
    library = transformers()
    import torch

    torch.manual_seed(seed)
    fields = SIZES | (EXTRAS | NEWER)[family] | {"tie_word_embeddings": tied} | changes
    config = library.AutoConfig.for_model(family.split()[0], **fields)
    model = library.AutoModelForCausalLM.from_config(config).eval()
    # a head's states are normed, however short: larger numbers make rounding grow from layer to layer
    spread = 0.15 if family.startswith(("qwen3_5", "qwen3_next")) else 0.3
    with torch.no_grad():
        beside = ("e_score_correction_bias", "layer_scalar")
        biases = [(name, x) for name, x in model.named_buffers() if name.endswith(beside)]
        for name, weight in [*model.named_parameters(), *biases]:
            gain = name.endswith(("layer_scalar", "_scale", ".scale", "linear_attn.norm.weight"))
            gain |= "norm" in name and not family.startswith(("gemma3", "qwen3_5", "qwen3_next"))  # theirs are 1 + w
            weight.normal_(1.0 if gain else 0.0, spread)
            if family.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.mul_(0.5)  # scores are not scaled: else they are so large that angles in float32 show
            if family == "gpt_oss" and name.endswith("gate_up_proj"):  # what is beyond 7 is clamped
                weight.mul_(5.0)
    return model


def tokens() -> np.ndarray:
    """Two rows long enough to pass the original context of LLAMA3_ROPE."""
    return np.random.default_rng(3).integers(0, SIZES["vocab_size"], (2, 48))


def torch_logits(model, tokens_BxL) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens_BxL)).logits.numpy()


def our_logits(path, tokens_BxL, serving: bool = False) -> np.ndarray:
    cfg, params = hf.load(path)
    positions = jnp.broadcast_to(jnp.arange(tokens_BxL.shape[1]), tokens_BxL.shape)
    attend = segment_attention(jnp.zeros_like(positions), positions)

    @jax.jit
    def logits(params):
        params = decoder.serving_layout(params) if serving else params
        return decoder.logits(cfg, params, decoder.forward(cfg, params, jnp.asarray(tokens_BxL), positions, attend))

    return np.asarray(logits(params))


MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 300,
}


def greedy(model, prompt: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, log-probs f64[count, V]) of `generate`."""
    import torch

    torch.set_num_threads(1)  # its threads wait for each other at every operation of so small a model
    ids = torch.tensor(prompt[None])
    options = dict(max_new_tokens=count, min_new_tokens=count, do_sample=False, output_logits=True)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **options)
        logits = torch.stack(out.logits)[:, 0].double()
    return out.sequences[0, len(prompt) :].numpy(), torch.log_softmax(logits, -1).numpy()


def greedy_samples(path, prompts, new: int, *, dtype: str = "float32", **changes) -> list:
    """Samples of these prompts, of an engine on as many devices as `tensor` says; changes: of its section."""
    cfg, stacked = hf.load(path, dtype=jnp.dtype(dtype))
    sizes = dict(slots=8, pages=64, page_size=16, prefill_chunk=16, max_prompt_tokens=32, max_new_tokens=new,
                 decode_steps=8, context_block=32, temperature=0.0)  # fmt: skip
    section = presets.on_cpu(RolloutSection(**sizes | changes))
    mesh = sharding.make_mesh(jax.devices()[: section.tensor], 1, 1, section.tensor)
    engine = Engine(cfg, section, mesh, seed=0, eos_ids=(), vocab_limit=cfg.vocab_size, dtype=dtype)
    weights = decoder.serving_layout(stacked, engine.shapes.layout)
    engine.load(0, jax.device_put(weights, engine.param_shardings))
    for index, prompt in enumerate(prompts):
        engine.submit(SampleId(0, index), prompt, 0, new)
    done = {}
    while not engine.idle:
        done |= {sample.id.index: sample for sample in engine.tick().finished}
    assert [len(done[index].out_ids) for index in range(len(prompts))] == [new] * len(prompts)
    return [done[index] for index in range(len(prompts))]


def check_greedy(setting: str, model, samples, *, atol: float, tie: float, least: float) -> tuple[int, int, float]:
    """Assert that our samples are the model's greedy ones: each up to a near-tie that is taken both ways, which is
    printed. least: the share of the tokens that must be equal. Returns equal tokens, all, the largest gap in log-prob."""
    equal, gap = 0, 0.0
    for sample in samples:
        tokens, logprobs = greedy(model, sample.prompt_ids, len(sample.out_ids))
        parted = np.flatnonzero(tokens != sample.out_ids)
        n = parted[0] if len(parted) else len(tokens)
        if n < len(tokens):
            near = logprobs[n, tokens[n]] - logprobs[n, sample.out_ids[n]]
            print(f"{setting}, prompt of {len(sample.prompt_ids)}: a near-tie at token {n}: {near:.1e} between ids "
                  f"{tokens[n]} and {sample.out_ids[n]}")  # fmt: skip
            assert near < tie
        expected = logprobs[np.arange(n), tokens[:n]]
        np.testing.assert_allclose(sample.logprobs[:n], expected, rtol=0, atol=atol)
        gap = max(gap, float(np.abs(sample.logprobs[:n] - expected).max(initial=0.0)))
        equal += n
    total = sum(len(sample.out_ids) for sample in samples)
    print(f"{setting}: {equal} of {total} tokens are equal")
    assert equal > least * total
    return int(equal), total, gap


def bfloat16_gaps(path, prompts, new: int) -> tuple[float, float]:
    """Mean differences of greedy tokens' log-probs in bfloat16 from those of transformers in float32: of ours, and of
    transformers' own."""
    import torch

    load = transformers().AutoModelForCausalLM.from_pretrained
    wide, narrow = (load(path, dtype=x).eval() for x in (torch.float32, torch.bfloat16))
    gaps = {"ours": [], "theirs": []}
    for prompt, sample in zip(prompts, greedy_samples(path, prompts, new, dtype="bfloat16"), strict=True):
        ids = torch.tensor(np.concatenate([prompt, sample.out_ids])[None])
        with torch.no_grad():
            wide_LxV, narrow_LxV = (torch.log_softmax(x(ids).logits[0].double(), -1).numpy() for x in (wide, narrow))
        at = np.arange(len(prompt) - 1, ids.shape[1] - 1), sample.out_ids
        gaps["ours"].append(np.abs(wide_LxV[at] - sample.logprobs))
        gaps["theirs"].append(np.abs(wide_LxV[at] - narrow_LxV[at]))
    return float(np.mean(gaps["ours"])), float(np.mean(gaps["theirs"]))
