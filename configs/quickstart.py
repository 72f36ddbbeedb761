# bash launch/local.sh --config=configs/quickstart.py
"""A small base model made on the spot, then RL on sums: two cores, no network, a few minutes.

The base is trained on worked solutions most of which stop one step early, so it can calculate but rarely finishes;
RL, rewarded for the right answer only, teaches it to finish.
Argument: tiny (seconds; shows that everything runs, learns nothing worth seeing).
"""

from dora_jax import config


def get_config(arg=None):
    if arg not in (None, "tiny"):
        raise ValueError(f"the argument {arg!r} is unknown; the only one is tiny")
    c = config.defaults()
    c.steps = 80

    c.task.name = "reasoning_gym:chain_sum"
    c.task.params = {"min_terms": 3, "max_terms": 7, "min_digits": 1, "max_digits": 1}
    c.task.extract = r": (.*)$"  # the sum alone: "4 + 3 - 7 ="
    c.task.template = "{prompt} "  # the blank keeps " = " one token, in the question as in the working
    c.task.answer_pattern = r"#### (-?\d+)$"

    c.sft.out = c.model.path = "runs/quickstart_base"
    c.sft.examples = 40960
    c.sft.slip_rate = 0.7
    c.sft.steps, c.sft.batch_rows, c.sft.pack_tokens = 5000, 8, 128
    c.sft.learning_rate, c.sft.warmup_steps = 5e-3, 200
    c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 64, 2, 192
    c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 4, 2, 32

    c.rollout.slots = 64
    c.rollout.decode_steps = 1  # answers are short: more would end them before the next version is published
    c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 32, 96
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 16, 8
    c.orchestrator.inflight = 1.75
    c.trainer.pack_tokens = 128
    c.trainer.micro_batches = 32
    c.eval.every = 20
    c.eval.prompts, c.eval.samples = 256, 2

    if arg == "tiny":
        c.steps = 3
        c.sft.out = c.model.path = "runs/quickstart_tiny_base"
        c.sft.steps, c.sft.examples = 20, 256
        c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 32, 2, 64
        c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 4, 1, 8
        c.orchestrator.groups_per_step, c.orchestrator.group_size = 2, 4
        c.trainer.micro_batches = 1
        c.eval.prompts, c.eval.samples = 8, 1
    return c


def sweep():
    """python -m dora_jax.sweep --config=configs/quickstart.py: the paper's mode against the plain ones, two seeds
    each."""
    return [{"orchestrator.mode": mode, "seed": seed} for mode in ("sync", "one_step", "dora") for seed in (0, 1)]
