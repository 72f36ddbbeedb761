"""Moving one running sample with its KV against computing that KV again, and what it costs those that stay.

    python -m dora_jax.bench.migrate [--contexts=512,2048,8192] [--others=8] [--rounds=3]

move      export from one engine, import into another, until the sample's next tokens are back
prefill   the same sample imported as tokens only, until its next tokens are back
stall     by how much the tick of the destination's other samples that carries the import is longer than their median
Both engines stand on one device, and host memory lies between them: what one process does. Best of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np

from dora_jax.bench.decode import MODEL
from dora_jax.config import RolloutSection
from dora_jax.models import decoder, sharding
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import Parcel, without_pages
from dora_jax.types import SampleId

NEW = 64  # tokens that a sample may still sample; enough to measure a few ticks
MOVED = SampleId(0, 0)


def new_engine(context: int, others: int, params) -> Engine:
    pages = (context // 16 + 8) + others * 16
    section = RolloutSection(
        slots=1 + others, decode_rows=1, pages=pages, max_prompt_tokens=context, max_new_tokens=NEW,
        prefill_tokens=1 << 20, prefill_chunk=512, context_block=max(128, context // 16))
    engine = Engine(MODEL, section, sharding.make_mesh(jax.devices()[:1], 1, 1, 1), seed=0, eos_ids=(),
                    vocab_limit=MODEL.vocab_size)
    engine.load(0, jax.device_put(params, engine.param_shardings))
    engine.warmup()
    return engine


def next_tokens_s(engine: Engine, parcel: Parcel) -> float:
    """Seconds from the import until the sample has sampled again; takes it out afterwards."""
    began = time.perf_counter()
    engine.import_(parcel)
    while MOVED not in engine.tick().progress:
        pass
    took = time.perf_counter() - began
    engine.cancel(MOVED)
    return took


def forget(engine: Engine, params) -> None:
    """Drops every prefix, so that the next import finds none."""
    engine.drop(0)
    engine.load(0, jax.device_put(params, engine.param_shardings))


def stall_s(engine: Engine, parcel: Parcel, others: int) -> float:
    """Extra seconds of the tick that carries the import, the moved sample's own decode call not counted."""
    for index in range(others):
        engine.submit(SampleId(1, index), np.arange(3, 35), 0, NEW)
    engine.tick()
    ticks = [timed_tick(engine) for _ in range(3)]
    engine.import_(parcel)
    with_import, after = timed_tick(engine), timed_tick(engine)
    own = max(0.0, after - statistics.median(ticks))  # the moved sample decodes too
    for id in [MOVED, *(SampleId(1, index) for index in range(others))]:
        engine.cancel(id)
    return max(0.0, with_import - statistics.median(ticks) - own)


def timed_tick(engine: Engine) -> float:
    began = time.perf_counter()
    engine.tick()
    return time.perf_counter() - began


def measure(context: int, others: int, rounds: int, params) -> tuple[float, float, float, int]:
    """(move, prefill, stall) in seconds and the parcel's bytes."""
    here, there = (new_engine(context, others, params) for _ in range(2))
    prompt = np.random.default_rng(0).integers(3, MODEL.vocab_size, context)
    moves, prefills, stalls = [], [], []
    for _ in range(rounds):
        here.submit(MOVED, prompt, 0, NEW)
        while MOVED not in here.tick().progress:
            pass
        began = time.perf_counter()
        parcel = here.export(MOVED)
        exported = time.perf_counter() - began
        moves.append(exported + next_tokens_s(there, parcel))
        forget(there, params)
        stalls.append(stall_s(there, parcel, others))
        forget(there, params)
        prefills.append(next_tokens_s(there, without_pages(parcel)))
        forget(there, params)
    return min(moves), min(prefills), min(stalls), parcel.kv_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", default="512,2048,8192")
    parser.add_argument("--others", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    params = jax.jit(decoder.serving_layout)(decoder.init_params(MODEL, 0))
    print(f"{'context':>8s}{'KV MB':>8s}{'move ms':>9s}{'prefill ms':>12s}{'share':>8s}{'stall ms':>10s}")
    for context in [int(c) for c in args.contexts.split(",")]:
        move, prefill, stall, size = measure(context, args.others, args.rounds, params)
        print(f"{context:8d}{size / 1e6:8.1f}{move * 1e3:9.1f}{prefill * 1e3:12.1f}{move / prefill:8.0%}"
              f"{stall * 1e3:10.1f}", flush=True)


if __name__ == "__main__":
    main()
