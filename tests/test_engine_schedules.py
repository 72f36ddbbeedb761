"""At fixed shapes a sample's tokens and log-prob bits depend on its identity alone, whatever else happens."""

import dataclasses
import random

import numpy as np
import pytest

from dora_jax.types import SampleId
from tests.fakes.engine_rig import assert_undisturbed, finish, ids, loaded, submit, undisturbed, weights


@pytest.mark.slow
def test_batch_mates_and_order_do_not_matter():
    with loaded("a") as engine:
        order = ids((0, 1, 2, 3, 4, 5))
        random.Random(0).shuffle(order)
        for id in order:
            submit(engine, id)
        done = finish(engine)
    for sample in done.values():
        assert_undisturbed(sample)


def test_longer_context_of_a_batch_mate_does_not_matter():
    """Group 0 stays within one context block alone; beside group 3 its calls run with two."""
    with loaded("a") as engine:
        submit(engine, SampleId(3, 0))
        engine.tick()
        engine.tick()
        submit(engine, SampleId(0, 0), max_new_tokens=16)
        sample = finish(engine)[SampleId(0, 0)]
        submit(engine, SampleId(0, 0), max_new_tokens=16)
        alone = finish(engine)[SampleId(0, 0)]
    np.testing.assert_array_equal(sample.logprobs, alone.logprobs)
    np.testing.assert_array_equal(sample.out_ids, undisturbed(SampleId(0, 0)).out_ids[:16])


def test_preemption_to_host_and_back_changes_nothing():
    with loaded("small") as engine:
        preempts = []
        plan = engine.scheduler.plan
        engine.scheduler.plan = lambda: (p := plan(), preempts.extend(p.preempts))[0]
        for id in ids((3, 4), size=3):
            submit(engine, id)
        done = finish(engine)
        engine.scheduler.plan = plan
    assert len(preempts) >= 2 and any(p.kv_len > 20 for p in preempts)
    assert len(done) == 6
    for sample in done.values():
        assert_undisturbed(sample)


@pytest.mark.parametrize("ticks", range(9))
def test_migration_at_any_moment_changes_nothing(ticks):
    """Moments 0 .. 2 are before and inside the prefill (20 tokens in chunks of 8)."""
    moved = SampleId(21, 2)
    with loaded("a", "small") as (a, b):
        for id in (moved, SampleId(2, 0)):
            submit(a, id)
        submit(b, SampleId(4, 1))
        done = {s.id: s for _ in range(ticks) for e in (a, b) for s in e.tick().finished}
        if a.holds(moved):
            request = a.export(moved)
            assert not a.holds(moved)
            assert request.kv_len == [0, 8, 16][ticks] if ticks < 3 else request.kv_len >= 19
            b.import_(request)
        done |= finish(a, b)
    for sample in done.values():
        assert_undisturbed(sample)


@pytest.mark.parametrize("late", ["off", "on"])
@pytest.mark.parametrize("seed", range(4))
def test_random_schedules(seed, late, monkeypatch):
    """Submit, cancel, park, move, preempt, load and drop in random order over engines with unequal page budgets."""
    rng = random.Random(seed)
    with loaded("a", "small") as engines:
        for engine in engines:
            monkeypatch.setattr(engine, "section", dataclasses.replace(engine.section, late_results=late))
        todo = [(id, version) for version in (0, 1) for id in ids((0, 1, 2, 3, 4, 5), size=2)]
        rng.shuffle(todo)
        cancelled, parked, done = set(), [], {}
        for _ in range(400):
            engine = rng.choice(engines)
            held = list(engine.scheduler.seqs)
            act = rng.random()
            if act < 0.3 and todo:
                id, version = todo.pop()
                target = SampleId(id.group_id, id.index + 10 * version)  # one id a version
                if version in engine.versions:
                    submit(engine, target, version)
                else:
                    todo.insert(0, (id, version))
            elif act < 0.4 and held:
                id = rng.choice(held)
                if engine.holds(id):  # else what was in flight has ended it
                    parked.append(engine.export(id))
            elif act < 0.43 and held:
                id = rng.choice(held)
                cancelled.add((id, engine.version_of(id)))
                assert engine.cancel(id)
            elif act < 0.5:
                version = rng.choice((0, 1))
                if version not in engine.versions:
                    engine.load(version, weights(engine, seed=version))
                elif not engine.scheduler.running(version):
                    engine.drop(version)
            elif act < 0.6 and parked and parked[-1].version in engine.versions:
                engine.import_(parked.pop())
            else:
                result = engine.tick()
                done |= {s.id: s for s in result.finished}
                assert set(result.progress) <= {*done, *engine.scheduler.seqs}, "what left is spoken of"
            engine.check()
        for engine in engines:
            for version in (0, 1):
                if version not in engine.versions:
                    engine.load(version, weights(engine, seed=version))
        for request in parked:
            engines[0].import_(request)
        done |= finish(*engines)
    assert len(done) + len(cancelled) + len(todo) == 24 and len(done) > 12
    for sample in done.values():
        assert_undisturbed(sample)


def test_late_results_change_nothing_but_when_they_are_seen():
    mates = ids((3, 9, 21), size=3)  # more than the pages hold: they preempt each other
    with loaded("small") as engine:
        plain = engine.section
        engine.section = dataclasses.replace(plain, late_results="on")
        for id in mates:
            submit(engine, id)
        first, second, third = engine.tick(), engine.tick(), engine.tick()
        done, preempted = {}, 0
        while not engine.idle:
            done |= {s.id: s for s in engine.tick().finished}
            for _, seq in engine.scheduler.resuming:
                if seq.n_out:  # it decoded: the host holds all tokens whose KV it holds
                    preempted += 1
                    engine.host.put(held := engine.host.take(seq.request))
                    assert held.kv_len == 20 + len(held.out_ids) - 1
        engine.section = plain
    assert first.tokens == second.tokens == third.tokens == 0  # two chunks, then a call that is not yet read back
    assert preempted and set(done) == set(mates)
    for sample in done.values():
        assert_undisturbed(sample)


def test_exporting_lands_what_is_in_flight():
    id = SampleId(21, 2)
    with loaded("small", "a") as (engine, other):
        plain = engine.section
        engine.section = dataclasses.replace(plain, late_results="on")
        submit(engine, id)
        for _ in range(4):
            engine.tick()
        request = engine.export(id)
        engine.section = plain
        assert len(request.out_ids) == 8 and request.kv_len == 27
        other.import_(request)
        sample = finish(other)[id]
    assert_undisturbed(sample)
