# bash launch/local.sh --config=configs/agent.py
"""A policy that calls a calculator, one operation a turn: two cores, no network, a few minutes.

The base is trained on worked dialogues most of which answer one operation too early, so it can use the tool but rarely
finishes; RL, rewarded for the right answer only, teaches it to finish. An episode is sampled by one version, and holds
no slot while the calculator answers.
Argument: tiny (seconds; shows that everything runs), or noisy (tools that fail, observations that are cut or wrong).
"""

from dora_jax import config


def get_config(arg=None):
    if arg not in (None, "tiny", "noisy"):
        raise ValueError(f"the argument {arg!r} is unknown; known are tiny and noisy")
    c = config.defaults()
    c.steps = 60

    c.task.name = "reasoning_gym:chain_sum"
    c.task.params = {"min_terms": 3, "max_terms": 5, "min_digits": 1, "max_digits": 1}
    c.task.extract = r": (.*?) =$"  # the sum alone: "4 + 3 - 7"
    c.task.template = "{prompt}\n"

    c.environment.name = "dora_jax.tasks.environments.calculator.Calculator"
    c.environment.observation = "-> {content}\n"
    c.environment.max_turns = 8
    c.environment.turn_tokens = 16

    c.sft.out = c.model.path = "runs/agent_base"
    c.sft.examples = 20480
    c.sft.slip_rate = 0.7
    c.sft.steps, c.sft.batch_rows, c.sft.pack_tokens = 2500, 8, 128
    c.sft.learning_rate, c.sft.warmup_steps = 5e-3, 100
    c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 64, 2, 192
    c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 4, 2, 32

    c.rollout.slots = 64
    c.rollout.decode_steps = 1
    c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 24, 96
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 16, 8
    c.orchestrator.inflight = 1.75
    c.trainer.pack_tokens = 128
    c.trainer.micro_batches = 32
    c.eval.every = 20
    c.eval.prompts, c.eval.samples = 128, 2

    if arg == "noisy":
        c.environment.max_turns = 12
        c.environment.noise_failed, c.environment.noise_truncated, c.environment.noise_irrelevant = 0.05, 0.02, 0.03
        c.environment.noise_ramp_groups = 20 * c.orchestrator.groups_per_step
    if arg == "tiny":
        c.steps = 3
        c.sft.out = c.model.path = "runs/agent_tiny_base"
        c.sft.steps, c.sft.examples = 20, 256
        c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 32, 2, 64
        c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 4, 1, 8
        c.orchestrator.groups_per_step, c.orchestrator.group_size = 2, 4
        c.trainer.micro_batches = 1
        c.eval.prompts, c.eval.samples = 8, 1
    return c
