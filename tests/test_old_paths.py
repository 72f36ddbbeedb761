"""Module paths of earlier versions: an import gives the module under its new path, `-m` runs it, and each row is
needed."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from dora_jax.base import old_paths
from dora_jax.config import files
from dora_jax.tasks.environments.calculator import Calculator


@pytest.mark.parametrize("old", sorted(old_paths.TABLE))
def test_an_old_path_gives_the_module_itself(old):
    new = old_paths.TABLE[old]
    assert importlib.import_module(old) is importlib.import_module(new)
    assert sys.modules[new].__spec__.name == new == sys.modules[new].__name__


def test_what_a_users_config_imports_is_what_the_package_uses():
    from dora_jax.tasks.calculator import Calculator as old

    from dora_jax import config_files

    assert config_files is files and old is Calculator


def test_an_old_path_leads_to_no_other_old_path():
    assert not set(old_paths.TABLE.values()) & set(old_paths.TABLE)


NAMED = (Path(__file__).parent / "data/import_paths.txt").read_text().split()


@pytest.mark.parametrize("name", NAMED)
def test_what_pages_and_configs_named_is_there_or_refused_with_the_new_command(name):
    """tests/data/import_paths.txt: what pages, configs and launch scripts of 10b51e5 named, and its programs."""
    if command := old_paths.COMMANDS.get(name):
        with pytest.raises(ImportError, match=f"{name} is `python -m {command}` now"):
            importlib.import_module(name)
        assert importlib.util.find_spec(command.split()[0])
    else:
        assert pkgutil.resolve_name(name)


def test_a_program_whose_command_takes_other_words_names_it():
    done = subprocess.run(
        [sys.executable, "-m", "dora_jax.bench.waiting", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode and "is `python -m dora_jax.bench.transfer migrate --waiting` now" in done.stderr


def test_an_old_path_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "dora_jax.tasks.render_worker", "nonsense"], capture_output=True, text=True, check=False
    )
    assert "tasks/sandbox/render.py" in done.stderr, "it ran, and says that nonsense is no descriptor"


def test_an_old_path_of_several_programs_in_one_runs_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "dora_jax.bench.host_time", "--help"], capture_output=True, text=True, check=False
    )
    assert "--step_ms" in done.stdout and "--folder" not in done.stdout.partition("options:")[2]


def test_a_path_that_never_was_is_an_import_error():
    with pytest.raises(ModuleNotFoundError, match="dora_jax.config_nonsense"):
        importlib.import_module("dora_jax.config_nonsense")
