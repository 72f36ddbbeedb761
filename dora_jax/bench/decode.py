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
With --smollm the weights are those of a real model of 135M parameters (real_model.py): prompts of 48 tokens, 48 new
ones each at fixed lengths, and one instance over all cores, because every instance reads all weights at every step.
Pages are what all slots need, and one a slot more, which admission keeps free for running samples to grow into.
Tunix is the sampler of its newest published package, 0.1.7; the engine of its development branch is not published.
With --moe the toy has 8 layers of 16 experts, of which a token takes 2; the rival runs its fastest experts.
With --contexts: the decode call of a long context alone, as a share of the memory's speed. A decode step must read
every weight once and the KV of every row once. The compiled call of an engine is timed with all rows at the same
context, on pages that were never filled (what a page holds does not change the cost), random weights; the share is
those bytes over the time, against the speed at which this device reads a matrix in a product with a vector. Rows that
the given memory cannot hold beside the weights are left out, and B says how many are there.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.bench import harness, real_model
from dora_jax.bench.harness import TOY
from dora_jax.config import Config, EngineKernel, ModelSection
from dora_jax.models import decoder, hf, sharding
from dora_jax.models.families.config import Experts
from dora_jax.ops.attention import MASKED
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.plan import devices
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.shapes import FRESH, HEADER, POSITION, REMAINING, SLOT, TOKEN
from dora_jax.types import SampleId


def plain_runner(cfg: decoder.ModelConfig, params, work) -> Callable[[], None]:
    """A closure that samples the whole work once, the plain way in JAX: one contiguous cache, whole batches, a scan
    until the longest sample ends. All of it is tuned as in the engine (layouts, one dispatch a batch, donated cache);
    what it lacks is continuous batching, pages and versions."""
    longest = [int(work.lengths[i : i + work.batch].max()) for i in range(0, len(work.lengths), work.batch)]
    calls = {n: jax.jit(functools.partial(_generate_plain, cfg, n)) for n in set(longest)}

    def run() -> None:
        for first, n in zip(range(0, len(work.lengths), work.batch), longest, strict=True):
            prompts = work.prompts[first : first + work.batch]
            jax.device_get(calls[n](params, prompts, jax.random.key(first)))

    return run


def _generate_plain(cfg: decoder.ModelConfig, n: int, params, prompts_BxT, key):
    """Log-probs f32[n, B] and the tokens of n steps, prefill included."""
    b, prompt = prompts_BxT.shape
    cache = {}

    def keep(layer, q, k, v):
        cache[layer] = (
            jnp.pad(k.transpose(0, 2, 3, 1), ((0, 0), (0, 0), (0, 0), (0, n))),
            jnp.pad(v.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, n), (0, 0))),
        )
        return attend(q, k, v)

    positions = jnp.tile(jnp.arange(prompt)[None], (b, 1))
    attend_prompt = segment_attention(jnp.ones((b, prompt), jnp.int32), positions)
    attend = lambda q, k, v: attend_prompt(None, q, k, v)
    hidden = decoder.forward(cfg, params, prompts_BxT, positions, keep)[:, -1]
    first, first_logprob = _sample(decoder.logits(cfg, params, hidden), jax.random.fold_in(key, 0))

    def step(carry, i):
        token_B, cache = carry
        cache = dict(cache)
        at = prompt + i

        def attend(layer, q, k, v):
            k = jax.lax.dynamic_update_slice_in_dim(cache[layer][0], k.transpose(0, 2, 3, 1), at, 3)
            v = jax.lax.dynamic_update_slice_in_dim(cache[layer][1], v.transpose(0, 2, 1, 3), at, 2)
            cache[layer] = k, v
            return _attend_cached(q, k, v, at)

        hidden = decoder.forward(cfg, params, token_B[:, None], jnp.full((b, 1), at), attend)[:, 0]
        token_B, logprob_B = _sample(decoder.logits(cfg, params, hidden), jax.random.fold_in(key, i + 1))
        return (token_B, cache), (token_B.astype(jnp.float32), logprob_B)

    _, (tokens, logprobs) = jax.lax.scan(step, (first, cache), jnp.arange(n - 1))
    return jnp.concatenate([first_logprob[None], logprobs]), tokens


def _attend_cached(q_Bx1xHxD, k_BxKxDxS, v_BxKxSxD, at):
    b, _, heads, d = q_Bx1xHxD.shape
    q = q_Bx1xHxD.reshape(b, k_BxKxDxS.shape[1], -1, d)
    scores = jnp.einsum("bkgd,bkds->bkgs", q, k_BxKxDxS) * d**-0.5
    seen = jnp.arange(scores.shape[-1])[None, None, None] <= at
    weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1)
    return jnp.einsum("bkgs,bksd->bkgd", weights, v_BxKxSxD).reshape(b, 1, heads, d)


def _sample(logits, key):
    token = jax.random.categorical(key, logits).astype(jnp.int32)
    return token, jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]


SMALL = dict(
    vocab_size=151936, d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, d_ff=3072, rope_theta=1e6
)  # Qwen3-0.6B
LARGE = SMALL | dict(d_model=4096, n_layers=36, n_heads=32, d_ff=12288, tie_embeddings=False)  # Qwen3-8B
SIZES: dict[str, dict[str, Any]] = {"toy": TOY, "qwen3-0.6b": SMALL, "qwen3-8b": LARGE}
PAGE = {"reference": 16, "tpu": 32}
STEPS = 16


def step_bytes(cfg: decoder.ModelConfig, itemsize: int, rows: int, context: int) -> tuple[int, int]:
    """(weights, KV) that one step reads; of an embedding that is not the head too, only the rows' own lines."""
    sizes = {name: x.size for name, x in decoder.abstract_params(cfg).items() if name != "layers"}
    layers = sum(x.size for x in jax.tree.leaves(decoder.abstract_params(cfg)["layers"]))
    ends = sum(sizes.values()) - (0 if cfg.tie_embeddings else sizes["embed"])
    kv = 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * rows * context
    return (layers + ends) * itemsize, kv * itemsize


def context_engine(cfg: decoder.ModelConfig, rows: int, context: int, attention: EngineKernel, dtype) -> Engine:
    size = PAGE[attention]
    return harness.new_engine(
        cfg,
        sections={"model": ModelSection(dtype=jnp.dtype(dtype).name)},
        slots=rows,
        pages=rows * (context // size),
        page_size=size,
        max_prompt_tokens=size,
        max_new_tokens=context - size,
        decode_steps=STEPS,
        prefill_tokens=size * rows,
        attention=attention,
        context_block=min(1024, context),
    )


def control_of(engine: Engine, context: int) -> tuple[np.ndarray, int]:
    """Every slot's last call before `context`, on pages of its own."""
    s = engine.shapes
    blocks, past, pages = s.decode_buckets[-1], context - STEPS, context // s.page_size
    control = np.zeros(s.decode_control(blocks), np.int32)
    control[:, SLOT] = np.arange(s.rows)
    control[:, [FRESH, TOKEN, POSITION, REMAINING]] = 1, 7, past, STEPS
    own_RxP = 1 + np.arange(s.rows * pages).reshape(s.rows, pages)
    held, first = s.pages_for(past), past // s.page_size
    control[:, HEADER : HEADER + held] = own_RxP[:, :held]
    write = HEADER + blocks * s.block_pages
    control[:, write : write + pages - first] = own_RxP[:, first:]
    return control, blocks


def bandwidth_table(
    model: str, contexts: Sequence[int], rows: int, attention: EngineKernel, memory_bytes: float
) -> Iterator[str]:
    """The page's lines. bf16, but f32 on CPUs, which have no fast bf16."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    cfg, itemsize = decoder.new_config("qwen3", **SIZES[model]), jnp.dtype(dtype).itemsize
    params = jax.jit(lambda: decoder.serving_layout(decoder.init_params(cfg, 0, dtype=dtype)))()
    speed = read_speed(min(1 << 30, int(memory_bytes / 4)))
    yield f"{model}, {jnp.dtype(dtype).name}, attention {attention}; this device reads {speed / 1e9:.0f} GB/s"
    table = harness.Table({"context": "8d", "B": "5d", "weights MB": "12.1f", "KV MB": "9.1f", "ms a step": "11.2f",
                           "tokens/s": "10.0f", "share": "8.0%"})  # fmt: skip
    yield table.head
    for context in contexts:
        weights, kv = step_bytes(cfg, itemsize, 1, context)
        fit = min(rows, int((memory_bytes - weights) / (kv * (3 if attention == "reference" else 1.1))))
        if fit < 1:
            yield f"{context:8d}    0  one row of KV does not fit {memory_bytes / 1e9:.0f} GB beside the weights"
            continue
        engine = context_engine(cfg, fit, context, attention, dtype)
        engine.load(0, jax.device_put(params, engine.param_shardings))
        control, blocks = control_of(engine, context)
        weights_of = engine.residents.of(0)  # as the calls take them
        took = (
            harness.best_s(lambda: engine.device.generate(weights_of, control, blocks)[0].block_until_ready(), 5)
            / STEPS
        )
        kv *= fit
        share = (weights + kv) / took / speed
        yield table.row(context, fit, weights / 1e6, kv / 1e6, took * 1e3, fit / took, share)


MODEL = decoder.new_config("qwen3", **TOY)
MIXTURE = decoder.new_config("qwen3_moe", **TOY | {"n_layers": 8}, experts=Experts(count=16, per_token=2, width=128))
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


def works(subject: Subject, rows: Sequence[int], tail_samples: int) -> list[DecodeWork]:
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
    return harness.new_engine(
        s.model,
        sharding.make_mesh([device], 1, 1, 1),
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
    return 2 * 2048**3 / harness.best_s(lambda: product(m).block_until_ready(), 20)


def read_speed(n_bytes: int) -> float:
    """bytes/s of a product of a matrix of so many bytes with a vector, again and again."""
    matrix, vector = jnp.ones((n_bytes // 4096, 1024), jnp.float32), jnp.ones(1024, jnp.float32)
    product = jax.jit(lambda m, v: m @ v)
    return matrix.nbytes / harness.best_s(lambda: product(matrix, vector).block_until_ready(), 30)


def floor_s(work: DecodeWork, flops: float) -> float:
    """Steps at full batches; each reads the weights once and each running sample's KV so far."""
    model, prompt = work.subject.model, work.subject.prompt
    weights = model.matrix_params  # a batch meets all experts, a token those that it is sent to
    kv_token = 2 * model.n_layers * model.n_kv_heads * model.head_dim * 4
    steps = work.tokens / work.batch
    read = steps * weights * 4 + sum(kv_token * (prompt * n + n * (n + 1) / 2) for n in work.lengths.tolist())
    decode = max(read / read_speed(int(read / steps)), 2 * model.active_params * work.tokens / flops)
    return decode + 2 * model.active_params * prompt * len(work.lengths) / flops


def rival_runner(rival: harness.Rival, copies: int, work: DecodeWork) -> Callable[[], float]:
    """Each process of the rival takes a share of the samples; the seconds of the slowest."""
    n = min(copies, work.batch)
    shares = [
        {"batch": work.batch // n, "prompts": work.prompts[i::n].tolist(), "lengths": work.lengths[i::n].tolist()}
        for i in range(n)
    ]
    return lambda: max(rival.ask(*shares))


def main() -> None:
    args = harness.flags(__doc__, rows=(1, 8, 32, 128), tail=TAIL_SAMPLES, rivals=("plain", "transformers", "tunix"),
                         copies=1, instances=0, rounds=3, install=False, smollm=False, moe=False, contexts=(0,),
                         model=list(SIZES), attention=list(PAGE), memory=2.0)  # fmt: skip
    if any(args.contexts):
        for line in bandwidth_table(args.model, args.contexts, args.rows[-1], args.attention, args.memory * 1e9):
            print(line, flush=True)
        return
    instances = args.instances or (1 if args.smollm else len(os.sched_getaffinity(0)))
    devices.setup_platform(Config(cpu_devices=instances))
    flops = flop_speed()  # before any rival starts: they load for a while
    with tempfile.TemporaryDirectory() as temporary:
        folder, subject, params = (
            real_subject() if args.smollm else toy_subject(Path(temporary) / "model", MIXTURE if args.moe else MODEL)
        )
        external = {
            name: harness.Rival(name, name, folder, args.install, args.copies)
            for name in args.rivals
            if name != "plain"
        }
        print(f"measured: {flops / 1e9:.0f} GFLOP/s; {jax.device_count()} instances; jax {jax.__version__}")
        table = harness.Table({"tokens/s": "12s", "engine": "10.0f", **dict.fromkeys(args.rivals, "14.0f"),
                               "floor": "10.0f", "of floor": ">10s", "best rival": ">12s"})  # fmt: skip
        print(table.head, flush=True)
        for work in works(subject, args.rows, args.tail):
            runs: dict[str, Callable[[], float | None]] = {"engine": engine_runner(work, params)}
            for name in args.rivals:
                if name in external:
                    runs[name] = rival_runner(external[name], args.copies, work)
                else:
                    runs[name] = plain_runner(subject.model, params, work)
            for name in runs.keys() - external.keys():  # those warm up by themselves
                runs[name]()
            times = harness.best_of_turns(runs, args.rounds)
            floor, against = floor_s(work, flops), [times[name] for name in external]
            speeds = [work.tokens / took for took in times.values()]
            best = f"{min(against) / times['engine']:.2f}x" if against else ""
            print(
                table.row(work.name, *speeds, work.tokens / floor, f"{times['engine'] / floor:.2f}x", best), flush=True
            )
        for rival in external.values():
            rival.close()


def toy_subject(folder: Path, model: decoder.ModelConfig) -> tuple[Path, Subject, decoder.Params]:
    """(its folder, how it runs, its weights in the serving layout)."""
    stacked = decoder.init_params(model, 0)
    hf.save(folder, model, stacked)
    return folder, Subject(model), jax.jit(decoder.serving_layout)(stacked)


def real_subject() -> tuple[Path, Subject, decoder.Params]:
    model, stacked = hf.load(folder := real_model.folder())
    return folder, Subject.real(model), jax.jit(decoder.serving_layout)(stacked)


if __name__ == "__main__":
    main()
