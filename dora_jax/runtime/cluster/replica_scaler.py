"""How many rollout gangs a run has while it goes on: the number in WORKDIR/replicas decides.

Consumes that file or object, once a second; produces `want` of each instance, the first ones first. Laws: a gang that
is not wanted any more hands its samples over before it ends; one that is wanted again comes as any late joiner does;
without the file all of rollout.instances are wanted; what is no number from 1 to rollout.instances changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from dora_jax.runtime.durability.object_storage import REPLICAS, Objects, StoreError

LOOK_S = 1.0


def wish_at(place: str) -> Callable[[], str | None]:
    """What is written there; None: nothing is. `place`: a workdir, which may be a URL."""
    if "://" in place:
        store = Objects(place)
        return lambda: None if (data := store.get(REPLICAS)) is None else data.decode(errors="replace").strip()
    path = Path(place) / REPLICAS
    return lambda: path.read_text().strip() if path.exists() else None


class Wanted(Protocol):
    def want(self, wanted: bool) -> None: ...


class Replicas:
    """Looks once before it returns, so that no gang is started for nothing; then on a thread of its own."""

    def __init__(
        self,
        wish: Callable[[], str | None],
        instances: Sequence[Wanted],
        notify: Callable[[str], None],
        look_s: float = LOOK_S,
    ):
        self._wish, self._instances, self._notify = wish, instances, notify
        self._look_s = look_s
        self._text: str | None = None  # as it was read last; None: no file
        self._closed = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    # ------------------------------------------------------------ private

    def _run(self) -> None:
        while not self._closed.wait(self._look_s):
            self._look()

    def _look(self) -> None:
        try:
            text = self._wish()
        except StoreError:
            return  # of which others speak
        if text in (self._text, ""):  # empty: somebody is about to write it
            return
        self._text = text
        most = len(self._instances)
        n = most if text is None else int(text) if text.isdecimal() else 0
        if not 1 <= n <= most:
            self._notify(f"{REPLICAS}: {text!r} is no number of rollout gangs from 1 to {most}; nothing is changed")
            return
        self._notify(f"{n} of {most} rollout gangs are wanted from now on")
        for number, instance in enumerate(self._instances):
            instance.want(number < n)
