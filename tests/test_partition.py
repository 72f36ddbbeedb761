"""Which instance serves which version: tables."""

import pytest

from dora_jax.orchestrate.balance import InstanceView, plan_partition, plan_shares, speed_class


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


def views(*rows):
    """(id, version or None, samples, speed 1)"""
    return [
        InstanceView(
            id, () if v is None else (v,), {v: n}, int(v is None), 8 * (speed or [1.0])[0], (speed or [1.0])[0]
        )
        for id, v, n, *speed in rows
    ]


def changed(rows, shares, newest=9):
    return {id: version for id, (version, _) in plan_partition(rows, shares, newest).items()}


def test_nothing_changes_where_shares_are_met():
    assert changed(views((0, 0, 4), (1, 1, 4)), {0: 1, 1: 1}) == {}


def test_the_fewest_samples_are_disturbed_and_ties_go_by_id():
    now = views((0, 0, 5), (1, 0, 2), (2, 0, 2), (3, 0, 7))
    assert changed(now, {0: 3, 1: 1}) == {2: 1}
    assert changed(now, {0: 2, 1: 2}) == {1: 1, 2: 1}
    assert plan_partition(now, {0: 3, 1: 1}, 1) == {2: (1, 0)}


def test_an_instance_without_a_version_goes_first():
    assert plan_partition(views((0, 0, 5), (1, 0, 5), (2, None, 0)), {0: 1, 1: 1}, 1) == {2: (1, None)}


def test_a_version_without_a_host_comes_before_a_younger_one():
    now = views((0, 2, 5), (1, 2, 3), (2, 2, 4))
    assert changed(now, {0: 1, 2: 1, 3: 1}) == {1: 0, 2: 3}


def test_an_instance_nobody_asks_for_stays():
    assert changed(views((0, 0, 0), (1, 0, 3)), {0: 1}) == {}


def test_an_older_version_keeps_the_fast_instances_and_the_newest_the_fullest():
    now = views((0, 4, 9, 1.0), (1, 4, 2, 2.0), (2, 4, 7, 0.5), (3, 4, 8, 1.0))
    assert changed(now, {4: 1, 5: 3}, newest=5) == {0: 5, 2: 5, 3: 5}
    assert changed(now, {4: 3, 5: 1}, newest=4) == {1: 5}


def test_a_tenth_of_speed_is_no_other_class():
    assert [speed_class(x) for x in (0.5, 0.9, 1.0, 1.1, 2.0)] == [0.5, 1.0, 1.0, 1.0, 2.0]
    assert speed_class(1.5) == pytest.approx(2**0.5)


def test_a_share_is_capacity_and_not_heads():
    now = views(*((i, 4, 8 - i, 1.5 if i < 4 else 0.5) for i in range(8)))
    taken = changed(now, {4: 6, 5: 2}, newest=5)  # version 4 keeps 6 of 8, of which the fast ones are four
    assert taken == dict.fromkeys((4, 5, 6, 7), 5)
    assert sum(view.capacity for view in now if view.id in taken) == 2 * 8.0


def test_an_older_version_on_slow_instances_takes_no_more_of_them():
    now = views(*((i, 4, 5, 0.9) for i in range(6)), *((i, 5, 0, 1.1) for i in range(6, 12)))
    assert changed(now, {4: 6, 5: 6}, newest=5) == {}


def test_a_version_gets_an_instance_however_fast_the_only_spare_one_is():
    now = views((0, 1, 5, 0.1), (1, 1, 0, 3.0), (2, 1, 6, 0.1))
    assert changed(now, {0: 1, 1: 2}, newest=1) == {1: 0}


# ---------------------------------------------------------------- several versions an instance


def resident_slot(id, *samples, residents=2):
    held = dict(samples)
    return InstanceView(id, list(held), held, residents - len(samples), 8.0)


def resident_changes(rows, demand, newest):
    need = {v: -(-n // 8) for v, n in demand.items()}
    cap = {v: len(rows) for v in demand if v < newest}
    shares = plan_shares(len(rows), demand, need, cap, resident_slots=2 * len(rows))
    return plan_partition(rows, shares, newest)


def test_resident_versions_take_the_newest_beside_the_others():
    assert resident_changes([resident_slot(0, (0, 3)), resident_slot(1, (0, 2))], {0: 5, 1: 4}, 1) == {
        0: (1, None),
        1: (1, None),
    }


def test_a_full_instance_gives_up_its_oldest_unless_its_samples_need_it():
    full = [resident_slot(0, (0, 6), (1, 2)), resident_slot(1, (0, 1), (1, 7))]
    # The 7 samples of version 0 fit on instance 0, which holds the most of them.
    assert resident_changes(full, {0: 7, 1: 9, 2: 4}, 2) == {1: (2, 0)}


def test_a_lost_version_comes_first_where_it_disturbs_least():
    rows = [resident_slot(0, (1, 6), (2, 2)), resident_slot(1, (1, 1), (2, 7))]
    assert resident_changes(rows, {0: 3, 1: 7}, 2) == {1: (0, 1)}


def test_a_lost_version_gets_a_place_where_every_place_is_needed():
    rows = [resident_slot(0, (1, 8), (2, 8)), resident_slot(1, (1, 8), (2, 8))]
    assert resident_changes(rows, {0: 3, 1: 16, 2: 16}, 2) == {1: (0, 2)}
