"""One optimizer update, host work included, against the plainest JAX step and against transformers + torch.

    python -m dora_jax.bench.train_step [--smollm] [--rivals=plain,transformers] [--rounds=3] [--install]

The same f32 weights, trajectories, PPO loss and AdamW everywhere; the first loss and gradient norm of all are compared
before anything is timed. Two kinds of work: equal lengths (16 sequences of 256 tokens) and a long tail (32 of 16 + a
log-normal number, median 48, at most 496). Ours packs the sequences into rows that hold the longest (a multiple of
128 tokens, as trainer.pack_tokens would be set for such work); the rivals pad them to the longest, as they do. Tokens are those of prompts and responses, padding counts for nobody. MFU: the model's own FLOPs (no padding,
causal attention) over what a large f32 matrix product reaches on this machine. Compilation is left out; rounds are
interleaved and the best of each counts. torch runs in an environment of its own (`--install` makes it under .bench/).
With --smollm the weights are those of a real model of 135M parameters (smollm.py), the work is two sequences of 512
tokens, one a micro-batch.
The second table: what the step holds at its peak beside the state, by how the log-probs are taken.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.bench import plain_step, smollm
from dora_jax.bench.decode import ENVIRONMENTS, MODEL, flop_speed
from dora_jax.buffer import layout, pack
from dora_jax.config import TrainerSection
from dora_jax.costs import update as update_costs
from dora_jax.models import decoder, hf, logits, sharding
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.plan import devices, presets
from dora_jax.trainer import score, step
from dora_jax.trainer.flops import segment_lengths
from dora_jax.trainer.prepare import Prepare
from dora_jax.types import Sample, SampleId, ScoredGroup, Span

PROMPT, GROUP, LONGEST, ROW_UNIT = 16, 8, 512, 128
WIDE_VOCAB = 32768  # of the memory table: where B x L x V is what fills a device
AGREE = 1e-3  # relative: f32 sums in another order


@dataclasses.dataclass(frozen=True)
class TrainWork:
    name: str
    model: decoder.ModelConfig
    batch: pack.TrainBatch
    padded: dict[str, np.ndarray]  # one sequence a row, as wide as the longest

    @property
    def lengths(self) -> np.ndarray:
        return segment_lengths(self.batch.segment_ids)


def works() -> list[TrainWork]:
    rng = np.random.default_rng(0)
    tail = np.exp(rng.normal(np.log(48), 1.1, 32)).astype(int).clip(1, LONGEST - PROMPT)
    return [_work(MODEL, "equal", np.full(16, 256 - PROMPT + 1), rng), _work(MODEL, "long tail", tail, rng)]


def real_works(model: decoder.ModelConfig, rows: int = 2) -> list[TrainWork]:
    return [_work(model, f"{rows} x 512", np.full(rows, 512 - PROMPT + 1), np.random.default_rng(0), group=2)]


def _work(
    model: decoder.ModelConfig, name: str, lengths: np.ndarray, rng: np.random.Generator, group: int = GROUP
) -> TrainWork:
    """Groups of random tokens whose log-probs are near those of an untrained model, so that some ratios clip."""
    groups = []
    for group_id in range(len(lengths) // group):
        prompt = rng.integers(0, model.vocab_size, PROMPT).astype(np.int32)
        samples = []
        for index, n in enumerate(lengths[group_id * group : (group_id + 1) * group].tolist()):
            samples.append(
                Sample(
                    id=SampleId(group_id, index),
                    prompt_ids=prompt,
                    mask=np.ones(n, bool),
                    finish="stop",
                    out_ids=rng.integers(0, model.vocab_size, n).astype(np.int32),
                    logprobs=rng.normal(-np.log(model.vocab_size), 0.3, n).astype(np.float32),
                    spans=(Span(version=0, start=0, stop=n),),
                )
            )
        groups.append(
            ScoredGroup(
                group_id=group_id,
                version=0,
                samples=tuple(samples),
                parts={},
                rewards=rng.normal(size=group).astype(np.float32),
            )
        )
    row = -(-int(lengths.max() + PROMPT - 1) // ROW_UNIT) * ROW_UNIT
    rows = -(-int((lengths + PROMPT - 1).sum()) // row) + 1  # first fit by falling length wastes less than one
    shape = layout.BatchShape(rows=rows, tokens=row, micro_batches=1)
    objective: Any = Prepare(section(), int(lengths.max()))
    batch = pack.pack(groups, shape, objective)
    filled = (batch.segment_ids > 0).any(1)
    kept: dict[str, Any] = {name: x[filled] for name, x in batch.arrays().items()}
    batch = dataclasses.replace(batch, **kept)
    names = ("tokens", "targets", "mask", "behavior_logprobs", "advantages", "loss_weights")
    return TrainWork(name, model, batch, _one_a_row(batch, names))


def _one_a_row(batch: pack.TrainBatch, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    segments = score.segments_of(batch)
    out = {
        name: np.zeros((len(segments), max(stop - start for _, start, stop in segments)), getattr(batch, name).dtype)
        for name in names
    }
    for i, (row, start, stop) in enumerate(segments):
        for name in names:
            out[name][i, : stop - start] = getattr(batch, name)[row, start:stop]
    return out


def section(micro_batches: int = 1) -> TrainerSection:
    return presets.on_cpu(
        TrainerSection(
            pack_tokens=LONGEST, warmup_steps=0, learning_rate=1e-5, micro_batches=micro_batches, share_prompts="off"
        )
    )  # as the rivals


# ----------------------------------------------------------------- runners

Step = Callable[[], tuple[float, float]]  # one update on the same trajectories -> (loss, gradient norm)


def ours(work: TrainWork, params) -> Step:
    mesh = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    micro_batches = 1 if work.model == MODEL else len(work.batch.tokens)
    trainer = step.Trainer(work.model, section(micro_batches), mesh, params, total_steps=1000)
    trainer.warmup(*work.batch.tokens.shape)

    def run() -> tuple[float, float]:
        metrics = trainer.step(work.batch)
        return metrics["trainer/loss"], metrics["trainer/grad_norm"]

    return run


class RivalTrainer:
    """torch in its own interpreter: one JSON line in (a work), one out (seconds, loss, gradient norm)."""

    def __init__(self, folder: Path, install: bool):
        root = Path(".bench") / "transformers"
        python = root / "bin" / "python"
        if install and not _imports_torch(python):
            venv.create(root, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *ENVIRONMENTS["transformers"]], check=True)
        found = next((p for p in (python, Path(sys.executable)) if _imports_torch(p)), None)
        if found is None:
            raise SystemExit(f"error: the rival transformers is not installed; --install makes it in {root}")
        script = Path(__file__).with_name("rival_torch_step.py")
        self._process = subprocess.Popen(
            [str(found), str(script), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, work: TrainWork) -> tuple[float, float, float]:
        line = json.dumps({name: x.tolist() for name, x in work.padded.items()} | {"name": work.name})
        print(line, file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the rival ended with code {self._process.wait()}")
        return tuple(json.loads(answer))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _imports_torch(python: Path) -> bool:
    """False also where an installation was cut short."""
    tried = [str(python), "-c", "import torch, transformers"]
    return python.exists() and not subprocess.run(tried, capture_output=True, check=False).returncode


# ------------------------------------------------------------------ tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rivals", default="plain,transformers", help="of: plain, transformers")
    parser.add_argument("--smollm", action="store_true", help="SmolLM2-135M-Instruct in place of a toy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--install", action="store_true", help="make the environment of torch under .bench/")
    args = parser.parse_args()
    devices.keep_freed_memory()  # as a run's set-up does
    rivals = [name for name in args.rivals.split(",") if name]
    model, params = hf.load(smollm.folder()) if args.smollm else (MODEL, decoder.init_params(MODEL, 0))
    with tempfile.TemporaryDirectory() as temporary:
        folder = smollm.folder() if args.smollm else Path(temporary) / "model"
        if not args.smollm:
            hf.save(folder, MODEL, params)
        external = RivalTrainer(folder, args.install) if "transformers" in rivals else None
        peak = flop_speed()
        print(f"measured: {peak / 1e9:.0f} GFLOP/s; jax {jax.__version__}; tokens/s (MFU) of one update")
        print(
            f"{'work':11s}{'tokens':>7s}{'packed':>8s}{'padded':>8s}{'ours':>16s}"
            + "".join(f"{name:>20s}" for name in rivals)
            + f"{'best rival':>12s}",
            flush=True,
        )
        for work in real_works(model) if args.smollm else works():
            print_row(work, measure(work, params, rivals, external, args.rounds), peak)
        if external:
            external.close()
    if not args.smollm:
        print_memory()


def measure(work: TrainWork, params, rivals: list[str], external: RivalTrainer | None, rounds: int) -> list[float]:
    """Seconds of the best update of each; refuses to compare what does not compute the same."""
    runs: list[Step] = [ours(work, params)]
    runs += [plain_step.runner(work.model, params, work.padded) for name in rivals if name == "plain"]
    first = [run() for run in runs]
    if external:
        first.append(external.ask(work)[1:])
    if not np.allclose(first, first[0], rtol=AGREE, atol=1e-6):
        raise RuntimeError(f"{work.name}: (loss, gradient norm) differ: {first}")
    times = [[float("inf")] for _ in first]
    for _ in range(rounds):
        for run, taken in zip(runs, times):
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
        if external:
            times[-1].append(external.ask(work)[0])
    return [min(taken) for taken in times]


def print_row(work: TrainWork, times: list[float], peak: float) -> None:
    tokens, needed = int(work.lengths.sum()), update_costs.model_flops(work.model, work.lengths)
    cells = [f"{tokens / t:.0f} ({needed / t / peak:.0%})" for t in times]
    shares = [tokens / work.batch.tokens.size, tokens / work.padded["tokens"].size]
    against = f"{min(times[1:]) / times[0]:.2f}x" if times[1:] else ""
    print(
        f"{work.name:11s}{tokens:7d}"
        + "".join(f"{share:8.0%}" for share in shares)
        + f"{cells[0]:>16s}"
        + "".join(f"{cell:>20s}" for cell in cells[1:])
        + f"{against:>12s}",
        flush=True,
    )


def print_memory() -> None:
    """Temporary memory of the loss's gradient: all logits at once, and in chunks of at most so many bytes."""
    cfg = dataclasses.replace(MODEL, vocab_size=WIDE_VOCAB)
    batch = works()[0].batch
    rows, length = batch.tokens.shape
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.arrays().items()}

    def temporary(max_bytes: int) -> int:
        def loss(params, arrays):
            attend = segment_attention(arrays["segment_ids"], arrays["positions"])
            hidden = decoder.forward(
                cfg, decoder.serving_layout(params), arrays["tokens"], arrays["positions"], attend, remat="full"
            )
            l, _ = logits.target_logprobs(cfg, params, hidden, arrays["targets"], max_bytes=max_bytes)
            return jnp.sum(jnp.where(arrays["mask"], l, 0.0))

        compiled = jax.jit(jax.grad(loss)).lower(decoder.abstract_params(cfg), shapes).compile()
        used = compiled.memory_analysis()
        assert used is not None, "every backend that runs here says what a program uses"
        return used.temp_size_in_bytes

    whole = 4 * rows * length * WIDE_VOCAB
    print(f"\nlog-probs of {rows} x {length} tokens over {WIDE_VOCAB} ids: temporary memory of the gradient")
    for name, limit in (("B x L x V at once", whole), ("in chunks", section().logits_bytes)):
        print(f"{name:20s}{temporary(limit) / 2**20:9.0f} MiB   (logits {min(limit, whole) / 2**20:.0f} MiB at once)")


if __name__ == "__main__":
    main()
