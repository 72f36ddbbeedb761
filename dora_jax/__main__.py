"""The programs by one name:  dora-jax train --config=quickstart   (or: python -m dora_jax train ...)

Each is the module of that name, run as `python -m dora_jax.train` runs it.
"""

import runpy
import sys

PROGRAMS = {
    "train": "the main job: warm start where it is asked for, then reinforcement learning; resumes",
    "sft": "a supervised warm start, as a Hugging Face folder",
    "evaluate": "avg@k and pass@k of a checkpoint",
    "serve": "the endpoint that clients of OpenAI's dialect call: a folder, or the checkpoints of a run",
    "export_hf": "a checkpoint as a Hugging Face folder",
    "sweep": "a config's sweep, one run after the other",
    "top": "a run live in a terminal",
    "report": "one HTML page of a run: curves, versions side by side, samples",
    "simulate": "the orchestrator in virtual time",
}


def main() -> None:
    name, rest = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name not in PROGRAMS:
        lines = [f"  {program:10s} {purpose}" for program, purpose in PROGRAMS.items()]
        print(
            "\n".join(["usage: dora-jax PROGRAM FLAGS; the flags of each: dora-jax PROGRAM --help", *lines]),
            file=sys.stdout if name in ("--help", "-h") else sys.stderr,
        )
        sys.exit(0 if name in ("--help", "-h") else 2)
    sys.argv = [f"dora-jax {name}", *rest]
    runpy.run_module(f"dora_jax.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
