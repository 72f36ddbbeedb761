"""Stage 3, one reward worker: `python -m dora_jax.tasks.worker FD`, started and killed by pool.py.

Consumes requests and produces replies on the socket FD, never on stdout, so that what a reward prints is only noise.
Protocol: frames of a 4-byte length and UTF-8 JSON. First {"rewards", "answer_pattern"} -> {"ready": true} or {"error"};
then {"job", "prompt", "response", "answer"} -> {"job", "parts": {name: number}} or {"job", "error", "kind"}.
Laws: imports neither JAX nor the models; ends when its parent does; a reply repeats the number of its job.
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import struct
import sys
import threading
import time
from typing import Any

from dora_jax.tasks import rewards

HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 64 * 2**20  # a prompt and a response are far below this
MEMORY_BYTES = 8 * 2**30  # of one worker's data: a response such as 9^9^9 fails its group, not the machine
PARENT_CHECK_S = 1.0


def send(sock: socket.socket, message: dict[str, Any], deadline_s: float | None = None) -> None:
    """Raises TimeoutError at the deadline (time.monotonic), ValueError for a message too large."""
    payload = json.dumps(message).encode()
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes is over the {MAX_FRAME_BYTES} of a frame")
    _until(sock, deadline_s)
    sock.sendall(HEADER.pack(len(payload)) + payload)


def receive(sock: socket.socket, deadline_s: float | None = None) -> dict[str, Any]:
    """Raises TimeoutError at the deadline, EOFError where the other side is gone, ValueError for what is no frame."""
    (size,) = HEADER.unpack(_exactly(sock, HEADER.size, deadline_s))
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes is over {MAX_FRAME_BYTES}")
    message = json.loads(_exactly(sock, size, deadline_s))
    if not isinstance(message, dict):
        raise ValueError("a frame holds no object")
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


def main(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # what a reward starts must not hold the connection open
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    _limit_memory()
    setup = receive(sock)
    try:
        terms = rewards.resolve(setup["rewards"])
        for reward in terms.values():
            getattr(reward, "prepare", lambda: None)()
    except rewards.RewardError as error:
        send(sock, {"error": str(error)})
        return
    send(sock, {"ready": True})
    pattern = re.compile(setup["answer_pattern"]) if setup["answer_pattern"] else None
    while True:
        try:
            job = receive(sock)
        except EOFError:
            return
        send(sock, {"job": job["job"], **_run(terms, pattern, job)})


def _run(terms: dict[str, rewards.Reward], pattern: re.Pattern[str] | None, job: dict[str, Any]) -> dict[str, Any]:
    try:
        response = job["response"]
        if pattern is not None:
            match = pattern.search(response)
            response = (match.group(1) or "") if match else ""
        return {"parts": rewards.score(terms, job["prompt"], response, job["answer"])}
    except rewards.RewardError as error:
        return {"error": str(error), "kind": error.kind}


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_with_parent(parent: int) -> None:
    """A parent killed outright closes its socket, but a reward that hangs would not notice."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
