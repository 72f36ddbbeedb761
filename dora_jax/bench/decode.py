"""Tokens a second of the rollout engine against other ways to sample from the same weights, log-probs included.

    python -m dora_jax.bench.decode [--rows=1,8,32,128] [--tail=256] [--rivals=plain,transformers,tunix]
                                      [--rounds=3] [--install]

Two kinds of work: fixed lengths (B prompts of 32 tokens, 128 new tokens each) and a long tail (256 samples, median 48,
99 % quantile over 500 tokens, 32 at a time). Rivals run whole batches, as they do; a token beyond a sample's length
counts for nobody. Prefill is included everywhere, compilation nowhere. Rounds are interleaved and the best of each
counts, because neighbours on the machine only ever slow things down. The floor is what the measured memory bandwidth
and matrix speed allow: weights and the KV of the running samples read once a step, or the flops, whichever is more.
Rivals but `plain` run in an environment of their own (`--install` makes it under .bench/) on a folder written here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.bench import plain
from dora_jax.config import RolloutSection
from dora_jax.models import decoder, hf, sharding
from dora_jax.rollout.engine import Engine
from dora_jax.types import SampleId

MODEL = decoder.new_config("qwen3", vocab_size=512, d_model=256, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=32,
                           d_ff=768)
PROMPT = 32
FIXED = 128
TAIL_SAMPLES, TAIL_BATCH, TAIL_MEDIAN, TAIL_SIGMA, TAIL_LIMIT = 256, 32, 48, 1.1, 768
TAIL_ROWS, TAIL_STEPS = 8, 16  # of an engine's decode call on the long tail: rows of like context share a call
FIXED_STEPS = 32
ENVIRONMENTS = {  # rival -> what its environment needs
    "transformers": ("torch==2.13.0+cpu", "transformers==5.23.0", "--extra-index-url",
                     "https://download.pytorch.org/whl/cpu"),
    "tunix": ("google-tunix==0.1.7",),
}


@dataclasses.dataclass(frozen=True)
class Work:
    name: str
    batch: int  # samples at a time
    prompts: np.ndarray  # i32[samples, PROMPT]
    lengths: np.ndarray  # i32[samples] tokens to sample

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def works(rows: list[int], tail_samples: int) -> list[Work]:
    rng = np.random.default_rng(0)

    def work(name: str, batch: int, lengths: np.ndarray) -> Work:
        return Work(name, batch, rng.integers(3, MODEL.vocab_size, (len(lengths), PROMPT)).astype(np.int32), lengths)

    tail = np.exp(rng.normal(np.log(TAIL_MEDIAN), TAIL_SIGMA, tail_samples)).astype(int).clip(1, TAIL_LIMIT)
    fixed = [work(f"fixed B={b}", b, np.full(b, FIXED)) for b in rows]
    return [*fixed, work("long tail", TAIL_BATCH, tail)] if tail_samples else fixed


def engine_runner(work: Work, params) -> Callable[[], None]:
    """A closure that samples the whole work once, on a fresh set of ids each time."""
    longest = int(work.lengths.max())
    pages = work.batch * (-(-(PROMPT + longest) // 16) + 1)
    fixed = longest == work.lengths.min()
    section = RolloutSection(slots=work.batch, pages=pages, max_prompt_tokens=PROMPT, max_new_tokens=longest,
                             prefill_tokens=PROMPT * work.batch, decode_rows=0 if fixed else TAIL_ROWS,
                             decode_steps=FIXED_STEPS if fixed else TAIL_STEPS)
    engine = Engine(MODEL, section, sharding.make_mesh(jax.devices()[:1], 1, 1, 1), seed=0, eos_ids=(),
                    vocab_limit=MODEL.vocab_size)
    engine.load(0, jax.device_put(params, engine.param_shardings))
    engine.warmup()
    runs = iter(range(1 << 30))

    def run() -> None:
        group = next(runs)
        for index, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
            engine.submit(SampleId(group, index), prompt, 0, int(length))
        tokens = 0
        while not engine.idle:
            tokens += engine.tick().tokens
        if tokens != work.tokens:
            raise RuntimeError(f"{tokens} tokens were sampled, not {work.tokens}")
        engine.drop(0)  # no prefix is left for the next round
        engine.load(0, jax.device_put(params, engine.param_shardings))

    return run


# ------------------------------------------------------------------- floor


def machine() -> tuple[float, float]:
    """(bytes/s of a copy, reads and writes counted, flop/s of a matrix product), the best of a few."""
    x = jnp.ones(16 << 20, jnp.float32)
    m = jnp.ones((2048, 2048), jnp.float32)
    copy, product = jax.jit(lambda x: x + 1), jax.jit(lambda m: m @ m)
    return 2 * x.nbytes / best_s(lambda: copy(x).block_until_ready(), 50), \
        2 * 2048**3 / best_s(lambda: product(m).block_until_ready(), 20)


def floor_s(work: Work, bandwidth: float, flops: float) -> float:
    """Steps at full batches; each reads the weights once and each running sample's KV so far."""
    weights = sum(x.size for x in jax.tree.leaves(decoder.abstract_params(MODEL)))
    kv_token = 2 * MODEL.n_layers * MODEL.n_kv_heads * MODEL.head_dim * 4
    steps = work.tokens / work.batch
    kv = sum(kv_token * (PROMPT * n + n * (n + 1) / 2) for n in work.lengths.tolist())
    decode = max((steps * weights * 4 + kv) / bandwidth, 2 * weights * work.tokens / flops)
    return decode + 2 * weights * PROMPT * len(work.lengths) / flops


def best_s(call: Callable[[], object], rounds: int) -> float:
    call()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


# ------------------------------------------------------------------ rivals


class External:
    """A rival in its own interpreter: one JSON line in (a work), one out (seconds)."""

    def __init__(self, name: str, folder: Path, install: bool):
        root = Path(".bench") / name
        python = root / "bin" / "python"
        if install and not python.exists():
            venv.create(root, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *ENVIRONMENTS[name]], check=True)
        script = Path(__file__).with_name(f"rival_{name}.py")
        interpreter = str(python) if python.exists() else sys.executable
        if not python.exists() and importlib.util.find_spec(name) is None:
            raise SystemExit(f"error: the rival {name} is not installed; --install makes its environment in {root}")
        self._process = subprocess.Popen([interpreter, str(script), str(folder)], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)

    def runner(self, work: Work) -> Callable[[], float]:
        line = json.dumps({"batch": work.batch, "prompts": work.prompts.tolist(), "lengths": work.lengths.tolist()})

        def run() -> float:
            print(line, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the rival ended with code {self._process.wait()}")
            return float(answer)

        return run

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def timed(run: Callable[[], float | None]) -> float:
    began = time.perf_counter()
    reported = run()
    return time.perf_counter() - began if reported is None else reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--tail", type=int, default=TAIL_SAMPLES, help="samples of the long tail; 0 leaves it out")
    parser.add_argument("--rivals", default="plain,transformers,tunix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--install", action="store_true", help="make each rival's environment under .bench/")
    args = parser.parse_args()
    stacked = decoder.init_params(MODEL, 0)
    params = jax.jit(decoder.serving_layout)(stacked)
    rivals = [name for name in args.rivals.split(",") if name]
    with tempfile.TemporaryDirectory() as folder:
        hf.save(Path(folder) / "model", MODEL, stacked)
        external = {name: External(name, Path(folder) / "model", args.install) for name in rivals if name != "plain"}
        bandwidth, flops = machine()
        print(f"measured: {bandwidth / 1e9:.1f} GB/s copy, {flops / 1e9:.0f} GFLOP/s; jax {jax.__version__}")
        print(f"{'tokens/s':12s}{'engine':>10s}" + "".join(f"{name:>14s}" for name in rivals)
              + f"{'floor':>10s}{'of floor':>10s}{'best rival':>12s}", flush=True)
        for work in works([int(b) for b in args.rows.split(",") if b], args.tail):
            runs = [engine_runner(work, params)]
            runs += [external[name].runner(work) if name in external else plain.runner(MODEL, params, work)
                     for name in rivals]
            for run in runs:
                timed(run)
            rounds = [[timed(run) for run in runs] for _ in range(args.rounds)]
            times = [min(of_one) for of_one in zip(*rounds, strict=True)]
            print_row(work, times, floor_s(work, bandwidth, flops))
        for rival in external.values():
            rival.close()


def print_row(work: Work, times: list[float], floor: float) -> None:
    speeds = [work.tokens / t for t in times]
    against = f"{speeds[0] / max(speeds[1:]):.2f}x" if speeds[1:] else ""
    print(f"{work.name:12s}{speeds[0]:10.0f}" + "".join(f"{speed:14.0f}" for speed in speeds[1:])
          + f"{work.tokens / floor:10.0f}{times[0] / floor:9.2f}x{against:>12s}", flush=True)


if __name__ == "__main__":
    main()
