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

# A folder is a room, however deep; a file at the top is one of the programs, or a room of its own that is listed here.
PROGRAMS = "__init__ __main__ api train sft evaluate serve export_hf sweep top"
LONELY = ("types", "version", "publish", "simulate")

# room -> the rooms that it may import, beside itself, `types`, `version` and `base`
ALLOWED = {
    "aot": "config costs models models/families plan runtime/assembly trainer",
    "buffer": "",
    "cli": "aot config models models/families plan runtime/journal trainer",
    "config": "models models/families",
    "costs": "config models models/families orchestrate",
    "models": "models/families tasks/sandbox",
    "models/families": "",
    "ops": "models",
    "orchestrate": "",
    "plan": "config costs models models/families orchestrate",
    "programs": "cli config models plan report runtime runtime/assembly runtime/common runtime/training serving "
    "trainer",
    "publish": "config models",
    "report": "config runtime/journal",
    "rollout": "config models models/families ops",
    "runtime": "buffer config models models/families orchestrate plan publish rollout runtime/assembly "
    "runtime/cluster runtime/common runtime/instances runtime/journal runtime/observe "
    "runtime/training runtime/transfer tasks tasks/environments trainer",
    "runtime/assembly": "buffer config models models/families orchestrate plan publish rollout runtime/common "
    "runtime/journal tasks trainer",
    "runtime/cluster": "config models orchestrate plan publish rollout runtime/assembly runtime/common "
    "runtime/instances runtime/journal runtime/training runtime/transfer trainer",
    "runtime/common": "buffer orchestrate rollout tasks tasks/environments trainer",
    "runtime/instances": "orchestrate rollout runtime/common runtime/journal",
    "runtime/journal": "config orchestrate runtime/common trainer",
    "runtime/observe": "config costs orchestrate rollout runtime/common runtime/instances tasks trainer",
    "runtime/training": "config models ops orchestrate plan runtime/common runtime/journal tasks tasks/environments "
    "trainer",
    "runtime/transfer": "models models/families orchestrate publish rollout runtime/common runtime/journal",
    "serving": "config models models/families orchestrate plan publish rollout runtime runtime/assembly "
    "runtime/common runtime/instances runtime/journal runtime/observe tasks trainer",
    "sim": "config costs orchestrate",
    "simulate": "cli config sim",
    "tasks": "config models ops tasks/sandbox",
    "tasks/environments": "config models tasks tasks/sandbox",
    "tasks/sandbox": "",
    "trainer": "config costs models models/families ops",
}
ANYWHERE = ("types", "version", "base")  # import nothing but each other
ONLY_TYPES = ("orchestrate",)  # does not import `base` either

# What a stage knows about its own settings, in pages of the standard library that the plan asks.
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
    folder = modules()[module].relative_to(PACKAGE).parent.as_posix()
    if folder != ".":
        return folder
    return module if module in LONELY else "programs"


def allowed(module, imported):
    source, target = room(module), room(imported)
    if source == target or source == "bench":
        return True
    if source == "plan" and imported in RULES:
        return True
    if target in ANYWHERE:
        return target == "types" or source not in ONLY_TYPES
    return target in ALLOWED[source].split()


def test_every_room_imports_only_what_the_table_allows():
    wrong = [
        f"dora_jax/{module.replace('.', '/')}.py:{line} imports {imported}: {room(module)} may not import "
        f"{room(imported)}"
        for module in modules()
        for imported, line in imports(module).items()
        if not allowed(module, imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_names_no_edge_that_is_not_there():
    used = {(room(module), room(imported)) for module in modules() for imported in imports(module)}
    idle = [(a, b) for a, allowed in ALLOWED.items() for b in allowed.split() if (a, b) not in used]
    assert not idle, f"ALLOWED can lose {idle}"
    assert {room(module) for module in modules()} - {"bench", *ANYWHERE} == set(ALLOWED), "every room has a line"
    assert all(rule in modules() for rule in RULES)
    assert {m for m in modules() if room(m) == "programs"} == set(PROGRAMS.split())


def test_stages_import_no_other_stage_and_only_the_runtime_and_the_bench_know_them_all():
    rooms = {
        a: {room(t).partition("/")[0] for m in modules() if room(m) == a for t in imports(m)}
        for a in map(room, modules())
    }
    for name, known in rooms.items():
        if (stage := name.partition("/")[0]) in STAGES:
            assert not known & set(STAGES) - {stage}, name
    knowing = {name for name, known in rooms.items() if known >= set(STAGES)} - {"bench"}
    assert {name.partition("/")[0] for name in knowing} <= {"runtime"}
    assert not {name for name, known in rooms.items() if "bench" in known} - {"bench"}


def test_no_folder_imports_itself_through_others():
    """The folders' graph has no circle. A file at the top is a room of its own here, the programs too."""
    graph = {}
    for module in modules():
        own = module if room(module) == "programs" else room(module)
        others = {t if room(t) == "programs" else room(t) for t in imports(module)}
        graph.setdefault(own, set()).update(others - {own})
    circles = [sorted(part) for part in strong_components(graph) if len(part) > 1]
    assert not circles, "\n".join(" <-> ".join(circle) for circle in circles)


def test_few_files_lie_at_the_top():
    files = [path.name for path in PACKAGE.iterdir() if path.suffix == ".py"]
    assert len(files) <= 14, sorted(files)


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
    code = NO_JAX.format(
        "dora_jax.simulate, dora_jax.plan.validate, dora_jax.cli.flags, dora_jax.sweep, dora_jax.plan.hub"
    )
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
