"""The legend has every metric that a run writes, and its page is as the code has it. Run as a program, this file writes
that page anew."""

import ast
import functools
import re
from pathlib import Path

import pytest

from dora_jax.report import legend

PACKAGE = Path(__file__).parents[1] / "dora_jax"
PAGE = PACKAGE / "report" / "README.md"
ROOMS = {name.partition("/")[0] for name in legend.METRICS | legend.EVALUATION}
NAME = re.compile(rf"(?:{'|'.join(sorted(ROOMS))})/[a-z_0-9/*]+")
SOMEWHERE = re.compile(rf"[\"'](?:{'|'.join(sorted(ROOMS))})/")
SILENT = ("bench", "sim", "report", "serving")  # what these name goes into no metrics.jsonl


@functools.cache
def written():
    """{metric name in the package's source, with * for what is filled in at run time: where}."""
    return dict(_written())


def _written():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in SILENT:
            continue
        source = path.read_text()
        if not SOMEWHERE.search(source):
            continue
        tree = ast.parse(source)
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
                text = "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                text = node.value
            else:
                continue
            if NAME.fullmatch(text):
                yield text, f"{path.relative_to(PACKAGE)}:{node.lineno}"


def covered(name):
    known = {*legend.METRICS, *legend.EVALUATION}
    prefix = name.partition("*")[0]
    return legend.meaning(name) or name.endswith("/") or ("*" in name and any(k.startswith(prefix) for k in known))


def test_every_metric_of_the_source_is_in_the_legend():
    found = written()
    assert len(found) > 50 and "lag/max" in found
    assert not {name: where for name, where in found.items() if not covered(name)}


def test_the_legend_names_no_metric_that_nothing_writes():
    found = set(written())
    prefixes = {name.partition("*")[0] for name in found if "*" in name}
    prefixes |= {name for name in found if name.endswith("/")}
    idle = [
        name
        for name in legend.METRICS | legend.EVALUATION
        if name not in found and not any(name.startswith(prefix) for prefix in prefixes)
    ]
    assert not idle


def test_a_metric_keeps_its_name():
    """tests/data/metric_names.txt: the metrics of 10b51e5."""
    kept = (Path(__file__).parent / "data/metric_names.txt").read_text().split()
    assert not set(kept) - {*legend.METRICS, *legend.EVALUATION} and len(kept) > 90


@pytest.mark.parametrize("name, pattern", [("lag/7", "lag/*"), ("eval/reward/term/right", "eval/reward/term/*")])
def test_what_a_run_chooses_is_found_by_its_pattern(name, pattern):
    assert legend.meaning(name) == (legend.METRICS | legend.EVALUATION)[pattern]
    assert legend.meaning("no/such") is None


def test_the_page_is_as_the_legend_has_it():
    assert PAGE.read_text() == legend.page(), "write it anew: python tests/test_legend.py"


if __name__ == "__main__":
    PAGE.write_text(legend.page())
