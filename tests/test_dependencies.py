"""Dependencies: what the package imports, pyproject.toml declares and requirements.txt pins."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = {"absl": "absl-py", "orbax": "orbax-checkpoint"}  # import name -> distribution
RIVALS = {
    "datasets",
    "flashinfer",
    "optimum",
    "torch",
    "transformers",
    "trl",
    "tunix",
}  # benches compare with them where they are installed
BY_HAND = {"jetstream", "verifiers"}  # a comment beside the extra says how it is installed


def imported():
    """(distribution, the file that imports it), of everything that is neither ours nor the standard library's."""
    for path in sorted((ROOT / "dora_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            for top in {module.split(".")[0] for module in modules} - {*sys.stdlib_module_names, "dora_jax"}:
                yield canonical(NAMES.get(top, top)), path.relative_to(ROOT)


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements):
    return {canonical(re.match(r"[\w.-]+", line).group()) for line in requirements}


def test_every_import_is_declared_and_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = names(project["dependencies"])
    extras = {name for lines in project["optional-dependencies"].values() for name in names(lines)}
    pinned = names(re.findall(r"^[\w.-]+(?===)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    found = list(imported())
    for name, path in found:
        if name not in BY_HAND and not (name in RIVALS and path.parts[1] == "bench"):
            assert name in declared | extras, f"{path} imports {name}, and pyproject.toml does not declare it"
            assert name in pinned | extras, f"{path} imports {name}, and requirements.txt does not pin it"
    unused = declared - {name for name, _ in found}
    assert not unused, f"pyproject.toml declares {unused}, and nothing imports it"
