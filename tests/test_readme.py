"""The pages are true: their commands run as a reader runs them, page after page in the order of the README's index, in
one folder; sizes are cut by flags. What they link to and name exists."""

import re

import pytest

from dora_jax.trainer import objective
from tests.soak.walk import BLOCK, PAGES, ROOT, UNRUN, blocks, walk

WORDS = 1200  # of the README


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_command_of_every_page_runs(tmp_path):
    for page, text, done, _ in walk(tmp_path):
        assert done.returncode == 0, f"{page}:\n{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_the_trainers_page_names_every_objective():
    page = (ROOT / "dora_jax/trainer/README.md").read_text()
    for names in objective.KNOWN.values():
        assert not [name for name in names if f"`{name}`" not in page]


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", (ROOT / page).read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= WORDS
    linked = re.findall(r"\]\(([^)#:]+\.md)\)", text)
    assert set(linked) == set(PAGES) - {"README.md"}
    folders = ("dora_jax", "configs", "launch", "tests")
    pages = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.md")}
    assert pages - set(PAGES) == {page for page in pages if page.startswith("tests/data/")}
    assert not [page for page in UNRUN if list(blocks(page))]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_names_files_that_exist(page):
    text = (ROOT / page).read_text()
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
        place = (ROOT / page).parent / target if target else ROOT / page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place.resolve().relative_to(ROOT)), f"{target}#{anchor}"
    for name in re.findall(r"\b(?:configs|launch|tests|dora_jax)/[\w/]+\.(?:py|sh)", text):
        assert (ROOT / name).exists(), name
    for module in re.findall(r"python -m ((?:dora_jax|tests)[a-z_.]*[a-z])(?![\w.])", text):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


def test_the_architecture_names_files_that_exist():
    text = (ROOT / "dora_jax" / "README.md").read_text()
    named = re.findall(r"`((?:[\w.]+/)*[\w]*(?:\.py|\.txt|/))`", text)
    assert len(named) > 40
    rooms = [ROOT / "dora_jax", ROOT, *(ROOT / "dora_jax").glob("*/")]
    for name in named:
        assert any((room / name).exists() for room in rooms), name
