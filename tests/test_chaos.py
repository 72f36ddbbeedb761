"""The books find what is lost, trained twice or generated again; the real run survives."""

import subprocess
import sys

import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.journal.frames import frames, unframe
from dora_jax.runtime.journal.journal_audit import audit, facts
from dora_jax.runtime.journal.records import CODEC, Batch
from tests.fakes.journaled_run import Run


@pytest.fixture
def finished(tmp_path):
    """The journal of a run that was killed once."""
    job = Run(tmp_path, eval_every=0)
    assert job.incarnation(kill_at=150) is None and job.incarnation().ok
    return tmp_path


def test_the_books_of_a_good_run_balance(finished):
    books = audit(finished)
    assert books.ok and books.trained == 20 and books.failed == 1 and "999 tokens" in "".join(books.reasons)
    assert books.issued == books.trained + books.filtered + books.failed + books.in_flight


def segments(folder):
    return [(path, unframe(path.read_bytes(), int(path.stem)).records) for path in sorted(folder.glob("*.log"))]


def test_the_books_find_a_sample_that_was_generated_again(finished):
    path, number, done = next(
        (path, len(records), done)
        for path, records in segments(finished)
        for done in facts(records)
        if isinstance(done.event, ev.SampleDone) and done.event.id.group_id >= 0
    )
    again = CODEC.encode(Batch(entries=(done,), last=True))
    path.write_bytes(path.read_bytes() + frames([again], int(path.stem), number))
    books = audit(finished)
    assert not books.ok and books.generated_again == (done.event.id,)


def test_the_books_need_the_first_segment(finished):
    (finished / "000001.log").unlink()
    with pytest.raises(ValueError, match="first facts of the run are gone"):
        audit(finished)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [("--kills=1", "--points=journal.half_commit,checkpoint.half_manifest"), ("--kills=10",)],
    ids=["a few", "all"],
)
def test_the_real_run_survives_kills_and_fault_points(tmp_path, flags):
    out = subprocess.run(
        [sys.executable, "-m", "tests.soak.chaos", *flags, f"--workdir={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stdout + out.stderr
    assert "lost 0, trained twice 0, finished samples generated again 0" in out.stdout


@pytest.mark.slow
@pytest.mark.parametrize("soak", ["exact --steps=4 --cuts=1", "damage --faults=60 --resumes=1"])
def test_killed_runs_are_exact_and_damage_is_noticed(tmp_path, soak):
    name, *flags = soak.split()
    out = subprocess.run(
        [sys.executable, "-m", f"tests.soak.{name}", *flags, f"--workdir={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stdout + out.stderr
