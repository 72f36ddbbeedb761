# python -m dora_jax.simulate --config=configs/sim/apart.py
"""Prefill and decode on instances of their own: it gains nothing on agents, so it is no choice of a run.

48 of 128 v5e chips sample for agents of which 83 % of the tokens are prefilled ("tool answers": 8 turns, a prompt of
2,000 tokens, answers of 1,500, 2,500 sampled in all) or 86 % ("documents": 6 turns, 3,000, 2,500, 2,500); that is the
range which is reported of agents (77 to 86 %). "mixed" instances do both, one after the other; "8 + 40" are 8 chips
that prefill and 40 that decode. sim/prefill.py says what is modelled: every assumption in it favours the pool.

                     mixed     8 + 40    12 + 36    16 + 32
    tool answers      8.90      11.30       9.77      10.89   minutes a step
    documents        14.86      16.15      17.21      19.26

The reason: mixed instances spend 21 and 16 % of their time on prefill, which are 10 and 8 of the 48 chips. Prefill
moves to the pool and does not shrink, so that at the best split nothing is won, and no split is the best all the time:
the pool rests while no sample ends its turn, and those that decode have a smaller batch while many samples are in the
pool. What it does save, a sample's wait while others prefill in its batch, is worth nothing here: no user waits for the
next token. The mixed instances could do better than this: chunks of a prompt in a decode call use FLOPs that decode
leaves.
"""

from dora_jax.config.files import load_file

# what a sample is -> mean turns; tokens of an observation, of a prompt, sampled in all; samples that an instance
# decodes
WORK = {"tool answers": (8.0, 1500, 2000.0, 2500.0, 16), "documents": (6.0, 2500, 3000.0, 2500.0, 8)}
SHARES = (0, 8, 12, 16)
ROLLOUT_CHIPS = 48


def get_config(arg=None):
    if arg is not None:
        raise ValueError(f"the argument {arg!r} means nothing here")
    c = load_file("sim/environments")
    c.steps, c.warmup_steps, c.seeds = 5, 1, 1
    c.hardware.chips, c.hardware.rollout_chips = 128, ROLLOUT_CHIPS
    c.orchestrator.groups_per_step, c.orchestrator.task_lead = 256, 0.0
    c.workload.mix, c.workload.environment_s, c.workload.max_prompt_tokens = {}, 5.0, 16000
    c.rows = tuple(_row(work, chips, *figures) for work, figures in WORK.items() for chips in SHARES)
    return c


def _row(work, chips, turns, observation, prompt, sampled, slots):
    label = f"{work}, {chips} + {ROLLOUT_CHIPS - chips}" if chips else f"{work}, mixed"
    changes = {"workload.turns": turns, "workload.observation_tokens": observation, "workload.prompt_tokens": prompt,
               "workload.mean_tokens": sampled, "hardware.slots": slots, "hardware.prefill_chips": chips}  # fmt: skip
    return {"label": label, "mode": "dora", "set": changes}
