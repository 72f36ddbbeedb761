"""rollout.exact: the trainer scores samples with the calls that drew them, and its log-probs have the same bits."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.config import Config, EnvironmentSection, OrchestratorSection, RolloutSection
from dora_jax.models import decoder, lora, sharding
from dora_jax.models.lora_config import Lora
from dora_jax.plan import presets
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import runs_of
from dora_jax.rollout.shapes import shapes_of
from dora_jax.runtime.assembly.run import EngineReplay
from dora_jax.trainer import objective, score
from dora_jax.types import SampleId, TokenTable
from tests.fakes import trainer_cases
from tests.fakes.engine_rig import CFG, EOS, SIZES, VOCAB, finish, ids, params, prompt, submit
from tests.fakes.episode_rig import begin, play
from tests.fakes.step_seconds import unaccounted
from tests.fakes.two_processes import alone_and_together

ROOT = Path(__file__).parent.parent


LORA = Lora(rank=4, alpha=8.0)


def exact_engine(kind=Engine, device=0, dtype="float32", lora=None, cfg=CFG, **changes):
    section = presets.on_cpu(RolloutSection(**{**SIZES, "exact": True, **changes}))
    mesh = sharding.make_mesh(jax.devices()[device : device + 1], 1, 1, 1)
    options = {"seed": 7, "eos_ids": EOS, "vocab_limit": VOCAB, "dtype": dtype} | ({"lora": lora} if lora else {})
    if kind is EngineReplay:
        return kind(cfg, section, mesh, params() if lora else None, **options)
    engine = kind(cfg, section, mesh, **options)
    if lora:
        base = decoder.serving_layout(params(), engine.shapes.layout)
        engine.residents.take_base(jax.device_put(base, engine.base_shardings))
    return engine


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


def test_tokens_drawn_by_calls_of_other_rows_are_replayed_by_calls_of_as_many():
    """One, then four samples of turns decode beside one another, here and at another engine, waiting ones too. By calls
    of other rows than those that drew them, log-probs have other bits."""
    cfg = decoder.new_config(
        "qwen3", vocab_size=64, d_model=256, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=256
    )
    sizes = {"cfg": cfg, "narrow_rows": 1, "narrow_cost": 0.5, "context_block": 64, "max_new_tokens": 44}
    first, second = exact_engine(**sizes), exact_engine(device=1, **sizes)
    masters = decoder.init_params(cfg, 0)
    for engine in (first, second):
        laid_out = decoder.serving_layout(masters, engine.shapes.layout)
        engine.load(0, jax.device_put(laid_out, engine.param_shardings))
    begin(first, SampleId(3, 0), max_new_tokens=44, turn_tokens=12)
    first.tick(), first.tick()
    for id in ids((0, 1, 4), size=1):
        submit(first, id, max_new_tokens=20)
    first.tick(), first.tick()
    second.import_(first.export(SampleId(3, 0)))
    done = play(first, second, answer=lambda waiting: (first, second)[int(waiting.out_ids[-1]) % 2])
    assert len(done) == 4
    samples = list(done.values())
    rungs = [np.repeat(*sample.table.rungs)[len(sample.prompt_ids) - 1 :] for sample in samples]
    assert all(len(rows) == len(sample.out_ids) for rows, sample in zip(rungs, samples, strict=True))
    episode = done[SampleId(3, 0)].table.rungs[0].tolist()
    assert {1, 4} <= set(episode) and 0 in episode[1:] and len(episode) > 4
    assert {rows for each in rungs for rows in each.tolist()} == {0, 1, 4}
    replay = exact_engine(EngineReplay, **sizes)
    answers = [(sample.prompt_ids, sample.out_ids) for sample in samples]

    def differ(recorded):
        scored = replay(masters, answers, [sample.mask for sample in samples], rungs=recorded)
        bits = [(x.view(np.int32), sample.logprobs.view(np.int32)) for x, sample in zip(scored, samples, strict=True)]
        return sum(int((one != other).sum()) for one, other in bits)

    assert differ(rungs) == 0
    swapped = [np.where(rows > 0, 5 - rows, 0) for rows in rungs]
    assert differ(None) > 0 and differ(swapped) > 0


@pytest.mark.slow
def test_adapters_of_several_versions_side_by_side_have_the_bits_of_sampling():
    """Each in its place among four, whose products decide the last bits; some samples move to an engine that holds
    other versions beside theirs."""
    sizes = {"lora": LORA, "residents": 4}
    first, second, replay = (exact_engine(kind, device, **sizes) for kind, device in
                             ((Engine, 0), (Engine, 1), (EngineReplay, 0)))  # fmt: skip
    adapters = {}
    for version in (5, 6, 7):
        found = lora.init(CFG, LORA, version)
        adapters[version] = jax.tree.map(lambda x, v=version: x + 0.2 * (v - 4) * jnp.sin(9 * x + v), found)
        for engine in (first, second)[: 2 if version > 5 else 1]:
            one = decoder.serving_layout(adapters[version], engine.shapes.layout)
            engine.load(version, jax.device_put(one, engine.param_shardings))
    done = {}
    for version in adapters:
        for id in ids((version, 2 * version), size=4):
            submit(first, id, version)
    for _ in range(6):
        done |= {sample.id: sample for sample in first.tick().finished}
    for id in ids((6, 7), size=2):
        if first.holds(id):
            second.import_(first.export(id))
    done |= finish(first, second)
    assert len(done) == 24
    for version, adapter in adapters.items():
        samples = [sample for sample in done.values() if sample.version == version]
        answers = [(sample.prompt_ids, sample.out_ids) for sample in samples]
        for sample, logprobs in zip(samples, replay(adapter, answers, version=version), strict=True):
            np.testing.assert_array_equal(sample.logprobs.view(np.int32), logprobs.view(np.int32))


@pytest.mark.slow
def test_episodes_have_the_bits_of_sampling_through_moves_and_short_pages():
    """Turns end by their limit, by a stop token, by that of the episode; what is observed is longer than a chunk, or a
    token; KV waits in its pages, on the host, or goes on at another engine."""
    first, second = exact_engine(max_new_tokens=40), exact_engine(device=1, pages=24, max_new_tokens=40)
    for engine in (first, second):
        engine.load(0, weights_of(engine, "float32"))
    asked = ids(range(6), size=4)
    for id in asked:
        begin((first, second)[id.index % 2], id, max_new_tokens=30)
    done = play(first, second, turns=4, answer=lambda waiting: (first, second)[int(waiting.out_ids[-1]) % 2])
    assert set(done) == set(asked) and len({int((~sample.mask).sum()) for sample in done.values()}) > 3
    answers = [(sample.prompt_ids, sample.out_ids) for sample in done.values()]
    scored = exact_engine(EngineReplay, max_new_tokens=40)(params(), answers, [sample.mask for sample in done.values()])
    for sample, logprobs in zip(done.values(), scored, strict=True):
        np.testing.assert_array_equal(sample.logprobs.view(np.int32), logprobs.view(np.int32))
        assert not logprobs[~sample.mask].any()


@pytest.mark.slow
def test_what_is_prefilled_beside_an_episode_changes_no_bit_of_it():
    """Two observe in the same tick: the page of one begins at position 0, the other has a whole one behind it, and calls
    for chunks with and without a past would be two programs."""
    sizes = {"page_size": 8, "prefill_chunk": 16, "max_prompt_tokens": 24, "max_new_tokens": 40}
    replay = exact_engine(EngineReplay, prefill_tokens=64, prefill_call_tokens=64, **sizes)
    draw = np.random.default_rng(0)
    for n_prompt in (2, 3, 4):
        turn = 7 - n_prompt
        mask = np.concatenate([np.ones(turn, bool), np.zeros(4, bool), np.ones(8, bool)])
        short, long = (
            tuple(draw.integers(max(EOS) + 1, VOCAB - 1, n).astype(np.int32) for n in (prompt_tokens, len(mask)))
            for prompt_tokens in (n_prompt, n_prompt + 8)
        )
        alone, beside = replay(params(), [short], [mask])[0], replay(params(), [short, long], [mask, mask])[0]
        np.testing.assert_array_equal(alone.view(np.int32), beside.view(np.int32))


@pytest.mark.slow
def test_the_processes_of_a_trainer_score_what_those_of_an_instance_drew():
    """An instance of both processes: all score together; instances of one: each scores its share. Nine samples."""
    alone, together = alone_and_together("exact_process")
    for shares, (of_two, of_one) in ((1, alone.values()), (2, together[0].values()), (2, together[1].values())):
        assert of_two[0] > 100 and of_one[0] > 100
        assert of_two[1:] == [0, 9] and of_one[1] == 0 and of_one[2] in (9 // shares, -(-9 // shares))
    assert together[0]["1"][2] + together[1]["1"][2] == 9


@pytest.mark.parametrize("share", [False, True])
def test_answers_are_cut_out_of_packed_rows_as_the_engine_had_them(share):
    trainer = SimpleNamespace(section=trainer_cases.section(share_prompts="on" if share else "off"), shards=1)
    groups = trainer_cases.groups()
    batch = trainer_cases.batch(trainer, groups, share_prompts=share)
    places, answers, masks = score.answers_of(batch)
    samples = [sample for group in groups for sample in group.samples]
    held = {(sample.prompt_ids.tobytes(), sample.out_ids.tobytes()): sample for sample in samples}
    assert len(answers) == len(samples) == len(held)
    assert all(mask.all() for mask in masks)
    for (row, columns), (prompt_ids, out_ids) in zip(places, answers, strict=True):
        sample = held.pop((prompt_ids.tobytes(), out_ids.tobytes()))
        np.testing.assert_array_equal(batch.behavior_logprobs[row, columns], sample.logprobs)
    assert not held and batch.rungs is None
    asked = []
    score.replayed_logprobs(lambda *given: asked.append(given) or [out for _, out in given[1]], None, batch, 3)
    assert asked[0][4] is None


@pytest.mark.parametrize("share", [False, True])
def test_the_rungs_of_packed_answers_are_those_of_their_samples(share):
    """Samples of an engine, and one of before rungs were recorded, which the widest calls have drawn."""
    trainer = SimpleNamespace(section=trainer_cases.section(share_prompts="on" if share else "off"), shards=1)
    known, groups = {}, []
    for group in trainer_cases.groups():
        samples = []
        for sample in group.samples:
            text = (sample.prompt_ids.tobytes(), sample.out_ids.tobytes())
            known[text], table = np.zeros(len(sample.out_ids), np.int32), TokenTable()
            if len(known) > 1:
                known[text][:] = np.where(np.arange(len(sample.out_ids)) < len(known), 16, len(known))
                column = np.concatenate([np.zeros(len(sample.prompt_ids) - 1, np.int32), known[text]])
                table = TokenTable(rungs=runs_of(column))
            samples.append(dataclasses.replace(sample, table=table))
        groups.append(dataclasses.replace(group, samples=tuple(samples)))
    batch, asked = trainer_cases.batch(trainer, groups, share_prompts=share), []
    score.replayed_logprobs(lambda *given: asked.append(given) or [out for _, out in given[1]], None, batch, 3)
    _, answers, _, version, rungs = asked[0]
    assert version == 3 and "rungs" not in batch.arrays()
    for (prompt_ids, out_ids), rows in zip(answers, rungs, strict=True):
        np.testing.assert_array_equal(rows, known.pop((prompt_ids.tobytes(), out_ids.tobytes())))
    assert not known


def test_what_cannot_be_replayed_to_the_bit_is_refused_by_name():
    def problems(**sections):
        return " ".join(objective.exact_problems(Config(rollout=RolloutSection(exact=True), **sections)))

    assert problems() == ""
    assert "orchestrator.mode: rollout.exact=True" in problems(orchestrator=OrchestratorSection(mode="partial"))
    episodes = EnvironmentSection(name="a:b")
    assert problems(environment=episodes) == "" == problems(lora=Lora(rank=4))
    branched = dataclasses.replace(episodes, branches=1)
    assert "environment.branches: rollout.exact=True" in problems(environment=branched)
    few = Config(
        rollout=RolloutSection(exact=True, residents=3, host_kv_bytes=1), environment=episodes, lora=Lora(rank=4)
    )
    assert "rollout.residents: rollout.exact=True needs another value: an adapter's place decides" in " ".join(
        found := objective.exact_problems(few)
    )
    assert len(found) == 2 and "rollout.host_kv_bytes: rollout.exact=True" in found[1]
    with pytest.raises(ValueError, match="rollout.exact replays decode calls, and none that verify drafts"):
        shapes_of(presets.on_cpu(RolloutSection(exact=True, drafts=3, pages=64)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("quickstart", {}),
        ("quickstart", {"lora.rank": 4, "trainer.learning_rate": 1e-2}),
        ("agent", {}),
        ("agent", {"rollout.narrow_rows": 1, "rollout.narrow_cost": 0.5}),
        ("quickstart", {"rollout.ladder": "on"}),
    ],
    ids=["all weights", "adapters", "episodes", "episodes of few rows", "ladder"],
)
def test_a_run_has_no_gap_between_engine_and_trainer(tmp_path, config, more):
    options = {"rollout.exact": True, "steps": 4, "sft.out": tmp_path / "base", "model.path": tmp_path / "base"} | more
    command = [sys.executable, "-m", "dora_jax.train", f"--config={ROOT}/configs/{config}.py:tiny"]
    command += [f"--workdir={tmp_path / 'run'}", *(f"--config.{name}={value}" for name, value in options.items())]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "mismatch/max" in line]
    assert sum(line["mismatch/tokens"] for line in measured) > 300
    assert {line["mismatch/max"] for line in measured} == {0.0}
    assert unaccounted(lines) < 0.03
    names = {name for line in lines for name in line}
    assert {f"seconds/trainer/{does}" for does in ("pack", "put", "update", "score", "publish")} <= names
