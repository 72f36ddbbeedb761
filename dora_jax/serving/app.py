"""The routes: what a client of the OpenAI dialect asks, or of Anthropic's, and how the answer reaches it.

Laws: a client that goes away leaves its answer at once; a client that waits hears something every `pulse_s` (a comment
in a stream, a blank before JSON), so that no read time-out ends a long answer; a status of 200 is sent only once the
answer has begun, and a broken answer ends its connection in the middle, never as an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dora_jax.base import prometheus
from dora_jax.base.prometheus import Counters
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.runtime.live_sessions import AskedTurn, LiveSessions, SessionsOver
from dora_jax.serving import chat, parser, request
from dora_jax.serving.answers import Answer, Answers, Identity, Piece, Reader
from dora_jax.serving.dialects import Messages, MessagesReply, Responses, ResponsesReply, refusal, renamed
from dora_jax.serving.reply import ChatReply, CompletionReply, GenerateReply, Reply, event
from dora_jax.serving.request import Form, GenerateRequest, Refused, ServedLimits

MAX_BODY_BYTES = 64 << 20
LARGE_BODY_BYTES = 1 << 16  # one at a time is read, because what is computed of it holds the interpreter
MAX_GRAMMAR_CHARS = 1 << 17  # which is compiled in a tenth of a second; ten times as much takes a second and 100 MB
BODY_S = 60.0  # from a request's headers to the end of its body
SESSION, RETRY_KEY, VERSION, API_KEY = "x-session-id", "idempotency-key", "x-weight-version", "x-api-key"
TASK, GROUP = "x-task-id", "x-group-id"
T = TypeVar("T")
BeginAnswer = Callable[[], Awaitable[Reader]]
Health = Callable[[], tuple[int, dict[str, Any]]]  # what /healthz answers
KEEP_ALIVE = b": the answer is being sampled\n\n"


@dataclass
class Endpoint:
    """What the routes need. token: of every request but /healthz; empty: none, and a request names a loopback host.
    pulse_s: far below clients' time-outs."""

    answers: Answers
    tokenizer: Tokenizer
    limits: ServedLimits
    counters: Counters
    token: str
    pulse_s: float
    health: Health
    sessions: LiveSessions | None = None  # that a run trains on
    large: asyncio.Semaphore = dataclasses.field(default_factory=functools.partial(asyncio.Semaphore, 1))

    def app(self, lifespan: Any = None) -> Starlette:
        guarded: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
            ("/v1/models", "GET"): self._models,
            ("/v1/models/{model}", "GET"): self._model,
            ("/v1/completions", "POST"): self._completion,
            ("/v1/chat/completions", "POST"): self._chat,
            ("/v1/responses", "POST"): functools.partial(self._translated, Responses, ResponsesReply),
            ("/v1/messages", "POST"): functools.partial(self._translated, Messages, MessagesReply),
            ("/inference/v1/generate", "POST"): self._generate,
            ("/v1/sessions/{session}", "DELETE"): self._end_session,
            ("/v1/sessions/{session}/reward", "POST"): self._reward,
            ("/metrics", "GET"): self._metrics,
        }
        routes = [
            Route(path, functools.partial(self._guarded, route), methods=[method])
            for (path, method), route in guarded.items()
        ]
        handlers: Mapping[Any, Any] = {404: _not_found, 405: _not_found, Refused: _refused}
        return Starlette(
            routes=[*routes, Route("/healthz", self._health)], exception_handlers=handlers, lifespan=lifespan
        )

    # ---------------------------------------------------------------- routes

    async def _models(self, asked: Request) -> Response:
        resident = sorted(self.answers.versions.resident, reverse=True)
        name = self.answers.versions.name
        newest = [self._card(name, resident[0])] if resident else []
        cards = newest + [self._card(f"{name}@{version}", version) for version in resident]
        return JSONResponse({"object": "list", "data": cards})

    async def _model(self, asked: Request) -> Response:
        versions, model = self.answers.versions, asked.path_params["model"]
        version = versions.choose(None, versions.asked(model), time.monotonic())
        if version is None:
            raise Refused(503, "no version is loaded yet: come again later")
        return JSONResponse(self._card(model, version))

    def _card(self, name: str, version: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "dora_jax",
            "max_model_len": self.limits.context,
            "weight_version": version,
        }

    async def _health(self, asked: Request) -> Response:
        status, body = self.health()
        return JSONResponse(body, status)

    async def _metrics(self, asked: Request) -> Response:
        return Response(self.counters.text(), media_type=prometheus.MEDIA_TYPE)

    async def _completion(self, asked: Request) -> Response:
        body, wanted, form = await self._read(
            asked, lambda body: (body, *request.completion(body, self.limits, self._encode))
        )
        return self._answer(asked, body, wanted, form, CompletionReply)

    async def _chat(self, asked: Request) -> Response:
        return self._answer(asked, *await self._read(asked, functools.partial(self._talk, reply=ChatReply)))

    async def _translated(
        self, dialect: type[Responses | Messages], reply: type[ChatReply], asked: Request
    ) -> Response:
        """A request of another dialect, as a chat completion."""
        try:
            return self._answer(
                asked, *await self._read(asked, lambda body: self._talk(dialect.read(body), reply=reply))
            )
        except Refused as error:
            raise renamed(error, dialect) from error

    def _talk(
        self, body: dict[str, Any], reply: type[ChatReply]
    ) -> tuple[dict[str, Any], GenerateRequest, Form, type[ChatReply], chat.TemplateInput]:
        """A chat completion, as `_answer` takes it. Refuse first what has more messages and tools than fit."""
        if (
            least := sum(len(body[name]) for name in ("messages", "tools") if isinstance(body.get(name), list))
        ) >= self.limits.context:
            raise self.limits.exceeded(f"at least {least}")
        talk = chat.read(body)
        tools = talk.variables.get("tools", ())
        wanted, form = request.chat(body, self.limits, self._render(talk), tools=tools, grammar=talk.grammar)
        return body, wanted, form, reply, talk

    async def _generate(self, asked: Request) -> Response:
        body, wanted, form = await self._read(asked, lambda body: (body, *request.generate(body, self.limits)))
        return self._answer(asked, body, wanted, form, GenerateReply)

    async def _end_session(self, asked: Request) -> Response:
        session = asked.path_params["session"]
        if self.sessions is None or not await asyncio.to_thread(self.sessions.end, session):
            raise Refused(404, f"no session {session!r} is trained on")
        return JSONResponse({"id": session, "object": "session", "deleted": True})

    async def _reward(self, asked: Request) -> Response:
        session, rewards = asked.path_params["session"], await self._read(asked, request.rewards)
        if self.sessions is None:
            raise Refused(404, "no session is trained on here")
        if fault := await asyncio.to_thread(self.sessions.reward, session, rewards):
            raise Refused(409, f"reward: {fault}", param="reward")
        return JSONResponse({"id": session, "object": "session.reward", "accepted": True})

    # ---------------------------------------------------------------- private

    async def _guarded(self, route: Callable[[Request], Awaitable[Response]], asked: Request) -> Response:
        header = asked.headers.get("authorization", "")
        header = header or f"Bearer {asked.headers.get(API_KEY, '')}"  # as Anthropic's clients send it
        if self.token and not hmac.compare_digest(header.encode(), f"Bearer {self.token}".encode()):
            raise Refused(401, "neither the Authorization nor the x-api-key header holds this endpoint's token")
        if not self.token and not is_loopback(asked.url.hostname or ""):
            # a page of the web that has turned its own name to this machine's address
            raise Refused(403, f"the Host header names {asked.url.hostname}, and without a token only this machine may")
        return await route(asked)

    def _render(self, talk: chat.TemplateInput) -> list[int]:
        if len(talk.grammar) > MAX_GRAMMAR_CHARS:
            message = f"{talk.held_by}: a form of {len(talk.grammar)} characters is over {MAX_GRAMMAR_CHARS}"
            raise Refused(400, message, param=talk.held_by)
        try:
            text = self.tokenizer.chat(talk.messages, **talk.variables)
            if "tools" in talk.variables:
                plain = {name: value for name, value in talk.variables.items() if name != "tools"}
                if text == self.tokenizer.chat(talk.messages, **plain):
                    raise Refused(400, "tools: the model's chat template does not show them", param="tools")
        except ValueError as error:
            raise Refused(400, f"messages: {error}", param="messages") from error
        if talk.grammar:
            try:
                self.tokenizer.check_grammar(talk.grammar)
                if text.rstrip().endswith(parser.THINK):
                    raise ValueError("the chat template begins the answer with <think>, and a thought has no form")
            except ValueError as error:
                raise Refused(400, f"{talk.held_by}: {error}", param=talk.held_by) from error
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        """Refuse what is too long before it is tokenised, which takes a second per megabyte."""
        least = -(-len(text) // self.tokenizer.longest_token)
        if least >= self.limits.context:
            raise self.limits.exceeded(f"at least {least}")
        return self.tokenizer.encode(text)

    async def _read(self, asked: Request, make: Callable[[dict[str, Any]], T]) -> T:
        """What `make` computes of the body, in a thread.

        Its type is one that no form of a web page can send: with it browsers ask first, and get no answer."""
        if asked.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Refused(415, "the Content-Type header is not application/json")
        body = bytearray()
        most = min(MAX_BODY_BYTES, self.limits.body_bytes)
        try:
            async with asyncio.timeout(BODY_S):
                async for part in asked.stream():
                    body += part
                    if len(body) > most:
                        raise Refused(413, f"the body is longer than {most} bytes")
        except TimeoutError as error:
            raise Refused(408, f"the body did not come within {BODY_S:.0f} s") from error
        except ClientDisconnect as error:  # which nobody reads
            raise Refused(400, "the body has no end") from error
        async with self.large if len(body) > LARGE_BODY_BYTES else contextlib.nullcontext():
            return await asyncio.to_thread(lambda: make(self._json(body)))

    def _json(self, body: bytearray) -> dict[str, Any]:
        try:
            found = json.loads(body)
            if b"\\u" in body:  # half of a surrogate pair is JSON, and no text
                json.dumps(found, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise Refused(400, "the body is no JSON object")
        if not isinstance(found.get("model"), str | None) or not isinstance(found.get("user"), str | None):
            raise Refused(400, "model, user: neither a text nor absent", param="model")
        return found

    def _answer(
        self,
        asked: Request,
        body: Mapping[str, Any],
        wanted: GenerateRequest,
        form: Form,
        reply: type[Reply],
        talk: chat.TemplateInput | None = None,
    ) -> _Answering:
        versions = self.answers.versions
        session, retry = asked.headers.get(SESSION), asked.headers.get(RETRY_KEY)
        identity = Identity("key", retry) if retry else Identity("session", session) if session else None
        version = versions.asked(body.get("model"))
        begin: BeginAnswer = functools.partial(
            self.answers.begin, wanted, session=session, asked=version, identity=identity
        )
        if self.sessions:
            turn: AskedTurn | str = "chat completions alone are trained"
            if talk:
                turn = "it has no X-Session-ID" if not session else "it wants a version of its own (model)"
            if talk and session and version is None:
                tasks = asked.headers.get(TASK, ""), asked.headers.get(GROUP, "")
                turn = AskedTurn(
                    session=session,
                    task="\n".join(tasks),
                    messages=talk.messages,
                    variables=talk.variables,
                    max_tokens=wanted.max_tokens,
                    stop=wanted.stop,
                    temperature=wanted.sampling.temperature if wanted.sampling else None,
                    differs=wanted.differs,
                    shown=functools.partial(self._shown, wanted),
                )
            begin = functools.partial(self._as_turn, self.sessions, turn, wanted, begin)

        reply_to = functools.partial(reply, form=form, name=versions.name, tokenizer=self.tokenizer)
        return _Answering(self, asked.url.path, begin, reply_to)

    def _shown(self, wanted: GenerateRequest, ids: np.ndarray, finish: str) -> dict[str, Any]:
        return self.answers.message(wanted, ids.tolist(), finish)

    async def _as_turn(
        self, sessions: LiveSessions, turn: AskedTurn | str, wanted: GenerateRequest, untrained: BeginAnswer
    ) -> Reader:
        """The answer as a turn of an episode; untrained, where it cannot be one: a text is the reason."""
        promise = turn if isinstance(turn, str) else await asyncio.to_thread(sessions.take, turn)
        if isinstance(promise, str):
            reader = await untrained()
            reader.answer.untrained = promise
            return reader
        try:
            sampled = await asyncio.wrap_future(promise)
        except SessionsOver as error:
            raise Refused(503, str(error)) from error
        return self.answers.whole(
            wanted, sampled.version, sampled.ids.tolist(), sampled.logprobs.tolist(), sampled.finish
        )


class _Answering(Response):
    """The response that an answer becomes while it is sampled."""

    def __init__(self, endpoint: Endpoint, route: str, begin: BeginAnswer, reply_to: Callable[[Answer], Reply]):
        self._endpoint, self._route = endpoint, route
        self._begin, self._reply_to = begin, reply_to
        self._reader: Reader | None = None
        self._began_s = time.monotonic()
        self._started = False  # the status is sent
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery = asyncio.ensure_future(self._tell(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({delivery, gone}, return_when=asyncio.FIRST_COMPLETED)
            if delivery.done():
                delivery.result()
        finally:
            gone.cancel()
            delivery.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await delivery
            if self._reader is not None:
                self._endpoint.answers.leave(self._reader)

    async def _tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        counters = self._endpoint.counters
        try:
            self._reader = await self._begin()
            reply = self._reply_to(self._reader.answer)
            await (self._stream if reply.form.stream else self._whole)(reply, self._pieces(self._reader), send)
        except Refused as error:
            counters.requests.labels(self._route, error.status).inc()
            if self._started:
                raise  # which cuts the connection: the client sees that the answer has no end
            await JSONResponse(_body(error, self._route), error.status)(scope, receive, send)
            return
        counters.requests.labels(self._route, 200).inc()
        counters.answer_s.observe(time.monotonic() - self._began_s)

    async def _pieces(self, reader: Reader) -> AsyncIterator[Piece | None]:
        first = True
        async for piece in reader.follow(self._endpoint.pulse_s):
            if piece and first:
                self._endpoint.counters.first_token_s.observe(time.monotonic() - self._began_s)
                first = False
            yield piece

    async def _stream(self, reply: Reply, pieces: AsyncIterator[Piece | None], send: Send) -> None:
        await self._start(send, "text/event-stream; charset=utf-8", reply)
        for chunk in reply.opening():
            await _more(send, event(chunk))
        sent: list[Piece] = []
        async for piece in pieces:
            if piece is None:
                await _more(send, KEEP_ALIVE)
                continue
            sent.append(piece)
            for chunk in reply.chunks(piece):
                await _more(send, event(chunk))
        for chunk in reply.closing(sent):
            await _more(send, event(chunk))
        await send({"type": "http.response.body", "body": event(reply.last) if reply.last else b"", "more_body": False})

    async def _whole(self, reply: Reply, pieces: AsyncIterator[Piece | None], send: Send) -> None:
        """Blanks, which JSON allows before a value, keep the connection alive."""
        sent: list[Piece] = []
        last_s = self._began_s
        async for piece in pieces:
            if piece is not None:
                sent.append(piece)
            if (now_s := time.monotonic()) - last_s >= self._endpoint.pulse_s:
                last_s = now_s
                await self._start(send, "application/json", reply)
                await _more(send, b" ")
        await self._start(send, "application/json", reply)
        await send({"type": "http.response.body", "body": json.dumps(reply.body(sent)).encode(), "more_body": False})

    async def _start(self, send: Send, kind: str, reply: Reply) -> None:
        """Once."""
        if self._started:
            return
        self._started = True
        version = str(reply.answer.version).encode()
        headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-store"), (VERSION.encode(), version)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _more(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's for itself alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


async def _refused(asked: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
    if error.status in (401, 403, 408, 413):
        headers["connection"] = "close"  # it holds none of the endpoint's connections
    return JSONResponse(_body(error, asked.url.path), error.status, headers)


def _body(error: Refused, route: str) -> dict[str, Any]:
    return refusal(error) if route == "/v1/messages" else error.body


async def _not_found(asked: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return JSONResponse(Refused(status, f"{asked.method} {asked.url.path} is not served here").body, status)
