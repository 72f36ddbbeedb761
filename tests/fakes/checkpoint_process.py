"""One process of a trainer with a scratch folder of its own: `python -m tests.fakes.checkpoint_process ADDRESS RANK
PROCESSES`.

Puts its part of two steps into the bucket of $DORA_TEST_URL, then restores one; prints what it put, and was it the
same.
"""

import json
import os
import sys

ADDRESS, RANK, PROCESSES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(4 // PROCESSES))

import jax
import numpy as np
from jax.experimental import multihost_utils

if PROCESSES > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(ADDRESS, PROCESSES, RANK)

from dora_jax.config import CheckpointSection
from dora_jax.runtime.cluster.checkpoint_shards import CheckpointWriter
from tests.fakes.sharded_state import like_on, values_of

home = CheckpointWriter(f"{os.environ['DORA_TEST_URL']}/{PROCESSES}", RANK)
like = like_on(jax.devices())
values = values_of(like)
checkpoints = home.checkpoints(CheckpointSection(), print)
for step in (2, 3):  # the second of them while the folder of the first is there
    checkpoints.save(step, values["params"], values["opt_state"], {"cursors": [step]}, {"reward/mean": 0.5})
    checkpoints.wait()
    assert checkpoints.part[0] == step and os.listdir(home.folder / "checkpoints") == [str(step)]
multihost_utils.sync_global_devices("all parts are there")
back = home.restore(3, like["params"], like["opt_state"])
print(
    json.dumps(
        {
            "files": checkpoints.part[1],
            "digests": checkpoints.take_saves(),
            "same": [
                bool(np.array_equal(a.data, b.data))
                for x, y in zip(jax.tree.leaves(back), jax.tree.leaves((values["params"], values["opt_state"])))
                for a, b in zip(x.addressable_shards, y.addressable_shards)
            ],
        }
    )
)
