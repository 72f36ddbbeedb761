"""The two commands, run against an interpreter of paper: which Python is chosen, what is installed, what is refused."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PAPER_PYTHON = """#!/bin/bash
# An interpreter that answers what the scripts ask, and writes down its arguments.
version=VERSION
case "$1 $2" in
  "-c import sys, venv"*|"-c import sys, pip"*) echo "$version" ;;
  "-m venv") mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  *) (IFS="$JOIN"; echo "$*") >>"$LOG"
     case "$*" in
       *"pip install"*) exit "${PIP_CODE:-0}" ;;
       *"pytest -m not slow"*) exit "${QUICK_CODE:-0}" ;;
       *"pytest -m slow and not alone"*) exit "${SLOW_CODE:-0}" ;;
       *"pytest -m slow and alone"*) exit "${ALONE_CODE:-0}" ;;
       *dora_jax.train*) exit "${TRAIN_CODE:-0}" ;;
     esac ;;
esac
"""
BROKEN = "#!/bin/bash\necho 'this shim has no version selected' >&2\nexit 127\n"


@pytest.fixture
def clone(tmp_path):
    """A clone with nothing installed, on a machine where only paper interpreters are found."""
    for path in (
        "launch",
        "tests/run.sh",
        "tests/other_python.sh",
        "tests/requirements.txt",
        "tests/requirements-heavy.txt",
        "tests/requirements-nodeps.txt",
        "requirements.txt",
        ".ci",
    ):
        source, target = ROOT / path, tmp_path / "clone" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "cksum", "mkdir", "mktemp", "rm", "cp"):
        (tools / tool).symlink_to(shutil.which(tool))
    return tmp_path / "clone"


def put(clone, name, version=None):
    """An interpreter on the machine's path; without a version it does not run."""
    file = clone.parent / "tools" / name
    file.write_text(PAPER_PYTHON.replace("VERSION", version) if version else BROKEN)
    file.chmod(0o755)
    return str(file)


def run(clone, *args, **environment):
    """The finished process and what the interpreter was called with in it."""
    log = clone.parent / "log"
    log.write_text("")
    done = subprocess.run(
        ["bash", *args],
        cwd=clone.parent,
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": str(clone.parent / "tools"), "LOG": str(log), "JOIN": " ", **environment},
        check=False,
    )
    return done, log.read_text().splitlines()


def local(clone, *args, **environment):
    return run(clone, "clone/launch/local.sh", *args, **environment)


PIP = "-m pip install --quiet --disable-pip-version-check -r "


def test_first_run_installs_and_second_run_does_not(clone):
    put(clone, "python3.12", "3.12")
    args = ["--config=configs/quickstart.py", "--dry_run"]
    done, called = local(clone, *args)
    assert done.returncode == 0, done.stderr
    assert called == [PIP + "requirements.txt", "-m dora_jax.train " + " ".join(args)]
    assert local(clone, *args)[1] == called[1:]


def test_arguments_arrive_as_they_were_given(clone):
    put(clone, "python3.12", "3.12")
    _, called = local(clone, "--config.task.template=two  words *", "", JOIN="|")
    assert called[-1] == "-m|dora_jax.train|--config.task.template=two  words *|"


def test_changed_requirements_are_installed_again(clone):
    put(clone, "python3.12", "3.12")
    local(clone)
    with (clone / "requirements.txt").open("a") as file:
        file.write("# another line\n")
    assert local(clone)[1][0] == PIP + "requirements.txt"


def test_a_failed_installation_is_loud_and_repeated(clone):
    put(clone, "python3.12", "3.12")
    done, called = local(clone, PIP_CODE="1")
    assert (done.returncode, len(called)) == (1, 1) and "pip could not install requirements.txt" in done.stderr
    assert "No gcc is here, and reasoning-gym's pycosat is built with one." in done.stderr
    assert len(local(clone)[1]) == 2


def test_a_failed_change_leaves_nothing_to_trust(clone):
    put(clone, "python3.12", "3.12")
    local(clone)
    before = (clone / "requirements.txt").read_text()
    (clone / "requirements.txt").write_text(before + "# more\n")
    local(clone, PIP_CODE="1")  # what it changed is not known
    (clone / "requirements.txt").write_text(before)
    assert len(local(clone)[1]) == 2


def test_exit_code_of_the_program_is_that_of_the_script(clone):
    put(clone, "python3.12", "3.12")
    assert local(clone, TRAIN_CODE="2")[0].returncode == 2


@pytest.mark.parametrize(
    "machine, chosen",
    [
        ({"python3.11": "3.11", "python3.12": "3.12"}, "3.12"),
        ({"python3.11": "3.11", "python3.12": None}, "3.11"),  # a pyenv shim of a version that is not selected
        ({"python3": "3.11"}, "3.11"),
        ({"python3": "3.13", "python3.12": "3.12"}, "3.12"),
    ],
)
def test_the_newest_supported_python_that_runs_is_chosen(clone, machine, chosen):
    for name, version in machine.items():
        put(clone, name, version)
    done, _ = local(clone)
    assert done.returncode == 0, done.stderr
    assert f"version={chosen}\n" in (clone / ".venv/bin/python").read_text()


@pytest.mark.parametrize(
    "environment, why",
    [
        ({"PYTHON": "python3.13"}, "error: PYTHON=python3.13 is Python 3.13; this project runs on one of: 3.12 3.11."),
        ({"PYTHON": "python9"}, "error: PYTHON=python9 does not run, or cannot make virtual environments."),
        ({"DORA_ACCELERATOR": "gpu"}, "error: DORA_ACCELERATOR=gpu is none of: cpu, tpu, cuda."),
    ],
)
def test_what_cannot_be_set_up_is_refused_in_one_line(clone, environment, why):
    put(clone, "python3.13", "3.13")
    put(clone, "python3", "3.13")
    done, called = local(clone, **environment)
    assert (done.returncode, done.stderr, called) == (2, why + "\n", [])
    assert not (clone / ".venv").exists()


NONE = "no Python with the venv module found among 3.12 3.11"
UV = """#!/bin/bash
echo "uv $* in $UV_PYTHON_INSTALL_DIR" >>"$LOG"
case "$1 $2" in
  "python install") exit "${UV_CODE:-0}" ;;
  "python find") echo "$FETCHED" ;;
esac
"""


@pytest.mark.parametrize("there", [True, False])
def test_uv_brings_a_python_to_a_machine_that_has_none(clone, there):
    """On images of TPU VMs, whose Python is 3.10, uv is the machine's, else pip fetches it, into the checkout."""
    put(clone, "python3", "3.10")
    uv = clone.parent / "tools/uv" if there else clone / ".cache/uv/bin/uv"
    uv.parent.mkdir(parents=True, exist_ok=True)
    uv.write_text(UV)
    if there:
        uv.chmod(0o755)
    else:  # what pip lays there can be run
        (clone / "launch/requirements-uv.txt").write_text("uv==0\n")
        python = clone.parent / "tools/python3"
        python.write_text(
            python.read_text().replace(
                '*"pip install"*)', f'*"--target=.cache/uv"*) chmod +x {uv} ;;\n *"pip install"*)'
            )
        )
        (clone.parent / "tools/chmod").symlink_to(shutil.which("chmod"))
    place = str(clone / ".cache/python")
    fetched = put(clone, "fetched", "3.12")
    done, called = local(clone, FETCHED=fetched)
    assert done.returncode == 0, done.stderr
    assert called == [
        *([] if there else ["-m pip install --quiet --target=.cache/uv -r launch/requirements-uv.txt"]),
        f"uv python install --no-bin 3.12 in {place}",
        f"uv python find --managed-python 3.12 in {place}",
        PIP + "requirements.txt",
        "-m dora_jax.train",
    ]
    assert "version=3.12\n" in (clone / ".venv/bin/python").read_text()
    assert local(clone, FETCHED=fetched)[1] == ["-m dora_jax.train"]


def test_a_python_that_nobody_can_bring_is_named_in_one_line(clone):
    put(clone, "python3", "3.10")
    done, _ = local(clone, PIP_CODE="1")
    says = f"error: {NONE}, nor pip to fetch uv with; install one or set PYTHON=/path/to/python.\n"
    assert done.returncode == 2 and done.stderr.endswith(says)
    uv = clone.parent / "tools/uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    done, _ = local(clone, UV_CODE="1")
    assert done.returncode == 1 and f"error: {NONE}, and uv could not fetch 3.12" in done.stderr
    assert not (clone / ".venv").exists()


def test_python_can_be_named(clone):
    put(clone, "python3.12", "3.12")
    local(clone, PYTHON=put(clone, "mine", "3.11"))
    assert "version=3.11\n" in (clone / ".venv/bin/python").read_text()
    assert local(clone)[0].returncode == 0  # and is kept
    done, _ = local(clone, PYTHON="python3.12")
    assert done.returncode == 2 and "holds Python 3.11" in done.stderr


def test_the_accelerator_picks_the_wheel_and_is_remembered(clone):
    put(clone, "python3.12", "3.12")
    assert local(clone, DORA_ACCELERATOR="tpu")[1][0] == PIP + "requirements.txt jax[tpu]"
    assert len(local(clone)[1]) == 1  # nothing to install: still tpu
    done, called = local(clone, DORA_ACCELERATOR="cpu")
    assert (done.returncode, called) == (2, []) and "made for tpu" in done.stderr
    assert local(clone, DORA_ACCELERATOR="cuda", DORA_VENV="other")[1][0] == PIP + "requirements.txt jax[cuda12]"


def test_a_broken_environment_is_made_again(clone):
    put(clone, "python3.12", "3.12")
    local(clone)
    (clone / ".venv/bin/python").write_text(BROKEN)
    assert local(clone)[0].returncode == 0


def test_tests_run_quick_ones_first_and_pass_arguments_on(clone):
    put(clone, "python3.12", "3.12")
    done, called = run(clone, "clone/tests/run.sh", "-k", "config")
    assert done.returncode == 0, done.stderr
    parts = [
        "-m pytest -m not slow -n auto --dist loadfile",
        "-m pytest -m slow and not alone and not nightly -n auto --dist load --maxschedchunk=1",
        "-m pytest -m slow and alone and not nightly",
    ]
    assert called == [
        PIP + "requirements.txt",
        PIP + "tests/requirements.txt",
        PIP + "tests/requirements-heavy.txt",
        PIP + "tests/requirements-nodeps.txt --no-deps",
        *(f"{part} -k config" for part in parts),
    ]
    assert run(clone, "clone/.ci/run")[1] == parts
    assert run(clone, "clone/tests/run.sh", DORA_NIGHTLY="1")[1] == [x.replace(" and not nightly", "") for x in parts]
    light = run(clone, "clone/tests/run.sh", DORA_VENV="light", DORA_LIGHT="1")[1]
    assert PIP + "tests/requirements.txt" in light and PIP + "tests/requirements-heavy.txt" not in light


@pytest.mark.parametrize(
    "codes, expected, parts",
    [
        ({"QUICK_CODE": "1"}, 1, 1),
        ({"SLOW_CODE": "1"}, 1, 2),
        ({"ALONE_CODE": "1"}, 1, 3),
        ({"QUICK_CODE": "2"}, 2, 1),
        ({"QUICK_CODE": "5"}, 0, 3),
        ({"SLOW_CODE": "5"}, 0, 3),
        ({"ALONE_CODE": "5"}, 0, 3),
        ({"QUICK_CODE": "5", "SLOW_CODE": "5", "ALONE_CODE": "5"}, 5, 3),
    ],
)
def test_any_failing_part_fails_the_tests(clone, codes, expected, parts):
    put(clone, "python3.12", "3.12")
    done, called = run(clone, "clone/tests/run.sh", **codes)
    assert done.returncode == expected
    assert len([line for line in called if "pytest" in line]) == parts


@pytest.mark.parametrize("home", [False, True])
def test_ci_runs_the_quick_tests_on_the_other_python_where_there_is_one(clone, home):
    """On the path, or among pyenv's, whose shim runs only what is selected."""
    put(clone, "python3.11", "3.11")
    place = clone.parent / "home/.pyenv/versions/3.12.1/bin" if home else clone.parent / "tools"
    if home:
        place.mkdir(parents=True)
        (place / "python").write_text(PAPER_PYTHON.replace("VERSION", "3.12"))
        (place / "python").chmod(0o755)
        put(clone, "python3.12")
        variables = {"HOME": str(clone.parent / "home")}
    else:
        put(clone, "python3.12", "3.12")
        variables = {"PYTHON": "python3.11"}
    done, called = run(clone, "clone/.ci/run", **variables)
    assert done.returncode == 0, done.stderr
    quick = "-m pytest -m not slow -n auto --dist loadfile --first=1"
    installed = [PIP + "requirements.txt", PIP + "tests/requirements.txt"]
    assert called[-4:] == ["-m pytest -m slow and alone and not nightly", *installed, quick]
    assert "version=3.12\n" in (clone / ".venv-3.12/bin/python").read_text()
    assert run(clone, "clone/.ci/run", QUICK_CODE="1", **variables)[0].returncode == 1
    other = run(clone, "clone/tests/other_python.sh", "-x", QUICK_CODE="1", **variables)
    assert (other[0].returncode, other[1]) == (1, [f"{quick} -x"])


def test_ci_passes_where_the_other_python_or_its_packages_are_not_to_be_had(clone):
    put(clone, "python3.11", "3.11")
    put(clone, "python3.12")
    done, called = run(clone, "clone/tests/other_python.sh")
    assert done.returncode == 0 and done.stderr.endswith(
        "there is no Python 3.12 here, so they ran on one Python only\n"
    )
    put(clone, "python3.12", "3.12")
    done, called = run(clone, "clone/tests/other_python.sh", PIP_CODE="1", PYTHON="")
    assert done.returncode == 0 and "the packages for Python 3.12 are not to be had" in done.stderr
    assert not [line for line in called if "pytest" in line]


@pytest.mark.parametrize(
    "script", ["launch/local.sh", "launch/setup.sh", "tests/run.sh", "tests/other_python.sh", ".ci/run"]
)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    if script != "launch/setup.sh":
        assert os.access(ROOT / script, os.X_OK)


def test_every_direct_requirement_is_pinned_and_explained():
    direct = (ROOT / "requirements.txt").read_text().split("\n\n")[0].splitlines()[1:]
    names = set()
    for line in direct:
        requirement, _, reason = line.partition("  #")
        name = requirement.partition("==")[0]
        assert "==" in requirement, line
        assert reason or name in names, f"{name} has no reason"  # one reason where markers split a pin in two
        names.add(name)
