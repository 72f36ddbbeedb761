"""Recurrent states between real processes: they leave with their samples, and what dies loses none of these."""

import argparse
import os
import signal
from collections import Counter

import jax
import numpy as np
import pytest

from dora_jax.config import workdirs
from dora_jax.models import decoder, hf, sharding
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.orchestrate import events as ev
from dora_jax.plan import presets, validate
from dora_jax.runtime.assembly import run as build
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journal_audit import audit, facts, reading
from tests.fakes.tiny_run import CONFIG
from tests.soak.gang_run import running

HYBRID = (  # versions are all the base, so that one engine can make every sample again
    "--config.sft.family=qwen3_5_text",
    "--config.sft.n_layers=2",  # the first is linear
    "--config.trainer.learning_rate=0",
    "--config.cluster.trainer_hosts=1",
    "--config.orchestrator.groups_per_step=4",
    "--config.orchestrator.inflight=3",  # instances are never idle
    "--config.rollout.slots=4",
    "--config.rollout.decode_steps=1",
    "--config.rollout.max_prompt_tokens=64",
    "--config.rollout.max_new_tokens=96",
)


def journaled(folder):
    log = EventLog(reading(folder / "journal"))
    return [fact for number in log.segments() for fact in facts(log.read(number).records)]


def made_again(folder, samples):
    """Each sample alone in an engine of the run's shapes: {id: sample}."""
    config = presets.filled(validate.from_config_dict(workdirs.read(folder), "evaluate"))
    mesh = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    model, params = hf.load(config.model.path, mesh)
    engine = build.new_engine(config, Tokenizer.load(config.model.path), model, mesh)
    laid_out = decoder.serving_layout(params, engine.shapes.layout)
    engine.load(0, jax.device_put(laid_out, engine.param_shardings))
    again = {}
    for sample in samples:
        engine.submit(sample.id, sample.prompt_ids, 0, config.rollout.max_new_tokens)
        while not engine.idle:
            again |= {found.id: found for found in engine.tick().finished}
    return again


@pytest.mark.slow
@pytest.mark.alone  # a process that sends nothing for ten seconds is taken for dead
def test_states_travel_between_processes_and_no_sample_differs_from_one_alone(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(base=str(tmp_path / "base")))
    how = argparse.Namespace(config=f"{tmp_path}/config.py", workdir=tmp_path / "run", gangs=3, overrides=[*HYBRID])
    with running(how) as run:
        for gang, blow in (("rollout 0", signal.SIGTERM), ("rollout 1", signal.SIGKILL), ("trainer", signal.SIGKILL)):
            run.ready(3)
            os.kill(run.pids[gang][0], blow)
            run.wait(f"the loss of {gang}", lambda gang=gang: gang not in run.pids)
        run.ready(3)
    books = audit(tmp_path / "run" / "journal")
    assert books.ok and books.epochs == 1 and books.trained > 12, books
    known = journaled(tmp_path / "run")
    moved = {fact.event.id for fact in known if isinstance(fact.event, ev.SampleMoved)}
    cut = {fact.event.id for fact in known if isinstance(fact.event, ev.SampleResumed)}  # go on from their tokens
    samples = [fact.payload for fact in known if isinstance(fact.event, ev.SampleDone)][-400:]
    again, same = made_again(tmp_path / "run", samples), Counter()
    for sample in samples:
        alone = again[sample.id]
        np.testing.assert_array_equal(sample.out_ids, alone.out_ids)
        np.testing.assert_allclose(sample.logprobs, alone.logprobs, rtol=0, atol=1e-5)
        if sample.id not in cut:
            np.testing.assert_array_equal(sample.logprobs.view(np.int32), alone.logprobs.view(np.int32))
        same[sample.id in moved, sample.id in cut] += 1
    assert sum(same.values()) > same[False, False], "some have gone on elsewhere, with their state or from their tokens"
