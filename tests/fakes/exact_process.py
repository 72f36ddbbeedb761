"""One process of a trainer with `rollout.exact` whose mesh spans several, and of the instances whose samples it scores:
`python -m tests.fakes.exact_process ADDRESS RANK PROCESSES`.

Two devices in all. First an instance has both, then each process has instances of one device, so that two processes are
two replicas; a sample leaves in the middle and comes back. Prints {devices of an instance: [tokens, log-probs
of other bits, answers that this process scored]} as JSON. PROCESSES 1 is the comparison.
"""

import json
import os
import sys
from unittest import mock

ADDRESS, RANK, PROCESSES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(2 // PROCESSES))

import jax
import numpy as np

if PROCESSES > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(ADDRESS, PROCESSES, RANK)

from dora_jax.config import RolloutSection
from dora_jax.models import decoder, sharding
from dora_jax.plan import presets
from dora_jax.rollout.engine import Engine
from dora_jax.runtime.assembly.run import EngineReplay
from tests.fakes.engine_rig import CFG, EOS, SIZES, VOCAB, finish, ids, params, submit


def placed(tree, shardings):
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda x, where: jax.make_array_from_callback(x.shape, where, x.__getitem__), arrays, shardings)


trainer = sharding.make_mesh(jax.devices(), 1, 2, 1)
masters = placed(params(), sharding.param_specs(CFG, trainer))
options = {"seed": 7, "eos_ids": EOS, "vocab_limit": VOCAB, "dtype": "float32"}
found = {}
for tensor, own in ((2, jax.devices()), (1, jax.local_devices()[:1])):
    section = presets.on_cpu(RolloutSection(**SIZES | {"exact": True, "tensor": tensor}))
    engine = Engine(CFG, section, sharding.make_mesh(own, 1, 1, tensor), **options)
    engine.load(0, placed(decoder.serving_layout(params(), engine.shapes.layout), engine.param_shardings))
    for id in ids((0, 3, 4), size=3):
        submit(engine, id)
    done = {sample.id: sample for _ in range(3) for sample in engine.tick().finished}
    moved = next(id for id, seq in engine.scheduler.seqs.items() if seq.ready)
    engine.import_(engine.export(moved))
    samples = [sample for _, sample in sorted((done | finish(engine)).items())]
    replay = EngineReplay(CFG, section, trainer, **options)
    with mock.patch.object(Engine, "submit", autospec=True, side_effect=Engine.submit) as submitted:
        scored = replay(masters, [(sample.prompt_ids, sample.out_ids) for sample in samples])
    other = [(x.view(np.int32) != s.logprobs.view(np.int32)).sum() for x, s in zip(scored, samples, strict=True)]
    found[tensor] = [sum(map(len, scored)), int(sum(other)), submitted.call_count]
print(json.dumps(found))
