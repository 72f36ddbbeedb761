"""The same step where the mesh spans two processes: values of the whole batch, whichever process holds them."""

import pytest

from tests.fakes.two_processes import alone_and_together


@pytest.mark.slow
def test_two_processes_make_the_step_of_one():
    alone, together = alone_and_together("trainer_process")
    assert together[0] == together[1]
    assert alone["metrics"]["trainer/value_loss"] > 0 and len(alone["weights"]) > 10
    for name, value in alone["metrics"].items():
        assert together[0]["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert together[0]["weights"] == pytest.approx(alone["weights"], rel=1e-5)
