"""The plan's rates beside a run of the same configuration, on the machine that this runs on:

    python -m tests.soak.forecast --config=configs/quickstart.py --workdir=DIR [--config.FIELD=VALUE] [--warmup=8]

The forecast is a dry run's (dora_jax/plan/rates.py), with constants of this machine in the place of a chip's. They are
measured before the run begins, by the programs that it is assembled from and on prompts of its task: the engine keeps
its slots full of samples, the trainer makes updates of their groups, of half of them, and scores as many groups as a
step looks at. Then `dora_jax.train` runs the command line as it is. What the host does in a step beside these programs
(the controller; packing, publishing and reports of the roles) is the ledger's median of the warm-up steps, but for the
first, which waits for compilations. Lengths, and the share of the samples that updates took, are those that the run
had, for they belong to its task and not to the machine. What is measured are means over the steps after the warm-up,
without those during which answers of an evaluation are sampled. Roles that share devices take their time one after the
other, so that the step is what compares; a role's own seconds in the run are those that the other had the cores in,
too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.optimize
from absl import flags as absl_flags

from dora_jax.bench import harness
from dora_jax.bench.decode import work_of
from dora_jax.cli import flags
from dora_jax.costs import MeasuredCosts
from dora_jax.models import hf
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.plan import budget, devices, presets, rates
from dora_jax.publish import placed
from dora_jax.runtime.assembly.run import new_engine, new_trainer, packer, prober
from dora_jax.runtime.common.sample_gaps import LOOKED_AT
from dora_jax.runtime.observe.recorder import TimedEngine
from dora_jax.runtime.policy import Policy

PROGRAMS = {f"seconds/{does}" for does in ("instances/decode", "instances/prefill", "trainer/update", "trainer/score")}


def decoding(policy: Policy, rows: int, costs: Path) -> list:
    """Write the costs of an engine that is kept full; give the samples that it made, a group's one after another."""
    run = policy.run
    engine = TimedEngine(new_engine(run, policy.tokenizer, policy.config, harness.one_device()))
    engine.load(0, placed(harness.published(run, policy.config, policy.params), engine.param_shardings))
    engine.warmup()
    group = run.orchestrator.group_size
    work = work_of(policy, max(4 * rows, run.orchestrator.groups_per_step * group) // group * group, 0)
    done, live, waiting = {}, 0, list(reversed(work))
    while waiting or live:
        while waiting and live < rows:
            engine.submit(*waiting.pop())
            live += 1
        for sample in engine.tick().finished:
            done[sample.id] = sample
            live -= 1
    _, batch, prefill, _, seconds = np.array(engine.ticks[len(engine.ticks) // 8 :], float).T
    columns = np.stack([run.rollout.decode_steps * (batch > 0), prefill], 1).astype(float)
    (step_s, token_s), _ = scipy.optimize.nnls(columns, seconds)
    known: dict[str, Any] = dict.fromkeys(
        ("train_fixed_s", "train_s_per_token", "load_s", "move_fixed_s", "move_s_per_token"), 0.0
    )
    known |= {"score_s": 0.0, "pages": run.rollout.pages, "decode_kv_s": 0.0, "prefill_fixed_s": 0.0}
    known |= {"prefill_s_per_token": token_s, "decode": [[run.rollout.slots, step_s]]}
    costs.write_text(json.dumps(known, indent=1))
    return [done[id] for id, *_ in work]


def training(policy: Policy, samples: list, workdir: Path) -> tuple[float, float, float]:
    """Seconds of an update without micro-batches, of a micro-batch, and of what a step scores besides."""
    run, rng = policy.run, np.random.default_rng(0)
    group, count = run.orchestrator.group_size, run.orchestrator.groups_per_step // run.trainer.updates
    trainer = new_trainer(run, policy.tokenizer, harness.one_device(), workdir)
    groups = [harness.scored(samples[i * group : (i + 1) * group], rng) for i in range(count)]
    took: dict[int, float] = {}  # micro-batches that hold tokens -> seconds
    for some in (groups, groups[: max(count // 2, 1)]):
        [batch] = packer(run, trainer)(some, 0)
        present = run.trainer.micro_batches * len(batch.tokens) // batch.shape[0]  # the others are not sent
        filled = (np.asarray(batch.segment_ids) > 0).reshape(-1, present, batch.tokens.shape[1])
        if (held := int(filled.any((0, 2)).sum())) not in took:
            trainer.warmup(*batch.shape)
            took[held] = harness.best_s(trainer.step, batch, rounds=2)
    probe = prober(run, trainer)(groups[0], 0, trainer.params)
    looks = max(1, run.orchestrator.groups_per_step // LOOKED_AT) if run.trainer.max_instance_mismatch else 0
    looks_s = looks * harness.best_s(trainer.probed, probe, rounds=2) if looks else 0.0
    (most, most_s), (least, least_s) = max(took.items()), min(took.items())
    each_s = (most_s - least_s) / (most - least) if most > least else most_s / most
    return most_s - each_s * most, each_s, looks_s


def on_host(record: dict[str, Any]) -> float:
    """Seconds of a step that its lanes neither waited nor ran one of the roles' programs."""
    did = {name: s for name, s in record.items() if name.startswith("seconds/")}
    return sum(s for name, s in did.items() if name not in PROGRAMS and "/waiting_" not in name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warmup", type=int, default=8, help="steps that are left out")
    options, command = parser.parse_known_args()
    asked = flags.parse(["forecast", *command], "train", absl_flags.FlagValues())
    folder, workdir = asked.config.model.path, asked.workdir
    if not (Path(folder) / "config.json").exists():
        subprocess.run([sys.executable, "-m", "dora_jax.sft", *command], check=True)
    devices.setup_platform(asked.config)
    run = presets.filled(asked.config)
    policy = Policy(run, *hf.load(folder), Tokenizer.load(folder), 0)
    machine = presets.here(run).trainer
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / machine.devices
    machine = dataclasses.replace(machine, memory_bytes=memory_bytes)
    planned = budget.of(run, budget.Machines(machine, machine), policy.config)
    assert planned is not None
    workdir.mkdir(parents=True, exist_ok=True)
    scratch = workdir.with_name(f"{workdir.name}.forecast")
    scratch.mkdir(exist_ok=True)
    samples = decoding(policy, min(run.rollout.slots, planned.demand), scratch / "costs.json")
    fixed_s, each_s, looks_s = training(policy, samples, scratch)
    costs = MeasuredCosts(str(scratch / "costs.json"))
    print(f"constants: a decode step of full rows {1e3 * costs.decode_base_s(run.rollout.slots):.2f} ms, a prompt token "
          f"{1e6 * costs.prefill_s(1):.1f} us, an update {fixed_s:.3f} s and {each_s:.3f} s a micro-batch, scores of a "
          f"step {looks_s:.3f} s", flush=True)  # fmt: skip
    jax.clear_caches()
    subprocess.run([sys.executable, "-m", "dora_jax.train", *command], check=True)
    every = harness.records_of(workdir, "time/step_s")
    steps = [record for record in every if record["step"] > options.warmup]
    host_s = statistics.median(on_host(record) for record in every if 1 < record["step"] <= options.warmup)
    print(f"the host takes {host_s:.3f} s of a step beside programs", flush=True)
    ended = {record["step"]: record["time/run_s"] for record in steps}
    evaluations = [
        (ended.get(record["step"], 0.0), record["time/run_s"]) for record in harness.records_of(workdir, "eval/k")
    ]
    records = [
        step
        for step in steps
        if not any(
            began < step["time/run_s"] and step["time/run_s"] - step["time/step_s"] < end for began, end in evaluations
        )
    ]
    if not records:
        raise SystemExit("error: no step is left behind the warm-up")
    names = (
        "response/length",
        "trainer/tokens",
        "time/step_s",
        "trainer/step_s",
        "seconds/instances/decode",
        "seconds/instances/prefill",
    )
    mean = {name: statistics.fmean(record.get(name, 0.0) for record in records) for name in names}
    busy_s = mean["seconds/instances/decode"] + mean["seconds/instances/prefill"]
    prompt = statistics.fmean(len(sample.prompt_ids) for sample in samples)
    times = rates.RoleTimes(
        costs=costs, update_s=lambda count: fixed_s + each_s * count + looks_s / run.trainer.updates, host_s=host_s
    )
    section, answer = run.orchestrator, mean["response/length"]
    trained = min(1.0, mean["trainer/tokens"] / (section.groups_per_step * section.group_size * answer))
    ours = rates.of(planned, times, prompt=prompt, answer=answer, trained=trained)
    print(f"{len(records)} steps with prompts of {prompt:.0f} and answers of {answer:.1f} tokens, of which "
          f"{trained:.0%} are trained on: {ours.balance}")  # fmt: skip
    print(f"{'':24s}{'forecast':>12s}{'measured':>12s}{'off by':>9s}")
    for name, forecast, measured in (
        ("seconds of a step", ours.step_s, mean["time/step_s"]),
        ("tokens/s of an instance", ours.tokens_per_s, ours.samples * ours.answer / ours.instances / busy_s),
        ("seconds of the trainer", ours.trainer_s, mean["trainer/step_s"]),
    ):
        print(f"{name:24s}{forecast:12.4g}{measured:12.4g}{forecast / measured - 1:+9.1%}")


if __name__ == "__main__":
    main()
