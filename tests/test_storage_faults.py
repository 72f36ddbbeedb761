"""Storage that fails under the journal: a small twin of tests/soak/storage_faults.py, and its judge's proof."""

from collections import Counter

from tests.soak.storage_faults import EXACT, FAULTS, WRONG, trial


def test_runs_over_storage_that_fails_go_on_exactly():
    trials = [trial(number) for number in range(120)]
    assert [each for each in trials if each.verdict != EXACT] == []
    happened = Counter()
    for each in trials:
        happened[each.place, each.fault] += each.happened
    kinds = {(place, fault) for place, faults in FAULTS.items() for fault in faults}
    assert {kind for kind in kinds if not happened[kind]} == set(), "or they prove nothing"
    assert len({each.mode for each in trials}) == 4


def test_a_reader_that_loses_the_last_fact_is_found():
    """In a folder and in a bucket: an outsider knows of a sample that is generated again, or of a step made otherwise."""
    found = {each.place for each in (trial(number, planted=True) for number in range(40)) if each.verdict == WRONG}
    assert found == set(FAULTS)
