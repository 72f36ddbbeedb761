"""Starts processes where a gang is to run, and ends them; knows nothing of what they do.

Consumes a gang's name, size and epoch; produces `Started`: who they are, whether they live, how to kill them.
`Processes` runs all of them on this machine; the other launcher is on_ray.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from dora_jax.types import record


@record
class Ticket:
    """What a process needs to find its gang. The token travels beside it: never on a command line."""

    controller: str
    gang: str
    epoch: int


class Started(Protocol):
    placed: bool  # False: there is no room for them yet

    def ended(self) -> str | None:
        """Which of them is gone, in a few words; None: all live."""

    def kill(self) -> None:
        """Ends all of them at once, whatever they are doing; returns when they are gone."""


class Launcher(Protocol):
    ip: str  # where the controller is reached

    def start(self, ticket: Ticket, token: bytes, hosts: int, slice_type: str) -> Started:
        """`slice_type`: the TPU slice that they share; empty: any machine."""

    def close(self) -> None: ...


class Processes:
    """Plain child processes; each writes to WORKDIR/logs/<gang>.<epoch>.<number>.log."""

    ip = "127.0.0.1"

    def __init__(self, logs: Path):
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, ticket: Ticket, token: bytes, hosts: int, slice_type: str) -> Started:
        env = {**os.environ, "DORA_TICKET": _json(ticket), "DORA_TOKEN": token.hex()}
        children = []
        for number in range(hosts):
            with (self._logs / f"{ticket.gang}.{ticket.epoch}.{number}.log").open("w") as log:
                children.append(subprocess.Popen([sys.executable, "-m", "dora_jax.runtime.cluster.host"], env=env,
                                                 stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        return Children(children)

    def close(self) -> None:
        """Children are ended with their gangs."""


class Children:
    placed = True

    def __init__(self, children: list[subprocess.Popen]):
        self._children = children

    def ended(self) -> str | None:
        for child in self._children:
            if child.poll() is not None:
                return f"process {child.pid} ended with code {child.returncode}"
        return None

    def kill(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()


def _json(ticket: Ticket) -> str:
    return json.dumps({"controller": ticket.controller, "gang": ticket.gang, "epoch": ticket.epoch})


def ticket_of(text: str) -> Ticket:
    return Ticket(**json.loads(text))
