"""The trainer's chips are lent while it waits, and are its own again before it trains; what that is worth is one
function."""

import dataclasses
import json

import pytest

from dora_jax.config import Config, ConfigError, OrchestratorSection, RolloutSection
from dora_jax.config.files import load_file
from dora_jax.costs import open_costs
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate import lending
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.fleet import MOVING
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.orchestrate.snapshot import restart
from dora_jax.orchestrate.state import fleet_rate, worth_lending
from dora_jax.plan import devices
from dora_jax.sim import config as sims
from dora_jax.sim.config import Row, SimConfig
from dora_jax.sim.run import orchestrator_config, simulate
from dora_jax.sim.table import render
from dora_jax.types import SampleId
from tests.fakes.older_snapshots import before_lending, forget_attempts
from tests.soak import end_to_end

CONFIG = OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=4, max_prompt_tokens=16, max_new_tokens=64,
                            inflight=2.0, lendable=(1,), switch_s=1.0)  # fmt: skip
UP = {"slots": 8, "pages": 64, "page_size": 16}


@pytest.mark.parametrize(
    ("idle_s", "rate", "lent_rate", "switch_s", "worth"),
    [
        (60.0, 100.0, 200.0, 2.0, True),
        (3.0, 100.0, 200.0, 2.0, False),  # half of three seconds does not pay for two
        (60.0, 100.0, 102.0, 2.0, False),  # the tail decodes no faster on more chips
        (600.0, 100.0, 115.0, 2.0, False),  # and little faster: held chips would delay the training of what is ready
        (60.0, 100.0, 100.0, 0.0, False),
        (0.1, 100.0, 200.0, 0.0, True),  # colocated: a switch that costs nothing
        (1e9, 100.0, 1e9, float("inf"), False),  # split
    ],
)
def test_chips_are_lent_where_the_trainer_begins_earlier_for_it(idle_s, rate, lent_rate, switch_s, worth):
    assert worth_lending(idle_s, rate, lent_rate, switch_s) is worth


def test_more_instances_decode_faster_until_only_weights_are_read():
    def step_s(batch):
        return 1.0 + 0.1 * batch

    assert fleet_rate(8, 64, 512, step_s) == pytest.approx(2 * fleet_rate(4, 64, 256, step_s))
    few = fleet_rate(8, 64, 8, step_s) / fleet_rate(4, 64, 8, step_s)
    many = fleet_rate(8, 64, 512, step_s) / fleet_rate(4, 64, 512, step_s)
    assert 1.0 < few < 1.1 < many


def waiting():
    """(an orchestrator whose trainer waits for a second group that has long to go, the commands of that moment)"""
    brain = Orchestrator(CONFIG)
    answer = brain.step(ev.InstanceUp(instance=0, versions=(0,), **UP))
    ids = [id for command in answer if isinstance(command, ev.Start) for id in command.ids]
    brain.step(*(ev.SampleStarted(id=id, instance=0, version=0) for id in ids))
    for n in range(8):  # a decode step takes longer the more rows it has
        report = ev.InstanceReported.of(
            0, 60, dict.fromkeys(ids, 1), sampled=2 + n, busy_s=2.0 + n, row_s=(2.0 + n) ** 2
        )
        brain.step(ev.TimePassed(now_s=10.0 * n), report)
    first = [id for id in ids if id.group_id == 0]
    brain.step(*(ev.SampleDone(id=id, instance=0, tokens=16, finish="stop") for id in first))
    return brain, brain.step(ev.GroupScored(group_id=0, trainable=True), ev.TimePassed(now_s=81.0))


def written(brain):
    return json.loads(json.dumps(brain.snapshot()))


def kinds(commands):
    return [type(command).__name__ for command in commands if isinstance(command, ev.Lend | ev.Return | ev.Train)]


def end(brain, group_id):
    for index in range(2):
        brain.step(ev.SampleDone(id=SampleId(group_id, index), instance=0, tokens=16, finish="stop"))
    return brain.step(ev.GroupScored(group_id=group_id, trainable=True))


def test_the_trainer_begins_once_its_chips_are_back():
    brain, answer = waiting()
    assert kinds(answer) == ["Lend"]
    brain.step(ev.InstanceUp(instance=1, versions=(0,), incarnation=1, **UP))
    assert kinds(end(brain, 1)) == ["Return"]
    assert not brain.state.fleet.has_room(brain.state.fleet.instances[1])
    assert kinds(brain.step(ev.TimePassed(now_s=82.0))) == []
    assert kinds(brain.step(ev.InstanceDown(instance=1, reason="returned", incarnation=1))) == ["Train"]


def test_chips_on_their_way_to_the_rollouts_are_asked_back_when_they_are_there():
    brain, _ = waiting()
    assert kinds(end(brain, 1)) == []
    assert kinds(brain.step(ev.InstanceUp(instance=1, versions=(0,), incarnation=1, **UP))) == ["Return"]
    assert kinds(brain.step(ev.InstanceDown(instance=1, reason="returned", incarnation=1))) == ["Train"]


def waiting_for_a_deadline():
    """(an orchestrator whose trainer has a whole batch of version 1 ready and waits for the last groups of version 0,
    the commands of that moment)"""
    brain = Orchestrator(dataclasses.replace(CONFIG, max_versions=2))
    answer = list(brain.step(ev.InstanceUp(instance=0, versions=(0,), residents=2, **UP | {"slots": 16})))
    started, tokens = set(), {}

    def play(*events):
        answer.extend(brain.step(*events))
        for command in [c for c in answer if isinstance(c, ev.Start | ev.LoadWeights)]:
            answer.remove(command)
            if isinstance(command, ev.LoadWeights):
                play(ev.WeightsLoaded(instance=0, version=command.version))
            else:
                started.update(command.ids)
                play(*(ev.SampleStarted(id=id, instance=0, version=command.version) for id in command.ids))

    play()
    for n in range(8):
        tokens = dict.fromkeys(started, 1)
        play(ev.TimePassed(now_s=10.0 * n), ev.InstanceReported.of(0, 60, tokens, sampled=2 + n, busy_s=2.0 + n,
                                                                   row_s=(2.0 + n) ** 2))  # fmt: skip
    for group in (0, 1, 4, 5):
        if group == 4:
            play(ev.StepPublished(version=1))
        play(*(ev.SampleDone(id=SampleId(group, i), instance=0, tokens=16, finish="stop") for i in range(2)))
        play(ev.GroupScored(group_id=group, trainable=True))
    answer.clear()
    play(ev.TimePassed(now_s=81.0))
    return brain, answer


def test_chips_are_lent_to_the_old_version_that_the_trainer_waits_for():
    brain, answer = waiting_for_a_deadline()
    assert brain.state.ledger.awaited() == (0, 2)
    assert [command for command in answer if isinstance(command, ev.Lend)] == [ev.Lend(instance=1, version=0)]


def test_a_version_that_an_instance_on_its_way_will_hold_does_not_retire():
    brain, _ = waiting_for_a_deadline()
    answer = [command for group in (2, 3) for command in end(brain, group)]
    assert not any(isinstance(command, ev.Retire) for command in answer)
    answer = brain.step(ev.InstanceUp(instance=1, versions=(0,), incarnation=1, **UP))
    assert kinds(answer) == ["Return"] and ev.Retire(version=0) in answer


@pytest.mark.parametrize("came_up", [False, True])
def test_a_lent_instance_that_dies_gives_its_chips_back(came_up):
    brain, _ = waiting()
    if came_up:
        brain.step(ev.InstanceUp(instance=1, versions=(0,), incarnation=1, **UP))
    assert kinds(brain.step(ev.InstanceDown(instance=1, reason="killed", incarnation=1))) in ([], ["Lend"])
    assert brain.state.roles.lent.get(1) in (None, "asked")
    with pytest.raises(ev.ImpossibleFact, match="1 groups of base 0 are trained, but the trainer has 0"):
        brain.step(ev.PartTrained(base_version=0, groups=1))


def test_an_instance_that_was_not_lent_cannot_come_up():
    with pytest.raises(ev.ImpossibleFact, match="instance 1 came up, but the trainer's chips were not lent"):
        Orchestrator(CONFIG).step(ev.InstanceUp(instance=1, **UP))


def test_a_snapshot_knows_what_is_lent_and_an_older_one_is_read():
    brain, _ = waiting()
    brain.step(ev.InstanceUp(instance=1, versions=(0,), incarnation=1, **UP))
    data = written(brain)
    again = Orchestrator.restore(CONFIG, data)
    assert written(again) == data and again.state.roles.lent == {1: "lent"}
    restart(again.state, again.step)
    assert not again.state.roles.lent

    older = Orchestrator(CONFIG)
    older.step(ev.InstanceUp(instance=0, versions=(0,), **UP))
    forget_attempts(older)
    data = written(older)
    assert written(Orchestrator.restore(CONFIG, before_lending(data))) == data


def test_no_chips_are_lent_by_a_body_that_is_over(monkeypatch):
    """What is decided while it is taken down asks nobody for anything."""
    monkeypatch.setattr(lending, "worth_lending", lambda *expected: True)
    brain, _ = waiting()
    brain.step(ev.InstanceUp(instance=1, versions=(0,), incarnation=1, **UP), ev.TimePassed(now_s=83.0))
    moved = [unit for group in brain.state.groups.values() for unit in group.units if unit and unit.state == MOVING]
    assert moved
    restart(brain.state, brain.step)
    assert not brain.state.roles.lent


# ------------------------------------------------------------------ of a configuration


def test_the_trainer_s_devices_are_planned_as_instances():
    config = dataclasses.replace(Config(), orchestrator=OrchestratorSection(elastic=True),
                                 rollout=RolloutSection(tensor=2, instances=1))  # fmt: skip
    assert devices.plan(8, config).lent == ((0, 1), (2, 3))
    assert "lent out    " in devices.plan(8, config).describe()
    shared = dataclasses.replace(config, rollout=RolloutSection(instances=2))
    assert devices.plan(1, shared).lent == ((0,),)
    colocated = dataclasses.replace(config, orchestrator=OrchestratorSection(elastic=True, colocated=True))
    with pytest.raises(ConfigError, match="orchestrator.elastic: colocated instances have the trainer's devices"):
        devices.plan(8, colocated)
    with pytest.raises(ConfigError, match="orchestrator.elastic: the trainer has 1 devices, which are too few"):
        devices.plan(3, config)


# ------------------------------------------------------------------ in virtual time

SMALL = {
    "steps": 5, "warmup_steps": 1, "report_tokens": 16, "hardware.chips": 16, "hardware.rollout_chips": 4,
    "hardware.tensor": 2, "hardware.slots": 24, "cost.train_utilisation": 0.05,
    "workload.max_prompt_tokens": 256, "orchestrator.groups_per_step": 32, "orchestrator.group_size": 8,
    "orchestrator.rebalance_period_s": 2.0, "orchestrator.updates": 2,
}  # fmt: skip


def row(**changes):
    return Row(label="dora", mode="dora", config=sims.replace(SimConfig(), SMALL | changes), published={})


@pytest.mark.slow
@pytest.mark.parametrize("mtbf_s", [0.0, 600.0])
def test_lent_chips_halve_the_time_in_which_nothing_trains(mtbf_s):
    faults = {"fault.mtbf_s": mtbf_s, "fault.repair_s": 10.0}
    elastic = row(**{"orchestrator.elastic": True}, **faults)
    split, lent = simulate(row(**faults)), simulate(elastic)
    assert lent.lends > 0 and lent.step_s < split.step_s
    idle_s = [r.rollout_only * r.step_s for r in (split, lent)]
    assert idle_s[1] <= 0.5 * idle_s[0], idle_s
    assert max(lent.lags) <= elastic.config.orchestrator.max_versions - 1
    costs = open_costs(elastic.config.model, elastic.config.hardware, elastic.config.cost)
    full = costs.pages * elastic.config.hardware.page_size  # tokens of KV that an instance may have to hand over
    assert 0 < lent.late_s <= costs.lend_s() + costs.return_s(full)
    assert "chips of the trainer" in render([(elastic, lent)])


@pytest.mark.parametrize("size", ["64", "128", "4096"])
def test_each_split_of_the_table_has_a_row_with_chips_lent(size):
    rows = sims.rows(sims.from_config_dict(load_file(f"configs/sim/elastic.py:{size}")))
    lent = [orchestrator_config(row.config, row.mode).lendable for row in rows]
    assert not any(lent[::2]) and all(lent[1::2])
    assert all(len(ids) == r.config.hardware.trainer_chips // r.config.hardware.instance_chips
               for ids, r in zip(lent[1::2], rows[1::2], strict=True))  # fmt: skip


@pytest.mark.slow
@pytest.mark.alone  # whether the trainer waits long enough is for the clock to say
def test_a_paced_run_lends_and_mixes_no_versions():
    """The one-process world in real threads; that it comes close to its prediction is the bench's to say."""
    config = sims.replace(end_to_end.setting(steps=3, warmup=2), end_to_end.SMALL)
    _, lent = end_to_end.lent_rows(config)
    ran = end_to_end.run(lent, pace=1 / 100)
    assert ran.lends > 0 and ran.mixed == 0 and ran.step_s > 0
