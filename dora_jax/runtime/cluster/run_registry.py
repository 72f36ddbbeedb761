"""Where a run's controller is and which gangs it has: how they find each other again where the controller was killed.

    WORKDIR/controller.json      token, address, build, {gang: [epoch, pids]}; in a folder only its owner may read it

Consumes what the keepers start and end; produces what an earlier controller has left. Laws: it is always whole; no
gang runs that is not in it, unless the storage refuses, which is said and stops nobody; a run that ends itself removes
it, so a process that finds none ends too.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora_jax.config import ConfigError
from dora_jax.runtime.durability.object_storage import ROSTER, Objects


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredGang:
    epoch: int
    pids: tuple[int, ...]  # empty: the launcher finds them by name


class RunRegistry:
    """`place`: a workdir, which may be a URL; None: nobody will look for it. `build`: what gangs are begun with; those
    of another are of no use."""

    def __init__(self, place: str | None = None, build: str = "", notify: Callable[[str], None] = print):
        self._page, self._build, self._notify = None if place is None else page_at(place), build, notify
        try:
            found = json.loads((self._page and self._page.read()) or "{}")
            self.token = bytes.fromhex(found["token"]) if found else secrets.token_bytes(32)
            self.left = {
                name: RegisteredGang(epoch=epoch, pids=tuple(pids))
                for name, (epoch, pids) in (found["gangs"].items() if found else ())
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"workdir: {place}/{ROSTER} is not what a controller writes ({error}): delete it once no "
                f"process of this run is left"
            ) from error
        self.fits = bool(found) and found.get("build") == build
        self._gangs = dict(self.left)
        self._address = ""
        self._lock = threading.Lock()

    def announce(self, address: str) -> None:
        """From now on processes that were left alone may come."""
        self._address = address
        self._write()

    def enter(self, name: str, epoch: int, pids: tuple[int, ...]) -> None:
        self._gangs[name] = RegisteredGang(epoch=epoch, pids=pids)
        self._write()

    def strike(self, name: str) -> None:
        self._gangs.pop(name, None)
        self._write()

    def close(self) -> None:
        if self._page is not None:
            self._try(self._page.remove)

    # ------------------------------------------------------------ private

    def _write(self) -> None:
        if (page := self._page) is None:
            return
        with self._lock:
            gangs = {name: [member.epoch, member.pids] for name, member in self._gangs.copy().items()}
            text = json.dumps(
                {"token": self.token.hex(), "address": self._address, "build": self._build, "gangs": gangs}
            )
            self._try(lambda: page.write(text))

    def _try(self, do: Callable[[], None]) -> None:
        """A supervisor must go on where a disk is full, or a bucket does not answer."""
        try:
            do()
        except OSError as error:
            self._notify(
                f"{ROSTER} is not up to date ({error}): another controller would not find all gangs of this one"
            )


def address_in(place: str) -> str | None:
    """Of the controller that wrote it last; None: the run has ended."""
    text = page_at(place).read()
    return None if text is None else json.loads(text)["address"]


class _File:
    def __init__(self, path: Path):
        self._path = path

    def read(self) -> str | None:
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return None

    def write(self, text: str) -> None:
        partial = self._path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        with open(partial, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)
        partial.replace(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class _Object:
    def __init__(self, url: str):
        self._store = Objects(url)

    def read(self) -> str | None:
        return None if (data := self._store.get(ROSTER)) is None else data.decode()

    def write(self, text: str) -> None:
        self._store.put(ROSTER, text.encode())

    def remove(self) -> None:
        self._store.drop(ROSTER)


def page_at(place: str) -> _File | _Object:
    return _Object(place) if "://" in place else _File(Path(place) / ROSTER)


def build_of(config: Any) -> str:
    """A fingerprint of this configuration and of this package's sources."""
    sha = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    package = Path(__file__).parents[2]
    for source in sorted(package.rglob("*.py")):
        sha.update(str(source.relative_to(package)).encode() + source.read_bytes())
    return sha.hexdigest()
