"""One decision each, in the words of the scenarios (`Body`): what must happen, and what must not."""

import json

import pytest

from dora_jax.orchestrate import balance, snapshot
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.events import Park, SampleMoved
from dora_jax.orchestrate.fleet import Group, Instance, Unit
from dora_jax.orchestrate.ledger import publish_budget
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.orchestrate.state import Queue, State
from dora_jax.orchestrate.transitions import sample_moved
from dora_jax.types import SampleId
from tests.fakes.orchestrator_shape import Shape
from tests.fakes.orchestrator_world import World
from tests.fakes.scenario import SMALL, Body

STAGES = "loaded started resumed parked cancelled scored"


def body(answers=STAGES, **config) -> Body:
    made = Body()
    made.config = {**SMALL, "mode": "dora", "groups_per_step": 1, "group_size": 1, "total_steps": 9, **config}
    made.answers = set(answers.split())
    return made


def tell(made: Body, text: str) -> list[str]:
    """Several facts, one a line; the answer to the last."""
    answer = []
    for line in text.strip().splitlines():
        answer = made.ask(line.split())
    return answer


def two_stragglers() -> Body:
    """Instances 0 and 1 hold a straggler of version 0 each; a move of 2.0 from 1 to 0 has been asked for."""
    made = body("loaded started resumed scored", groups_per_step=2, group_size=2, max_versions=4, inflight=2.0)
    answer = tell(made, """
        up 0
        up 1
        progress 0.0,2.0 30
        done 0.1,2.1,1.0-1
        done 3.0-1
        done 4.0-1,5.0-1
        published 1""")  # fmt: skip
    assert answer[-1] == "Move ids=2.0 src=1 dst=0"
    return made


# ---------------------------------------------------------------- take


@pytest.mark.parametrize("end", ["scored 0 filtered", "failed 0"])
def test_the_end_of_an_untrained_straggler_lets_the_batch_go(end):
    made = body("loaded started", max_versions=2, inflight=2.0)
    assert tell(made, """
        up 0 slots=1
        up 1 slots=1
        done 1.0
        scored 1
        published 1
        done 2.0
        scored 2
        done 0.0""") == ["LoadWeights instance=0 version=1 drop=0", "Retire version=0"]  # fmt: skip
    waits = "trainer waits for rewards (1 of 1 groups ready, 1 scoring); rollouts wait for rewards"
    assert made.brain.summary()["waits"] == waits
    answer = [line for line in tell(made, end) if not line.startswith("Discard")]
    assert answer[0] == "Train group_ids=2 base_version=1"


# ---------------------------------------------------------------- new weights under running samples


def test_samples_go_on_under_newer_weights_instance_after_instance(monkeypatch):
    """What is left of a decision is done in the next ones, also of a brain that was restored between them."""
    monkeypatch.setattr(balance, "SWAPPED_A_DECISION", 3)
    config = OrchestratorConfig(mode="partial", groups_per_step=4, group_size=4, total_steps=6, inflight=4.0)
    parked, left = set(), 0

    def watch(world, event, commands):
        nonlocal left
        parked.add(sum(len(command.ids) for command in commands if isinstance(command, Park)))
        outdated = len(world.brain.state.fleet.outdated)
        left += outdated
        if outdated:
            world.brain = Orchestrator.restore(config, json.loads(json.dumps(world.brain.snapshot())))

    world = World(config, Shape(instances=((4, 1.0, 1),) * 6, pages=400, load_s=0.5)).run(after=watch)
    world.audit()
    assert world.mixed() and left >= 2 and 3 <= max(parked) < 3 + 4


# ---------------------------------------------------------------- moves


def test_a_sample_that_ends_at_the_source_in_mid_move_frees_both_slots():
    made = two_stragglers()
    host = made.brain.state.fleet.instances[0]
    before = (host.used, host.incoming)
    tell(made, "done 2.0")
    assert (host.used, host.incoming) == (before[0] - 1, 0)
    assert made.brain.state.fleet.instances[1].used == 4  # it took version 1 at once


def test_a_destination_that_died_and_came_back_holds_nothing():
    made = two_stragglers()
    tell(made, "down 0\nup 0\nmovefailed 2.0")
    host = made.brain.state.fleet.instances[0]
    assert host.incoming == 0 and host.used == len(host.units)
    made = two_stragglers()
    tell(made, "down 0\nup 0\nmoved 2.0")  # it arrived, and was lost with the instance that had been there
    unit = made.brain.state.unit(SampleId(2, 0))
    assert unit.instance is None or unit.id in made.brain.state.fleet.instances[unit.instance].units


def test_the_slots_left_beside_a_sample_on_its_way_are_found():
    """A move changes the load of its destination, by which instances are looked up."""
    state = State(OrchestratorConfig(groups_per_step=1, group_size=1, total_steps=1), 0, 0)
    host = Instance(0, 1, 4, 64, 16, 1, 1.0)
    state.fleet.add(host, (0,))
    state.open_group(0, 0)
    unit = state.unit(SampleId(0, 0))
    state.fleet.reserve_move(unit, host, 1, 0.0)
    assert state.fleet.best(0) is host
    sample_moved(state, SampleMoved(id=unit.id, src=9, dst=0, attempt=1))
    assert unit.instance == 0 and host.used == 1 and state.fleet.best(0) is host


def test_a_sample_whose_moves_fail_is_left_alone_after_three():
    made = two_stragglers()
    asked = 1
    for now_s in range(1, 9):
        if made.brain.state.unit(SampleId(2, 0)).dst is not None:
            made.ask(["movefailed", "2.0"])
        asked += sum("Move" in line for line in made.ask(["time", str(now_s)]))
    assert asked == 3


def test_no_move_where_it_costs_more_than_it_gains():
    made = two_stragglers()
    made.ask(["movefailed", "2.0"])
    made.brain.state.fleet.measured.move_s = 1e6
    assert made.ask(["time", "2"]) == []
    made.brain.state.fleet.measured.move_s = 0.0
    assert made.ask(["time", "4"]) == ["Move ids=2.0 src=1 dst=0"]


def test_moves_are_planned_again_as_soon_as_they_fit():
    """Both instances are full when one is asked to take version 1: no trigger comes, but slots come free."""
    made = body("loaded started resumed scored", groups_per_step=2, group_size=2, max_versions=4, inflight=4.0)
    tell(made, "up 0\nup 1\ndone 1.0-1\ndone 3.0-1\npublished 1")
    assert made.brain.state.fleet.instances[1].coming == 1 and made.brain.state.fleet.instances[0].used == 4
    assert tell(made, "done 0.0-1\ndone 2.0") == []  # three left on instance 1, two slots on instance 0
    assert tell(made, "done 5.0") == ["Move ids=2.1,5.1 src=1 dst=0"]


# ---------------------------------------------------------------- admission


def test_the_paper_injects_what_is_missing_to_rbs():
    decisions = OrchestratorConfig(groups_per_step=8, group_size=4, total_steps=9, mode="dora_paper").decisions
    assert [publish_budget(decisions, 4, n) for n in (0, 1, 37, 40, 99)] == [10, 10, 1, 0, 0]


def test_the_paper_refunds_the_credit_of_a_filtered_group():
    made = body("loaded started", mode="dora_paper", inflight=1.0, max_versions=2)
    tell(made, "up 0\ndone 0.0")
    assert tell(made, "scored 0 filtered") == ["Start ids=1.0 instance=0 version=0"]


def test_one_step_keeps_the_version_of_its_batch_until_the_batch_is_taken():
    """A filtered group is replaced at the batch's own version, though nothing of it runs and a newer one is out."""
    made = body("loaded started", mode="one_step", groups_per_step=2)
    tell(made, """
        up 0
        done 0.0,1.0
        scored 0
        scored 1
        done 2.0,3.0
        published 1""")  # fmt: skip
    assert 0 in made.brain.state.alive
    assert "Start ids=4.0 instance=0 version=0" in tell(made, "scored 2\nscored 3 filtered\ntime 9")
    assert tell(made, "done 4.0\nscored 4")[0] == "Train group_ids=2/4 base_version=1"


# ---------------------------------------------------------------- weights


def test_the_first_instance_that_is_free_takes_a_version_without_a_host():
    """Version 0 lost its host while the trainer works; one instance was asked to make room, the other is free first."""
    made = body(max_versions=6, inflight=4.0)
    tell(made, """
        up 0 slots=1
        up 1 slots=1
        up 2 slots=1
        done 1.0
        published 1
        done 2.0
        done 3.0
        down 0""")  # fmt: skip
    hosts = made.brain.state.fleet.instances
    asked = next(h for h in hosts.values() if h.coming == 0)
    free = next(h for h in hosts.values() if h is not asked)
    (running,) = free.units.values()
    answer = tell(made, f"done {running.group.id}.0")
    assert answer == [
        f"LoadWeights instance={free.id} version=0 drop=1",
        f"Resume ids=0.0 instance={free.id} version=0",
    ]


def test_an_idle_instance_takes_no_weights_after_the_last_step():
    made = body(total_steps=1, inflight=1.0)
    assert tell(made, "up 0\ndone 0.0\npublished 1")[-1].startswith("Halt ok=True")
    assert made.brain.summary()["reloads"] == 1


def test_evaluation_samples_keep_their_version_under_partial():
    queue = Queue()
    evaluation, training = Group(-1, 0, 1), Group(5, 0, 1)
    for group in (evaluation, training):
        queue.add(group)
        queue.park(group.units[0])
    for line in queue.lines[0][1:]:
        line.clear()
    queue.retag_waiting(3)
    assert (evaluation.units[0].version, training.units[0].version) == (0, 3)
    assert queue.first(0) is evaluation.units[0] and queue.first(3) is training.units[0]
    assert queue.unfinished == {0: 1, 3: 1}


def test_a_sample_that_began_under_replaced_weights_is_set_aside_at_once():
    made = body("loaded parked scored", mode="partial", group_size=2, inflight=2.0)
    tell(made, "up 0\nstarted 0.0-1\ndone 0.0-1")
    assert made.brain.summary()["training"] and made.brain.state.unit(SampleId(1, 0)).state == "starting"
    assert tell(made, "published 1") == []  # samples that have not begun cannot be moved aside
    assert tell(made, "started 1.0") == ["Park ids=1.0 instance=0"]


def test_a_swap_of_many_samples_costs_one_rebalance(monkeypatch):
    made = body("loaded started parked scored", mode="partial", group_size=40, inflight=2.0)
    tell(made, "up 0 slots=99 pages=999\ndone 0.0-39")
    counted = []
    monkeypatch.setattr(
        "dora_jax.orchestrate.balance.rebalance", lambda s, real=balance.rebalance: (counted.append(s), real(s))
    )
    answer = tell(made, "published 1")
    assert answer[0].startswith("Park ids=1.0-39") and len(counted) <= 2


# ---------------------------------------------------------------- snapshot


def everything(item):
    """A comparable copy of all that hangs on an object, references to samples and instances by id."""
    if isinstance(item, Unit):
        return ("unit", *item.id)
    if isinstance(item, dict):
        return [(everything(k), everything(v)) for k, v in item.items()]
    if isinstance(item, (list, tuple)) or type(item).__name__ == "deque":
        return [everything(v) for v in item]
    names = getattr(item, "__slots__", None) or getattr(item, "__dict__", None)
    if names and type(item).__module__.startswith("dora_jax") and not isinstance(item, OrchestratorConfig):
        return {n: _field(item, n) for n in names if n not in getattr(item, "DERIVED", ())}
    return item


def _field(item, name):
    value = getattr(item, name)
    if name == "units" and isinstance(item, Group):
        return [unit and {n: _field(unit, n) for n in Unit.__slots__ if n != "group"} for unit in value]
    if name == "dst" and isinstance(value, Instance):
        return value.id
    return everything(value)


@pytest.mark.parametrize("mode", ["dora", "partial", "evict"])
def test_a_snapshot_holds_everything(mode):
    config = OrchestratorConfig(
        groups_per_step=4, group_size=2, total_steps=5, mode=mode, inflight=2.0, max_versions=2, eval_groups=2,
        eval_every=1, task_cycle=("a", "b"), task_ratios=(("a", 2.0),), task_adaptive=True,
    )  # fmt: skip
    shape = Shape(instances=((2, 1.0, 1), (4, 2.0, 2), (2, 1.0, 1)), deaths=0.7, filtered=0.2, move_s=1.0, seed=5)

    def compare(world, event, commands):
        if len(world.log) % 25 == 0:
            data = json.loads(json.dumps(world.brain.snapshot()))
            fresh = State(config, 0, 0)
            snapshot.load(fresh, data)
            assert everything(fresh) == everything(world.brain.state)

    World(config, shape).run(after=compare)


def test_a_snapshot_tells_the_incarnations_of_a_destination_apart():
    """The destination of a move dies and comes back: the sample has arrived nowhere, before and after a restart."""
    made, again = two_stragglers(), two_stragglers()
    for body in (made, again):
        tell(body, "down 0\nup 0")
    again.brain = Orchestrator.restore(made.brain.state.config, json.loads(json.dumps(made.brain.snapshot())))
    assert tell(made, "moved 2.0") == tell(again, "moved 2.0") != []


def test_a_snapshot_of_another_mode_is_refused():
    config = OrchestratorConfig(groups_per_step=1, group_size=1, total_steps=1)
    data = {**Orchestrator(config).snapshot(), "mode": "sync"}
    with pytest.raises(ValueError, match="cannot go on from it"):
        Orchestrator.restore(config, data)
