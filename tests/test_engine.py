"""The engine: log-probs as the trainer computes them, versions apart, groups sharing a prefill, errors by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models import decoder
from dora_jax.models.logits import target_logprobs
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.types import SampleId
from tests.fakes.engine_rig import (
    CFG,
    EOS,
    VOCAB,
    assert_undisturbed,
    finish,
    ids,
    loaded,
    new_engine,
    params,
    prompt,
    shared_engine,
    submit,
    weights,
)


@jax.jit
def recompute(params, tokens, positions, segments):
    hidden = decoder.forward(CFG, params, tokens, positions, segment_attention(segments, positions))
    return target_logprobs(CFG, params, hidden[:, :-1], tokens[:, 1:], vocab_limit=VOCAB)[0]


def trainer_logprobs(sample, version=0):
    """The trainer's way: one packed row, segment attention."""
    row = np.concatenate([sample.prompt_ids, sample.out_ids])
    tokens = jnp.asarray(np.pad(row, (0, 48 - len(row))))[None]
    positions = jnp.arange(48)[None]
    segments = (positions < len(row)).astype(jnp.int32)
    logprobs = recompute(params(version), tokens, positions, segments)
    return np.asarray(logprobs)[0, len(sample.prompt_ids) - 1 : len(row) - 1]


def test_logprobs_equal_the_trainers():
    with loaded("a") as engine:
        for id in ids((0, 1, 2, 3, 4, 5, -1)):
            submit(engine, id)
        done = finish(engine)
    assert len(done) == 14 and {s.finish for s in done.values()} == {"stop", "length"}
    for sample in done.values():
        np.testing.assert_allclose(sample.logprobs, trainer_logprobs(sample), rtol=0, atol=1e-5)
        assert sample.out_ids.max() < VOCAB
        stops = np.isin(sample.out_ids, EOS)
        assert not stops[:-1].any() and stops[-1] == (sample.finish == "stop")
        assert sample.finish == "stop" or len(sample.out_ids) == 24
        assert sample.spans[0].stop == len(sample.out_ids) == len(sample.logprobs) == len(sample.mask)


def test_tick_reports_starts_progress_and_tokens():
    with loaded("a") as engine:
        for id in ids():
            submit(engine, id)
        started, tokens, lengths, progress, rows = [], 0, {}, {}, []
        while not engine.idle:
            result = engine.tick()
            rows.append(result.rows)
            started += result.started
            tokens += result.tokens
            progress.update(result.progress)
            lengths.update({s.id: len(s.out_ids) for s in result.finished})
        assert started == ids() and progress == lengths and tokens == sum(lengths.values())
        assert not rows[0] and max(rows) > 1  # it began with prompts, and then decoded several samples at once


def test_a_group_shares_one_prefill():
    with loaded("a") as engine:
        calls = []
        prefill = engine.device.prefill
        engine.device.prefill = lambda *args: calls.append(args[1]) or prefill(*args)
        for id in ids((3,), size=4):  # 20 tokens: chunks of 8, 8 and 3
            submit(engine, id)
        done = finish(engine)
        engine.device.prefill = prefill
        assert sum((control[:, 1] > 0).sum() for control in calls) == 3
    for sample in done.values():
        assert_undisturbed(sample)


def test_two_versions_decode_side_by_side():
    with loaded("a", versions=(0, 1)) as engine:
        for id in ids((0, 3), size=1):
            submit(engine, id, 0)
        for id in ids((1, 2), size=1):
            submit(engine, id, 1)
        done, both = {}, False
        while not engine.idle:
            result = engine.tick()
            done |= {s.id: s for s in result.finished}
            both |= len({done[id].version if id in done else engine.version_of(id) for id in result.progress}) == 2
        assert both
    for id, sample in done.items():
        np.testing.assert_allclose(sample.logprobs, trainer_logprobs(sample, sample.version), rtol=0, atol=1e-5)
        assert sample.version == (0 if id.group_id in (0, 3) else 1)


def test_nothing_of_a_poisoned_version_reaches_another():
    """Version 9 is all nan. Its prompts are those of version 0, which takes over its pages and runs beside it."""
    poisoned, clean = [SampleId(group, 7) for group in (0, 1, 3)], []
    with loaded("small") as engine:
        for beside, after in (((), (1, 2, 4)), ((0, 3), (1, 2, 4))):
            engine.load(9, weights(engine, scale=np.nan))
            for id in [*poisoned, *ids(beside)]:
                submit(engine, id, 9 if id in poisoned else 0)
            done = finish(engine)
            assert {done.pop(id).finish for id in poisoned} == {"error"}
            engine.drop(9)  # frees whole pages of nan
            for id in ids(after):
                submit(engine, id)
            clean += [*done.values(), *finish(engine).values()]
    for sample in clean:
        assert_undisturbed(sample)


def test_greedy_takes_the_most_likely_token():
    """Also: four slots served in calls of two rows."""
    engine = new_engine(temperature=0.0, decode_rows=2, context_block=48)
    engine.load(0, weights(engine))
    for id in ids((1, 2)):
        submit(engine, id)
    done = finish(engine)
    for id in ids((1, 2), size=1):
        first, second = done[id], done[SampleId(id.group_id, 1)]
        np.testing.assert_array_equal(first.out_ids, second.out_ids)
        np.testing.assert_allclose(first.logprobs, trainer_logprobs(first), rtol=0, atol=1e-5)
        assert (first.logprobs > -np.log(VOCAB)).all()  # the maximum is above the mean


def test_no_shape_is_compiled_after_warmup():
    engine = shared_engine("a")
    engine.warmup()
    compiled = engine.compiled
    with loaded("a", versions=(0, 1)):
        for id in ids((0, 1, 2, 3, 4, 5)):
            submit(engine, id, id.index)
        engine.tick()
        engine.import_(engine.export(SampleId(0, 0)))
        finish(engine)
    assert engine.compiled == compiled


def test_cancel_frees_everything_and_says_whether_it_was_here():
    with loaded("a") as engine:
        for id in ids((3, 4)):
            submit(engine, id)
        engine.tick()
        assert all(engine.cancel(id) for id in ids((3, 4)))
        assert not engine.cancel(SampleId(3, 0)) and engine.idle and engine.free_pages == engine.section.pages
        engine.check()


def test_errors_name_the_culprit():
    with loaded("a", versions=(0, 1)) as engine:
        submit(engine, SampleId(0, 0))
        for match, call in {
            "version 0 is already loaded": lambda: engine.load(0, None),
            "cannot load version 5: 2 residents are held": lambda: engine.load(5, None),
            "cannot drop version 0: 1 of its samples": lambda: engine.drop(0),
            "already here": lambda: submit(engine, SampleId(0, 0)),
            "needs version 8; loaded": lambda: submit(engine, SampleId(0, 1), version=8),
        }.items():
            with pytest.raises(RuntimeError, match=match):
                call()
        with pytest.raises(ValueError, match="may reach 64 tokens; the engine is compiled for 44"):
            engine.submit(SampleId(0, 1), prompt(0, 40), 0, 24)
        with pytest.raises(ValueError, match="empty prompt"):
            engine.submit(SampleId(0, 1), [], 0, 24)
        with pytest.raises(KeyError, match="not in this engine"):
            engine.export(SampleId(5, 5))
    with pytest.raises(ValueError, match="rollout.pages 6 cannot hold one longest sample"):
        new_engine(pages=6)
    with pytest.raises(ValueError, match="not a multiple of rollout.decode_rows 3"):
        new_engine(decode_rows=3)


def test_tensor_parallel_instance():
    """KV heads over two devices: the trainer's log-probs again, and a request goes to an instance of one device."""
    engine = new_engine(device=2, tensor=2, context_block=48, prefill_chunk=20, prefill_tokens=40)
    engine.load(0, weights(engine))
    for id in ids((2, 3)):
        submit(engine, id)
    for _ in range(3):
        done = engine.tick().finished
    request = engine.export(SampleId(2, 0))
    with loaded("a") as single:
        single.import_(request)
        done = {s.id: s for s in done} | finish(engine) | finish(single)
    for sample in done.values():
        np.testing.assert_allclose(sample.logprobs, trainer_logprobs(sample), rtol=0, atol=1e-5)
