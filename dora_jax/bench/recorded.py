"""A recorded run beside the simulator's prediction of it from its own measured costs, and other modes on its work.

    python -m dora_jax.bench.recorded DIRECTORY [--modes=sync,dora] [--warmup=2, as the recorder's]

DIRECTORY is what runtime/recorder.py wrote: WORKDIR/recorded of a run with --config.journal.record=True. The journal
must replay to the same commands first. Nothing here is paced: costs are those of the machine that ran it. Evaluations are not simulated: record a run that has none in its middle. The
last K steps are left out of the recorded average: nothing new is admitted for them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dora_jax.costs.recording import recorded_body
from dora_jax.runtime.observe.recorder import COSTS, JOURNAL
from dora_jax.sim import config as sims
from dora_jax.sim import replay
from dora_jax.sim.config import Row, SimConfig
from dora_jax.sim.run import simulate
from dora_jax.sim.table import grid


def setting(directory: Path, warmup: int) -> tuple[SimConfig, str]:
    """The recorded run as a simulation, and its mode."""
    told, ups = recorded_body(directory / JOURNAL)
    costs = json.loads((directory / COSTS).read_text())
    first = ups[0]
    config = sims.replace(SimConfig(), {
        "steps": told.total_steps, "warmup_steps": warmup, "report_tokens": 16, "cost.path": str(directory / COSTS),
        "hardware.chips": len(ups) + 1, "hardware.rollout_chips": len(ups), "hardware.tensor": 1,
        "hardware.slots": first.slots, "hardware.page_size": first.page_size, "hardware.residents": first.residents,
        "workload.distribution": "journal", "workload.path": str(directory / JOURNAL),
        "workload.prompt_tokens": costs["prompt_tokens"], "workload.prompt_sigma": 0.1,
        "workload.max_prompt_tokens": told.max_prompt_tokens, "workload.max_new_tokens": told.max_new_tokens,
        "orchestrator.max_versions": told.max_versions, "orchestrator.groups_per_step": told.groups_per_step,
        "orchestrator.group_size": told.group_size, "orchestrator.inflight": told.inflight,
        "orchestrator.updates": told.updates, "orchestrator.peer_weights": False,
        "orchestrator.rebalance_period_s": told.rebalance_period_s})  # fmt: skip
    return config, told.mode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--modes", default="sync,one_step,partial,dora_paper,dora")
    parser.add_argument("--warmup", type=int, default=2, help="steps left out of every average")
    args = parser.parse_args()
    for name in (JOURNAL, COSTS):
        if not (args.directory / name).is_file():
            parser.error(
                f"{args.directory} holds no {name}: it is no recorded run, or one that ended before its warm-up"
            )
    config, recorded = setting(args.directory, args.warmup)
    ran = replay.replay(args.directory / JOURNAL, args.warmup, config.orchestrator.max_versions)
    print(replay.render(ran), "\n")
    rows = []
    for mode in dict.fromkeys([recorded, *args.modes.split(",")]):
        result = simulate(Row(label=mode, mode=mode, config=config, published={}))
        own = [f"{ran.step_s:.3f}", f"{result.step_s / ran.step_s - 1:+.1%}", f"{ran.rollout_only:.1%}"]
        rows.append([mode, f"{result.step_s:.3f}", *(own if mode == recorded else ["", "", ""]),
                     f"{result.rollout_only:.1%}", f"{result.tokens_per_s:,.0f}", f"{result.lag_mean:.2f}"])  # fmt: skip
    head = ["mode", "s/step predicted", "recorded", "off by", "rollout only recorded", "predicted", "tokens/s predicted",
            "mean lag"]  # fmt: skip
    print(grid(head, rows))


if __name__ == "__main__":
    main()
