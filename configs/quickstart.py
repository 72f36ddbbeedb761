# bash launch/local.sh --config=configs/quickstart.py
"""A small base model made on the spot, then RL on sums: two cores, no network, a few minutes.

Argument: tiny (seconds; shows that everything runs, learns nothing worth seeing).
"""

from dora_jax import config


def get_config(arg=None):
    if arg not in (None, "tiny"):
        raise ValueError(f"the argument {arg!r} is unknown; the only one is tiny")
    c = config.defaults()
    c.steps = 60

    c.task.name = "reasoning_gym:chain_sum"
    c.task.params = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}

    c.sft.out = c.model.path = "runs/quickstart_base"
    c.sft.slip_rate = 0.5  # half the worked solutions end wrong, so that RL has something to lift

    c.rollout.max_prompt_tokens = 64
    c.rollout.max_new_tokens = 64
    c.trainer.pack_tokens = 256
    c.eval.every = 20

    if arg == "tiny":
        c.steps = 3
        c.sft.out = c.model.path = "runs/quickstart_tiny_base"
        c.sft.steps, c.sft.examples = 20, 256
        c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 32, 2, 64
        c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 2, 1, 16
        c.orchestrator.groups_per_step, c.orchestrator.group_size = 2, 4
        c.eval.prompts = 8
    return c
