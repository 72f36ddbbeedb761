"""The host's part of a tick: its bench runs, and nothing that a tick does copies what has been sampled before."""

import numpy as np

from dora_jax.bench import train_step
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.rollout.seq import Seq
from dora_jax.types import SampleId
from tests.fakes.engine_rig import new_engine, weights


def last_line(**changes):
    """The cells of the page's last line, behind context and page size; of enough rows for a ladder of decode calls."""
    lines = train_step.host_time(rows=16, contexts=(256,), pages=(16,), steps=4, ticks=4, partial_s=0.01, **changes)
    return list(lines)[-1].split()[2:]


def test_the_bench_measures_the_assembled_engine():
    plan, commit, *_ = map(float, last_line())
    assert plan > 0 and commit > 0
    for step_ms in (0.0, 1.0):
        tokens_s, core, idle = last_line(instances=2, step_ms=step_ms)
        assert 0 < float(tokens_s) and core != "0%" and idle.endswith("%")


def test_what_was_sampled_stays_where_it_was_written():
    out = np.arange(100, dtype=np.int32)
    seq = Seq(
        InFlightSample(
            id=SampleId(0, 0),
            version=0,
            prompt_ids=out[:7],
            out_ids=out,
            logprobs=-out.astype(np.float32),
            max_new_tokens=120,
        ),
        0,
        True,
        max_context=127,
    )
    before = seq.sequence, seq.out_ids, seq.logprobs
    seq.extend(np.array([5, 6]), np.zeros(2), np.zeros((2, 0)))
    for old, new in zip(before, (seq.sequence, seq.out_ids, seq.logprobs), strict=True):
        assert np.shares_memory(old, new) and len(new) == len(old) + 2
        np.testing.assert_array_equal(old, new[:-2])


def test_a_page_table_is_written_where_it_grows_only():
    """A page added to one sample leaves the other rows as they are; a row is its sample's table."""
    engine = new_engine()
    engine.load(0, weights(engine))
    engine.device = train_step.InstantDevice(engine)
    for index in range(3):
        engine.submit(SampleId(0, index), np.arange(9 + index), 0, 20)
    engine.tick()
    engine.tick()
    before = {id: (seq.table, seq.table.tolist()) for id, seq in engine.scheduler.seqs.items()}
    engine.tick()
    for id, seq in engine.scheduler.seqs.items():
        table, pages = before[id]
        assert np.shares_memory(seq.table, table) and seq.table.tolist()[: len(pages)] == pages
        assert len(seq.table) == engine.shapes.pages_for(seq.position)
    engine.check()
