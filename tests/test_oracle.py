"""The oracle engine proves each token's version; its own mistakes must show."""

import dataclasses

import numpy as np
import pytest

from dora_jax.config import RolloutSection
from dora_jax.plan import presets
from dora_jax.rollout.migrate import observed
from dora_jax.types import SampleId
from tests.fakes.oracle import OracleEngine, mix

SECTION = presets.on_cpu(RolloutSection(residents=2, slots=3, decode_steps=4))


def engine(**options):
    e = OracleEngine(SECTION, eos_ids=(5,), **options)
    e.load(0, None)
    e.load(1, None)
    return e


def finish(*engines):
    samples = []
    while not all(e.idle for e in engines):
        for e in engines:
            samples += e.tick().finished
            e.check()
    return {s.id: s for s in samples}


def assert_claimed_version(e, sample):
    n = len(sample.out_ids) - (sample.finish == "stop")
    np.testing.assert_array_equal(sample.out_ids[:n], e.expected(sample.version, *sample.id, n))


def test_tokens_prove_their_version_through_a_migration():
    a, b = engine(), engine()
    ids = [SampleId(group, index) for group in (-1, 3) for index in range(4)]
    for id in ids:
        a.submit(id, np.arange(7), id.index % 2, 40)
    first = a.tick()
    assert first.started == tuple(ids[:3]) and first.tokens == sum(first.progress.values())
    for id in ids[2:5]:
        if a.holds(id):
            b.import_(a.export(id))
    done = {s.id: s for s in first.finished} | finish(a, b)
    assert set(done) == set(ids)
    for sample in done.values():
        assert_claimed_version(a, sample)
        assert sample.finish == "length" or sample.out_ids[-1] == 5


def test_stale_weights_show():
    e = OracleEngine(SECTION, length=lambda *_: 6, version_in=lambda params: params)
    e.load(1, 0)  # claims 1, carries 0
    e.submit(SampleId(0, 0), np.arange(3), 1, 6)
    sample = finish(e)[SampleId(0, 0)]
    with pytest.raises(AssertionError):
        assert_claimed_version(e, sample)
    np.testing.assert_array_equal(sample.out_ids, e.expected(0, 0, 0, 6))


def test_kv_of_another_version_is_refused():
    a, b = engine(length=lambda *_: 20), engine(length=lambda *_: 20)
    a.submit(SampleId(0, 0), np.arange(3), 0, 20)
    a.tick()
    request = dataclasses.replace(a.export(SampleId(0, 0)), version=1)
    with pytest.raises(RuntimeError, match="not its own"):
        b.import_(request)


def test_identity_reaches_every_part():
    base = mix(1, 2, 3, 4)
    assert len({base, mix(0, 2, 3, 4), mix(1, -2, 3, 4), mix(1, 2, 0, 4), mix(1, 2, 3, 0)}) == 5


def test_tokens_of_every_turn_prove_their_version():
    """Turns end by a stop token, by their limit, and the episode by its own; some go on in another engine."""
    a, b = engine(), engine()
    for index in range(6):
        a.submit(SampleId(2, index), np.arange(4), index % 2, 40, turn_tokens=9)
    done, turns, by_limit = {}, 0, 0
    while not (a.idle and b.idle):
        for e in (a, b):
            result = e.tick()
            done |= {s.id: s for s in result.finished}
            for in_flight in result.waiting:
                turns += 1
                by_limit += in_flight.out_ids[-1] != 5
                assert not e.holds(in_flight.id)
                (b if turns % 2 else a).import_(observed(in_flight, np.array([7, 7, 7])))
            e.check()
    assert len(done) == 6 and turns > 6 and by_limit
    for sample in done.values():
        assert sample.finish == "length" and sample.mask.sum() == 40 and sample.mask[-1]
        drawn = sample.mask & (sample.out_ids != 5)
        of_version = a.expected(sample.version, *sample.id, len(sample.out_ids))
        np.testing.assert_array_equal(sample.out_ids[drawn], of_version[drawn])
        assert (sample.out_ids[~sample.mask] == 7).all() and (sample.logprobs[~sample.mask] == 0).all()


def test_an_episode_whose_turn_is_over_waits_again():
    """One that its instance gave back before anything was observed."""
    a, b = engine(), engine()
    a.submit(SampleId(2, 0), np.arange(4), 0, 40, turn_tokens=9)
    while not (waiting := a.tick().waiting):
        pass
    b.import_(waiting[0])
    result = b.tick()
    assert result.waiting == waiting and not result.tokens and b.idle
