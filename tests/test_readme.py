"""The README and launch/README.md are true: their commands run, in their order, on the quickstart's smallest
configuration."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import hub_programs

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("README.md", "launch/README.md")
RECURSION = "bash tests/run.sh"  # these very tests
SMALLER = (
    ("configs/quickstart.py", "configs/quickstart.py:tiny"),
    ("configs/agent.py", "configs/agent.py:tiny"),
    (
        "--config=configs/rows.py",
        "--config=configs/rows.py --config.orchestrator.groups_per_step=2 --config.eval.prompts=4",
    ),
    (
        "--config=configs/gsm8k.py",
        (
            "--config=configs/gsm8k.py --config.steps=2 --config.orchestrator.groups_per_step=2 "
            "--config.eval.prompts=4 --config.task.heldout=4 --config.rollout.slots=8 "
            "--config.rollout.max_prompt_tokens=32 --config.rollout.max_new_tokens=32 --config.trainer.pack_tokens=64 "
            "--config.trainer.micro_batches=1"
        ),
    ),
    (
        '"rollout.max_new_tokens": 32}',
        '"rollout.max_new_tokens": 32, "orchestrator.groups_per_step": 2, "eval.prompts": 4}',
    ),
)


def blocks(page):
    """(language, what it says on the smallest configuration) of each block."""
    for language, text in BLOCK.findall((ROOT / page).read_text()):
        for old, new in SMALLER:
            text = text.replace(old, new)
        yield language, text


def environment(home):
    """A fresh home; `python` and the launch scripts use the interpreter that runs the tests."""
    prefix = Path(sys.prefix)
    return os.environ | {
        "HOME": str(home),
        "DORA_VENV": str(prefix),
        "PATH": f"{home / 'bin'}:{prefix / 'bin'}:{os.environ['PATH']}",
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_the_page_runs(tmp_path, page):
    clone = tmp_path / "clone"
    names = ("dora_jax", "configs", "launch", "tests", "requirements.txt", "pyproject.toml")
    clone.mkdir()
    for name in names:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, clone / name)
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "all"],
    ):
        subprocess.run(["git", *command], cwd=clone, check=True)  # the scripts send what is committed
    hub_programs.install(tmp_path / "bin")
    for language, text in blocks(page):
        if language == "python":
            (clone / text.split("\n", 1)[0].removeprefix("# ").strip()).write_text(text)
            continue
        script = text.replace(RECURSION, "true").replace("source .venv/bin/activate", "true")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=clone,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES)
def test_the_page_names_files_that_exist(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target
    for name in re.findall(r"(?:configs|launch|tests|dora_jax)/[\w/]+\.(?:py|sh)", text):
        assert (ROOT / name).exists(), name
    for module in re.findall(r"python -m ((?:dora_jax|tests)[\w.]*)", text):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


def test_the_house_names_files_that_exist():
    text = (ROOT / "dora_jax" / "README.md").read_text()
    named = re.findall(r"`((?:[\w.]+/)*[\w]*(?:\.py|\.txt|/))`", text)
    assert len(named) > 40
    rooms = [ROOT / "dora_jax", ROOT, *(ROOT / "dora_jax").glob("*/")]
    for name in named:
        assert any((room / name).exists() for room in rooms), name
