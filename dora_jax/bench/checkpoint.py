"""What the digests of a checkpoint cost: seconds of a step, a save and a restore, with digests and without.

    python -m dora_jax.bench.checkpoint [--tokens=1024] [--rounds=3] [--folder=FOLDER]

Random weights of the shapes of SmolLM2-135M, masters and both of Adam's moments in f32; one update of `tokens` tokens,
512 a sequence. Every step publishes the digest of its weights; a save takes those of params, optimizer and rl_state
before the trainer goes on, and a restore takes them of what it has read.
step       one update         publish   digest of params, as every step takes it
digests    of one save        save      until the trainer may go on, digests included
written    until the manifest verifies
restore    every byte checked, read onto the trainer's shards, digests compared; `alone`: without the comparison
Best of the rounds, because neighbours on the machine only ever slow things down; compilation is left out.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dora_jax.base.digest import digest
from dora_jax.bench import harness, train_step
from dora_jax.config import CheckpointSection
from dora_jax.models import decoder
from dora_jax.plan import devices
from dora_jax.trainer import step
from dora_jax.trainer.checkpoint import Checkpoints

SHAPE = {
    "vocab_size": 49152,
    "d_model": 576,
    "n_layers": 30,
    "n_heads": 9,
    "n_kv_heads": 3,
    "head_dim": 64,
    "d_ff": 1536,
}
RL_STATE = {"cursors": list(range(1000))}


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = do()
    jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])
    return time.perf_counter() - began, result


def measure(trainer: step.Trainer, batch: Any, folder: Path, rounds: int) -> dict[str, float]:
    best: dict[str, float] = {}

    def note(name: str, do: Callable[[], Any]) -> Any:
        seconds, result = timed(do)
        best[name] = min(best.get(name, seconds), seconds)
        return result

    store = Checkpoints(folder, CheckpointSection(keep=1))
    like = trainer.abstract_state()
    for number in range(1, rounds + 2):
        if number == 2:
            best.clear()  # the first compiles
        note("step", functools.partial(trainer.step, batch))
        state = trainer.state
        note("publish", functools.partial(digest, state.params))
        note("digests", functools.partial(lambda *trees: list(map(digest, trees)), state.params, state.opt_state))
        began = time.perf_counter()
        note("save", functools.partial(store.save, number, state.params, state.opt_state, RL_STATE, {}))
        store.wait()
        best["written"] = min(best.get("written", np.inf), time.perf_counter() - began)
        ((_, digests),) = store.take_saves()
        for name, wanted in (("restore", digests), ("alone", None)):
            note(name, functools.partial(store.restore, number, like.params, like.opt_state, wanted))
    store.close()
    return best


def main() -> None:
    args = harness.flags(__doc__, tokens=1024, rounds=3, folder=None)
    devices.keep_freed_memory()  # as a run's set-up does
    model = decoder.new_config("llama", **SHAPE)
    work = train_step.real_works(model, args.tokens // train_step.LONGEST)[0]
    section = train_step.section(len(work.batch.tokens))
    trainer = step.Trainer(model, section, harness.one_device(), decoder.init_params(model, 0), total_steps=1000)
    trainer.warmup(*work.batch.tokens.shape)
    sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) / 2**20 for tree in trainer.state[:2]]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        best = measure(trainer, work.batch, Path(folder), args.rounds)
    print(f"params {sizes[0]:.0f} MiB, opt_state {sizes[1]:.0f} MiB, {args.tokens} tokens a step")
    for name, seconds in best.items():
        print(f"{name:10s}{seconds:9.3f} s{seconds / best['step']:9.1%} of a step")


if __name__ == "__main__":
    main()
