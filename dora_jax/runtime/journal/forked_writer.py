"""A forked child that works on the state as it is now, while this process goes on.

    child = fork(work)      the child's memory is that of this process at the fork: a page is copied where either writes

Law: the child holds no file, socket or device of its parent, receives no signal but SIGKILL, runs no thread, and takes
no lock of another thread: `work` is plain Python that writes files of its own. So a process that runs threads may fork
it; only the thread that forks goes on in the child.
"""

from __future__ import annotations

import gc
import os
import signal
import traceback
import warnings
from collections.abc import Callable

FIRST_FD = 3  # behind stdin, stdout and stderr


class Child:
    def __init__(self, pid: int):
        self._pid = pid
        self._done: bool | None = None
        self.cpu_s = 0.0  # that the child has taken, once it has ended

    def ended(self) -> bool | None:
        """Whether the work is done; None: the child still works."""
        if self._done is None:
            pid, status, usage = os.wait4(self._pid, os.WNOHANG)
            if pid:
                self._done, self.cpu_s = status == 0, usage.ru_utime + usage.ru_stime
        return self._done

    def kill(self) -> None:
        if self.ended() is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._done = False


def fork(work: Callable[[], None]) -> Child:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # it is about children that go on with locks of lost threads: this one takes none
            pid = os.fork()
        if not pid:
            # runs in the child
            code = 1
            try:
                gc.disable()  # a collection would copy every page
                os.closerange(FIRST_FD, os.sysconf("SC_OPEN_MAX"))
                work()
                code = 0
            except BaseException:  # the child must not go on from here: its exit code tells the parent
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return Child(pid)
