"""rollout.exact: the trainer scores samples with the calls that drew them, and its log-probs have the same bits."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dora_jax.config import Config, EnvironmentSection, OrchestratorSection, RolloutSection
from dora_jax.models import decoder, sharding
from dora_jax.plan import presets
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.shapes import shapes_of
from dora_jax.runtime.assembly.run import EngineReplay
from dora_jax.trainer import objective, score
from tests.fakes import trainer_cases
from tests.fakes.engine_rig import CFG, EOS, SIZES, VOCAB, finish, ids, params, prompt, submit
from tests.fakes.step_seconds import unaccounted

ROOT = Path(__file__).parent.parent


def exact_engine(kind=Engine, device=0, dtype="float32", **changes):
    section = presets.on_cpu(RolloutSection(**{**SIZES, "exact": True, **changes}))
    mesh = sharding.make_mesh(jax.devices()[device : device + 1], 1, 1, 1)
    return kind(CFG, section, mesh, seed=7, eos_ids=EOS, vocab_limit=VOCAB, dtype=dtype)


def weights_of(engine, dtype, seed=0):
    tree = jax.tree.map(lambda x: x.astype(dtype), decoder.serving_layout(params(seed), engine.shapes.layout))
    return jax.device_put(tree, engine.param_shardings)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_have_the_bits_of_sampling_through_moves_preemption_and_chunks(dtype):
    """Prompts of up to 20 tokens in chunks of 8; the second engine has pages for little more than one long sample."""
    first, second = exact_engine(dtype=dtype), exact_engine(dtype=dtype, device=1, pages=20)
    for engine in (first, second):
        engine.load(0, weights_of(engine, dtype))
    for id in ids(range(6), size=4):
        submit(first, id)
    done = {sample.id: sample for _ in range(4) for sample in first.tick().finished}
    for id in ids(range(6), size=2):
        if first.holds(id):
            second.import_(first.export(id))
    done |= finish(first, second)
    replay = exact_engine(EngineReplay, dtype=dtype)
    answers = [(prompt(id.group_id), sample.out_ids) for id, sample in done.items()]
    scored = replay(params(), answers)
    assert len(done) == 24
    for sample, logprobs in zip(done.values(), scored, strict=True):
        np.testing.assert_array_equal(sample.logprobs.view(np.int32), logprobs.view(np.int32))
    # under other weights the same tokens are scored, which these would not have drawn
    others = replay(params(1), answers)
    assert all(np.isfinite(x).all() and len(x) == len(out) for x, (_, out) in zip(others, answers, strict=True))
    assert not np.array_equal(others[0], scored[0])


@pytest.mark.parametrize("share", [False, True])
def test_answers_are_cut_out_of_packed_rows_as_the_engine_had_them(share):
    trainer = SimpleNamespace(section=trainer_cases.section(share_prompts="on" if share else "off"), shards=1)
    groups = trainer_cases.groups()
    batch = trainer_cases.batch(trainer, groups, share_prompts=share)
    places, answers = score.answers_of(batch)
    samples = [sample for group in groups for sample in group.samples]
    held = {(sample.prompt_ids.tobytes(), sample.out_ids.tobytes()): sample for sample in samples}
    assert len(answers) == len(samples) == len(held)
    for (row, columns), (prompt_ids, out_ids) in zip(places, answers, strict=True):
        sample = held.pop((prompt_ids.tobytes(), out_ids.tobytes()))
        np.testing.assert_array_equal(batch.behavior_logprobs[row, columns], sample.logprobs)
    assert not held


def test_what_cannot_be_replayed_to_the_bit_is_refused_by_name():
    def problems(**sections):
        return " ".join(objective.exact_problems(Config(rollout=RolloutSection(exact=True), **sections)))

    assert problems() == ""
    assert "orchestrator.mode: rollout.exact=True" in problems(orchestrator=OrchestratorSection(mode="partial"))
    assert "environment.name: rollout.exact=True" in problems(environment=EnvironmentSection(name="a:b"))
    with pytest.raises(ValueError, match="rollout.exact takes every token by calls of one shape"):
        shapes_of(presets.on_cpu(RolloutSection(exact=True, drafts=3, pages=64)))


@pytest.mark.slow
def test_a_run_has_no_gap_between_engine_and_trainer(tmp_path):
    options = {"rollout.exact": True, "steps": 4, "sft.out": tmp_path / "base", "model.path": tmp_path / "base"}
    command = [sys.executable, "-m", "dora_jax.train", f"--config={ROOT}/configs/quickstart.py:tiny"]
    command += [f"--workdir={tmp_path / 'run'}", *(f"--config.{name}={value}" for name, value in options.items())]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "mismatch/max" in line]
    assert sum(line["mismatch/tokens"] for line in measured) > 500
    assert {line["mismatch/max"] for line in measured} == {0.0}
    assert unaccounted(lines) < 0.03
    names = {name for line in lines for name in line}
    assert {f"seconds/trainer/{does}" for does in ("pack", "put", "update", "score", "publish")} <= names
