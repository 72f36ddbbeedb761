"""Before anything imports jax: one CPU platform with eight virtual devices, and no state of an earlier run.

All processes of a session (pytest, its xdist workers, what the tests start) share one compilation cache of their own:
what one has compiled the others load. tests/run.sh gives all its sessions the same one, in DORA_TEST_CACHE. A test that
needs other settings starts a process of its own.

Most of the time of a test of an engine, or of a run, is XLA compiling programs for tiny models. So XLA does not optimize
here, and its older emitters are used where jaxlib has them, which then take a fifth of the time; DORA_NIGHTLY=1 compiles
all as a run of a user's does.
"""

import importlib.metadata
import itertools
import os
import pathlib
import shutil
import tempfile

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
for name in ("DORA_DEVICES", "XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
    os.environ.pop(name, None)
if not os.environ.get("DORA_NIGHTLY"):
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 12):  # which refuses the flag
        os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"

NIGHTLY = pathlib.Path(__file__).with_name("nightly.txt")
GIVEN = os.environ.get("DORA_TEST_CACHE")
FIRST = "PYTEST_XDIST_WORKER" not in os.environ  # a worker inherits the folder of the process that started it
if FIRST:
    os.environ["DORA_COMPILE_CACHE"] = GIVEN or tempfile.mkdtemp(prefix="dora_tests_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["DORA_COMPILE_CACHE"]
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_addoption(parser):
    parser.addoption("--first", type=int, default=0, help="so many tests of each file, its first ones; 0: all")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks what nightly.txt lists, before -m and -k choose; --first counts what they leave."""
    listed = {line for line in NIGHTLY.read_text().splitlines() if line and not line.startswith("#")}
    names = {name for item in items for name in (item.nodeid, item.nodeid.partition("[")[0])}
    files = set() if any("::" in arg for arg in config.args) else {name.partition("::")[0] for name in names}
    if gone := sorted(line for line in listed - names if line.partition("::")[0] in files):
        raise pytest.UsageError(f"{NIGHTLY.name} lists tests that are not there: {', '.join(gone)}")
    for item in items:
        if item.nodeid in listed or item.nodeid.partition("[")[0] in listed:
            item.add_marker("slow")
            item.add_marker("nightly")
    yield
    if first := config.getoption("--first"):
        of_file = itertools.groupby(items, key=lambda item: item.path)
        items[:] = [item for _, tests in of_file for item in itertools.islice(tests, first)]


@pytest.fixture
def full_compile():
    """XLA optimizes as it does for a run: for comparisons of bits that depend on how."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_unconfigure():
    if FIRST and not GIVEN:
        shutil.rmtree(os.environ["DORA_COMPILE_CACHE"], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's: what `-n auto` means
def pytest_xdist_auto_num_workers():
    """A process a core that this process may use: most of them compile, each on one core. Four need 8 GB together."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(4, cores)
