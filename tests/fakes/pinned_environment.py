"""Libraries that are no dependency of ours, each in a virtual environment of its own, kept between test runs."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / f"dora_jax_clients-{os.getuid()}"


def python_of(name):
    """The interpreter that has what tests/data/clients/NAME.txt pins; the test is skipped where no registry gives
    it."""
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    home, pins = CACHE / f"{name}-{version}", ROOT / f"tests/data/clients/{name}.txt"
    python, stamp = home / "bin/python", home / "installed.txt"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{home.name}.lock").open("w") as lock:  # of two workers of pytest one makes it, and the other waits
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == pins.read_text():
            return python
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", home], check=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check"]
        done = subprocess.run([*pip, "--retries=1", "-r", pins], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no registry gives {pins.name}: {done.stderr.strip().splitlines()[-1:]}")
        stamp.write_text(pins.read_text())
    return python
