"""Pages of episodes that wait: kept while they are plentiful, then on the host within its budget, then made again."""

import collections
import dataclasses
import random

import ml_dtypes
import numpy as np
import pytest

from dora_jax.rollout.migrate import HostKV, ended, observed
from dora_jax.types import SampleId
from tests.fakes.engine_rig import assert_undisturbed, finish, ids, loaded, new_engine, submit, weights
from tests.fakes.episode_rig import begin, play, quiet, reply
from tests.fakes.requests import request


def waiting_in(engine, *which):
    """These episodes at the end of their first turn."""
    for id in which:
        begin(engine, id)
    found = {}
    while len(found) < len(which):
        found |= {in_flight.id: in_flight for in_flight in engine.tick().waiting}
        engine.check()
    return found


def watched(engine, monkeypatch):
    """What goes between host and device."""
    copies = {"out": 0, "in": 0, "prefilled": 0}
    read, write, prefill = engine.device.read_pages, engine.device.write_pages, engine.device.prefill

    def counted(name, call, n):
        def run(*args):
            copies[name] += n(*args)
            return call(*args)

        return run

    monkeypatch.setattr(engine.device, "read_pages", counted("out", read, len))
    monkeypatch.setattr(engine.device, "write_pages", counted("in", write, lambda pages, arrays: len(pages)))
    tokens = lambda params, control, blocks: int((control[:, 1] - control[:, 2]).sum())
    monkeypatch.setattr(engine.device, "prefill", counted("prefilled", prefill, tokens))
    return copies


def test_with_pages_to_spare_nothing_is_copied(monkeypatch):
    id = SampleId(3, 0)
    with loaded("a") as engine:
        held = waiting_in(engine, id)[id]
        assert not held.n_pages and not engine.holds(id) and engine.idle
        assert engine.free_pages == engine.section.pages - engine.shapes.pages_for(19), "its prompt's prefix alone"
        assert not engine.scheduler.seqs, "its slot is free"
        copies = watched(engine, monkeypatch)
        engine.import_(observed(held, reply(held)))
        (second,) = play(engine, turns=2).values()
    assert copies == {"out": 0, "in": 0, "prefilled": len(reply(held)) + len(reported_after(second))}


def reported_after(sample):
    """What was observed behind the second turn and later."""
    starts = np.flatnonzero(np.diff(sample.mask.astype(int)) == -1)
    return sample.mask[starts[1] :][~sample.mask[starts[1] :]] if len(starts) > 1 else sample.mask[:0]


def test_pages_go_to_the_host_for_others_and_back_without_a_prefill(monkeypatch):
    """Versions come, run and go meanwhile; the tokens are those of an episode that nobody disturbed."""
    waits = [SampleId(3, 7), SampleId(2, 7)]
    whole = {id: quiet(id) for id in waits}
    with loaded("small") as engine:
        held = waiting_in(engine, *waits)
        copies = watched(engine, monkeypatch)
        engine.load(1, weights(engine, seed=1))
        for id in ids((3, 4), size=3):
            submit(engine, id, version=1)
        others = finish(engine)
        engine.drop(1)
        assert copies["out"] and next(iter(held)) in engine.host, "the longest-waiting first"
        others_prefill, copies["prefilled"] = copies["prefilled"], 0
        for in_flight in held.values():
            engine.import_(observed(in_flight, reply(in_flight)))
        first = engine.tick()
        while not (done := {in_flight.id: in_flight for in_flight in first.waiting}):
            first = engine.tick()
        assert copies["in"] and copies["prefilled"] <= sum(len(reply(each)) for each in held.values())
        assert others_prefill and done
        for in_flight in done.values():
            n = len(in_flight.out_ids)
            np.testing.assert_array_equal(in_flight.out_ids, whole[in_flight.id].out_ids[:n])
            np.testing.assert_array_equal(in_flight.logprobs, whole[in_flight.id].logprobs[:n])
            engine.forget(in_flight.id)
        for id in waits:
            engine.cancel(id)
    for sample in others.values():
        assert_undisturbed(sample)


def test_its_own_version_may_leave_the_instance_and_come_back():
    id = SampleId(3, 1)
    whole = quiet(id)
    with loaded("a") as engine:
        held = waiting_in(engine, id)[id]
        engine.drop(0)
        assert engine.free_pages == engine.section.pages and id in engine.host
        engine.load(0, weights(engine))
        engine.import_(observed(held, reply(held)))
        sample = play(engine, turns=2)[id]
    n = len(sample.out_ids)
    np.testing.assert_array_equal(sample.out_ids, whole.out_ids[:n])
    np.testing.assert_array_equal(sample.logprobs, whole.logprobs[:n])


def test_beyond_the_budget_kv_is_dropped_counted_and_reported_and_made_again(monkeypatch):
    reported_aloud = []
    with loaded("small") as engine:
        host = HostKV(1, reported_aloud.append)
        monkeypatch.setattr(engine, "host", host)
        monkeypatch.setattr(engine.scheduler, "host", host)
        for id in ids((2, 3, 4), size=2):
            begin(engine, id)
        done = play(engine)
        assert host.bytes == 0
    assert host.dropped and host.dropped_tokens > host.dropped and len(done) == 6
    assert (
        reported_aloud[0].startswith("the KV of sample (")
        and "rollout.host_kv_bytes is 1 (1 samples" in reported_aloud[0]
    )
    for sample in done.values():  # across shapes: as far as no near-tie falls the other way
        same = quiet(sample.id)
        n = min(len(sample.out_ids), len(same.out_ids))
        other = np.flatnonzero(sample.out_ids[:n] != same.out_ids[:n])
        n = int(other[0]) if len(other) else n
        assert n > 4
        np.testing.assert_allclose(sample.logprobs[:n], same.logprobs[:n], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_of_episodes(seed):
    """Turns that are answered at once or late, here or elsewhere; answers, samples and versions come and go in any
    order."""
    rng = random.Random(seed)
    todo = ids((0, 1, 2, 3, 4, 5), size=2)
    whole = {id: quiet(id) for id in todo}
    rng.shuffle(todo)
    kept, parked, turns, done, cancelled = {}, [], collections.Counter(), {}, set()
    with loaded("a", "small") as engines:
        while todo or kept or parked or not all(engine.idle for engine in engines):
            act, engine = rng.random(), rng.choice(engines)
            other = engines[engine is engines[0]]
            held = [id for id in engine.scheduler.seqs if engine.holds(id)]
            if act < 0.15 and todo and 0 in engine.versions:
                begin(engine, todo.pop())
            elif act < 0.35 and kept:
                keeper, in_flight = kept.pop(rng.choice([*kept]))
                there = rng.choice(engines)
                if 0 not in there.versions:
                    there.load(0, weights(there))
                mine = in_flight if there is keeper else keeper.with_kept(in_flight)
                there.import_(observed(mine, reply(mine)))
            elif act < 0.4 and held:
                parked.append(engine.export(rng.choice(held)))
            elif act < 0.45 and parked and 0 in engine.versions:
                engine.import_(parked.pop())
            elif act < 0.47 and held and len(cancelled) < 3:
                cancelled.add(id := rng.choice(held))
                engine.cancel(id)
            elif act < 0.5 and 0 in engine.versions and not engine.scheduler.running(0) and 0 in other.versions:
                engine.drop(0)
            for each in engines if act >= 0.5 else ():
                result = each.tick()
                done |= {sample.id: sample for sample in result.finished}
                for in_flight in result.waiting:
                    turns[in_flight.id] += 1
                    if turns[in_flight.id] == 3:
                        done[in_flight.id] = ended(in_flight, "stop")
                        each.forget(in_flight.id)
                    else:
                        kept[in_flight.id] = each, in_flight
            for each in engines:
                each.check()
            if not any(0 in each.versions for each in engines):
                engine.load(0, weights(engine))
    assert len(done) + len(cancelled) == 12
    for id, sample in done.items():
        np.testing.assert_array_equal(sample.out_ids, whole[id].out_ids)
        np.testing.assert_array_equal(sample.logprobs.view(np.int32), whole[id].logprobs.view(np.int32))
        np.testing.assert_array_equal(sample.mask, whole[id].mask)


@pytest.mark.slow
def test_float8_kv_and_keep_sets_go_to_the_host_and_back():
    """With them too an episode that was on the host is the same as one that kept its pages."""
    engine = new_engine(device=4, kv="float8", keep_set=True, top_k=5, temperature=1.0)
    engine.load(0, weights(engine))
    outcomes = []
    for elsewhere in (False, True):
        waits = [SampleId(3, 0), SampleId(2, 1)]
        held, after = waiting_in(engine, *waits), {}
        for in_flight in held.values():
            held_in = engine.with_kept(in_flight) if elsewhere else in_flight
            assert not elsewhere or held_in.k_pages.dtype == ml_dtypes.float8_e4m3fn
            engine.import_(observed(held_in, reply(in_flight)))
        while len(after) < 2:
            after |= {in_flight.id: in_flight for in_flight in engine.tick().waiting}
        for id in waits:
            engine.forget(id)
        outcomes.append(after)
    for id, here in outcomes[0].items():
        there = outcomes[1][id]
        for name in ("out_ids", "logprobs", "mask", "kept"):
            np.testing.assert_array_equal(getattr(here, name), getattr(there, name))
        assert (here.kept[~here.mask] == -1).all() and (here.kept[here.mask][:, 0] >= 0).all()
        drawn = here.out_ids[here.mask]
        assert (here.kept[here.mask] == drawn[:, None]).any(1).all(), "each token is of its own keep set"


def test_an_episode_that_is_cancelled_or_forgotten_holds_nothing():
    with loaded("a") as engine:
        held = waiting_in(engine, *ids((0, 3), size=2))
        cancelled, forgotten, *_ = held
        assert not engine.cancel(cancelled) and cancelled not in engine.scheduler.resting
        engine.forget(forgotten)
        engine.check()
        assert len(list(engine.scheduler.resting)) == 2
        for id in held:
            engine.with_kept(held[id])
        assert not engine.host.bytes and not list(engine.scheduler.resting)


@pytest.mark.parametrize("keep", [1, 3])
def test_what_is_rewritten_is_cut_from_the_pages_that_are_kept(keep):
    id = SampleId(3, 1)
    with loaded("a", "small") as (a, b):
        outcomes = []
        for engine, elsewhere in ((a, False), (b, True)):
            held = waiting_in(engine, id)[id]
            held = engine.with_kept(held) if elsewhere else held
            engine.import_(observed(held, np.array([11, 12]), keep=20 + keep))
            while not (waiting := engine.tick().waiting):
                engine.check()
            outcomes.append(waiting[0])
    here, there = outcomes
    np.testing.assert_array_equal(here.out_ids, there.out_ids)
    np.testing.assert_array_equal(here.logprobs, there.logprobs)


def test_the_host_keeps_to_its_budget_and_gives_each_kv_once():
    one = request()
    host = HostKV(int(2.5 * one.kv_bytes))
    for index in range(3):
        host.put(dataclasses.replace(one, id=SampleId(0, index)))
    assert (
        SampleId(0, 0) not in host and host.bytes == 2 * one.kv_bytes and (host.dropped, host.dropped_tokens) == (1, 11)
    )
    host.put(dataclasses.replace(one, id=SampleId(0, 1)))
    assert host.bytes == 2 * one.kv_bytes
    bare = dataclasses.replace(one, id=SampleId(0, 1), kv_len=0, page_size=0, k_pages=None, v_pages=None)
    assert host.take(bare).kv_len == 11 and host.take(bare).kv_len == 0
    for index in range(3):
        host.forget(SampleId(0, index))
    assert host.bytes == 0
