"""The supervised warm start: trains the model that a run starts from, on worked solutions or rows of a file.

Consumes a configuration; produces a Hugging Face folder at `sft.out`, from the folder `sft.init` or from a new model
with a tokenizer trained on the texts.
Laws: the loss is on completion tokens and the end token only; the result depends on config and seed alone, however
often it was stopped and went on; the folder appears whole or not at all, so the main job may make it when it is
missing and trust it when it is there.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from dora_jax.base.digest import digest
from dora_jax.base.exits import Stop
from dora_jax.config import CheckpointSection, Config, ConfigError, RunError, SftSection, TrainerSection, field_context
from dora_jax.models import decoder, hf, sharding
from dora_jax.models.logits import target_logprobs
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.plan import presets
from dora_jax.runtime.training.warm_start_data import (
    Pair,
    TextRows,
    encoded,
    examples,
    make_tokenizer,
    pack_rows,
    row_order,
)
from dora_jax.trainer import checkpoint, optim
from dora_jax.trainer.model import layers_of

if TYPE_CHECKING:
    from dora_jax.base.metrics import Writer

LOGITS_BYTES = 64 * 2**20  # alive at once on a device
STEPS_PER_DISPATCH = 10  # one compiled scan: also how often the progress line moves, and a signal is handled
SAVE_PERIOD_S = 60.0  # a kill costs at most so much of it


def run(config: Config, workdir: Path, progress: Writer, stepped: Callable[[], None] = lambda: None) -> Path:
    """Makes the folder `config.sft.out`; returns it.

    stepped: called between dispatches; where it raises Stop, the state is kept in the workdir, and the next run goes on
    from it.
    """
    began = time.monotonic()
    section, out = config.sft, Path(config.sft.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"sft.out: {out} exists and is not an empty folder; a model is never written over another")
    progress.phase("sft", "making examples")
    with field_context("task"):
        pairs = examples(config, workdir)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(section.init) if section.init else make_tokenizer(pairs, Path(scratch), section.vocab_size)
        losses = _train(config, pairs, source, out, workdir / "sft", progress, stepped)
    progress.note(
        f"warm start: {section.steps} steps on {len(pairs)} examples in {time.monotonic() - began:.0f} s, "
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, written to {out}"
    )
    return out


# -------------------------------------------------------------- training


class WarmStartState(NamedTuple):
    """What a dispatch leaves; its arrays are valid until the next."""

    params: Any
    moments: Any
    losses: list[float]  # of every step so far


def _train(
    config: Config,
    pairs: Sequence[Pair],
    source: Path,
    out: Path,
    keep: Path,
    progress: Writer,
    stepped: Callable[[], None],
) -> list[float]:
    """Trains and writes the folder; returns the loss of every step. What is unfinished is in `keep`."""
    section = config.sft
    tokenizer = Tokenizer.load(source)
    end = tokenizer.eos_ids[0]
    data = pack_rows(
        [
            (tokenizer.encode(prompt), *encoded(tokenizer, end, config.environment.observation, text))
            for prompt, text in pairs
        ],
        section.pack_tokens,
        tokenizer.pad_id,
    )
    # as many devices as divide the rows of a step; parameters are replicated, since the model is small
    n = math.gcd(len(jax.devices()), section.batch_rows)
    mesh = sharding.make_mesh(jax.devices()[:n], n, 1, 1)
    progress.phase("sft", "compiling")
    if section.init:
        cfg, params = hf.load(section.init, mesh)
    else:
        unit = math.lcm(config.trainer.tensor, config.rollout.tensor)  # what splits the vocabulary later
        cfg = presets.fresh_model(section, section.vocab_size or math.ceil(tokenizer.vocab_size / unit) * unit)
        params = decoder.init_params(cfg, config.seed, sharding.param_specs(cfg, mesh))
    order = row_order(len(data.tokens), section.batch_rows, section.steps, config.seed)
    # of everything that the result depends on
    fields = {**dataclasses.asdict(section), "out": ""}
    kept = _Kept(
        keep,
        hashlib.sha256(
            b"".join([repr(fields).encode(), *(x.tobytes() for x in (*data, order)), str(digest(params)).encode()])
        ).hexdigest(),
        progress.note,
    )
    for state in _steps(cfg, section, mesh, params, data, order, kept):
        last = state.losses[-1]
        progress.phase("sft", f"step {len(state.losses)}/{section.steps}, loss {last:.3f}")
        if not np.isfinite(last):
            raise RunError(f"warm start: the loss is {last} at step {len(state.losses)}; lower sft.learning_rate")
        if len(state.losses) == section.steps:
            break
        try:
            kept.save(state)
            stepped()
        except Stop:
            kept.save(state, wait=True)
            raise
    hf.save(out, cfg, jax.device_get(state.params), source)
    kept.forget()
    return state.losses


class _Kept:
    """The state of an unfinished warm start, as the newest checkpoint of a folder. `identity`: a digest of all that the
    result depends on."""

    def __init__(self, folder: Path, identity: str, notify: Callable[[str], None]):
        self._folder, self._identity, self._notify = folder, identity, notify
        self._saved_s = time.monotonic()
        self._writer: Any = None

    def load(self, fresh: WarmStartState) -> WarmStartState:
        """Return the state at which an earlier run stopped, on the devices of `fresh`; `fresh` where there is none."""
        step = checkpoint.latest(self._folder, full=True)
        if step is None:
            return fresh
        saved = checkpoint.read_json(self._folder, step, "rl_state")
        if saved["identity"] != self._identity:
            self._notify(f"warm start: what {self._folder} keeps is of another one, which is given up: this one begins")
            self.forget()
            return fresh
        params, moments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh[:2])
        found = checkpoint.restore(self._folder, step, params, moments)
        self._notify(f"warm start: goes on from step {step}")
        return WarmStartState(found.params, found.opt_state, saved["losses"])

    def save(self, state: WarmStartState, wait: bool = False) -> None:
        """Now and then, in the background. wait: now; returns when it is on the disk, or why it is not has been
        reported."""
        if not wait and time.monotonic() - self._saved_s < SAVE_PERIOD_S:
            return
        self._saved_s = time.monotonic()
        if self._writer is None:
            self._writer = checkpoint.Checkpoints(self._folder, CheckpointSection(keep=1), self._notify)
        self._writer.wait()
        if len(state.losses) not in self._writer.steps():
            self._writer.save(
                len(state.losses), state.params, state.moments, {"identity": self._identity, "losses": state.losses}, {}
            )
        if wait:
            self._close()

    def forget(self) -> None:
        self._close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _steps(
    cfg: Any, section: SftSection, mesh: Any, params: Any, data: TextRows, order: np.ndarray, kept: _Kept
) -> Iterator[WarmStartState]:
    """Yields the state after each dispatch, from where an earlier run was; donates params."""
    rate = optim.schedule("cosine", section.learning_rate, section.warmup_steps, section.steps)
    tx = optim.optimizer(rate, TrainerSection(b1=0.9, b2=0.98, eps=1e-8, weight_decay=0.01, max_grad_norm=1.0))
    replicated = NamedSharding(mesh, PartitionSpec())
    rows = jax.device_put(data, replicated)
    specs = sharding.param_specs(cfg, mesh)
    moments = jax.jit(tx.init, out_shardings=optim.state_shardings(tx, params, specs, replicated))(params)
    updates = functools.partial(_dispatch, cfg, sharding.batch_spec(mesh), tx)
    dispatch = decoder.jitted(updates, np.float32, donate_argnums=(0, 1))
    params, moments, past = kept.load(WarmStartState(params, moments, []))
    for start in range(len(past), len(order), STEPS_PER_DISPATCH):
        chosen = jax.device_put(order[start : start + STEPS_PER_DISPATCH], replicated)
        params, moments, losses = dispatch(params, moments, rows, chosen)
        past = past + np.asarray(losses).tolist()
        yield WarmStartState(params, moments, past)


def _dispatch(
    cfg: Any, spec: Any, tx: Any, params: Any, moments: Any, rows: TextRows, order_SxB: Any
) -> tuple[Any, Any, Any]:
    """S optimizer steps; donates params and moments."""

    def step(carry: tuple[Any, Any], chosen_B: Any) -> tuple[tuple[Any, Any], Any]:
        params, moments = carry
        batch = jax.lax.with_sharding_constraint(TextRows(*(x[chosen_B] for x in rows)), spec)
        loss, grads = jax.value_and_grad(functools.partial(_loss, cfg))(params, batch)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    (params, moments), losses = jax.lax.scan(step, (params, moments), order_SxB)
    return params, moments, losses


def _loss(cfg: Any, params: Any, batch: TextRows) -> Any:
    """Mean negative log-prob of the trained tokens."""
    attend = segment_attention(batch.segment_ids, batch.positions)
    hidden = decoder.forward(cfg, layers_of(cfg, params), batch.tokens, batch.positions, attend)
    logprobs, _ = target_logprobs(cfg, params, hidden, batch.targets, max_bytes=LOGITS_BYTES)
    return -jnp.sum(jnp.where(batch.mask, logprobs, 0.0)) / jnp.maximum(batch.mask.sum(), 1)
