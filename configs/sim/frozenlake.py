# python -m dora_jax.simulate --config=configs/sim/frozenlake.py
"""An agentic step on four v5p chips that was published, reckoned from chip constants: nothing is fitted.

Source: Tunix's table of agentic runs (Gemma-4-E2B, FrozenLake, two chips that sample and two that train, staleness
0): 293 s a step, of which rollouts 241, training 76 and the transfer of weights 19, which overlap by 43.

    published       64 x 8 trajectories of about 970 tokens in up to 8 turns
    of the model    35 layers of width 1,536, 8 heads, KV of 15 layers (the others share it): 12 of 256 and 3 of 512,
                    which is 18 KB a token; 2.3B weights that a token passes (its lookups not counted), in 2 bytes
    assumed         one instance of two chips with all 512 trajectories in one batch; prompts of 300 tokens, a turn of
                    100 sampled tokens, 25 observed, and an answer of the lake in 10 ms; lengths scatter by 0.4 of their
                    log; the trainer reaches 35 % of its FLOP/s, decode 80 % of the bandwidth, 5 ms of a step are no
                    roofline (as in every simulation here); 2 s until a version is published, 1 s for rewards, 0.1 s for
                    a message

What comes out is what these chips allow, and not what the run takes: 54 s a step, of which the trainer works for 28.
With 64 trajectories at a time it is 88 s, with 16 it is 225 s: its rollouts are no matter of chips, but of how many
trajectories its host keeps going. One step behind (`one_step`, `dora`) the same chips take 30 s, nearly all of it the
trainer's.
"""

from dora_jax.sim import config

STEP_S, ROLLOUT_S, TRAIN_S, SYNC_S = 293.0, 241.0, 76.0, 19.0
TURNS, TOKENS, OBSERVED = 8, 970, 25


def get_config(arg=None):
    c = config.defaults()
    c.steps, c.warmup_steps, c.report_tokens = 8, 3, 64
    c.model.params, c.model.n_layers, c.model.d_model, c.model.n_heads = 2.3e9, 35, 1536, 8
    c.model.head_dim, c.model.kv_bytes_per_token = 256, 15 * 1024.0 + 3 * 1024.0
    c.hardware.chip, c.hardware.chips, c.hardware.rollout_chips = "v5p", 4, 2
    c.hardware.tensor, c.hardware.slots = 2, 512
    c.cost.publish_s, c.cost.control_s = 2.0, 0.1
    c.workload.max_prompt_tokens, c.workload.prompt_tokens = 1024, 300.0
    c.workload.mean_tokens, c.workload.max_new_tokens, c.workload.sigma = float(TOKENS - TURNS * OBSERVED), 4096, 0.4
    c.workload.turns, c.workload.environment_s, c.workload.observation_tokens = float(TURNS), 0.01, OBSERVED
    c.orchestrator.groups_per_step, c.orchestrator.group_size, c.orchestrator.rebalance_period_s = 64, 8, 1.0
    published = {"step_min": STEP_S / 60, "rollout_only": 1 - TRAIN_S / STEP_S, "tokens_per_s": 1.0}
    rows = [{"label": "sync, as published", "mode": "sync", "published": published | {"fitted": 0.0, "misfit": 0.0}}]
    rows += [{"label": f"sync, {n} at a time", "mode": "sync", "set": {"hardware.slots": n}} for n in (64, 16)]
    c.rows = (*rows, *({"mode": mode} for mode in ("one_step", "dora")))
    return c
