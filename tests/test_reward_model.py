"""The trained judge: transformers' own scores on every mesh, one compilation, and one sentence for every bad folder.

`python -m tests.test_reward_model` writes tests/data/golden/judge again (it needs torch and transformers).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from dora_jax.config import ConfigError, RewardModelSection, field_context
from dora_jax.models import decoder, hf, sharding
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.recovery import replay
from dora_jax.tasks import reward_model
from dora_jax.tasks.pool import GroupFailure
from dora_jax.tasks.reward_model import ModelScorer, RewardModel
from dora_jax.types import Prompt, Sample, SampleId, ScoredGroup, Span
from tests.fakes.hf_models import EXTRAS, FAMILIES, SIZES, transformers

JUDGE = Path(__file__).parent / "data" / "golden" / "judge"
ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-5


def torch_judge(family, seed=0):
    library = transformers()
    import torch

    torch.manual_seed(seed)
    config = library.AutoConfig.for_model(family, **SIZES, **EXTRAS[family], num_labels=1)
    model = library.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def torch_scores(model, samples):
    import torch

    texts = [np.concatenate([s.prompt_ids, s.out_ids]) for s in samples]
    padded = np.full((len(texts), max(map(len, texts))), SIZES["pad_token_id"])
    for row, text in zip(padded, texts):
        row[: len(text)] = text
    with torch.no_grad():
        return (
            model(
                torch.tensor(padded),
                attention_mask=torch.tensor(np.arange(padded.shape[1])[None] < [[len(text)] for text in texts]),
            )
            .logits[:, 0]
            .numpy()
        )


def sample(i, prompt, out, finish="stop", group_id=0):
    n = len(out)
    return Sample(
        id=SampleId(group_id, i),
        prompt_ids=np.asarray(prompt, np.int32),
        out_ids=np.asarray(out, np.int32),
        logprobs=np.zeros(n, np.float32),
        mask=np.ones(n, bool),
        finish=finish,
        spans=(Span(version=0, start=0, stop=n),),
    )


def samples(n=7, seed=0, longest=20, group_id=0):
    """Some end in the model's pad id (0), one in several of them."""
    rng = np.random.default_rng(seed)
    outs = [rng.integers(1, SIZES["vocab_size"], rng.integers(3, longest)) for _ in range(n)]
    outs[1][-1:], outs[2][-3:] = 0, 0
    prompt = rng.integers(0, SIZES["vocab_size"], 5)
    return tuple(sample(i, prompt, out, group_id=group_id) for i, out in enumerate(outs))


def model(path=JUDGE, devices=1, **section):
    section = RewardModelSection(path=str(path), **{"pack_tokens": 32, **section})
    mesh = sharding.make_mesh(jax.devices()[:devices], section.data, section.fsdp, section.tensor)
    made = RewardModel(section, mesh)
    made.compile()
    return made


@pytest.fixture(scope="module")
def judge():
    return model()


# -- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(family, tmp_path):
    theirs = torch_judge(family)
    theirs.save_pretrained(tmp_path / "judge")
    expected = torch_scores(theirs, samples())
    assert np.ptp(expected) > 0.5
    np.testing.assert_allclose(model(tmp_path / "judge", rows=3).scores(samples()), expected, atol=TOLERANCE)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_golden_scores_on_every_mesh(mesh):
    data, fsdp, tensor = mesh
    made = model(devices=data * fsdp * tensor, data=data, fsdp=fsdp, tensor=tensor)
    np.testing.assert_allclose(made.scores(samples()), np.load(JUDGE / "scores.npy"), atol=TOLERANCE)


def test_our_own_weights_with_a_score_head(tmp_path):
    """The folder that `save` writes, and the tensor beside it; its vocabulary head is not looked at."""
    cfg = decoder.new_config(
        "qwen2",
        vocab_size=40,
        d_model=16,
        n_layers=1,
        n_heads=4,
        n_kv_heads=2,
        head_dim=4,
        d_ff=24,
        tie_embeddings=False,
    )
    hf.save(tmp_path / "ours", cfg, decoder.init_params(cfg, 0))
    tensors = load_file(tmp_path / "ours" / hf.SINGLE)
    save_file({**tensors, hf.SCORE: np.ones((1, 16), np.float32)}, tmp_path / "ours" / hf.SINGLE)
    tokens = np.concatenate([samples()[0].prompt_ids, samples()[0].out_ids])[None]
    at = np.arange(tokens.shape[1])[None]
    hidden = decoder.forward(
        cfg, hf.load_scorer(tmp_path / "ours", None)[1], tokens, at, segment_attention(np.zeros_like(at), at)
    )
    np.testing.assert_allclose(model(tmp_path / "ours").scores(samples()[:1]), hidden[:, -1].sum(-1), atol=TOLERANCE)


def test_a_score_depends_on_its_group_alone_and_nothing_compiles_again(judge):
    """More rows than a batch has, in any order of groups, bit for bit."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    groups = [samples(n, seed=n, longest=25) for n in (3, 9, 5)]
    first = [judge.scores(group) for group in groups]
    again = [judge.scores(group) for group in reversed(groups)]
    jax.monitoring.clear_event_listeners()
    for a, b in zip(first, reversed(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not compiled
    alone = np.concatenate([judge.scores([one]) for one in groups[1]])
    np.testing.assert_allclose(alone, first[1], atol=TOLERANCE)


# -- what is refused -------------------------------------------------------------------------------------------------


def add_tokenizer(path, words):
    path.mkdir(parents=True, exist_ok=True)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)})).save(
        str(path / "tokenizer.json")
    )


def set_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def set_head(path, head):
    tensors = load_file(path / hf.SINGLE)
    tensors.pop(hf.SCORE)
    save_file(tensors | ({} if head is None else {hf.SCORE: head}), path / hf.SINGLE)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (lambda path: None, None),
        (lambda path: add_tokenizer(path, [str(i) for i in range(21)]), None),  # more tokens than the policy has
        (lambda path: shutil.rmtree(path), "config.json is missing"),
        (lambda path: set_head(path, None), "lacks the tensor score.weight"),
        (lambda path: set_head(path, np.zeros((2, 16), np.float32)), r"score.weight of shape \(2, 16\); .* \(1, 16\)"),
        (lambda path: set_config(path, architectures=["GPT2LMHeadModel"]), "known: .*Qwen2ForSequenceClassification"),
        (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (
            lambda path: add_tokenizer(path, [str(i) for i in range(19)]),
            "the token '19' no id, the policy's tokenizer 19",
        ),
        (
            lambda path: add_tokenizer(path, [*map(str, range(18)), "19", "18"]),
            "the token '1[89]' id 1[89], the policy's",
        ),
        (lambda path: set_config(path, max_position_embeddings=8), "has 8 positions, the longest sample 24 tokens"),
    ],
)
def test_a_bad_folder_is_one_sentence(damage, sentence, tmp_path):
    shutil.copytree(JUDGE, tmp_path / "judge")
    for name in ("policy", "judge"):
        add_tokenizer(tmp_path / name, [str(i) for i in range(20)])
    damage(tmp_path / "judge")
    if sentence is None:
        return reward_model.check(tmp_path / "judge", tmp_path / "policy", 24)
    with (
        pytest.raises(ConfigError, match="reward_model.path: .*" + sentence) as caught,
        field_context("reward_model.path"),
    ):
        reward_model.check(tmp_path / "judge", tmp_path / "policy", 24)
    assert len(caught.value.problems) == 1


# -- the seam --------------------------------------------------------------------------------------------------------


class Task:
    """Scores at once: the sample's index; group 3 fails."""

    def __init__(self):
        self.done, self.closed = [], False

    def submit(self, prompt, samples):
        rewards = np.arange(len(samples), dtype=np.float32)
        self.done.append(
            GroupFailure(group_id=3, reason="no", lengths=())
            if prompt.group_id == 3
            else ScoredGroup(
                group_id=prompt.group_id, version=0, samples=samples, rewards=rewards, parts={"exact": rewards}
            )
        )

    def poll(self):
        done, self.done = self.done, []
        return done

    def close(self):
        self.closed = True


def prompt(group_id):
    return Prompt(
        group_id=group_id, task="t", uid="", text="", token_ids=np.zeros(1, np.int32), answer=None, max_new_tokens=8
    )


def collect(scorer, n):
    """By group id."""
    done, deadline = [], time.monotonic() + 30
    while len(done) < n and time.monotonic() < deadline:
        done += scorer.poll()
        time.sleep(0.005)
    assert len(done) == n
    return {group.group_id: group for group in done}


@pytest.fixture
def opened():
    scorers = []

    def make(model, weight=1.0, task=None):
        scorers.append(ModelScorer(model, weight, task))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


def test_the_reward_is_the_tasks_and_the_weighted_score(judge, opened):
    task = Task()
    scorer = opened(judge, 0.5, task)
    groups = {group_id: samples(seed=group_id + 5, group_id=group_id) for group_id in (0, 1, 2, 3, -1)}
    for group_id, group in groups.items():
        scorer.submit(prompt(group_id), group)
    done = collect(scorer, len(groups))
    for group_id in (0, 1, 2):
        group, exact = done[group_id], np.arange(7, dtype=np.float32)
        term = np.float32(0.5) * judge.scores(groups[group_id])
        assert group.samples is groups[group_id] and list(group.parts) == ["exact", "reward_model"]
        np.testing.assert_array_equal(group.parts["reward_model"], term)
        np.testing.assert_array_equal(group.rewards, exact + term)
    assert done[3].reason == "no"
    assert list(done[-1].parts) == ["exact"]  # held out: the task's own
    scorer.close()
    assert task.closed


def test_the_model_alone_and_samples_without_a_score(judge, opened):
    scorer = opened(judge)
    group = samples(group_id=1)
    broken = sample(0, [1, 2], [3], group_id=2), sample(1, [1, 2], [3], "error", group_id=2)
    scorer.submit(prompt(1), group)
    scorer.submit(prompt(2), broken)
    done = collect(scorer, 2)
    np.testing.assert_array_equal(done[1].rewards, judge.scores(group))
    assert done[2] == GroupFailure(
        group_id=2, reason="sample (2, 1) ended in an error", lengths=(1, 1), kind="a sample ended in an error"
    )


def test_a_score_that_is_not_finite_fails_its_group(opened):
    class Sick:
        def compile(self):
            pass

        def scores(self, samples):
            if samples[0].id.group_id == 1:
                raise RuntimeError("out of memory")
            return np.array([0.0, np.nan], np.float32)

    scorer = opened(Sick(), 1.0)
    scorer.submit(prompt(0), samples(3)[:2])
    assert collect(scorer, 1)[0].reason == "the reward model scored sample (0, 1) nan"
    scorer.submit(prompt(1), samples(3, group_id=1))
    with pytest.raises(RuntimeError, match="out of memory"):
        collect(scorer, 1)


# -- a run -----------------------------------------------------------------------------------------------------------


def run(module, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.slow
def test_a_run_whose_reward_is_the_models(tmp_path):
    """Rewards in the journal are the judge's scores of the journal's samples, on a device that nobody else has."""
    base, judge, workdir = tmp_path / "base", tmp_path / "judge", tmp_path / "run"
    config = "--config=configs/quickstart.py:tiny"
    run("dora_jax.sft", config, f"--config.sft.out={base}", "--config.sft.steps=1", f"--workdir={tmp_path / 'sft'}")
    cfg = decoder.new_config(
        "qwen2",
        vocab_size=hf.read_config(base).vocab_size,
        d_model=16,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        d_ff=32,
    )
    hf.save(judge, cfg, decoder.init_params(cfg, 0), base)
    head = np.random.default_rng(0).normal(size=(1, 16)).astype(np.float32)
    save_file({**load_file(judge / hf.SINGLE), hf.SCORE: head}, judge / hf.SINGLE)
    run(
        "dora_jax.train",
        config,
        f"--config.model.path={base}",
        f"--config.reward_model.path={judge}",
        "--config.task.rewards=()",
        "--config.reward_model.weight=2.0",
        "--config.cpu_devices=3",
        "--config.steps=2",
        f"--workdir={workdir}",
    )
    journal = EventLog(FileLogStore(workdir / "journal", read_only=True))
    steps = replay(journal, journal.segments(), print).steps
    made = model(judge, pack_tokens=512)
    assert len(steps) == 2
    for group in (group for step in steps for group in step.groups):
        np.testing.assert_allclose(group.rewards, 2 * made.scores(group.samples), atol=TOLERANCE)
        assert list(group.parts) == ["reward_model"] and np.ptp(group.rewards) > 0


def write_golden():
    shutil.rmtree(JUDGE, ignore_errors=True)
    theirs = torch_judge("qwen2")
    theirs.save_pretrained(JUDGE)
    np.save(JUDGE / "scores.npy", torch_scores(theirs, samples()))


if __name__ == "__main__":
    write_golden()
