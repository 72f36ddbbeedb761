"""The pages are true: their commands run as a reader runs them, page after page in the order of the README's index, in
one folder; sizes are cut by flags. What they link to and name exists."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import hub_programs

ROOT = Path(__file__).resolve().parent.parent
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
    "dora_jax/bench/README.md",
    "dora_jax/README.md",
    "tests/README.md",
)
UNRUN = ("configs/README.md", "configs/coming_from.md", "dora_jax/report/README.md")  # they have no commands
PAGES = (*WALK, *UNRUN)
WORDS = 1200  # of the README
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
    '"rollout.max_new_tokens": 32': ', "orchestrator.groups_per_step": 2, "eval.prompts": 4',
}
INSTEAD = (  # these very tests; what test_checkers.py runs; the environment of the tests
    (re.compile(r"^(bash tests/run\.sh|python -m pytest).*$", re.MULTILINE), "true"),
    (re.compile(r" && mypy .*$", re.MULTILINE), ""),
    (re.compile(r"^source \.venv/bin/activate$", re.MULTILINE), "true"),
    (  # a server answers the commands behind it, as from another terminal
        re.compile(r"^(python -m dora_jax\.serve [^#\n]*).*$", re.MULTILINE),
        "\\1 &\nserver=$!; trap 'kill $server' EXIT\n"
        + "until curl -sf http://127.0.0.1:8000/healthz; do kill -0 $server; sleep 0.5; done",
    ),
)


def blocks(page):
    """(language, what it says at small sizes) of each block that is run."""
    for language, text in BLOCK.findall((ROOT / page).read_text()):
        if language == "python" and not text.startswith("# "):
            continue  # a cell, which test_notebook.py runs
        if language in ("bash", "python"):
            for old, more in SMALLER.items():
                command = rf"^((?:python|bash launch/local|run = ).*?{re.escape(old)})"
                text = re.sub(command, rf"\1{' ' * (more[0] == '-')}{more}", text, flags=re.MULTILINE)
            for pattern, other in INSTEAD:
                text = pattern.sub(other, text)
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
def test_every_command_of_every_page_runs(tmp_path):
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
    for page in WALK:
        for language, text in blocks(page):
            if language == "python":
                (clone / text.split("\n", 1)[0].removeprefix("# ").strip()).write_text(text)
                continue
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=clone,
                env=environment(tmp_path),
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, f"{page}:\n{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def anchors(page):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", (ROOT / page).read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= WORDS
    linked = re.findall(r"\]\(([^)#:]+\.md)\)", text)
    assert set(linked) == set(PAGES) - {"README.md"}
    folders = ("dora_jax", "configs", "launch", "tests")
    pages = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.md")}
    assert pages - set(PAGES) == {page for page in pages if page.startswith("tests/data/")}
    assert not [page for page in UNRUN if list(blocks(page))]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_names_files_that_exist(page):
    text = (ROOT / page).read_text()
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
        place = (ROOT / page).parent / target if target else ROOT / page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place.resolve().relative_to(ROOT)), f"{target}#{anchor}"
    for name in re.findall(r"\b(?:configs|launch|tests|dora_jax)/[\w/]+\.(?:py|sh)", text):
        assert (ROOT / name).exists(), name
    for module in re.findall(r"python -m ((?:dora_jax|tests)[a-z_.]*[a-z])(?![\w.])", text):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


def test_the_architecture_names_files_that_exist():
    text = (ROOT / "dora_jax" / "README.md").read_text()
    named = re.findall(r"`((?:[\w.]+/)*[\w]*(?:\.py|\.txt|/))`", text)
    assert len(named) > 40
    rooms = [ROOT / "dora_jax", ROOT, *(ROOT / "dora_jax").glob("*/")]
    for name in named:
        assert any((room / name).exists() for room in rooms), name
