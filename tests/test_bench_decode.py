"""The decode bench: what its works are, that instances share one queue, and its page of long contexts."""

import numpy as np
import pytest

from dora_jax.bench import decode, harness
from dora_jax.models import decoder


def test_the_long_tail_is_the_one_it_says():
    fixed, tail = decode.works(decode.Subject(), [8], 256)
    assert (fixed.lengths == 128).all() and fixed.tokens == 1024 and fixed.prompts.shape == (8, 32)
    assert len(tail.lengths) == 256 and 40 < np.median(tail.lengths) < 56 and np.quantile(tail.lengths, 0.99) > 500


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
