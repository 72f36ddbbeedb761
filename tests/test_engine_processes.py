"""One tensor-parallel instance over two processes: both make the same plan from the same inbox, and what one would."""

import pytest

from tests.fakes.two_processes import alone_and_together


@pytest.mark.slow
def test_two_processes_sample_what_one_does():
    alone, together = alone_and_together("engine_process")
    assert together[0] == together[1] and len(alone) == 6
    for id, (tokens, logprobs) in alone.items():
        assert together[0][id][0] == tokens
        assert together[0][id][1] == pytest.approx(logprobs, abs=1e-5)
