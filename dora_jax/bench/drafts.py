"""Tokens a second with drafts from siblings and without, on the policy of a finished run and its own prompts.

    python -m dora_jax.bench.drafts --workdir=runs/NAME [--live=4] [--drafts=7] [--samples=512] [--rounds=3]
    python -m dora_jax.bench.drafts --smollm --samples=16 --rounds=1 --tokens=48

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
With --smollm the policy is SmolLM2-135M-Instruct before any training, on the sums of bench.real_model.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dora_jax
from dora_jax import tasks
from dora_jax.bench import harness, real_model
from dora_jax.cli import flags
from dora_jax.config import files as config_files
from dora_jax.models import hf
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.plan import devices
from dora_jax.publish import DeviceWeights
from dora_jax.rollout.drafts import NONE, Drafter
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.seq import Seq
from dora_jax.runtime.assembly import run as build
from dora_jax.runtime.job import of_this_machine
from dora_jax.runtime.policy import Policy
from dora_jax.types import Prompt, Sample, SampleId

HALF = {"rollout.slots": 32, "rollout.pages": 320}
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


class Subject:
    """One engine of the policy."""

    def __init__(self, policy: Policy, drafter: type[Drafter] | None = None, **rollout: Any):
        run = dataclasses.replace(policy.run, rollout=dataclasses.replace(policy.run.rollout, **rollout))
        self.engine: Engine = build.new_engine(run, policy.tokenizer, policy.config, harness.one_device())
        self._weights = DeviceWeights(run.model.dtype)
        self._weights.put(0, policy.params)
        self.engine.warmup()
        self._drafter = drafter
        self.best = 0.0  # tokens a second
        self.samples: dict[SampleId, Sample] = {}

    def run(self, prompts: Sequence[Prompt], group_size: int, live: int) -> None:
        """Samples `group_size` of each prompt, so many at once. The engine holds the weights for that time only."""
        self.engine.load(0, self._weights.get(0, self.engine.param_shardings))
        decoding = self.engine.scheduler.decoding
        if decoding.drafter is not None:  # a new one, that knows no sample of an earlier round
            decoding.drafter = (self._drafter or Drafter)(self.engine.shapes)
        waiting = [(SampleId(p.group_id, i), p) for p in reversed(prompts) for i in reversed(range(group_size))]
        running = tokens = 0
        began = time.perf_counter()
        while waiting or running:
            while waiting and running < live:
                id, prompt = waiting.pop()
                self.engine.submit(id, prompt.token_ids, 0, prompt.max_new_tokens)
                running += 1
            result = self.engine.tick()
            tokens += result.tokens
            running -= len(result.finished)
            self.samples.update({sample.id: sample for sample in result.finished})
        self.best = max(self.best, tokens / (time.perf_counter() - began))
        self.engine.drop(0)


def differing(a: dict[SampleId, Sample], b: dict[SampleId, Sample]) -> list[str]:
    """A line a sample that differs: where, and the log-probs of the two tokens."""
    lines = []
    for id, sample in a.items():
        other, n = b[id], min(len(sample.out_ids), len(b[id].out_ids))
        found = np.flatnonzero(sample.out_ids[:n] != other.out_ids[:n])
        if len(found) or len(sample.out_ids) != len(other.out_ids):
            at = int(found[0]) if len(found) else n - 1
            lines.append(f"  {id} at token {at}: log-probs {sample.logprobs[at]:.6f} and {other.logprobs[at]:.6f}")
    return lines


def smollm_policy(folder: Path) -> Policy:
    """The configuration of bench.real_model, at version 0, with half of its slots: there are several engines."""
    tree = config_files.load_file(real_model.CONFIG)
    rows, path = folder / "sums.jsonl", str(real_model.folder())
    real_model.write_rows(rows)
    tree.update_from_flattened_dict(real_model.FIELDS | {"model.path": path, "task.path": str(rows), **HALF})
    run = flags.taken(tree, str(folder)).config
    devices.setup_platform(run)
    return Policy(of_this_machine(run), *hf.load(path), Tokenizer.load(path), 0)


def prompts_of(policy: Policy, groups: int, tokens: int = 0) -> list[Prompt]:
    """Whose answers have so many tokens at most; 0: as many as the run's."""
    run = policy.run
    task = tasks.open_task(
        run.task,
        policy.tokenizer,
        seed=run.seed,
        max_prompt_tokens=run.rollout.max_prompt_tokens,
        max_new_tokens=tokens or run.rollout.max_new_tokens,
        heldout=run.task.heldout,
        quarantine_path=Path("quarantine.jsonl"),
    )
    return [task.prompt_at(10_000 + i) for i in range(groups)]


def speeds(subjects: dict[str, Subject], prompts: Sequence[Prompt], group_size: int, live: int, rounds: int) -> None:
    for _ in range(rounds):
        for subject in subjects.values():
            subject.run(prompts, group_size, live)
    first = next(iter(subjects.values())).best
    for name, subject in subjects.items():
        drafter = subject.engine.scheduler.decoding.drafter
        accepted_of = (
            f"{drafter.accepted} of {drafter.verified} drafted tokens held" if drafter and drafter.verified else ""
        )
        print(
            f"{live:5d} live  {name:14s}{subject.best:10,.0f} tokens/s {subject.best / first:6.2f}x  {accepted_of}",
            flush=True,
        )


def main() -> None:
    args = harness.flags(__doc__, workdir="", smollm=False, live=4, drafts=7, samples=512, rounds=3, tokens=0)
    if bool(args.workdir) == args.smollm:
        raise SystemExit("error: one of --workdir=DIR and --smollm says whose policy it is")
    policy = smollm_policy(Path("runs/drafts")) if args.smollm else dora_jax.load_policy(args.workdir)
    size, slots = policy.run.orchestrator.group_size, policy.run.rollout.slots
    prompts = prompts_of(policy, args.samples // size, args.tokens)
    on = {"drafts": args.drafts, "draft_rows": args.live}
    Wrong.vocab = policy.tokenizer.vocab_size
    narrow = {"narrow_rows": args.live}
    tail = {
        "off": Subject(policy),
        "drafts alone": Subject(policy, **on),
        "wrong alone": Subject(policy, Wrong, **on),
        "narrow": Subject(policy, **narrow),
        "drafts": Subject(policy, **narrow, **on),
        "wrong": Subject(policy, Wrong, **narrow, **on),
    }
    costs = tail["drafts"].engine.scheduler.decoding.costs
    print(f"version {policy.version}; times over a decode call's, by blocks of context:")
    print(f"the narrow call {costs.narrow}, a verifying call {costs.verify}", flush=True)
    speeds(tail, prompts, size, args.live, args.rounds)
    off, *others = tail.items()
    for name, subject in others:
        across = differing(off[1].samples, subject.samples)
        print(f"across shapes, {name}: {len(across)} of {len(subject.samples)} samples differ", *across, sep="\n")
    full = {name: tail[name] for name in ("off", "drafts alone", "drafts")}
    for subject in full.values():
        subject.best = 0.0
    speeds(full, prompts, size, slots, args.rounds)
    del tail, full, off, others  # their pages of KV
    blind, every = (Subject(policy, kind, **on, draft_cost=FREE) for kind in (Blind, Drafter))
    for subject in (blind, every):
        subject.run(prompts, size, args.live)
    same = differing(blind.samples, every.samples)
    print(f"at one shape {len(same)} of {len(blind.samples)} samples differ", *same, sep="\n")


if __name__ == "__main__":
    main()
