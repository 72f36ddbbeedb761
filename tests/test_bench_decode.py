"""The decode bench: what its works are, that instances share one queue, and its page of long contexts."""

import numpy as np
import pytest

from dora_jax.bench import decode, harness
from dora_jax.config import RolloutSection
from dora_jax.models import decoder
from dora_jax.ops.segment_attention import segment_attention


def test_the_long_tail_is_the_one_it_says():
    fixed, tail, grouped = decode.works(512, RolloutSection(max_new_tokens=700), [4], 256, 8)
    assert (fixed.lengths == 128).all() and fixed.tokens == 512 and fixed.prompts.shape == (4, 48)
    assert len(tail.lengths) == 256 and 40 < np.median(tail.lengths) < 56 and np.quantile(tail.lengths, 0.99) > 500
    assert (grouped.lengths == tail.lengths).all() and grouped.group == 8
    assert len(np.unique(grouped.prompts, axis=0)) == 32 and (grouped.prompts[:8] == grouped.prompts[0]).all()


def test_instances_take_samples_of_one_queue_when_they_have_room():
    class Fake:
        """Two slots; every tick ends the oldest sample."""

        shapes = type("Shapes", (), {"slots": 2})

        def __init__(self):
            self.held, self.most = [], 0

        def submit(self, id, prompt, version, length):
            self.held.append(length)
            self.most = max(self.most, len(self.held))

        def tick(self):
            return type("Result", (), {"tokens": self.held[0], "finished": (self.held.pop(0),)})

    todo = iter([(i, None, 0, i) for i in range(1, 8)])
    engine = Fake()
    assert decode.drain(engine, todo) == 28 and engine.most == 2
    assert decode.drain(Fake(), todo) == 0


def test_bytes_of_a_step():
    tied = decoder.new_config("qwen3", **harness.TOY)
    weights, kv = decode.step_bytes(tied, 4, 3, 100)
    assert weights == 4 * 3_279_360 and kv == 3 * 100 * 4096
    apart = decoder.new_config("qwen3", **harness.TOY, tie_embeddings=False)
    assert decode.step_bytes(apart, 4, 3, 100)[0] == weights


@pytest.mark.slow
def test_the_page_of_long_contexts():
    _, _, *rows = decode.bandwidth_table("toy", [64, 128], 2, "reference", 1e9)
    assert [row.split()[:2] for row in rows] == [["64", "2"], ["128", "2"]]
    assert all(0 < float(row.split()[4]) and row.endswith("%") for row in rows)


@pytest.mark.slow
def test_the_engines_of_a_shipped_configuration_are_measured_beside_the_plain_way():
    head, columns, *rows = decode.decode("configs/quickstart.py:tiny", rows=(4,), tail=0, rivals=("plain",), rounds=1)
    assert head.startswith("configs/quickstart.py:tiny, sha256 ") and columns.split()[-1] == "rival"
    assert [row.split()[1] for row in rows] == ["B=4", "B=4,"] and all("x" in row for row in rows)


def test_a_rival_whose_greedy_tokens_are_not_the_models_is_found(monkeypatch):
    monkeypatch.setattr(harness, "ASKED_TOKENS", 2)
    model = decoder.new_config("qwen3", **harness.TOY | {"vocab_size": 32, "n_layers": 1})
    params, prompts = harness.serving_params(model), np.array([[1, 2, 3]] * 4)

    def logits_after(ids):
        return np.asarray(decoder.logits(model, params, _hidden(model, params, ids)))[-1]

    best, worst = int(logits_after([1, 2, 3]).argmax()), int(logits_after([1, 2, 3]).argmin())

    class Fake:
        def ask(self, work):
            assert work["greedy"] and work["lengths"] == [2] * 4
            return [[[first, int(logits_after([1, 2, 3, first]).argmax())] for first in (best, best, worst, best)]]

    assert harness.not_greedy(model, params, Fake(), prompts) == [2]
    assert harness.not_greedy(model, params, Fake(), prompts, tie=np.inf) == []


def _hidden(model, params, ids):
    ids = np.array([ids], np.int32)
    positions = np.arange(ids.shape[1])[None]
    attend = segment_attention(np.ones_like(ids), positions)
    return decoder.forward(model, params, ids, positions, attend)[0]
