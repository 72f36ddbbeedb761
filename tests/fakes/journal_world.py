"""The orchestrator's virtual-time world, behind a journal, killed wherever a test wants and begun again.

An incarnation is one process: a body, a journal on a log that survives, checkpoints that survive. A sample's tokens are
a hash of (version, id, position), a version's weights a hash of its parent's and of the batch: so what a replay gives
can be compared with what was published.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import heapq
import os
import tempfile
import zlib
from pathlib import Path
from unittest import mock

import numpy as np

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator, each, run
from dora_jax.runtime.common.worker import Finished, StepDone
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journaled_world import JournaledWorld
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.records import CODEC, Partial, Saved
from dora_jax.runtime.journal.recovery import Recovered, recover
from dora_jax.types import Sample, SampleId, ScoredGroup, Span, issued_first_as
from tests.fakes.orchestrator_shape import Run, chance
from tests.fakes.orchestrator_world import World


class Killed(BaseException):
    """The process is gone."""


class Disk:
    """`Log` whose content outlives its writers; a write may be the last, and then leaves any part of its bytes."""

    lasting = True

    def __init__(self):
        self.content: dict[int, bytes] = {}
        self.writes = 0
        self.turned = 0  # segments whose head a child wrote
        self.kill_at: int | None = None
        self.kept = 1.0

    def segments(self):
        return sorted(self.content)

    def read(self, segment):
        return self.content[segment]

    def head(self, segment):
        return Path(tempfile.gettempdir()) / f"head-{os.getpid()}-{id(self)}"

    def stage(self, segment):
        self.staged = self.head(segment).read_bytes()
        self.head(segment).unlink()

    def begin(self, segment, data, staged=False):
        whole = self._tick()  # a segment is there whole or not at all
        if whole is None or whole >= 0.5:
            self.content[segment] = self.staged + data if staged else data
            self.turned += staged
        if whole is not None:
            raise Killed

    def sync(self):
        pass

    def append(self, data):
        part = self._tick()
        last = max(self.content)
        self.content[last] += data if part is None else data[: int(part * len(data))]
        if part is not None:
            raise Killed

    def drop(self, segment):
        del self.content[segment]

    def close(self):
        pass

    def _tick(self):
        self.writes += 1
        return self.kept if self.writes == self.kill_at else None


class SlowChild:
    """Stands for a forked child: its work is done of the state as it is at the fork, and is there some looks later."""

    def __init__(self, work, looks=5):
        work()
        self.looks = looks

    def ended(self):
        self.looks -= 1
        return None if self.looks > 0 else True

    def kill(self):
        self.looks = 0


class NoThreads:
    """Stands for an executor: nothing happens behind the caller."""

    def submit(self, call, *args):
        future = concurrent.futures.Future()
        future.set_result(call(*args))
        return future

    def shutdown(self):
        pass


def token(version, id, position):
    return zlib.crc32(repr((version, *id, position)).encode()) & 0x7FFFFFFF


def tokens(version, id, start, stop):
    return np.array([token(version, id, i) for i in range(start, stop)], np.int32)


def learned(weights: int, groups) -> int:
    """The next version's weights."""
    for group in groups:
        weights = zlib.crc32(CODEC.encode(group), weights)
    return weights


class Body(World):
    """The fake stages of one incarnation, behind the seam of `orchestrate.loop.World`."""

    def __init__(self, config, shape, orchestrator, weights, trained):
        super().__init__(config, shape, orchestrator)
        self.listeners = []
        self.payload: dict[int, ScoredGroup] = {}
        self.samples: dict[int, dict[int, Sample]] = {}
        self.weights = weights  # version -> hash
        self.batches = trained  # base -> groups, over all incarnations
        self.reported: dict[SampleId, int] = {}
        self.handed: list[tuple[SampleId, int]] = []  # what an engine of this incarnation was given, from which token

    def listen(self, listener):
        self.listeners.append(listener)

    def tell(self, item):
        for listener in self.listeners:
            listener(item)

    def events(self):
        """One moment of virtual time: this world does not bear commands that come late."""
        if not self.heap or self.sequence > 50_000:
            raise AssertionError(f"stalled at {self.now_s:.1f} s: {self.brain.summary()}")
        self.now_s, _, what = heapq.heappop(self.heap)
        for event in self.facts(what):
            self.payload_of(event)
            yield event

    def execute(self, command):
        getattr(self, "do_" + type(command).__name__.lower())(command)

    # ------------------------------------------------------------ payload

    def payload_of(self, event):
        match event:
            case ev.SampleDone(id=id, instance=instance, tokens=n):
                version = self.version_of(id)
                sample = Sample(
                    id=id,
                    prompt_ids=np.zeros(1, np.int32),
                    out_ids=tokens(version, id, 0, n),
                    logprobs=np.zeros(n, np.float32),
                    mask=np.ones(n, bool),
                    spans=(Span(version=version, start=0, stop=n),),
                    finish="stop",
                )
                self.samples.setdefault(id.group_id, {})[id.index] = sample
                self.tell(Finished(sample=sample, instance=instance))
            case ev.GroupScored(group_id=group_id, trainable=trainable):
                done = self.samples.pop(group_id)
                rewards = np.array([s.id.index % 2 for s in done.values()], np.float32)
                group = ScoredGroup(
                    group_id=group_id,
                    version=self.version_of(SampleId(group_id, 0)),
                    samples=tuple(done[i] for i in sorted(done)),
                    rewards=rewards,
                    parts={"r": rewards},
                )
                if trainable:
                    self.payload[group_id] = group
                self.tell(group)
            case ev.StepPublished(version=version):
                self.tell(
                    StepDone(
                        version=version,
                        groups=(),
                        metrics={},
                        wait_s=0.0,
                        step_s=0.0,
                        digest=self.weights[version],
                        copy=self.weights[version] ^ 1,
                    )
                )

    def version_of(self, id):
        return self.group_version[id.group_id]

    def on_progress(self, i, run, epoch):
        facts = super().on_progress(i, run, epoch)
        if facts and run.tokens < run.length:
            start = self.reported.get(run.id, 0)
            self.reported[run.id] = run.tokens
            self.tell(
                Partial(
                    id=run.id,
                    version=run.version,
                    start=start,
                    out_ids=tokens(run.version, run.id, start, run.tokens),
                    logprobs=np.zeros(run.tokens - start, np.float32),
                )
            )
        return facts

    def do_start(self, command):
        self.handed += [(id, 0) for id in command.ids]
        super().do_start(command)

    def do_resume(self, command):
        self.handed += [(id, self.recorded[id].tokens) for id in command.ids]
        super().do_resume(command)

    def do_train(self, command):
        known = self.batches.setdefault(command.base_version, command.group_ids)
        assert known == command.group_ids, f"step {command.base_version + 1} trains {command.group_ids}, not {known}"
        batch = [self.payload.pop(group_id) for group_id in command.group_ids]
        self.weights[command.base_version + 1] = learned(self.weights[command.base_version], batch)
        super().do_train(command)

    def do_retire(self, command):
        super().do_retire(command)
        del self.weights[command.version]

    # ------------------------------------------------------------ a new incarnation

    def adopt(self, recovered: Recovered) -> None:
        """What the last incarnation owed."""
        state, payloads, outstanding = recovered.orchestrator.state, recovered.payloads, recovered.outstanding
        self.first_version = self.published = recovered.base
        self.retired = set(range(min(outstanding.versions, default=recovered.base)))
        assert set(outstanding.versions) <= set(self.weights), "the weights of a live version are lost"
        for group in state.groups.values():
            self.group_version[group.id] = group.version
            done = payloads.samples.get(group.id, {})
            assert set(done) == {i for i, u in enumerate(group.units) if u is None} or group.abandoned
            self.samples[group.id] = dict(done)
            self.finished[group.id] = set(done)
            self.ended |= {SampleId(group.id, i): "done" for i in done}
        for id, version in outstanding.recorded.items():
            out, _, _ = payloads.tokens(id)
            np.testing.assert_array_equal(out, tokens(version, id, 0, len(out)))
            self.recorded[id] = Run(id, version, len(out), self.length(id), 0.0, 0)
            self.reported[id] = len(out)
            self.started[id] = 1
        self.payload = dict(payloads.scored)
        for group_id, group in payloads.scored.items():
            self.group_version[group_id] = group.version
        for group_id in outstanding.score:
            self.at(self.shape.score_s, ("score", group_id))
        if outstanding.cancel is not None:
            self.do_cancel(outstanding.cancel)
        if outstanding.train is not None:
            self.do_train(outstanding.train)


class History:
    """Everything that survives a kill, and what an outsider saw over all incarnations."""

    def __init__(self, config, shape, every=1, keep=2):
        self.config, self.shape = config, shape
        self.every, self.keep = every, keep
        self.disk = Disk()
        self.checkpoints: dict[int, int] = {0: 1}
        self.batches: dict[int, tuple[int, ...]] = {}
        self.known: set[SampleId] = set()  # finished, as far as the orchestrator knows
        self.ends: dict[int, str] = {}  # group -> how it ended untrained
        self.incarnations = 0
        self.replayed = 0
        self.notes: list[str] = []
        self.continued = 0  # samples that went on from recorded tokens

    def live(self, kill_write=None, kept=1.0, kill_fact=None, kill_command=None):
        """One process; returns Halt, or None where it was killed."""
        self.incarnations += 1
        self.disk.writes, self.disk.kill_at, self.disk.kept = 0, kill_write, kept
        try:
            return self._live(kill_fact, kill_command)
        except Killed:
            return None

    def _live(self, kill_fact, kill_command):
        with mock.patch("concurrent.futures.ThreadPoolExecutor", lambda *args: NoThreads()):
            journal = EventLog(self.disk)
        found = recover(journal, self.config, list(self.checkpoints), lambda v: True, self.notes.append)
        if found is None:
            body = Body(self.config, self.shape, Orchestrator(self.config), {0: 1}, self.batches)
            world = JournaledWorld(body, journal, body.brain, PayloadState())
        else:
            body = self._again(found)
            world = JournaledWorld(body, journal, body.brain, found.payloads, found.epoch, found.segments)
        self.arm(body, world, kill_fact, kill_command)
        halt = run(body.brain, world, [each(lambda event, commands: self._observe(body, world, journal, event))])
        journal.close()
        return halt

    def _again(self, found: Recovered) -> Body:
        weights = {found.start: self.checkpoints[found.start]}
        for step in found.steps:
            weights[step.base + 1] = learned(weights[step.base], step.groups)
            assert weights[step.base + 1] == step.published.digest, "the replay gives other weights"
            assert tuple(g.group_id for g in step.groups) == self.batches[step.base]
        self.replayed += len(found.steps)
        body = Body(
            self.config,
            dataclasses.replace(self.shape, seed=self.shape.seed),
            found.orchestrator,
            {v: w for v, w in weights.items() if v in found.outstanding.versions},
            self.batches,
        )
        body.now_s = found.orchestrator.state.now_s
        body.heap = [(body.now_s + t, n, what) for t, n, what in body.heap]
        body.adopt(found)
        return body

    def arm(self, body, world, kill_fact, kill_command):
        """Counts facts and commands of this incarnation; what an engine is given must never be finished."""
        body.commands = 0
        execute = body.execute

        def watched(command):
            body.commands += 1
            if body.commands == kill_command:
                raise Killed
            handed = len(body.handed)
            execute(command)
            for id, tokens_had in body.handed[handed:]:
                assert id not in self.known, f"{id} had finished and is generated again"
                self.continued += tokens_had > 0

        body.execute = watched
        body.facts_seen, body.kill_fact = 0, kill_fact

    def _observe(self, body, world, journal, event):
        match event:
            case ev.SampleDone(id=id):
                self.known.add(id)
            case ev.GroupFailed(group_id=group_id):
                self.ends[group_id] = "failed"
            case ev.GroupScored(group_id=group_id, trainable=False):
                self.ends[group_id] = "filtered"
            case ev.StepPublished(version=version):
                if version % self.every == 0:
                    self._save(body, world, journal, version)
        body.facts_seen += 1
        if body.facts_seen == body.kill_fact:
            raise Killed

    def _save(self, body, world, journal, version):
        world.rotate_due = True
        if chance(self.shape.seed, "save fails", version, self.incarnations) < 0.2:
            return  # the background save died
        self.checkpoints[version] = body.weights[version]
        world.record_saved(Saved(version=version, params=body.weights[version], opt_state=version, rl_state=1))
        floor = min(body.brain.state.alive)
        needed = max((v for v in self.checkpoints if v <= floor), default=0)
        newest = sorted(self.checkpoints)[-self.keep :]
        self.checkpoints = {v: w for v, w in self.checkpoints.items() if v in newest or v >= needed}
        oldest = min(self.checkpoints)
        world.forget_before(oldest)

    # ------------------------------------------------------------ audit

    def audit(self, brain: Orchestrator) -> None:
        ids = [g for groups in self.batches.values() for g in groups]
        assert len(ids) == len(set(ids)), "a group is trained twice"
        assert sorted(self.batches) == list(range(self.config.total_steps))
        state = brain.state
        issued = {g for g in range(max(state.cursors.values())) if g < state.cursors[self.config.task(g)]}
        lost = issued - {issued_first_as(g) for g in (*ids, *self.ends, *state.ledger.live, *state.redo)}
        assert not lost, f"groups {sorted(lost)} were issued and are nowhere"
        assert not set(ids) & set(self.ends)
        counts = state.ledger.counts
        assert counts["trained"] == len(ids), (counts, len(ids))
        assert counts["filtered"] + counts["failed"] == len([g for g in self.ends if g >= 0])
