"""RL of a real model on two cores: does a 135M chat model learn to add, and in how many seconds?

    python -m dora_jax.bench.real_model [--seeds=0,1,2] [--control] [--steps=16] [--workdir=runs/real_model]

SmolLM2-135M-Instruct (smollm.py) on 600 sums of two numbers of two digits, of which 256 are held out, in the model's
chat template; the reward is that the last number of the answer is the sum. One run of `dora_jax.train` a seed, on
configs/rows.py:chat with the fields below; one that has ended is not run again. --control adds a run whose rewards are
shuffled among the samples of a step: it must learn nothing. Printed are held-out accuracies before, half-way and at the
end, and the seconds of the whole process, compilation and evaluations included.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from dora_jax.bench import smollm

CONFIG = "configs/rows.py:chat"
ROWS = 600
FIELDS = {
    "cpu_devices": 2,  # the instance's and the trainer's
    "task.heldout": 256,
    "eval.prompts": 256,
    "rollout.instances": 1,
    "rollout.slots": 64,
    "rollout.pages": 640,
    "rollout.max_prompt_tokens": 64,
    "rollout.max_new_tokens": 32,
    "rollout.context_block": 48,
    "rollout.prefill_chunk": 16,
    "rollout.prefill_tokens": 512,  # pages of the system prompt are shared by all
    "orchestrator.groups_per_step": 8,
    "orchestrator.group_size": 8,
    "trainer.pack_tokens": 512,
    "trainer.micro_batches": 16,
    "trainer.learning_rate": 2e-5,
    "trainer.skip_zero_advantage": True,  # at first most groups have no right answer
    "checkpoint.every": 0,
}
RESULT = "result.json"  # in a run's folder, last


def write_rows(path: Path) -> None:
    """The same sums whatever the seed of the run."""
    rng = np.random.default_rng(0)
    pairs = {tuple(pair) for pair in rng.integers(10, 100, (4 * ROWS, 2)).tolist()}
    lines = [
        json.dumps({"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)})
        for a, b in sorted(pairs)[:: len(pairs) // ROWS][:ROWS]
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def run(folder: Path, rows: Path, seed: int, steps: int, shuffled: bool) -> dict:
    """{"accuracy": one an evaluation, "seconds"} of a run, which is made unless it has been."""
    overrides = FIELDS | {
        "seed": seed,
        "steps": steps,
        "eval.every": steps // 2,
        "model.path": smollm.folder(),
        "task.path": rows,
        "task.shuffle_rewards": shuffled,
    }
    arguments = [f"--config={CONFIG}", *(f"--config.{field}={value}" for field, value in overrides.items())]
    if (folder / RESULT).exists():
        found = json.loads((folder / RESULT).read_text())
        if found["arguments"] != arguments:
            raise SystemExit(f"error: {folder} holds a run of other settings; choose another --workdir")
        return found
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "dora_jax.train", *arguments, f"--workdir={folder}"],
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"error: dora_jax.train ended with code {done.returncode}: {done.stderr[-2000:]}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {
        "arguments": arguments,
        "seconds": seconds,
        "accuracy": [r["eval/accuracy"] for r in records if "eval/accuracy" in r],
    }
    (folder / RESULT).write_text(json.dumps(found))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--control", action="store_true", help="one more run, with shuffled rewards")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--workdir", type=Path, default=Path("runs/real_model"))
    args = parser.parse_args()
    rows = args.workdir / "sums.jsonl"
    write_rows(rows)
    runs = [(f"seed {seed}", int(seed), False) for seed in args.seeds.split(",") if seed]
    runs += [("shuffled", 0, True)] * args.control
    print(f"{'run':12s}{'held-out accuracy':>26s}{'gain':>9s}{'seconds':>9s}", flush=True)
    for name, seed, shuffled in runs:
        found = run(args.workdir / name.replace(" ", "-"), rows, seed, args.steps, shuffled)
        accuracy = found["accuracy"]
        print(
            f"{name:12s}{' -> '.join(f'{a:.1%}' for a in accuracy):>26s}"
            f"{100 * (accuracy[-1] - accuracy[0]):+8.1f} {found['seconds']:8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
