"""A run that is killed at any write, fact or command, again and again: 0 lost, 0 trained twice, 0 generated again.

DORA_EXAMPLES sets the number of kill schedules (300 by default).
"""

import contextlib
import os
from unittest import mock

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dora_jax.config import UnknownFormat
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.journal import event_log as journals
from dora_jax.runtime.journal import journal_audit, journaled_world, records
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.records import CODEC
from dora_jax.runtime.journal.recovery import recover, replay
from dora_jax.types import Sample, SampleId
from tests.fakes.journal_world import History, SlowChild
from tests.fakes.orchestrator_shape import Shape
from tests.fakes.segments import unnumbered

EXAMPLES = int(os.environ.get("DORA_EXAMPLES", "300"))

configs = st.builds(
    OrchestratorConfig,
    mode=st.sampled_from(["dora", "dora", "sync", "one_step", "dora_paper"]),
    groups_per_step=st.integers(1, 3),
    group_size=st.sampled_from([1, 2, 4]),
    total_steps=st.integers(1, 5),
    max_versions=st.integers(1, 3),
    inflight=st.sampled_from([1.0, 1.25, 2.0]),
    eval_every=st.integers(0, 2),
    eval_groups=st.sampled_from([0, 3]),
    eval_samples=st.integers(1, 2),
    max_filtered_rounds=st.just(50),
)
instances = st.tuples(st.sampled_from([1, 2, 5]), st.sampled_from([0.5, 1.0]), st.sampled_from([1, 1, 2]))
shapes = st.builds(
    Shape,
    instances=st.lists(instances, min_size=1, max_size=3).map(tuple),
    train_s=st.sampled_from([0.1, 1.0]),
    load_s=st.sampled_from([0.05, 0.3]),
    move_s=st.sampled_from([0.02, 0.3]),
    filtered=st.sampled_from([0.0, 0.2]),
    failed=st.sampled_from([0.0, 0.1]),
    deaths=st.sampled_from([0.0, 0.3]),
    reports_pages=st.booleans(),
    seed=st.integers(0, 2**32),
)
kills = st.one_of(
    st.builds(dict, kill_write=st.integers(1, 60), kept=st.floats(0, 1)),
    st.builds(dict, kill_fact=st.integers(1, 300)),
    st.builds(dict, kill_command=st.integers(1, 80)),
)


@settings(
    max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(configs, shapes, st.lists(kills, min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_any_kills_lose_nothing_and_repeat_nothing(config, shape, schedule, every, keep, behind):
    with snapshots(behind):
        history = History(config, shape, every, keep)
        killed_again_and_again(history, schedule)


@contextlib.contextmanager
def snapshots(behind):
    """Made by a child, or at once."""
    with (
        mock.patch.object(journaled_world, "LARGE_SAMPLES", 0 if behind else 1 << 30),
        mock.patch.object(journals, "fork", SlowChild),
    ):
        yield


def killed_again_and_again(history, schedule):
    halt, brains = None, []
    original = history.arm
    history.arm = lambda body, *rest: (brains.append(body.brain), original(body, *rest))
    for kill in [*schedule, {}]:
        halt = history.live(**kill)
        if halt is not None:
            break
    assert halt is not None and halt.ok
    history.audit(brains[-1])
    whole_chain_agrees_with_its_last_segment(history)


def whole_chain_agrees_with_its_last_segment(history):
    """Snapshot + tail = full replay."""
    journal = EventLog(history.disk)
    last = replay(journal, journal.segments()[-1:], history.notes.append)
    whole = replay(journal, journal.segments(), history.notes.append)
    assert whole.orchestrator.snapshot() == last.orchestrator.snapshot()
    books = [[CODEC.encode(item) for item in each.payloads.records()] for each in (whole, last)]
    assert books[0] == books[1] and whole.payloads.digests == last.payloads.digests


@pytest.mark.parametrize("behind", [False, True])
def test_the_schedules_reach_what_they_are_for(behind):
    """Samples that go on from recorded tokens, steps made again, segments begun: or the test above proves nothing."""
    config = OrchestratorConfig(groups_per_step=2, group_size=4, total_steps=6, eval_groups=2)
    history = History(config, Shape(instances=((3, 1.0, 1), (2, 0.5, 1))), every=3, keep=1)
    with snapshots(behind):
        for fact in range(40, 2000, 40):
            if history.live(kill_fact=fact) is not None:
                break
    assert bool(history.disk.turned) == behind
    assert history.incarnations > 3 and history.continued and history.replayed and len(history.disk.content) > 1


IMPOSSIBLE = (
    ev.SampleCancelled(id=SampleId(0, 0), reason="nobody asked"),
    ev.StepPublished(version=9),
    ev.GroupScored(group_id=0, trainable=True),
)


@pytest.mark.parametrize("fact", IMPOSSIBLE, ids=lambda fact: type(fact).__name__)
def test_a_fact_that_cannot_be_ends_one_incarnation_and_not_the_run(fact):
    config = OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=3)
    history, brains = History(config, Shape()), []
    original = history.arm

    def says_it_once(body, world, *rest):
        brains.append(body.brain)
        if history.incarnations == 1:
            body.at(0.32, fact)  # the first samples have just begun
            body.payload_of = lambda event: event is not fact and type(body).payload_of(body, event)
        original(body, world, *rest)

    history.arm = says_it_once
    with pytest.raises(ev.ImpossibleFact):
        history.live()
    assert fact in [entry.event for entry in facts(history.disk)]
    assert history.live().ok
    assert any("cannot be followed" in sentence for sentence in history.notes)
    history.audit(brains[-1])
    whole_chain_agrees_with_its_last_segment(history)


def facts(disk):
    journal = EventLog(disk)
    for number in journal.segments():
        yield from journal_audit.facts(journal.read(number).records)


NAME_ATTEMPTS = {event.__name__ for event in records.NAME_ATTEMPTS}


def older(record, format):
    """The record as an older format wrote it. Format 13: no rungs in a table. Format 12: no
    temperatures there. Format 11: no attempt in a load of weights. Format 9: no settings of the run. Format 8: no digest of a checkpoint or a copy, no attempt in a fact of a sample. Format 7: no
    report of drafts. Format 5: no branches, terms and kinds, a configuration without task_lead, and two
    columns more in a table. Format 4: no report with what decoding took, and scores that were no group. Format
    3: every entry by itself, and decided on by itself, and no sample with a table."""
    match as_before(msgpack.unpackb(record), format):
        case ["Batch", [["Saved", *_]], False] if format <= 8:
            return []
        case ["Batch", entries, True] if format <= 3:
            return [msgpack.packb(entry) for entry in entries]
        case ["Head", _, epoch, config, *rest, saved, settings]:
            config = {name: value for name, value in config.items() if name != "task_lead" or format > 5}
            rest += [saved] * (format > 8) + [settings] * (format > 9)
            return [msgpack.packb(["Head", format, epoch, config, *rest])]
        case row:
            return [msgpack.packb(row)]


def as_before(row, format):
    match row:
        case ["TokenTable", routes, None, None] if format <= 13:
            return ["TokenTable", routes] + [None] * (format > 12)
        case ["WeightsLoaded", *fields, _] if format <= 11:
            return ["WeightsLoaded", *fields]
        case ["Published", epoch, digest, _] if format <= 8:
            return ["Published", epoch, digest]
        case [str(name), *fields, attempt] if name in NAME_ATTEMPTS and format <= 8:
            assert attempt is not None
            return [name, *fields]
        case dict(named):
            return {name: as_before(value, format) for name, value in named.items()}
        case ["InstanceReported", *fields, sampled, busy_s, row_s, None] if format <= 7:
            return ["InstanceReported", *fields] + [sampled, busy_s, row_s] * (format > 4)
        case ["Fact", event, ["ScoredGroup", _, version, [], rewards, parts]] if format <= 4:
            return ["Fact", event, ["Scores", version, rewards, parts]]
        case list(fields) if format > 5:
            return [as_before(field, format) for field in fields]
        case ["Sample", *fields, ["TokenTable", routes, None, None], [], None]:
            return ["Sample", *fields] + [["TokenTable", routes, None, None]] * (format > 3)
        case ["Partial", *fields, "sampled", 0, ["TokenTable", None, None, None]]:
            return ["Partial", *fields]
        case list(fields):
            return [as_before(field, format) for field in fields]
    return row


def rewritten(disk, format):
    for number in disk.segments():
        read = EventLog(disk).read(number).records
        disk.content[number] = unnumbered([each for record in read for each in older(record, format)])


def test_a_journal_of_an_older_format_goes_on(monkeypatch):
    config = OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=4)
    history, brains, waiting = History(config, Shape()), [], []
    original = history.arm

    def one_fact_a_batch(body, *rest):
        """Decide on each fact by itself, as the code that wrote format 3 did."""
        brains.append(body.brain)
        payload_of, moment = body.payload_of, body.events

        def events():
            body.payload_of = lambda event: None
            waiting.extend(() if waiting else moment())
            for event in waiting[:1]:
                payload_of(waiting.pop(0))
                yield event

        body.events = events
        original(body, *rest)

    history.arm = one_fact_a_batch
    assert history.live(kill_fact=60) is None
    waiting.clear()
    written = dict(history.disk.content)
    for format in (2, records.FORMAT + 1):
        history.disk.content, notes = dict(written), []
        rewritten(history.disk, format)
        with pytest.raises(UnknownFormat, match=f"of format {format}, and this version of dora_jax reads 3 to"):
            recover(EventLog(history.disk), config, [0], lambda v: True, notes.append)
        assert not notes
    history.disk.content = dict(written)
    before = recover(EventLog(history.disk), config, [0], lambda v: True, notes.append)
    for format in (8, 7, 5, 4, 3):
        history.disk.content = dict(written)
        rewritten(history.disk, format)
        assert (b"TokenTable" in b"".join(history.disk.content.values())) == (format > 3) and history.known
        after = recover(EventLog(history.disk), config, [0], lambda v: True, notes.append)
        assert list(map(CODEC.encode, after.payloads.records())) == list(map(CODEC.encode, before.payloads.records()))
        assert list(before.payloads.records()) and after.base == before.base
    history.arm = lambda body, *rest: (brains.append(body.brain), original(body, *rest))
    assert history.live().ok and history.incarnations == 2 and not history.notes
    history.audit(brains[-1])


def test_a_batch_that_is_too_large_for_one_record_is_decided_on_once(monkeypatch):
    monkeypatch.setattr(records, "TOKENS_A_RECORD", 1)
    entries = [records.Fact(event=ev.SampleDone(id=SampleId(0, i), instance=0, tokens=2, finish="stop"), payload=of_two(i))
               for i in range(3)]  # fmt: skip
    parts = list(records.batches(entries))
    assert [part.last for part in parts] == [False, False, True]
    assert [entry for part in parts for entry in part.entries] == entries
    config = OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=3)
    history, brains = History(config, Shape(reports_pages=True)), []
    original = history.arm
    history.arm = lambda body, *rest: (brains.append(body.brain), original(body, *rest))
    assert history.live(kill_fact=60) is None and history.live(kill_fact=30) is None
    assert history.live().ok and not history.notes
    history.audit(brains[-1])


def of_two(i):
    return Sample(id=SampleId(0, i), prompt_ids=np.zeros(1, np.int32), out_ids=np.zeros(2, np.int32),
                  logprobs=np.zeros(2, np.float32), mask=np.ones(2, bool), spans=(), finish="stop")  # fmt: skip
