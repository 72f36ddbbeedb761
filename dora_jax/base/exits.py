"""Exit codes, and what Ctrl-C and SIGTERM do to a program before its run begins (then runtime/common/shutdown.py takes
over).

    0 done    1 it cannot go on    2 wrong input, trying again cannot help    42 start me again: asked to stop, or stuck

Standard library only: a program listens before it imports anything else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

FAILED, BAD_USAGE, RETRY = 1, 2, 42  # 42 is what JobSet and XPK take for "restart"
NO_READER = 128 + signal.SIGPIPE  # as shells report it
SIGNALS = (signal.SIGINT, signal.SIGTERM)
NO_ROOM, NOT_ALLOWED = (errno.ENOSPC, errno.EDQUOT), (errno.EROFS, errno.EACCES, errno.EPERM)
NO_ROOM_WORDS = tuple(map(os.strerror, NO_ROOM))  # messages of errors that libraries raise
NO_BACKEND = "Unable to initialize backend"  # in the message of JAX
XLA_NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory")  # words of XLA's errors
SHOW_CURSOR = "\x1b[?25h"  # the progress line hides the cursor until it is closed


class Stop(BaseException):
    """The run ends now and can be started again; the message says why.

    It may be raised inside any library, many of which catch every `Exception`; so it is none.
    """


def listen() -> None:
    """From here on a signal ends the process at once with code 42, since nothing has to be saved yet; and it ends
    without a trace where the reader of what it prints, such as head, has left.

    For the main thread of a program of ours.
    """
    for number in SIGNALS:
        signal.signal(number, _end_at_once)
    report = sys.excepthook

    def without_reader(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        output = select.poll()
        output.register(1, 0)
        if issubclass(kind, BrokenPipeError) and any(what & select.POLLERR for _, what in output.poll(0)):
            leave(NO_READER)
        report(kind, error, trace)

    sys.excepthook = without_reader


def leave(code: int, sentence: str = "") -> NoReturn:
    """Ends the process without the interpreter's shutdown, which aborts while a thread compiles or computes."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # a full disk, a closed pipe, a print cut in half
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, f"\r{SHOW_CURSOR}".encode())
        if sentence:
            os.write(2, f"{sentence}\n".encode())
    os._exit(code)


def never_print(drop: Callable[[BaseException | None], bool]) -> None:
    """From here on Python prints no trace of an unraisable exception for which `drop` returns True."""
    report = sys.unraisablehook
    sys.unraisablehook = lambda what: None if drop(what.exc_value) else report(what)


def refusal(error: BaseException) -> str | None:
    """A sentence where the machine refused something (disk, permission, memory); None for any other error."""
    text = " ".join(str(error).split())
    cause: BaseException | None = error
    while cause is not None:
        code, where = getattr(cause, "errno", None), getattr(cause, "filename", None)
        if code in NO_ROOM or any(words in str(cause) for words in NO_ROOM_WORDS):
            return f"the disk is full: {text}; make room, and the same command goes on from what is written"
        if code is not None and code in NOT_ALLOWED and where:
            return f"{where}: {os.strerror(code)}"
        if code == errno.EIO:
            return f"{where or 'the disk'}: {os.strerror(code)}; the same command goes on from what is written"
        if isinstance(cause, MemoryError) or any(words in str(cause) for words in XLA_NO_MEMORY):
            less = "fewer slots, shorter rows or more micro_batches need less, and the same workdir goes on with them"
            return f"out of memory: {text or 'of this machine'}; {less}"
        if NO_BACKEND in str(cause):
            return f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: this machine has no such devices: {text}"
        cause = cause.__cause__
    return None


def _end_at_once(number: int, frame: FrameType | None) -> None:
    leave(RETRY, f"{signal.Signals(number).name}: stopped before a run began (exit code {RETRY})")
