"""Seconds, bytes sent and padding of a step's batch, by samples:  python -m tests.soak.packing [--share] [--most=8192]

Answers are long-tailed up to 512 tokens behind prompts of 64 to 128, in rows of 640 and 8 micro-batches, which are enough
for as many samples of the longest size. Prints a row for each number of samples: seconds of `pack` (best of five, with
freed memory kept, as in a run), of which the places; MB of the static shape, MB sent, MB that hold tokens; the share of
what is sent that is padding; seconds over those of half the samples; seconds and MB of one of four processes, each of
which holds a quarter of the rows.
"""

import argparse
import dataclasses
import time

import numpy as np

from dora_jax import config
from dora_jax.buffer import layout, pack
from dora_jax.plan import devices, presets
from dora_jax.trainer.advantage import Prepare
from dora_jax.types import Sample, SampleId, ScoredGroup, Span

PROMPT, ANSWER, ROW, GROUP, PROCESSES = 128, 512, 640, 8, 4


def groups(samples: int) -> list[ScoredGroup]:
    rng = np.random.default_rng(0)
    made = []
    for group_id in range(samples // GROUP):
        prompt = rng.integers(0, 1000, int(rng.integers(PROMPT // 2, PROMPT + 1))).astype(np.int32)
        answers = []
        for i in range(GROUP):
            n = int(min(ANSWER, 1 + rng.lognormal(4.3, 0.8)))
            answers.append(
                Sample(
                    id=SampleId(group_id, i),
                    prompt_ids=prompt,
                    out_ids=rng.integers(0, 1000, n).astype(np.int32),
                    logprobs=rng.normal(-4, 0.1, n).astype(np.float32),
                    mask=np.ones(n, bool),
                    spans=(Span(version=0, start=0, stop=n),),
                    finish="stop",
                )
            )
        rewards = rng.normal(size=GROUP).astype(np.float32)
        made.append(ScoredGroup(group_id=group_id, version=0, samples=tuple(answers), rewards=rewards, parts={}))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", action="store_true", help="prompts are shared by the samples of a group")
    parser.add_argument("--most", type=int, default=8192, help="samples of the last row")
    options = parser.parse_args()
    devices.keep_freed_memory()
    section = presets.on_cpu(config.TrainerSection(pack_tokens=ROW, share_prompts="on" if options.share else "off"))
    print("samples   seconds   places   whole MB   sent MB   tokens MB   padding   x of half   one of 4   its MB")
    samples, before = 128, 0.0
    while samples <= options.most:
        scored, took, placed, part = groups(samples), [], [], []
        shape = layout.layout(
            pack_tokens=ROW,
            rows=0,
            micro_batches=8,
            samples=samples,
            shards=PROCESSES,
            max_tokens=PROMPT + ANSWER,
            share_prompts=options.share,
        )
        for _ in range(5):
            began = time.perf_counter()
            batch = pack.pack(scored, shape, Prepare(section, ANSWER))
            took.append(time.perf_counter() - began)
            items = layout.items_of([sample for group in scored for sample in group.samples], options.share)
            began = time.perf_counter()
            layout.places_of(items, shape)
            placed.append(time.perf_counter() - began)
            began = time.perf_counter()
            own = pack.pack(scored, dataclasses.replace(shape, held=(1,)), Prepare(section, ANSWER))
            part.append(time.perf_counter() - began)
        sent = sum(x.nbytes for x in batch.arrays().values()) / 1e6
        whole, tokens = sent * shape.rows / len(batch.tokens), sent * float((batch.segment_ids > 0).mean())
        times = f"{min(took) / before if before else 0:12.2f}{min(part):11.4f}"
        times += f"{sum(x.nbytes for x in own.arrays().values()) / 1e6:9.1f}"
        print(f"{samples:7d}{min(took):10.4f}{min(placed):9.4f}{whole:11.1f}{sent:10.1f}{tokens:12.1f}"
              f"{1 - tokens / sent:10.1%}{times}", flush=True)  # fmt: skip
        samples, before = 2 * samples, min(took)


if __name__ == "__main__":
    main()
