"""Storage that fails under a whole workdir: a small twin of tests/soak/storage_faults.py, and its judges' proof."""

import random
from collections import Counter

import pytest

from dora_jax.config import CheckpointSection
from dora_jax.orchestrate.modes import OrchestratorConfig
from tests.fakes.faulty_storage import Faults
from tests.fakes.orchestrator_shape import Shape
from tests.fakes.virtual_workdir import History
from tests.soak.storage_faults import EXACT, LIVE, MODES, TRACE, WRONG, trial

TWIN = 216  # each kind twice in each mode


def test_runs_over_storage_that_fails_go_on_from_the_best_that_is_left():
    trials = [trial(number) for number in range(TWIN)]
    assert [(number, each) for number, each in enumerate(trials) if each.verdict in (WRONG, TRACE)] == []
    happened = Counter()
    for each in trials:
        happened[each.place, each.kind] += each.happened
    kinds = {(place, kind) for place, kinds in LIVE.items() for kind in kinds}
    kinds |= {(place, kind) for place in LIVE for kind in ("flip", "short", "missing", "stale")}
    assert {kind for kind in kinds if not happened[kind]} == set(), "or they prove nothing"
    assert {each.mode for each in trials} == set(MODES)


@pytest.mark.parametrize("planted", ["reader", "restore"])
def test_a_reader_that_loses_the_last_fact_and_a_restore_that_lies_are_found(planted):
    """In a folder and in a bucket, by the outsider and by the judge of damage."""
    found = {each.place for each in (trial(number, planted) for number in range(54)) if each.verdict == WRONG}
    assert found == set(LIVE)


def test_no_checkpoint_outlives_a_power_cut_that_the_journal_does_not_know():
    """Where the oldest live version stays what it was, so that nothing else makes the journal durable."""
    cut = trial(2890)
    assert (cut.kind, cut.happened, cut.verdict) == ("power", 2, EXACT), cut


@pytest.mark.parametrize("number", [1, 9, 15, 20])
def test_a_trial_depends_on_its_number_alone(number):
    assert trial(number) == trial(number)


def test_where_the_journal_ends_before_the_newest_checkpoint_the_run_goes_on_from_that(tmp_path):
    draw, config = random.Random(0), OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=8)
    history = History(config, Shape(), tmp_path, None, draw)
    history.checkpoint = CheckpointSection(every=1, keep=3)
    history.since = lambda facts: history.published >= 5 and facts >= 3
    assert history.life(Faults("", draw)) is None
    folder = tmp_path / "run"
    for segment in sorted((folder / "journal").glob("*.log"))[-3:]:
        segment.write_bytes(b"")
    newest = max(int(path.parent.name) for path in (folder / "checkpoints").glob("*/manifest.json"))
    history.judged = False
    history.life(Faults("", draw), begin_only=True)
    assert history.resumed.version >= newest
    assert any(f"before checkpoint {newest}; the run goes on from" in note for note in history.quiet.notes)
