"""Before anything imports jax: one CPU platform with eight virtual devices, and no state of an earlier run.

A test that needs other settings starts a process of its own.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
for name in ("DORA_DEVICES", "XLA_FLAGS"):
    os.environ.pop(name, None)
