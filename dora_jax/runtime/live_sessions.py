"""Sessions of users on the live fleet as episodes: `Environments` whose observations are what users say.

    open -> a free place; a session that begins takes the oldest one           Observed: its first messages
    turn -> the answer, for the client; then the session says something       Observed: that, and the score of the turn
    before
                                        or is silent, or ends                 EpisodeEnded, once every turn has its
                                        score

A group's G places are taken by G sessions, one after the other, all answered by the group's version: its baseline is
their mean reward. A turn is scored by task.rewards, which see what came next: `reward(prompt, response, answer)` with
the conversation as text, the turn, and {"messages": [...], "next": [...]}; "next" is empty where the session ended.

Laws: a place that no session takes holds no slot, and waits; a session is in one place at most; an error of a reward
fails the group. Places of a process before this one are lost: their samples begin again with other sessions.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dora_jax.models.tokenizer import Tokenizer
from dora_jax.runtime.common.seams import RunPlugin
from dora_jax.runtime.common.worker import Finished
from dora_jax.tasks.environment import Message
from dora_jax.tasks.environments import Answer
from dora_jax.tasks.environments.bridge import Bridge, shared_length
from dora_jax.tasks.pool import GroupFailure, ScorerPool
from dora_jax.types import (
    EpisodeEnded,
    EpisodeFailed,
    EpisodeLost,
    EpisodeSoFar,
    GroupId,
    Observed,
    Prompt,
    Sample,
    SampleId,
    ScoredGroup,
    Span,
    Version,
)

HELLO: tuple[list[Message], ...] = (
    [{"role": "user", "content": "a"}],
    [{"role": "user", "content": "b"}],
    [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
)
NO_IDS = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class SampledTurn:
    """A turn, for its client."""

    version: Version
    ids: np.ndarray  # i32[n]
    logprobs: np.ndarray  # f32[n]
    finish: str  # stop or length


Promise = concurrent.futures.Future[SampledTurn]


class SessionsOver(RuntimeError):
    """The turn will not be answered; a sentence."""


class SessionPrompts:
    """Every group has the same prompt: what the chat template puts in front of the first message, whatever its role.
    Where that is nothing: of the first message of a user, and sessions that begin with another one are not trained
    on."""

    n_heldout = 0

    def __init__(self, tokenizer: Tokenizer, max_new_tokens: int):
        """ValueError: there is no chat template, or it begins with the first message."""
        user, other, system = (np.array(tokenizer.encode(tokenizer.chat(messages)), np.int32) for messages in HELLO)
        shared = shared_length(user, other)
        self._ids = user[: min(shared, shared_length(user, system)) or shared]
        if not shared:
            raise ValueError("the chat template puts nothing in front of the first message, so no prompt is there")
        self._text, self._max_new_tokens = tokenizer.decode(self._ids, keep_special=True), max_new_tokens

    def prompt_at(self, group_id: GroupId, answer: Any = None) -> Prompt:
        return Prompt(
            group_id=group_id,
            task="sessions",
            uid="",
            text=self._text,
            token_ids=self._ids,
            answer=answer,
            max_new_tokens=self._max_new_tokens,
        )

    def survey(self) -> tuple[Prompt, list[str]]:
        """A prompt as rewards are tried on it."""
        return self.prompt_at(0, {"messages": HELLO[0], "next": HELLO[1]}), []

    def messages_at(self, group_id: GroupId) -> list[Message]:
        return []


@dataclasses.dataclass
class _Place:
    id: SampleId
    prompt: Prompt
    session: str = ""  # empty: it is free
    asked: list[Message] = dataclasses.field(default_factory=list)  # all that its client sent last
    answer: Message | None = None  # to that, once there is one
    sampled: SampledTurn | None = None
    promise: Promise | None = None
    tokens: np.ndarray = dataclasses.field(default_factory=lambda: NO_IDS)  # of the prompt and all that followed
    turns: int = 0
    room: int = 0  # tokens that may follow
    answered_s: float = 0.0
    terms: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unscored: int = 0
    leaving: bool = False  # its session has ended before its last answer was there
    over: str = ""  # how it finished, once it has


class LiveSessions(RunPlugin):
    """`take` and `end` are for the endpoint's threads, the rest is for the run's."""

    def __init__(
        self, tokenizer: Tokenizer, pool: ScorerPool, *, turn_tokens: int, max_turns: int, idle_s: float, context: int
    ):
        """context: tokens of prompt and response together."""
        self._tokenizer, self._pool, self._bridge = tokenizer, pool, Bridge(tokenizer, "")
        self._turn_tokens, self._max_turns, self._idle_s, self._context = turn_tokens, max_turns, idle_s, context
        self._lock = threading.Lock()
        self._places: dict[SampleId, _Place] = {}
        self._talks: dict[SampleId, Any] = {}  # of each place, as its bridge tells it
        self._free: dict[SampleId, None] = {}  # in the order in which they were opened
        self._in: dict[str, _Place] = {}  # by session
        self._results: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._scoring: dict[GroupId, _Place] = {}
        self._numbers = itertools.count()
        self._orphans: dict[SampleId, Promise] = {}  # of places that were just dropped
        self._counts: collections.Counter[str] = collections.Counter()

    # ------------------------------------------------------ on the endpoint's threads

    def take(self, session: str, messages: Sequence[Message], max_tokens: int) -> Promise | None:
        """The answer to these messages as a turn of an episode; None: they get one that is not trained, for no place is
        free, the episode is over, or a turn may be longer than they allow. They are what came next in any case."""
        asked = [_as_message(message) for message in messages]
        with self._lock:
            place = self._in.get(session)
            if place is not None:
                if asked == place.asked:  # a retry
                    return place.promise
                if (new := _news(place, asked)) is not None:
                    self._score(place, new)
                    more = place.turns < self._max_turns and max_tokens >= self._turn_tokens
                    if more and (promise := self._ask(place, place.session, asked, new)):
                        return promise
                    self._ends(place, "length")
                    return None
                self._leave(place)
            if (
                not self._free
                or max_tokens < self._turn_tokens
                or any(message["role"] == "assistant" for message in asked)
            ):
                return None
            place = self._places[next(iter(self._free))]
            return self._ask(place, session, asked, asked)

    def end(self, session: str) -> bool:
        """False: the session is in no place."""
        with self._lock:
            place = self._in.get(session)
            if place is not None:
                self._leave(place)
            return place is not None

    # ---------------------------------------------------------- on the run's thread

    def open(self, id: SampleId, prompt: Prompt) -> None:
        with self._lock:
            self._forget(id)
            self._places[id] = _Place(id, prompt, tokens=prompt.token_ids)
            self._talks[id] = self._bridge.begin(prompt)
            self._free[id] = None

    def turn(self, prompt: Prompt, sampled: EpisodeSoFar) -> None:
        with self._lock:
            place = self._places.get(sampled.id)
            if place is None or place.promise is None:
                self._results.put(EpisodeLost(id=sampled.id, reason="its session was with an earlier process"))
                return
            place.tokens, place.room, place.turns = sampled.tokens, sampled.room, place.turns + 1
            self._counts["turns"] += 1
            n = _turn_length(sampled.mask)
            ids = sampled.tokens[len(sampled.tokens) - n :]
            finish = "stop" if n and int(ids[-1]) in self._tokenizer.eos_ids else "length"
            place.sampled = SampledTurn(sampled.version, ids, sampled.logprobs[len(sampled.logprobs) - n :], finish)
            place.answer, place.answered_s = self._bridge.message(ids), time.monotonic()
            assert place.promise is not None
            place.promise.set_result(place.sampled)
            if place.leaving:
                self._leave(place)

    def record(self, record: object) -> None:
        """Listener of the world's payload records: a turn that ended at a limit of the engine is reported too."""
        if isinstance(record, Finished) and (promise := self._orphans.pop(record.sample.id, None)):
            sample = record.sample
            n = _turn_length(sample.mask)
            ids, logprobs = sample.out_ids[len(sample.out_ids) - n :], sample.logprobs[len(sample.logprobs) - n :]
            promise.set_result(SampledTurn(sample.version, ids, logprobs, "length"))

    def drop(self, id: SampleId) -> dict[str, float]:
        with self._lock:
            return self._forget(id)

    def poll(self) -> list[Answer]:
        for scored in self._pool.poll():
            with self._lock:
                self._scored(scored)
        with self._lock:
            orphans, self._orphans = self._orphans, {}
            late_s = time.monotonic() - self._idle_s
            for place in [s for s in self._in.values() if s.answer is not None and s.answered_s < late_s]:
                self._leave(place)
        for promise in orphans.values():
            promise.set_exception(SessionsOver("the session's group was given up"))
        found = []
        while not self._results.empty():
            found.append(self._results.get())
        return found

    def stats(self) -> Mapping[str, float]:
        ended = self._counts["ended"] + self._counts["failed"]
        return {
            "environment/turns": self._counts["turns"],
            "environment/turns_an_episode": self._counts["ended turns"] / max(1, self._counts["ended"]),
            "environment/failed_share": self._counts["failed"] / max(1, ended),
        }

    def over(self) -> None:
        """The run has ended: clients that wait get an error, and no place is free any more."""
        with self._lock:
            for id in list(self._places):
                self._forget(id)
            orphans, self._orphans = self._orphans, {}
        for promise in orphans.values():
            promise.set_exception(SessionsOver("the run has ended"))

    def close(self) -> None:
        self.over()
        self._pool.close()

    # ------------------------------------------------------------ private: the lock is held

    def _ask(self, place: _Place, session: str, asked: list[Message], new: list[Message]) -> Promise | None:
        """The policy's next turn, behind the new messages; None: there is no room for it."""
        talk = dataclasses.replace(self._talks[place.id], messages=list(self._talks[place.id].messages))
        turn = place.sampled.ids if place.sampled else NO_IDS
        ids, keep = self._bridge.observe(talk, place.tokens, turn, new)
        if keep is not None or len(place.tokens) + len(ids) + self._turn_tokens > self._context:
            return None  # the chat template would rewrite what the policy has seen, or there is no room
        self._talks[place.id] = talk
        self._free.pop(place.id, None)
        self._in[session] = place
        place.session, place.asked, place.answer, place.sampled = session, asked, None, None
        place.promise = Promise()
        place.promise.set_running_or_notify_cancel()  # a client that leaves does not take the turn back
        self._results.put(Observed(id=place.id, token_ids=ids))
        return place.promise

    def _score(self, place: _Place, new: Sequence[Message]) -> None:
        """The last turn, by what came next."""
        assert place.sampled is not None
        number, sampled = next(self._numbers), place.sampled
        before = self._tokenizer.decode(place.tokens[: len(place.tokens) - len(sampled.ids)])
        answer = {"messages": place.asked, "next": list(new)}
        prompt = dataclasses.replace(place.prompt, group_id=number, text=before, answer=answer)
        sample = Sample(
            id=SampleId(number, 0),
            prompt_ids=place.prompt.token_ids,
            out_ids=sampled.ids,
            logprobs=sampled.logprobs,
            mask=np.ones(len(sampled.ids), bool),
            spans=(Span(version=sampled.version, start=0, stop=len(sampled.ids)),),
            finish="stop",
        )
        place.unscored += 1
        self._scoring[number] = place
        self._pool.submit(prompt, (sample,))

    def _scored(self, scored: ScoredGroup | GroupFailure) -> None:
        place = self._scoring.pop(scored.group_id)
        if self._places.get(place.id) is not place:
            return  # it was given up
        if isinstance(scored, GroupFailure):
            self._counts["failed"] += 1
            self._results.put(EpisodeFailed(id=place.id, reason=scored.reason, kind="error"))
            return
        place.unscored -= 1
        place.terms.update({name: float(values[0]) for name, values in scored.parts.items()})
        self._finish(place)

    def _leave(self, place: _Place) -> None:
        """The session has ended, or goes on with something else. An answer that is still on its way is its last."""
        if place.sampled is not None:
            self._score(place, [])
            self._ends(place, "stop")
        else:
            place.leaving = True
            self._in.pop(place.session, None)

    def _ends(self, place: _Place, finish: str) -> None:
        self._in = {session: other for session, other in self._in.items() if other is not place}
        place.over = finish
        self._finish(place)

    def _finish(self, place: _Place) -> None:
        if place.over and not place.unscored:
            self._counts["ended"] += 1
            self._counts["ended turns"] += place.turns
            self._results.put(EpisodeEnded(id=place.id, terms=dict(place.terms), finish=place.over))

    def _forget(self, id: SampleId) -> dict[str, float]:
        place = self._places.pop(id, None)
        self._free.pop(id, None)
        self._talks.pop(id, None)
        if place is None:
            return {}
        self._in = {session: other for session, other in self._in.items() if other is not place}
        if place.promise is not None and place.sampled is None:
            self._orphans[id] = place.promise
        return dict(place.terms)


def _as_message(message: Message) -> Message:
    return {"role": message["role"], "content": message.get("content") or ""}


def _news(place: _Place, asked: list[Message]) -> list[Message] | None:
    """What the session says behind the last answer; None: it does not go on from there."""
    if place.answer is None:
        return None
    known = [*place.asked, _as_message(place.answer)]
    new = asked[len(known) :]
    goes_on = asked[: len(known)] == known and new and all(message["role"] != "assistant" for message in new)
    return new if goes_on else None


def _turn_length(mask: np.ndarray) -> int:
    """Tokens behind the last one that was observed."""
    observed = np.flatnonzero(~mask)
    return len(mask) - (int(observed[-1]) + 1 if len(observed) else 0)
