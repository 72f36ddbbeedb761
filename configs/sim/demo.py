# python -m dora_jax.simulate --config=configs/sim/demo.py --trace=runs/demo_trace.json
"""All modes on eight small instances, in seconds: the place to look at a trace, which is of the last row.

A 1.5B model on 16 v5e chips, responses of 600 tokens on average and 8,000 at most. The longest take 1.05 minutes, and
with a bound K on staleness a step takes at least a K-th of that (the column `floor`). K = 6 hides them; at K = 3, the
row beside it, `dora` is slower than the modes that mix versions or have no bound.
"""

from dora_jax.sim import config


def get_config(arg=None):
    c = config.defaults()
    c.steps, c.warmup_steps, c.report_tokens = 14, 3, 256

    c.model.params = 1.5e9
    c.model.n_layers, c.model.d_model, c.model.n_heads, c.model.head_dim = 28, 1536, 12, 128
    c.model.kv_bytes_per_token = 28672.0  # 28 layers, 2 KV heads of 128, keys and values, 2 bytes

    c.hardware.chip = "v5e"
    c.hardware.chips, c.hardware.rollout_chips = 16, 8
    c.hardware.tensor, c.hardware.slots = 1, 128

    c.workload.mean_tokens, c.workload.max_new_tokens = 600.0, 8000
    c.workload.max_prompt_tokens = 512
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 64, 8
    c.orchestrator.rebalance_period_s = 5.0
    c.cost.train_fixed_s = 2.0
    c.orchestrator.max_versions = 6

    rows = [{"mode": mode} for mode in c.modes if mode != "dora"]
    rows.append({"mode": "dora", "label": "dora, K = 3", "set": {"orchestrator.max_versions": 3}})
    c.rows = (*rows, {"mode": "dora"})
    return c
