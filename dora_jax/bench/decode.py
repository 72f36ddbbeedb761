"""Tokens a second of the rollout engine against other ways to sample from the same weights, log-probs included.

    python -m dora_jax.bench.decode [--config=configs/rows.py:chat] [--rows=1,8,32] [--tail=256]
                                      [--rivals=plain,transformers,transformers_bf16,openvino,tunix]
                                      [--copies=1] [--rounds=3] [--install]
    python -m dora_jax.bench.decode --smollm --rows=32 --tail=64 --rivals=transformers --rounds=1
    python -m dora_jax.bench.decode --moe --rows=32 --tail=0 --rivals=transformers
    python -m dora_jax.bench.decode --contexts=1024,32768 [--model=toy] [--rows=32] [--attention=reference] [--memory=2]
    python -m dora_jax.bench.decode drafts --workdir=runs/NAME [--live=4] [--drafts=7] [--samples=512] [--rounds=3]
    python -m dora_jax.bench.decode drafts --smollm --samples=16 --rounds=1 --tokens=48
    python -m dora_jax.bench.decode adapters [--versions=1,2,4] [--rows=32] [--rank=8] [--tokens=128] [--rounds=3]
                                               [--samples=0] [--width=256]

Two kinds of work: fixed lengths (B prompts of 48 tokens, 128 new tokens each) and a long tail (256 samples, median 48,
cut at what the configuration allows, 32 at a time); each with prompts of their own, and in groups that share one. The
engines are those that a run of the configuration assembles on this machine, with nothing overridden but the model, fed
from one queue of samples; a digest of the configuration stands above the table. What a ladder compiles beside a run is
there before the clock starts. Rivals run whole batches over all cores, as they do (`--copies=2`: each started
twice, with half of the samples); a token beyond a sample's length does not count; one whose
greedy answers are not the model's is named and not measured. `plain` is the plain way in JAX
and no rival. Prefill is included everywhere, compilation nowhere. Rounds are interleaved and the best of each counts,
because neighbours on the machine only ever slow things down.
The floor is what the machine's measured speeds allow: weights and the KV of the running samples read once a step, at
the speed at which all cores read as many bytes over and over, or the flops at that of a large matrix product, whichever
takes longer. Rivals run in an environment of their own (`--install` makes it under .bench/) on a folder written here.
With --smollm the weights are those of a real model of 135M parameters (bench.learning).
Tunix is the sampler of its newest published package, 0.1.7; the engine of its development branch is not published.
With --moe the toy has 8 layers of 16 experts, of which a token takes 2; the rival runs its fastest experts.
With --contexts: the decode call of a long context alone, as a share of the memory's speed. A decode step must read
every weight once and the KV of every row once. The compiled call of an engine is timed with all rows at the same
context, on pages that were never filled (what a page holds does not change the cost), random weights; the share is
those bytes over the time, against the speed at which this device reads a matrix in a product with a vector. Rows that
the given memory cannot hold beside the weights are left out, and B says how many are there.

drafts: tokens a second with drafts from siblings and without, on the policy of a finished run and its own prompts.
The engine is the one of the run's configuration. `live` samples decode at once, a group's samples one after another:
the tail of a step, when few are left. Six engines take the same samples:
  off            as the run has it: a decode call has a row for every slot
  drafts alone   rollout.drafts, verified where measured acceptance and cost say that it pays
  wrong alone    the same, with drafts that are never right: what trying costs
  narrow         rollout.narrow_rows: few samples take a decode call of `live` rows, where it is quicker
  drafts         both: drafts are verified where that beats the narrow call
  wrong          both, with drafts that are never right
With as many live as there are slots, drafts are never tried, and the last lines say what having them costs. Rounds are
interleaved and the best of each counts. Beside the speeds: how many samples differ, by drafts at one fixed shape (every
call verifies, with a draft or with none) and across shapes (against `off`), with the log-probs of the two tokens.
With --smollm the policy is SmolLM2-135M-Instruct before any training, on the sums of bench.learning.

adapters: tokens a second of one engine whose rows are of several versions, against rows of one: full weights, and
adapters.
Two engines, each with as many versions resident as the longest line asks: of full weights, a copy a version, which
makes a decode call a version; of adapters, one base and every version's adapter beside it, which makes one call for all
rows. Each takes the same samples, `rows` at once, of the first version alone and of several in turn; prompts of 32
tokens. Beside the speeds, what a version takes: its bytes, and the milliseconds from the trainer's masters to the
version being resident (published, laid out, loaded), of an engine that shares the trainer's device. Rounds are
interleaved and the best of each counts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dora_jax
from dora_jax import tasks
from dora_jax.bench import harness, learning
from dora_jax.bench.harness import TOY
from dora_jax.cli import flags as cli_flags
from dora_jax.config import Config, RolloutSection
from dora_jax.config import files as config_files
from dora_jax.models import decoder, hf, lora, sharding
from dora_jax.models.families.config import Experts
from dora_jax.models.lora_config import OFF, Lora
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.ops.attention import MASKED
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.plan import devices, validate
from dora_jax.publish import DeviceWeights
from dora_jax.rollout.drafts import NONE, Drafter
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.seq import Seq
from dora_jax.rollout.shapes import FRESH, HEADER, POSITION, REMAINING, SLOT, TOKEN
from dora_jax.runtime.assembly import run as build
from dora_jax.runtime.job import of_this_machine
from dora_jax.runtime.policy import Policy
from dora_jax.types import Sample, SampleId

MODEL = decoder.new_config("qwen3", **TOY)
MIXTURE = decoder.new_config("qwen3_moe", **TOY | {"n_layers": 8}, experts=Experts(count=16, per_token=2, width=128))
PROMPT, FIXED = 48, 128  # tokens
BF16_TIE = 0.25  # nats between two tokens that bfloat16 may swap
TAIL_SAMPLES, TAIL_BATCH, TAIL_MEDIAN, TAIL_SIGMA = 256, 32, 48, 1.1


def drain(engine: Engine, todo: Iterator[tuple], at_once: int = 0, done: dict[SampleId, Sample] | None = None) -> int:
    """Tokens that this instance sampled: it takes a sample of the common queue whenever it has a free slot, or less
    than `at_once`. done: gets what finishes."""
    held = tokens = 0
    while True:
        while held < (at_once or engine.shapes.slots) and (sample := next(todo, None)):
            engine.submit(*sample)
            held += 1
        if not held:
            return tokens
        result = engine.tick()
        tokens += result.tokens
        held -= len(result.finished)
        if done is not None:
            done |= {sample.id: sample for sample in result.finished}


# ------------------------------------------------------- against rivals


class DecodeWork(NamedTuple):
    name: str
    batch: int  # samples at a time
    group: int  # samples that share a prompt
    prompts: np.ndarray  # i32[samples, tokens]
    lengths: np.ndarray  # i32[samples] tokens to sample
    tokens: int  # their sum


def works(vocab: int, rollout: RolloutSection, rows: Sequence[int], tail_samples: int, group: int) -> list[DecodeWork]:
    """Each kind of work with prompts of their own, and in groups, where they fill the batch; none is longer than
    the configuration allows."""
    limit, prompt = rollout.max_new_tokens, min(PROMPT, rollout.max_prompt_tokens)
    rng = np.random.default_rng(0)
    tail = np.exp(rng.normal(np.log(TAIL_MEDIAN), TAIL_SIGMA, tail_samples)).astype(int).clip(1, limit)
    found = []
    for name, batch, lengths in (
        *((f"fixed B={b}", b, np.full(b, min(FIXED, limit))) for b in rows),
        *([("long tail", TAIL_BATCH, tail)] if tail_samples else []),
    ):
        prompts = rng.integers(3, vocab, (len(lengths), prompt)).astype(np.int32)
        for size in (1, group) if batch % group == 0 < group - 1 else (1,):
            shared = prompts[np.arange(len(prompts)) // size]
            called = f"{name}, groups" if size > 1 else name
            found.append(DecodeWork(called, batch, size, shared, lengths, int(lengths.sum())))
    return found


def plain_runner(work: DecodeWork, model: decoder.ModelConfig, params) -> Callable[[], None]:
    """A closure that samples the whole work once, the plain way in JAX: one contiguous cache, whole batches, a scan
    until the longest sample ends. All of it is tuned as in the engine (layouts, one dispatch a batch, donated cache);
    what it lacks is continuous batching, pages and versions."""
    firsts = range(0, len(work.lengths), work.batch)
    longest = [int(work.lengths[i : i + work.batch].max()) for i in firsts]
    calls = {n: jax.jit(functools.partial(_generate_plain, model, n)) for n in set(longest)}

    def run() -> None:
        for first, n in zip(firsts, longest, strict=True):
            prompts = work.prompts[first : first + work.batch]
            jax.device_get(calls[n](params, prompts, jax.random.key(first)))

    return run


def _generate_plain(cfg: decoder.ModelConfig, n: int, params, prompts_BxT, key):
    """Log-probs f32[n, B] and the tokens of n steps, prefill included."""
    b, prompt = prompts_BxT.shape
    cache = {}

    def keep(layer, q, k, v, of_scores):
        room = (0, n)
        cache[layer] = (
            jnp.pad(k.transpose(0, 2, 3, 1), ((0, 0), (0, 0), (0, 0), room)),
            jnp.pad(v.transpose(0, 2, 1, 3), ((0, 0), (0, 0), room, (0, 0))),
        )
        return attend_prompt(None, q, k, v, of_scores)

    def sampled(hidden, i):
        logits = decoder.logits(cfg, params, hidden)
        token = jax.random.categorical(jax.random.fold_in(key, i), logits).astype(jnp.int32)
        return token, jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]

    def step(carry, i):
        token_B, cache = carry
        cache = dict(cache)
        at = prompt + i

        def attend(layer, q_Bx1xHxD, k, v, of_scores):
            k_BxKxDxS, v_BxKxSxD = cache[layer]
            k_BxKxDxS = jax.lax.dynamic_update_slice_in_dim(k_BxKxDxS, k.transpose(0, 2, 3, 1), at, 3)
            v_BxKxSxD = jax.lax.dynamic_update_slice_in_dim(v_BxKxSxD, v.transpose(0, 2, 1, 3), at, 2)
            cache[layer] = k_BxKxDxS, v_BxKxSxD
            q = q_Bx1xHxD.reshape(b, k_BxKxDxS.shape[1], -1, cfg.head_dim)
            scores = jnp.einsum("bkgd,bkds->bkgs", q, k_BxKxDxS) * of_scores.scale
            seen = jnp.arange(scores.shape[-1])[None, None, None] <= at
            weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1)
            return jnp.einsum("bkgs,bksd->bkgd", weights, v_BxKxSxD).reshape(q_Bx1xHxD.shape)

        hidden = decoder.forward(cfg, params, token_B[:, None], jnp.full((b, 1), at), attend)[:, 0]
        token_B, logprob_B = sampled(hidden, i + 1)
        return (token_B, cache), (token_B.astype(jnp.float32), logprob_B)

    positions = jnp.tile(jnp.arange(prompt)[None], (b, 1))
    attend_prompt = segment_attention(jnp.ones((b, prompt), jnp.int32), positions)
    first, first_logprob = sampled(decoder.forward(cfg, params, prompts_BxT, positions, keep)[:, -1], 0)
    _, (tokens, logprobs) = jax.lax.scan(step, (first, cache), jnp.arange(n - 1))
    return jnp.concatenate([first_logprob[None], logprobs]), tokens


def engine_runner(work: DecodeWork, engines: Sequence[Engine], params) -> Callable[[], None]:
    """A closure that samples the whole work once, on a fresh set of groups each time."""
    groups = itertools.count()

    def run() -> None:
        first = next(groups) << 20
        todo = iter([(SampleId(first + i // work.group, i % work.group), work.prompts[i], 0, int(n))
                     for i, n in enumerate(work.lengths)])  # fmt: skip
        at_once = -(-work.batch // len(engines))
        with ThreadPoolExecutor(len(engines)) as threads:
            tokens = sum(threads.map(drain, engines, itertools.repeat(todo), itertools.repeat(at_once)))
        if tokens != work.tokens:
            raise RuntimeError(f"{tokens} tokens were sampled, not {work.tokens}")
        for engine in engines:
            harness.reload(engine, params)  # no prefix is left for the next round

    return run


def settled(run: Callable[[], None], engines: Sequence[Engine]) -> None:
    """Samples the work until every dispatch that a ladder wants for it is compiled and measured, as in a run that has
    gone on for minutes."""
    run()
    while any(engine.scheduler.decoding.costs.next_rung() for engine in engines):
        run()


def rival_runner(rival: harness.Rival, copies: int, work: DecodeWork) -> Callable[[], float]:
    """Each process of the rival takes a share of the samples; the seconds of the slowest."""
    n = min(copies, work.batch)
    shares = [
        {"batch": work.batch // n, "prompts": work.prompts[i::n].tolist(), "lengths": work.lengths[i::n].tolist()}
        for i in range(n)
    ]
    return lambda: max(rival.ask(*shares))


def flop_speed() -> float:
    """flop/s of a large matrix product."""
    m = jnp.ones((2048, 2048), jnp.float32)
    return 2 * 2048**3 / harness.best_s(jax.jit(jnp.matmul), m, m, rounds=20)


def read_speed(n_bytes: int) -> float:
    """bytes/s of a product of a matrix of so many bytes with a vector, again and again."""
    matrix, vector = jnp.ones((n_bytes // 4096, 1024), jnp.float32), jnp.ones(1024, jnp.float32)
    return matrix.nbytes / harness.best_s(jax.jit(jnp.matmul), matrix, vector, rounds=30)


def floor_s(work: DecodeWork, model: decoder.ModelConfig, flops: float) -> float:
    """Steps at full batches; each reads the weights once and each running sample's KV so far. A group's prompt is
    computed once."""
    weights = model.matrix_params  # a batch meets all experts, a token those that it is sent to
    kv_token = 2 * model.n_layers * model.n_kv_heads * model.head_dim * 4
    steps, prompt = work.tokens / work.batch, work.prompts.shape[1]
    read = steps * weights * 4 + sum(kv_token * (prompt * n + n * (n + 1) / 2) for n in work.lengths.tolist())
    decode = max(read / read_speed(int(read / steps)), 2 * model.active_params * work.tokens / flops)
    return decode + 2 * model.active_params * prompt * len(work.lengths) / work.group / flops


def decode(
    config="configs/rows.py:chat", rows=(1, 8, 32), tail=TAIL_SAMPLES, rivals=("plain", "transformers", "transformers_bf16"),
    copies=1, rounds=3, install=False, smollm=False, moe=False, contexts=(0,),
    model: Literal["toy", "qwen3-0.6b", "qwen3-8b"] = "toy", attention: Literal["reference", "tpu"] = "reference",
    memory=2.0,
) -> Iterator[str]:  # fmt: skip
    if any(contexts):
        yield from bandwidth_table(model, contexts, rows[-1], attention, memory * 1e9)
        return
    tree = config_files.load_file(config)
    digest = hashlib.sha256(tree.to_json().encode()).hexdigest()[:12]
    devices.setup_platform(Config(cpu_devices=tree.cpu_devices))
    flops = flop_speed()  # before any rival starts: they load for a while
    with tempfile.TemporaryDirectory() as temporary:
        folder, cfg, stacked = harness.weights_of(MIXTURE if moe else MODEL, Path(temporary) / "model", smollm)
        tree.model.path = tree.task.path = str(folder)  # nothing is read of the task
        run, params = of_this_machine(validate.read(tree).asked), jax.jit(decoder.serving_layout)(stacked)
        meshes = [sharding.make_mesh([jax.devices()[i] for i in group], 1, 1, len(group))
                  for group in devices.plan(jax.device_count(), run).instances]  # fmt: skip
        engines = [build.engine_of(run, cfg, mesh) for mesh in meshes]
        for engine in engines:
            engine.warmup()
            engine.scheduler.decoding.costs.patience = 0  # what a ladder lacks is there before the clock starts
            harness.reload(engine, params)
        external = {name: harness.Rival(name, name, folder, install, copies) for name in rivals if name != "plain"}
        yield (f"{config}, sha256 {digest}: {len(engines)} instances on {jax.device_count()} devices; measured: "
               f"{flops / 1e9:.0f} GFLOP/s; jax {jax.__version__}")  # fmt: skip
        prompts = np.random.default_rng(1).integers(3, cfg.vocab_size, (harness.ASKED_SAMPLES, PROMPT))
        for name, other in external.items():
            tie = BF16_TIE if name.endswith("bf16") else harness.TIE
            if wrong := harness.not_greedy(cfg, params, other, prompts, tie):
                yield f"{name} is left out: its greedy answers to prompts {wrong} are not the model's"
                rivals = tuple(each for each in rivals if each != name)
        table = harness.Table({"tokens/s": "20s", "engine": "10.1f", **dict.fromkeys(rivals, "18.1f"),
                               "floor": "10.0f", "of floor": ">10s", "best rival": ">12s"})  # fmt: skip
        yield table.head
        for work in works(cfg.vocab_size, run.rollout, rows, tail, run.orchestrator.group_size):
            ours = engine_runner(work, engines, params)
            settled(ours, engines)
            runs: dict[str, Callable[[], float | None]] = {"engine": ours}
            for name in rivals:
                rival = external.get(name)
                runs[name] = rival_runner(rival, copies, work) if rival else plain_runner(work, cfg, params)
            if "plain" in runs:  # the others warm up by themselves
                runs["plain"]()
            times = harness.best_of_turns(runs, rounds)
            floor, against = floor_s(work, cfg, flops), [times[name] for name in rivals if name in external]
            speeds = [work.tokens / took for took in (*times.values(), floor)]
            best = f"{min(against) / times['engine']:.2f}x" if against else ""
            yield table.row(work.name, *speeds, f"{times['engine'] / floor:.2f}x", best)
        for rival in external.values():
            rival.close()


# ---------------------------------------------------------- long contexts

SMALL = dict(
    vocab_size=151936, d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, d_ff=3072, rope_theta=1e6
)  # Qwen3-0.6B
LARGE = SMALL | dict(d_model=4096, n_layers=36, n_heads=32, d_ff=12288, tie_embeddings=False)  # Qwen3-8B
SIZES: dict[str, dict[str, Any]] = {"toy": TOY, "qwen3-0.6b": SMALL, "qwen3-8b": LARGE}
PAGE = {"reference": 16, "tpu": 32}
STEPS = 16


def step_bytes(cfg: decoder.ModelConfig, itemsize: int, rows: int, context: int) -> tuple[int, int]:
    """(weights, KV) that one step reads; of an embedding that is not the head too, only the rows' own lines."""
    params = decoder.abstract_params(cfg)
    unread = 0 if cfg.tie_embeddings else params["embed"].size
    weights = sum(x.size for x in jax.tree.leaves(params)) - unread
    return weights * itemsize, 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * rows * context * itemsize


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
    model: str, contexts: Sequence[int], rows: int, attention: str, memory_bytes: float
) -> Iterator[str]:
    """The page's lines. bf16, but f32 on CPUs, which have no fast bf16."""
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    cfg, size = decoder.new_config("qwen3", **SIZES[model]), PAGE[attention]
    params = jax.jit(lambda: decoder.serving_layout(decoder.init_params(cfg, 0, dtype=dtype)))()
    speed = read_speed(min(1 << 30, int(memory_bytes / 4)))
    yield f"{model}, {dtype.name}, attention {attention}; this device reads {speed / 1e9:.0f} GB/s"
    table = harness.Table({"context": "8d", "B": "5d", "weights MB": "12.1f", "KV MB": "9.1f", "ms a step": "11.2f",
                           "tokens/s": "10.0f", "share": "8.0%"})  # fmt: skip
    yield table.head
    for context in contexts:
        weights, kv = step_bytes(cfg, dtype.itemsize, 1, context)
        fit = min(rows, int((memory_bytes - weights) / (kv * (3 if attention == "reference" else 1.1))))
        if fit < 1:
            yield f"{context:8d}    0  one row of KV does not fit {memory_bytes / 1e9:.0f} GB beside the weights"
            continue
        engine = harness.new_engine(cfg, params, dtype=dtype.name, slots=fit, pages=fit * (context // size),
                                    page_size=size, max_prompt_tokens=size, max_new_tokens=context - size,
                                    decode_steps=STEPS, prefill_tokens=size * fit, attention=attention,
                                    context_block=min(1024, context))  # fmt: skip
        control, blocks = control_of(engine, context)
        held = engine.residents.of(0)  # as the calls take them
        took = harness.best_s(engine.device.generate, held, control, blocks, rounds=5) / STEPS
        kv *= fit
        share = (weights + kv) / took / speed
        yield table.row(context, fit, weights / 1e6, kv / 1e6, took * 1e3, fit / took, share)


# ----------------------------------------------------------------- drafts

HALF = {"rollout.slots": 32, "rollout.pages": 320}  # of the slots of bench.learning's: there are several engines
FREE = 1e-9  # a cost at which every call verifies


class Wrong(Drafter):
    """Drafts that are never right: each token is the one after the one that was drawn before."""

    def draft(self, seq: Seq) -> np.ndarray:
        found = super().draft(seq)
        return np.where(found == NONE, NONE, (found + 1) % self.vocab)

    vocab = 0


class Blind(Drafter):
    """Verifies no draft, at the shape of a verifying call."""

    def draft(self, seq: Seq) -> np.ndarray:
        return np.full(self.tokens, NONE, np.int32)


class Drafting:
    """One engine of the policy."""

    def __init__(self, policy: Policy, drafter: type[Drafter] = Drafter, **rollout: Any):
        run = dataclasses.replace(policy.run, rollout=dataclasses.replace(policy.run.rollout, **rollout))
        self.engine: Engine = build.new_engine(run, policy.tokenizer, policy.config, harness.one_device())
        self._weights = DeviceWeights(run.model.dtype)
        self._weights.put(0, policy.params)
        self.engine.warmup()
        self._drafter = drafter
        self.best = 0.0  # tokens a second
        self.samples: dict[SampleId, Sample] = {}

    def run(self, work: Sequence[tuple], live: int) -> None:
        """Samples the work, so many at once. The engine holds the weights for that time only."""
        self.engine.load(0, self._weights.get(0, self.engine.param_shardings))
        decoding = self.engine.scheduler.decoding
        if decoding.drafter is not None:  # a new one, that knows no sample of an earlier round
            decoding.drafter = self._drafter(self.engine.shapes)
        took, tokens = harness.timed(drain, self.engine, iter(work), live, self.samples)
        self.best = max(self.best, tokens / took)
        self.engine.drop(0)


def differing(name: str, a: Mapping[SampleId, Sample], b: Mapping[SampleId, Sample]) -> Iterator[str]:
    """How many differ; a line for each of them: where, and the log-probs of the two tokens."""
    lines = []
    for id, sample in a.items():
        other, n = b[id], min(len(sample.out_ids), len(b[id].out_ids))
        found = np.flatnonzero(sample.out_ids[:n] != other.out_ids[:n])
        if len(found) or len(sample.out_ids) != len(other.out_ids):
            at = int(found[0]) if len(found) else n - 1
            lines.append(f"  {id} at token {at}: log-probs {sample.logprobs[at]:.6f} and {other.logprobs[at]:.6f}")
    yield f"{name} {len(lines)} of {len(b)} samples differ"
    yield from lines


def policy_of(workdir: str) -> Policy:
    """The policy of a run; without a workdir SmolLM2's at version 0, in the configuration of bench.learning, half of its slots."""
    if workdir:
        return dora_jax.load_policy(workdir)
    tree = config_files.load_file(learning.REAL_CONFIG)
    folder = Path("runs/drafts")
    rows, path = folder / "sums.jsonl", str(harness.smollm_folder())
    learning.write_rows(rows)
    tree.update_from_flattened_dict(learning.FIELDS | {"model.path": path, "task.path": str(rows), **HALF})
    run = cli_flags.taken(tree, str(folder)).config
    devices.setup_platform(run)
    return Policy(of_this_machine(run), *hf.load(path), Tokenizer.load(path), 0)


def work_of(policy: Policy, samples: int, tokens: int) -> list[tuple]:
    """Samples of the run's task, a group's one after another; tokens: of an answer at most, 0 for those of the run."""
    run, size = policy.run, policy.run.orchestrator.group_size
    task = tasks.open_task(run.task, policy.tokenizer, seed=run.seed, max_prompt_tokens=run.rollout.max_prompt_tokens,
                           max_new_tokens=tokens or run.rollout.max_new_tokens, heldout=run.task.heldout,
                           quarantine_path=Path("quarantine.jsonl"))  # fmt: skip
    prompts = [task.prompt_at(10_000 + i) for i in range(samples // size)]
    return [(SampleId(p.group_id, i), p.token_ids, 0, p.max_new_tokens) for p in prompts for i in range(size)]


def draft_speeds(subjects: Mapping[str, Drafting], work: Sequence[tuple], live: int, rounds: int) -> Iterator[str]:
    for subject in [*subjects.values()] * rounds:
        subject.run(work, live)
    first = next(iter(subjects.values())).best
    for name, subject in subjects.items():
        d = subject.engine.scheduler.decoding.drafter
        held = f"{d.accepted} of {d.verified} drafted tokens held" if d and d.verified else ""
        yield f"{live:5d} live  {name:14s}{subject.best:10,.0f} tokens/s {subject.best / first:6.2f}x  {held}"
        subject.best = 0.0


def drafts(workdir="", smollm=False, live=4, drafts=7, samples=512, rounds=3, tokens=0) -> Iterator[str]:
    if bool(workdir) == smollm:
        raise SystemExit("error: one of --workdir=DIR and --smollm says whose policy it is")
    policy = policy_of(workdir)
    work = work_of(policy, samples, tokens)
    on, narrow = {"drafts": drafts, "draft_rows": live}, {"narrow_rows": live}
    Wrong.vocab = policy.tokenizer.vocab_size
    tail = {
        "off": Drafting(policy),
        "drafts alone": Drafting(policy, **on),
        "wrong alone": Drafting(policy, Wrong, **on),
        "narrow": Drafting(policy, **narrow),
        "drafts": Drafting(policy, **narrow, **on),
        "wrong": Drafting(policy, Wrong, **narrow, **on),
    }
    costs = tail["drafts"].engine.scheduler.decoding.costs
    yield f"version {policy.version}; times over a decode call's, by blocks of context:"
    yield f"the narrow call {costs.narrow}, a verifying call {costs.verify}"
    yield from draft_speeds(tail, work, live, rounds)
    off, *others = tail.items()
    for name, subject in others:
        yield from differing(f"across shapes, {name}:", off[1].samples, subject.samples)
    full = {name: tail[name] for name in ("off", "drafts alone", "drafts")}
    yield from draft_speeds(full, work, policy.run.rollout.slots, rounds)
    del tail, full, off, others, subject  # their pages of KV
    blind, every = (Drafting(policy, kind, **on, draft_cost=FREE) for kind in (Blind, Drafter))
    for each in (blind, every):
        each.run(work, live)
    yield from differing("at one shape", blind.samples, every.samples)


# --------------------------------------------------------------- adapters

PROMPT_TOKENS = 32


class Resident:
    """One engine, full of versions."""

    def __init__(self, model: decoder.ModelConfig, versions: int, rows: int, tokens: int, section: Lora):
        config = harness.config_of("float32", {"lora": section}, residents=versions, slots=rows,
                                   max_prompt_tokens=PROMPT_TOKENS, max_new_tokens=tokens, prefill_chunk=PROMPT_TOKENS,
                                   decode_steps=min(16, tokens))  # fmt: skip
        self.tokens = tokens
        self.best: dict[int, float] = {}  # versions of the rows -> tokens a second
        self.engine = build.engine_of(config, model, harness.one_device())
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
        self._groups = itertools.count()

    def run(self, samples: int, versions: int) -> None:
        """Samples so many, of these versions in turn; a group's would share a prefill, so each is a group of its
        own."""
        prompts = np.random.default_rng(0).integers(3, self.engine.cfg.vocab_size, (samples, PROMPT_TOKENS))
        todo = [(SampleId(next(self._groups), 0), p.astype(np.int32), i % versions, self.tokens)
                for i, p in enumerate(prompts)]  # fmt: skip
        took, found = harness.timed(drain, self.engine, iter(todo))
        self.best[versions] = max(self.best.get(versions, 0.0), found / took)


def residents(versions: Sequence[int], rows: int, rank: int, tokens: int, samples: int, rounds: int, width: int):
    """Both engines by their names, measured."""
    model = decoder.new_config("qwen3", **TOY | {"d_model": width, "d_ff": 3 * width})
    sections = {"full weights": OFF, f"adapters, rank {rank}": Lora(rank=rank)}
    found = {name: Resident(model, max(versions), rows, tokens, section) for name, section in sections.items()}
    for _, resident, count in itertools.product(range(rounds), found.values(), versions):
        resident.run(samples or rows, count)
    return found


def adapters(
    versions=(1, 2, 4), rows=32, rank=8, tokens=128, samples=0, rounds=3, width=TOY["d_model"]
) -> Iterator[str]:
    """samples: of a round, 0 for as many as rows; width: d_model of the toy."""
    yield from adapter_table(residents(versions, rows, rank, tokens, samples, rounds, width))


def adapter_table(found: Mapping[str, Resident]) -> Iterator[str]:
    """One line for each number of versions; `of one`: against rows of one version on the same engine."""
    page = harness.Table({"versions are": "20s", "of rows": "9d", "tokens/s": "10,.0f", "of one": "8.2f",
                          "of first": "10.2f", "MB each": "9.2f", "ms": "8.1f"})  # fmt: skip
    yield page.head
    first, *_ = next(iter(found.values())).best.values()
    for name, resident in found.items():
        one, *_ = resident.best.values()
        for count, speed in resident.best.items():
            yield page.row(name, count, speed, speed / one, speed / first, resident.bytes / 1e6, min(resident.load_ms))


if __name__ == "__main__":
    harness.run(decode, drafts, adapters)
