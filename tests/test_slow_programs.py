"""Slow environments, many at once, in small: tests/soak/slow_programs.py has the sizes that a run meets."""

from tests.soak.slow_programs import slow_programs


def test_none_of_many_slow_episodes_fails_alone_or_in_a_run():
    """The run's step is as long as real clocks make it, which this does not judge."""
    lines = list(slow_programs(waits=40, blocks=80, programs=0, seconds=0.2, steps=1, most_off=float("inf")))
    assert "   40 episodes at once, 0 failed" in lines[0] and "   80 episodes at once, 0 failed" in lines[1]
    for line in lines[2:]:
        assert "0 failed" in line and int(line.split(";")[1].split()[0]) > 4
