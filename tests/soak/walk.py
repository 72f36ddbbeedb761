"""The commands of the pages as a reader runs them: page after page in the order of the README's index, in one folder.

    python -m tests.soak.walk [--workdir=DIR] [--small] [--pages=README.md,...]

At full size as written, but for the recipe whose model and data a stand-in for the hub gives; `--small` puts flags
behind a command that cut its sizes, as the tests do. One row a block with its exit code and seconds; the last 20 lines
of each go to DIR/walk.txt. A block that fails ends the walk.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fakes import hub_programs

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("dora_jax", "configs", "launch", "tests", "requirements.txt", "pyproject.toml", "README.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WALK = (
    "README.md",
    "dora_jax/tasks/README.md",
    "dora_jax/orchestrate/README.md",
    "dora_jax/sim/README.md",
    "dora_jax/rollout/README.md",
    "dora_jax/trainer/README.md",
    "dora_jax/serving/README.md",
    "dora_jax/runtime/README.md",
    "launch/README.md",
    "launch/systems.md",
    "dora_jax/bench/README.md",
    "dora_jax/README.md",
    "tests/README.md",
)
UNRUN = (
    "configs/README.md",
    "configs/coming_from.md",
    "dora_jax/report/README.md",
    "dora_jax/runtime/files.md",
)  # they have no commands
PAGES = (*WALK, *UNRUN)
TINY = (
    "--config.steps=3 --config.sft.steps=20 --config.sft.examples=256 --config.sft.d_model=32 --config.sft.d_ff=64 "
    "--config.sft.n_kv_heads=1 --config.sft.head_dim=8 --config.orchestrator.groups_per_step=2 "
    "--config.orchestrator.group_size=4 --config.trainer.micro_batches=1 --config.eval.prompts=8 --config.eval.samples=1"
)
SMALLER = {  # what a command's line holds -> what is put behind it
    "--config=configs/quickstart.py": TINY,
    "--config=configs/agent.py": TINY,
    "--config=configs/rows.py": "--config.orchestrator.groups_per_step=2 --config.eval.prompts=4",
    "--config=configs/gsm8k.py": (
        "--config.steps=2 --config.orchestrator.groups_per_step=2 --config.eval.prompts=4 --config.task.heldout=4 "
        "--config.rollout.slots=8 --config.rollout.max_prompt_tokens=32 --config.rollout.max_new_tokens=32 "
        "--config.trainer.pack_tokens=64 --config.trainer.micro_batches=1"
    ),
    "--config=first_model.py": (
        "--config.steps=2 --config.orchestrator.groups_per_step=2 --config.eval.prompts=4 --config.task.heldout=4 "
        "--config.rollout.slots=8 --config.rollout.max_prompt_tokens=80 --config.trainer.pack_tokens=128 "
        "--config.trainer.micro_batches=1"
    ),
    '"rollout.max_new_tokens": 32': ', "orchestrator.groups_per_step": 2, "eval.prompts": 4',
}
STANDS_IN = (  # always cut: their model and data come from a stand-in for the hub
    "--config=configs/gsm8k.py",
    "--config=first_model.py",
)
INSTEAD = (  # these very tests; what test_checkers.py runs; the environment of the tests
    (re.compile(r"^(bash tests/\w+\.sh|python -m pytest).*$", re.MULTILINE), "true"),
    (re.compile(r" && mypy .*$", re.MULTILINE), ""),
    (re.compile(r"^source \.venv/bin/activate$", re.MULTILINE), "true"),
    (  # a server answers the commands behind it, as from another terminal
        re.compile(r"^(python -m dora_jax\.serve [^#\n]*).*$", re.MULTILINE),
        "\\1 &\nserver=$!; trap 'kill $server' EXIT\n"
        + "until curl -sf http://127.0.0.1:8000/healthz; do kill -0 $server; sleep 0.5; done",
    ),
)


def blocks(page: str, small: bool = True) -> Iterator[tuple[str, str]]:
    """(language, text) of each block that is run; small: with the flags that cut its sizes."""
    for language, text in BLOCK.findall((ROOT / page).read_text()):
        if language == "python" and not text.startswith("# "):
            continue  # a cell, which test_notebook.py runs
        if language in ("bash", "python"):
            for old, more in SMALLER.items():
                if not small and old not in STANDS_IN:
                    continue
                command = rf"^((?:python|bash launch/local|run = ).*?{re.escape(old)})"
                text = re.sub(command, rf"\1{' ' * (more[0] == '-')}{more}", text, flags=re.MULTILINE)
            for pattern, other in INSTEAD:
                text = pattern.sub(other, text)
            yield language, text


def environment(home: Path) -> dict[str, str]:
    """A fresh home; `python` and the launch scripts use the interpreter that runs the tests."""
    prefix = Path(sys.prefix)
    return os.environ | {
        "HOME": str(home),
        "DORA_VENV": str(prefix),
        "PATH": f"{home / 'bin'}:{prefix / 'bin'}:{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
    }


def clone(folder: Path) -> Path:
    """A repository of its own with everything that a reader has: the scripts send what is committed."""
    made = folder / "clone"
    made.mkdir(parents=True)
    for source in (ROOT / name for name in COPIED):
        if source.is_dir():
            shutil.copytree(source, made / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, made / source.name)
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "all"],
    ):
        subprocess.run(["git", *command], cwd=made, check=True)
    hub_programs.install(folder / "bin")
    return made


def walk(
    folder: Path, pages: tuple[str, ...] = WALK, small: bool = True, timeout_s: float = 300.0
) -> Iterator[tuple[str, str, subprocess.CompletedProcess[str], float]]:
    """(page, block, how it ended, seconds) of each block of bash; a Python block is written as the file that it names."""
    place = clone(folder)
    for page in pages:
        for language, text in blocks(page, small):
            if language == "python":
                (place / text.split("\n", 1)[0].removeprefix("# ").strip()).write_text(text)
                continue
            began = time.monotonic()
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=place,
                env=environment(folder),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
            yield page, text, done, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=Path("runs/walk"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--pages", default=",".join(WALK))
    flags = parser.parse_args()
    shutil.rmtree(flags.workdir, ignore_errors=True)
    flags.workdir.mkdir(parents=True)
    print(f"{'rc':>3} {'s':>7}  page: first line", flush=True)
    for page, text, done, seconds in walk(flags.workdir.resolve(), tuple(flags.pages.split(",")), flags.small, 7200.0):
        with (flags.workdir / "walk.txt").open("a") as log:
            last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            log.write(f"== {page}\n{text}-- exit code {done.returncode}, {seconds:.1f} s\n{last}\n\n")
        first = text.split("\n", 1)[0]
        print(f"{done.returncode:>3} {seconds:>7.1f}  {page}: {first[:120]}", flush=True)
        if done.returncode:
            print(done.stdout[-2000:] + done.stderr[-4000:], file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
