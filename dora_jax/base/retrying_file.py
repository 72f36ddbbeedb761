"""A file that grows at its end, written by a run that must go on when the disk is full.

Consumes bytes; produces a file of them, or with a budget two: NAME.EXT, and before it NAME.1.EXT. Laws: nothing is in
the file twice, and what waits for space follows in order; a write that is refused leaves nothing half done; what waits
is bounded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from dora_jax.base import state_files

MAX_WAITING_BYTES = 1 << 26
RETRY_PERIOD_S = 1.0


def earlier(path: Path) -> Path:
    """Return the name of the file that holds what a full one held: timeline.jsonl -> timeline.1.jsonl."""
    return path.with_stem(f"{path.stem}.1")


class PatientFile:
    """`notify` is called once when the file cannot be written, and once when it can be written again."""

    def __init__(
        self, path: str | os.PathLike, notify: Callable[[str], None], *, budget_bytes: int = 0, lines: bool = False
    ):
        """budget_bytes: of both files together, less than a write more; 0: one file without a limit. lines: a last
        line that a crash cut short is ended first, so that the next one stands alone."""
        self._path = Path(path)
        self._notify = notify
        self._most_bytes = budget_bytes // 2
        for place in (self._path, earlier(self._path)) if budget_bytes else (self._path,):
            if place.is_dir():
                notify(f"{place} was a folder, which is moved aside as {state_files.set_aside(place)}")
        self._waiting = b""
        self._tried_s: float | None = None  # when a write was last refused; None: writes succeed
        self._open()
        if lines and self.size:
            with self._path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read()
            if last != b"\n":
                self.write(b"\n")

    def begin_anew(self) -> bool:
        """Leave what is written as NAME.1.EXT. False: something waits for space, or the disk refuses."""
        if self._waiting:
            return False
        try:
            self._roll_over()
        except OSError:
            return False
        return True

    def write(self, data: bytes) -> None:
        self._waiting += data
        if self._tried_s is not None and time.monotonic() - self._tried_s < RETRY_PERIOD_S:
            return
        self._try()

    @property
    def waits(self) -> bool:
        """Whether a record waits for space."""
        return bool(self._waiting)

    def close(self) -> None:
        """Closes the file; records that are not written yet are lost."""
        if self._waiting:
            self._try()
        self._file.close()

    def _open(self) -> None:
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (open for the run)
        self.size = os.fstat(self._file.fileno()).st_size  # bytes in the file, less what waits for space

    def _roll_over(self) -> None:
        before = self._file
        if self._path.exists():  # it does not where an open was refused the last time
            os.replace(self._path, earlier(self._path))
        self._open()
        before.close()

    def _try(self) -> None:
        view = memoryview(self._waiting)
        try:
            if self._most_bytes and self.size and self.size + len(view) > self._most_bytes:
                self._roll_over()
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._file.truncate(self.size)  # a half record would hide the records behind it
            if self._tried_s is None:
                self._notify(f"{self._path} cannot be written ({error.strerror}): what belongs there waits in memory")
            self._tried_s = time.monotonic()
            if len(self._waiting) > MAX_WAITING_BYTES:
                raise
            return
        self.size += len(self._waiting)
        self._waiting = b""
        if self._tried_s is not None:
            self._tried_s = None
            self._notify(f"{self._path} is written again")
