"""The start of a run on what a killed one left: from which checkpoint, and which steps are made again."""

import json
import types
from pathlib import Path

import pytest

from dora_jax.config import ConfigError
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.journal import resume
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.records import Published
from dora_jax.runtime.journal.recovery import head_records, recover, steps_since
from dora_jax.trainer.checkpoint import Restored, UnusableCheckpoint
from tests.fakes import faults
from tests.fakes.journal_world import Disk, History
from tests.fakes.orchestrator_shape import Shape

CONFIG = OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=6)


class Trainer:
    """The weights of a version are its number."""

    def __init__(self):
        self.params = 0

    @property
    def state(self):
        return types.SimpleNamespace(step=self.params, params=self.params, opt_state=None)

    abstract_state = state.fget

    def load(self, params, opt_state, step):
        assert params == step
        self.params = step

    def step(self, base):
        assert base == self.params, "steps come in order"
        self.params += 1


class Store:
    """Checkpoints of these steps, of which some are unsealed and some `bad`: step -> why."""

    def __init__(self, sealed=(), unsealed=(), bad=()):
        self.sealed, self.loose, self.bad = list(sealed), list(unsealed), dict(bad)
        self.past, self.asked, self.undone = [], [], None

    def steps(self):
        return sorted(self.sealed)

    def unsealed(self):
        return sorted(self.loose)

    def aside(self):
        return self.past

    def restore(self, step, params, opt_state, digests=None):
        self.asked.append((step, digests))
        if step in self.bad:
            raise UnusableCheckpoint(self.bad[step])
        return Restored(step, None, {}, {})

    def adopt(self, step, params, opt_state, digests):
        self.restore(step, params, opt_state, digests)
        self.loose.remove(step)
        self.sealed.append(step)

    def set_aside(self, step, why):
        (self.sealed if step in self.sealed else self.loose).remove(step)
        self.past.append(f"{step}.{why}")

    def undo_after(self, version):
        self.undone = version


class Sink(dict):
    """Stands for the weight store and the console: keeps what it receives."""

    file = Path("w/metrics.jsonl")

    def put(self, version, weights, digest=0, copy=0):
        self[version] = weights
        return copy

    def note(self, text):
        self.setdefault("notes", []).append(text)

    def resume(self, step):
        self["resumed"] = step

    def phase(self, name, text):
        self["phase"] = text


@pytest.fixture
def killed():
    """(the journal of a run that was killed after several steps, what it recovers to)"""
    history = History(CONFIG, Shape(), every=10)
    assert history.live(kill_fact=118) is None
    found = recover(EventLog(history.disk), CONFIG, [0], lambda version: True, print)
    assert len(found.steps) > 1 and found.payloads.partial
    return history.disk, found


def begun(disk, digest, checkpoints=None, settings=None):
    rig = types.SimpleNamespace(
        trainer=Trainer(), weights=Sink(), checkpoints=checkpoints or Store(), writer=Sink(notes=[])
    )
    journal = disk and EventLog(disk)
    rig.begun = resume.begin(
        journal,
        rig.checkpoints,
        rig.trainer,
        rig.weights,
        lambda groups, base: base,
        digest,
        CONFIG,
        rig.writer,
        settings or {},
    )
    return rig


def test_the_steps_since_the_start_are_made_again_and_live_versions_are_in_the_store(killed):
    disk, found = killed
    digests, passes = {step.base + 1: step.published.digest for step in found.steps}, []
    with faults.wrap("resume.replaying", lambda: passes.append(0)):
        rig = begun(disk, lambda version: digests.get(version, 0))
    assert len(passes) == len(found.steps)
    assert rig.trainer.params == found.base == rig.writer["resumed"] and rig.begun.epoch == found.epoch
    assert rig.weights == {version: version for version in found.outstanding.versions}
    assert rig.begun.outstanding == found.outstanding and rig.begun.segments == found.segments
    assert "resuming at step" in rig.writer["notes"][-1]


def test_steps_since_a_version_read_no_segment_before_the_one_that_begins_there(monkeypatch):
    history = History(CONFIG, Shape(), every=10)
    for fact in (60, 40, 30):
        assert history.live(kill_fact=fact) is None
    journal, read = EventLog(history.disk), []
    found = recover(journal, CONFIG, [0], lambda version: True, print)
    monkeypatch.setattr(history.disk, "read", lambda n: read.append(n) or history.disk.content[n])
    assert len(found.segments) > 2 and len(set(found.segments.values())) > 2
    for version in sorted(set(found.segments.values())):
        read.clear()
        first = max(n for n, base in found.segments.items() if base <= version)
        made = [(step.base, step.published) for step in steps_since(journal, version)]
        assert made == [(step.base, step.published) for step in found.steps if step.base >= version]
        assert set(read) == {n for n in found.segments if n >= first}


def test_a_step_that_comes_out_with_other_weights_begins_an_epoch_and_running_samples_start_over(killed):
    disk, found = killed
    rig = begun(disk, lambda version: 7 if version else 0)
    assert rig.begun.epoch == found.epoch + 1 and not rig.begun.payloads.partial
    assert rig.checkpoints.undone == found.start
    assert "came out with other weights" in rig.writer["notes"][0]


@pytest.fixture
def saved():
    """(the journal of a run, what it recovers to from version 0, a version that was saved after another)"""
    history = History(CONFIG, Shape(), every=1, keep=9)
    history.checkpoints = dict.fromkeys(range(9), 1)  # whatever is saved: no segment is dropped
    assert history.live(kill_fact=118) is None
    found = recover(EventLog(history.disk), CONFIG, [0], lambda version: True, print)
    known = found.payloads.saved
    return history.disk, found, max(v for v in known if v - 1 in known and v <= min(found.outstanding.versions))


@pytest.fixture
def changed(saved, monkeypatch, tmp_path):
    """(the journal of a run with these settings, what it recovers to, the step of a checkpoint, changes.jsonl)"""
    disk, found, start = saved
    settings = {"rollout.slots": 64, "trainer.learning_rate": 0.1, "rollout.temperature": 1.0, "gone": 1}
    found.payloads.settings = settings
    found.payloads.digests[0] = Published(epoch=found.epoch, digest=0)
    journal = EventLog(disk)
    journal.rotate(head_records(found.orchestrator, found.payloads, found.epoch))
    journal.close()
    monkeypatch.setattr(Sink, "file", tmp_path / "metrics.jsonl")
    return disk, found, start, tmp_path / "changes.jsonl", settings


def test_a_change_that_teaches_nothing_is_reported_and_written_and_everything_goes_on(changed):
    disk, found, start, file, settings = changed
    for _ in range(2):  # the second start is of a run that was killed before its first facts
        rig = begun(disk, as_published(found), Store([start]), settings | {"rollout.slots": 32})
        assert rig.trainer.params == found.base and rig.begun.epoch == found.epoch
        assert rig.begun.outstanding.recorded == found.outstanding.recorded
        assert "changed since the last start: rollout.slots 64 -> 32" in rig.writer["notes"]
        assert rig.begun.payloads.settings["rollout.slots"] == 32, "what the next head of the journal holds"
    row = {"step": found.base, "changed": {"rollout.slots": [64, 32]}}
    assert list(map(json.loads, file.read_text().splitlines())) == [row]


def test_what_changes_the_learning_holds_for_the_steps_that_are_made_again_and_begins_an_epoch(changed):
    disk, found, start, file, settings = changed
    as_before = as_published(found)
    rig = begun(
        disk,
        lambda version: as_before(version) if version <= start else 7,
        Store([start]),
        settings | {"trainer.learning_rate": 0.05, "new": 2},
    )
    first, second, *_ = rig.writer["notes"]
    assert first == "changed since the last start: trainer.learning_rate 0.1 -> 0.05"
    assert f"version {start + 1} came out with other weights" in second and rig.begun.epoch == found.epoch + 1
    assert json.loads(file.read_text()) == {"step": start, "changed": {"trainer.learning_rate": [0.1, 0.05]}}


def test_what_leaves_no_use_for_samples_in_flight_takes_the_run_to_its_newest_checkpoint(changed):
    disk, found, start, file, settings = changed
    store = Store([start - 1, start])
    rig = begun(disk, as_published(found), store, settings | {"rollout.temperature": 0.7})
    assert rig.trainer.params == rig.writer["resumed"] == store.undone == start and rig.weights == {start: start}
    state, begun_ = rig.begun.orchestrator.state, rig.begun
    assert state.ledger.base == 0 and not state.groups, "rl_state of this store is empty: nothing is in flight"
    assert (
        begun_.outstanding is None
        and begun_.epoch == found.epoch + 1
        and begun_.segments == found.segments | {max(begun_.segments): found.base}
    )
    assert (
        not begun_.payloads.partial and not begun_.payloads.scored and set(begun_.payloads.saved) <= {*range(start + 1)}
    )
    assert rig.writer["notes"][0] == (
        f"changed since the last start: rollout.temperature 1.0 -> 0.7; of use is only checkpoint {start}: what came "
        "after it is made anew"
    )
    assert json.loads(file.read_text())["step"] == start


def test_the_run_begins_with_other_settings_where_it_has_no_checkpoint_yet(changed):
    disk, *_, settings = changed
    rig = begun(disk, lambda version: 0, None, settings | {"rollout.temperature": 0.7})
    assert rig.trainer.params == rig.writer["resumed"] == rig.checkpoints.undone == 0
    with pytest.raises(ConfigError, match="other weights than the run of this workdir began with"):
        begun(disk, lambda version: 7, None, settings | {"rollout.temperature": 0.7})


def as_published(found):
    digests = {step.base + 1: step.published.digest for step in found.steps}
    return lambda version: digests.get(version, 0)


def test_a_checkpoint_that_cannot_be_used_is_stepped_over_with_its_reason_and_set_aside(saved):
    disk, found, start = saved
    store = Store([start - 1, start, found.base + 1], bad={start: "rl_state came back with other values"})
    rig = begun(disk, as_published(found), store)
    assert rig.trainer.params == found.base and [step for step, _ in store.asked] == [start, start - 1]
    for step, digests in store.asked:
        assert digests == (found.payloads.saved[step].params, step, 1), "what the journal says was saved"
    (reported,) = [note for note in rig.writer["notes"] if "stepped over" in note]
    assert reported == f"checkpoint {start} cannot be trusted and is stepped over: rl_state came back with other values"
    assert store.past == [f"{start}.broken"]


def test_a_checkpoint_without_a_manifest_is_used_where_the_journal_says_what_was_saved(saved):
    disk, found, start = saved
    store = Store([start - 1], [start, 17])
    rig = begun(disk, as_published(found), store)
    assert store.sealed == [start - 1, start] and store.past == ["17.unproved"]
    assert any(f"checkpoint {start} had no manifest; it restores" in note for note in rig.writer["notes"])
    store = Store([start - 1], [start], bad={start: "params came back with other values"})
    rig = begun(disk, as_published(found), store)
    assert store.sealed == [start - 1] and store.past == [f"{start}.unproved"]
    assert rig.trainer.params == found.base


def test_without_a_journal_a_checkpoint_without_a_manifest_is_not_used():
    store = Store([1, 2], [3])
    rig = begun(None, lambda version: 0, store)
    assert rig.trainer.params == 2 and store.past == ["3.unproved"] and store.asked == [(2, None)]


@pytest.mark.parametrize("kept", ["damaged", "unsealed", "moved aside", "metrics", "journal"])
def test_a_run_with_a_past_and_nothing_to_go_on_from_is_refused_and_nothing_is_renamed(tmp_path, monkeypatch, kept):
    store, disk = Store(), None
    monkeypatch.setattr(Sink, "file", tmp_path / "metrics.jsonl")
    if kept == "damaged":
        store = Store([1, 2], bad={1: "it is bad", 2: "it is worse"})
    elif kept == "unsealed":
        store = Store([], [3])
    elif kept == "moved aside":
        store.past.append("3.broken")
    elif kept == "metrics":
        lines = [b"\xff", b"nonsense", b'{"step": "7"}', json.dumps({"step": 12}).encode(), b"7"]
        Sink.file.write_bytes(b"\n".join(lines))
    else:
        disk = Disk()
        disk.content = {1: b"nothing that can be read"}
    before = (*store.sealed, *store.loose, *store.past)
    with pytest.raises(ConfigError, match="nothing left to go on from .*--begin_anew=history.1") as refused:
        begun(disk, lambda version: 0, store)
    assert (*store.sealed, *store.loose, *store.past) == before
    reason = {"damaged": "checkpoint 2: it is worse; checkpoint 1: it is bad", "metrics": "reaches step 12"}
    assert reason.get(kept, "") in str(refused.value)


def test_a_new_run_is_new(tmp_path, monkeypatch):
    monkeypatch.setattr(Sink, "file", tmp_path / "metrics.jsonl")
    Sink.file.write_text('{"step": 0, "eval/prompts": 8}\n')
    rig = begun(Disk(), lambda version: 0)
    assert rig.trainer.params == 0 and rig.begun.outstanding is None and rig.writer["notes"] == []
