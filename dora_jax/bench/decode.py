"""Tokens a second of the rollout engine against other ways to sample from the same weights, log-probs included.

    python -m dora_jax.bench.decode [--rows=1,8,32,128] [--tail=256] [--rivals=plain,transformers,tunix]
                                      [--copies=1] [--instances=0] [--rounds=3] [--install]
    python -m dora_jax.bench.decode --smollm --rows=32 --tail=64 --rivals=transformers --rounds=1
    python -m dora_jax.bench.decode --moe --rows=32 --tail=0 --rivals=transformers
    python -m dora_jax.bench.decode --contexts=1024,32768 [--model=toy] [--rows=32] [--attention=reference] [--memory=2]

Two kinds of work: fixed lengths (B prompts of 32 tokens, 128 new tokens each) and a long tail (256 samples, median 48,
99 % quantile over 500 tokens, 32 at a time). The engine runs as a job runs it: an instance a core, each on a device of
its own, fed from one queue of samples. Rivals run whole batches over all cores, as they do (`--copies=2`: each started
twice, with half of the samples); a token beyond a sample's length does not count. `plain` is the plain way in JAX
and no rival. Prefill is included everywhere, compilation nowhere. Rounds are interleaved and the best of each counts,
because neighbours on the machine only ever slow things down.
The floor is what the machine's measured speeds allow: weights and the KV of the running samples read once a step, at
the speed at which all cores read as many bytes over and over, or the flops at that of a large matrix product, whichever
takes longer. Rivals run in an environment of their own (`--install` makes it under .bench/) on a folder written here.
With --smollm the weights are those of a real model of 135M parameters (smollm.py): prompts of 48 tokens, 48 new ones
each at fixed lengths, and one instance over all cores, because every instance reads all weights at every step.
Pages are what all slots need, and one a slot more, which admission keeps free for running samples to grow into.
Tunix is the sampler of its newest published package, 0.1.7; the engine of its development branch is not published.
With --moe the toy has 8 layers of 16 experts, of which a token takes 2; the rival runs its fastest experts.
With --contexts: the decode call alone as a share of the memory's speed, see bandwidth.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.bench import bandwidth, plain, smollm
from dora_jax.config import Config, RolloutSection
from dora_jax.models import decoder, hf, sharding
from dora_jax.models.families.config import Experts
from dora_jax.plan import devices, presets
from dora_jax.rollout.engine import Engine
from dora_jax.runtime.assembly.run import engine_of
from dora_jax.types import SampleId

MODEL = decoder.new_config("qwen3", **bandwidth.TOY)
MIXTURE = decoder.new_config(
    "qwen3_moe", **bandwidth.TOY | {"n_layers": 8}, experts=Experts(count=16, per_token=2, width=128)
)
TAIL_SAMPLES, TAIL_BATCH, TAIL_MEDIAN, TAIL_SIGMA, TAIL_LIMIT = 256, 32, 48, 1.1, 768


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, and how its engine is set up."""

    model: decoder.ModelConfig = MODEL
    prompt: int = 32
    fixed: int = 128  # new tokens of a sample
    fixed_rows: int = 32  # of a decode call; more rows at once outgrow a core's cache
    fixed_steps: int = 32
    fixed_block: int = 64
    tail_rows: int = 8  # rows of like context share a call
    tail_steps: int = 16
    tail_block: int = 128
    prefill: int = 128  # prompt tokens of a call
    tail_prefill: int = 128  # the same, where samples start a few at a time

    @classmethod
    def real(cls, model: decoder.ModelConfig) -> Subject:
        """Few calls a step, because each reads all weights: one, and two where short and long contexts meet."""
        return cls(
            model,
            prompt=48,
            fixed=48,
            fixed_steps=48,
            fixed_block=48,
            tail_rows=TAIL_BATCH // 2,
            prefill=768,
            tail_prefill=192,
        )


ENVIRONMENTS = {  # rival -> what its environment needs
    "transformers": (
        "torch==2.13.0+cpu",
        "transformers==5.23.0",
        "--extra-index-url",
        "https://download.pytorch.org/whl/cpu",
    ),
    "tunix": ("google-tunix==0.1.7",),
}


@dataclasses.dataclass(frozen=True)
class DecodeWork:
    name: str
    subject: Subject
    batch: int  # samples at a time
    prompts: np.ndarray  # i32[samples, subject.prompt]
    lengths: np.ndarray  # i32[samples] tokens to sample

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def works(subject: Subject, rows: list[int], tail_samples: int) -> list[DecodeWork]:
    rng = np.random.default_rng(0)

    def work(name: str, batch: int, lengths: np.ndarray) -> DecodeWork:
        prompts = rng.integers(3, subject.model.vocab_size, (len(lengths), subject.prompt)).astype(np.int32)
        return DecodeWork(name, subject, batch, prompts, lengths)

    tail = np.exp(rng.normal(np.log(TAIL_MEDIAN), TAIL_SIGMA, tail_samples)).astype(int).clip(1, TAIL_LIMIT)
    fixed = [work(f"fixed B={b}", b, np.full(b, subject.fixed)) for b in rows]
    return [*fixed, work("long tail", TAIL_BATCH, tail)] if tail_samples else fixed


def engine_runner(work: DecodeWork, params) -> Callable[[], None]:
    """A closure that samples the whole work once, on a fresh set of ids each time."""
    devices = jax.devices()[: work.batch]
    engines = [new_engine(work, work.batch // len(devices), device) for device in devices]
    for engine in engines:
        engine.load(0, jax.device_put(params, engine.param_shardings))
        engine.warmup()
    runs = iter(range(1 << 30))
    threads = ThreadPoolExecutor(len(engines))

    def run() -> None:
        group = next(runs)
        todo = iter(
            [
                (SampleId(group, index), prompt, 0, int(length))
                for index, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
            ]
        )
        tokens = sum(threads.map(lambda engine: drain(engine, todo), engines))
        if tokens != work.tokens:
            raise RuntimeError(f"{tokens} tokens were sampled, not {work.tokens}")
        for engine in engines:
            engine.drop(0)  # no prefix is left for the next round
            engine.load(0, jax.device_put(params, engine.param_shardings))

    return run


def new_engine(work: DecodeWork, slots: int, device: jax.Device) -> Engine:
    longest, s = int(work.lengths.max()), work.subject
    fixed = longest == work.lengths.min()
    sizes = (s.fixed_rows, s.fixed_steps, s.fixed_block, s.prefill)
    rows, steps, block, prefill = sizes if fixed else (s.tail_rows, s.tail_steps, s.tail_block, s.tail_prefill)
    section = RolloutSection(
        slots=slots,
        pages=slots * (-(-(s.prompt + longest) // 16) + 2),
        max_prompt_tokens=s.prompt,
        max_new_tokens=longest,
        prefill_tokens=s.prompt * slots,
        prefill_call_tokens=prefill,
        decode_rows=min(rows, slots),
        decode_steps=steps,
        context_block=block,
    )
    return engine_of(presets.filled(Config(rollout=section)), s.model, sharding.make_mesh([device], 1, 1, 1))


def drain(engine: Engine, todo: Iterator[tuple]) -> int:
    """Tokens that this instance sampled: it takes a sample of the common queue whenever it has a free slot."""
    held = tokens = 0
    while True:
        while held < engine.shapes.slots and (sample := next(todo, None)):
            engine.submit(*sample)
            held += 1
        if not held:
            return tokens
        result = engine.tick()
        tokens += result.tokens
        held -= len(result.finished)


# ------------------------------------------------------------------- floor


def flop_speed() -> float:
    """flop/s of a large matrix product."""
    m = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(lambda m: m @ m)
    return 2 * 2048**3 / best_s(lambda: product(m).block_until_ready(), 20)


def read_speed(n_bytes: int) -> float:
    """bytes/s of a product of a matrix of so many bytes with a vector, again and again."""
    matrix, vector = jnp.ones((n_bytes // 4096, 1024), jnp.float32), jnp.ones(1024, jnp.float32)
    product = jax.jit(lambda m, v: m @ v)
    return matrix.nbytes / best_s(lambda: product(matrix, vector).block_until_ready(), 30)


def floor_s(work: DecodeWork, flops: float) -> float:
    """Steps at full batches; each reads the weights once and each running sample's KV so far."""
    model, prompt = work.subject.model, work.subject.prompt
    weights = model.matrix_params  # a batch meets all experts, a token those that it is sent to
    kv_token = 2 * model.n_layers * model.n_kv_heads * model.head_dim * 4
    steps = work.tokens / work.batch
    read = steps * weights * 4 + sum(kv_token * (prompt * n + n * (n + 1) / 2) for n in work.lengths.tolist())
    decode = max(read / read_speed(int(read / steps)), 2 * model.active_params * work.tokens / flops)
    return decode + 2 * model.active_params * prompt * len(work.lengths) / flops


def best_s(call: Callable[[], object], rounds: int) -> float:
    call()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


# ------------------------------------------------------------------ rivals


class RivalDecoder:
    """A rival in interpreters of its own, `copies` at once: one JSON line in (a share of a work), one out (seconds)."""

    def __init__(self, name: str, folder: Path, install: bool, copies: int):
        root = Path(".bench") / name
        python = root / "bin" / "python"
        if install and not python.exists():
            venv.create(root, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *ENVIRONMENTS[name]], check=True)
        script = Path(__file__).with_name(f"rival_{name}.py")
        interpreter = str(python) if python.exists() else sys.executable
        if not python.exists() and importlib.util.find_spec(name) is None:
            raise SystemExit(f"error: the rival {name} is not installed; --install makes its environment in {root}")
        self._processes = [
            subprocess.Popen(
                [interpreter, str(script), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(copies)
        ]

    def runner(self, work: DecodeWork) -> Callable[[], float]:
        processes = self._processes[: work.batch]
        n = len(processes)
        lines = [
            json.dumps(
                {
                    "batch": work.batch // n,
                    "prompts": work.prompts[i::n].tolist(),
                    "lengths": work.lengths[i::n].tolist(),
                }
            )
            for i in range(n)
        ]

        def run() -> float:
            for process, line in zip(processes, lines, strict=True):
                print(line, file=process.stdin, flush=True)
            answers = [process.stdout.readline() for process in processes if process.stdout is not None]
            if not all(answers):
                raise RuntimeError(f"the rival ended with code {processes[answers.index('')].wait()}")
            return max(map(float, answers))

        return run

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def timed(run: Callable[[], float | None]) -> float:
    began = time.perf_counter()
    reported = run()
    return time.perf_counter() - began if reported is None else reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--tail", type=int, default=TAIL_SAMPLES, help="samples of the long tail; 0 leaves it out")
    parser.add_argument("--rivals", default="plain,transformers,tunix")
    parser.add_argument("--copies", type=int, default=1, help="processes of each rival")
    parser.add_argument("--instances", type=int, default=0, help="of the engine; 0: one a core")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--install", action="store_true", help="make each rival's environment under .bench/")
    parser.add_argument("--smollm", action="store_true", help="SmolLM2-135M-Instruct in place of a toy")
    parser.add_argument("--moe", action="store_true", help="a mixture of 16 experts in place of a dense toy")
    parser.add_argument("--contexts", default="", help="lengths at which to time the decode call alone")
    parser.add_argument("--model", default="toy", choices=bandwidth.SIZES, help="of --contexts")
    parser.add_argument("--attention", default="reference", choices=bandwidth.PAGE, help="of --contexts")
    parser.add_argument("--memory", type=float, default=2, help="GB that --contexts may fill")
    args = parser.parse_args()
    if args.contexts:
        contexts, rows = [int(c) for c in args.contexts.split(",")], int(args.rows.split(",")[-1])
        for line in bandwidth.table(args.model, contexts, rows, args.attention, args.memory * 1e9, read_speed, best_s):
            print(line, flush=True)
        return
    instances = args.instances or (1 if args.smollm else len(os.sched_getaffinity(0)))
    devices.setup_platform(Config(cpu_devices=instances))
    rivals = [name for name in args.rivals.split(",") if name]
    flops = flop_speed()  # before any rival starts: they load for a while
    with tempfile.TemporaryDirectory() as temporary:
        folder, subject, params = (
            real_model() if args.smollm else toy_model(Path(temporary) / "model", MIXTURE if args.moe else MODEL)
        )
        external = {name: RivalDecoder(name, folder, args.install, args.copies) for name in rivals if name != "plain"}
        print(f"measured: {flops / 1e9:.0f} GFLOP/s; {jax.device_count()} instances; jax {jax.__version__}")
        print(
            f"{'tokens/s':12s}{'engine':>10s}"
            + "".join(f"{name:>14s}" for name in rivals)
            + f"{'floor':>10s}{'of floor':>10s}{'best rival':>12s}",
            flush=True,
        )
        for work in works(subject, [int(b) for b in args.rows.split(",") if b], args.tail):
            runs: list[Callable[[], float | None]] = [engine_runner(work, params)]
            runs += [
                external[name].runner(work) if name in external else plain.runner(subject.model, params, work)
                for name in rivals
            ]
            for name, run in zip(("engine", *rivals), runs, strict=True):
                if name not in external:  # those warm up by themselves
                    timed(run)
            rounds = [[timed(run) for run in runs] for _ in range(args.rounds)]
            times = dict(zip(("engine", *rivals), map(min, zip(*rounds, strict=True)), strict=True))
            print_row(work, times, floor_s(work, flops))
        for rival in external.values():
            rival.close()


def toy_model(folder: Path, model: decoder.ModelConfig) -> tuple[Path, Subject, decoder.Params]:
    """(its folder, how it runs, its weights in the serving layout)."""
    stacked = decoder.init_params(model, 0)
    hf.save(folder, model, stacked)
    return folder, Subject(model), jax.jit(decoder.serving_layout)(stacked)


def real_model() -> tuple[Path, Subject, decoder.Params]:
    model, stacked = hf.load(folder := smollm.folder())
    return folder, Subject.real(model), jax.jit(decoder.serving_layout)(stacked)


def print_row(work: DecodeWork, times: dict[str, float], floor: float) -> None:
    rivals = [took for name, took in times.items() if name not in ("engine", "plain")]
    against = f"{min(rivals) / times['engine']:.2f}x" if rivals else ""
    speeds = [f"{work.tokens / took:{14 if i else 10}.0f}" for i, took in enumerate(times.values())]
    print(
        f"{work.name:12s}{''.join(speeds)}{work.tokens / floor:10.0f}{times['engine'] / floor:9.2f}x{against:>12s}",
        flush=True,
    )


if __name__ == "__main__":
    main()
