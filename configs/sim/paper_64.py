# python -m dora_jax.simulate --config=configs/sim/paper_64.py
"""The published table at 64 GPUs beside what the simulator makes of it; dora_jax/sim/paper.py says what was fitted."""

from dora_jax.sim import paper


def get_config(arg=None):
    return paper.published(64)
