"""Episodes of the engine tests: an environment whose answer is a function of the episode's tokens."""

import functools

import numpy as np

from dora_jax.rollout.migrate import ended, observed
from tests.fakes.engine_rig import VOCAB, loaded, prompt

TURN = 5  # tokens that a turn may sample
MAX_NEW = 20


def reply(in_flight):
    """What the environment says: a function of the episode's tokens; lengths on both sides of a chunk and of a page."""
    rng = np.random.default_rng(int(in_flight.out_ids.sum()) + len(in_flight.out_ids))
    return rng.integers(6, VOCAB, (1, 2, 3, 9)[int(in_flight.out_ids[-1]) % 4])


def begin(engine, id, version=0, max_new_tokens=MAX_NEW, turn_tokens=TURN):
    engine.submit(id, prompt(id.group_id), version, max_new_tokens, turn_tokens)


def play(*engines, turns=3, answer=lambda in_flight: None, limit=400):
    """Ticks until every episode has had so many turns or its limit; {id: Sample}. answer: sees each that waits."""
    done, had = {}, {}
    for _ in range(limit):
        if all(engine.idle for engine in engines):
            return done
        for engine in engines:
            result = engine.tick()
            for sample in result.finished:
                done[sample.id] = sample
            for in_flight in result.waiting:
                assert not engine.holds(in_flight.id)
                had[in_flight.id] = had.get(in_flight.id, 0) + 1
                if had[in_flight.id] == turns:
                    done[in_flight.id] = ended(in_flight, "stop")
                    engine.forget(in_flight.id)
                else:
                    there = answer(in_flight) or engine
                    held = in_flight if there is engine else engine.with_kept(in_flight)
                    there.import_(observed(held, reply(in_flight)))
            engine.check()
    raise AssertionError(f"not idle after {limit} ticks")


@functools.cache
def quiet(id, version=0):
    """This episode alone in engine a."""
    with loaded("a", versions=(version,)) as engine:
        begin(engine, id, version)
        return play(engine)[id]


def assert_quiet(sample, version=0):
    same = quiet(sample.id, version)
    np.testing.assert_array_equal(sample.out_ids, same.out_ids)
    np.testing.assert_array_equal(sample.logprobs.view(np.int32), same.logprobs.view(np.int32))
    np.testing.assert_array_equal(sample.mask, same.mask)
    assert sample.finish == same.finish
