"""All modes, run for real at the pace of a chip, beside the simulator's prediction of the same work.

    python -m dora_jax.bench.end_to_end [--modes=sync,dora] [--speedup=30] [--steps=24] [--split=predicted|half]
    [--small] python -m dora_jax.bench.end_to_end --environments [--speedup=40] [--steps=6] [--warmup=3] [--config=FILE]
    python -m dora_jax.bench.end_to_end --recorded=DIRECTORY [--modes=sync,dora] [--warmup=2, as the recorder's]

Real are threads, queues, `Coordinator`, workers, orchestrator, migrations, publications and the engine's tokens, which
prove the version that made them; PACED are ticks, train steps and transfers: each lasts what the cost model says for an
H800, divided by the speed-up, because nothing here has one. Not measured here: decoding and training as such.

The work is the published experiment made small: log-normal lengths (sigma 1) cut at 12.5 x the mean, K = 3, a 7.6B
model on 16 chips of unequal speed in place of 32.8B on 64 to 128, 2,048 samples a step in place of 8,192, and one token
stands for 64, so that a tick lasts 64 times as long. Prediction and run share lengths (a function of seed, group and
index), costs and the orchestrator's configuration, and nothing else. Each mode runs at the split of the chips that the
simulator finds best for it; `partial` and `evict` also colocated, as `partial` was published. --small is a fraction of
that, for a machine of few cores or one with other work: 64 samples a step of at most 200 tokens. --lent holds lending
of the trainer's chips against its prediction instead, where a decode step takes longer the more rows it has.

A step of `dora` or `staleflow` waits for the longest sample of the version whose deadline is due, so that its time
varies: in the small setting between 67 and 197 s, 107 s in the mean. Of few steps the mean depends on which of these
they are, and prediction and run may differ by 20 % although both are right; of 24 steps no mode differed by more than
2.6 %.

--environments: two environments of 0.1 s and 60 s at K = 3, the rows of configs/sim/environments.py: a sample that
waits for its environment frees its slot, or holds it. Environments are paced as well.

--recorded: a recorded run beside the simulator's prediction of it from its own measured costs, and other modes on its
work. DIRECTORY is what runtime/observe/recorder.py wrote: WORKDIR/recorded of a run with --config.journal.record=True.
The journal must replay to the same commands first. Nothing is paced: costs are those of the machine that ran it.
Evaluations are not simulated: record a run that has none in its middle. The last K steps are left out of the recorded
average: nothing new is admitted for them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dora_jax.bench import harness, paced
from dora_jax.config.files import load_file
from dora_jax.costs.recording import recorded_body
from dora_jax.orchestrate.modes import MODES
from dora_jax.runtime.observe.recorder import COSTS, JOURNAL
from dora_jax.sim import config as sims
from dora_jax.sim import replay
from dora_jax.sim.advise import best_split
from dora_jax.sim.config import Row, SimConfig
from dora_jax.sim.meter import IDLE_CAPPED, IDLE_TAIL, Result
from dora_jax.sim.run import simulate
from dora_jax.sim.table import grid

TOKEN = 64  # tokens of the published experiment that one token here stands for
CHIPS = 16
COLOCATED = "colocated"
LENT = {"orchestrator.elastic": True}
# Chips are lent where more instances are faster: a decode step of --lent takes as long as its rows' KV, and training is
# short.
KV_READS = 32
BY_ROWS = {"cost.decode_overhead_s": 0.05, "cost.train_fixed_s": 20.0}
SMALL = {"orchestrator.groups_per_step": 16, "orchestrator.group_size": 4, "orchestrator.updates": 4,
         "workload.max_new_tokens": 200, "cost.train_fixed_s": 60.0, "hardware.rollout_chips": 4}  # fmt: skip
# What the run is held against: tokens/s of `dora` over those of other modes, and its rollout-only share over sync's.
AIMS = (("sync", 2.0, 2.5), ("partial", 1.0, 1.15))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultLine:
    """One mode at one split: predicted and run."""

    row: Row
    predicted: Result
    ran: paced.PacedResult

    @property
    def off(self) -> float:
        return self.ran.step_s / self.predicted.step_s - 1


def setting(steps: int, warmup: int) -> SimConfig:
    """The published experiment made small; overheads are those of the fit in sim/paper.py."""
    return sims.replace(SimConfig(), {
        "steps": warmup + steps, "warmup_steps": warmup, "report_tokens": 1,
        "model.params": 7.6e9, "model.n_layers": 28, "model.d_model": 3584, "model.n_heads": 28,
        "model.head_dim": 128, "model.kv_bytes_per_token": 57344.0 * TOKEN,
        "hardware.chip": "h800", "hardware.chips": CHIPS, "hardware.rollout_chips": CHIPS // 2, "hardware.tensor": 1,
        "hardware.slots": 512, "hardware.speeds": (1.1, 1.0, 0.9, 1.0), "cost.publish_s": 2.0,
        "cost.decode_overhead_s": 0.0195 * TOKEN, "cost.hbm_efficiency": 0.8 / TOKEN,
        "cost.flops_efficiency": 0.5 / TOKEN, "cost.train_utilisation": 0.21 / TOKEN, "cost.train_fixed_s": 165.0,
        "workload.mean_tokens": 2400 / TOKEN, "workload.max_new_tokens": 30000 // TOKEN,
        "workload.prompt_tokens": 160 / TOKEN, "workload.max_prompt_tokens": 512 // TOKEN,
        "orchestrator.groups_per_step": 128, "orchestrator.group_size": 16, "orchestrator.inflight": 1.15,
        "orchestrator.updates": 16,
        "orchestrator.rebalance_period_s": 20.0, "orchestrator.peer_weights": False})  # fmt: skip


def rows(config: SimConfig, modes: Sequence[str], split: str) -> list[Row]:
    """Each mode at its split; its label says which."""
    found = []
    for mode in modes:
        chips = best_split(config, mode) if split == "predicted" else CHIPS // 2
        found.append(_row(config, mode, chips))
        if mode in ("partial", "evict") and chips:
            found.append(_row(config, mode, 0))
    return found


def lent_rows(config: SimConfig) -> list[Row]:
    """`dora` where a quarter of the chips is the rollouts', and with the trainer's chips lent to them."""
    config = sims.replace(config, BY_ROWS | {"model.kv_bytes_per_token": KV_READS * config.model.kv_bytes_per_token})
    split = _row(config, "dora", CHIPS // 4)
    return [split, dataclasses.replace(split, label=f"{split.label} lent", config=sims.replace(split.config, LENT))]


def _row(config: SimConfig, mode: str, rollout_chips: int) -> Row:
    where = f"{rollout_chips}+{CHIPS - rollout_chips}" if rollout_chips else COLOCATED
    config = sims.replace(config, {"hardware.rollout_chips": rollout_chips})
    return Row(label=f"{mode} {where}", mode=mode, config=config, published={})


def table(lines: list[ResultLine]) -> str:
    sync = next((line for line in lines if line.row.mode == "sync"), lines[0])
    head = ["paced, not measured hardware", "s/step predicted", "run", "off by", "rollout only predicted", "run",
            "tokens/s run", f"x {sync.row.label}", "idle: tail", "idle: capped", "loads", "moves", "lag",
            "orchestrator"]  # fmt: skip
    cells = []
    for line in lines:
        p, r = line.predicted, line.ran
        cells.append([
            line.row.label, f"{p.step_s:.1f}", f"{r.step_s:.1f}", f"{line.off:+.1%}", f"{p.rollout_only:.1%}",
            f"{r.rollout_only:.1%}", f"{r.tokens_per_s * TOKEN:,.0f}", f"{r.tokens_per_s / sync.ran.tokens_per_s:.2f}",
            f"{r.rollout[IDLE_TAIL]:.1%}", f"{r.rollout[IDLE_CAPPED]:.1%}", f"{r.load_share:.2%}",
            f"{r.move_share:.2%}", f"{r.lag_mean:.2f}", f"{r.brain_share:.2%}"])  # fmt: skip
    return grid(head, cells)


def verdicts(lines: list[ResultLine]) -> list[str]:
    """The aims, one sentence each."""
    by_label = {line.row.label.replace(f" {COLOCATED}", ""): line for line in lines}
    verdicts = []
    worst = max(lines, key=lambda line: abs(line.off))
    verdicts.append(f"prediction: at most {abs(worst.off):.1%} off ({worst.row.label}); aim 10 %")
    order = [sorted(lines, key=key) for key in (lambda n: n.predicted.step_s, lambda n: n.ran.step_s)]
    labels = [", ".join(line.row.label for line in lines) for lines in order]
    same = "as predicted" if labels[0] == labels[1] else f"predicted was {labels[0]}"
    verdicts.append(f"order, fastest first: {labels[1]} ({same})")
    dora = next((line for line in lines if line.row.mode == "dora"), None)
    if dora is None:
        return verdicts
    for mode, least, goal in AIMS:
        for line in (by_label.get(mode), *(n for n in lines if n.row.mode == mode and n is not by_label.get(mode))):
            if line is not None:
                ratio = dora.ran.tokens_per_s / line.ran.tokens_per_s
                verdicts.append(f"dora / {line.row.label}: {ratio:.2f} x tokens/s; aim {least:g}, goal {goal:g}")
    if sync := by_label.get("sync"):
        share = dora.ran.rollout_only / sync.ran.rollout_only
        verdicts.append(f"rollout only, dora / sync: {share:.2f}; aim at most 0.33")
    verdicts.append(
        f"orchestration {dora.ran.brain_share:.2%}, moves {dora.ran.move_share:.2%} of dora's time; aim under 2 %"
    )
    return verdicts


def predicted_and_run(row: Row, speedup: float) -> ResultLine:
    """speedup: modelled seconds a real second."""
    predicted = simulate(row)
    print(f"{row.label}: {predicted.step_s:.1f} s a step predicted", file=sys.stderr, flush=True)
    ran = paced.run(row, pace=1 / speedup)
    print(f"{row.label}: {ran.step_s:.1f} s a step run", file=sys.stderr, flush=True)
    return ResultLine(row=row, predicted=predicted, ran=ran)


def environment_rows(config: SimConfig, steps: int, warmup: int) -> list[Row]:
    """The rows of the file with tokens that stand for 64."""
    coarse = sims.replace(config, {
        "steps": warmup + steps, "warmup_steps": warmup, "report_tokens": 1, "seeds": 1,
        "model.kv_bytes_per_token": config.model.kv_bytes_per_token * TOKEN,
        "cost.decode_overhead_s": config.cost.decode_overhead_s * TOKEN,
        "cost.hbm_efficiency": config.cost.hbm_efficiency / TOKEN,
        "cost.flops_efficiency": config.cost.flops_efficiency / TOKEN,
        "cost.train_utilisation": config.cost.train_utilisation / TOKEN,
        "workload.mean_tokens": config.workload.mean_tokens / TOKEN,
        "workload.max_new_tokens": config.workload.max_new_tokens // TOKEN,
        "workload.prompt_tokens": config.workload.prompt_tokens / TOKEN,
        "workload.max_prompt_tokens": config.workload.max_prompt_tokens // TOKEN,
        "workload.observation_tokens": config.workload.observation_tokens // TOKEN})  # fmt: skip
    return sims.rows(coarse)


def environment_table(lines: list[ResultLine]) -> str:
    head = ["paced, not measured hardware", "s/step predicted", "run", "rollout only predicted", "run",
            "trained of each predicted", "run", "lag mean", "max"]  # fmt: skip
    cells = [[
        line.row.label, f"{line.predicted.step_s:.1f}", f"{line.ran.step_s:.1f}", f"{line.predicted.rollout_only:.1%}",
        f"{line.ran.rollout_only:.1%}", shares(line.predicted.tasks), shares(line.ran.tasks),
        f"{line.ran.lag_mean:.2f}", str(line.ran.lag_max)] for line in lines]  # fmt: skip
    return grid(head, cells)


def shares(tasks: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in sorted(tasks.items()))


def recorded_setting(directory: Path, warmup: int) -> tuple[SimConfig, str]:
    """The recorded run as a simulation, and its mode."""
    recorded, ups = recorded_body(directory / JOURNAL)
    costs = json.loads((directory / COSTS).read_text())
    first = ups[0]
    config = sims.replace(SimConfig(), {
        "steps": recorded.total_steps, "warmup_steps": warmup, "report_tokens": 16, "cost.path": str(directory / COSTS),
        "hardware.chips": len(ups) + 1, "hardware.rollout_chips": len(ups), "hardware.tensor": 1,
        "hardware.slots": first.slots, "hardware.page_size": first.page_size, "hardware.residents": first.residents,
        "workload.distribution": "journal", "workload.path": str(directory / JOURNAL),
        "workload.prompt_tokens": costs["prompt_tokens"], "workload.prompt_sigma": 0.1,
        "workload.max_prompt_tokens": recorded.max_prompt_tokens, "workload.max_new_tokens": recorded.max_new_tokens,
        "orchestrator.max_versions": recorded.max_versions, "orchestrator.groups_per_step": recorded.groups_per_step,
        "orchestrator.group_size": recorded.group_size, "orchestrator.inflight": recorded.inflight,
        "orchestrator.updates": recorded.updates, "orchestrator.peer_weights": False,
        "orchestrator.rebalance_period_s": recorded.rebalance_period_s})  # fmt: skip
    return config, recorded.mode


def recorded_table(directory: Path, modes: Sequence[str], warmup: int) -> str:
    for name in (JOURNAL, COSTS):
        if not (directory / name).is_file():
            raise SystemExit(
                f"error: {directory} holds no {name}: it is no recorded run, or one that ended before its warm-up"
            )
    config, recorded = recorded_setting(directory, warmup)
    ran = replay.replay(directory / JOURNAL, warmup, config.orchestrator.max_versions)
    print(replay.render(ran), "\n")
    rows = []
    for mode in dict.fromkeys([recorded, *modes]):
        result = simulate(Row(label=mode, mode=mode, config=config, published={}))
        own = [f"{ran.step_s:.3f}", f"{result.step_s / ran.step_s - 1:+.1%}", f"{ran.rollout_only:.1%}"]
        rows.append([mode, f"{result.step_s:.3f}", *(own if mode == recorded else ["", "", ""]),
                     f"{result.rollout_only:.1%}", f"{result.tokens_per_s:,.0f}", f"{result.lag_mean:.2f}"])  # fmt: skip
    head = ["mode", "s/step predicted", "recorded", "off by", "rollout only recorded", "predicted", "tokens/s predicted",
            "mean lag"]  # fmt: skip
    return grid(head, rows)


def main() -> None:
    asked = {"modes": MODES, "speedup": 30.0, "steps": 24, "warmup": 6}
    if "--environments" in sys.argv:
        asked |= {"speedup": 40.0, "steps": 6, "warmup": 3}
    elif any(arg.startswith("--recorded") for arg in sys.argv):
        asked |= {"modes": ("sync", "one_step", "partial", "dora_paper", "dora"), "warmup": 2}
    args = harness.flags(__doc__, **asked, split=["predicted", "half"], lent=False, small=False, environments=False,
                         config="configs/sim/environments.py", recorded="")  # fmt: skip
    if args.recorded:
        print(recorded_table(Path(args.recorded), args.modes, args.warmup))
        return
    if args.environments:
        waiting = sims.from_config_dict(load_file(args.config, SimConfig))
        chosen = environment_rows(waiting, args.steps, args.warmup)
    else:
        config = sims.replace(setting(args.steps, args.warmup), SMALL if args.small else {})
        chosen = lent_rows(config) if args.lent else rows(config, args.modes, args.split)
    lines = [predicted_and_run(row, args.speedup) for row in chosen]
    print(
        f"paced at {args.speedup:g} modelled seconds a second, {args.steps} steps after {args.warmup}; times are "
        "modelled\n"
    )
    if args.environments:
        print(environment_table(lines))
    else:
        print(table(lines), "\n", *verdicts(lines), sep="\n")


if __name__ == "__main__":
    main()
