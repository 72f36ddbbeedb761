"""One process of a trainer whose mesh spans several: `python -m tests.fakes.trainer_process ADDRESS RANK PROCESSES`.

Two steps on eight devices; prints the metrics and checksums of the new weights as JSON. PROCESSES 1 is the comparison.
"""

import dataclasses
import json
import os
import sys

ADDRESS, RANK, PROCESSES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(8 // PROCESSES))

import jax
import numpy as np
from jax.experimental import multihost_utils

if PROCESSES > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(ADDRESS, PROCESSES, RANK)

from dora_jax.models import sharding
from dora_jax.trainer import step
from tests.fakes import trainer_cases as cases

section = cases.section(advantage="gae", value_learning_rate=1e-2, micro_batches=2, anchor="proximal")
mesh = sharding.make_mesh(jax.devices(), 1, 2, 2, 2)
model = dataclasses.replace(cases.MODEL, n_layers=1)
trainer = step.Trainer(model, section, mesh, cases.params(3, model), total_steps=5)
trainer.warmup(16, 32)
for _ in range(2):
    metrics = trainer.step(cases.batch(trainer, score=trainer.score))
weights = multihost_utils.process_allgather(trainer.params, tiled=True)
sums = [float(np.abs(x).sum()) for x in jax.tree.leaves(weights)]
print(json.dumps({"metrics": {k: v for k, v in metrics.items() if "per_s" not in k}, "weights": sums}))
