"""One process of an engine whose mesh spans several: `python -m tests.fakes.engine_process ADDRESS RANK PROCESSES`.

Four devices in all, of which two hold the same KV head; pages for few samples, one that leaves in the middle and comes
back; prints {sample: [tokens, log-probs]} as JSON. PROCESSES 1 is the comparison.
"""

import json
import os
import sys

ADDRESS, RANK, PROCESSES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(4 // PROCESSES))

import jax

if PROCESSES > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(ADDRESS, PROCESSES, RANK)

from dora_jax.models import decoder
from tests.fakes.engine_rig import CFG, finish, ids, new_engine, submit

engine = new_engine(tensor=4, pages=20, context_block=48)
make = jax.jit(lambda: decoder.serving_layout(decoder.init_params(CFG, 0)), out_shardings=engine.param_shardings)
engine.load(0, make())
for id in ids((0, 3, 4), size=2):
    submit(engine, id)
done = {sample.id: sample for _ in range(4) for sample in engine.tick().finished}
moved = next(id for id, seq in engine.scheduler.seqs.items() if seq.ready)
request = engine.export(moved)
assert request.k_pages.shape[2] == max(CFG.n_kv_heads // PROCESSES, 1)  # those that the process holds
done |= {sample.id: sample for _ in range(2) for sample in engine.tick().finished}
engine.import_(request)
done |= finish(engine)
print(json.dumps({str(id): [s.out_ids.tolist(), s.logprobs.tolist()] for id, s in sorted(done.items())}))
