"""Every planted fault of mutants.py makes its test fail; all of them are tried each night, and three each time."""

import pytest

from tests.mutants import MUTANTS, ROOT, run

QUICK = [mutant for mutant in MUTANTS if not mutant.slow]
NIGHTLY = [pytest.param(mutant, marks=(pytest.mark.slow, pytest.mark.nightly)) for mutant in QUICK[3:]]


@pytest.mark.parametrize("mutant", [*QUICK[:3], *NIGHTLY], ids=lambda mutant: mutant.name)
def test_killed(mutant, tmp_path):
    result = run(mutant, tmp_path)
    assert result.verdict == "killed", result.output[-2000:]


def test_names_are_unlike_and_each_text_stands_once_in_its_file():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {(ROOT / "dora_jax" / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS} == {1}
    for mutant in MUTANTS:
        file, _, name = mutant.killer.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(), mutant.name
