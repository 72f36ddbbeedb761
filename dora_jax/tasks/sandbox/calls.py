"""Stages 1 and 3: questions to code that may raise, hang, die or lie, in a process that may be killed.

    caller: Process.ask -- frame {nonce, ...} --> serve: `answer(request)` -- frame {nonce, ...} --> caller

Frames of a 4-byte length and UTF-8 JSON, on a socket of its own, so that what the code prints is only noise; no pickle.
Laws: whatever goes wrong is NoAnswer in one sentence, within the deadline; the process is then gone with its
descendants. Each request carries a nonce that its reply repeats: frames written ahead, later, or by a descendant are
refused. The asked code runs inside the answering process itself, and no wall separates the two.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from dora_jax.base import callables
from dora_jax.tasks import sandbox
from dora_jax.tasks.sandbox import programs

HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 64 * 2**20  # a prompt and a response are far below this
MEMORY_BYTES = 8 * 2**30  # of one process' data: a response such as 9^9^9 fails its group, not the machine
START_TIMEOUT_S = 120.0  # importing a user's reward may take long on a loaded machine
START_ATTEMPTS = 3  # a process that dies while starting may be the machine's fault; three in a row are not
EXIT_TIMEOUT_S = 5.0  # for the exit code of a process whose socket is closed
NOISE_LIMIT_BYTES = 2**20  # of what a process printed; cut between questions
NOISE_TAIL_BYTES = 2000  # of it, quoted when the process dies

Request = dict[str, Any]


class NoAnswer(Exception):
    """Why there is none: one sentence. kind: the part of it that every failure from one cause shares."""

    def __init__(self, reason: str, kind: str = ""):
        super().__init__(reason)
        self.kind = kind or reason


class Declined(NoAnswer):
    """The code was asked and refused: it raised, or cannot be loaded. Its process may be asked again."""


# ---------------------------------------------------------------- the caller's side


class Process:
    """One killable process of `python -m MODULE`. start, ask: from one thread at a time; close: from any."""

    def __init__(
        self,
        module: str,
        setup: Request,
        *,
        form: str,
        variables: Iterable[str] = (),
        memory_bytes: int = MEMORY_BYTES,
        sandbox_python: str | None = None,
        python: str = "",
    ):
        """python: another interpreter than this one, with packages of its own. sandbox_python: it may call
        programs.run, whatever its own sandbox, which then runs programs by this one."""
        self._module = module
        self._setup = setup
        self._form = form  # of its sandbox: see sandbox.py
        self._variables = tuple(variables)
        self._memory_bytes = memory_bytes
        self._python = python
        self._sandbox_python = sandbox_python
        self._alone: tempfile.TemporaryDirectory[str] | None = None
        self._walled: sandbox.Walled | None = None
        self._server: programs.Server | None = None
        self.connection: socket.socket | None = None  # of the process
        self._noise = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (open as long as the process)
        self._held: dict[str, Any] = {
            "noise": self._noise
        }  # closed with this object: a thread may read them until then
        weakref.finalize(self, _close_all, self._held)
        self._closed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The pid of the supervisor, while there is a process."""
        return self._walled.pid if self._walled and self._walled.poll() is None else None

    def start(self) -> Request:
        """A fresh process that has taken the setup, and what it replied; Declined where it says no, NoAnswer where it
        keeps dying."""
        for attempt in range(1, START_ATTEMPTS + 1):
            self._end()
            ours, theirs = socket.socketpair()
            # A clean environment, with the modules that we can import; no accelerator, which belongs to the run.
            # Another interpreter imports its own packages, and of ours this one and what PYTHONPATH and the working
            # directory hold.
            path = [entry for entry in sys.path if entry]
            if self._python:
                self._alone = self._alone or callables.package_alone()
                path = [self._alone.name, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
            modules = os.pathsep.join(dict.fromkeys([*path, os.getcwd()]))
            env = sandbox.clean_environment(self._variables) | {"PYTHONPATH": modules, "JAX_PLATFORMS": "cpu"}
            fds = [theirs.fileno()]
            with theirs, self._lock:
                if self._sandbox_python is not None:
                    self._server = programs.Server(self._sandbox_python)
                    fds.append(self._server.client.fileno())
                    env[programs.VARIABLE] = str(fds[-1])
                self._walled = sandbox.start(
                    # -P: the working directory comes last in PYTHONPATH, where it hides nothing
                    [self._python or sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                    form=self._form,
                    env=env,
                    pass_fds=fds,
                    stdout=self._noise,
                    memory_bytes=self._memory_bytes,
                )
            self.connection = self._held["sock"] = ours
            if self._closed:  # close() came between
                self.close()
            try:
                return self.ask({"setup": self._setup}, START_TIMEOUT_S, "start-up")
            except Declined:
                raise
            except NoAnswer:
                if self._closed or attempt == START_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def ask(self, request: Request, timeout_s: float, what: str) -> Request:
        """The reply. `what` is what a sentence calls the code that is asked."""
        sock = self.connection
        if sock is None:
            raise NoAnswer(f"{what}: the worker is gone")
        self.trim()
        nonce = secrets.token_hex(16)
        try:
            deadline_s = time.monotonic() + timeout_s
            send(sock, {**request, "nonce": nonce}, deadline_s)
            reply = receive(sock, deadline_s)
            if reply.pop("nonce", None) != nonce:
                raise ValueError("a reply without the request's nonce was written to the worker's own socket")
        except (EOFError, OSError, ValueError) as error:
            kind, reason = self.lost(error)
            if isinstance(error, TimeoutError):
                kind = reason = f" took over {timeout_s:g} s"
            raise NoAnswer(what + reason, what + kind) from error
        if "error" in reply:
            raise Declined(str(reply["error"]), str(reply.get("kind", "")))
        return reply

    def trim(self) -> None:
        """Forgets what the process has printed, where that is much."""
        if os.fstat(self._noise.fileno()).st_size > NOISE_LIMIT_BYTES:
            os.ftruncate(self._noise.fileno(), 0)

    def lost(self, error: Exception) -> tuple[str, str]:
        """Ends the process, after what a send or a receive has raised; returns the kind and the reason: what follows
        the name of the code that was asked."""
        kind = reason = f": {error}"
        if isinstance(error, EOFError | OSError) and not isinstance(error, TimeoutError):
            ended = "closed its socket"
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert self._walled is not None
                code = self._walled.wait(EXIT_TIMEOUT_S)
                ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            kind = f": the worker {ended}"
            size = os.fstat(self._noise.fileno()).st_size
            tail = os.pread(self._noise.fileno(), NOISE_TAIL_BYTES, max(0, size - NOISE_TAIL_BYTES))
            lines = tail.decode(errors="replace").strip().splitlines()
            reason = kind + (f"; it last printed: {lines[-1]}" if lines else "")
        self._end()
        return kind, reason

    def close(self) -> None:
        """Kills the process; a thread that waits for a reply wakes up and gives up."""
        self._closed = True
        self._end(keep_socket=True)

    # ------------------------------------------------------------ private

    def _end(self, keep_socket: bool = False) -> None:
        """keep_socket: another thread may be reading from it."""
        with self._lock:
            if self._walled is not None:
                self._walled.end()
            if self._server is not None:
                self._server.end()
            if self.connection is not None and not keep_socket:
                self.connection.close()
                self.connection = None


def _close_all(held: dict[str, Any]) -> None:
    for file in held.values():
        file.close()


# ---------------------------------------------------------------- the other side


Send = Callable[[Request], None]  # sends the caller something ahead of the reply
Answer = Callable[..., Any]


def serve(fd: int, prepare: Callable[[Request], tuple[Request, Answer]]) -> None:
    """Answers until the caller is gone. `prepare` takes the setup and returns what it is answered with and what answers
    a request: a function, one request at a time; or a coroutine function, all at once, on an event loop, in any order.
    Either raises Declined to say no."""
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # what the code starts must not hold the connection open
    try:
        opening = receive(sock)
        try:
            properties, answer = prepare(opening["setup"])
        except Declined as error:
            send(sock, {"nonce": opening["nonce"], "error": str(error), "kind": error.kind})
            return
        send(sock, {**properties, "nonce": opening["nonce"]})
        if inspect.iscoroutinefunction(answer):
            import asyncio  # which one request at a time does without

            asyncio.run(_serve_all(sock, answer))
            return
        while True:
            request = receive(sock)
            nonce = request.pop("nonce")
            try:
                reply = answer(request)
            except Declined as error:
                reply = {"error": str(error), "kind": error.kind}
            send(sock, {**reply, "nonce": nonce})
    except EOFError:
        return


async def _serve_all(sock: socket.socket, answer: Callable[[Request, Send], Awaitable[Request]]) -> None:
    import asyncio

    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock)
    running: set[asyncio.Task] = set()

    async def one(request: Request) -> None:
        nonce = request.pop("nonce")

        def reply_with(message: Request) -> None:
            writer.write(framed({**message, "nonce": nonce}))

        try:
            reply_with(await answer(request, reply_with))
        except Declined as error:
            reply_with({"error": str(error), "kind": error.kind})
        except asyncio.CancelledError:
            reply_with({"error": "it was cancelled", "kind": "error"})
            raise
        except Exception as error:  # such as an answer that is no JSON
            reply_with({"error": f"raised {type(error).__name__}: {error}", "kind": "error"})
        await writer.drain()

    with contextlib.suppress(asyncio.IncompleteReadError):  # the caller is gone
        while True:
            (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            task = asyncio.create_task(one(json.loads(await reader.readexactly(size))))
            running.add(task)
            task.add_done_callback(running.discard)


# ---------------------------------------------------------------- frames


def framed(message: Request) -> bytes:
    """The bytes of a frame. TypeError, ValueError: it is no JSON, or too large."""
    payload = json.dumps(message).encode()
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes is over the {MAX_FRAME_BYTES} of a frame")
    return HEADER.pack(len(payload)) + payload


def send(sock: socket.socket, message: Request, deadline_s: float | None = None) -> None:
    """Raises TimeoutError at the deadline (time.monotonic), and as `framed` does."""
    frame = framed(message)
    _until(sock, deadline_s)
    sock.sendall(frame)


def receive(sock: socket.socket, deadline_s: float | None = None) -> Request:
    """Raises TimeoutError at the deadline, EOFError where the other side is gone, ValueError for what is no frame."""
    came = bytearray(_exactly(sock, HEADER.size, deadline_s))
    while (message := next_frame(came)) is None:
        came += _exactly(sock, HEADER.unpack(came[: HEADER.size])[0], deadline_s)
    return message


def next_frame(came: bytearray) -> Request | None:
    """Takes the first frame off what has come. None: it is not whole yet. ValueError: it is no frame."""
    if len(came) < HEADER.size:
        return None
    (size,) = HEADER.unpack(came[: HEADER.size])
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes is over {MAX_FRAME_BYTES}")
    if len(came) < HEADER.size + size:
        return None
    try:
        message = json.loads(came[HEADER.size : HEADER.size + size])
    except RecursionError as error:
        raise ValueError("a frame is nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("a frame holds no object")
    del came[: HEADER.size + size]
    return message


def _exactly(sock: socket.socket, size: int, deadline_s: float | None) -> bytes:
    parts, left = [], size
    while left:
        _until(sock, deadline_s)
        part = sock.recv(min(left, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _until(sock: socket.socket, deadline_s: float | None) -> None:
    if deadline_s is None:
        sock.settimeout(None)
        return
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock.settimeout(left_s)
