"""What one GPU does with the calls of a run: its speed of light, the kernels, decoding, the gap, training, memory.

    python -m dora_jax.bench.device [--stages=read,kernel,...] [--out=device.json] [--size=full] [--again]
    python -m dora_jax.bench.device stage --name=STAGE [--out=device.json] [--size=full]
    python -m dora_jax.bench.device aot [--only=TEXT] [--programs=train,publish,decode,narrow,verify,prefill,read,write]
    [--layers=N]

Weights and prompts are random, nothing is read or downloaded; engine and trainer come from the assembly of a run, bf16
and with the kernels of its presets. Each stage runs in a process of its own, for eight minutes at most; `stage` is one of them, in this process. Each
measurement goes to --out at once, so the same command goes on where it was cut off; a failure is an entry, and only
--again tries it again. --size=tiny goes through everything on a CPU and means nothing.
  read         reading 8 GiB, and a large bf16 matrix product: what the shares below are of
  kernel       paged attention alone, 64 ragged rows of up to 4k: the reference, ours, ours by block, span and stages
  flashinfer   the same by FlashInfer's own wrapper, where it and torch are installed
  decode-SIZE  the engine, 64 ragged rows of up to 4k: (weights + live KV bytes) / time of a step, of the read speed,
               with results read late and not; idle: the share of that time in which the device has nothing to do
  gap          |engine - trainer| log-probs in bf16, beside those of one bf16 forward pass against f32
  train-0.6B   an update by kernel and remat: the model's FLOPs over the time, of the matrix product's
  memory       trainer and engine of 0.6B on this device, with the pages that the plan leaves: their peak, and its
Targets on an H100 or H200: decode-0.6B and decode-8B read at 60 %, our kernel at 80 % of FlashInfer, training at 40 %
MFU, idle 2 % at most.

aot: a run's programs compiled for TPU slices and GPUs, on a machine without one: what each chip holds, computes and
sends. Needs libtpu (the extra `aot`; `cuda` for the rows of GPUs) and a minute or more a row. Each row is a configuration that names its slice, resolved by
the presets; its programs are those that `python -m dora_jax.train` would compile there (dora_jax/aot/). `model` is
XLA's own estimate of the cycles at the chip's clock. It counts no kernel: each has a line of its own and is charged
twice the larger of FLOPs over the chip's peak and bytes over its bandwidth. Nor does it count what is sent, which
overlap has to hide. It proves that the programs compile and fit, never that they are right or fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax import aot as compilation
from dora_jax.aot import roles
from dora_jax.bench import harness
from dora_jax.config import Config, OrchestratorSection, TrainerSection
from dora_jax.models import decoder
from dora_jax.models.families import KNOWN, new_config
from dora_jax.models.families.config import ModelConfig, Scores
from dora_jax.ops import paged_gpu
from dora_jax.ops.attention import paged_reference
from dora_jax.plan import budget, devices, memory, presets
from dora_jax.publish import placed
from dora_jax.rollout.engine import Engine
from dora_jax.runtime.assembly.run import engine_of, packer, trainer_of
from dora_jax.trainer.flops import model_flops
from dora_jax.types import SampleId, ScoredGroup


class Record:
    """The JSON file, a list of measurements; one process at a time adds to it."""

    def __init__(self, path: Path, stage: str = ""):
        self.path, self.stage = path, stage
        self.entries: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def add(self, name: str, value: float | None, unit: str, **more: Any) -> None:
        value = None if value is None else float(value)
        self.entries.append({"stage": self.stage, "name": name, "value": value, "unit": unit, **more})
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.entries, indent=1))
        unfinished.replace(self.path)
        print(line(self.entries[-1]), flush=True)

    def share(self, needed: float, stage: str, name: str) -> float | None:
        """The share of what another stage has measured, where it has."""
        value = next((e["value"] for e in self.entries if (e["stage"], e["name"]) == (stage, name)), None)
        return needed / value if value else None

    def has(self, name: str) -> bool:
        return any((e["stage"], e["name"]) == (self.stage, name) for e in self.entries)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """What fails inside becomes an entry of this name, and the stage goes on."""
        try:
            yield
        except Exception as error:  # an out-of-memory error or a refused option is a result here
            traceback.print_exc()
            self.add(name, None, "failed", error=f"{type(error).__name__}: {error}"[:2000])


def line(entry: dict[str, Any]) -> str:
    value = "" if entry["value"] is None else f"{entry['value']:.4g}"
    note = entry.get("error", "").partition("\n")[0] or entry.get("note", "")
    return f"{entry['stage']:12s} {entry['name']:58s} {value:>9s} {entry['unit']:10s} {note}".rstrip()


GIB = 2**30
SHAPES = {"0.6B": (16, 8, 128), "8B": (32, 8, 128)}  # query heads, KV heads, head size of Qwen3
PAGE = 64
SWEEP: tuple[dict[str, int], ...] = ({}, {"span": 256}, {"span": 1024}, {"span": 2048}, {"block": 32}, {"block": 128}, {"stages": 2}, {"stages": 5},
         {"warps": 8}, {"block": 128, "warps": 8}, {"span": 1024, "stages": 5})  # fmt: skip
READ = "read speed"
MATMUL = "bf16 matrix product"
best_s = functools.partial(harness.best_s, calls=10, rounds=5)


def read(record: Record, cfg: ModelConfig, tiny: bool) -> None:
    device = jax.devices()[0]
    record.add("devices", len(jax.devices()), device.platform, note=f"{device.device_kind}, jax {jax.__version__}")
    rows, n = (2**10, 2**8) if tiny else (2**16, 2**13)
    x = jax.jit(lambda: (jax.lax.broadcasted_iota(jnp.int32, (rows, rows), 1) % 251).astype(jnp.bfloat16))()
    with record.attempt(READ):
        reads = (lambda x: x.sum(1, dtype=jnp.float32), lambda x: x.max(1), lambda x: x.max(0))
        best = min(best_s(jax.jit(each), x) for each in reads)
        record.add(READ, x.nbytes / best / 1e9, "GB/s", note=f"{x.nbytes / GIB:.3g} GiB of bf16")
    with record.attempt("copy speed"):
        took = best_s(jax.jit(lambda x: x + jnp.bfloat16(1)), x)
        record.add("copy speed", 2 * x.nbytes / took / 1e9, "GB/s", note="read and written")
    del x
    with record.attempt(MATMUL):
        a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in (0, 1))
        took = best_s(jax.jit(jnp.matmul), a, b)
        record.add(MATMUL, 2 * n**3 / took / 1e12, "TFLOP/s", note=f"{n} x {n} x {n}")


# --------------------------------------------------------- paged attention


def paged_case(shape: tuple[int, int, int], rows: int, context: int, page: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Lengths and tables of ragged rows, whose pages lie in no order; the bytes of one layer in bf16: what the kernel
    has to read."""
    rng = np.random.default_rng(0)
    lens = rng.integers(1, context + 1, rows).astype(np.int32)
    tables = rng.permutation(np.arange(1, 1 + rows * (context // page), dtype=np.int32)).reshape(rows, -1)
    return lens, tables, int(lens.sum()) * 2 * shape[1] * shape[2] * 2


def kernel(record: Record, cfg: ModelConfig, tiny: bool) -> None:
    rows, context, page = (4, 256, 16) if tiny else (64, 4096, PAGE)
    repeats = 1 if tiny else 20
    for name, (heads, kv, d) in {"tiny": (4, 2, 16)}.items() if tiny else SHAPES.items():
        *case, needed = paged_case((heads, kv, d), rows, context, page)
        lens, tables = map(jnp.asarray, case)
        pool = jax.random.normal(jax.random.key(0), (int(tables.max()) + 1, page, 2 * kv, d), jnp.bfloat16)
        q = jax.random.normal(jax.random.key(1), (rows, 1, heads, d), jnp.bfloat16)
        ours = functools.partial(paged_gpu.paged_attention, interpret=tiny)
        label = f"{name}: error of ours against the reference"
        with record.attempt(label):
            both = (attend(q, pool, lens, tables, Scores(d**-0.5)).astype(jnp.float32)
                    for attend in (ours, paged_reference))  # fmt: skip
            record.add(label, float(jnp.abs(jnp.subtract(*both)).max()), "largest", note="bf16, values near 1")
        kernels = {"reference": (paged_reference, 1)}  # a loop would gather the pages once
        for options in SWEEP[:1] if tiny else SWEEP:
            chosen = ", ".join(f"{key} {value}" for key, value in options.items())
            kernels[f"ours{chosen and f', {chosen}'}"] = functools.partial(ours, **options), repeats
        for kind, (attend, most) in kernels.items():
            if record.has(label := f"{name}: {kind}"):
                continue
            # each call attends with what the one before gave, inside one program: no launch is in the time
            with record.attempt(label):
                once = lambda pool, i, q: attend(q, pool, lens, tables, Scores(d**-0.5))
                chain = jax.jit(lambda q, pool: jax.lax.fori_loop(0, most, functools.partial(once, pool), q))
                add_share(record, label, needed, best_s(chain, q, pool, calls=2) / most)


def add_share(record: Record, label: str, needed_bytes: int, seconds: float) -> None:
    """Adds the time, and as what share of the read speed it reads what has to be read."""
    note = f"{seconds * 1e6:.1f} us, {needed_bytes / 1e6:.1f} MB"
    record.add(label, record.share(needed_bytes / seconds / 1e9, "read", READ), "of read", note=note, seconds=seconds)


def flashinfer(record: Record, tiny: bool) -> None:
    """FlashInfer reads [pages, 2, page_size, K, D]; its plan is made once, outside of the time."""
    missing = [name for name in ("torch", "flashinfer") if importlib.util.find_spec(name) is None]
    if tiny or missing:
        record.add("installed", 0, "skipped", note="tiny" if tiny else f"no {', '.join(missing)} here")
        return
    import flashinfer as rival
    import torch

    for name, (heads, kv, d) in SHAPES.items():
        lens, tables, needed = paged_case((heads, kv, d), 64, 4096, PAGE)
        counts = -(-lens // PAGE)
        i32 = functools.partial(torch.tensor, dtype=torch.int32, device="cuda")
        pages = i32(np.concatenate([row[:n] for row, n in zip(tables, counts, strict=True)]))
        bf16 = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        pool = bf16(int(tables.max()) + 1, 2, PAGE, kv, d)
        q = bf16(64, heads, d)
        for tensor_cores in (True, False):
            label = f"{name}: FlashInfer, tensor cores {'on' if tensor_cores else 'off'}"
            with record.attempt(label):
                wrapper = rival.BatchDecodeWithPagedKVCacheWrapper(
                    torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=tensor_cores
                )
                wrapper.plan(
                    i32(np.concatenate([[0], np.cumsum(counts)])), pages, i32(lens - (counts - 1) * PAGE), heads, kv,
                    d, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)  # fmt: skip
                add_share(record, label, needed, _torch_s(wrapper.run, q, pool))
                theirs = record.entries[-1]["value"]
                if theirs and (ratio := record.share(theirs, "kernel", f"{name}: ours")):
                    record.add(f"{label}: ours beside it", 1 / ratio, "times", note="at least 0.8")


def _torch_s(run: Callable[..., Any], *arguments: Any, calls: int = 20, rounds: int = 5) -> float:
    """Seconds of one call on the device, the best of some rounds."""
    import torch

    run(*arguments)
    taken = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run(*arguments)
        stop.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(stop) / 1e3 / calls)
    return min(taken)


# ------------------------------------------------------------- a model

TINY = new_config("qwen3", vocab_size=512, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=128)


def peak_gib() -> float | None:
    """The most that this process has held on the device so far."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats["peak_bytes_in_use"] / GIB if "peak_bytes_in_use" in stats else None


COMMAND_BUFFERS = {"none": "", "with loops": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE"}


class Decode(NamedTuple):
    """Sizes of the decode stages: prompts of up to `context` tokens, then new ones."""

    rows: int
    context: int
    new: int
    ticks: int  # of one round
    rounds: int


FULL = Decode(rows=64, context=3584, new=512, ticks=16, rounds=3)
SMALL = Decode(rows=4, context=48, new=80, ticks=2, rounds=2)


def decode(record: Record, cfg: ModelConfig, tiny: bool) -> None:
    size = SMALL if tiny else FULL
    variants: dict[str, dict[str, Any]] = {f"results late: {late}": {"late_results": late} for late in ("on", "off")}
    if cfg.d_model < 2048 and not tiny:
        variants |= {
            f"command buffers: {name}": {"compiler_options": {"xla_gpu_enable_command_buffer": value}}
            for name, value in COMMAND_BUFFERS.items()
        }
    params = None
    for name, options in variants.items():
        if record.has(name):
            continue
        with record.attempt(name):
            config = harness.config_of("bfloat16", slots=size.rows, max_prompt_tokens=size.context,
                                       max_new_tokens=size.new, **options)  # fmt: skip
            # for these rows, and a page of each that a shared prompt may cost
            pages = size.rows * (-(-(size.context + size.new) // config.rollout.page_size) + 1)
            config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, pages=pages))
            if params is None:
                params = harness.published(config, cfg, decoder.init_params(cfg, 0, dtype=jnp.bfloat16))
            decode_variant(record, name, config, cfg, params, size)
        gc.collect()  # the engine's pool is the next one's memory


def decode_variant(record: Record, name: str, config: Config, cfg: ModelConfig, params: Any, size: Decode) -> None:
    section = config.rollout
    engine = engine_of(config, cfg, harness.one_device())
    began = time.perf_counter()
    engine.load(0, placed(params, engine.param_shardings))
    engine.warmup()
    warmup_s, compiled = time.perf_counter() - began, engine.compiled
    lengths = np.random.default_rng(1).integers(1, size.context + 1, size.rows)
    total = lengths.sum()
    submitted_s, _ = harness.timed(submit, engine, cfg, lengths, size.new)
    record.add(f"{name}: prefill", total / submitted_s, "tokens/s", note=f"{total} tokens")
    generate = engine.device.generate
    last: list[Any] = []

    def kept(*args: Any) -> Any:
        last[:] = args
        return generate(*args)

    engine.device.generate = kept  # type: ignore[method-assign, assignment]
    taken = []
    for _ in range(size.rounds):
        took, tokens = harness.timed(lambda: sum(engine.tick().tokens for _ in range(size.ticks)))
        taken.append(took * size.rows / tokens)
    step_s = float(np.median(taken))
    held = total + size.rows * (size.ticks * size.rounds // 2) * section.decode_steps
    live = int(held) * cfg.cache_numbers_on(1) * 2
    # of the weights in bf16 a step reads all, but of an embedding that is no head only the rows' own
    unread = 0 if cfg.tie_embeddings else cfg.vocab_size * cfg.d_model
    needed = 2 * (cfg.matrix_params + cfg.gain_params - unread) + live
    with record.attempt(f"{name}: idle"):
        # the last call again and again with nothing between; its samples are worth nothing then
        device_s = best_s(generate, *last, rounds=2) / section.decode_steps
        note = f"device {device_s * 1e3:.3f} ms a step"
        record.add(f"{name}: idle", max(0.0, 1 - device_s / step_s), "of step", note=note)
    note = f"{compiled} programs; attention {section.attention}, page {section.page_size}, {section.pages} pages"
    record.add(f"{name}: warm-up", warmup_s, "s", note=note)
    note = f"since the process began; weights and live KV {needed / GIB:.2f}"
    record.add(f"{name}: peak memory", peak_gib(), "GiB", note=note)
    note = f"{step_s * 1e3:.3f} ms a step, {size.rows / step_s:.0f} tokens/s, {live / 1e9:.2f} GB of KV"
    record.add(name, record.share(needed / step_s / 1e9, "read", READ), "of read", seconds=step_s, note=note)


def submit(engine: Engine, cfg: ModelConfig, lengths: np.ndarray, new: int) -> None:
    """A sample a length, and ticks until all of them decode; a prompt is prefilled before its sample comes."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, cfg.vocab_size, n).astype(np.int32) for n in lengths]
    prefixes = [engine.prefill(prompt, 0) for prompt in prompts]
    for i, prompt in enumerate(prompts):
        engine.submit(SampleId(i, 0), prompt, 0, new)
    for _ in range(100):
        if len(engine.tick().progress) == len(prompts):
            break
    else:
        raise RuntimeError("the rows never decoded side by side")
    for prefix in prefixes:
        engine.release(prefix)


class DeviceWork(NamedTuple):
    """Sizes of what is trained on: groups of samples, packed rows."""

    groups: int
    group_size: int
    prompt: int
    new: int
    pack: int
    micro_batches: int


GAP = {
    False: DeviceWork(groups=8, group_size=8, prompt=64, new=192, pack=2048, micro_batches=2),
    True: DeviceWork(groups=2, group_size=2, prompt=8, new=24, pack=64, micro_batches=1),
}
TRAIN = {
    False: DeviceWork(groups=8, group_size=8, prompt=256, new=1792, pack=4096, micro_batches=16),
    True: DeviceWork(groups=2, group_size=2, prompt=8, new=24, pack=64, micro_batches=1),
}
TRAINED = (("cudnn", "none"), ("cudnn", "dots"), ("cudnn", "full"), ("reference", "full"))


def train_config(work: DeviceWork, dtype: str = "bfloat16", **changes: Any) -> Config:
    """changes: of the trainer; dtype: of the model."""
    trainer = TrainerSection(pack_tokens=work.pack, micro_batches=work.micro_batches, learning_rate=1e-6, **changes)
    orchestrator = OrchestratorSection(groups_per_step=work.groups, group_size=work.group_size)
    return harness.config_of(dtype, {"orchestrator": orchestrator, "trainer": trainer},
                             slots=work.groups * work.group_size, max_prompt_tokens=work.prompt,
                             max_new_tokens=work.new)  # fmt: skip


def gap(record: Record, cfg: ModelConfig, tiny: bool) -> None:
    work = GAP[tiny]
    config = train_config(work)
    masters = decoder.init_params(cfg, 0)
    engine = engine_of(config, cfg, harness.one_device())
    engine.load(0, placed(harness.published(config, cfg, masters), engine.param_shardings))
    groups = sampled(engine, cfg, work)
    del engine
    gc.collect()
    behavior = None
    forward: dict[str, np.ndarray] = {}
    kernels = dict.fromkeys((config.trainer.attention, "reference"))
    for dtype, attention in (("float32", "reference"), *(("bfloat16", name) for name in kernels)):
        label = f"{dtype}, {attention}"
        with record.attempt(label):
            changed = train_config(work, dtype=dtype, attention=attention)
            trainer = trainer_of(changed, cfg, harness.one_device(), masters)
            [batch] = packer(changed, trainer)(groups, 0)
            exactly = jax.default_matmul_precision("float32" if dtype == "float32" else None)
            with exactly:  # a GPU rounds factors of f32 to 10 bits unless asked
                forward[label] = trainer.logprobs(batch)[batch.mask]
            behavior = batch.behavior_logprobs[batch.mask]
            del trainer
            gc.collect()
    exact = forward.get("float32, reference")
    for label, logprobs in forward.items():
        off = {f"engine against trainer in {label}": behavior - logprobs}
        if exact is not None and logprobs is not exact:
            off[f"one forward pass in {label} against f32"] = logprobs - exact
        means = []
        for name, size in ((name, np.abs(d)) for name, d in off.items()):
            note = f"p99 {np.quantile(size, 0.99):.3g}, largest {size.max():.3g}, {size.size} tokens"
            record.add(name, size.mean(), "mean", note=note)
            means.append(size.mean())
        if len(means) > 1:
            record.add(f"ratio of the two, {label}", means[0] / means[1], "times", note="at most 1.5")


def sampled(engine: Engine, cfg: ModelConfig, work: DeviceWork) -> list[ScoredGroup]:
    """Groups of the engine's own samples, with random rewards."""
    rng, ids = np.random.default_rng(3), range(work.group_size)
    for group in range(work.groups):
        prompt = rng.integers(0, cfg.vocab_size, work.prompt).astype(np.int32)
        for index in ids:
            engine.submit(SampleId(group, index), prompt, 0, work.new)
    done = harness.finished(engine)
    return [harness.scored([done[SampleId(group, index)] for index in ids], rng) for group in range(work.groups)]


def ragged(cfg: ModelConfig, work: DeviceWork) -> list[ScoredGroup]:
    """Groups of random tokens, responses of any length up to the longest."""
    rng, logprob = np.random.default_rng(4), -np.log(cfg.vocab_size)
    groups = []
    for group, prompt in enumerate(rng.integers(0, cfg.vocab_size, (work.groups, work.prompt)).astype(np.int32)):
        samples = []
        for index in range(work.group_size):
            out_ids = rng.integers(0, cfg.vocab_size, int(rng.integers(1, work.new + 1)))
            logprobs = np.full(len(out_ids), logprob)
            samples.append(harness.sample_of(group, index, prompt, out_ids, logprobs, "length"))
        groups.append(harness.scored(samples, rng))
    return groups


def train(record: Record, cfg: ModelConfig, tiny: bool) -> None:
    work = TRAIN[tiny]
    groups, masters = ragged(cfg, work), decoder.init_params(cfg, 0)
    for attention, remat in TRAINED[-1:] if tiny else TRAINED:
        name = f"{attention}, remat {remat}"
        if record.has(name):
            continue
        with record.attempt(name):
            config = train_config(work, attention=attention, remat=remat)
            trainer = trainer_of(config, cfg, harness.one_device(), masters)
            [batch] = packer(config, trainer)(groups, 0)
            warmup_s, _ = harness.timed(trainer.warmup, *batch.shape)
            seconds = harness.best_s(trainer.step, batch)
            needed = model_flops(cfg, batch.lengths[0])
            tokens = int((batch.segment_ids > 0).sum())
            record.add(f"{name}: warm-up", warmup_s, "s")
            record.add(f"{name}: peak memory", peak_gib(), "GiB", note="since the process began")
            mfu = record.share(needed / seconds / 1e12, "read", MATMUL)
            note = f"{seconds:.3f} s, {tokens} tokens, {tokens / seconds:.0f} tokens/s, {needed / 1e12:.1f} TFLOP"
            record.add(name, mfu, "MFU", seconds=seconds, note=note)
            del trainer
        gc.collect()


def shared_device(record: Record, cfg: ModelConfig, tiny: bool) -> None:
    """Trainer and engine on one device, with the pages that the memory plan leaves: their peak, against the plan's."""
    config = train_config(TRAIN[tiny], remat="full")
    size = dataclasses.replace(config.model, size="" if tiny else "Qwen3-0.6B")
    rollout = dataclasses.replace(config.rollout, instances=1, pages=0)
    config = presets.filled(dataclasses.replace(config, model=size, rollout=rollout))
    trainer = trainer_of(config, cfg, harness.one_device(), decoder.init_params(cfg, 0))
    params = harness.published(config, cfg, trainer.params)
    engine = engine_of(config, cfg, harness.one_device())
    began = time.perf_counter()
    engine.load(0, placed(params, engine.param_shardings))
    engine.warmup()
    record.add("warm-up of the engine", time.perf_counter() - began, "s", note=f"{engine.compiled} programs")
    groups = sampled(engine, cfg, TRAIN[tiny])
    record.add("peak memory with the engine", peak_gib(), "GiB")
    [batch] = packer(config, trainer)(groups, 0)
    warmup_s, _ = harness.timed(trainer.warmup, *batch.shape)
    record.add("warm-up of the trainer", warmup_s, "s")
    trainer.step(batch)
    pages = f"{config.rollout.pages} pages of {config.rollout.page_size}"
    record.add("peak memory with both", peak_gib(), "GiB", note=pages)
    if planned := budget.of(config, presets.here(config), cfg):
        bytes_ = memory.total(planned.trainer) + memory.total(planned.instance) + planned.pages_bytes
        record.add("planned memory", bytes_ / GIB, "GiB")


# -------------------------------------------------------------- stages

KINDS = {"read": read, "kernel": kernel, "decode": decode, "gap": gap, "train": train, "memory": shared_device}
# What a machine that is lent for less than an hour is to say first stands first
STAGES = ("read", "kernel", "decode-8B", "train-0.6B", "decode-0.6B", "gap", "memory", "flashinfer")
LIMIT_S = 480
DONE = "seconds of the stage"


def stage(name="read", out=Path("device.json"), size: Literal["full", "tiny"] = "full") -> None:
    """One stage, in this process."""
    record, (kind, _, model), tiny = Record(out, name), name.partition("-"), size == "tiny"
    if kind == "flashinfer":
        return flashinfer(record, tiny)  # torch alone: where JAX is set up it takes the memory
    devices.setup_platform(Config())
    KINDS[kind](record, TINY if tiny else KNOWN[f"Qwen3-{model or '0.6B'}"], tiny)


def device(
    stages=STAGES, out=Path("device.json"), size: Literal["full", "tiny"] = "full", again=False
) -> Iterator[str]:
    """Each stage that is not done, in a process of its own."""
    if unknown := sorted(set(stages) - set(STAGES)):
        raise SystemExit(f"error: --stages: {', '.join(unknown)} is none of {', '.join(STAGES)}")
    # of a stage: JAX may take nearly all of the device's memory, as a run's processes do
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "PYTHONUNBUFFERED": "1", **os.environ}
    for name in stages:
        record = Record(out, name)
        if again:
            out.write_text(json.dumps([e for e in record.entries if e["stage"] != name]))
        elif record.has(DONE):
            continue
        command = [sys.executable, "-m", "dora_jax.bench.device", "stage", f"--name={name}", f"--out={out}",
                   f"--size={size}"]  # fmt: skip
        began = time.perf_counter()
        try:
            code = subprocess.run(command, env=environment, timeout=LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            Record(out, name).add("stage", None, "failed", error=f"cut off after {LIMIT_S} s; the next run goes on")
            continue
        record = Record(out, name)
        if code:
            record.add("stage", None, "failed", error=f"the process ended with code {code}")
        record.add(DONE, time.perf_counter() - began, "s")
    yield f"\n{out}:"
    yield from map(line, Record(out).entries)


# ------------------------------------------------------------- ahead of time

VOCAB = 151669  # ids that Qwen3's tokenizer has


class AotCase(NamedTuple):
    name: str
    config: Config
    programs: tuple[str, ...]


def _case(
    what: str, role: str, model: str, slice_name: str, rollout: dict[str, Any], trainer: dict[str, Any]
) -> AotCase:
    """The slice is the role's own: the other role is elsewhere."""
    c = Config()
    cluster = dataclasses.replace(c.cluster, launcher="ray", trainer_slice=slice_name, instance_slice=slice_name)
    config = dataclasses.replace(c, model=dataclasses.replace(c.model, size=model), cluster=cluster,
                                 rollout=dataclasses.replace(c.rollout, max_prompt_tokens=1024, **rollout),
                                 trainer=dataclasses.replace(c.trainer, **trainer))  # fmt: skip
    return AotCase(f"{model} {slice_name}{what}", config, roles.PROGRAMS[role])


def _training(
    what: str, model: str, slice_name: str, *, rows: int, tokens: int = 4096, serving: int = 4, **trainer: Any
) -> AotCase:
    """A trainer that has the slice to itself, and instances of `serving` devices elsewhere."""
    section = {"remat": "full", "micro_batches": 4, "rows": rows, "pack_tokens": tokens} | trainer
    rollout = {"tensor": serving, "max_new_tokens": tokens - 1024}
    return _case(what, roles.TRAINER, model, slice_name, rollout, section)


def _decoding(
    what: str, model: str, slice_name: str, *, slots: int = 32, context: int = 4096, **rollout: Any
) -> AotCase:
    section = {"slots": slots, "max_new_tokens": context - 1024} | rollout
    name = f" {slots} x {context}{what}"
    return _case(name, roles.INSTANCE, model, slice_name, section, {"pack_tokens": context})


_LARGE: dict[str, Any] = {"micro_batches": 1, "serving": 32}
_BY_ALL_TO_ALL: dict[str, Any] = {"fsdp": 4, "expert": 64, "expert_dispatch": "all_to_all"}
_HOST = ", moments in host memory"
AOT_ROWS = (
    _training("", "Qwen3-8B", "v5e-64", fsdp=16, tensor=4, rows=64),
    _training("", "Qwen3-8B", "v5p-16", fsdp=8, rows=32),
    _training("", "Qwen3-32B", "v5p-128", fsdp=32, tensor=2, rows=128),
    _training(", long rows", "Qwen3-8B", "v5e-64", fsdp=8, tensor=4, context=2, rows=32, tokens=16384),
    _training(_HOST, "Qwen3-8B", "v5p-16", fsdp=8, rows=32, optimizer_memory="host"),
    _training(", nothing recomputed", "Qwen3-8B", "v5e-64", fsdp=16, tensor=4, rows=64, remat="none"),
    *(_decoding("", model, slice_name, tensor=tensor) for model, slice_name, tensor in (
        ("Qwen3-8B", "v5e-4", 4), ("Qwen3-8B", "v5p-8", 4), ("Qwen3-8B", "v6e-4", 4), ("Qwen3-8B", "tpu7x-8", 8),
        ("Qwen3-32B", "v5e-8", 8), ("Qwen3-32B", "v5p-8", 4), ("Qwen3-32B", "v6e-4", 4), ("Qwen3-32B", "tpu7x-8", 8))),
    *(_decoding("", "Qwen3-8B", slice_name, slots=256, context=32768, tensor=8)
      for slice_name in ("v5e-8", "v6e-8", "tpu7x-8")),
    _training("", "Qwen3-0.6B", "h100-1", rows=8, serving=1),  # one GPU, as the stages above have it
    *(_decoding("", model, "h100-1", slots=64, tensor=1) for model in ("Qwen3-0.6B", "Qwen3-8B")),
    _decoding(", drafts and a narrow call", "Qwen3-8B", "v5e-4", tensor=4, drafts=7, narrow_rows=4),
    # mixtures: experts over the chips, whole
    _training("", "Qwen3-30B-A3B", "v5p-16", fsdp=1, expert=8, rows=32, moments="bfloat16"),
    _training("", "Qwen3-30B-A3B", "v6e-64", fsdp=8, expert=8, rows=256),
    _training("", "DeepSeek-V3", "v5p-512", rows=256, fsdp=16, expert=16, **_LARGE),
    _training(", tokens by all-to-all", "DeepSeek-V3", "v5p-512", rows=256, **_BY_ALL_TO_ALL, **_LARGE),
    _training(_HOST, "DeepSeek-V3", "v5p-256", tensor=2, rows=64, optimizer_memory="host",
              **_BY_ALL_TO_ALL | {"fsdp": 1}, **_LARGE),
    _training("", "LongCat-Flash", "v5p-512", rows=256, **_BY_ALL_TO_ALL, **_LARGE),
    *(_decoding("", model, slice_name, slots=64, tensor=chips, expert=chips) for model, slice_name, chips in (
        ("Qwen3-30B-A3B", "v5p-8", 4), ("Qwen3-30B-A3B", "v6e-8", 8), ("DeepSeek-V3", "v5p-128", 64),
        ("LongCat-Flash", "v5p-128", 64))),
)  # fmt: skip


def aot(only="", programs=(), layers=0) -> Iterator[str]:
    """Exits with 1 where a row does not fit."""
    fits = True
    for row in AOT_ROWS:
        chosen = tuple(name for name in row.programs if not programs or name in programs)
        if only not in row.name or not chosen:
            continue
        model = KNOWN[row.config.model.size]
        config, _ = presets.resolve(
            row.config, presets.machines(row.config), model
        )  # with the pages of the whole model
        if layers:
            model = dataclasses.replace(model, n_layers=layers)
        yield f"{row.name}{f', {layers} layers' if layers else ''}"
        try:
            done = lambda one: print(*roles.describe(one), sep="\n", flush=True)
            for role in compilation.compile_roles(
                config, model, vocab_limit=VOCAB, eos_ids=(1,), only=chosen, done=done
            ):
                yield roles.describe_role(role)
        except roles.DoesNotFit as refusal:
            yield f"  {refusal}"
            fits = False
    if not fits:
        raise SystemExit(1)


if __name__ == "__main__":
    harness.run(device, stage, aot)
