"""Tokens a second of one engine whose rows are of several versions, against rows of one: full weights, and adapters.

    python -m dora_jax.bench.adapters [--versions=1,2,4] [--rows=32] [--rank=8] [--tokens=128] [--rounds=3]
    [--width=256]

Two engines, each with as many versions resident as the longest line asks: of full weights, a copy a version, which
makes a decode call a version; of adapters, one base and every version's adapter beside it, which makes one call for all
rows. Each takes the same samples, `rows` at once, of the first version alone and of several in turn; prompts of 32
tokens. Beside the speeds, what a version takes: its bytes, and the milliseconds from the trainer's masters to the
version being resident (published, laid out, loaded), of an engine that shares the trainer's device. Rounds are
interleaved and the best of each counts.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.bench import harness
from dora_jax.bench.harness import TOY
from dora_jax.config import Config, ModelSection, RolloutSection
from dora_jax.models import decoder, lora
from dora_jax.models.lora_config import OFF, Lora
from dora_jax.plan import presets
from dora_jax.publish import DeviceWeights
from dora_jax.runtime.assembly.run import engine_of
from dora_jax.types import SampleId

PROMPT_TOKENS = 32


class Subject:
    """One engine, full of versions."""

    def __init__(self, model: decoder.ModelConfig, versions: int, rows: int, tokens: int, section: Lora):
        rollout = RolloutSection(
            residents=versions,
            slots=rows,
            max_prompt_tokens=PROMPT_TOKENS,
            max_new_tokens=tokens,
            prefill_chunk=PROMPT_TOKENS,
            decode_steps=min(16, tokens),
        )
        config = presets.filled(Config(model=ModelSection(dtype="float32"), rollout=rollout, lora=section))
        mesh = harness.one_device()
        self.tokens = tokens
        self.best: dict[int, float] = {}  # versions of the rows -> tokens a second
        self.engine = engine_of(config, model, mesh)
        params = decoder.init_params(model, 0)
        if section.on:
            self.engine.residents.take_base(decoder.serving_layout(params, self.engine.shapes.layout))
            params = lora.init(model, section, 0)
        self.engine.warmup()
        self.bytes = sum(x.nbytes for x in jax.tree.leaves(params))
        self.load_ms: list[float] = []
        store = DeviceWeights(config.model.dtype)
        for version in range(versions):
            masters = jax.block_until_ready(jax.tree.map(jnp.copy, params))
            began = time.perf_counter()
            store.put(version, masters)
            self.engine.load(version, store.get(version, self.engine.param_shardings))
            jax.block_until_ready(self.engine.residents.of(version))
            self.load_ms.append(1e3 * (time.perf_counter() - began))
        self._groups = iter(range(1 << 30))

    def run(self, samples: int, versions: int) -> None:
        """Samples so many, of these versions in turn; a group's would share a prefill, so each is a group of its
        own."""
        rng = np.random.default_rng(0)
        for i in range(samples):
            prompt = rng.integers(3, self.engine.cfg.vocab_size, PROMPT_TOKENS).astype(np.int32)
            self.engine.submit(SampleId(next(self._groups), 0), prompt, i % versions, self.tokens)
        began, found = time.perf_counter(), 0
        while not self.engine.idle:
            found += self.engine.tick().tokens
        self.best[versions] = max(self.best.get(versions, 0.0), found / (time.perf_counter() - began))


def table(found: dict[str, Subject]) -> list[str]:
    """One line for each number of versions; `of one`: against rows of one version on the same engine."""
    page = harness.Table({"versions are": "20s", "of rows": "9d", "tokens/s": "10,.0f", "of one": "8.2f",
                          "of first": "10.2f", "MB each": "9.2f", "ms": "8.1f"})  # fmt: skip
    lines = [page.head]
    first, *_ = next(iter(found.values())).best.values()
    for name, subject in found.items():
        one, *_ = subject.best.values()
        for count, speed in subject.best.items():
            figures = (speed, speed / one, speed / first, subject.bytes / 1e6, min(subject.load_ms))
            lines.append(page.row(name, count, *figures))
    return lines


def flags() -> argparse.ArgumentParser:
    """samples: of a round, 0 for as many as rows; width: d_model of the toy."""
    return harness.parser_of(__doc__, versions=(1, 2, 4), rows=32, rank=8, tokens=128, samples=0, rounds=3,
                             width=TOY["d_model"])  # fmt: skip


def measured(args: argparse.Namespace) -> dict[str, Subject]:
    model = decoder.new_config("qwen3", **TOY | {"d_model": args.width, "d_ff": 3 * args.width})
    counts = args.versions
    sections = {"full weights": OFF, f"adapters, rank {args.rank}": Lora(rank=args.rank)}
    found = {name: Subject(model, max(counts), args.rows, args.tokens, section) for name, section in sections.items()}
    for _ in range(args.rounds):
        for subject in found.values():
            for count in counts:
                subject.run(args.samples or args.rows, count)
    return found


if __name__ == "__main__":
    print(*table(measured(flags().parse_args())), sep="\n")
