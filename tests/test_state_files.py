"""Damage to the files of a workdir beside journal and checkpoints: found, moved aside or refused in a sentence, never a
trace. What the checks compare with is what was written, not what the readers make of it."""

import functools
import io
import json
import random
import shutil

import numpy as np
import pytest

from dora_jax import top
from dora_jax.base import state_files
from dora_jax.base.metrics import Writer
from dora_jax.config import Config, ConfigError
from dora_jax.orchestrate import events as ev
from dora_jax.report.load import load
from dora_jax.report.page import page
from dora_jax.runtime.assembly import checkpoint_weights
from dora_jax.runtime.cluster.run_registry import RunRegistry, address_in
from dora_jax.runtime.common.worker import Finished
from dora_jax.runtime.journal.object_storage import ROSTER
from dora_jax.runtime.observe.evaluations import closing
from dora_jax.runtime.observe.timeline import Timeline
from dora_jax.types import Sample, SampleId, Span
from tests.fakes.sinks import lines, quiet

FLIPS = 150  # of a file


def flipped(data, n=FLIPS, seed=0):
    """Copies of data with one bit flipped, all of them different."""
    draw = random.Random(seed)
    for at in draw.sample(range(8 * len(data)), min(n, 8 * len(data))):
        copy = bytearray(data)
        copy[at // 8] ^= 1 << at % 8
        yield bytes(copy)


def kinds(data):
    """Damage of every other kind, to a file that is one JSON object."""
    fields = json.loads(data)
    plain = {name: value for name, value in fields.items() if name not in ("format", "checksum")}
    yield from (b"", b"\0" * len(data), data[: len(data) // 2], data[:-3], b"\xff\xfe", b"7", b"[" * 10**5, b"{}")
    yield from (json.dumps({name: fields[name] for name in fields if name != left}).encode() for left in fields)
    yield from (
        json.dumps(given | dict.fromkeys(plain, bad)).encode()
        for given in (plain, fields)
        for bad in ("x", [1], 10**400, None, {"0": 7})
    )


def metrics_of(steps):
    for step in range(steps + 1):
        if step:
            yield {"step": step, "reward/mean": step / 8, "trainer/loss": None, "waits": "trainer idle 9%: x"}
        if step % 4 == 0:
            yield {"step": step, "eval/accuracy": 0.25, "eval/prompts": 8, "eval/reward/mean": 0.5}


def text_of(rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def resumed(folder, data, step):
    """(rows after a resume at this step and a write, notes, lines moved aside, evaluations)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(data)
    console = quiet()
    notes = []
    console.note = notes.append
    with Writer(folder, console) as writer:
        writer.resume(step)
        closing(writer.evaluations)
        writer.write(step + 1, {"x": 1.0})
    aside = folder / "metrics.jsonl.damaged"
    return lines(folder), " ".join(notes), aside.read_bytes() if aside.exists() else b"", writer.evaluations


def test_a_flipped_bit_of_the_metrics_stops_no_run_and_costs_no_other_line(tmp_path):
    whole = list(metrics_of(12))
    data, silent = text_of(whole), 0
    for bad in flipped(data, 2 * FLIPS):
        rows, notes, aside, evaluations = resumed(tmp_path / "w", bad, 12)
        assert rows[-1] == {"step": 13, "x": 1.0}
        lost = [row for row in whole if row not in rows]
        known = [row for row in rows[:-1] if row in whole]
        assert len(lost) <= 1 or (len(lost) == 2 and len(aside.splitlines()) == 2), "a line break may cost both"
        assert len(known) + len(lost) == len(whole)
        changed = [row for row in rows[:-1] if row not in whole]
        if lost and not changed:
            assert aside and "is damaged in line" in notes and "metrics.jsonl.damaged" in notes
        silent += bool(changed)
        assert set(evaluations) <= set(range(13))
    assert silent < FLIPS, "digits and names that became others: a plain log has no checksum"


@pytest.mark.parametrize(
    "line",
    [b"\xff garbage", b"7", b"[" * 10**5, b'{"a": 1}', b'{"step": "x"}', b'{"step": -1}', b'{"step": true}', b'{"step": 1e3}',
     b'{"step": 2, "x": [1]}', b'{"step": 2, "x": "y"}', b'{"step": 2, "x": 1, "x": 1}', b'{"step": 99, "x": 1}',
     b'{"step": 4, "eval/accuracy": 0.5}', b'{"step": 4, "eval/accuracy": 7.5, "eval/prompts": 8, "eval/reward/mean": 0}'],
)  # fmt: skip
def test_a_damaged_line_of_the_metrics_is_set_aside(tmp_path, line):
    whole = list(metrics_of(9))
    data = text_of(whole[:5]) + line + b"\n" + text_of(whole[5:])
    rows, notes, aside, evaluations = resumed(tmp_path / "w", data, 8)
    assert rows[:-1] == [row for row in whole if row["step"] <= 8] and aside == line + b"\n"
    assert "metrics.jsonl is damaged in line 6; what stood there is in" in notes and "no record" not in notes
    assert set(evaluations) == {0, 4, 8}


@pytest.mark.parametrize(
    "gap, message", [(b"", "steps? 1-8"), (text_of(metrics_of(4)), "step 5-8"), (None, "step 1-8")]
)
def test_metrics_that_are_gone_are_named(tmp_path, gap, message):
    if gap is None:
        (tmp_path / "metrics.jsonl").mkdir()
    else:
        (tmp_path / "metrics.jsonl").write_bytes(gap)
    console, notes = quiet(), []
    console.note = notes.append
    with Writer(tmp_path, console) as writer:
        writer.resume(8)
        writer.write(9, {"x": 1.0})
    assert f"has no record of step {message[-3:]}" in notes[0] and lines(tmp_path)[-1] == {"step": 9, "x": 1.0}
    assert (gap is None) == (tmp_path / "metrics.jsonl.damaged").is_dir()


def test_a_line_break_that_became_another_byte_costs_no_record(tmp_path):
    whole = list(metrics_of(5))
    data = text_of(whole)
    for bit in range(8):
        at = data.index(b"\n", len(data) // 2)
        rows, _, _, _ = resumed(tmp_path / "w", data[:at] + bytes([10 ^ 1 << bit]) + data[at + 1 :], 5)
        assert rows[:-1] == whole


# ---------------------------------------------------------------- state


def registry(folder):
    found = RunRegistry(str(folder), "build")
    return found.authority.pem, found.left, found.fits


def base(folder, params):
    checkpoint_weights.check_base(Config(), folder, params)


def written_state(folder):
    """{file: (its bytes, what reads it)}"""
    folder.mkdir(exist_ok=True)
    params = {"a": np.arange(4, dtype=np.float32)}
    base(folder, params)
    one = RunRegistry(str(folder), "build")
    one.announce("127.0.0.1:9000")
    one.enter("trainer", 3, (7, 8))
    return {
        ROSTER: ((folder / ROSTER).read_bytes(), registry),
        checkpoint_weights.BASE: (
            (folder / checkpoint_weights.BASE).read_bytes(),
            functools.partial(base, params=params),
        ),
    }


@pytest.mark.parametrize("name", [ROSTER, checkpoint_weights.BASE])
def test_damaged_state_is_refused_in_a_sentence_that_names_the_file(tmp_path, name):
    data, read = written_state(tmp_path)[name]
    right, file = read(tmp_path), tmp_path / name
    for bad in (*flipped(data), *kinds(data)):
        file.write_bytes(bad)
        with pytest.raises(ConfigError, match=rf"^(workdir: .*{name}.*(delete|remove) |model.path: .* other weights)"):
            read(tmp_path)
        assert file.read_bytes() == bad, "nothing is lost"
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=name):
        read(tmp_path)
    file.rmdir()
    fields = json.loads(data)
    newer = {key: value for key, value in fields.items() if key not in ("format", "checksum")}
    known = fields["format"]
    file.write_bytes(state_files.encode(newer, known + 1))
    with pytest.raises(
        ConfigError, match=f"{name} has format {known + 1}, and this dora_jax reads formats up to {known}: go on with"
    ):
        read(tmp_path)
    file.write_text(json.dumps(newer))  # as it was before formats had numbers
    assert read(tmp_path) == right


def test_a_gang_waits_where_the_file_is_damaged(tmp_path):
    """OSError and ValueError are what a process that was left alone waits on."""
    data, _ = written_state(tmp_path)[ROSTER]
    assert address_in(str(tmp_path)) == "127.0.0.1:9000"
    unnumbered = {"token": "00", "address": "127.0.0.1:70000000", "gangs": {}}
    for bad in (
        *flipped(data),
        *kinds(data),
        *(json.dumps(unnumbered | {"address": a}).encode() for a in (7, "", "x:y")),
    ):
        (tmp_path / ROSTER).write_bytes(bad)
        with pytest.raises(ValueError):
            address_in(str(tmp_path))


def test_a_state_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    state_files.replace(file, b"one", 0o600)
    assert file.stat().st_mode & 0o77 == 0
    monkeypatch.setattr(
        state_files.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space"):
        state_files.replace(file, b"two")
    assert file.read_bytes() == b"one"


# ---------------------------------------------------------------- what instances did


def finished(timeline, instance):
    ids = np.arange(4, dtype=np.int32)
    sample = Sample(id=SampleId(0, 0), prompt_ids=ids, out_ids=ids, logprobs=np.full(4, -0.5, np.float32), finish="stop",
                    spans=(Span(version=0, start=0, stop=4),), mask=np.ones(4, bool))  # fmt: skip
    timeline.event(ev.InstanceUp(instance=instance, slots=4, pages=8, page_size=16), ())
    timeline.record(Finished(sample=sample, instance=instance))


def test_damaged_statistics_are_set_aside_and_begin_anew(tmp_path):
    log = Timeline(tmp_path, print)
    finished(log, 0)
    log.close()
    file, aside = tmp_path / "instances.json", tmp_path / "instances.json.damaged"
    data = file.read_bytes()
    fields = json.loads(data)
    lacking = json.dumps({"instances": {"0": {"samples": 1}}, "lengths": fields["lengths"]}).encode()
    for bad in (*flipped(data, 60), *kinds(data), lacking):
        file.write_bytes(bad)
        message = []
        log = Timeline(tmp_path, message.append)
        finished(log, 0)
        log.close()
        assert aside.read_bytes() == bad and "it is moved aside as" in message[0], message
        assert load(tmp_path, "a").instances[0]["samples"] == 1
        aside.unlink()
    file.write_text(json.dumps({name: fields[name] for name in ("instances", "lengths")}))  # before formats had numbers
    log = Timeline(tmp_path, print)
    finished(log, 0)
    log.close()
    assert load(tmp_path, "a").instances[0]["samples"] == 2


@pytest.mark.parametrize("content", [b"garbage", b"[" * 10**5, b"\xff" * 100_000, None])
def test_a_trace_that_is_none_is_set_aside(tmp_path, content):
    file = tmp_path / "trace.json"
    file.mkdir() if content is None else file.write_bytes(content)
    message = []
    log = Timeline(tmp_path, message.append)
    finished(log, 0)
    log.close()
    assert json.loads(file.read_text()) and "moved aside as" in message[0]
    assert content is None or (tmp_path / "trace.json.damaged").read_bytes() == content


# ---------------------------------------------------------------- what people look at

ROWS = {
    "metrics.jsonl": list(metrics_of(6)),
    "evaluations/metrics.jsonl": [row for row in metrics_of(6) if "eval/prompts" in row],
    "timeline.jsonl": [{"t": 5.0, "start": True}, {"t": 6.0, "up": 0, "slots": 4}, {"t": 7.0, "busy": {"0": {"1": 3}}},
                       {"t": 8.0, "train": 1}, {"t": 8.5, "moves": [[0, 0, 1]]}, {"t": 9.0, "published": 2}],
    "samples/00000000.jsonl": [{"step": n, "kind": "heldout", "group": -1, "version": n, "prompt": "p", "expected": "2",
                                "samples": [{"index": 0, "reward": 1.0, "solved": True, "text": "a"}]} for n in (0, 1)],
    "samples.jsonl": [{"step": 1, "group": 3, "version": 0, "prompt": "p", "expected": "2", "samples": [{"reward": 1.0,
                       "text": "a", "by_token": {"text": ["a"], "advantage": [0.5], "gap": [0.1]}}]}],
}  # fmt: skip
OBJECTS = {"config.json": {"steps": 6, "orchestrator": {"groups_per_step": 4}}, "overrides.json": {"steps": 6},
           "instances.json": {"instances": {"0": {"samples": 1, "tokens": 4}}, "lengths": {"generated": {"16": 1}}}}  # fmt: skip


@pytest.mark.parametrize("name", [*ROWS, *OBJECTS])
def test_report_and_top_show_what_is_left(tmp_path, name):
    for folder in ("evaluations", "samples"):
        (tmp_path / folder).mkdir()
    for file, rows in ROWS.items():
        (tmp_path / file).write_bytes(text_of(rows))
    for file, value in OBJECTS.items():
        (tmp_path / file).write_bytes(state_files.encode(value, 2))
    intact = (tmp_path / name).read_bytes()
    values = ("x", [1], 10**400, None, {"0": 7}, 1e308, -1, True)
    if name in ROWS:
        others = [intact + line + b"\n" for line in (b"\xff", b"7", b"[" * 10**5, b"{}")]
        others += [intact + b'{"t": 9, "moves": [[NaN, 1e999, 1], 7, [1]]}\n']
        others += [intact + text_of([dict.fromkeys(row, value)]) for row in ROWS[name] for value in values]
        others += [intact + text_of([row | {key: value}]) for row in ROWS[name] for key in row for value in values]
    else:
        others = [*kinds(intact), *(json.dumps({k: value for k in OBJECTS[name]}).encode() for value in values)]
    for bad in (*flipped(intact, 60), *others):
        (tmp_path / name).write_bytes(bad)
        data = load(tmp_path, "a")
        assert "</html>" in page([data])
        top.Console(file=io.StringIO()).print(top.picture(data, 1e9))


def test_a_folder_in_the_place_of_a_file_that_is_written_anew_is_set_aside(tmp_path):
    file = tmp_path / "overrides.json"
    (file / "somebody's").mkdir(parents=True)
    state_files.replace(file, b"{}\n")
    assert file.read_bytes() == b"{}\n" and (tmp_path / "overrides.json.damaged" / "somebody's").is_dir()
