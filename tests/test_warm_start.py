"""Warm start: the tokenizer it makes, what it trains on, and the folder it leaves."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import agent
from dora_jax import config
from dora_jax.base.exits import Stop
from dora_jax.models import decoder, hf, sharding
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.runtime.training import warm_start, warm_start_data
from dora_jax.trainer.model import Model

PAIRS = [(f"What is {a} + {b}?", f" {a} + {b} = {a + b}\n#### {a + b}") for a in range(10) for b in range(40, 47)]
TINY = config.SftSection(
    steps=20,
    batch_rows=8,
    pack_tokens=96,
    learning_rate=1e-2,
    warmup_steps=2,
    examples=70,
    d_model=16,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    d_ff=32,
)


class Quiet:
    def __init__(self):
        self.printed, self.notes = [], []

    def phase(self, role, text):
        self.printed.append(text)

    def note(self, text):
        self.notes.append(text)


def folder(path, **changes):
    path.mkdir(parents=True)
    return warm_start_data.make_tokenizer(PAIRS, path, **changes)


def test_tokenizer_takes_any_text_and_gives_each_digit_its_own_token(tmp_path):
    tokenizer = Tokenizer.load(folder(tmp_path / "a"))
    for text in (*PAIRS[3], "naïve £ 猫\t\n", "", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    digits = [tokenizer.encode(str(d)) for d in range(10)]
    assert all(len(ids) == 1 for ids in digits)
    assert tokenizer.encode("4096") == [digits[int(d)][0] for d in "4096"]
    assert tokenizer.vocab_size <= warm_start_data.TOKENIZER_SIZE
    assert [tokenizer.decode([i]) for i in tokenizer.encode(PAIRS[0][0])] == [
        "What",
        " is",
        " ",
        "0",
        " + ",
        "4",
        "0",
        "?",
    ]
    end, pad = tokenizer.encode(warm_start_data.END), tokenizer.encode(warm_start_data.PAD)
    assert (end, pad) == (list(tokenizer.eos_ids), [tokenizer.pad_id])


def test_tokenizer_is_a_function_of_its_texts(tmp_path):
    files = [(folder(tmp_path / name) / "tokenizer.json").read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_a_smaller_tokenizer_where_the_embedding_is_small(tmp_path):
    assert Tokenizer.load(folder(tmp_path / "a", rows=270)).vocab_size == 270
    with pytest.raises(ValueError, match="sft.vocab_size=200 is too small: bytes and special tokens take 258 rows"):
        folder(tmp_path / "b", rows=200)


def test_a_worked_dialogue_trains_on_what_the_policy_says_alone(tmp_path):
    c = config.from_tree(agent.get_config("tiny").to_dict())
    c = dataclasses.replace(c, sft=dataclasses.replace(c.sft, examples=40, slip_rate=0.5))
    found = warm_start_data.examples(c, tmp_path)
    tokenizer = Tokenizer.load(warm_start_data.make_tokenizer(found, tmp_path))
    end = tokenizer.eos_ids[0]
    right = 0
    for prompt, dialogue in found:
        assert [own for _, own in dialogue] == [i % 2 == 0 for i in range(len(dialogue))]
        for (asked, _), (printed, _) in zip(dialogue[0::2], dialogue[1::2], strict=False):
            assert eval(asked) == int(printed)
        ids, sampled = warm_start_data.encoded(tokenizer, end, c.environment.observation, dialogue)
        turns = [text for text, own in dialogue if own]
        assert tokenizer.decode(np.array(ids)[sampled]) == "".join(turns) and np.array(ids)[sampled].tolist().count(
            end
        ) == len(turns)
        assert tokenizer.decode(np.array(ids)[~np.array(sampled)]) == "".join(
            f"-> {x}\n" for x, own in dialogue if not own
        )
        right += dialogue[-1][0] == f"#### {eval(prompt)}"
    assert 0 < right < len(found), "a slip answers one operation too early"


def test_rows_hold_each_example_once_and_train_on_completions_and_the_end():
    rows = warm_start_data.pack_rows(
        [([5, 6, 7], [8, 9, 1], [True] * 3), ([5], [8, 1], [True] * 2), ([4, 4], [3, 1], [True] * 2)], 7, pad_id=0
    )
    assert rows.tokens.tolist() == [[5, 6, 7, 8, 9, 5, 8], [4, 4, 3, 0, 0, 0, 0]]
    assert rows.targets.tolist() == [[6, 7, 8, 9, 1, 8, 1], [4, 3, 1, 0, 0, 0, 0]]
    assert rows.segment_ids.tolist() == [[1, 1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0, 0]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 0, 0, 0, 0]]
    assert rows.targets[rows.mask].tolist() == [8, 9, 1, 8, 1, 3, 1]
    with pytest.raises(ValueError, match="example 0 has 9 tokens, and a row holds 8: raise sft.pack_tokens"):
        warm_start_data.pack_rows([([1] * 5, [2] * 4, [True] * 4)], 7, 0)


def test_row_order_shows_every_row_once_an_epoch():
    order = warm_start_data.row_order(10, 4, 5, seed=0)
    assert order.shape == (5, 4)
    seen = order.reshape(-1)
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and seen[:10].tolist() != seen[10:].tolist()
    np.testing.assert_array_equal(order, warm_start_data.row_order(10, 4, 5, seed=0))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One warm start on the pairs above, and what it printed."""
    out = tmp_path_factory.mktemp("sft") / "base"
    progress = Quiet()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_start, "examples", lambda cfg, workdir: PAIRS)
        assert warm_start.run(config.Config(sft=dataclasses.replace(TINY, out=str(out))), out.parent, progress) == out
    return out, progress


def test_run_leaves_a_folder_that_loads_and_learned(made):
    out, progress = made
    cfg, params = hf.load(out)
    tokenizer = Tokenizer.load(out)
    assert (cfg.d_model, cfg.vocab_size) == (16, tokenizer.vocab_size)
    assert tokenizer.eos_ids == (tokenizer.encode(warm_start_data.END)[0],)
    assert any("step 20/20" in text for text in progress.printed) and "loss" in progress.notes[-1]
    first, last = (float(x) for x in progress.notes[-1].split("loss ")[1].split(",")[0].split(" -> "))
    assert first > 5 and last < first - 1.5
    assert not list(out.parent.glob(".*.part"))
    prompt, text = PAIRS[11]
    ids = [*tokenizer.encode(prompt), *tokenizer.encode(text), tokenizer.eos_ids[0]]
    arrays = {
        "tokens": np.array([ids[:-1]]),
        "targets": np.array([ids[1:]]),
        "positions": np.arange(len(ids) - 1)[None],
        "segment_ids": np.ones((1, len(ids) - 1), np.int32),
    }
    model = Model(cfg, sharding.make_mesh(jax.devices()[:1], 1, 1, 1), np.float32, "none", 1.0, None)
    completion = slice(len(tokenizer.encode(prompt)) - 1, None)
    trained = -np.asarray(jax.jit(model.logprobs)(params, arrays)[0])[0, completion].mean()
    fresh = decoder.init_params(cfg, 0)
    assert trained < -np.asarray(jax.jit(model.logprobs)(fresh, arrays)[0])[0, completion].mean() - 1.5


class Signal:
    """What a guard does: it stops the warm start after so many dispatches."""

    def __init__(self, dispatches):
        self.left = dispatches

    def __call__(self):
        self.left -= 1
        if not self.left:
            raise Stop("asked to")


@pytest.mark.slow
def test_what_was_stopped_goes_on_to_the_same_bytes(made, tmp_path, monkeypatch):
    monkeypatch.setattr(warm_start, "examples", lambda cfg, workdir: PAIRS)
    cfg, progress = config.Config(sft=dataclasses.replace(TINY, out=str(tmp_path / "base"))), Quiet()
    with pytest.raises(Stop):
        warm_start.run(cfg, tmp_path, progress, Signal(1))
    assert not (tmp_path / "base").exists() and (tmp_path / "sft/10/manifest.json").is_file()
    warm_start.run(cfg, tmp_path, progress)
    assert progress.notes[0] == "warm start: goes on from step 10" and not (tmp_path / "sft").exists()
    written, expected = (folder / "model.safetensors" for folder in (tmp_path / "base", made[0]))
    assert written.read_bytes() == expected.read_bytes()


def test_what_another_warm_start_left_is_not_gone_on_from(tmp_path, monkeypatch):
    monkeypatch.setattr(warm_start, "examples", lambda cfg, workdir: PAIRS)
    cfg, progress = config.Config(sft=dataclasses.replace(TINY, out=str(tmp_path / "base"))), Quiet()
    with pytest.raises(Stop):
        warm_start.run(cfg, tmp_path, progress, Signal(1))
    warm_start.run(dataclasses.replace(cfg, seed=1), tmp_path, progress)
    assert "is of another one" in progress.notes[0]


def test_a_folder_is_never_written_over(made, monkeypatch):
    out, _ = made
    monkeypatch.setattr(warm_start, "examples", lambda *args: pytest.fail("examples are made for nothing"))
    short = dataclasses.replace(TINY, out=str(out), steps=1)
    with pytest.raises(ValueError, match="never written over another"):
        warm_start.run(config.Config(sft=short), out.parent, Quiet())


def test_examples_of_rows_leave_out_held_out_prompts(tmp_path):
    import json

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": f"a{i}"}) + "\n" for i in range(40)))
    task = config.TaskSection(name="rows", path=str(file), heldout=10)
    section = dataclasses.replace(TINY, rows=str(file), examples=60)
    pairs = warm_start_data.examples(config.Config(task=task, sft=section), tmp_path)
    assert len(pairs) == 60 and len(set(pairs)) == 30 and all(p[1:] == a.strip()[1:] for p, a in pairs)
