"""A command line as a user types it: parsed, refused, or run in a folder with a config file and a program."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from absl import flags as absl_flags

from dora_jax.cli import flags
from dora_jax.config import ConfigError
from tests.fakes.hf_models import MODEL

ROOT = Path(__file__).parents[2]


def write_workspace():
    """A folder with a config file, a model folder without weights, an adapter's and a program that says what it got."""
    for name in ("model", "adapter"):
        Path(name).mkdir()
    Path("adapter/adapter_config.json").touch()
    Path("model/config.json").write_text(json.dumps(MODEL))
    Path("c.py").write_text(
        textwrap.dedent("""
        from dora_jax import config
        def get_config(arg=None):
            c = config.defaults()
            c.model.path = "model"
            c.task.name = "reasoning_gym:chain_sum"
            c.task.params = {"terms": 2, "label": "a", "token": "sesame"}
            c.steps = int(arg or 7)
            return c
        """)
    )
    Path("program.py").write_text(
        textwrap.dedent('''
        """Says what it got."""
        import sys
        from dora_jax import flags
        def main(config, workdir):
            print("ran", config.steps, workdir, "jax" in sys.modules)
            return 3
        flags.run(main)
        ''')
    )


def parse(*args, purpose="train"):
    return flags.parse(["program", *args], purpose, absl_flags.FlagValues())


def refusal(*args, purpose="train"):
    with pytest.raises(ConfigError) as caught:
        parse(*args, purpose=purpose)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def program(*args):
    return subprocess.run(
        [sys.executable, "program.py", *args],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        timeout=60,
        check=False,
    )
