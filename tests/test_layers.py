"""The layers of the package, read from the imports of every module, and the sizes of its files and functions.

All imports count: those at the top of a file, those inside functions, and those for type checkers alone, since a name
that only a type needs still ties two modules together.
"""

import ast
import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dora_jax"
STAGES = ("tasks", "rollout", "buffer", "trainer", "publish")

# Every module belongs to one room: a package is a room of its own, a file directly in dora_jax/ is listed here.
ROOMS = {
    "basics": "config_tree version exits spelling redaction digest box_digest fault_injection state_files retrying_file console metrics chrome_trace prometheus chips helping callables intervals",
    "settings": "config config_cluster config_live config_task config_files arguments workdirs",
    "costs": "costs update_costs recording",
    "tokenizer": "tokenizer",
    "types": "types",
    "publish": "publish",
    "checks": "validate presets budget memory devices hub",  # what a machine chooses for a run and holds, before JAX
    "programs": "__init__ __main__ api train sft evaluate serve export_hf sweep top flags aot aot_roles aot_slices",
    "simulate": "simulate",
}

# room -> the rooms that it may import, beside itself, `basics` and `types`
ALLOWED = {
    "types": "",
    "basics": "",
    "orchestrate": "types",
    "settings": "models",  # reads config.json of a model
    "costs": "settings models orchestrate",
    "models": "tokenizer",
    "tokenizer": "models tasks",  # a chat template renders in a process that tasks.render can kill
    "ops": "models",
    "tasks": "settings models ops tokenizer",
    "rollout": "settings models ops",
    "buffer": "",
    "trainer": "settings models ops costs",
    "publish": "settings models",
    "checks": "settings models costs orchestrate",
    "sim": "settings costs orchestrate",
    "simulate": "settings sim",
    "report": "settings runtime",  # a workdir in a bucket
    "runtime": "settings models ops costs orchestrate checks tokenizer tasks rollout buffer trainer publish",
    "serving": "settings models orchestrate checks tokenizer tasks rollout runtime trainer publish",
    "programs": "settings models checks tokenizer runtime serving trainer report",
}
ONLY_TYPES = ("orchestrate",)  # rooms that do not import `basics` either
ALONE = ("types", "basics")

# What a stage knows about its own settings, in pages of the standard library that the checks ask.
RULES = {
    "tasks.mixture", "tasks.solved", "tasks.environment", "rollout.shapes", "buffer.layout", "trainer.objective",
}  # fmt: skip


@functools.cache
def modules():
    """Dotted name, without the package's -> its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])] = path
    return found


@functools.cache
def imports(module):
    """{module of the package: line} of every import in the file."""
    found = {}
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: imports are absolute"
            names = [_module_of(node.module, alias.name) for alias in node.names]
        for name in names:
            if name == "dora_jax":
                found["__init__"] = node.lineno
            elif name.startswith("dora_jax."):
                found[name.removeprefix("dora_jax.")] = node.lineno
    return found


def _module_of(package, name):
    full = f"{package}.{name}"
    return full if full.removeprefix("dora_jax.") in modules() else package


@functools.cache
def room(module):
    first = module.partition(".")[0]
    return next((name for name, files in ROOMS.items() if first in files.split()), first)


def allowed(module, imported):
    source, target = room(module), room(imported)
    if source == target or source == "bench":
        return True
    if source == "checks" and imported in RULES:
        return True
    if target in ALONE and source not in ALONE:
        return target == "types" or source not in ONLY_TYPES
    return target in ALLOWED[source].split()


def test_every_room_imports_only_what_the_table_allows():
    wrong = [
        f"dora_jax/{module.replace('.', '/')}.py:{line} imports {imported}: {room(module)} may not import {room(imported)}"
        for module in modules()
        for imported, line in imports(module).items()
        if not allowed(module, imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_names_no_edge_that_is_not_there():
    used = {(room(module), room(imported)) for module in modules() for imported in imports(module)}
    idle = [(a, b) for a, allowed in ALLOWED.items() for b in allowed.split() if (a, b) not in used]
    assert not idle, f"ALLOWED and ROOMS can lose {idle}"
    assert {room(module) for module in modules()} - {"bench"} == set(ALLOWED), "every room has a line in ALLOWED"
    assert all(rule in modules() for rule in RULES)
    listed = {name for files in ROOMS.values() for name in files.split()}
    assert listed == {m for m in modules() if "." not in m and modules()[m].name != "__init__.py"} | {"__init__"}


def test_stages_import_no_other_stage_and_only_runtime_and_bench_know_them_all():
    rooms = {a: {room(t) for m in modules() if room(m) == a for t in imports(m)} for a in map(room, modules())}
    for stage in STAGES:
        assert not rooms[stage] & set(STAGES) - {stage}
    assert [name for name, known in rooms.items() if known >= set(STAGES) and name != "bench"] == ["runtime"]
    assert not {name for name, known in rooms.items() if "bench" in known} - {"bench"}


def test_no_module_imports_itself_through_others():
    """Every circle of the import graph, by the modules that can reach themselves."""
    circles = [
        sorted(part) for part in strong_components({m: set(imports(m)) - {m} for m in modules()}) if len(part) > 1
    ]
    assert not circles, "\n".join(" <-> ".join(circle) for circle in circles)


def strong_components(graph):
    """Tarjan's algorithm: sets of nodes that reach each other."""
    number, low, stack = {}, {}, []

    def visit(node):
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in graph[node]:
            if other not in number:
                yield from visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == number[node]:
            at = stack.index(node)
            yield set(stack[at:])
            del stack[at:]

    for node in graph:
        if node not in number:
            yield from visit(node)


NO_JAX = "import sys, {}; sys.exit([m for m in ('jax', 'flax', 'torch') if m in sys.modules] or 0)"


def test_what_runs_before_a_device_is_touched_starts_without_jax():
    """flags is the command line of every program: validation and --dry_run are in it."""
    code = NO_JAX.format("dora_jax.simulate, dora_jax.validate, dora_jax.flags, dora_jax.sweep, dora_jax.hub")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


OPTIONAL = ("torch", "transformers", "vllm", "tunix", "ray", "grpc", "libtpu", "flashinfer", "tokamax", "jetstream")
IMPORT_ALL = f"""
import importlib, pkgutil, sys
import dora_jax
for module in pkgutil.walk_packages(dora_jax.__path__, "dora_jax."):
    if module.name != "dora_jax.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] not in {OPTIONAL}:
                raise
            print(module.name, "needs", error.name)
"""


def test_every_module_can_be_imported_after_every_other():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


LONGEST_FILE = 800  # lines of one topic
LONG, LONGEST = 40, 80  # lines of a function
KERNELS = ("ops.", "rollout.device_calls.")  # whose longest function may be a kernel


def test_no_file_has_more_than_800_lines():
    counts = {module: path.read_text().count("\n") for module, path in modules().items()}
    assert not {module: count for module, count in counts.items() if count > LONGEST_FILE}


def test_nine_functions_in_ten_have_at_most_40_lines_and_none_has_more_than_80():
    lengths = {
        f"{module}.{node.name}:{node.lineno}": node.end_lineno - node.lineno + 1
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert sum(length > LONG for length in lengths.values()) <= len(lengths) / 10
    assert not {n: length for n, length in lengths.items() if length > LONGEST and not n.startswith(KERNELS)}
