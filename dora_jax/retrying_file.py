"""A file that grows at its end, written by a run that must go on when the disk is full.

Consumes bytes; produces a file of them. Laws: nothing is in the file twice, and what waits for space follows in order;
a write that is refused leaves nothing half done; what waits is bounded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

MAX_WAITING_BYTES = 1 << 26
RETRY_PERIOD_S = 1.0


class PatientFile:
    """`say` is called once when the file cannot be written, and once when it can be written again."""

    def __init__(self, path: str | os.PathLike, notify: Callable[[str], None]):
        self._path = path
        self._notify = notify
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (open for the run)
        self._size = os.fstat(self._file.fileno()).st_size
        self._waiting = b""
        self._tried_s: float | None = None  # when a write was last refused; None: writes succeed

    def write(self, data: bytes) -> None:
        self._waiting += data
        if self._tried_s is not None and time.monotonic() - self._tried_s < RETRY_PERIOD_S:
            return
        self._try()

    def close(self) -> None:
        """Closes the file; records that are not written yet are lost."""
        if self._waiting:
            self._try()
        self._file.close()

    def _try(self) -> None:
        view = memoryview(self._waiting)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._refused(error)
            return
        self._size += len(self._waiting)
        self._waiting = b""
        if self._tried_s is not None:
            self._tried_s = None
            self._notify(f"{self._path} is written again")

    def _refused(self, error: OSError) -> None:
        self._file.truncate(self._size)  # a half record would hide the records behind it
        if self._tried_s is None:
            self._notify(f"{self._path} cannot be written ({error.strerror}): what belongs there waits in memory")
        self._tried_s = time.monotonic()
        if len(self._waiting) > MAX_WAITING_BYTES:
            raise error
