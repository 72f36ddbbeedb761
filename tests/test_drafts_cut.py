"""Drafts cut off between their making and what is kept of them: by death, a move, a shortage of pages. The tokens are
those of an engine without drafts that nothing disturbs."""

import functools

import numpy as np
import pytest

from dora_jax.rollout.migrate import InFlightSample
from tests.fakes.engine_rig import finish, ids, new_engine, prompt, submit, weights

COLD = {"temperature": 0.1, "decode_steps": 1, "draft_cost": 0.3}  # siblings are alike
pytestmark = pytest.mark.slow


class PowerCut(Exception):
    """The process has died."""


@functools.cache
def engine(name):
    made = new_engine(
        **{
            "drafts": 5,
            **{"plain": {"drafts": 0}, "there": {"device": 1}, "few pages": {"pages": 24}}.get(name, {}),
            **COLD,
        }
    )
    made.load(0, weights(made))
    return made


@functools.cache
def undisturbed(group):
    for id in ids((group,), size=4):
        submit(engine("plain"), id)
    return finish(engine("plain"))


def assert_undisturbed(done, group):
    assert done.keys() == undisturbed(group).keys()
    for id, sample in undisturbed(group).items():
        np.testing.assert_array_equal(done[id].out_ids, sample.out_ids)
        np.testing.assert_allclose(done[id].logprobs, sample.logprobs, rtol=0, atol=1e-4)
        assert done[id].finish == sample.finish


class Cut:
    """Something happens where an engine's `at`th verifying call is on the device and nothing of it has come back."""

    def __init__(self, engine, at, happens):
        self.calls, self._at, self._happens = 0, at, happens
        self._verify, self._device = engine.device.verify, engine.device
        self._device.verify = self

    def __call__(self, *arguments):
        launched = self._verify(*arguments)
        self.calls += 1
        if self.calls == self._at:
            self._happens()
        return launched

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        del self._device.verify


def power_fails():
    raise PowerCut


@pytest.mark.parametrize("at", (1, 4))
def test_a_process_dies_while_its_drafts_are_on_the_device(at):
    here, there, done, output = engine(f"dies at {at}"), engine("there"), {}, {}
    for id in ids((0,), size=4):
        submit(here, id)
    with Cut(here, at, power_fails) as cut, pytest.raises(PowerCut):
        for _ in range(100):
            output = {id: here.sampled(id) for id in here.scheduler.seqs}  # as reports have it
            calls, result = cut.calls, here.tick()
            done |= {sample.id: sample for sample in result.finished}
            assert cut.calls == calls or result.drafted  # a verifying call's tokens tell no decode step's time
    assert output
    for id, tokens in output.items():
        there.import_(
            InFlightSample(
                id=id,
                version=0,
                prompt_ids=prompt(id.group_id),
                out_ids=tokens.out_ids,
                logprobs=tokens.logprobs,
                max_new_tokens=24,
            )
        )
    assert_undisturbed(done | finish(there), 0)


@pytest.mark.parametrize("kv", ("exported", "cancelled, its reported tokens go on"))
def test_a_sample_moves_while_its_drafts_are_on_the_device(kv):
    here, there, group = engine("here"), engine("there"), 1 if kv == "exported" else 3
    moves, done = ids((group,), size=4)[1], {}
    for id in ids((group,), size=4):
        submit(here, id)

    def moved():
        if kv == "exported":
            return there.import_(here.export(moves))
        tokens = here.sampled(moves)
        assert here.cancel(moves)
        there.import_(
            InFlightSample(
                id=moves,
                version=0,
                prompt_ids=prompt(group),
                out_ids=tokens.out_ids,
                logprobs=tokens.logprobs,
                max_new_tokens=24,
            )
        )

    with Cut(here, 2, moved) as cut:
        done |= finish(here, there)
    assert cut.calls > 2
    assert_undisturbed(done, group)


def test_pages_run_short_while_drafts_wait_for_theirs():
    few = engine("few pages")
    drafter, preempt, preempted = few.scheduler.decoding.drafter, few.scheduler.preempt, []

    def counted(seq, plan):
        preempted.append(drafter.verified)
        preempt(seq, plan)

    few.scheduler.preempt = counted
    for group in (2, 3, 4):
        for id in ids((group,), size=4):
            submit(few, id)
        done = finish(few)
        assert_undisturbed(done, group)
    assert len(set(preempted)) > 1 and drafter.accepted  # between verifying calls


def test_siblings_of_another_engine_draft_and_change_no_token():
    """Half of a group ends on one engine before the others begin on another, as after a resume."""
    here, there = engine("here"), engine("there")
    drafter = there.scheduler.decoding.drafter
    before = drafter.accepted
    for group in (5, 6):
        for id in ids((group,), size=4)[:2]:
            submit(here, id)
        done = finish(here)
        for sample in done.values():
            there.know(sample.id, sample.out_ids)
        for id in ids((group,), size=4)[2:]:
            submit(there, id)
        assert_undisturbed(done | finish(there), group)
    assert drafter.accepted > before
    engine("plain").know(ids((5,))[0], np.arange(3, dtype=np.int32))  # without drafts it takes no notice
