"""Two environments of 0.1 s and 60 s at K = 3, simulated and run for real at the pace of a chip.

    python -m dora_jax.bench.environments [--speedup=40] [--steps=6] [--warmup=3]

The rows of configs/sim/environments.py: a sample that waits for its environment frees its slot, or holds it. Real are the
orchestrator, the coordinator's episodes, queues, moves and publications; PACED are ticks, train steps, transfers and
environments, as in bench/end_to_end.py: one token stands for 64, so that a tick lasts 64 times as long.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from dora_jax.bench.end_to_end import TOKEN, ResultLine, predicted_and_run
from dora_jax.config.files import load_file
from dora_jax.sim import config as sims
from dora_jax.sim.config import Row, SimConfig
from dora_jax.sim.table import grid


def rows(config: SimConfig, steps: int, warmup: int) -> list[Row]:
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


def table(lines: list[ResultLine]) -> str:
    head = ["paced, not measured hardware", "s/step predicted", "run", "rollout only predicted", "run",
            "trained of each predicted", "run", "lag mean", "max"]  # fmt: skip
    cells = [[
        line.row.label, f"{line.predicted.step_s:.1f}", f"{line.ran.step_s:.1f}", f"{line.predicted.rollout_only:.1%}",
        f"{line.ran.rollout_only:.1%}", shares(line.predicted.tasks), shares(line.ran.tasks),
        f"{line.ran.lag_mean:.2f}", str(line.ran.lag_max)] for line in lines]  # fmt: skip
    return grid(head, cells)


def shares(tasks: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in sorted(tasks.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/sim/environments.py")
    parser.add_argument("--speedup", type=float, default=40.0, help="modelled seconds a real second")
    parser.add_argument("--steps", type=int, default=6, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    args = parser.parse_args()
    config = sims.from_config_dict(load_file(args.config, SimConfig))
    lines = [predicted_and_run(row, args.speedup) for row in rows(config, args.steps, args.warmup)]
    print(
        f"paced at {args.speedup:g} modelled seconds a second, {args.steps} steps after {args.warmup}; times are modelled\n"
    )
    print(table(lines))


if __name__ == "__main__":
    main()
