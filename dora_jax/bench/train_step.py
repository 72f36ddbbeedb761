"""One optimizer update, host work included, against the plainest JAX step and against transformers + torch.

    python -m dora_jax.bench.train_step [--smollm] [--rivals=plain,transformers,transformers_bf16] [--rounds=3]
                                          [--install]
    python -m dora_jax.bench.train_step checkpoint [--tokens=1024] [--rounds=3] [--folder=FOLDER]
    python -m dora_jax.bench.train_step host_time [--rows=256] [--contexts=2048,30720] [--pages=16,64] [--steps=8]
                                                    [--ticks=60] [--partial_s=2] [--instances=1] [--step_ms=0]
    python -m dora_jax.bench.train_step drift [--model=FOLDER] [--samples=32] [--tokens=128]
    python -m dora_jax.bench.train_step drift --moe [--model=FOLDER] [--samples=32] [--tokens=128] [--seeds=0,1,2]
    python -m dora_jax.bench.train_step drift --exact [--ladder] [--types=8] [--model=FOLDER] [--samples=32]
                                              [--tokens=128]

The same f32 weights, trajectories, PPO loss and AdamW everywhere; the first loss and gradient norm of all are compared
before anything is timed. Ours multiplies in the type that a run on this machine would; _bf16 is torch under autocast.
Two kinds of work: equal lengths (16 sequences of 256 tokens) and a long tail (32 of 16 + a log-normal number, median
48, at most 496). Ours packs the sequences into rows that hold the longest (a multiple of 128 tokens, as
trainer.pack_tokens would be set for such work); the rivals pad them to the longest, as they do. Tokens are those of
prompts and responses, padding counts for nobody. MFU: the model's own FLOPs (no padding, causal attention) over what a
large f32 matrix product reaches on this machine. Compilation is left out; rounds are interleaved and the best of each
counts. torch runs in an environment of its own (`--install` makes it under .bench/). With --smollm the weights are
those of a real model of 135M parameters (bench.learning), the work is two sequences of 512 tokens, one a micro-batch.
The second table: what the step holds at its peak beside the state, by how the log-probs are taken.

checkpoint: what digests cost: seconds of a step, a save and a restore, with digests and without.
Random weights of the shapes of SmolLM2-135M, masters and both of Adam's moments in f32; one update of `tokens` tokens,
512 a sequence. Every step publishes the digest of its weights; a save takes those of params, optimizer and rl_state
before the trainer goes on, and a restore takes them of what it has read.
step       one update         publish   digest of params, as every step takes it
digests    of one save        save      until the trainer may go on, digests included
written    until the manifest verifies
restore    every byte checked, read onto the trainer's shards, digests compared; `alone`: without the comparison
Best of the rounds, because neighbours on the machine only ever slow things down; compilation is left out.

host_time: of a rollout instance: what the plan, the commit and the reports of a tick cost beside the device's work.
The engine is the one that `train` assembles, with a device in its place that answers at once: every row samples
`steps` tokens in every call. Rows stand just below the context, each at a position of its own. `plan`, `commit` and
`rest` (launches, page uploads, the tick's result) are milliseconds of a tick; `us` is their sum by row and step; all
are medians. `report` is what one report of all rows' new tokens costs, each partial_s, in milliseconds.
With --instances=N: N instances on threads of one process for a few seconds; `tokens/s` is what all of them commit,
reports included, and so the most that one interpreter lock lets through; `core` is what the process uses of one core.
With --step_ms as well a decode step takes so long, during which the host is free and results are read one call behind
(rollout.late_results); `idle` is the share of the time in which a device waits for its host.

drift: what narrow types cost in log-prob: samples of the engine, scored again as the trainer does.
Without a folder, a small model with random weights: those are harder on rounding than trained ones of this size. Gains
of norms are off the grid of bfloat16, as trained ones are.
  gap          engine log-prob minus the trainer's, of the sampled tokens: mean size, 99th percentile, largest, mean
  forward      mean size of one forward pass in the trainer's type minus one in f32, of the same tokens
  bytes        of the projections and of the KV of one position, as held
The first row is the rounding of f32 itself. Where engine and trainer both compute in bfloat16, each rounds for itself,
so that the gap is at most about 1.4 times one forward pass's rounding; `gap / forward` says how much it is.

With --moe: a mixture of experts in bfloat16, whose trainer scores the same samples with experts of its own choice and
with those that sampling took (trainer.routing_replay=rollout). `changed` is the share of choices that differ.

With --exact: what rollout.exact is worth and what it costs. The samples are scored by the trainer's forward, and by the
engine's own calls; `sampling` is how long those samples took without the option and with it, `replay` how long their
scoring by the engine's calls. --types: the first so many rows.
With --ladder as well: the engine has rollout.ladder on and compiles at once what it misses, the samples are a long
tail, and rounds of them are drawn until WIDTHS rungs or more have drawn TAIL_TOKENS tokens. `by rows` counts the tokens
that the calls of each number of rows drew; `differ` are log-probs of other bits where each token is scored by a call of
the rows that drew it, `full rows` the same where all are scored by the widest. Then the seconds of a round by one
width, and with all rungs, the quickest of ROUNDS. The second table draws the same samples by calls of each number of
rows: how many have another token than by the widest, then for each of them the first, and the log-probs of both there,
by the widest.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dora_jax.base.digest import digest
from dora_jax.bench import harness
from dora_jax.bench.decode import MODEL, flop_speed
from dora_jax.buffer import layout, pack
from dora_jax.config import CheckpointSection, Config, Dtype, KvBits, RoutingReplay, TrainerSection, WeightBits
from dora_jax.costs import update as update_costs
from dora_jax.models import decoder, hf, logits
from dora_jax.models.families.config import Experts, ModelConfig
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.orchestrate import events as ev
from dora_jax.plan import devices, presets
from dora_jax.publish import placed
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.rollout.quantize import KV, PROJECTIONS, WEIGHTS
from dora_jax.runtime.assembly import run as build
from dora_jax.runtime.assembly.run import EngineReplay, engine_of, engine_options, trainer_recipe
from dora_jax.runtime.instances.rollout_worker import EngineWorker
from dora_jax.trainer import score, step
from dora_jax.trainer.advantage import Prepare
from dora_jax.trainer.checkpoint import Checkpoints
from dora_jax.types import Sample, SampleId

PROMPT, GROUP, LONGEST, ROW_UNIT = 16, 8, 512, 128
WIDE_VOCAB = 32768  # of the memory table: where B x L x V is what fills a device
AGREE = 1e-3  # relative: f32 sums in another order
AGREE_BF16 = 0.1  # of products of bfloat16
TORCH = {"transformers": "torch_step", "transformers_bf16": "torch_step_bf16"}  # rival -> its program
Step = Callable[[], tuple[float, float]]  # one update on the same trajectories -> (loss, gradient norm)


@dataclasses.dataclass(frozen=True)
class TrainWork:
    name: str
    model: decoder.ModelConfig
    batch: pack.TrainBatch
    padded: dict[str, np.ndarray]  # one sequence a row, as wide as the longest


def works() -> list[TrainWork]:
    rng = np.random.default_rng(0)
    tail = np.exp(rng.normal(np.log(48), 1.1, 32)).astype(int).clip(1, LONGEST - PROMPT)
    return [_work(MODEL, "equal", np.full(16, 256 - PROMPT + 1), rng), _work(MODEL, "long tail", tail, rng)]


def real_work(model: decoder.ModelConfig, rows: int = 2) -> TrainWork:
    return _work(model, f"{rows} x 512", np.full(rows, 512 - PROMPT + 1), np.random.default_rng(0), group=2)


def _work(
    model: decoder.ModelConfig, name: str, lengths: np.ndarray, rng: np.random.Generator, group: int = GROUP
) -> TrainWork:
    """Groups of random tokens whose log-probs are near those of an untrained model, so that some ratios clip."""
    groups, near = [], -np.log(model.vocab_size)
    for group_id in range(len(lengths) // group):
        prompt = rng.integers(0, model.vocab_size, PROMPT).astype(np.int32)
        answers = [(rng.integers(0, model.vocab_size, n), rng.normal(near, 0.3, n))
                   for n in lengths[group_id * group : (group_id + 1) * group].tolist()]  # fmt: skip
        samples = [harness.sample_of(group_id, index, prompt, *answer) for index, answer in enumerate(answers)]
        groups.append(harness.scored(samples, rng))
    row = -(-int(lengths.max() + PROMPT - 1) // ROW_UNIT) * ROW_UNIT
    rows = -(-int((lengths + PROMPT - 1).sum()) // row) + 1  # first fit by falling length wastes less than one
    shape = layout.BatchShape(rows=rows, tokens=row, micro_batches=1)
    objective: Any = Prepare(section(), int(lengths.max()))
    batch = pack.pack(groups, shape, objective)
    filled = (batch.segment_ids > 0).any(1)
    kept: dict[str, Any] = {name: x[filled] for name, x in batch.arrays().items()}
    batch = dataclasses.replace(batch, **kept)
    segments, padded = score.segments_of(batch), {}
    for field in ("tokens", "targets", "mask", "behavior_logprobs", "advantages", "loss_weights"):
        packed = getattr(batch, field)
        padded[field] = np.zeros((len(segments), max(stop - start for _, start, stop in segments)), packed.dtype)
        for i, (at, start, stop) in enumerate(segments):
            padded[field][i, : stop - start] = packed[at, start:stop]
    return TrainWork(name, model, batch, padded)


def section(model: ModelConfig = MODEL, micro_batches: int = 1) -> TrainerSection:
    """What a run on this machine has, but for prompts, which the rivals do not share."""
    asked = TrainerSection(
        pack_tokens=LONGEST, warmup_steps=0, learning_rate=1e-5, micro_batches=micro_batches, share_prompts="off"
    )
    return presets.plan(Config(trainer=asked), presets.Machines(*[devices.found()] * 2), model).config.trainer


def plain_runner(cfg, params, padded) -> Step:
    """A closure that makes one update and returns (loss, gradient norm): the plainest JAX, with padded rows, jax.nn
    attention, log_softmax over all logits and optax. Written against the weights' names alone, so that it also checks
    the model: it shares no code with decoder.py."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, b1=0.9, b2=0.95, weight_decay=0.0))
    state = [jax.tree.map(jnp.copy, params)]
    state.append(tx.init(state[0]))

    @jax.jit
    def update(params, moments, batch):
        loss, grads = jax.value_and_grad(_plain_loss, argnums=1)(cfg, params, batch)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss, optax.tree.norm(grads)

    def run() -> tuple[float, float]:
        state[0], state[1], loss, norm = update(*state, padded)
        return float(loss), float(norm)

    return run


def _plain_loss(cfg, params, batch):
    def norm(x, gain):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain

    def rotate(x):
        half = cfg.head_dim // 2
        angle = jnp.arange(x.shape[1])[:, None] / cfg.rope_theta ** (jnp.arange(half) / half)
        cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    b, length = batch["tokens"].shape
    x = params["embed"][batch["tokens"]]
    for i in range(cfg.n_layers):
        w = {name: stacked[i] for name, stacked in params["layers"].items()}
        h = norm(x, w["attn_norm"])
        q, k, v = ((h @ w[f"{n}_proj"]).reshape(b, length, -1, cfg.head_dim) for n in "qkv")
        q, k = (rotate(norm(x, w[name]) if name in w else x) for x, name in ((q, "q_norm"), (k, "k_norm")))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, length, -1) @ w["o_proj"]
        h = norm(x, w["mlp_norm"])
        x = x + (jax.nn.silu(h @ w["gate_proj"]) * (h @ w["up_proj"])) @ w["down_proj"]
    logprobs = jax.nn.log_softmax(norm(x, params["final_norm"]) @ params["embed"].T)
    l = jnp.take_along_axis(logprobs, batch["targets"][..., None], axis=-1)[..., 0]
    ratio, adv = jnp.exp(l - batch["behavior_logprobs"]), batch["advantages"]
    per_token = jnp.maximum(-adv * ratio, -adv * jnp.clip(ratio, 0.8, 1.2))
    return jnp.sum(jnp.where(batch["mask"], batch["loss_weights"] * per_token, 0.0))


def train_step(smollm=False, rivals=("plain", *TORCH), rounds=3, install=False) -> Iterator[str]:
    devices.keep_freed_memory()  # as a run's set-up does
    with tempfile.TemporaryDirectory() as temporary:
        folder, model, params = harness.weights_of(MODEL, Path(temporary) / "model", smollm)
        external = {
            name: harness.Rival(program, "transformers", folder, install)
            for name, program in TORCH.items()
            if name in rivals
        }
        peak = flop_speed()
        yield f"measured: {peak / 1e9:.0f} GFLOP/s; jax {jax.__version__}; tokens/s (MFU) of one update"
        columns = dict.fromkeys(rivals, ">20s")
        table = harness.Table({"work": "11s", "tokens": "7d", "packed": "8.0%", "padded": "8.0%", "ours": ">16s",
                               **columns, "best rival": ">12s"})  # fmt: skip
        yield table.head
        for work in [real_work(model)] if smollm else works():
            times, lengths = measure(work, params, rivals, external, rounds), work.batch.lengths[0]
            tokens, needed = int(lengths.sum()), update_costs.model_flops(work.model, lengths)
            cells = [f"{tokens / t:.0f} ({needed / t / peak:.0%})" for t in times]
            shares = [tokens / work.batch.tokens.size, tokens / work.padded["tokens"].size]
            against = f"{min(times[1:]) / times[0]:.2f}x" if times[1:] else ""
            yield table.row(work.name, tokens, *shares, *cells, against)
        for rival in external.values():
            rival.close()
    if not smollm:
        yield from memory_table()


def measure(
    work: TrainWork, params: Any, rivals: Sequence[str], external: Mapping[str, harness.Rival], rounds: int
) -> list[float]:
    """Seconds of the best update of each; refuses to compare what does not compute the same."""
    micro_batches = 1 if work.model == MODEL else len(work.batch.tokens)
    trainer = step.Trainer(
        work.model, section(work.model, micro_batches), harness.one_device(), params, total_steps=1000
    )
    trainer.warmup(*work.batch.tokens.shape)

    def ours() -> tuple[float, float]:
        metrics = trainer.step(work.batch)
        return metrics["trainer/loss"], metrics["trainer/grad_norm"]

    runs: dict[str, Step] = {"ours": ours}
    if "plain" in rivals:
        runs["plain"] = plain_runner(work.model, params, work.padded)
    first = {name: run() for name, run in runs.items()}
    turns: dict[str, Callable[[], Any]] = {**runs}
    question = {name: x.tolist() for name, x in work.padded.items()} | {"name": work.name}
    for name, rival in external.items():
        first[name] = rival.ask(question)[0][1:]
        turns[name] = functools.partial(lambda rival: rival.ask(question)[0][0], rival)
    narrow = {"ours", "transformers_bf16"} if trainer.section.matmul == "bfloat16" else {"transformers_bf16"}
    right = next((first[name] for name in first if name not in narrow), first["ours"])
    for name, result in first.items():
        if not np.allclose(result, right, rtol=AGREE_BF16 if name in narrow else AGREE, atol=1e-6):
            raise RuntimeError(f"{work.name}: (loss, gradient norm) of {name} differ: {first}")
    return list(harness.best_of_turns(turns, rounds).values())


def memory_table() -> Iterator[str]:
    """Temporary memory of the loss's gradient: all logits at once, and in chunks of at most so many bytes."""
    cfg = dataclasses.replace(MODEL, vocab_size=WIDE_VOCAB)
    batch = works()[0].batch
    rows, length = batch.tokens.shape
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.arrays().items()}

    def loss(max_bytes, params, arrays):
        attend = segment_attention(arrays["segment_ids"], arrays["positions"])
        hidden = decoder.forward(
            cfg, decoder.serving_layout(params), arrays["tokens"], arrays["positions"], attend, remat="full"
        )
        l, _ = logits.target_logprobs(cfg, params, hidden, arrays["targets"], max_bytes=max_bytes)
        return jnp.sum(jnp.where(arrays["mask"], l, 0.0))

    whole = 4 * rows * length * WIDE_VOCAB
    yield f"\nlog-probs of {rows} x {length} tokens over {WIDE_VOCAB} ids: temporary memory of the gradient"
    for name, limit in (("B x L x V at once", whole), ("in chunks", section().logits_bytes)):
        gradient = jax.jit(jax.grad(functools.partial(loss, limit)))
        used = gradient.lower(decoder.abstract_params(cfg), shapes).compile().memory_analysis()
        assert used is not None, "every backend that runs here says what a program uses"
        bytes_ = used.temp_size_in_bytes
        yield f"{name:20s}{bytes_ / 2**20:9.0f} MiB   (logits {min(limit, whole) / 2**20:.0f} MiB at once)"


# ------------------------------------------------------------- checkpoint

SHAPE = dict(vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, d_ff=1536)
RL_STATE = {"cursors": list(range(1000))}


def checkpoint(tokens=1024, rounds=3, folder=None) -> Iterator[str]:
    devices.keep_freed_memory()  # as a run's set-up does
    model = decoder.new_config("llama", **SHAPE)
    batch = real_work(model, tokens // LONGEST).batch
    trainer = step.Trainer(
        model, section(model, len(batch.tokens)), harness.one_device(), decoder.init_params(model, 0), total_steps=1000
    )
    trainer.warmup(*batch.tokens.shape)
    sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) / 2**20 for tree in trainer.state[:2]]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        best = checkpointed(trainer, batch, Path(place), rounds)
    yield f"params {sizes[0]:.0f} MiB, opt_state {sizes[1]:.0f} MiB, {tokens} tokens a step"
    for name, seconds in best.items():
        yield f"{name:10s}{seconds:9.3f} s{seconds / best['step']:9.1%} of a step"


def checkpointed(trainer: step.Trainer, batch: Any, folder: Path, rounds: int) -> dict[str, float]:
    best: dict[str, float] = {}

    def note(name: str, do: Callable[..., Any], *arguments: Any) -> None:
        began = time.perf_counter()
        jax.block_until_ready([x for x in jax.tree.leaves(do(*arguments)) if isinstance(x, jax.Array)])
        best[name] = min(best.get(name, np.inf), time.perf_counter() - began)

    store = Checkpoints(folder, CheckpointSection(keep=1))
    like = trainer.abstract_state()
    for number in range(1, rounds + 2):
        if number == 2:
            best.clear()  # the first compiles
        note("step", trainer.step, batch)
        state = trainer.state
        note("publish", digest, state.params)
        note("digests", lambda *trees: list(map(digest, trees)), state.params, state.opt_state)
        began = time.perf_counter()
        note("save", store.save, number, state.params, state.opt_state, RL_STATE, {})
        store.wait()
        best["written"] = min(best.get("written", np.inf), time.perf_counter() - began)
        ((_, digests),) = store.take_saves()
        for name, wanted in (("restore", digests), ("alone", None)):
            note(name, store.restore, number, like.params, like.opt_state, wanted)
    store.close()
    return best


# -------------------------------------------------------------- host time

NOTHING: Any = None  # where an engine that computes nothing needs nothing
LITTLE = decoder.new_config("qwen3", vocab_size=64, d_model=8, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=2, d_ff=8)
SAMPLES = 8  # of a group
TOKEN = 5  # what every row samples
WINDOW_S = 3.0  # of a measurement with several instances


class Pending:
    """A result that is there at a time."""

    def __init__(self, data: np.ndarray, due_s: float):
        self._data, self._due_s = data, due_s

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
        return self._data


class InstantDevice:
    """A `device.Device` that computes nothing; a call takes `call_s`, after the one before."""

    def __init__(self, engine: Engine, call_s: float = 0.0):
        self._call_s = call_s
        self.idle_s = 0.0  # between calls
        self.due_s: float | None = None  # None: what comes next is its first call
        s = self.shapes = engine.shapes
        self.compiled, self.climb = lambda: 0, lambda params, costs: False  # there is nothing to compile
        self._result = np.zeros((s.rows, s.result), np.int32)
        self._result[:, : s.steps] = TOKEN
        self._result[:, s.steps : 2 * s.steps] = np.float32(-1).view(np.int32)
        self._result[:, 2 * s.steps] = s.steps

    def prefill(self, params: Any, control: np.ndarray, blocks: int) -> None:
        """Nothing to compute."""

    def generate(
        self, params: Any, control: np.ndarray, blocks: int, options: np.ndarray | None = None, masks: Any = None
    ) -> tuple[np.ndarray | Pending, None, None]:
        if not self._call_s:
            return self._result, None, None
        now_s = time.perf_counter()
        begins_s = max(now_s, self.due_s or now_s)
        self.idle_s += begins_s - (self.due_s or now_s)
        self.due_s = begins_s + self._call_s
        return Pending(self._result, self.due_s), None, None


def new_worker(
    instance: int, context: int, page: int, rows: int, steps: int, ticks: int, partial_s: float, step_ms: float
) -> EngineWorker:
    """An instance whose slots all decode, at positions up to `context`."""
    spare = (ticks + 8) * steps
    chunk = context // 4  # few and large ones, all in the first tick: prefill is not what is timed
    longest = context + spare - chunk
    config = harness.config_of(slots=rows, pages=rows * (context + spare) // page + 2 * rows, page_size=page,
                               max_prompt_tokens=chunk, max_new_tokens=longest, decode_steps=steps,
                               prefill_tokens=rows * 2 * context, prefill_chunk=chunk,
                               late_results="on" if step_ms else "off")  # fmt: skip
    engine = build.engine_of(config, LITTLE, harness.one_device(), eos_ids=(1,))
    engine.device = InstantDevice(engine, step_ms * 1e-3 * steps)  # type: ignore[assignment]
    engine.load(0, decoder.serving_layout(decoder.init_params(LITTLE, 0)))
    worker = EngineWorker(instance, engine, NOTHING, queue.SimpleQueue(), partial_s)
    for i in range(rows):
        n = context - chunk - i * steps % 128
        prompt = np.arange(chunk, dtype=np.int32) + i // SAMPLES
        sample = InFlightSample(id=SampleId(i // SAMPLES, i % SAMPLES), version=0, out_ids=np.full(n, TOKEN, np.int32),
                                prompt_ids=prompt, logprobs=np.full(n, -1, np.float32),
                                max_new_tokens=longest)  # fmt: skip
        worker.execute(ev.Resume(ids=(sample.id,), instance=instance, version=0), sample)
    while len(engine.tick().progress) < rows:
        pass
    return worker


def measured(worker: EngineWorker, ticks: int) -> tuple[float, float, float, float]:
    """Milliseconds of a tick's plan, its commit, the rest of it, and of a report."""
    engine: Any = worker.engine
    spent: dict[str, list[float]] = {"plan": [], "_commit": [], "tick": []}
    for owner, name in ((engine.scheduler, "plan"), (engine, "_commit")):
        call, into = getattr(owner, name), spent[name]

        def clocked(*args: Any, call=call, into=into) -> Any:
            took, result = harness.timed(call, *args)
            into.append(took)
            return result

        setattr(owner, name, clocked)
    spent["tick"] = [harness.timed(engine.tick)[0] for _ in range(ticks)]
    plan, commit, tick = (1e3 * statistics.median(times) for times in spent.values())
    worker.work()  # all rows have grown
    worker._partials_s = worker._reported_s = 0.0
    return plan, commit, tick - plan - commit, 1e3 * harness.timed(worker.work)[0] - tick


def together(workers: list[EngineWorker], ticks: int) -> tuple[float, float, float]:
    """(tokens/s, share of one core's time, share of the time that the devices are idle in the mean): each on a thread
    of its own, while one thread takes what they report."""
    over = threading.Event()
    idle: list[Any] = [worker.engine.device for worker in workers]  # type: ignore[attr-defined]

    def run(worker: EngineWorker) -> None:
        for _ in range(ticks):
            if over.is_set():
                return
            worker.work()

    def sums() -> tuple[float, float, float, float]:
        idle_s = statistics.mean(device.idle_s for device in idle)
        return time.perf_counter(), sum(worker.tokens for worker in workers), time.process_time(), idle_s

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for device in idle:
        device.idle_s, device.due_s = 0.0, None
    before = sums()
    for thread in threads:
        thread.start()
    while time.perf_counter() - before[0] < WINDOW_S and all(thread.is_alive() for thread in threads):
        for worker in workers:
            outbox: Any = worker.outbox
            while not outbox.empty():
                outbox.get()
        time.sleep(0.01)
    took_s, tokens, cpu_s, idle_s = (after - start for start, after in zip(before, sums(), strict=True))
    over.set()
    for thread in threads:
        thread.join()
    return tokens / took_s, cpu_s / took_s, idle_s / took_s


def host_time(
    rows=256, contexts=(2048, 30720), pages=(16, 64), steps=8, ticks=60, partial_s=2.0, instances=1, step_ms=0.0
) -> Iterator[str]:
    several = instances > 1
    yield f"{rows} rows, {steps} steps a call, {instances} instance{'s' * several}"
    columns = {"tokens/s": "12.0f", "core": "7.0%", "idle": "7.1%"}
    if not several:
        columns = dict.fromkeys(("plan", "commit", "rest", "us"), "8.2f") | {"report": "9.2f"}
    page_of = harness.Table({"context": "8d", "page": "6d", **columns})
    yield page_of.head
    for context in contexts:
        for page in pages:
            workers = [new_worker(i, context, page, rows, steps, ticks, partial_s, step_ms) for i in range(instances)]
            if several:
                yield page_of.row(context, page, *together(workers, ticks))
                continue
            plan, commit, rest, report = measured(workers[0], ticks)
            us = 1e3 * (plan + commit + rest) / rows / steps
            yield page_of.row(context, page, plan, commit, rest, us, report)


# --------------------------------------------------------------------- drift

PROMPT_TOKENS = 32
MIXTURE: dict[str, Any] = dict(
    vocab_size=512, d_model=128, n_layers=8, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=256,
    experts=Experts(count=64, per_token=8, width=32),
)  # fmt: skip
OPTIONS: tuple[tuple[Dtype, WeightBits, KvBits], ...] = (
    ("float32", "", ""),
    ("bfloat16", "", ""),
    ("float32", "int8", ""),
    ("float32", "float8", ""),
    ("float32", "", "float8"),
    ("bfloat16", "int8", ""),
    ("bfloat16", "int8", "float8"),
    ("float32", "bfloat16", ""),
)
WIDE: tuple[Dtype, WeightBits, KvBits] = OPTIONS[0]


def config_of(
    dtype: Dtype, weights: WeightBits, kv: KvBits, count: int, tokens: int, routing_replay: RoutingReplay = "none"
) -> Config:
    trainer = TrainerSection(routing_replay=routing_replay, matmul="bfloat16" if weights == "bfloat16" else "float32")
    return harness.config_of(dtype, {"trainer": trainer}, slots=count, max_prompt_tokens=PROMPT_TOKENS,
                             max_new_tokens=tokens, prefill_tokens=512, weights=weights, kv=kv)  # fmt: skip


def off_grid(cfg: ModelConfig, seed: int) -> decoder.Params:
    """Random weights with gains between 0.8 and 1.2."""
    rng = np.random.default_rng(seed)

    def one(path, x):
        return x * rng.uniform(0.8, 1.2, x.shape).astype(np.float32) if "norm" in path[-1].key else x

    return jax.tree_util.tree_map_with_path(one, decoder.init_params(cfg, seed))


def loaded_engine(config: Config, cfg: ModelConfig, params: Any) -> Engine:
    """The run's engine, with weights as it gets them: published in its type."""
    engine = engine_of(config, cfg, harness.one_device())
    engine.load(0, placed(harness.published(config, cfg, params), engine.param_shardings))
    return engine


def sampled(
    engine: Engine, count: int, lengths: Sequence[int] = (), group: int = 0, rows: int | None = None
) -> list[Sample]:
    """lengths: of the answers; (): all of the longest. rows: of the calls that draw them; None: any."""
    rng, ids = np.random.default_rng(group), [SampleId(group, index) for index in range(count)]
    for id, length in zip(ids, lengths or [engine.section.max_new_tokens] * count, strict=True):
        engine.submit(id, rng.integers(3, engine.cfg.vocab_size, PROMPT_TOKENS), 0, length)
        if rows is not None:
            seq = engine.scheduler.seqs[id]
            seq.forced, seq.forced_rungs = np.full(length, -1, np.int32), np.full(length, rows, np.int32)
    done = harness.finished(engine)
    return [done[id] for id in ids]


def engine_logprobs(samples: list[Sample]) -> np.ndarray:
    return np.concatenate([sample.logprobs for sample in samples])


def scored(
    config: Config, cfg: ModelConfig, params: Any, samples: list[Sample], replay: bool = False
) -> tuple[np.ndarray, float]:
    """(the trainer's log-probs of the sampled tokens, f32[samples * tokens], the share of the samples' choices that the
    trainer's routers would not make).

    params: its f32 masters. replay: tokens go to the experts that sampling took, and not to those of the trainer's
    choice."""
    model = trainer_recipe(config, cfg, harness.one_device(), cfg.vocab_size).model
    rows = np.stack([np.concatenate([s.prompt_ids, s.out_ids]) for s in samples]).astype(np.int32)
    positions = np.tile(np.arange(rows.shape[1] - 1, dtype=np.int32), (len(rows), 1))
    arrays = {
        "tokens": rows[:, :-1],
        "targets": rows[:, 1:],
        "positions": positions,
        "segment_ids": np.ones_like(positions),
    }
    if replay:
        arrays["routes"] = np.stack([np.asarray(s.table.routes) for s in samples])

    @jax.jit
    def score(params, arrays):
        (logprobs, _), routed = model.logprobs_routed(params, arrays)
        return logprobs, routed.changed.sum() / routed.ids.size if routed else 0.0

    logprobs, changed = score(params, arrays)
    return np.asarray(logprobs)[:, PROMPT_TOKENS - 1 :].reshape(-1), float(changed)


def gap_of(
    cfg: ModelConfig, params: Any, options: tuple[Dtype, WeightBits, KvBits], count: int, tokens: int
) -> tuple[np.ndarray, float]:
    """(engine minus trainer of each sampled token, the mean rounding of one forward pass in the trainer's type)."""
    config = config_of(*options, count, tokens)
    samples = sampled(loaded_engine(config, cfg, params), count)
    trainer, exact = (scored(each, cfg, params, samples)[0] for each in (config, config_of(*WIDE, count, tokens)))
    return engine_logprobs(samples) - trainer, float(np.abs(trainer - exact).mean())


def replayed(cfg: ModelConfig, params: Any, count: int, tokens: int) -> tuple[np.ndarray, np.ndarray, float]:
    """(engine minus trainer of each sampled token in bfloat16, the same under replay, share of choices that change)."""
    config = config_of("bfloat16", "", "", count, tokens, routing_replay="rollout")
    samples = sampled(loaded_engine(config, cfg, params), count)
    (own, _), (replay, changed) = (scored(config, cfg, params, samples, replay=each) for each in (False, True))
    return engine_logprobs(samples) - own, engine_logprobs(samples) - replay, changed


def drift(
    model="", samples=32, tokens=128, moe=False, exact=False, ladder=False, types=8, seeds=(0, 1, 2)
) -> Iterator[str]:
    if moe:
        mixture = decoder.new_config("qwen3_moe", **MIXTURE)
        models = [hf.load(Path(model))] if model else [(mixture, off_grid(mixture, s)) for s in seeds]
        table = harness.Table({"seed": "6s", "own: mean": "12.2e", "worst": "10.2e", "replay: mean": "14.2e",
                               " worst": "10.2e", "mean": ">8s", "worst ": ">8s", "changed": "10.1%"})  # fmt: skip
        yield table.head
        for seed, (cfg, params) in zip(seeds, models, strict=False):
            own, replay, changed = replayed(cfg, params, samples, tokens)
            sizes = [f(np.abs(gap)) for gap in (own, replay) for f in (np.mean, np.max)]
            ratios = [f"{before / after:7.2f}x" for before, after in zip(sizes[:2], sizes[2:], strict=True)]
            yield table.row("-" if model else str(seed), *sizes, *ratios, changed)
        return
    cfg, params = hf.load(Path(model)) if model else (MODEL, off_grid(MODEL, 0))
    if exact:
        if ladder:
            yield from ladder_table(cfg, params, samples, tokens, types)
            yield from rungs_table(cfg, params, samples, tokens)
        else:
            yield from exact_table(cfg, params, samples, tokens, types)
        return
    table = harness.Table({"compute": "10s", "weights": "9s", "KV": "9s", "gap: mean": "11.2e", "p99": "10.2e",
                           "largest": "10.2e", "signed": "10.1e", "forward": "10.2e", "gap / forward": ">15s",
                           "projections MB": "16.2f", "KV B/token": "12d"})  # fmt: skip
    yield table.head
    layer = decoder.abstract_params(cfg)["layers"]
    shapes = [layer[name].shape for name in PROJECTIONS if name in layer]
    for dtype, weights, kv in OPTIONS:
        gap, forward = gap_of(cfg, params, (dtype, weights, kv), samples, tokens)
        narrow = jnp.dtype(WEIGHTS[weights] or dtype).itemsize
        scale = 4 if narrow == 1 else 0  # float32, a channel
        held = sum(n * (d * f * narrow + f * scale) for n, d, f in shapes)
        position = 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * jnp.dtype(KV[kv] or dtype).itemsize
        size = np.abs(gap)
        ratio = f"{size.mean() / forward:.2f}" if forward else "-"
        yield table.row(dtype, weights or "-", kv or "-", size.mean(), np.quantile(size, 0.99), size.max(), gap.mean(),
                        forward, ratio, held / 1e6, position)  # fmt: skip


def exact_table(cfg: ModelConfig, params: Any, count: int, tokens: int, types: int) -> Iterator[str]:
    table = harness.Table({"compute": "10s", "weights": "9s", "KV": "9s", "tokens": "8d", "gap: mean": "11.2e",
                           "largest": "10.2e", "exact: largest": "16.1e", "differ": "8d", "sampling s": "12.2f",
                           "exact s": "9.2f", "replay s": "10.2f"})  # fmt: skip
    yield table.head
    for dtype, weights, kv in OPTIONS[:types]:
        plain = config_of(dtype, weights, kv, count, tokens)
        config = with_rollout(plain, exact=True, ladder="off")
        engines = [loaded_engine(each, cfg, params) for each in (plain, config)]
        for engine in engines:
            sampled(engine, count)  # the first ones compile
        (plain_s, _), (exact_s, samples) = (harness.timed(sampled, each, count) for each in engines)
        replay, answers = replay_of(config, cfg), answers_of(samples)
        replay(params, answers)
        replay_s, scores = harness.timed(replay, params, answers)
        found, again = engine_logprobs(samples), np.concatenate(scores)
        gap, left = np.abs(found - scored(config, cfg, params, samples)[0]), np.abs(found - again)
        differ = int((found.view(np.int32) != again.view(np.int32)).sum())
        figures = (len(found), gap.mean(), gap.max(), left.max(), differ, plain_s, exact_s, replay_s)
        yield table.row(dtype, weights or "-", kv or "-", *figures)


def with_rollout(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **changes))


def replay_of(config: Config, cfg: ModelConfig) -> EngineReplay:
    return EngineReplay(cfg, config.rollout, harness.one_device(), **engine_options(config, cfg, (), cfg.vocab_size))


def answers_of(samples: Sequence[Sample]) -> list[score.Answer]:
    return [(sample.prompt_ids, sample.out_ids) for sample in samples]


def rungs_of(samples: Sequence[Sample]) -> list[np.ndarray]:
    return [np.repeat(*sample.table.rungs)[PROMPT_TOKENS - 1 :] for sample in samples if sample.table.rungs is not None]


TAIL_TOKENS, WIDTHS, TAIL_ROUNDS = 10_000, 3, 40  # that a ladder draws by so many rungs, in so many rounds at most
ROUNDS = 4  # of which the quickest counts: the first ones compile, or run beside what does


def ladder_table(cfg: ModelConfig, params: Any, count: int, tokens: int, types: int) -> Iterator[str]:
    table = harness.Table({"compute": "10s", "weights": "9s", "KV": "9s", "tokens": "7d", "differ": "8d",
                           "full rows": "11d", "sampling s": "12.2f", "replay s": "10.2f", "ladder: sampling s": "20.2f",
                           "replay s ": "10.2f", "  by rows": "s"})  # fmt: skip
    yield table.head
    lengths = [1 + int((tokens - 1) * share**3) for share in np.linspace(0, 1, count)]  # most of them short
    for dtype, weights, kv in OPTIONS[:types]:
        one_width = with_rollout(config_of(dtype, weights, kv, count, tokens), exact=True, ladder="off")
        config = with_rollout(one_width, ladder="on")
        engine, samples, drawn = loaded_engine(config, cfg, params), list[Sample](), collections.Counter[int]()
        engine.warmup()
        engine.scheduler.decoding.costs.patience = 0
        while sum(drawn.values()) < TAIL_TOKENS or len(drawn) < WIDTHS:
            if len(samples) >= TAIL_ROUNDS * count:
                raise RuntimeError(f"after {TAIL_ROUNDS} rounds the rungs have drawn {dict(drawn)}")
            samples += sampled(engine, count, lengths, len(samples))
            drawn.update(np.concatenate(rungs_of(samples[-count:])).tolist())
        found, replay = engine_logprobs(samples).view(np.int32), replay_of(config, cfg)
        replay.warmup()
        scores = [replay(params, answers_of(samples), rungs=rungs) for rungs in (rungs_of(samples), None)]
        differ = [int((found != np.concatenate(each).view(np.int32)).sum()) for each in scores]
        wide, last = loaded_engine(one_width, cfg, params), sampled(engine, count, lengths)
        again = params, answers_of(last), None, 0
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (sampled, (wide, count, lengths)),
            (replay, (*again, None)),
            (sampled, (engine, count, lengths)),
            (replay, (*again, rungs_of(last))),
        ]
        seconds = [min(harness.timed(call, *given)[0] for _ in range(ROUNDS)) for call, given in calls]
        by_rows = ", ".join(f"{rows}: {n}" for rows, n in sorted(drawn.items()))
        yield table.row(dtype, weights or "-", kv or "-", len(found), *differ, *seconds, f"  {by_rows}")


def rungs_table(cfg: ModelConfig, params: Any, count: int, tokens: int) -> Iterator[str]:
    table = harness.Table({"drawn": "10s", "rows": "6d", "tokens": "8d", "samples": "9d", "with another token": "20d",
                           "largest gap": "13.1e"})  # fmt: skip
    yield table.head
    for temperature in (1.0, 0.0):
        plain = config_of(*WIDE, count, tokens)
        config = with_rollout(plain, exact=True, ladder="on", temperature=temperature)
        engine, replay = loaded_engine(config, cfg, params), replay_of(config, cfg)
        by_widest, *others = (
            (rows, sampled(engine, count, rows=rows)) for rows in (engine.shapes.rows, *engine.shapes.rungs)
        )
        for rows, samples in others:
            gaps, sentences = [0.0], []
            for wide, sample in zip(by_widest[1], samples, strict=True):
                other = np.flatnonzero(wide.out_ids != sample.out_ids)
                at = int(other[0]) if len(other) else len(wide.out_ids)
                gaps.append(float(np.abs(wide.logprobs[:at] - sample.logprobs[:at]).max(initial=0.0)))
                if len(other):
                    both = [np.append(wide.out_ids[:at], each.out_ids[at]) for each in (wide, sample)]
                    first, second = (x[-1] for x in replay(params, [(wide.prompt_ids, out_ids) for out_ids in both]))
                    sentences.append(
                        f"  sample {sample.id.index}, token {at}: {wide.out_ids[at]} of log-prob {first:.6f}, by {rows} "
                        f"rows {sample.out_ids[at]} of log-prob {second:.6f}"
                    )
            total = sum(len(sample.out_ids) for sample in samples)
            kind = "sampled" if temperature else "greedy"
            yield table.row(kind, rows, total, count, len(sentences), max(gaps))
            yield from sentences


if __name__ == "__main__":
    harness.run(train_step, checkpoint, host_time, drift)
