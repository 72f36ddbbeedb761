"""Storage that fails under a whole workdir: a small twin of tests/soak/storage_faults.py, and its judges' proof."""

from collections import Counter

import pytest

from tests.soak.storage_faults import LIVE, MODES, TRACE, WRONG, trial

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


@pytest.mark.parametrize("number", [1, 9, 15, 20])
def test_a_trial_depends_on_its_number_alone(number):
    assert trial(number) == trial(number)
