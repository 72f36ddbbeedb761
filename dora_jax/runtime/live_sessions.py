"""Sessions of users on the live fleet as episodes: `Environments` whose observations are what users say.

    open -> a free place; a session that begins takes the oldest one           Observed: its first messages
    turn -> the answer, for the client; then the session says something       Observed: that, and the score of the turn
    before
                                        or is silent, or ends                 EpisodeEnded, once every turn has its
                                        score

A group's G places are taken by G sessions that name the same task, one after the other, all answered by the group's
version: its baseline is their mean reward. A turn is scored by task.rewards, which see what came next:
`reward(prompt, response, answer)` with the conversation as text, the turn, and {"messages": [...], "next": [...]};
"next" is empty where the session ended. With `reward_s` clients post rewards too, of a session or of its turns.

Laws: a place that no session takes holds no slot, and waits; a session is in one place at most; a turn samples as the
run does, but for its temperature, and what its client sees of it is what the session must go on from; an error of a
reward, or a reward that does not come in time, fails the group and is no reward of 0; a reward that comes twice counts
once. Places of a process before this one are lost: their samples begin again with other sessions.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
    WHOLE,
    Columns,
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
POSTED = "posted"  # the term of a reward that is what clients post
REMEMBERED = 10_000  # sessions that are over, or were answered without training


@dataclasses.dataclass(frozen=True)
class SampledTurn:
    """A turn, for its client."""

    version: Version
    ids: np.ndarray  # i32[n]
    logprobs: np.ndarray  # f32[n]
    finish: str  # stop or length


Promise = concurrent.futures.Future[SampledTurn]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedTurn:
    """A chat completion that a turn may answer."""

    session: str
    task: str = ""  # and group of it: a group's places are taken by sessions of the same one
    messages: Sequence[Message]  # all of the conversation
    variables: Columns = dataclasses.field(default_factory=dict)  # of the chat template: tools and others
    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float | None = None  # that it is drawn and trained at; None: the run's
    differs: str = ""  # why no turn can be the answer: it is drawn otherwise than the run draws. Empty: it is not.
    # tokens of a turn and how it finished -> what its client sees; None: their text
    shown: Callable[[np.ndarray, str], Message] | None = None


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
    shown: Callable[[np.ndarray, str], Message] | None = None  # how its client sees the answer
    answer: Message | None = None  # to that, once there is one, as its client sees it
    limit: int = 0  # tokens of the turn
    sampled: SampledTurn | None = None
    promise: Promise | None = None
    tokens: np.ndarray = dataclasses.field(default_factory=lambda: NO_IDS)  # of the prompt and all that followed
    turns: int = 0
    drawn: int = 0  # tokens of them
    room: int = 0  # tokens that may follow
    answered_s: float = 0.0
    terms: dict[str, float] = dataclasses.field(default_factory=dict)
    unscored: int = 0
    leaving: bool = False  # its session has ended before its last answer was there
    over: str = ""  # how it finished, once it has
    over_s: float = 0.0  # when
    posted: dict[int, float] = dataclasses.field(default_factory=dict)  # rewards by turn, or of the whole
    reported: bool = False  # its end is


class LiveSessions(RunPlugin):
    """`take`, `end` and `reward` are for the endpoint's threads, the rest is for the run's."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        pool: ScorerPool | None,
        *,
        turn_tokens: int,
        max_turns: int,
        idle_s: float,
        context: int,
        reward_s: float = 0.0,
    ):
        """pool: of task.rewards; None: there are none. context: tokens of prompt and response together. reward_s: how
        long after a session's end its reward may be posted; 0: clients post none."""
        self._tokenizer, self._pool, self._bridge = tokenizer, pool, Bridge(tokenizer, "")
        self._turn_tokens, self._max_turns, self._idle_s, self._context = turn_tokens, max_turns, idle_s, context
        self._reward_s = reward_s
        self._lock = threading.Lock()
        self._places: dict[SampleId, _Place] = {}
        self._talks: dict[SampleId, Any] = {}  # of each place, as its bridge tells it
        self._free: dict[SampleId, None] = {}  # in the order in which they were opened
        self._in: dict[str, _Place] = {}  # by session
        self._tasks: dict[GroupId, str] = {}  # of whose sessions a group is, once one has begun
        self._ending: dict[str, _Place] = {}  # sessions that are over, and whose reward may come
        self._posted: dict[str, dict[int, float]] = {}  # the rewards of sessions that are over
        self._untrained: dict[str, str] = {}  # sessions that go on without training, and why
        self._results: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._scoring: dict[GroupId, _Place] = {}
        self._numbers = itertools.count()
        self._orphans: dict[SampleId, Promise] = {}  # of places that were just dropped
        self._counts: collections.Counter[str] = collections.Counter()

    # ------------------------------------------------------ on the endpoint's threads

    def take(self, asked: AskedTurn) -> Promise | str:
        """The answer as a turn of an episode; a text: it is not trained, for this reason. The messages are what came
        next in any case."""
        with self._lock:
            session, place = asked.session, self._in.get(asked.session)
            messages, reason = [*asked.messages], asked.differs
            if place is not None:
                if [*map(_seen, messages)] == [*map(_seen, place.asked)] and place.promise:  # a retry
                    return place.promise
                if (new := _news(place, messages)) is not None:
                    self._score(place, new)
                    if not reason and place.turns >= self._max_turns:
                        reason = f"the episode has had its {place.turns} turns (environment.max_turns)"
                    answer = reason or self._ask(place, asked, new)
                    if isinstance(answer, str):
                        self._ends(place, "length")
                        self._remember(self._untrained, session, answer)
                    return answer
                self._leave(place)
            goes_on = any(message["role"] == "assistant" for message in messages)
            if not reason and goes_on and session in self._untrained:
                reason = f"the session goes on without training: {self._untrained[session]}"
            if not reason:
                untouched = [id for id in self._free if id.group_id not in self._tasks]
                same = [id for id in self._free if self._tasks.get(id.group_id) == asked.task]
                if same or untouched:
                    place = self._places[(same or untouched)[0]]
                    answer = self._ask(place, asked, messages)
                    if not isinstance(answer, str):
                        self._tasks[place.id.group_id] = asked.task
                        self._untrained.pop(session, None)
                        return answer
                    reason = answer
                else:
                    reason = "no group has a free place for it"
            self._remember(self._untrained, session, reason)
            return reason

    def end(self, session: str) -> bool:
        """False: the session is in no place."""
        with self._lock:
            place = self._in.get(session)
            if place is not None:
                self._leave(place)
            return place is not None

    def reward(self, session: str, rewards: Mapping[int, float]) -> str:
        """Takes the rewards of turns, by their number, or of the WHOLE session, which then ends. Empty: they count,
        once however often they come; else the reason why they do not."""
        with self._lock:
            if not self._reward_s:
                return "this run takes no rewards of clients: serving.reward_s is 0"
            place = self._in.get(session) or self._ending.get(session)
            known = place.posted if place else self._posted.get(session)
            if known is None:
                return f"no session {session!r} is trained on"
            for turn, value in rewards.items():
                if turn in known and known[turn] != value:
                    return f"another reward, {known[turn]:g}, has been posted for it"
                if turn not in known and place is None:
                    return f"it comes later than {self._reward_s:g} s after the session's end (serving.reward_s)"
                if place and turn >= place.turns:
                    return f"the session has {place.turns} turns, counted from 0, and none of number {turn}"
            known.update(rewards)
            if place and not place.over and WHOLE in rewards:
                self._leave(place)
            elif place:
                self._finish(place)
            return ""

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
            place.drawn += n
            ids = sampled.tokens[len(sampled.tokens) - n :]
            finish = "stop" if n < place.limit or int(ids[-1]) in self._tokenizer.eos_ids else "length"
            place.sampled = SampledTurn(sampled.version, ids, sampled.logprobs[len(sampled.logprobs) - n :], finish)
            place.answer = place.shown(ids, finish) if place.shown else self._bridge.message(ids)
            place.answered_s = time.monotonic()
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
        for scored in self._pool.poll() if self._pool else ():
            with self._lock:
                self._scored(scored)
        with self._lock:
            orphans, self._orphans = self._orphans, {}
            late_s = time.monotonic() - self._idle_s
            for place in [s for s in self._in.values() if s.answer is not None and s.answered_s < late_s]:
                self._leave(place)
            for place in list(self._ending.values()):
                self._finish(place)
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
        if self._pool:
            self._pool.close()

    # ------------------------------------------------------------ private: the lock is held

    def _ask(self, place: _Place, asked: AskedTurn, new: Sequence[Message]) -> Promise | str:
        """The policy's next turn, behind the new messages; a text: there is none, for this reason."""
        before = self._talks[place.id]
        talk = dataclasses.replace(
            before, messages=list(before.messages), own=set(before.own), variables=asked.variables
        )
        turn = place.sampled.ids if place.sampled else NO_IDS
        ids, keep = self._bridge.observe(talk, place.tokens, turn, list(new))
        if keep == 0:
            return "its chat begins otherwise than those of other sessions, as the chat template writes it"
        stays, limit = len(place.tokens) if keep is None else keep, min(self._turn_tokens, asked.max_tokens)
        # an engine ends an episode that is full, with a last turn that nobody scores: one token stays free
        room = min(self._context - stays - len(ids), place.prompt.max_new_tokens - place.drawn) - 1
        if room < limit - 1:
            return f"the episode has no room for a turn of {limit} tokens"
        limit = min(limit, room)
        self._talks[place.id] = talk
        self._free.pop(place.id, None)
        self._in[asked.session] = place
        place.session, place.asked, place.shown, place.limit = asked.session, [*asked.messages], asked.shown, limit
        place.answer = place.sampled = None
        place.promise = Promise()
        place.promise.set_running_or_notify_cancel()  # a client that leaves does not take the turn back
        self._results.put(
            Observed(
                id=place.id, token_ids=ids, keep=keep, turn_tokens=limit, stop=asked.stop, temperature=asked.temperature
            )
        )
        return place.promise

    def _score(self, place: _Place, new: Sequence[Message]) -> None:
        """The last turn, by what came next."""
        assert place.sampled is not None
        if self._pool is None:
            return
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
        for name, values in scored.parts.items():
            place.terms[name] = place.terms.get(name, 0.0) + float(values[0])
        self._finish(place)

    def _leave(self, place: _Place) -> None:
        """The session has ended, or goes on with something else. An answer that is still on its way is its last."""
        if place.sampled is not None:
            self._score(place, [])
            self._ends(place, "stop")
        else:
            place.leaving = True
            self._in.pop(place.session, None)
            if self._reward_s:
                self._ending[place.session] = place

    def _ends(self, place: _Place, finish: str) -> None:
        self._in = {session: other for session, other in self._in.items() if other is not place}
        place.over, place.over_s = finish, time.monotonic()
        if self._reward_s:
            self._ending[place.session] = place
            self._remember(self._posted, place.session, place.posted)
        self._finish(place)

    def _finish(self, place: _Place) -> None:
        """Reports its end, once every turn has its score and its reward has come, or may come no more."""
        if not place.over or place.unscored or place.reported:
            return
        if self._reward_s:
            whole = WHOLE in place.posted or len(place.posted) == place.turns
            if not whole and time.monotonic() - place.over_s < self._reward_s:
                return
            if self._ending.get(place.session) is place:
                del self._ending[place.session]
            place.reported = True
            if not place.posted:
                self._counts["failed"] += 1
                reason = f"no reward was posted within {self._reward_s:g} s of the session's end (serving.reward_s)"
                self._results.put(EpisodeFailed(id=place.id, reason=reason, kind="deadline"))
                return
            place.terms[POSTED] = sum(place.posted.values())
        place.reported = True
        self._counts["ended"] += 1
        self._counts["ended turns"] += place.turns
        self._results.put(EpisodeEnded(id=place.id, terms=dict(place.terms), finish=place.over))

    def _remember(self, where: dict[str, Any], session: str, value: Any) -> None:
        where.pop(session, None)
        where[session] = value
        if len(where) > REMEMBERED:
            del where[next(iter(where))]

    def _forget(self, id: SampleId) -> dict[str, float]:
        place = self._places.pop(id, None)
        self._free.pop(id, None)
        self._talks.pop(id, None)
        if place is None:
            return {}
        for sessions in (self._in, self._ending):
            for session in [session for session, other in sessions.items() if other is place]:
                del sessions[session]
        if not any(other.group_id == id.group_id for other in self._places):
            self._tasks.pop(id.group_id, None)
        if not place.reported:
            self._posted.pop(place.session, None)
        if place.promise is not None and place.sampled is None:
            self._orphans[id] = place.promise
        return dict(place.terms)


def _seen(message: Message) -> tuple[Any, ...]:
    """What tells two messages apart, however their client spells them: role, text, calls."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments") or {}
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append((call["function"]["name"], json.dumps(arguments, sort_keys=True)))
    return message["role"], (message.get("content") or "").strip(), calls


def _news(place: _Place, asked: list[Message]) -> list[Message] | None:
    """What the session says behind the last answer; None: it does not go on from there."""
    if place.answer is None:
        return None
    known = [*place.asked, place.answer]
    new = asked[len(known) :]
    agrees = [*map(_seen, asked[: len(known)])] == [*map(_seen, known)]
    return new if agrees and new and all(message["role"] != "assistant" for message in new) else None


def _turn_length(mask: np.ndarray) -> int:
    """Tokens behind the last one that was observed."""
    observed = np.flatnonzero(~mask)
    return len(mask) - (int(observed[-1]) + 1 if len(observed) else 0)
