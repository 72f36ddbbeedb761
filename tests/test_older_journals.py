"""Journals that earlier versions wrote: each gives what the code that wrote it recovered, and a run goes on from it.

tests/data/journals/FORMAT holds the segments of a run of two incarnations (tests/fakes/journal_world.py of that time,
killed after 70 facts and after 23), and in expected.json what that code itself recovered from them. Format 8 is of
10b51e5, format 9 of b210645, format 10 of 0494941, format 11 of 3d5b27b, format 12 of c09d8a9, format 13 of
c302f985.
"""

import json
import zlib
from pathlib import Path

import pytest

from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.journal import records
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import FileLogStore
from dora_jax.runtime.journal.recovery import recover, replay
from dora_jax.types import SampleId
from tests.fakes import journal_world
from tests.fakes.journal_world import History, learned
from tests.fakes.orchestrator_shape import Shape

DATA = Path(__file__).parent / "data/journals"
FORMATS = [int(folder.name) for folder in DATA.iterdir()]
CONFIG = OrchestratorConfig(
    groups_per_step=1, group_size=2, total_steps=6, max_versions=2, eval_every=2, eval_groups=1, eval_samples=1
)
SHAPE = Shape(instances=((3, 1.0, 1), (2, 0.5, 1)), deaths=0.3, filtered=0.2, failed=0.1, seed=3)


def test_a_journal_of_every_format_is_kept():
    assert sorted(FORMATS) == list(range(records.OLDEST, records.FORMAT))


@pytest.mark.parametrize("format", FORMATS)
def test_an_older_journal_gives_what_the_code_that_wrote_it_recovered(format):
    expected = json.loads((DATA / str(format) / "expected.json").read_text())
    journal = EventLog(FileLogStore(DATA / str(format), read_only=True))
    found = recover(journal, CONFIG, expected["checkpoints"], lambda version: True, pytest.fail)
    end = replay(journal, journal.segments()[-1:], pytest.fail)
    ledger, payloads = end.orchestrator.state.ledger, found.payloads
    assert (found.base, found.start, found.epoch) == (expected["base"], expected["start"], expected["epoch"])
    assert [
        [step.base, [group.group_id for group in step.groups], step.published.digest] for step in found.steps
    ] == expected["steps"]
    assert {"admitted": ledger.admitted, **ledger.counts} == expected["ledger"]
    assert sorted(ledger.live) == expected["live"] and end.facts == expected["facts"]
    samples = [sample for done in payloads.samples.values() for sample in done.values()]
    assert sorted([*sample.id, zlib.crc32(sample.out_ids.tobytes())] for sample in samples) == expected["samples"]
    assert sorted([id, len(group.samples)] for id, group in payloads.scored.items()) == expected["scored"]
    assert sorted(payloads.evaluated) == expected["evaluated"]
    partial = {id: payloads.tokens(id)[0] for id in payloads.partial}
    assert [[*id, len(out), zlib.crc32(out.tobytes())] for id, out in sorted(partial.items())] == expected["partial"]
    assert partial and sorted(map(list, found.outstanding.recorded)) == expected["recorded"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_goes_on_from_an_older_journal(format, monkeypatch):
    expected = json.loads((DATA / str(format) / "expected.json").read_text())
    history, brains = History(CONFIG, SHAPE, every=2, keep=9), []
    history.disk.content = {int(path.stem): path.read_bytes() for path in (DATA / str(format)).glob("*.log")}
    history.checkpoints = {int(version): weights for version, weights in expected["weights"].items()}
    history.batches = {int(base): tuple(groups) for base, groups in expected["batches"].items()}
    history.known = {SampleId(*id) for id in expected["known"]}
    history.ends = {int(group): end for group, end in expected["ends"].items()}
    published = {tuple(groups): digest for _, groups, digest in expected["steps"]}  # over records as they were then
    monkeypatch.setattr(
        journal_world,
        "learned",
        lambda weights, groups: published.get(tuple(g.group_id for g in groups)) or learned(weights, groups),
    )
    arm = history.arm
    history.arm = lambda body, *rest: (brains.append(body.brain), arm(body, *rest))
    assert history.live().ok and not history.notes and history.continued
    history.audit(brains[-1])
    written = EventLog(history.disk)
    heads = [records.CODEC.decode(written.read(number).records[0]) for number in written.segments()[-1:]]
    assert heads[0].format == records.FORMAT
