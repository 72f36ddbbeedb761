"""What each mode decides, which evaluations are due, and which configurations are refused with a sentence."""

import dataclasses

import pytest

from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.events import Cancel, Discard, GroupScored, Halt, InstanceUp, Start
from dora_jax.orchestrate.modes import MODES, OrchestratorConfig
from dora_jax.types import RENEWAL, issued_first_as
from tests.fakes.orchestrator_shape import Shape
from tests.fakes.orchestrator_world import World

BASE = OrchestratorConfig(groups_per_step=4, group_size=2, total_steps=6, max_versions=3)


def config(**changes) -> OrchestratorConfig:
    return dataclasses.replace(BASE, **changes)


@pytest.mark.parametrize(
    ("mode", "max_lag", "capped", "target"),
    [
        ("sync", 0, True, 4),
        ("one_step", 1, True, 4),
        ("partial", None, False, 5),
        ("evict", 2, False, 5),
        ("dora_paper", 2, True, 5),
        ("dora", 2, True, 5),
        ("rollpacker", 0, False, 4),
        ("staleflow", 2, True, 5),
    ],
)
def test_a_mode_is_a_row_of_decisions(mode, max_lag, capped, target):
    decisions = config(mode=mode).decisions
    assert (decisions.max_lag, decisions.capped, decisions.target_groups) == (max_lag, capped, target)


def run(mode, **changes) -> World:
    shape = Shape(instances=((8, 1.0, 1), (8, 1.0, 1)), train_s=1.5, seed=3)
    world = World(config(mode=mode, **{"inflight": 2.0, **changes}), shape).run()
    world.audit()
    return world


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_the_same_number_of_groups(mode):
    world = run(mode)
    assert sum(world.lags().values()) == 24


def test_the_checks_see_what_each_mode_gives_up():
    assert not run("dora").mixed() and not run("dora").broken() and max(run("dora").lags()) <= 2
    partial = run("partial")
    assert partial.mixed()  # C1
    evict = run("evict", max_versions=1)
    assert evict.broken() and not evict.mixed() and max(evict.lags()) == 0  # C2
    rollpacker = run("rollpacker")
    assert rollpacker.broken() and not rollpacker.mixed() and set(rollpacker.lags()) == {0}  # C2
    staleflow = run("staleflow")
    assert staleflow.mixed() and not staleflow.broken()  # C1


def test_the_lag_of_partial_is_unbounded():
    """C3: without a bound the oldest span grows with the work in flight."""
    shape = Shape(instances=((8, 1.0, 1), (8, 1.0, 1)), train_s=0.1, seed=3)
    world = World(config(mode="partial", inflight=5.0, total_steps=12), shape).run()
    assert max(world.lags()) > world.config.max_lag


@pytest.mark.parametrize("mode", ["partial", "evict", "dora", "staleflow"])
def test_where_the_awaited_batch_counts_a_load_below_a_batch_is_enough(mode):
    world = run(mode, inflight=0.5, updates=2)
    assert world.stop.ok and sum(world.lags().values()) == 24


class Rounds:
    """What each step of a run issued, gave up and trained."""

    def __init__(self, **changes):
        self.long, self.issued, self.given_up = [], [], []
        shape = Shape(instances=((8, 1.0, 1), (8, 1.0, 1)), train_s=1.5, seed=3)
        self.config = config(mode="rollpacker", total_steps=12, **changes)
        self.world = World(self.config, shape)
        self.world.run(after=self.hear).audit()

    def hear(self, world, event, commands):
        if len(self.long) == world.published < self.config.total_steps:
            self.long.append(world.brain.state.ledger.long_round)
            self.issued.append(set())
            self.given_up.append(set())
        for command in commands:
            if isinstance(command, Start):
                self.issued[-1] |= {id.group_id for id in command.ids}
            if isinstance(command, Cancel):
                self.given_up[-1] |= {id.group_id for id in command.ids}
            if isinstance(command, Discard) and not any(command.group_id in ids for ids in self.given_up):
                self.given_up[-1].add(command.group_id)  # all its samples had ended


@pytest.mark.parametrize("changes", [{}, {"updates": 2}, {"colocated": True}])
def test_rollpacker_gathers_the_long_prompts_of_short_rounds_in_rounds_of_their_own(changes):
    rounds = Rounds(**changes)
    assert rounds.long == [False, False, False, False, True] * 2 + [
        False,
        True,
    ]  # a fifth of what is issued is given up
    waiting = []
    for long, issued, given_up, (_, trained) in zip(
        rounds.long, rounds.issued, rounds.given_up, rounds.world.trained, strict=True
    ):
        assert issued == set(trained) | given_up and len(trained) == 4
        assert len(given_up) == (0 if long else 1)
        if long:  # the last one fills up with prompts that nobody has given up
            again = [issued_first_as(g) for g in sorted(issued) if g >= RENEWAL]
            assert again == sorted(waiting) and len(again) == (4 if issued is not rounds.issued[-1] else 1)
            waiting.clear()
        waiting += given_up
    assert not waiting
    assert max(group_id for _, trained in rounds.world.trained for group_id in trained) < 2 * RENEWAL


def test_rollpacker_replaces_what_is_filtered_or_fails_within_a_round():
    for seed in range(20):
        shape = Shape(instances=((3, 1.0, 1), (2, 3.0, 1)), filtered=0.3, failed=0.1, deaths=0.5, seed=seed)
        world = World(config(mode="rollpacker", total_steps=9), shape).run()
        world.audit()
        assert set(world.lags()) == {0} and not world.mixed()


def test_staleflow_bounds_the_age_of_the_oldest_token_where_partial_does_not():
    shape = Shape(instances=((8, 1.0, 1), (8, 1.0, 1)), train_s=0.1, seed=3)
    worlds = [World(config(mode=mode, inflight=5.0, total_steps=12), shape).run() for mode in ("partial", "staleflow")]
    partial, staleflow = worlds
    assert max(partial.lags()) > 2 == max(staleflow.lags()) and staleflow.mixed()
    staleflow.audit()


def test_one_step_trains_each_batch_on_the_version_before():
    assert run("one_step").lags() == {0: 4, 1: 20}


def test_sync_is_dora_with_one_version():
    same = [run(mode, max_versions=1).trained for mode in ("sync", "dora")]
    assert same[0] == same[1]


# ---------------------------------------------------------------- evaluation


def test_evaluations_due():
    some = config(eval_groups=2, eval_every=4, total_steps=6)
    assert [v for v in range(7) if some.evaluation_due(v)] == [0, 4, 6]
    assert [some.evaluation_ids(v) for v in (0, 4, 6)] == [(-1, -2), (-3, -4), (-5, -6)]
    ends = config(eval_groups=2)
    assert [v for v in range(7) if ends.evaluation_due(v)] == [0, 6]
    assert [ends.evaluation_ids(v) for v in (0, 6)] == [(-1, -2), (-3, -4)]
    assert not config().evaluation_due(0)


@pytest.mark.parametrize("mode", MODES)
def test_every_evaluation_due_is_done_at_its_version(mode):
    world = run(mode, eval_groups=3, eval_every=2, eval_samples=2)
    assert {v: sorted(ids) for v, ids in world.evaluated.items()} == {
        0: [-3, -2, -1], 2: [-6, -5, -4], 4: [-9, -8, -7], 6: [-12, -11, -10],
    }  # fmt: skip


def test_the_version_of_a_checkpoint_alone_can_be_evaluated():
    world = World(config(total_steps=5, eval_groups=3), Shape(), start_version=5).run()
    assert world.evaluated == {5: [-4, -5, -6]} or sorted(world.evaluated[5]) == [-6, -5, -4]
    assert not world.trained


def test_nothing_to_do_ends_at_once():
    assert World(config(total_steps=5), Shape(), start_version=5).run().stop.ok


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"mode": "dore"},
            "mode 'dore' is none of sync, one_step, partial, evict, dora_paper, dora, rollpacker, staleflow",
        ),
        ({"groups_per_step": 0}, "groups_per_step is 0: it must be positive"),
        ({"total_steps": -1}, "total_steps is -1: it must not be negative"),
        ({"rebalance_period_s": 0.0}, "rebalance_period_s is 0.0: it must be positive"),
        ({"inflight": 0.2}, "less than one group of 2"),
        (
            {"mode": "dora_paper", "inflight": 0.75},
            "keeps at most 3 groups outstanding: a step takes 4 and would never start",
        ),
        ({"task_ratios": (("sums", 2.0),)}, "task_ratios names 'sums', which task_cycle does not"),
        ({"task_cycle": ("a", "b"), "task_ratios": (("a", 0.1), ("b", 0.1))}, "keeps at most 2 groups outstanding"),
    ],
)
def test_a_configuration_that_cannot_progress_is_refused(changes, sentence):
    problems = config(**changes).problems()
    assert len(problems) == 1 and sentence in problems[0]
    with pytest.raises(ValueError, match="could never progress"):
        Orchestrator(config(**changes))


def test_instances_that_cannot_serve_are_refused():
    small = InstanceUp(instance=3, slots=4, pages=10, page_size=16)
    assert config().problems() == [] and config().problems([dataclasses.replace(small, pages=16)]) == []
    assert config().problems([]) == ["there is no rollout instance"]
    (problem,) = config().problems([small])
    assert problem == (
        "instance 3 cannot serve this run: its 10 pages of 16 tokens hold 160 tokens, but one sample may need 256 "
        "(max_prompt_tokens 128 + max_new_tokens 128)"
    )
    (halt,) = Orchestrator(config()).step(small)
    assert isinstance(halt, Halt) and not halt.ok and halt.reason == problem


def test_sync_needs_no_load_factor():
    assert config(mode="sync", inflight=0.5).problems() == []


# ---------------------------------------------------------------- tasks


def test_tasks_have_limits_of_their_own():
    mixed = config(task_cycle=("a", "b", "a", "c"), task_ratios=(("b", 3.0),), inflight=1.0, groups_per_step=8)
    assert mixed.task_limits == {"a": 4, "b": 6, "c": 2}
    assert mixed.decisions.target_groups == 12
    assert [mixed.task(g) for g in range(5)] == ["a", "b", "a", "c", "a"]
    world = World(mixed, Shape(instances=((40, 1.0, 1),)))
    most = {}

    def watch(world, event, commands):
        for task, n in world.brain.state.task_open.items():
            most[task] = max(n, most.get(task, 0))

    world.run(after=watch).audit()
    assert most == {"a": 4, "b": 6, "c": 2}


@pytest.mark.parametrize("lead", [0.0, 0.5])
def test_a_slow_task_takes_no_place_of_others_and_keeps_its_share(lead):
    class Slow(World):
        def length(self, id):
            return 60 if id.group_id % 2 else 1

    mixed = config(task_cycle=("quick", "slow"), task_ratios=(("quick", 3.0),), task_lead=lead, groups_per_step=8,
                   total_steps=40, group_size=1)  # fmt: skip
    world, most = Slow(mixed, Shape(instances=((40, 1.0, 1),))), {}

    def watch(world, event, commands):
        for task, n in world.brain.state.task_open.items():
            most[task] = max(n, most.get(task, 0))

    world.run(after=watch).audit()
    trained = [g for _, groups in world.trained for g in groups]
    apart = abs(sum(g % 2 for g in trained) / len(trained) - 0.5)
    assert most["slow"] == mixed.task_limits["slow"]
    assert apart <= 0.02 if lead else apart > 0.05


def test_a_task_with_many_filtered_groups_gets_more_of_the_load():
    mixed = config(task_cycle=("easy", "hard"), task_adaptive=True, inflight=2.0, groups_per_step=8)
    assert mixed.adapted_limits({"easy": 1.0, "hard": 1.0}) == mixed.task_limits == {"easy": 8, "hard": 8}
    assert mixed.adapted_limits({"easy": 1.0, "hard": 0.5}) == {"easy": 5, "hard": 11}
    assert mixed.adapted_limits({"easy": 1.0, "hard": 0.0}) == {"easy": 3, "hard": 13}  # four times, not more


def test_past_pass_rates_keep_the_tasks_of_a_batch_in_proportion():
    """Three of four hard groups are filtered; without adapting, the trained batches hold mostly easy ones."""

    class Picky(World):
        def on_score(self, group_id):
            trainable = group_id % 2 == 0 or group_id % 8 == 1
            if not trainable:
                self.filtered_ids.append(group_id)
            return [GroupScored(group_id=group_id, trainable=trainable)]

    def hard_share(adaptive):
        mixed = config(task_cycle=("easy", "hard"), task_ratios=(("easy", 1.0),), task_adaptive=adaptive, inflight=2.0,
                       groups_per_step=8, total_steps=40, group_size=1)  # fmt: skip
        world = Picky(mixed, Shape(instances=((6, 1.0, 1),))).run()  # too few slots for all that may be outstanding
        world.audit()
        trained = [g for _, groups in world.trained[20:] for g in groups]
        return sum(g % 2 for g in trained) / len(trained)

    assert hard_share(False) < 0.3 and hard_share(True) > 0.6
