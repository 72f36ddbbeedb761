"""Rules of the tests: one import root, no test file imports another, and tests use what the package makes public."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PUBLIC_ANYWAY = {"_asdict", "_exit", "_fields", "_replace"}  # of namedtuple and os
MOST_LINES = 800
BY_NAME = {"delattr", "getattr", "hasattr", "object", "patch", "setattr"}  # of builtins, monkeypatch and mock


@functools.cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text())))


def imported(path):
    """The modules that a file imports, as written; of `from a import b` both a and a.b."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def private(name):
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC_ANYWAY


def private_accesses(path):
    """Every `x._name` where x is not self, every `from module import _name`, and every "_name" that is set or got."""
    for node in nodes(path):
        names = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
            names = [str(arg.value).split(".")[-1] for arg in node.args if isinstance(arg, ast.Constant)]
        if any(map(private, names)):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"


def test_a_helper_has_one_name_and_no_test_file_imports_another():
    own = {path.stem for path in TESTS} - {"__init__"}
    for path in TESTS:
        for name in imported(path):
            assert name.split(".")[0] not in own, f"{path.name}: {name} is imported as tests.fakes.{name}"
            assert not name.startswith("tests.test_"), f"{path.name}: what {name} shares belongs in tests/fakes"


def test_nothing_but_the_tests_imports_the_tests():
    for folder in ("dora_jax", "configs", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"^ *(from|import) +tests\b", path.read_text(), re.MULTILINE), path


def test_private_names_of_the_package_are_left_alone():
    found = [access for path in TESTS for access in private_accesses(path)]
    assert not found, "the package makes it public, or the test looks at what can be seen:\n" + "\n".join(found)


def test_the_readme_says_what_each_fake_stands_for():
    text = (ROOT / "tests/README.md").read_text()
    for path in TESTS:
        if path.parent.name == "fakes" and path.stem != "__init__":
            assert f"`{path.stem}`" in text, path.name


def test_a_file_is_read_in_one_go():
    assert not [path.name for path in TESTS if len(path.read_text().splitlines()) > MOST_LINES]
