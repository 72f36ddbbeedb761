"""The words of the package and its pages: those that nobody else uses do not stand in it, those that mean too many things
may only become fewer."""

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BANNED = {  # word -> what to write
    "life": "incarnation",
    "lives": "incarnations",
    "parcel": "request",
    "berth": "resident slot",
    "told": "sent, received, reported",
    "said": "sent, reported",
    "heard": "received",
    "undrawn": "observation tokens",
    "doubt": "suspect",
    "spoilt": "restarts",
    "blame": "field_context",
    "walls": "sandbox level",
    "doorkeeper": "listener",
    "stranger": "unverified peer",
    "unjudged": "zero_weights",
    "debts": "outstanding",
}
PHRASES = ("come home", "give back", "put aside", "the house", "the rooms")
FORMER = {  # what files and commands of earlier versions call it -> where it is read
    "walls": {"base/old_paths.py", "config/__init__.py"},
    "life": {"orchestrate/snapshot.py"},
    "lives": {"orchestrate/snapshot.py"},
    "spoilt": {"orchestrate/snapshot.py"},
    "said": {"report/findings.py"},
}
AMBIGUOUS = {  # of the wheel: in identifiers, strings, comments
    "ask": 68,
    "asks": 65,
    "adopt": 18,
    "begun": 87,
    "desk": 17,
    "door": 1,
    "due": 114,
    "found": 519,
    "gap": 92,
    "gaps": 54,
    "home": 45,
    "host": 359,
    "hosts": 151,
    "job": 287,
    "jobs": 38,
    "kept": 299,
    "know": 18,
    "knows": 47,
    "link": 124,
    "part": 408,
    "parts": 310,
    "recorded": 72,
    "say": 46,
    "says": 166,
    "unit": 386,
    "units": 100,
    "words": 104,
}
FRAGMENTS = 0  # docstrings that begin with a genitive or a demonstrative
BEGINNINGS = ("Of", "Those", "That", "As")
# Python 3.12 splits f-strings
TEXT = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


@functools.cache
def words_of(path):
    """Words of identifiers (split at _ and capitals), strings and comments."""
    found = Counter()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            found.update(word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", token.string))
        elif token.type in TEXT:
            found.update(re.findall(r"[a-z]+", token.string.lower()))
    return found


def modules():
    return sorted((ROOT / "dora_jax").rglob("*.py"))


def pages():
    return [ROOT / "README.md", *(page for name in ("dora_jax", "configs", "launch") for page in (ROOT / name).rglob("*.md"))]  # fmt: skip


@pytest.mark.parametrize("word", BANNED)
def test_a_word_that_nobody_else_uses_is_not_used(word):
    package = ROOT / "dora_jax"
    found = {str(path.relative_to(package)) for path in modules() if words_of(path)[word]}
    assert found <= FORMER.get(word, set()), f"write {BANNED[word]}"
    found = [page.name for page in pages() if re.search(rf"\b{word}s?\b", page.read_text().lower())]
    assert not found, f"write {BANNED[word]}"


def test_neither_do_the_tests_say_told_and_heard():
    """Names say what they hold: notes, output, a message, a reason, commands; facts are sent, received, reported."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert not {path.name: words for path in paths if (words := {"said", "told", "heard"} & set(words_of(path)))}


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_that_nobody_else_uses_is_not_used(phrase):
    places = [*modules(), *pages()]
    assert not [path.name for path in places if re.search(rf"\b{phrase}\b", path.read_text().lower().replace("_", " "))]


def test_words_that_mean_many_things_become_fewer():
    counts = sum((words_of(path) for path in modules() if "bench" not in path.parts), Counter())
    assert {word: counts[word] for word in AMBIGUOUS if counts[word] > AMBIGUOUS[word]} == {}
    slack = {word: counts[word] for word, figure in AMBIGUOUS.items() if figure > 1.05 * counts[word] + 5}
    assert not slack, "they have become fewer: lower the figures"


def test_docstrings_begin_as_sentences_do():
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    paths = [*modules(), *(ROOT / "tests").rglob("*.py")]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
    found = [text for node in nodes if (text := ast.get_docstring(node)) and text.split()[0] in BEGINNINGS]
    assert len(found) <= FRAGMENTS, found


def test_a_class_has_a_name_of_its_own():
    """One name means one class, wherever a reader meets it; what a file keeps to itself, and benches, excepted."""
    places = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())) if "bench" not in path.parts else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
