"""Hundreds of fuzzed inputs a decoder: what it holds, or an error with a sentence; never a hang, a crash or a flood.
(What hangs ends at pytest's own time limit.)

The codec and the frames of the journal are fuzzed in test_codec.py and test_event_log.py; whole segments here.
"""

import json
import os
import random
import tracemalloc

import ml_collections
import numpy as np
import pytest
from safetensors.numpy import save_file

from dora_jax import config
from dora_jax.config import TaskSection
from dora_jax.models import hf, hf_config
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.events import InstanceUp, TimePassed
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.plan import validate
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import JournalError
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.records import CODEC, Fact
from dora_jax.runtime.journal.recovery import head_records, recover
from dora_jax.tasks.prompts import Wording
from dora_jax.tasks.rows import RowsSource
from dora_jax.trainer import manifest
from tests.fakes.segments import segment

pytestmark = pytest.mark.slow
N = 1000 if os.environ.get("DORA_NIGHTLY") else 300
MAX_BYTES = 64 << 20
JSON_NOISE = ["null", "1e999", "-1", "[]", "{}", "NaN", '"\\ud800"', "9" * 40, "[" * 2000, '{"a":' * 500, "true", '""']


@pytest.fixture(autouse=True)
def bounded():
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MAX_BYTES


def damaged(draw: random.Random, good: bytes) -> bytes:
    """Bytes changed, cut, repeated, replaced by noise, or with a value of another kind spliced in."""
    data = bytearray(good)
    kind = draw.randrange(5)
    if kind == 0:
        return draw.randbytes(draw.randrange(300))
    if kind == 1:
        del data[draw.randrange(len(data)) :]
    elif kind == 2:
        at = draw.randrange(len(data))
        data[at : at + draw.randrange(12)] = draw.choice(JSON_NOISE).encode()
    elif kind == 3:
        at = draw.randrange(len(data))
        data[at:at] = data[: draw.randrange(len(data))]
    else:
        for _ in range(draw.randrange(1, 8)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def refused(decode, *errors) -> bool:
    """The decoder raised one of its own errors, with a sentence."""
    try:
        decode()
    except errors as error:
        assert len(str(error)) > 10, repr(error)
        return True
    return False


@pytest.mark.slow
def test_configs():
    draw = random.Random(0)
    base = config.defaults()
    base.model.path, base.task.name = "m", "reasoning_gym:chain_sum"
    good = json.dumps(config.to_json(validate.from_config_dict(base))).encode()
    count = 0
    for _ in range(N):
        try:
            tree = json.loads(damaged(draw, good))
        except (ValueError, RecursionError):
            tree = ml_collections.ConfigDict({}).to_dict() | {
                draw.choice(["task", "steps", "x" * 50]): draw.randbytes(3)
            }
        if isinstance(tree, dict):
            count += refused(lambda tree=tree: validate.from_config_dict(tree), config.ConfigError)
    assert count > N // 4


ROWS = b"".join(json.dumps({"prompt": f"what is {i}?", "answer": str(i), "id": i}).encode() + b"\n" for i in range(6))


def test_task_rows(tmp_path):
    draw, count = random.Random(1), 0
    path = tmp_path / "rows.jsonl"
    section = TaskSection(name="rows", path=str(path), heldout=1, max_bad_rows_share=0.5)
    for _ in range(N):
        path.write_bytes(damaged(draw, ROWS))
        count += refused(
            lambda: RowsSource(
                section,
                Wording(section, None),
                heldout=1,
                exclude=frozenset(),
                supervised=False,
                quarantine_path=tmp_path / "bad.jsonl",
            ),
            ValueError,
        )
    assert N // 20 < count < N


MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


def test_model_configs(tmp_path):
    draw, count = random.Random(2), 0
    good = json.dumps(MODEL).encode()
    hf_write(tmp_path, good)
    hf_config.read_config(tmp_path)
    for _ in range(N):
        hf_write(tmp_path, damaged(draw, good))
        count += refused(lambda: hf_config.read_config(tmp_path), ValueError)
    assert count > N // 2


def hf_write(folder, content):
    (folder / "config.json").write_bytes(content)


def test_safetensors_headers(tmp_path):
    draw, count = random.Random(3), 0
    hf_write(tmp_path, json.dumps(MODEL).encode())
    file = tmp_path / "model.safetensors"
    save_file({"model.embed_tokens.weight": np.zeros((32, 8), np.float32)}, file)
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    for i in range(N):
        if i % 4 == 0:
            data = draw.choice([2**63, 2**40, header, 7, 0]).to_bytes(8, "little") + good[8:]
        else:
            data = damaged(draw, good[:header]) + good[header:]
        file.write_bytes(data)
        count += refused(lambda: hf.check(tmp_path), ValueError)
    assert count == N, "one tensor is no model, whatever its header says"


def test_checkpoint_manifests(tmp_path):
    draw, count = random.Random(4), 0
    root = tmp_path / "3"
    root.mkdir()
    (root / "a").write_bytes(b"x" * 50)
    manifest.write(root)
    good = (root / "manifest.json").read_bytes()
    for _ in range(N):
        (root / "manifest.json").write_bytes(bad := damaged(draw, good))
        fault = manifest.fault(root, full=True)
        count += fault is not None
        assert fault is None or len(fault) > 10
        assert fault is not None or json.loads(bad) == json.loads(good)
    assert count > N // 2


class Bytes:
    """`Log` of one segment, read only."""

    def __init__(self, data):
        self.data = data

    def segments(self):
        return [1]

    def read(self, segment):
        return self.data


def test_journal_segments_whose_frames_are_whole_and_whose_records_are_not():
    """Damage behind a good checksum: what a bug would write."""
    draw, count = random.Random(5), 0
    cfg = OrchestratorConfig(groups_per_step=1, group_size=1, total_steps=2)
    brain = Orchestrator(cfg)
    records = list(head_records(brain, PayloadState(), 0))
    for event in (InstanceUp(instance=0, slots=4, pages=64, page_size=16), TimePassed(now_s=1.0)):
        records.append(CODEC.encode(Fact(event=event, payload=None)))
    for _ in range(N):
        at = draw.randrange(len(records))
        bad = [*records[:at], damaged(draw, records[at]), *records[at + 1 :]]
        journal, notes = EventLog(Bytes(segment(bad))), []
        try:
            found = recover(journal, cfg, [0], lambda v: True, notes.append)
        except (JournalError, ValueError) as error:
            assert len(str(error)) > 10
            count += 1
        else:
            count += bool(notes)
            assert found is None or found.base == 0
    assert count > N // 2
