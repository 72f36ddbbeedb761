"""Which instance serves which version: tables."""

import pytest

from dora_jax.orchestrate.partition import Berth, Seat, plan_berths, plan_partition, plan_shares


@pytest.mark.parametrize(
    ("instances", "demand", "need", "shares"),
    [
        (4, {}, {}, {}),
        (4, {3: 10}, {}, {3: 4}),
        (8, {0: 10, 1: 30}, {}, {0: 2, 1: 6}),  # exact
        (8, {0: 10, 1: 10, 2: 12}, {}, {0: 3, 1: 2, 2: 3}),  # 2.5, 2.5, 3: the remainder goes to the older of equals
        (4, {0: 14, 1: 11}, {}, {0: 2, 1: 2}),  # 2.24, 1.76: to the larger remainder
        (4, {0: 1, 1: 99}, {}, {0: 1, 1: 3}),  # at least one
        (4, {0: 20, 1: 80}, {0: 2}, {0: 2, 1: 2}),  # at least what its samples need
        (4, {0: 20, 1: 80}, {0: 3, 1: 3}, {0: 3, 1: 1}),  # not enough for all: the newest goes without
        (2, {0: 1, 1: 1, 2: 50}, {}, {0: 1, 1: 1, 2: 0}),  # fewer instances than versions: the oldest first
        (1, {4: 1, 5: 9}, {}, {4: 1, 5: 0}),
    ],
)
def test_shares(instances, demand, need, shares):
    assert plan_shares(instances, demand, need) == shares
    assert sum(shares.values()) <= instances


@pytest.mark.parametrize(
    ("demand", "shares"),
    [
        ({0: 3, 1: 3, 2: 4}, {0: 2, 1: 2, 2: 1}),  # 1.5, 1.5, 2 of 5 round to 6: the newest gives one up
        ({0: 13, 1: 13, 2: 74}, {0: 1, 1: 1, 2: 3}),  # 0.65, 0.65, 3.7 round to 6
        ({0: 12, 1: 12, 2: 26}, {0: 1, 1: 1, 2: 3}),  # 1.2, 1.2, 2.6 round to 5
    ],
)
def test_the_paper_rounds_plainly(demand, shares):
    assert plan_shares(5, demand, {}, spread="round") == shares


def test_a_version_gets_no_more_than_it_has_a_use_for():
    assert plan_shares(8, {0: 30, 1: 10}, {}, cap={0: 3}) == {0: 3, 1: 5}
    assert plan_shares(8, {0: 30}, {}, cap={0: 3}) == {0: 3}  # nobody wants the rest
    assert plan_shares(8, {0: 30, 1: 10}, {}, cap={0: 0}) == {0: 1, 1: 7}  # its last host was lost


def seats(*rows):
    return [Seat(id, version, samples, 8) for id, version, samples in rows]


def test_nothing_changes_where_shares_are_met():
    assert plan_partition(seats((0, 0, 4), (1, 1, 4)), {0: 1, 1: 1}) == {}


def test_the_fewest_samples_are_disturbed_and_ties_go_by_id():
    now = seats((0, 0, 5), (1, 0, 2), (2, 0, 2), (3, 0, 7))
    assert plan_partition(now, {0: 3, 1: 1}) == {2: 1}
    assert plan_partition(now, {0: 2, 1: 2}) == {1: 1, 2: 1}


def test_an_instance_without_a_version_goes_first():
    assert plan_partition(seats((0, 0, 5), (1, 0, 5), (2, None, 0)), {0: 1, 1: 1}) == {2: 1}


def test_a_version_without_a_host_comes_before_a_younger_one():
    now = seats((0, 2, 5), (1, 2, 3), (2, 2, 4))
    assert plan_partition(now, {0: 1, 2: 1, 3: 1}) == {1: 0, 2: 3}


def test_an_instance_nobody_asks_for_stays():
    assert plan_partition(seats((0, 0, 0), (1, 0, 3)), {0: 1}) == {}


def test_resident_versions_take_the_newest_beside_the_others():
    free = [Berth(0, ((0, 3),), 1, 8), Berth(1, ((0, 2),), 1, 8)]
    assert plan_berths(free, {0: 5, 1: 4}, 1, set()) == {0: (1, None), 1: (1, None)}


def test_a_full_instance_gives_up_its_oldest_unless_its_samples_need_it():
    full = [Berth(0, ((0, 6), (1, 2)), 0, 8), Berth(1, ((0, 1), (1, 7)), 0, 8)]
    # The 7 samples of version 0 fit on instance 0, which holds the most of them.
    assert plan_berths(full, {0: 7, 1: 9, 2: 4}, 2, set()) == {1: (2, 0)}


def test_a_lost_version_comes_first_where_it_disturbs_least():
    berths = [Berth(0, ((1, 6), (2, 2)), 0, 8), Berth(1, ((1, 1), (2, 7)), 0, 8)]
    assert plan_berths(berths, {0: 3, 1: 7}, 2, set()) == {1: (0, 1)}
    assert plan_berths(berths, {0: 3, 1: 7}, 2, {0}) == {}  # it is on its way already
