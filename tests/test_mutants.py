"""Every planted fault of mutants.py makes its test fail; DORA_NIGHTLY=1 bash tests/run.sh tries them."""

import pytest

from tests.mutants import MUTANTS, ROOT, run


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [each for each in MUTANTS if not each.slow], ids=lambda mutant: mutant.name)
def test_killed(mutant, tmp_path):
    result = run(mutant, tmp_path)
    assert result.verdict == "killed", result.output[-2000:]


def test_names_are_unlike_and_each_text_stands_once_in_its_file():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert (ROOT / "dora_jax" / mutant.file).read_text().count(mutant.old) == 1, mutant.name
        file, _, name = mutant.killer.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(), mutant.name
