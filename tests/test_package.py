"""The package as pip installs it: what is in it, what its command runs, what building leaves behind."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatchling, of tests/requirements.txt, is not installed")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel's content, built without a network from a checkout in which nothing is left behind."""
    folder = tmp_path_factory.mktemp("package")
    for name in ("dora_jax", "configs"):
        shutil.copytree(ROOT / name, folder / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / "checkout" / name)
    before = sorted((folder / "checkout").rglob("*"))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            folder,
            folder / "checkout",
        ],
        check=True,
        timeout=120,
    )
    assert sorted((folder / "checkout").rglob("*")) == before
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def program(installed, folder, *args):
    code = "import sys; from dora_jax.__main__ import main; sys.argv[0] = 'dora-jax'; main()"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(installed), "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_config_of_the_package_is_named_from_any_folder(installed, tmp_path):
    done = program(installed, tmp_path, "train", "--config=quickstart:tiny", "--dry_run")
    assert done.returncode == 0 and "\nworkdir: runs/quickstart_tiny\n" in done.stdout, done.stderr
    done = program(installed, tmp_path, "simulate", "--config=sim/explor")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr == (
        "error: config: sim/explor does not exist; what comes with dora_jax is agent, frozenlake, gemma3, gsm8k, moe, quickstart, "
        "qwen3, rows, sim/apart, sim/demo, sim/drafts, sim/elastic, sim/environments, sim/explore, sim/fair, sim/frozenlake, sim/ladder, "
        "sim/paper_128, sim/paper_64, sim/production_4096, sim/tilts, slices, sparse\n"
    )
    done = program(installed, tmp_path, "sweep", "--config=quickstart", "--only=0", "--dry_run")
    assert done.returncode == 0 and done.stdout.startswith("python -m dora_jax.train --config=quickstart "), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_types_of_the_package_are_for_its_users(installed):
    assert (installed / "dora_jax/py.typed").is_file()


def test_tests_and_benches_stay_in_the_checkout(installed):
    assert not [path for path in installed.rglob("*") if path.name in ("tests", "fakes", "soak", "bench")]


def test_the_command_is_in_the_wheel_and_names_its_programs(installed, tmp_path):
    (scripts,) = installed.glob("*.dist-info/entry_points.txt")
    assert "dora-jax = dora_jax.__main__:main" in scripts.read_text()
    assert "\n  sft " in program(installed, tmp_path, "--help").stdout
    done = program(installed, tmp_path, "trian", "--config=quickstart")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("usage: dora-jax PROGRAM FLAGS; ")
