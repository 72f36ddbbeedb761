"""How long a stage has had nothing to do.

Consumes the waits of one thread, each in a `with`; produces their sum for any other. Law: a wait that goes on counts up
to now.
"""

from __future__ import annotations

import time


class Waits:
    def __init__(self) -> None:
        self._at: tuple[float, float | None] = (0.0, None)  # (earlier waits, since when the present one); set as one

    def __enter__(self) -> None:
        self._at = self._at[0], time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._at = self.total_s, None

    @property
    def total_s(self) -> float:
        earlier_s, since_s = self._at
        return earlier_s + (0.0 if since_s is None else time.monotonic() - since_s)

    @property
    def present_s(self) -> float | None:
        """Of the wait that goes on; None: there is none."""
        since_s = self._at[1]
        return None if since_s is None else time.monotonic() - since_s
