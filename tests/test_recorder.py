"""A real run on threads is recorded, replays to the same commands, and the simulator predicts it from its own costs."""

import json
import time

import numpy as np
import pytest

from dora_jax.config import ConfigError
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.observe.recorder import COSTS, JOURNAL, Recorder, TimedEngine, fit_ticks
from dora_jax.sim import replay
from dora_jax.sim.config import Row
from dora_jax.sim.run import simulate
from dora_jax.types import SampleId
from tests.fakes.coordinator_world import SECTION, STEPS, Trainer, config_of, make, play
from tests.fakes.oracle import OracleEngine
from tests.soak import end_to_end


class Engine(OracleEngine):
    def tick(self):
        time.sleep(0.010)
        return super().tick()


class SlowTrainer(Trainer):
    def step(self, batch):
        time.sleep(0.060)
        return super().step(batch)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("recorded")
    recorder = Recorder(directory, config_of("dora"))

    def engine(section, **options):
        return recorder.engine(Engine(section, **options))

    orchestrator, world, ups, _ = make("dora", engine=engine, trainer=SlowTrainer)
    assert orchestrator.state.config == config_of("dora")
    halt, _ = play(orchestrator, world, ups, [recorder.observe])
    recorder.close()
    assert halt.ok
    return directory


def test_the_journal_of_a_real_run_replays_to_the_same_commands(run):
    assert replay.replay(run / JOURNAL).steps == STEPS
    assert replay.replay(run / JOURNAL, warmup=2, rundown=1).steps == STEPS - 3
    with pytest.raises(ConfigError, match="6 steps leave none"):
        replay.replay(run / JOURNAL, warmup=5, rundown=3)


def test_costs_are_what_the_engines_took(run):
    costs = json.loads((run / COSTS).read_text())
    batches, ticks_s = zip(*costs["decode"], strict=True)
    assert list(batches) == sorted(batches)
    slept_s = 0.010 / SECTION.decode_steps
    assert sorted(ticks_s)[len(ticks_s) // 2] * costs["contention"] > 0.9 * slept_s and costs["train_fixed_s"] > 0.059
    assert costs["pages"] == 96 and 1 <= costs["prompt_tokens"] <= 5


def test_the_simulator_predicts_the_recorded_run(run):
    config, mode = end_to_end.recorded_setting(run, warmup=1)
    result = simulate(Row(label=mode, mode=mode, config=config, published={}))
    assert mode == "dora"
    assert result.step_s == pytest.approx(replay.replay(run / JOURNAL, warmup=1).step_s, rel=0.6)


def test_the_fit_finds_what_the_ticks_were_made_of():
    random = np.random.default_rng(0)
    batch = random.choice([1.0, 2.0, 4.0, 8.0], 400)
    prefill = random.choice([0, 0, 0, 16, 32], 400)
    works = random.choice([0.0, 1.0], 400)
    steps = np.full(400, 8.0)
    seconds = (steps * (0.001 + 0.0002 * batch) + 0.0005 * prefill) * (1 + 0.5 * works)
    found = fit_ticks(np.stack([steps, batch, prefill, works, seconds], 1))
    assert found["contention"] == pytest.approx(1.5)
    assert found["decode"] == [[int(b), pytest.approx(0.001 + 0.0002 * b)] for b in (1, 2, 4, 8)]
    assert found["prefill_s_per_token"] == pytest.approx(0.0005)


def test_a_batch_whose_ticks_are_all_prefill_has_no_seconds_of_its_own():
    """Nothing would be worse: a decode step that costs nothing."""
    rows = [(8.0, 1.0, 64.0, 0.0, 0.0064), (8.0, 8.0, 0.0, 0.0, 0.016)] * 4
    assert fit_ticks(np.array(rows))["decode"] == [[8, pytest.approx(0.002)]]
    assert fit_ticks(np.array(rows[:1] + [(8.0, 1.0, 32.0, 0.0, 0.0032)]))["decode"] == [[1, pytest.approx(0.0006)]]


def test_a_tick_counts_the_way_to_it_unless_the_engine_rested(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    inner = OracleEngine(SECTION, length=lambda v, g, i, limit: 8)
    inner.load(0, None)
    timed = TimedEngine(inner)
    timed.submit(SampleId(0, 0), np.arange(3), 0, 16)
    timed.tick()
    now[0] = 5.0
    timed.tick()  # of 8 tokens: 4 a tick; done
    now[0] = 9.0
    timed.submit(SampleId(0, 1), np.arange(3), 0, 16)
    timed.tick()
    assert [row[-1] for row in timed.ticks] == [0.0, 5.0, 0.0]
    assert [row[:4] for row in timed.ticks] == [(4, 1.0, 3, False), (4, 1.0, 0, False), (4, 1.0, 3, False)]


def test_a_move_costs_what_it_adds_behind_the_one_before(tmp_path, monkeypatch):
    """Three samples leave one instance at once; the simulator's link carries them one after the other."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    recorder = Recorder(tmp_path, OrchestratorConfig(groups_per_step=1, group_size=3, total_steps=1))
    ids = tuple(SampleId(0, i) for i in range(3))
    recorder.observe(
        [ev.TimePassed(now_s=0.0)], (ev.Move(ids=ids[:2], src=0, dst=1, attempt=1), ev.Park(ids=ids[2:], instance=0))
    )
    for id, at in zip(ids[:2], (100.3, 100.4), strict=True):
        now[0] = at
        recorder.observe([ev.SampleMoved(id=id, src=0, dst=1, attempt=1)], ())
    now[0] = 100.5
    recorder.observe([ev.SampleParked(id=ids[2], instance=0)], ())
    assert recorder.took["move"] == pytest.approx([0.1, 0.1]) and recorder.took["first move"] == pytest.approx([0.3])
