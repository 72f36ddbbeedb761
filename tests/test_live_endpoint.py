"""The endpoint on the rollout fleet of a run: one version an answer, nothing trained, nothing in the way of the run."""

import asyncio
import threading
import time

import numpy as np
import pytest

from dora_jax.runtime.common.worker import Finished
from dora_jax.types import is_served
from tests.fakes.coordinator_world import ORACLE, STEPS, G, P, trained_by
from tests.fakes.endpoint import Rig
from tests.fakes.live_endpoint import Run
from tests.fakes.oracle import OracleEngine

LOADED = STEPS - 3  # for later versions there is no training sample left, so no instance loads them


def short(version, group, index, limit):
    return min(limit, 64 if is_served(group) else 4)


def test_each_answer_is_of_the_version_it_names_while_the_run_trains_as_it_would_without():
    with Run(short, hold_versions=1, hold_s=600.0) as run:
        received = [run.ask(session="a")]
        for _ in range(LOADED):
            run.publish(1)
            received += [run.ask(session="a"), run.ask(session=f"new {len(received)}"), run.ask(model="policy@0")]
    assert {status for status, _ in received} == {200} and run.halt.ok
    assert {answer["weight_version"] for _, answer in received} == set(range(LOADED + 1))
    assert [answer["weight_version"] for _, answer in received[:1] + received[1::3] + received[3::3]] == [0] * (
        2 * LOADED + 1
    )
    tokens = {tuple(ORACLE.expected(s.version, *s.id, len(s.out_ids))): s.version for s in served(run)}
    for _, answer in received:
        assert tokens[tuple(answer["choices"][0]["token_ids"])] == answer["weight_version"]
    trained = [group for _, group in trained_by(run.records)]
    assert len(trained) == STEPS * P and all(len(group.samples) == G for group in trained)
    assert not any(is_served(group.group_id) for group in trained)


def test_a_version_that_training_has_left_behind_answers_410():
    with Run(short) as run:
        assert run.ask(session="a")[0] == 200
        run.publish(LOADED)
        run.until(lambda: 0 not in run.brain.state.alive)
        run.until(lambda: "policy@0" not in [card["id"] for card in run.get("/v1/models")["data"]])
        run.facts.write(3, {"reward/mean": 0.5})
        assert run.get("/healthz") == {"status": "ok", "step": 3, "verdicts": []}
        assert "dora_run_reward_mean 0.5\n" in run.text("/metrics") and "dora_tokens 64.0\n" in run.text("/metrics")
        for asked in ({"session": "a"}, {"model": "policy@0"}):
            status, error = run.ask(**asked)
            assert status == 410 and error["code"] == "version_retired" and "retired" in error["message"]
        assert run.ask(model="policy@99")[0] == 404


class Slow(OracleEngine):
    def tick(self):
        time.sleep(0.01)
        return super().tick()


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_slot_and_one_that_comes_back_gets_the_answer():
    body = {"session": "a", "sampling_params": {"max_tokens": 60}}
    with Run(short, engine=Slow) as run:
        connection = run.connect(**body)
        run.until(lambda: any(map(is_served, run.brain.state.groups)))
        connection.close()
        run.until(lambda: not any(map(is_served, run.brain.state.groups)))
        status, answer = run.ask(**body)
    (sample,) = served(run)
    assert status == 200 and run.halt.ok
    np.testing.assert_array_equal(answer["choices"][0]["token_ids"], ORACLE.expected(0, *sample.id, 60))


class Stuck(OracleEngine):
    """It hears of no request."""

    def submit(self, id, *rest):
        if not is_served(id.group_id):
            super().submit(id, *rest)


def test_a_client_that_waits_when_the_run_ends_is_answered_so():
    notes = []
    with Run(short, engine=Stuck) as run:
        client = threading.Thread(target=lambda: notes.append(run.ask(session="a")))
        client.start()
        run.until(lambda: any(map(is_served, run.brain.state.groups)))
    client.join()
    assert run.halt.ok and notes[0][0] == 503 and notes[0][1]["message"] == "the run has ended"


def test_a_seed_names_the_same_sample_on_a_run_as_where_its_checkpoint_is_served():
    """By its name an engine draws its tokens."""
    body = {"token_ids": [1, 2, 3], "sampling_params": {"seed": 7, "max_tokens": 60}}
    with Run(short) as run:
        assert run.ask(**body)[0] == 200
    (sample,) = served(run)

    async def alone():
        async with Rig(versions=(0,)) as rig:
            call = await rig.ask("/inference/v1/generate", body)
            assert call.json["choices"][0]["token_ids"] == rig.engines[0].expected(0, *sample.id, 60).tolist()

    asyncio.run(alone())


def served(run):
    found = [record.sample for record in run.records if isinstance(record, Finished)]
    return [sample for sample in found if is_served(sample.id.group_id)]
