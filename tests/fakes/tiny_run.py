"""The config file of a run small enough for a test."""

CONFIG = """
from dora_jax import config

def get_config():
    c = config.defaults()
    c.steps = 4
    c.task.name, c.task.template = "reasoning_gym:chain_sum", "{{prompt}} "
    c.sft.out = c.model.path = {base!r}
    c.sft.steps, c.sft.examples, c.sft.batch_rows = 10, 64, 8
    c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 16, 1, 32
    c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 2, 1, 8
    c.rollout.slots, c.rollout.pages, c.rollout.max_new_tokens = 8, 128, 32
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 2, 4
    c.trainer.pack_tokens, c.checkpoint.every = 160, 2
    c.eval.prompts = c.task.heldout = 8
    c.journal.keep_all = True
    c.cluster.launcher, c.cluster.trainer_hosts, c.cluster.devices_per_host = "process", 2, 1
    c.cluster.heartbeat_timeout_s = 60.0
    c.cluster.wire = "transfer"
    return c
"""
