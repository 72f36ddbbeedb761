"""Paced parts: what they compute is the wrapped part's own, what it takes is the cost model's. Times are generous."""

import dataclasses
import queue
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dora_jax.buffer.pack import MemoryGroupStore
from dora_jax.config import RolloutSection
from dora_jax.orchestrate import events as ev
from dora_jax.plan import presets
from dora_jax.rollout.migrate import observed, without_pages
from dora_jax.runtime.common.worker import Crashed, StepDone
from dora_jax.runtime.instances.rollout_worker import EngineWorker
from dora_jax.runtime.observe import emulated_timing
from dora_jax.runtime.observe.emulated_timing import PacedEngine, PacedTrainer, PacedWeights
from dora_jax.runtime.training.trainer_worker import StreamingTrainerWorker
from dora_jax.sim import config as sims
from dora_jax.sim.run import simulate
from dora_jax.types import Prompt, Sample, SampleId, ScoredGroup, Span
from tests.fakes.coordinator_world import Weights
from tests.fakes.oracle import OracleEngine
from tests.soak import end_to_end

SECTION = presets.on_cpu(
    RolloutSection(slots=4, pages=64, page_size=8, max_prompt_tokens=8, max_new_tokens=16, decode_steps=2)
)


class Costs:
    """Seconds: 10 a decode step and one a sample in it, 100 a token of prefill, 5 a move, 7 a load."""

    mixes = False
    decode_kv_s = 0.001

    def decode_base_s(self, batch):
        return 10.0 + batch

    def prefill_s(self, tokens, past):
        return 100.0 * tokens

    def move_s(self, tokens):
        return 5.0

    def load_s(self):
        return 7.0

    def train_s(self, samples, tokens, squares):
        return 8.0 + tokens


@pytest.fixture
def slept(monkeypatch):
    """Time stands still but for sleeping; not that of other threads."""
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(emulated_timing, "time", clock)
    return now


def engine(**kwargs):
    inner = OracleEngine(SECTION, length=lambda v, g, i, limit: 4)
    inner.load(0, None)
    return PacedEngine(inner, Costs(), 0.5, **kwargs)


def test_a_tick_lasts_its_prefill_and_its_decode_steps(slept):
    paced, plain = engine(), engine().engine
    for e in (paced, plain):
        for i in range(2):
            e.submit(SampleId(0, i), np.arange(3), 0, 16)
    result, want = paced.tick(), plain.tick()
    # prefill 2 x 3 tokens; two decode steps at batch 2; context: samples hold 3, then 4 tokens
    assert slept[0] == pytest.approx(100 + 0.5 * (600 + 2 * 12 + 0.001 * 4 * (3 + 1)))
    assert result.progress == want.progress and result.tokens == want.tokens == 4
    before = slept[0]
    assert len(paced.tick().finished) == 2 and paced.idle
    assert slept[0] - before == pytest.approx(0.5 * (2 * 12 + 0.001 * 4 * (3 + 3)))


def test_an_engine_that_rested_begins_anew_and_a_late_one_catches_up(slept):
    paced = engine()
    paced.submit(SampleId(0, 0), np.arange(1), 0, 16)
    paced.tick()
    due = slept[0]
    slept[0] += 2.0  # its thread woke late, in the middle of the work
    paced.tick()
    assert slept[0] == pytest.approx(due + 0.5 * 22, abs=0.01)
    slept[0] += 50.0  # nothing to do
    paced.submit(SampleId(0, 1), np.arange(1), 0, 16)
    before = slept[0]
    paced.tick()
    assert slept[0] == pytest.approx(before + 0.5 * (100 + 22), abs=0.01)


def test_a_move_costs_the_source_and_is_not_prefilled_again(slept):
    src, dst = engine(), engine()
    src.submit(SampleId(0, 0), np.arange(3), 0, 16)
    src.tick()
    before = slept[0]
    in_flight = src.export(SampleId(0, 0))
    assert slept[0] - before == pytest.approx(0.5 * 5) and src.move_s == pytest.approx(2.5)
    dst.import_(in_flight)
    before = slept[0]
    (sample,) = dst.tick().finished
    assert slept[0] - before < 0.5 * 23  # two decode steps, no prefill
    np.testing.assert_array_equal(sample.out_ids, dst.expected(0, 0, 0, 4))


@pytest.mark.parametrize("kept", [False, True])
def test_an_episode_pays_for_what_it_observes_alone(slept, kept):
    """Whether its KV comes along or the engine keeps it."""
    paced = engine()
    paced.submit(SampleId(0, 0), np.arange(3), 0, 16, turn_tokens=4)
    paced.tick()
    tick = paced.engine.tick
    if kept:
        paced.engine.tick = lambda: (
            (r := tick()) and dataclasses.replace(r, waiting=tuple(map(without_pages, r.waiting)))
        )
    (held,) = paced.tick().waiting
    assert held.n_pages == (0 if kept else 1)
    paced.import_(observed(held, np.arange(1, 4)))
    before = slept[0]
    paced.tick()
    assert slept[0] - before == pytest.approx(0.5 * (400 + 22), abs=0.1)


def test_progress_is_handed_on_as_seldom_as_asked(slept):
    paced = engine(report_ticks=2)
    paced.submit(SampleId(0, 0), np.arange(1), 0, 16)
    assert not paced.tick().progress
    assert paced.tick().progress


def test_a_transfer_of_weights_lasts(slept):
    weights = PacedWeights(Weights(), Costs(), 0.5, lanes=1)
    assert weights.get(0, None) == 0 and slept[0] == pytest.approx(103.5) and weights.load_s == pytest.approx(3.5)
    with pytest.raises(AssertionError, match="version 9 was dropped"):
        weights.get(9, None)


def test_an_engine_that_stood_still_owes_no_time(slept):
    """While it decodes, a late tick is made up for; after a pause the timeline begins anew."""

    def late(rests):
        paced = engine()
        paced.submit(SampleId(0, 0), np.arange(1), 0, 16)
        paced.tick()
        slept[0] += 1000.0  # somebody else had the machine
        if rests:
            paced.rest()
        before = slept[0]
        paced.tick()
        return slept[0] - before

    assert late(rests=False) == 0.0 and late(rests=True) > 10.0


def test_a_paused_worker_answers_calls_and_does_not_tick():
    inner = OracleEngine(SECTION, length=lambda v, g, i, limit: 4)
    inner.load(0, None)
    outbox = queue.SimpleQueue()
    worker = EngineWorker(0, inner, Weights(), outbox)
    worker.send(ev.Pause(instance=0))
    worker.send(
        ev.Start(ids=(SampleId(0, 0),), instance=0, version=0, attempt=1),
        Prompt(group_id=0, task="", uid="", text="", answer=None, token_ids=np.zeros(1, np.int32), max_new_tokens=16),
    )
    worker.start()
    time.sleep(0.1)  # time enough for all its ticks
    worker.send(ev.Park(ids=(SampleId(0, 0),), instance=0))
    exported = outbox.get(timeout=10)
    assert exported.in_flight.out_ids.size == 0
    worker.send(ev.Unpause(instance=0))
    worker.send(ev.Resume(ids=(SampleId(0, 0),), instance=0, version=0, attempt=1), exported.in_flight)
    facts = []
    while "Finished" not in facts:
        facts.append(type(outbox.get(timeout=10)).__name__)
    worker.stop()
    assert facts[0] == "SampleResumed"


def group(group_id, version=0):
    id = SampleId(group_id, 0)
    sample = Sample(
        id=id,
        prompt_ids=np.zeros(1, np.int32),
        out_ids=np.zeros(1, np.int32),
        finish="stop",
        logprobs=np.zeros(1, np.float32),
        mask=np.ones(1, bool),
        spans=(Span(version=version, start=0, stop=1),),
    )
    return ScoredGroup(group_id=group_id, version=version, samples=(sample,), rewards=np.zeros(1, np.float32), parts={})


def part_trainer(outbox, max_lag=1):
    store = MemoryGroupStore()
    for i in range(4):
        store.put(group(i))
    trainer = PacedTrainer(end_to_end.IdleTrainer(), lambda groups, base: [len(groups)], Costs(), 1e-3, 4)
    return StreamingTrainerWorker(trainer, trainer.pack, store, Weights(), max_lag, outbox, groups_per_step=4)


def test_a_step_in_parts_is_published_once_behind_its_last_part():
    outbox = queue.SimpleQueue()
    worker = part_trainer(outbox)
    worker.start()
    worker.post(worker.train, (0,), 0)
    time.sleep(0.05)
    assert outbox.empty()  # one group of four is no step
    worker.post(worker.train, (1, 2), 0)
    worker.post(worker.train, (3,), 0)
    done = outbox.get(timeout=10)
    worker.stop()
    assert isinstance(done, StepDone) and done.version == 1 and done.metrics == {"groups": 4.0}
    assert [g.group_id for g in done.groups] == [0, 1, 2, 3]
    assert 1e-3 * (8 + 4 * 2) <= worker.trainer.train_s < 1.0
    assert done.wait_s + done.step_s < 5.0


@pytest.mark.parametrize(
    ("base", "sentence"), [(1, "part of base 1 came before the step at base 0"), (None, "the run ended")]
)
def test_a_step_that_is_never_whole_says_so(base, sentence):
    outbox = queue.SimpleQueue()
    worker = part_trainer(outbox)
    worker.start()
    worker.post(worker.train, (0,), 0)
    worker.post(worker.train, (1,), base) if base is not None else worker.stop()
    crashed = outbox.get(timeout=10)
    assert isinstance(crashed, Crashed) and sentence in str(crashed.error)


def test_the_bound_is_asserted_where_a_part_is_taken():
    outbox = queue.SimpleQueue()
    worker = part_trainer(outbox)
    worker.start()
    worker.post(worker.train, (0,), 2)
    assert "its lag exceeds the bound of 1" in str(outbox.get(timeout=10).error)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("mode", "chips"), [("sync", 4), ("one_step", 4), ("partial", 4), ("partial", 0), ("evict", 4),
                                             ("dora_paper", 4), ("dora", 4), ("rollpacker", 4), ("staleflow", 4)])  # fmt: skip
def test_prediction_and_paced_run_agree(mode, chips):
    """A small one; the full size is soak/end_to_end.py."""
    config = sims.replace(end_to_end.setting(steps=3, warmup=2), end_to_end.SMALL | {"hardware.rollout_chips": chips})
    row = sims.Row(label=mode, mode=mode, config=config, published={})
    predicted = simulate(row)
    as_predicted = pytest.approx(predicted.step_s, rel=0.2)
    for _ in range(3):  # a machine with other work only ever slows a paced run down
        ran = end_to_end.run(row, pace=1 / 60)
        if ran.step_s == as_predicted:
            break
    assert ran.step_s == as_predicted
    assert bool(ran.mixed) == (mode in ("partial", "staleflow"))
    if mode != "partial":
        assert ran.lag_mean <= 2


def test_the_table_and_its_verdicts():
    config = end_to_end.setting(steps=3, warmup=2)
    rows = end_to_end.rows(config, ["sync", "partial", "dora"], "half")
    assert [row.label for row in rows] == ["sync 8+8", "partial 8+8", "partial colocated", "dora 8+8"]


def test_versions_side_by_side_take_a_call_each_and_a_fast_instance_takes_less(slept):
    def tick(residents, **kwargs):
        section = dataclasses.replace(SECTION, residents=2)
        inner = OracleEngine(section, length=lambda v, g, i, limit: 4)
        for version in range(2):
            inner.load(version, None)
        paced = PacedEngine(inner, Costs(), 0.5, **kwargs)
        for i in range(4):
            paced.submit(SampleId(0, i), np.arange(3), i % residents, 16)
        before = slept[0]
        paced.tick()
        return slept[0] - before

    assert tick(2) - tick(1) == pytest.approx(0.5 * 2 * 10)  # two decode steps of one call more
    assert tick(1, speed=2.0) == pytest.approx(tick(1) / 2)


def test_a_publication_lasts(slept):
    weights = PacedWeights(Weights(), Costs(), 0.5, lanes=1, publish_s=4.0)
    weights.put(1, None)
    assert slept[0] == pytest.approx(102.0) and weights.weights.held == {0, 1}
