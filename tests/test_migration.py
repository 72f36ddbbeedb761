"""Which samples move: tables."""

import pytest

from dora_jax.orchestrate.balance import EmptiedInstance, Mover, StayingInstance, plan_moves, worth_moving
from dora_jax.types import SampleId


def mover(group, index=0, tokens=10, pages=2):
    return Mover(SampleId(group, index), tokens, pages)


def sink(id, used, slots=4, free_pages=100, speed=1.0):
    return StayingInstance(id, used, slots, free_pages, speed)


def short(moves):
    return [(id.group_id, src, dst) for id, src, dst in moves]


def test_a_source_is_emptied_whole_or_not_at_all():
    source = EmptiedInstance(0, [mover(1), mover(2), mover(3)])
    assert plan_moves([source], [sink(9, used=2)], 100) == []
    assert len(plan_moves([source], [sink(9, used=1)], 100)) == 3


def test_the_source_with_the_fewest_samples_goes_first():
    small, large = EmptiedInstance(5, [mover(1)]), EmptiedInstance(2, [mover(2), mover(3)])
    assert short(plan_moves([large, small], [sink(9, used=3)], 100)) == [(1, 5, 9)]


def test_the_longest_sample_goes_to_the_least_loaded_sink():
    source = EmptiedInstance(0, [mover(1, tokens=5), mover(2, tokens=50), mover(3, tokens=20)])
    moves = short(plan_moves([source], [sink(8, used=2), sink(9, used=0)], 100))
    assert moves == [(2, 0, 9), (3, 0, 9), (1, 0, 8)]


def test_a_faster_instance_counts_as_less_loaded():
    assert short(plan_moves([EmptiedInstance(0, [mover(1)])], [sink(8, 1), sink(9, 1, speed=2.0)], 9)) == [(1, 0, 9)]


def test_pages_bound_a_sink():
    source = EmptiedInstance(0, [mover(1, pages=4), mover(2, pages=4)])
    assert plan_moves([source], [sink(9, used=0, free_pages=7)], 100) == []
    assert len(plan_moves([source], [sink(9, used=0, free_pages=8)], 100)) == 2


def test_ties_go_by_id():
    assert short(plan_moves([EmptiedInstance(0, [mover(1)])], [sink(9, 1), sink(8, 1)], 9)) == [(1, 0, 8)]


def test_a_mass_migration_is_bounded():
    sources = [EmptiedInstance(i, [mover(10 * i + j) for j in range(3)]) for i in range(4)]
    assert len(plan_moves(sources, [sink(99, 0, slots=50)], 7)) == 6


@pytest.mark.parametrize(
    ("left_tokens", "move_s", "worth"),
    [
        ([10], 0.0, True),  # nothing measured yet
        ([5, 50], 19.0, True),  # 8 slots x 50 tokens x 0.1 s = 40 slot-seconds
        ([5, 50], 21.0, False),
        ([10, 10], 4.0, True),  # about to end: 8 slot-seconds
        ([10, 10], 4.1, False),
    ],
)
def test_a_move_must_gain_more_than_it_costs(left_tokens, move_s, worth):
    assert worth_moving(left_tokens, slots=8, token_s=0.1, move_s=move_s) is worth
