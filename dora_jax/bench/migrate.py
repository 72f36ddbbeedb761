"""Moving one running sample with its KV against computing that KV again, and what it costs those that stay.

    python -m dora_jax.bench.migrate [--contexts=512,2048,8192,32768] [--others=8] [--rounds=3]

move      export from one engine, import into another, until the sample's next tokens are back
prefill   the same sample imported as tokens only, until its next tokens are back
stay      the sample's next tokens where it is: the part of both that is no moving at all
share     (move - stay) / (prefill - stay)
out, in   by how much slower the other samples of the source and of the destination decode while it leaves and arrives,
          and how many ticks that is
Both engines stand on one device, and host memory lies between them: what one process does. Best of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np

from dora_jax.bench.decode import MODEL
from dora_jax.config import Config, RolloutSection
from dora_jax.models import decoder, sharding
from dora_jax.plan import presets
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import InFlightSample, without_pages
from dora_jax.runtime.assembly.run import engine_of
from dora_jax.types import SampleId

NEW = 128  # tokens that the moved sample may still sample: enough to measure a few ticks
OTHERS_NEW = 1280  # tokens of the others: they decode all the while
MOVED = SampleId(0, 0)


def new_engine(context: int, others: int, params, model: decoder.ModelConfig = MODEL) -> Engine:
    longest = OTHERS_NEW if others else NEW
    section = RolloutSection(
        slots=1 + others,
        decode_rows=1,
        pages=(context + longest) // 16 + 2 + others * (OTHERS_NEW // 16 + 3),
        max_prompt_tokens=context,
        max_new_tokens=longest,
        prefill_tokens=1 << 20,
        prefill_chunk=512,
        context_block=max(128, context // 16),
    )
    engine = engine_of(presets.filled(Config(rollout=section)), model, sharding.make_mesh(jax.devices()[:1], 1, 1, 1))
    engine.load(0, jax.device_put(params, engine.param_shardings))
    engine.warmup()
    return engine


def next_tokens_s(engine: Engine, parcel: InFlightSample) -> float:
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


def slowed(engine: Engine, parcel: InFlightSample, others: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """((share by which others decode slower while the sample arrives, ticks), the same while it leaves again)."""
    for index in range(others):
        engine.submit(SampleId(1, index), np.arange(3, 35), 0, OTHERS_NEW)
    engine.tick()
    before = statistics.median(timed_tick(engine) for _ in range(5))
    engine.import_(parcel)
    arriving = [timed_tick(engine)]
    while not len(engine.sampled(MOVED)[0]) > len(parcel.out_ids):
        arriving.append(timed_tick(engine))
    both = statistics.median(timed_tick(engine) for _ in range(3))
    sampled = len(engine.sampled(SampleId(1, 0))[0])
    began = time.perf_counter()
    engine.export(MOVED)
    took = time.perf_counter() - began
    leaving = max(1, (len(engine.sampled(SampleId(1, 0))[0]) - sampled) // engine.shapes.steps)
    after = statistics.median(timed_tick(engine) for _ in range(5))
    ticks = len(arriving) + 3 + leaving

    def alone(tick: float) -> float:
        """Seconds a tick of the others by themselves: they grow, and slow down, all the while."""
        return before + (after - before) * tick / ticks

    own = max(0.0, both - alone(len(arriving) + 1.5))  # the moved sample decodes too, once it is there
    came = (sum(arriving) - own) / (len(arriving) * alone(len(arriving) / 2)) - 1
    left = took / (leaving * alone(ticks - leaving / 2)) - 1
    for index in range(others):
        engine.cancel(SampleId(1, index))
    return (came, len(arriving)), (left, leaving)


def timed_tick(engine: Engine) -> float:
    began = time.perf_counter()
    engine.tick()
    return time.perf_counter() - began


def measure(context: int, others: int, rounds: int, params) -> str:
    """One line of the page."""
    here, there = (new_engine(context, others, params) for _ in range(2))
    prompt = np.random.default_rng(0).integers(3, MODEL.vocab_size, context)
    moves, prefills, stays, comes, leaves = [], [], [], [], []
    for _ in range(rounds):
        here.submit(MOVED, prompt, 0, NEW)
        while MOVED not in here.tick().progress:
            pass
        stays.append(timed_tick(here))
        began = time.perf_counter()
        parcel = here.export(MOVED)
        exported = time.perf_counter() - began
        moves.append(exported + next_tokens_s(there, parcel))
        forget(there, params)
        came, left = slowed(there, parcel, others)
        comes.append(came)
        leaves.append(left)
        forget(there, params)
        prefills.append(next_tokens_s(there, without_pages(parcel)))
        forget(there, params)
    move, prefill, stay = min(moves), min(prefills), min(stays)
    (out, out_ticks), (into, in_ticks) = min(leaves), min(comes)
    return (
        f"{context:8d}{parcel.kv_bytes / 1e6:8.1f}{move * 1e3:9.1f}{prefill * 1e3:12.1f}{stay * 1e3:9.1f}"
        f"{(move - stay) / (prefill - stay):8.1%}{out:9.1%} /{out_ticks:3d}{into:9.1%} /{in_ticks:3d}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", default="512,2048,8192,32768")
    parser.add_argument("--others", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    params = jax.jit(decoder.serving_layout)(decoder.init_params(MODEL, 0))
    print(
        f"{'context':>8s}{'KV MB':>8s}{'move ms':>9s}{'prefill ms':>12s}{'stay ms':>9s}{'share':>8s}"
        f"{'out / ticks':>14s}{'in / ticks':>14s}"
    )
    for context in [int(c) for c in args.contexts.split(",")]:
        print(measure(context, args.others, args.rounds, params), flush=True)


if __name__ == "__main__":
    main()
