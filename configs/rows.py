# python -m dora_jax.train --config=configs/rows.py --config.model.path=FOLDER --config.task.path=train.jsonl
# --workdir=runs/mine
"""RL on rows of your own (.jsonl or .parquet: prompt, answer) from any Hugging Face folder the loader knows.

The last number of the response is compared with the answer; name other rewards by their import path in task.rewards.
Argument: chat (the prompt is wrapped in the model's chat template).
"""

from dora_jax import config


def get_config(arg=None):
    if arg not in (None, "chat"):
        raise ValueError(f"the argument {arg!r} is unknown; the only one is chat")
    c = config.defaults()
    c.steps = 100

    c.task.name = "rows"
    c.task.template = "chat" if arg == "chat" else "{prompt} "
    c.task.rewards = ("dora_jax.tasks.rewards.numeric",)
    c.task.heldout = 64

    c.orchestrator.inflight = 0  # few where trainer and rollouts share the only device: it is busy without more
    c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 256, 256
    c.rollout.instances = 0  # as many as the devices hold; one where trainer and rollouts share a single device
    c.rollout.slots, c.rollout.pages = 64, 2048
    c.trainer.pack_tokens = 0  # as few as the longest sample asks for, on a CPU
    c.trainer.micro_batches = 16
    c.trainer.skip_zero_advantage = True  # groups that are all right or all wrong, most of a hard task, move no weight
    c.trainer.learning_rate = 1e-5
    c.eval.every, c.eval.prompts = 20, 64
    return c
