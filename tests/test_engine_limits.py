"""Min tokens, repetition, stop strings and keep sets, in one engine: across calls, preemption and migration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models import decoder
from dora_jax.models.logits import policy_logits
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.types import Sampling
from tests.fakes.engine_rig import CFG, EOS, VOCAB, ids, new_engine, params, submit, weights

MIN, REPEATS, STOP = 6, 2, "bb"
SETTINGS = dict(
    top_k=5,
    top_p=0.95,
    keep_set=True,
    min_new_tokens=MIN,
    max_repeats=REPEATS,
    stop_strings=(STOP,),
    temperature=0.4,
    context_block=48,
)


def text(ids):
    return "".join(chr(97 + i % 26) for i in ids)


@pytest.fixture(scope="module")
def engine():
    engine = new_engine(decode=text, **SETTINGS)
    engine.load(0, weights(engine))
    return engine


@pytest.fixture(scope="module")
def small():
    engine = new_engine(device=1, pages=20, decode=text, **SETTINGS)
    engine.load(0, weights(engine))
    return engine


def run(*engines):
    done = {}
    while not all(engine.idle for engine in engines):
        for engine in engines:
            result = engine.tick()
            assert set(result.kept) == {sample.id for sample in result.finished}
            done |= {sample.id: (sample, result.kept[sample.id]) for sample in result.finished}
            engine.check()
    return done


@pytest.fixture(scope="module")
def alone(engine):
    """Every sample by itself: (sample, keep sets)."""
    done = {}
    for id in ids((0, 1, 2, 3, 4, 5), size=4):
        submit(engine, id)
        done |= run(engine)
    return done


def longest_run(tokens):
    runs = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(tokens)) + 1)
    return max(len(run) for run in runs)


def test_limits_hold(alone):
    samples = [sample for sample, _ in alone.values()]
    for sample in samples:
        tokens = sample.out_ids
        assert not np.isin(tokens[:MIN], EOS).any() and longest_run(tokens) <= REPEATS
        stopped = text(tokens).find(STOP)
        assert stopped in (-1, len(tokens) - 2)
        assert sample.finish == ("stop" if stopped >= 0 or tokens[-1] in EOS else "length")
    assert any(longest_run(s.out_ids) == REPEATS for s in samples)
    assert any(s.finish == "stop" and s.out_ids[-1] not in EOS for s in samples), "no text stopped a sample"
    assert any(s.out_ids[-1] in EOS for s in samples)


@jax.jit
def logits_of(weights, tokens, positions):
    segments = jnp.ones_like(positions)
    hidden = decoder.forward(CFG, weights, tokens, positions, segment_attention(segments, positions))
    return policy_logits(CFG, weights, hidden, vocab_limit=VOCAB, temperature=0.4)[0]


def test_the_keep_set_holds_the_likeliest_tokens_that_were_allowed(alone):
    for sample, kept_sets in alone.values():
        row, n = np.concatenate([sample.prompt_ids, sample.out_ids]), len(sample.prompt_ids)
        logits = logits_of(params(0), np.pad(row, (0, 48 - len(row)))[None], np.arange(48)[None])
        probs = np.array(jax.nn.softmax(logits))[n - 1 : len(row) - 1]
        assert kept_sets.shape == (len(sample.out_ids), 5)
        for i, (token, kept, p) in enumerate(zip(sample.out_ids, kept_sets, probs, strict=True)):
            if i < MIN:
                p[list(EOS)] = 0
            if i >= REPEATS and len(set(sample.out_ids[i - REPEATS : i])) == 1:
                p[sample.out_ids[i - 1]] = 0
            best = np.argsort(-p)[:5]
            ids = kept[kept >= 0]
            assert token in ids and ids.tolist() == best[: len(ids)].tolist()
            share = np.cumsum(p[best] / p[best].sum())
            assert len(ids) == 1 + np.sum(share[:-1] < 0.95)


def test_a_stop_string_of_its_own_ends_a_sample_which_is_drawn_as_the_run_draws(alone, engine, small):
    whole = next(s for s, _ in alone.values() if len(s.out_ids) > 10)
    own = Sampling(stop=("??", text(whole.out_ids[6:9])))
    first = text(whole.out_ids).find(own.stop[1]) + 3
    engine.submit(whole.id, whole.prompt_ids, 0, 24, sampling=own)
    for _ in range(2):
        engine.tick()
    assert engine.holds(whole.id)
    small.import_(engine.export(whole.id))
    ((sample, kept),) = run(small).values()
    assert sample.finish == "stop" and len(sample.out_ids) == len(kept) == first
    np.testing.assert_array_equal(sample.out_ids, whole.out_ids[:first])
    np.testing.assert_array_equal(sample.logprobs, whole.logprobs[:first])
    np.testing.assert_array_equal(kept, alone[whole.id][1][:first])


def test_no_bit_depends_on_moves_or_preemption(alone, engine, small):
    group = ids((1, 3, 4), size=4)
    for id in group:
        submit(small, id)
    done = {}
    for id in group[::2]:
        for _ in range(2):
            result = small.tick()
            done |= {s.id: (s, result.kept[s.id]) for s in result.finished}
        if small.holds(id):
            engine.import_(small.export(id))
    done |= run(engine, small)
    assert set(done) == set(group)
    for id, (sample, kept_sets) in done.items():
        same, same_sets = alone[id]
        np.testing.assert_array_equal(sample.out_ids, same.out_ids)
        np.testing.assert_array_equal(sample.logprobs.view(np.int32), same.logprobs.view(np.int32))
        np.testing.assert_array_equal(kept_sets, same_sets)


def test_what_cannot_be_is_refused():
    for match, changes in {
        "min_new_tokens 25 is not between 0 and rollout.max_new_tokens 24": dict(min_new_tokens=25),
        "rollout.top_k must bound their number": dict(keep_set=True),
        "has an empty string": dict(stop_strings=("",)),
        "given no `decode`": dict(stop_strings=("x",)),
    }.items():
        with pytest.raises(ValueError, match=match):
            new_engine(**changes)
