# bash launch/local.sh --config=configs/frozenlake.py
"""A policy that walks over frozen lakes, a direction a turn, up to eight turns: one core, no network, some minutes.

The contract is that of Tunix's agentic example (FrozenLake, up to 8 turns, groups of 8); its step time is reckoned in
configs/sim/frozenlake.py. The base is trained on shortest ways with one false direction in most of them, which may end
in a hole; RL, rewarded at the goal alone, teaches it not to. An episode is sampled by one version, and holds no slot
while the lake answers.
Argument: tiny (seconds; shows that everything runs).
"""

from dora_jax import config


def get_config(arg=None):
    if arg not in (None, "tiny"):
        raise ValueError(f"the argument {arg!r} is unknown; known is tiny")
    c = config.defaults()
    c.steps = 80

    c.task.name = "dora_jax.tasks.environments.frozen_lake.Lakes"
    c.task.params = {"size": 4, "holes": 0.25, "shortest": 2, "longest": 6}
    c.task.template = "{prompt}\n"

    c.environment.name = "dora_jax.tasks.environments.frozen_lake.FrozenLake"
    c.environment.observation = "\n{content}\n"
    c.environment.max_turns = 8
    c.environment.turn_tokens = 8

    c.sft.out = c.model.path = "runs/frozenlake_base"
    c.sft.examples = 8192
    c.sft.slip_rate = 0.8
    c.sft.steps, c.sft.batch_rows, c.sft.pack_tokens = 800, 8, 256
    c.sft.learning_rate, c.sft.warmup_steps = 3e-3, 100
    c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 64, 2, 192
    c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 4, 2, 32

    c.rollout.slots = 64
    c.rollout.decode_steps = 1
    c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 40, 240
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 8, 8
    c.orchestrator.inflight = 1.75
    c.trainer.pack_tokens = 288
    c.trainer.micro_batches = 16
    c.eval.every = 20
    c.eval.prompts, c.eval.samples = 128, 2

    if arg == "tiny":
        c.steps = 3
        c.sft.out = c.model.path = "runs/frozenlake_tiny_base"
        c.sft.steps, c.sft.examples = 20, 256
        c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 32, 2, 64
        c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 4, 1, 8
        c.orchestrator.groups_per_step, c.orchestrator.group_size = 2, 4
        c.trainer.micro_batches = 1
        c.eval.prompts, c.eval.samples = 8, 1
    return c
