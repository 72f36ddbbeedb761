"""Prefill on instances of its own: the others decode meanwhile, the pool is a queue, and no sample is lost on the
way."""

import pytest

from dora_jax.config import ConfigError
from dora_jax.costs import Hardware
from dora_jax.sim import config
from dora_jax.sim.instance import ENTERED, STOPPED, Job
from dora_jax.sim.prefill import DecodingInstance, PrefillPool
from dora_jax.sim.workload import Turn
from dora_jax.types import SampleId
from tests.fakes.sim_runs import simulate


class Costs:
    """A tick takes 10 ms, a token's prefill 1 ms, a token's KV 0.1 ms on its way."""

    pages, mixes, decode_kv_s, window = 1000, False, 0.0, 0

    def decode_base_s(self, batch):
        return 0.01

    def prefill_s(self, tokens, past=0):
        return tokens * 1e-3

    def move_s(self, tokens):
        return tokens * 1e-4


def job(index, prompt, tokens):
    return Job(SampleId(0, index), 0, prompt, [Turn(tokens, 0.0, 0)])


def run(instance):
    """[(what, index, time)] until nothing more happens."""
    found = []
    while (now := instance.next_time()) < float("inf"):
        instance.advance(now)
        found += [(what, one.id.index, pytest.approx(now)) for what, one in instance.happen() if one is not None]
    return found


def test_an_instance_decodes_while_the_pool_prefills_one_sample_after_the_other():
    pool = PrefillPool(Costs(), 1)
    instance = DecodingInstance(pool, 0, 0, Costs(), {}, slots=8, page_size=16, speed=1.0, report_ticks=10**9)
    for each in (job(0, 100, 20), job(1, 100, 20)):
        instance.submit(each, "start")
    assert run(instance) == [(ENTERED, 0, 0.11), (ENTERED, 1, 0.21), (STOPPED, 0, 0.31), (STOPPED, 1, 0.41)]
    assert instance.spent["wait"] == pytest.approx(0.11) and instance.spent["prefill"] == 0.0
    assert instance.free_tokens == instance.capacity


def test_a_sample_may_leave_before_its_keys_and_values_come():
    pool = PrefillPool(Costs(), 2)
    instance = DecodingInstance(pool, 0, 0, Costs(), {}, slots=8, page_size=16, speed=1.0, report_ticks=10**9)
    jobs = [job(i, 100, 20) for i in range(3)]
    for each in jobs:
        instance.submit(each, "start")
    assert instance.take(SampleId(0, 1)) is jobs[1]
    assert set(instance.clear()) == {jobs[0], jobs[2]}
    assert instance.free_tokens == instance.capacity and run(instance) == []


@pytest.mark.parametrize("mode", ["dora", "partial"])
def test_every_sample_ends_once_where_instances_die(mode):
    work = {"workload__turns": 3.0, "workload__environment_s": 1.0, "workload__observation_tokens": 200}
    result, audit = simulate(mode, hardware__prefill_chips=2, fault__mtbf_s=30.0, fault__repair_s=10.0, **work)
    assert result.rollout["prefill"] == 0.0 and audit.lost > 3
    trained = set(audit.trained)
    assert max(audit.ended.values()) == 1 and all(
        audit.ended[id] == 1 for id in audit.started if id.group_id in trained
    )


def test_chips_that_prefill_are_of_the_rollout():
    hardware = Hardware(chips=16, rollout_chips=8, tensor=2, prefill_chips=2)
    assert (hardware.instances, hardware.trainer_chips) == (3, 8)
    for chips, sentence in ((1, "prefill_chips: 1 make no instance of 4"), (32, "does not fit on 0")):
        c = config.defaults()
        c.hardware.rollout_chips, c.hardware.prefill_chips = 32, chips
        with pytest.raises(ConfigError, match=sentence):
            config.from_config_dict(c)
