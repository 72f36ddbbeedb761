"""One optimizer update, host work included, against the plainest JAX step and against transformers + torch.

    python -m dora_jax.bench.train_step [--smollm] [--rivals=plain,transformers] [--rounds=3] [--install]

The same f32 weights, trajectories, PPO loss and AdamW everywhere; the first loss and gradient norm of all are compared
before anything is timed. Two kinds of work: equal lengths (16 sequences of 256 tokens) and a long tail (32 of 16 + a
log-normal number, median 48, at most 496). Ours packs the sequences into rows that hold the longest (a multiple of
128 tokens, as trainer.pack_tokens would be set for such work); the rivals pad them to the longest, as they do. Tokens
are those of prompts and responses, padding counts for nobody. MFU: the model's own FLOPs (no padding, causal attention)
over what a large f32 matrix product reaches on this machine. Compilation is left out; rounds are interleaved and the
best of each counts. torch runs in an environment of its own (`--install` makes it under .bench/). With --smollm the
weights are those of a real model of 135M parameters (real_model.py), the work is two sequences of 512 tokens, one a
micro-batch. The second table: what the step holds at its peak beside the state, by how the log-probs are taken.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dora_jax.bench import harness, real_model
from dora_jax.bench.decode import MODEL, flop_speed
from dora_jax.buffer import layout, pack
from dora_jax.config import TrainerSection
from dora_jax.costs import update as update_costs
from dora_jax.models import decoder, hf, logits
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.plan import devices, presets
from dora_jax.trainer import score, step
from dora_jax.trainer.advantage import Prepare
from dora_jax.trainer.flops import segment_lengths


def plain_runner(cfg, params, padded) -> Callable[[], tuple[float, float]]:
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
    logprobs = jax.nn.log_softmax(_logits(cfg, params, batch["tokens"]))
    l = jnp.take_along_axis(logprobs, batch["targets"][..., None], axis=-1)[..., 0]
    ratio, adv = jnp.exp(l - batch["behavior_logprobs"]), batch["advantages"]
    per_token = jnp.maximum(-adv * ratio, -adv * jnp.clip(ratio, 0.8, 1.2))
    return jnp.sum(jnp.where(batch["mask"], batch["loss_weights"] * per_token, 0.0))


def _logits(cfg, params, tokens):
    b, length = tokens.shape
    x = params["embed"][tokens]
    for i in range(cfg.n_layers):
        w = {name: stacked[i] for name, stacked in params["layers"].items()}
        h = _norm(x, w["attn_norm"])
        q, k, v = ((h @ w[f"{n}_proj"]).reshape(b, length, -1, cfg.head_dim) for n in "qkv")
        q, k = _rotate(cfg, _norm(q, w["q_norm"])), _rotate(cfg, _norm(k, w["k_norm"]))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, length, -1) @ w["o_proj"]
        h = _norm(x, w["mlp_norm"])
        x = x + (jax.nn.silu(h @ w["gate_proj"]) * (h @ w["up_proj"])) @ w["down_proj"]
    return _norm(x, params["final_norm"]) @ params["embed"].T


def _norm(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def _rotate(cfg, x):
    half = cfg.head_dim // 2
    angle = jnp.arange(x.shape[1])[:, None] / cfg.rope_theta ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


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
        samples = [
            harness.sample_of(
                group_id,
                index,
                prompt,
                rng.integers(0, model.vocab_size, n),
                rng.normal(-np.log(model.vocab_size), 0.3, n),
            )
            for index, n in enumerate(lengths[group_id * group : (group_id + 1) * group].tolist())
        ]
        groups.append(harness.scored(samples, rng))
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
    micro_batches = 1 if work.model == MODEL else len(work.batch.tokens)
    trainer = step.Trainer(work.model, section(micro_batches), harness.one_device(), params, total_steps=1000)
    trainer.warmup(*work.batch.tokens.shape)

    def run() -> tuple[float, float]:
        metrics = trainer.step(work.batch)
        return metrics["trainer/loss"], metrics["trainer/grad_norm"]

    return run


# ------------------------------------------------------------------ tables


def main() -> None:
    args = harness.flags(__doc__, smollm=False, rivals=("plain", "transformers"), rounds=3, install=False)
    devices.keep_freed_memory()  # as a run's set-up does
    model, params = hf.load(real_model.folder()) if args.smollm else (MODEL, decoder.init_params(MODEL, 0))
    with tempfile.TemporaryDirectory() as temporary:
        folder = real_model.folder() if args.smollm else Path(temporary) / "model"
        if not args.smollm:
            hf.save(folder, MODEL, params)
        external = None
        if "transformers" in args.rivals:
            external = harness.Rival("torch_step", "transformers", folder, args.install)
        peak = flop_speed()
        print(f"measured: {peak / 1e9:.0f} GFLOP/s; jax {jax.__version__}; tokens/s (MFU) of one update")
        rivals = dict.fromkeys(args.rivals, ">20s")
        table = harness.Table({"work": "11s", "tokens": "7d", "packed": "8.0%", "padded": "8.0%", "ours": ">16s",
                               **rivals, "best rival": ">12s"})  # fmt: skip
        print(table.head, flush=True)
        for work in real_works(model) if args.smollm else works():
            times = measure(work, params, args.rivals, external, args.rounds)
            tokens, needed = int(work.lengths.sum()), update_costs.model_flops(work.model, work.lengths)
            cells = [f"{tokens / t:.0f} ({needed / t / peak:.0%})" for t in times]
            shares = [tokens / work.batch.tokens.size, tokens / work.padded["tokens"].size]
            against = f"{min(times[1:]) / times[0]:.2f}x" if times[1:] else ""
            print(table.row(work.name, tokens, *shares, *cells, against), flush=True)
        if external:
            external.close()
    if not args.smollm:
        print_memory()


def measure(
    work: TrainWork, params: Any, rivals: Sequence[str], external: harness.Rival | None, rounds: int
) -> list[float]:
    """Seconds of the best update of each; refuses to compare what does not compute the same."""
    question = {name: x.tolist() for name, x in work.padded.items()} | {"name": work.name}
    runs: dict[str, Step] = {"ours": ours(work, params)}
    if "plain" in rivals:
        runs["plain"] = plain_runner(work.model, params, work.padded)
    first = [run() for run in runs.values()]
    turns: dict[str, Callable[[], Any]] = {**runs}
    if external:
        first.append(external.ask(question)[0][1:])
        turns["transformers"] = lambda: external.ask(question)[0][0]
    if not np.allclose(first, first[0], rtol=AGREE, atol=1e-6):
        raise RuntimeError(f"{work.name}: (loss, gradient norm) differ: {first}")
    return list(harness.best_of_turns(turns, rounds).values())


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
