"""The answers that run: what engines sample becomes pieces of text that any number of readers follow.

Consumes `GenerateRequest`s and what the fleet reports of its samples; produces `Answer`s. All on the thread of the
asyncio loop.
Laws: an answer is sampled once, however often it is asked for (a retry joins it); every token of it is of one version;
a sample without a reader leaves its engine at once: for host memory, where its client may come back, else for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dora_jax.serving.chat import CONTEXT, Detokenizer, StopText
from dora_jax.serving.parser import AnswerSyntax, Thought, ToolCall
from dora_jax.serving.request import MAX_SAMPLES, GenerateRequest, Refused
from dora_jax.serving.versions import Versions
from dora_jax.types import MAX_TOP_LOGPROBS, SERVED, GroupId, InstanceId, Prompt, Sample, SampleId, Sampling, Version

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from dora_jax.rollout.migrate import InFlightSample

LINGER_S = 120.0  # an answer whose client is gone waits so long for the retry: clients back off for seconds
PARKED_BYTES = 1 << 30  # of KV in host memory; beyond it the oldest answer without a client is forgotten
SEEDED = 1 << 29  # groups of requests with a seed begin here; the others lie below


def requested(group_id: GroupId, prompt_ids: Sequence[int], wanted: GenerateRequest) -> Prompt:
    """The prompt of a request: tokens that belong to no task. One whose own tokens are scored is its first token, and
    the others are given in the place of drawn ones."""
    sampling, max_tokens = wanted.sampling, wanted.max_tokens
    if wanted.scores_prompt:
        sampling = dataclasses.replace(sampling or Sampling(), given=tuple(prompt_ids[1:]))
        prompt_ids, max_tokens = prompt_ids[:1], max_tokens + len(prompt_ids) - 1
    return Prompt(
        group_id=group_id,
        task="",
        uid="",
        text="",
        token_ids=np.array(prompt_ids, np.int32),
        answer=None,
        max_new_tokens=max(1, max_tokens),
        sampling=sampling,
    )


class ServingFleet:
    """The engines. Every call returns at once; what comes of it goes to `answers`, on the loop of the endpoint."""

    answers: Answers  # set before it is served

    def __init__(self, versions: Versions):
        self.versions = versions
        self.free_pages: dict[InstanceId, int] = {}  # KV pages that no sample holds; empty: nobody counts them
        self.attached = threading.Event()  # what is posted before is lost
        self._loop: asyncio.AbstractEventLoop | None = None  # while it is served

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self.attached.set()
        try:
            yield
        finally:
            self._loop = None

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Calls it on the loop, from any thread, while it is served."""
        if loop := self._loop:
            with contextlib.suppress(RuntimeError):  # it ends at this moment
                loop.call_soon_threadsafe(call, *args)

    def start(self, id: SampleId, prompt: Prompt, version: Version, session: str | None) -> None:
        """Samples it at this version."""

    def cancel(self, id: SampleId) -> None:
        """Ends the sample, wherever it is."""

    def park(self, id: SampleId) -> None:
        """Takes the sample out of its engine, with its KV."""

    def resume(self, in_flight: InFlightSample) -> None:
        """Goes on with a sample that was parked."""


Top = tuple[tuple[int, float], ...]  # the most likely tokens at one token, each with its log-prob


@dataclass(frozen=True)
class Piece:
    """What one tick added to one choice."""

    index: int
    text: str
    calls: tuple[ToolCall, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str | None = None  # stop, length or tool_calls: nothing follows
    tops: tuple[Top, ...] = ()  # of each token, where they are asked for
    stopped_by: str | None = None  # the stop string that ended it
    thought: str = ""  # before the text


class Identity(NamedTuple):
    """What makes two equal requests one: the client's retry key ("key"), its session, or the seed."""

    kind: str
    value: str


class TextCodec(NamedTuple):
    """Reads the tokens of answers."""

    decode: Callable[..., str]  # (ids, keep_special=...)
    syntax: AnswerSyntax  # of chats


class _Choice:
    """One sample of an answer."""

    def __init__(self, answer: Answer, index: int, id: SampleId, prompt: tuple[int, ...], codec: TextCodec):
        wanted, decode, syntax = answer.wanted, codec.decode, codec.syntax
        self.answer, self.index, self.id, self.prompt = answer, index, id, prompt
        self.n = 0  # tokens taken
        self.n_scored = len(prompt) - 1 if wanted.scores_prompt else 0  # of them: the prompt's
        self.scored: list[float] = []  # log-probs of the prompt's tokens behind its first
        self.top_rows = np.zeros((0, 2 * MAX_TOP_LOGPROBS), np.int32)  # as TopTokens has them
        self.finish: str | None = None
        self.in_flight: InFlightSample | None = None  # it is out of its engine
        special = wanted.keep_special or (wanted.chat and syntax.special is not None)
        self._text = Detokenizer(functools.partial(decode, keep_special=special), prompt)
        self._stop = StopText(wanted.stop, include=wanted.include_stop)
        self._parser = None
        if wanted.chat:
            before = decode(prompt[-CONTEXT:], keep_special=True)
            self._parser = syntax.begin(
                before, tools=wanted.tools, texts=wanted.texts, keep_special=wanted.keep_special
            )

    def take(self, ids: Sequence[int], logprobs: Sequence[float], finish: str | None) -> Piece | None:
        """finish: as the engine says, where these are its last tokens. None: nothing new."""
        text, count = "", 0
        scored = min(len(ids), max(0, self.n_scored - self.n))
        self.scored += logprobs[:scored]
        self.n += scored
        room = self.n_scored + self.answer.wanted.max_tokens - self.n
        ids, logprobs = ids[scored:][:room], logprobs[scored:][:room]
        for token in ids:
            count += 1
            new, stopped = self._stop.feed(self._text.add(token))
            text += new
            if stopped or token in self.answer.wanted.stop_ids:
                self.finish = "stop"
                break
        if finish and not self.finish:
            new, stopped = self._stop.feed(self._text.rest())
            self.finish = "stop" if stopped else finish
            text += new + ("" if stopped else self._stop.rest())
        self.n += count
        if not (count or self.finish):
            return None
        calls: tuple[ToolCall, ...] = ()
        thought = ""
        if self._parser is not None:
            outputs = list(self._parser.feed(text, final=bool(self.finish)))
            calls = tuple(each for each in outputs if isinstance(each, ToolCall))
            if calls and self.answer.wanted.one_call:  # what follows the first is dropped
                outputs, calls, self.finish = outputs[: outputs.index(calls[0])], calls[:1], "stop"
            text = "".join(each for each in outputs if isinstance(each, str))
            thought = "".join(each.text for each in outputs if isinstance(each, Thought))
        finish = "tool_calls" if self.finish == "stop" and self._parser and self._parser.n_calls else self.finish
        tops = self.tops(self.n - count, self.n)
        by = self._stop.complete or None
        return Piece(self.index, text, calls, tuple(ids[:count]), tuple(logprobs[:count]), finish, tops, by, thought)

    def tops(self, start: int, stop: int) -> tuple[Top, ...]:
        """The most likely tokens at tokens [start, stop), as many as the request wants."""
        own = self.answer.wanted.sampling
        if own is None or not own.top_logprobs:
            return ()
        rows = self.top_rows[start:stop]
        rows = np.pad(rows, ((0, stop - start - len(rows)), (0, 0)), constant_values=-1)  # an engine was lost with them
        ids, bits = np.split(np.ascontiguousarray(rows), 2, axis=1)
        logprobs = np.ascontiguousarray(bits).view(np.float32)
        pairs = (zip(*row, strict=True) for row in zip(ids.tolist(), logprobs.tolist(), strict=True))
        return tuple(tuple(pair for pair in row if pair[0] >= 0)[: own.top_logprobs] for row in pairs)


@dataclass(eq=False)
class Answer:
    """All choices of one request; `follow` tells it from the beginning, to as many readers as there are."""

    wanted: GenerateRequest
    version: Version
    untrained: str | None = None  # of a run that trains on sessions: why not on this answer; empty: it is trained
    kept: bool = False  # a retry may come even when a client has read all of it
    id: str = field(default_factory=functools.partial(secrets.token_hex, 12))
    created_s: float = field(default_factory=time.time)
    choices: list[_Choice] = field(default_factory=list)
    error: Refused | None = None  # the engine failed: there is no answer
    readers: set[Reader] = field(default_factory=set)
    log: list[Piece] = field(default_factory=list)
    forgetting: asyncio.TimerHandle | None = None  # nobody reads it

    @property
    def done(self) -> bool:
        return self.error is not None or all(choice.finish for choice in self.choices)

    def tell(self, piece: Piece | None) -> None:
        if piece is not None:
            self.log.append(piece)
        for reader in self.readers:
            reader.news.set()


@dataclass(eq=False)
class Reader:
    """One client of an answer."""

    answer: Answer
    news: asyncio.Event = field(default_factory=asyncio.Event)
    read: int = 0

    async def follow(self, pulse_s: float) -> AsyncIterator[Piece | None]:
        """Every piece; None whenever nothing came for pulse_s. Refused (500): the engine failed."""
        while True:
            self.news.clear()
            while self.read < len(self.answer.log):
                self.read += 1
                yield self.answer.log[self.read - 1]
            if self.answer.error:
                raise self.answer.error
            if self.answer.done:
                return
            try:
                await asyncio.wait_for(self.news.wait(), pulse_s)
            except TimeoutError:
                yield None


class Answers:
    """The desk: finds or begins an answer for a request, and hears what the engines say."""

    def __init__(
        self,
        fleet: ServingFleet,
        decode: Callable[..., str],
        *,
        linger_s: float = LINGER_S,
        parked_bytes: int = PARKED_BYTES,
        first_group: int | None = None,
        syntax: AnswerSyntax | None = None,
    ):
        """decode(ids, keep_special=...). first_group: of the samples' identities, and so of their noise. syntax: of
        chats."""
        self.versions = fleet.versions
        self.joined = self.cancelled_samples = self.tokens = 0  # since the start
        self._fleet, self._linger_s, self._parked_bytes = fleet, linger_s, parked_bytes
        self._codec = TextCodec(decode, syntax or AnswerSyntax())
        self._group = secrets.randbelow(SEEDED) if first_group is None else first_group
        self._choices: dict[SampleId, _Choice] = {}  # in an engine, or parked
        self._leaving: set[SampleId] = set()  # cancelled, and the engine may still speak of it
        self._known: dict[object, Answer] = {}  # by identity
        self._keys: dict[Answer, object] = {}
        self._change = asyncio.Event()
        self._failed: Refused | None = None

    @property
    def running(self) -> int:
        """Samples."""
        return len(self._choices)

    def changed(self) -> None:
        """A version has been loaded, or a sample has ended: whatever waits for it looks again."""
        self._change.set()
        self._change = asyncio.Event()

    async def begin(
        self, wanted: GenerateRequest, *, session: str | None, asked: Version | None, identity: Identity | None = None
    ) -> Reader:
        """A reader of the answer. identity: the same in a retry; None: what looks like a retry is another request."""
        if identity is None and wanted.seed is not None:
            identity = Identity("seed", "")  # the same tokens, whatever the session
        key = None if identity is None else (identity, session, wanted, asked)
        while True:
            if self._failed:
                raise self._failed
            if key in self._known and key is not None:
                self.joined += 1
                return self._read(self._known[key])
            version = self.versions.choose(session, asked, time.monotonic())
            ids = None if version is None else self._free_ids(wanted)
            if ids is None or version is None:
                await self._change.wait()
                continue
            if len(self._choices) + wanted.choices > MAX_SAMPLES:
                raise Refused(429, f"{len(self._choices)} samples run or wait: come again later", code="overloaded")
            kept = identity is not None and identity.kind == "key"
            answer = Answer(wanted, version, kept=kept)
            if key is not None:
                self._known[key], self._keys[answer] = answer, key
            for index, id in enumerate(ids):
                prompt = wanted.prompts[index // wanted.n]
                choice = _Choice(answer, index, id, prompt, self._codec)
                answer.choices.append(choice)
                self._choices[id] = choice
                self.versions.begin(version)
                self._fleet.start(id, requested(id.group_id, prompt, wanted), version, session)
            return self._read(answer)

    def message(self, wanted: GenerateRequest, ids: Sequence[int], finish: str) -> dict[str, Any]:
        """What a client sees of an answer, as it sends it back."""
        answer = Answer(wanted, 0)
        choice = _Choice(answer, 0, SampleId(0, 0), wanted.prompts[0], self._codec)
        piece = choice.take(ids, [0.0] * len(ids), finish)
        text, calls = (piece.text, piece.calls) if piece else ("", ())
        functions = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls]
        return {"role": "assistant", "content": text, "tool_calls": functions}

    def whole(
        self, wanted: GenerateRequest, version: Version, ids: Sequence[int], logprobs: Sequence[float], finish: str
    ) -> Reader:
        """A reader of a trained answer, which is there as a whole."""
        answer = Answer(wanted, version, untrained="")
        answer.choices.append(choice := _Choice(answer, 0, SampleId(0, 0), wanted.prompts[0], self._codec))
        answer.tell(choice.take(ids, logprobs, finish))
        self.tokens += len(ids)
        return self._read(answer)

    def fail(self, reason: str, status: int = 500) -> None:
        """No answer that runs will end, and none begins."""
        self._failed = Refused(status, reason)
        for answer in {choice.answer for choice in self._choices.values()}:
            answer.error = self._failed
            answer.tell(None)
        self.changed()

    def leave(self, reader: Reader) -> None:
        """The client has all of it, or is gone."""
        answer = reader.answer
        answer.readers.discard(reader)
        if answer.readers:
            return
        delivered = answer.done and reader.read == len(answer.log) and not answer.kept
        if answer not in self._keys or delivered or answer.error:  # a retry of an error is tried anew
            self._forget(answer)
            return
        for choice in answer.choices:
            if not choice.finish and choice.in_flight is None:
                self._fleet.park(choice.id)
        answer.forgetting = asyncio.get_running_loop().call_later(self._linger_s, self._forget, answer)

    # ------------------------------------------------------ what engines say

    def grew(self, id: SampleId, start: int, out_ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Tokens from `start` on."""
        if choice := self._choices.get(id):
            skip = choice.n - start
            self._take(choice, out_ids[skip:].tolist(), logprobs[skip:].tolist(), None)

    def ranked(self, id: SampleId, start: int, rows: np.ndarray) -> None:
        """The most likely tokens at tokens from `start` on."""
        if choice := self._choices.get(id):
            choice.top_rows = np.concatenate([choice.top_rows[:start], rows])

    def ended(self, sample: Sample) -> None:
        choice = self._choices.get(sample.id)
        if choice is None:
            return
        answer = choice.answer
        if sample.finish == "error" or sample.version != answer.version:
            fault = "its log-probs are no numbers" if sample.finish == "error" else f"it is of version {sample.version}"
            self.refused(sample.id, Refused(500, f"a sample of version {answer.version} is broken: {fault}"))
            return
        self._take(choice, sample.out_ids[choice.n :].tolist(), sample.logprobs[choice.n :].tolist(), sample.finish)

    def refused(self, id: SampleId, error: Refused) -> None:
        """The sample will not end."""
        if choice := self._choices.get(id):
            choice.answer.error, choice.finish = error, "error"
            self._over(choice)
            choice.answer.tell(None)

    def cancelled(self, id: SampleId) -> None:
        self._leaving.discard(id)
        self.changed()

    def parked(self, in_flight: InFlightSample) -> None:
        choice = self._choices.get(in_flight.id)
        if choice is None:
            return
        self.grew(in_flight.id, 0, in_flight.out_ids, in_flight.logprobs)
        if choice.finish:
            return
        if choice.answer.readers:
            self._fleet.resume(in_flight)
        else:
            choice.in_flight = in_flight
        parked = [choice for choice in self._choices.values() if choice.in_flight is not None]
        if sum(choice.in_flight.kv_bytes for choice in parked if choice.in_flight) > self._parked_bytes:
            self._forget(parked[0].answer)  # in the order in which they began

    # ---------------------------------------------------------------- private

    def _free_ids(self, wanted: GenerateRequest) -> list[SampleId] | None:
        """An identity for each choice; None: the same seed and prompt run already, with other limits."""
        ids = []
        for prompt in wanted.prompts:
            if wanted.seed is None:
                groups = [(self._group + 1 + index) % SEEDED for index in range(wanted.n)]
                self._group = groups[-1]
            else:
                digests = [hashlib.sha256(repr((wanted.seed, prompt, i)).encode()).digest() for i in range(wanted.n)]
                groups = [SEEDED + int.from_bytes(each[:8], "big") % SEEDED for each in digests]
            ids += [SampleId(SERVED - group, 0) for group in groups]
        busy = any(id in self._choices or id in self._leaving for id in ids)
        return None if busy or len(set(ids)) < len(ids) else ids

    def _read(self, answer: Answer) -> Reader:
        reader = Reader(answer)
        answer.readers.add(reader)
        if answer.forgetting:
            answer.forgetting.cancel()
            answer.forgetting = None
            for choice in answer.choices:
                if choice.in_flight is not None:
                    self._fleet.resume(choice.in_flight)
                    choice.in_flight = None
        return reader

    def _take(self, choice: _Choice, ids: list[int], logprobs: list[float], finish: str | None) -> None:
        piece = choice.take(ids, logprobs, finish)
        if piece is None:
            return
        self.tokens += len(piece.ids)
        if choice.finish:
            self._over(choice, cancel=finish is None)
        choice.answer.tell(piece)

    def _over(self, choice: _Choice, cancel: bool = False) -> None:
        """cancel: the engine would go on with it."""
        del self._choices[choice.id]
        if cancel:
            self._leaving.add(choice.id)
            self._fleet.cancel(choice.id)
        self.versions.end(choice.answer.version)
        self.changed()

    def _forget(self, answer: Answer) -> None:
        if (key := self._keys.pop(answer, None)) is not None:
            del self._known[key]
        if answer.forgetting:
            answer.forgetting.cancel()
        for choice in answer.choices:
            if not choice.finish:
                choice.finish = "cancelled"
                choice.in_flight = None
                self.cancelled_samples += 1
                self._over(choice, cancel=True)
