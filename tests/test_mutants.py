"""Every planted fault of mutants.py makes its test fail."""

import pytest

from tests.mutants import MUTANTS, run


@pytest.mark.parametrize("mutant", [each for each in MUTANTS if not each.slow], ids=lambda mutant: mutant.name)
def test_killed(mutant, tmp_path):
    result = run(mutant, tmp_path)
    assert result.verdict == "killed", result.output[-2000:]


def test_names_are_reported_once_and_slow_ones_are_few():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
