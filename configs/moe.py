# bash launch/local.sh --config=configs/moe.py
"""The quickstart with a small mixture of experts in place of its dense model; updates replay the routes of sampling.

Argument: the family: qwen3_moe (default), or deepseek_v3, which has latent attention and a shared expert besides.
"""

from dora_jax.config.files import load_file

FAMILIES = ("qwen3_moe", "deepseek_v3")


def get_config(arg=FAMILIES[0]):
    if arg not in FAMILIES:
        raise ValueError(f"the argument {arg!r} is unknown; known: {', '.join(FAMILIES)}")
    c = load_file("quickstart")
    c.sft.out = c.model.path = f"runs/{arg}_base"
    c.sft.family = arg
    c.sft.experts, c.sft.experts_per_token, c.sft.expert_width = 8, 2, 96  # a token meets as many weights as when dense
    if arg == "deepseek_v3":
        c.sft.shared_experts, c.sft.dense_layers = 1, 1
        c.sft.n_kv_heads = c.sft.n_heads
        c.sft.kv_rank, c.sft.rope_dim = 32, 16
    c.trainer.routing_replay = "rollout"
    return c
