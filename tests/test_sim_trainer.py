"""The trainer in virtual time: parts one after the other, the fixed time spread over them; what parts are worth."""

import pytest

from dora_jax.sim import config, run
from dora_jax.sim.config import SimOrchestratorSection
from dora_jax.sim.trainer import SimGroup, SimTrainer


class Costs:
    """One second a token, and eight a step."""

    def train_s(self, samples, tokens, squares):
        return 8.0 + tokens


def groups(n, tokens=1):
    made = [SimGroup(0, "sums") for _ in range(n)]
    for group in made:
        group.tokens = tokens
    return made


def test_parts_follow_one_another_and_cost_what_a_whole_step_costs():
    trainer = SimTrainer(SimOrchestratorSection(groups_per_step=4, group_size=1), Costs())
    assert trainer.begins(10.0, groups(4)) == (10.0, 22.0, True)
    trainer = SimTrainer(SimOrchestratorSection(groups_per_step=4, group_size=1), Costs())
    assert trainer.begins(10.0, groups(1)) == (10.0, 13.0, False)
    assert trainer.begins(11.0, groups(2)) == (13.0, 19.0, False)  # it waits for its turn
    assert not trainer.ends(13.0) and trainer.busy
    assert trainer.ends(19.0) and not trainer.busy
    assert trainer.begins(30.0, groups(1)) == (30.0, 33.0, True)
    assert trainer.ends(33.0)
    assert trainer.begins(40.0, groups(4)) == (40.0, 52.0, True)  # the next step


SMALL = {
    "steps": 8, "warmup_steps": 2, "report_tokens": 64, "hardware.chips": 16, "hardware.rollout_chips": 8,
    "hardware.tensor": 2, "hardware.slots": 64, "workload.mean_tokens": 200.0, "workload.max_new_tokens": 4000,
    "workload.max_prompt_tokens": 256, "orchestrator.groups_per_step": 16, "orchestrator.group_size": 4,
    "orchestrator.rebalance_period_s": 2.0, "cost.train_fixed_s": 12.0, "orchestrator.inflight": 1.15,
}  # fmt: skip


def step_s(mode, **changes):
    made = config.replace(config.SimConfig(), SMALL | changes)
    result = run.simulate(config.Row(label=mode, mode=mode, config=made, published={}))
    assert sum(result.trainer.values()) == pytest.approx(1.0) and sum(result.rollout.values()) == pytest.approx(1.0)
    return result


def test_a_step_in_parts_hides_the_wait_for_its_stragglers():
    whole, parts = step_s("dora"), step_s("dora", **{"orchestrator.updates": 8})
    assert parts.step_s < 0.95 * whole.step_s
    assert parts.rollout_only < whole.rollout_only / 2
    assert max(parts.lags) <= 2


@pytest.mark.parametrize("mode", ["one_step", "partial", "evict"])
def test_every_mode_that_can_takes_parts(mode):
    whole, parts = step_s(mode), step_s(mode, **{"orchestrator.updates": 8})
    assert parts.step_s < whole.step_s and parts.rollout_only < whole.rollout_only


def test_a_mode_that_promises_whole_steps_takes_parts_where_it_is_reported_to():
    for mode in ("sync", "dora_paper"):
        updates = {"orchestrator.updates": 8}
        whole, parts = step_s(mode, **updates), step_s(mode, **updates, **{"orchestrator.decisions": {"parts": 8}})
        assert parts.step_s < whole.step_s and max(parts.lags) <= max(whole.lags)


def test_instances_on_the_chips_of_the_trainer_never_decode_beside_it():
    given = {"orchestrator.updates": 8, "hardware.rollout_chips": 0}
    parts = step_s("sync", **given, **{"orchestrator.decisions": {"parts": 8}})
    assert parts == step_s("sync", **given)
    assert parts.rollout["paused"] == pytest.approx(parts.trainer["train"], rel=1e-6)


@pytest.mark.parametrize("mode", ["partial", "evict"])
def test_a_trainer_without_a_deadline_rule_waits_for_groups(mode):
    for updates in (1, 8):
        assert step_s(mode, **{"orchestrator.updates": updates}).trainer["wait: deadline"] == 0


def test_modes_that_take_whole_steps_wait_for_whole_steps():
    for mode in ("sync", "dora_paper"):
        assert step_s(mode).trainer == step_s(mode, **{"orchestrator.updates": 8}).trainer
