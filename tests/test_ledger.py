"""The deadline rule by hand, and the three wrong readings of it, each seen to fail."""

import pytest

from dora_jax.orchestrate.ledger import Ledger
from dora_jax.orchestrate.modes import OrchestratorConfig
from tests.fakes.orchestrator_shape import Shape
from tests.fakes.orchestrator_world import World


def ledger(groups_per_step=2, max_lag=1, base=0, **kwargs) -> Ledger:
    return Ledger(groups_per_step, max_lag, base, **kwargs)


def admit(book: Ledger, version: int, *group_ids: int) -> None:
    for group_id in group_ids:
        book.admit(group_id, version)


def finish(book: Ledger, *group_ids: int, trainable=True) -> None:
    for group_id in group_ids:
        book.running(group_id)
        book.scoring(group_id)
        book.scored(group_id, trainable)


def step(book: Ledger) -> None:
    assert book.take()
    book.published(book.base + 1)


@pytest.mark.parametrize(
    ("max_lag", "newest", "training", "outstanding", "version", "room"),
    [
        # (u + max_lag - b + 1) P - taken - outstanding(<= u), P = 2
        (0, 0, False, {}, 0, 2),
        (0, 0, True, {}, 0, 0),  # the step is full: nothing admitted now could train at base 1
        (1, 0, False, {}, 0, 4),
        (1, 0, True, {}, 0, 2),
        (1, 0, False, {0: 3}, 0, 1),
        (2, 3, False, {2: 1}, 3, 5),
        (2, 3, False, {2: 1}, 2, 3),  # u = 2 leaves 4 - 1, u = 3 leaves 6 - 1
        (2, 3, False, {2: 1, 3: 5}, 2, 0),  # the newest is full: no older one is refilled either
        (2, 3, True, {2: 1}, 2, 1),
        (2, 3, True, {2: 2}, 2, 0),
        (2, 4, False, {3: 3}, 2, 1),  # u = 2 = b - max_lag leaves 2 - 0, u = 3 leaves 4 - 3
    ],
)
def test_admission_by_hand(max_lag, newest, training, outstanding, version, room):
    book = ledger(max_lag=max_lag, base=newest)
    book.outstanding = dict(outstanding)
    book.batch = (98, 99) if training else ()
    assert book.admissible(version) == room


def test_a_group_against_the_rule_is_refused():
    book = ledger(max_lag=0)
    admit(book, 0, 0, 1)
    with pytest.raises(RuntimeError, match="against the deadline rule"):
        book.admit(2, 0)
    with pytest.raises(RuntimeError, match="admitted twice"):
        ledger(max_lag=3).admit(0, 0) or admit(book, 0, 0)


def test_a_batch_is_the_oldest_ready_groups_in_order():
    book = ledger(groups_per_step=3, max_lag=2)
    admit(book, 0, 0, 1, 2, 3, 4)
    finish(book, 4, 1, 3)
    assert book.take() == (1, 3, 4)
    book.published(1)
    admit(book, 1, 5, 6)
    finish(book, 6, 2, 5)
    assert book.take() == (2, 5, 6)
    assert book.lags == {0: 3 + 2, 1: 1}


def test_fewer_than_a_batch_is_not_taken():
    book = ledger()
    admit(book, 0, 0, 1)
    finish(book, 0)
    assert book.take() == ()


def test_young_groups_pass_a_straggler_until_its_deadline():
    book = ledger(groups_per_step=1, max_lag=1)
    admit(book, 0, 0, 1)  # 0 is the straggler
    finish(book, 1)
    step(book)  # base 0: one group of version 0 may stay behind
    admit(book, 1, 2)
    finish(book, 2)
    assert book.take() == ()  # base 1 is its deadline
    assert book.blocking_version(book.oldest_ready(1)) == 0
    finish(book, 0)
    assert book.take() == (0,)


def test_a_step_in_parts_waits_for_its_straggler_with_its_last_part_only():
    book = ledger(groups_per_step=4, max_lag=1, parts=2)
    admit(book, 0, *range(8))  # 0 is the straggler
    finish(book, 1)
    assert book.take() == ()  # one group is no part
    finish(book, 2, 3)
    assert book.take() == (1, 2)
    assert book.missing == 2 and book.next_base == 0
    with pytest.raises(RuntimeError, match="has 2 of 4 groups of base 0"):
        book.published(1)
    finish(book, 4, 5, 6, 7)
    assert book.take() == (3, 4)
    book.published(1)
    # base 1 is the deadline of 0: of the four groups 0, 5, 6, 7 all must be in this step, the first part without 0
    admit(book, 1, 8, 9, 10, 11)
    finish(book, 8, 9, 10, 11)
    assert book.take() == (5, 6)
    assert book.take() == () and book.blocking_version(book.oldest_ready(2)) == 0  # 7, 8 would leave 0 behind
    assert book.admissible(1) == 0  # (1 + 1 - 1 + 1) * 4 - 2 taken - 6 outstanding: 0, 7, and four of version 1
    finish(book, 0)
    assert book.take() == (0, 7)
    book.published(2)
    book.check()


def test_a_part_may_hold_what_the_rest_of_the_step_can_still_take():
    """outstanding_after(<= u) may be as many as the step still lacks."""
    book = ledger(groups_per_step=3, max_lag=0, parts=3)
    admit(book, 0, 0, 1, 2)
    finish(book, 2)
    assert book.take() == (2,)
    assert book.admissible(0) == 0
    finish(book, 0, 1)
    assert book.take() == (0, 1)
    assert book.admissible(0) == 0
    book.published(1)
    assert book.admissible(1) == 3


def test_a_filtered_or_failed_group_no_longer_holds_the_trainer():
    for end in ("filtered", "failed"):
        book = ledger(groups_per_step=1, max_lag=1)
        admit(book, 0, 0, 1)
        finish(book, 1)
        step(book)
        admit(book, 1, 2)
        finish(book, 2)
        assert book.take() == ()
        if end == "failed":
            book.failed(0)
        else:
            finish(book, 0, trainable=False)
        assert book.take() == (2,)
        assert book.counts[end] == 1
        book.check()


def test_credit_of_ended_groups_returns():
    book = ledger(max_lag=0)
    admit(book, 0, 0, 1)
    assert book.admissible(0) == 0
    book.failed(0)
    assert book.admissible(0) == 1


def test_filtered_in_a_row_is_reset_by_a_trainable_group():
    book = ledger(max_lag=2)
    admit(book, 0, 0, 1, 2)
    finish(book, 0, 1, trainable=False)
    assert book.filtered_in_a_row == 2
    finish(book, 2)
    assert book.filtered_in_a_row == 0


def test_a_wrong_incarnation_is_refused():
    book = ledger()
    admit(book, 0, 0)
    with pytest.raises(RuntimeError, match="group 0 is waiting: it cannot become ready"):
        book.scored(0, True)
    with pytest.raises(RuntimeError, match="group 7 is unknown"):
        book.running(7)
    with pytest.raises(RuntimeError, match="version 1 is published"):
        book.published(1)


def test_the_check_sees_a_lost_group():
    book = ledger()
    admit(book, 0, 0)
    book.check()
    del book.live[0]
    with pytest.raises(RuntimeError, match="counters are off"):
        book.check()
    book = ledger()
    admit(book, 0, 0)
    book.counts["waiting"] = 0
    with pytest.raises(RuntimeError, match="does not balance"):
        book.check()


def test_evict_has_the_members_test_only_and_partial_none():
    book = ledger(groups_per_step=1, max_lag=1, capped=False)
    admit(book, 0, *range(9))
    finish(book, 1)
    step(book)
    finish(book, 2)
    step(book)
    finish(book, 3)
    assert book.take() == ()  # base 2, version 0
    free = ledger(groups_per_step=1, max_lag=None)
    admit(free, 0, *range(9))
    for group_id in range(9):
        finish(free, group_id)
        step(free)
    assert free.base == 9


# ---------------------------------------------------------------- the wrong readings


class UntakenOnly(Ledger):
    """A ledger that counts only what is not taken, and forgets that a batch is in training."""

    next_base = property(lambda self: self.base)

    def admissible(self, version):
        taken, self.batch = self.batch, ()
        room, self.batch = super().admissible(version), taken
        return room


class NoCap(Ledger):
    """A window of K versions, without a cap on the groups in it: any ready group may be taken."""

    def admissible(self, version):
        return None

    def may_take(self, members):
        return True


def world_with(reading, **config) -> World:
    base = dict(groups_per_step=1, group_size=1, total_steps=6, mode="dora", max_versions=2)
    world = World(OrchestratorConfig(**{**base, **config}), Shape(instances=((4, 1.0, 1), (4, 1.0, 1)), train_s=0.1))
    world.brain.state.ledger.__class__ = reading
    return world


def test_counting_untaken_groups_only_stalls_at_once():
    world = world_with(UntakenOnly, max_versions=1, inflight=2.0)
    with pytest.raises(AssertionError, match="stalled"):
        world.run(max_events=2_000)
    assert len(world.trained) == 1
    world_with(Ledger, max_versions=1, inflight=2.0).run().audit()


def test_a_window_without_a_cap_breaks_the_bound():
    world = world_with(NoCap, inflight=6.0).run(max_events=20_000)
    assert max(world.lags()) > world.config.max_lag
    kept = world_with(Ledger, inflight=6.0).run(max_events=20_000)
    assert max(kept.lags()) <= kept.config.max_lag


def test_a_member_past_its_deadline_is_not_taken():
    """In a mode that evicts, sums bound nothing."""
    book = ledger(groups_per_step=1, max_lag=1, base=0, capped=False)
    admit(book, 0, 0, 1, 2)
    finish(book, 0)
    step(book)
    finish(book, 1)
    assert book.may_take({0: 1})
    step(book)
    finish(book, 2)  # base 2: its version is two behind
    assert not book.may_take({0: 1}) and book.take() == ()
