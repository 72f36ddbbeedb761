"""Golden scenarios: `tests/scenarios/*.txt`, facts in, decisions out, to be read by a person.

A line `> verb arguments` is a fact (or a question, `> ? waits`), the indented lines under it are the orchestrator's
answer. `config:` holds the fields of OrchestratorConfig, `answers:` the facts that the body returns by itself, at
once: loaded, started, resumed, parked, cancelled, moved, scored. After a change that is meant, write the answers anew:

    DORA_REWRITE=1 python -m pytest tests/test_orchestrator_scenarios.py        and read the diff.
"""

import os
from pathlib import Path

import pytest

from tests.fakes.scenario import play

FILES = sorted(Path(__file__).with_name("scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path):
    text = path.read_text()
    now = play(text)
    if os.environ.get("DORA_REWRITE"):
        path.write_text(now)
    assert now == text, f"{path.name}: the answers have changed; if that is meant, run with DORA_REWRITE=1"


def test_there_are_scenarios():
    assert len(FILES) >= 12
