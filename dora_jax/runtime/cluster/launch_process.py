"""Starts processes where a gang is to run, and ends them; knows nothing of what they do.

Consumes a gang's name, size and epoch; produces `StartedGang`: the ids of its processes, whether they live, how to kill
them; also of processes that an earlier controller has started and left. `ProcessLauncher` runs all of them on this
machine; the other launcher is launch_ray.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a process needs to find its gang. The token travels beside it: never on a command line."""

    controller: str
    gang: str
    epoch: int


class StartedGang(Protocol):
    @property
    def placed(self) -> bool:
        """False: there is no room for them yet."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids by which `find` knows the processes; empty: it needs none."""

    def ended(self) -> str | None:
        """Says in a few words which process has ended; None: all live."""

    def notice(self) -> str | None:
        """Says in a few words that a machine of theirs is about to be taken away; None: no machine is."""

    def kill(self) -> None:
        """Ends all of them at once, whatever they are doing; returns when they are gone."""


class Launcher(Protocol):
    ip: str  # where the controller is reached

    def start(self, ticket: Ticket, token: bytes, hosts: int, slice_type: str) -> StartedGang:
        """`slice_type`: the TPU slice that they share; empty: any machine."""

    def find(
        self, ticket: Ticket, token: bytes, hosts: int, slice_type: str, pids: Sequence[int]
    ) -> StartedGang | None:
        """The processes that an earlier controller has started for this gang and epoch; None: they are not all there,
        and every process that was has been ended."""

    def close(self) -> None: ...


class ProcessLauncher:
    """Plain child processes; each writes to WORKDIR/logs/<gang>.<epoch>.<number>.log."""

    ip = "127.0.0.1"

    def __init__(self, logs: Path):
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, ticket: Ticket, token: bytes, hosts: int, slice_type: str) -> StartedGang:
        env = {
            **os.environ,
            "DORA_TICKET": json.dumps({"controller": ticket.controller, "gang": ticket.gang, "epoch": ticket.epoch}),
            "DORA_TOKEN": token.hex(),
        }
        children = []
        for number in range(hosts):
            with (self._logs / f"{ticket.gang}.{ticket.epoch}.{number}.log").open("w") as log:
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "dora_jax.runtime.cluster.process_main"],
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        return ChildProcesses(children)

    def close(self) -> None:
        """Does nothing: the children end with their gangs."""

    def find(
        self, ticket: Ticket, token: bytes, hosts: int, slice_type: str, pids: Sequence[int]
    ) -> StartedGang | None:
        found = FoundProcesses([process for pid in pids if (process := _of_run(pid, token)) is not None])
        if len(found.pids) == hosts:
            return found
        found.kill()
        return None


class ChildProcesses:
    placed = True

    def __init__(self, children: list[subprocess.Popen]):
        self._children = children
        self.pids = tuple(child.pid for child in children)

    def ended(self) -> str | None:
        for child in self._children:
            if child.poll() is not None:
                return f"process {child.pid} ended with code {child.returncode}"
        return None

    def notice(self) -> None:
        """The machine tells the processes itself, by SIGTERM."""

    def kill(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()


class FoundProcesses:
    """Processes that an earlier controller started, and that outlived it; found by their ids."""

    placed = True

    def __init__(self, processes: Sequence[psutil.Process]):
        self._processes = processes
        self.pids = tuple(process.pid for process in processes)

    def ended(self) -> str | None:
        return next((f"process {each.pid} has ended" for each in self._processes if not _incarnations(each)), None)

    def notice(self) -> None:
        """As ChildProcesses.notice."""

    def kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        while any(map(_incarnations, self._processes)):
            time.sleep(0.01)


def _incarnations(process: psutil.Process) -> bool:
    """A zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _of_run(pid: int, token: bytes) -> psutil.Process | None:
    """The process with this id if it belongs to the run; None: it has ended, and its id may be another's now."""
    try:
        process = psutil.Process(pid)
        return process if process.environ().get("DORA_TOKEN") == token.hex() else None
    except psutil.Error:
        return None


def ticket_of(text: str) -> Ticket:
    return Ticket(**json.loads(text))
