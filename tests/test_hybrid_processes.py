"""Recurrent states between real processes: they leave with their samples, and what dies loses none of these."""

import argparse
import os
import re
import signal

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
from dora_jax.runtime.journal.journal_audit import audit, facts
from dora_jax.runtime.journal.log_stores import log_at
from dora_jax.types import SampleId
from tests.fakes.engine_rig import OF_STATES
from tests.fakes.tiny_run import CONFIG
from tests.soak.gang_run import running

HYBRID = (  # versions are all the base, so that one engine can make every sample again
    "--config.sft.family=qwen3_5_text",
    "--config.sft.n_layers=2",  # the first is linear
    "--config.trainer.learning_rate=0",
    "--config.cluster.trainer_hosts=1",
    "--config.orchestrator.groups_per_step=2",
    "--config.orchestrator.inflight=3",  # answers outlast a step or two, so that versions share the instances
    "--config.rollout.slots=16",
    "--config.rollout.decode_steps=1",
    "--config.rollout.ladder=off",  # a narrower dispatch is used where its measured time pays, and may round otherwise
    "--config.rollout.max_prompt_tokens=64",
    "--config.rollout.max_new_tokens=96",
)


def journaled(folder, segments=slice(None)):
    log = EventLog(log_at(folder / "journal", read_only=True))
    return [fact for number in sorted(log.segments())[segments] for fact in facts(log.read(number).records)]


def ids(known, kind, where=lambda event: True):
    return {fact.event.id for fact in known if isinstance(fact.event, kind) and where(fact.event)}


def decoding(folder, gang):
    """Has this instance some samples that have not ended?"""
    newest = journaled(folder, slice(-1, None))
    started = ids(newest, ev.SampleStarted, lambda event: f"rollout {event.instance}" == gang)
    return len(started - ids(newest, ev.SampleDone)) > 2


def cut(folder, known):
    """Samples that went on from their tokens: their state was lost with a process, or did not arrive."""
    lost = re.findall(r"the KV of sample \((\d+), (\d+)\) did not reach", (folder / "console.log").read_text())
    return ids(known, ev.SampleResumed) | {SampleId(*map(int, id)) for id in lost}


def whole(folder):
    """Samples that have moved with their state, and ended."""
    known = journaled(folder)
    return ids(known, ev.SampleMoved) & ids(known, ev.SampleDone) - cut(folder, known)


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
    options = f"    c.rollout.compiler_options = {OF_STATES}\n    return c"
    (tmp_path / "config.py").write_text(CONFIG.format(base=str(tmp_path / "base")).replace("    return c", options))
    how = argparse.Namespace(config=f"{tmp_path}/config.py", workdir=tmp_path / "run", gangs=3, overrides=[*HYBRID])
    with running(how) as run:
        for gang, blow in (("rollout 0", signal.SIGTERM), ("rollout 1", signal.SIGKILL), ("trainer", signal.SIGKILL)):
            run.ready(3)
            if gang != "trainer":
                run.wait(f"samples of {gang}", lambda gang=gang: decoding(tmp_path / "run", gang))
            os.kill(run.pids[gang][0], blow)
            run.wait(f"the loss of {gang}", lambda gang=gang: gang not in run.pids)
        run.ready(3)
        run.wait("a move", lambda: whole(tmp_path / "run"))
    books = audit(tmp_path / "run" / "journal")
    assert books.ok and books.epochs == 1 and books.trained > 12, books
    known = journaled(tmp_path / "run")
    moved, without_state = ids(known, ev.SampleMoved), cut(tmp_path / "run", known)
    done = [fact.payload for fact in known if isinstance(fact.event, ev.SampleDone)]
    elsewhere = [sample for sample in done if sample.id in moved | without_state]
    stayed = [sample for sample in done if sample.id not in moved | without_state]
    samples = elsewhere[:200] + stayed[-100:]
    again = made_again(tmp_path / "run", samples)
    for sample in samples:
        alone = again[sample.id]
        np.testing.assert_array_equal(sample.out_ids, alone.out_ids)
        np.testing.assert_allclose(sample.logprobs, alone.logprobs, rtol=0, atol=1e-5)
        if sample.id not in without_state:
            np.testing.assert_array_equal(sample.logprobs.view(np.int32), alone.logprobs.view(np.int32))
    with_state = whole(tmp_path / "run")
    assert without_state and with_state & {sample.id for sample in samples}
    print(f"{len(samples)} samples, of which {len(elsewhere)} went on elsewhere, {len(with_state)} with their state")
