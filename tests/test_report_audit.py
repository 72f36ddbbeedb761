"""The report's books: the journal of a run, replayed, or the sentence that says why not."""

import dataclasses
import json

import pytest

from dora_jax.report import audit
from dora_jax.report.load import RunData
from dora_jax.report.page import page
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore, ObjectLogStore
from dora_jax.runtime.journal.object_storage import Objects
from dora_jax.runtime.journal.records import CODEC
from tests.fakes.coordinator_world import P
from tests.fakes.journaled_run import STEPS, Run


def audited(workdir):
    data = RunData(name="a")
    audit.audit(str(workdir), data)
    return data


def test_a_killed_run_s_books_balance(tmp_path):
    (tmp_path / "journal").mkdir()
    job = Run(tmp_path / "journal")
    assert job.incarnation(kill_at=97) is None
    data = audited(tmp_path)
    assert data.ledger["admitted"] == sum(n for state, n in data.ledger.items() if state != "admitted") > 0
    assert job.incarnation().ok
    data = audited(tmp_path)
    assert data.ledger["trained"] == STEPS * P
    assert "lost 0, trained twice 0" in data.audit and data.audit in page([data])
    assert "<td>groups trained</td>" in page([data])


@pytest.mark.parametrize("now, again", [(1.0, True), (0.7, False)])
def test_samples_that_a_change_gave_up_are_not_generated_again(tmp_path, now, again):
    """The journal of a run that was killed, and behind it one that began at version 0 again."""
    whole = EventLog(FileLogStore(tmp_path / "journal"))
    for name, kill_at, temperature in (("killed", 97, 1.0), ("anew", None, now)):
        Run(tmp_path / name, eval_every=0).incarnation(kill_at=kill_at)
        there = EventLog(FileLogStore(tmp_path / name, read_only=True))
        for number in there.segments():
            head, *rest = there.read(number).records
            settings = {"rollout.temperature": temperature}
            whole.rotate([CODEC.encode(dataclasses.replace(CODEC.decode(head), settings=settings)), *rest])
    whole.close()
    assert ("finished samples generated again 0," in audited(tmp_path).audit) is not again


def test_a_journal_that_cannot_be_replayed_is_reported(tmp_path):
    assert audited(tmp_path).audit == "There is no journal here to audit."
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal/000001.log").write_bytes(json.dumps({"no": "journal"}).encode() * 10)
    assert audited(tmp_path).audit.startswith("The journal cannot be audited: ")


def test_a_long_journal_is_not_replayed(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "MOST_BYTES", 2**20)
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal/000001.log").write_bytes(bytes(3 * 2**20))
    sentence = "The journal of 3 MB is not audited: the report replays at most 1 MB."
    assert audited(tmp_path).audit == sentence == audited(f"file://{tmp_path}").audit
    monkeypatch.setattr(audit, "MOST_OBJECTS", 0)
    assert "The journal of 1 objects is not audited" in audited(f"file://{tmp_path}").audit


def test_the_books_of_a_bucket_are_those_of_a_folder(tmp_path):
    """The same facts, as objects: written by a run whose journal is in the bucket."""
    bucket, folder = f"file://{tmp_path}/store", tmp_path / "folder"
    (folder / "journal").mkdir(parents=True)
    assert audited(bucket).audit == "There is no journal here to audit."
    assert Run(folder / "journal", eval_every=0).incarnation().ok
    there = EventLog(ObjectLogStore(Objects(f"{bucket}/journal")))
    here = EventLog(FileLogStore(folder / "journal", read_only=True))
    for number in here.segments():
        assert there.rotate(here.read(number).records) == number
    there.close()
    assert audited(bucket) == audited(folder)
    assert audited(bucket).ledger["trained"] == STEPS * P
    (tmp_path / "store/journal/MANIFEST").write_text("{")
    assert audited(bucket).audit.startswith("The journal cannot be audited: ")
