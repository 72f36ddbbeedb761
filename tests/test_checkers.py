"""The tree as ruff and mypy see it: one format, no lint, types that hold. pyproject.toml configures both."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def checked(*command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tree_is_formatted():
    checked("ruff", "format", "--check", "--no-cache", ".")


def test_the_tree_has_no_lint():
    checked("ruff", "check", "--no-cache", ".")


@pytest.mark.slow
def test_types_hold(tmp_path):
    checked("mypy", "--cache-dir", str(tmp_path))
