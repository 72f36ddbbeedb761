# python -m dora_jax.simulate --config=configs/sim/environments.py
"""Two environments, one that answers in 0.1 s and one that takes a minute, each asked for half of the groups, at K = 3.

An instance decodes 16 samples, as memory has it where contexts are long. In the first row a sample that waits for its
environment holds no slot; in the second it keeps slot and KV, as in an engine that knows no waiting. The slow
environment may have three times its share of the groups outstanding, and the quick one is never ahead of it by more
than a quarter of a step. Argument `small`: the same in a second.
"""

from dora_jax.sim import config

SLOW = {"environment_s": 60.0, "limit": 3.0}


def get_config(arg=None):
    if arg not in (None, "small"):
        raise ValueError(f"the argument {arg!r} is not small")
    c = config.defaults()
    c.steps, c.warmup_steps, c.report_tokens, c.seeds = 20, 4, 64, 3

    c.model.params = 7.6e9
    c.model.n_layers, c.model.d_model, c.model.n_heads, c.model.head_dim = 28, 3584, 28, 128
    c.model.kv_bytes_per_token = 57344.0  # 28 layers, 4 KV heads of 128, keys and values, 2 bytes

    c.hardware.chip = "v5e"
    c.hardware.chips, c.hardware.rollout_chips = 64, 40
    c.hardware.tensor, c.hardware.slots = 4, 16

    c.workload.mean_tokens, c.workload.max_new_tokens = 3000.0, 16000
    c.workload.turns, c.workload.observation_tokens, c.workload.environment_sigma = 2.0, 200, 0.3
    c.workload.mix = {"quick": {"environment_s": 0.1}, "slow": SLOW}
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 128, 8
    c.orchestrator.task_lead, c.orchestrator.rebalance_period_s = 0.25, 5.0
    c.cost.train_fixed_s = 5.0
    held = {"orchestrator.hold_slots": True}
    c.rows = (_row("waiting frees the slot"), _row("slots held while waiting", held))
    if arg == "small":
        c.steps, c.warmup_steps, c.report_tokens, c.seeds = 14, 2, 256, 1
        c.hardware.chips, c.hardware.rollout_chips = 16, 12
        c.orchestrator.groups_per_step, c.orchestrator.group_size = 32, 4
    return c


def _row(label, changes=None):
    return {"label": label, "mode": "dora", "set": changes or {}}
