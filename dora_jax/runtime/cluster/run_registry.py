"""Where a run's controller is and which gangs it has: how they find each other again where the controller was killed.

    WORKDIR/controller.json   authority, incarnation, address, build, {gang: [epoch, pids]}; in a folder only its owner
                              may read it

Consumes what the keepers start and end; produces what an earlier controller has left. Laws: it is always whole, and a
damaged one is refused; no gang runs that is not in it, unless the storage refuses, which is reported and stops nobody;
a run that ends itself removes it, so a process that finds none ends too.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora_jax.base import state_files
from dora_jax.config import ConfigError
from dora_jax.runtime.cluster.launch_process import run_of_token
from dora_jax.runtime.common.credentials import CONTROLLER, Authority, Credential
from dora_jax.runtime.journal.object_storage import ROSTER, Lease, Objects

FORMAT = 3  # of controller.json; 2: with a token in the place of an authority, and no gang is taken over from it
PRIVATE = 0o600  # it holds the authority's key


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredGang:
    epoch: int
    pids: tuple[int, ...]  # empty: the launcher finds them by name


class RunRegistry:
    """`place`: a workdir, which may be a URL; None: nobody will look for it. `build`: what gangs are begun with; those
    of another are of no use."""

    def __init__(
        self,
        place: str | None = None,
        build: str = "",
        notify: Callable[[str], None] = print,
        lease: Lease | None = None,
    ):
        self._place, self._build, self._notify = place, build, notify
        self._store = Objects(place, lease) if place is not None and "://" in place else None
        try:
            data = None if place is None else _read(place)
            record = {} if data is None else state_files.decode(data, f"{place}/{ROSTER}", FORMAT)
            former = data is not None and "token" in record
            if data is None or former:
                self.authority = Authority(run=run_of_token(record["token"]) if former else "")
            else:
                self.authority = Authority(record["authority"])
            self.incarnation = int(record.get("incarnation", 0)) + 1  # of this controller
            self.left: dict[str, RegisteredGang] = {}
            for name, (epoch, pids) in {} if data is None else record["gangs"].items():
                if not all(type(number) is int for number in (epoch, *pids)):
                    raise ValueError(f"gang {name!r:.40} has an epoch or a process that is no number")
                self.left[name] = RegisteredGang(epoch=epoch, pids=tuple(pids))
        except state_files.NewerFormat as error:
            raise ConfigError(f"workdir: {error}, or delete it once no process of this run is left") from error
        except (ValueError, KeyError, TypeError, AttributeError, IsADirectoryError) as error:
            raise ConfigError(
                f"workdir: {place}/{ROSTER} is not what a controller writes ({error}): delete it once no "
                f"process of this run is left"
            ) from error
        self.credential = Credential(self.authority.issue(CONTROLLER, self.incarnation))
        self.fits = record.get("build") == build and not former
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
        self._write(remove=True)

    # ------------------------------------------------------------ private

    def _write(self, remove: bool = False) -> None:
        """A supervisor must go on where a disk is full, or a bucket does not answer."""
        if self._place is None:
            return
        with self._lock:
            gangs = {name: [member.epoch, member.pids] for name, member in self._gangs.copy().items()}
            state = {
                "authority": self.authority.pem,
                "incarnation": self.incarnation,
                "address": self._address,
                "build": self._build,
                "gangs": gangs,
            }
            path, data = Path(self._place) / ROSTER, state_files.encode(state, FORMAT)
            try:
                if self._store is not None and remove:
                    self._store.drop(ROSTER)
                elif self._store is not None:
                    self._store.put(ROSTER, data)
                elif remove:
                    path.unlink(missing_ok=True)
                else:
                    state_files.replace(path, data, PRIVATE)
            except OSError as error:
                self._notify(
                    f"{ROSTER} is not up to date ({error}): another controller would not find all gangs of this one"
                )


def address_in(place: str) -> str | None:
    """Return the address of the controller that wrote the file last; None: the run has ended.

    ValueError: the file is damaged, which the controller mends with its next change.
    """
    data = _read(place)
    if data is None:
        return None
    address = state_files.decode(data, f"{place}/{ROSTER}", FORMAT).get("address")
    if not isinstance(address, str) or not re.fullmatch(r".+:\d{1,5}", address):
        raise ValueError(f"{place}/{ROSTER} names no address")
    return address


def _read(place: str) -> bytes | None:
    if "://" in place:
        return Objects(place).get(ROSTER)
    try:
        return (Path(place) / ROSTER).read_bytes()
    except FileNotFoundError:
        return None


def build_of(config: Any) -> str:
    """A fingerprint of this configuration and of this package's sources."""
    sha = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    package = Path(__file__).parents[2]
    for source in sorted(package.rglob("*.py")):
        sha.update(str(source.relative_to(package)).encode() + source.read_bytes())
    return sha.hexdigest()
