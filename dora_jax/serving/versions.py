"""Which version serves a session, which one is loaded next, which one retires. Pure: time comes in.

Laws: a session is served by one version from its first request on; a version that an answer or a session needs is not
dropped; at most `residents` versions are there at once, one that is being loaded included.
"""

from __future__ import annotations

import collections
import re

from dora_jax.serving.request import Refused
from dora_jax.types import Version

VERSION = r"\d{1,18}"  # as a request writes it
MAX_SESSIONS = 100_000  # remembered; the longest unused is forgotten first


class Versions:
    """The book of resident versions. `name`: what a request calls the policy, alone or as NAME@VERSION."""

    def __init__(self, residents: int, idle_s: float, name: str = "policy"):
        """idle_s: a session without a request for so long no longer keeps its version."""
        self.name = name
        self.idle_s = idle_s
        self.resident: set[Version] = set()
        self.loading: Version | None = None
        self._residents = residents
        self._offered: Version | None = None  # the newest that could be loaded
        self._newest = -1  # ever resident
        self._running: collections.Counter[Version] = collections.Counter()
        self._pins: collections.OrderedDict[str, Version] = collections.OrderedDict()  # of sessions
        self._used_s: dict[Version, float] = {}  # when a session, or a request that named it, came last

    def offer(self, version: Version) -> None:
        self._offered = version if self._offered is None else max(version, self._offered)

    def loaded(self, version: Version) -> None:
        self.loading = None
        self.resident.add(version)
        self._newest = max(self._newest, version)

    def begin(self, version: Version) -> None:
        """An answer of this version runs, or waits for its client to come back."""
        self._running[version] += 1

    def end(self, version: Version) -> None:
        self._running[version] -= 1

    def asked(self, model: str | None) -> Version | None:
        """The version that a request's `model` names; None: it leaves the choice. Refused (404): no such model."""
        base, at, number = (self.name if model is None else model).partition("@")
        if base != self.name or (at and not re.fullmatch(VERSION, number)):
            there = ", ".join([self.name, *(f"{self.name}@{v}" for v in sorted(self.resident))])
            raise Refused(
                404,
                f"The model `{model:.100}` does not exist. There are: {there}.",
                param="model",
                code="model_not_found",
            )
        return int(number) if at else None

    def choose(self, session: str | None, asked: Version | None, now_s: float) -> Version | None:
        """The version of a request, and the session's from now on; None: the next load decides, ask again then.

        Refused: 404 for a version that is not there yet, 410 for a retired one, 400 where session and request differ.
        """
        pin = self._pins.get(session) if session else None
        if pin is not None and asked not in (None, pin):
            raise Refused(
                400,
                f"model: session {session!r} is served by version {pin} from its first request on, so not by "
                f"version {asked}",
                param="model",
            )
        version = asked if pin is None else pin
        if version is None:
            version = max(self.resident, default=None)
            if version is None or (version < self._newest and self.loading is not None):
                return None  # the newest made room for a newer one: no session begins at an old version for that
        if version not in self.resident:
            if version == self.loading:
                return None
            if version > self._newest:
                raise Refused(404, f"model: there is no version {version} yet", param="model", code="model_not_found")
            there = ", ".join(f"{self.name}@{v}" for v in sorted(self.resident)) or "none at this moment"
            subject = f"version {version}" if pin is None else f"session {session!r} began at version {version}, which"
            raise Refused(
                410, f"model: {subject} has retired; served are: {there}", param="model", code="version_retired"
            )
        if session or asked is not None:
            self._used_s[version] = now_s
        if session:
            self._pins[session] = version
            self._pins.move_to_end(session)
        if len(self._pins) > MAX_SESSIONS:
            self._pins.popitem(last=False)
        return version

    def plan(self, now_s: float) -> tuple[Version | None, Version | None]:
        """(a version to drop, a version to load) now; both are reserved on return."""
        if self.loading is not None:
            return None, None
        newest = max(self.resident, default=None)
        wanted = self._offered if self._offered is not None and self._offered > self._newest else None
        idle = [
            version for version in sorted(self.resident)
            if self._running[version] <= 0 and now_s - self._used_s.get(version, -self.idle_s) >= self.idle_s
        ]  # fmt: skip
        full = len(self.resident) >= self._residents
        # the newest goes only for a newer one, where there is no room beside it
        drop = next((version for version in idle if version != newest or (wanted is not None and full)), None)
        if drop is not None:
            self.resident.remove(drop)
            self._used_s.pop(drop, None)
        if wanted is not None and len(self.resident) < self._residents:
            self.loading = wanted
        return drop, self.loading
