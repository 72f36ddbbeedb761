"""One remote instance between the orchestrator and its gang: what it owes when a gang comes, goes, and comes again."""

import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.cluster import messages
from tests.fakes.remote_pair import MOVE, REQUEST, A, Posted, drained, moving, new_pair, rise


@pytest.fixture
def pair():
    return new_pair()


def test_commands_reach_a_gang_only_after_its_coming_was_received(pair):
    remotes, gangs, outbox = pair
    remotes.tell(0, "down", gangs[0])
    again = Posted(2)
    remotes.tell(0, "up", again)
    remotes[0].send(ev.Cancel(ids=(A,), instance=0, reason="meant for the lost one"))
    down, risen = drained(outbox)
    assert isinstance(down, ev.InstanceDown)
    risen.admit()
    remotes[0].send(ev.Cancel(ids=(A,), instance=0, reason="meant for this one"))
    assert [post.what.reason for post in again.posts] == ["meant for this one"] and not gangs[0].posts


def test_a_move_out_of_a_lost_gang_fails_right_behind_its_loss(pair):
    remotes, gangs, outbox = pair
    remotes[0].send(MOVE, dst=remotes[1])
    remotes.tell(0, "down", gangs[0])
    down, failed = drained(outbox)
    assert isinstance(down, ev.InstanceDown) and (failed.id, failed.src, failed.dst) == (A, 0, 1)
    remotes[0].send(MOVE, dst=remotes[1])  # asked for before the orchestrator knows
    assert isinstance(drained(outbox)[0], ev.MoveFailed)


def test_a_sample_on_its_way_to_a_lost_gang_counts_as_moved(pair):
    remotes, gangs, outbox = pair
    remotes[0].send(MOVE, dst=remotes[1])
    remotes.tell(0, "on_message", moving())
    assert gangs[1].posts[-1] == messages.Command(what=MOVE, payload=REQUEST)
    remotes.tell(1, "down", gangs[1])
    down, moved = drained(outbox)
    assert isinstance(down, ev.InstanceDown) and (moved.id, moved.dst) == (A, 1)


def test_a_sample_is_not_handed_to_a_later_epoch_of_its_destination(pair):
    remotes, gangs, outbox = pair
    remotes[0].send(MOVE, dst=remotes[1])
    remotes.tell(1, "down", gangs[1])
    drained(outbox)
    later = rise(remotes, 1, outbox, 2)
    remotes.tell(0, "on_message", moving())
    assert not later.posts and isinstance(drained(outbox)[0], ev.SampleMoved)


def test_a_move_that_arrives_is_owed_no_more(pair):
    remotes, gangs, outbox = pair
    remotes[0].send(MOVE, dst=remotes[1])
    remotes.tell(0, "on_message", moving())
    remotes.tell(1, "on_message", ev.SampleMoved(id=A, src=0, dst=1, attempt=1))
    for i in (0, 1):
        remotes.tell(i, "down", gangs[i])
    assert [type(item) for item in drained(outbox)] == [ev.SampleMoved, ev.InstanceDown, ev.InstanceDown]
