"""What all processes of a gang do next: the first one decides, the others do the same.

Consumes what the controller sends to the first process; produces the same turns in every process. Laws: what one of
them does, all do, for the way between them outlives the controller; in a rollout gang every process makes one tick
after each turn if its engine is busy; the engines are equal, so all of them do or none.
"""

from __future__ import annotations

import queue

from dora_jax.runtime.cluster.connection import Link
from dora_jax.runtime.cluster.messages import Begin, Post, Turn
from dora_jax.runtime.listener import dial


class Leader:
    def __init__(self, followers: list[Link]):
        self._followers = followers

    def next(self, posts: queue.SimpleQueue, wait: bool) -> tuple[Post, ...]:
        """What came in since the last tick; waits for it where there is nothing to tick for."""
        turn = [posts.get()] if wait else []
        while not posts.empty():
            turn.append(posts.get())
        for follower in self._followers:
            follower.send(Turn(posts=tuple(turn)))
        return tuple(turn)


class Follower:
    def __init__(self, turns: queue.SimpleQueue):
        self._turns = turns

    def next(self, posts: queue.SimpleQueue, wait: bool) -> tuple[Post, ...]:
        return self._turns.get().posts


def turns(begin: Begin, token: bytes, arrivals: queue.SimpleQueue) -> Leader | Follower:
    """`arrivals`: connections that the others have opened. A lost one needs no answer: the controller ends the gang."""
    turns: queue.SimpleQueue = queue.SimpleQueue()
    ends = [arrivals.get() for _ in range(begin.hosts - 1)] if begin.rank == 0 else [dial(begin.leader, token)]
    links = [Link(end, lambda _, item: turns.put(item), lambda _, reason: None) for end in ends]
    for link in links:
        link.start()
    return Leader(links) if begin.rank == 0 else Follower(turns)
