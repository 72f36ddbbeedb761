"""What instances receive of the siblings of their samples: tokens that have ended or are recorded, once, and none that
are wrong."""

import types

import numpy as np
import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.runtime import draft_sources
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.common.worker import Finished, TokensElsewhere
from dora_jax.runtime.draft_sources import DraftSources
from dora_jax.types import SampleId
from tests.fakes.coordinator_world import ORACLE, SlowEngine, make, play
from tests.fakes.remote_pair import A, new_pair


class Worker:
    def __init__(self, instance):
        self.incarnation, self.received = 1, []
        self.instance = instance

    def send(self, source):
        self.received.append((source.id.index, len(source.tokens)))


class Registry:
    """What the coordinator has of group 0: its samples that have ended, and what the journal has of the others."""

    def __init__(self):
        self.groups, self.tokens = {0: types.SimpleNamespace(done={})}, {}
        self.payloads = types.SimpleNamespace(tokens=self.recorded)

    def recorded(self, id):
        return np.zeros(self.tokens.get(id.index, 0), np.int32), None, ()

    def end(self, index, tokens):
        sample = types.SimpleNamespace(id=SampleId(0, index), out_ids=np.zeros(tokens, np.int32))
        self.groups[0].done[index] = sample
        return sample


@pytest.fixture
def fleet():
    workers, registry = [Worker(0), Worker(1)], Registry()
    return workers, registry, DraftSources(workers, registry)


def ids(*indices):
    return [SampleId(0, index) for index in indices]


def test_an_end_is_reported_where_siblings_run(fleet):
    workers, registry, subject = fleet
    subject.sent(ids(0, 1), 0)
    subject.sent(ids(2), 1)
    subject.record(Finished(sample=registry.end(0, 5), instance=None))
    assert (workers[0].received, workers[1].received) == ([], [(0, 5)])
    subject.record(Finished(sample=registry.end(2, 7), instance=None))
    assert (workers[0].received, workers[1].received) == ([(2, 7)], [(0, 5)])
    subject.record(Finished(sample=registry.end(1, 9), instance=None))  # nobody runs any more
    subject.sent(ids(3), 1)  # of a group that begins again there
    assert workers[1].received == [(0, 5), (0, 5), (2, 7), (1, 9)]


def test_where_a_sample_comes_first_what_is_known_of_its_group_is_reported(fleet):
    workers, registry, subject = fleet
    registry.tokens = {0: 4, 1: 6}
    subject.sent(ids(0, 1, 2), 0)
    subject.record(Finished(sample=registry.end(2, 8), instance=None))
    subject.sent(ids(0), 1)  # moves
    assert workers[1].received == [(2, 8), (1, 6)] and not workers[0].received
    subject.sent(ids(1), 1)
    assert len(workers[1].received) == 2  # it knows them


def test_a_later_incarnation_is_reported_again_and_one_that_is_over_is_not(fleet):
    workers, registry, subject = fleet
    subject.sent(ids(0), 0)
    subject.sent(ids(1, 2), 1)
    workers[1].incarnation = 2
    subject.record(Finished(sample=registry.end(0, 5), instance=None))
    assert not workers[1].received
    subject.sent(ids(1), 1)
    assert workers[1].received == [(0, 5)]
    subject.observe((), [ev.Discard(group_id=0, reason="")])
    subject.record(Finished(sample=registry.end(2, 5), instance=None))
    assert workers[1].received == [(0, 5)]


def test_what_is_reported_of_a_sample_is_bounded(fleet, monkeypatch):
    workers, registry, subject = fleet
    monkeypatch.setattr(draft_sources, "MOST_TOKENS", 3)
    subject.sent(ids(0), 0)
    subject.sent(ids(1), 1)
    subject.record(Finished(sample=registry.end(0, 5), instance=None))
    assert workers[1].received == [(0, 3)]


def test_a_run_tells_its_instances_what_siblings_elsewhere_sampled():
    engines = []

    class Engine(SlowEngine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.received = {}
            engines.append(self)

        def know(self, id, tokens):
            self.received.setdefault(id, tokens)  # again, where the instance ran none of the group in between

    orchestrator, world, ups, _ = make(engine=Engine, instances=3, drafts=True)
    halt, records = play(orchestrator, world, ups, [world.sources.observe])
    assert halt.ok and sum(len(engine.received) for engine in engines) > 0
    ended = {record.sample.id: record for record in records if isinstance(record, Finished)}
    for engine in engines:
        for id, tokens in engine.received.items():
            np.testing.assert_array_equal(tokens, ended[id].sample.out_ids)
            version = ended[id].sample.version
            np.testing.assert_array_equal(tokens[:1], ORACLE.expected(version, *id, 1))


def test_a_gang_is_reported_over_the_wire():
    remotes, gangs, _ = new_pair()
    tokens = np.arange(5, dtype=np.int32)
    remotes[1].send(TokensElsewhere(id=A, tokens=tokens))
    (post,) = gangs[1].posts
    batch = messages.CODEC.decode(messages.CODEC.encode(messages.TickCommands(posts=(post,))))
    assert batch.posts[0].what.id == A
    np.testing.assert_array_equal(batch.posts[0].what.tokens, tokens)
    remotes.tell(1, "down", gangs[1])
    remotes[1].send(TokensElsewhere(id=A, tokens=tokens))  # reaches nothing
    assert len(gangs[1].posts) == 1


def test_without_drafts_nothing_is_reported():
    class Engine(SlowEngine):
        def know(self, id, tokens):
            raise AssertionError(id)

    assert play(*make(engine=Engine, instances=2)[:3])[0] == ev.Halt(
        ok=True, reason="version 6 is published and every evaluation due is done"
    )
