"""The verdict on a program is the same each time, and its memory is bounded, in small: tests/soak/verdicts.py has more
programs and times."""

import pytest

from tests.fakes.sandbox import needs_sandbox
from tests.soak.verdicts import ATTACKS, KINDS, verdicts


@needs_sandbox
def test_each_kind_of_program_has_one_verdict():
    (line,) = verdicts(number=len(KINDS), times=2, no_attacks=True)
    assert "0 whose verdict differs, 0 that did not end well" in line


@needs_sandbox
@pytest.mark.slow
def test_what_takes_memory_in_any_way_ends_near_its_limit_or_is_bounded():
    lines = list(verdicts(number=1, times=1))[1:]
    assert len(lines) == len(ATTACKS)
    for kind in ("four processes", "shared memory of four processes"):
        (line,) = [line for line in lines if line.startswith(f"{kind}  ")]
        assert line.endswith("ended by: memory")
