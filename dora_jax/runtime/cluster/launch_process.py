"""Starts processes where a gang is to run, and ends them; knows nothing of what they do.

Consumes a gang's name, size and epoch; produces `StartedGang`: the ids of its processes, whether they live, how to kill
them; also of processes that an earlier controller has started and left. `ProcessLauncher` runs all of them on this
machine; the other launcher is launch_ray.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a process needs to find its gang, and to be known there: never on a command line."""

    run: str
    controller: str
    gang: str
    epoch: int
    credential: str = dataclasses.field(repr=False)  # see runtime/common/credentials.py


class StartedGang(Protocol):
    """By default nothing tells of a machine that goes, and there is nothing to kill."""

    placed: bool = True  # False: there is no room for them yet
    pids: tuple[int, ...] = ()  # by which `find` knows the processes; empty: it needs none

    def ended(self) -> str | None:
        """Says in a few words which process has ended; None: all live."""

    def notice(self) -> str | None:
        """Says in a few words that a machine of theirs is about to be taken away; None: no machine is."""
        return None

    def needs(self) -> str:
        """Names what they wait for without a place, and the field that makes room."""
        return ""

    def kill(self) -> None:
        """Ends all of them at once, whatever they are doing; returns when they are gone."""
        return


class Launcher(Protocol):
    """Made by `cluster.launcher(workdir, run)`; `run` names a run and all that resume it."""

    ip: str  # where the controller is reached

    def start(self, ticket: Ticket, hosts: int, slice_type: str) -> StartedGang:
        """`slice_type`: the TPU slice that they share; empty: any machine."""

    def find(self, ticket: Ticket, hosts: int, slice_type: str, pids: Sequence[int]) -> StartedGang | None:
        """The processes that an earlier controller has started for this gang and epoch; None: they are not all there,
        and every process that was has been ended. By default an earlier controller leaves none."""
        return None

    def close(self) -> None:
        """By default the processes end with their gangs."""
        return


class ProcessLauncher(Launcher):
    """Plain child processes; each writes to WORKDIR/logs/<gang>.<epoch>.<number>.log."""

    ip = "127.0.0.1"
    arguments: tuple[str, ...] = ("-m", "dora_jax.runtime.cluster.process_main")  # of the interpreter

    def __init__(self, workdir: Path, run: str):
        self._logs = workdir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)

    def start(self, ticket: Ticket, hosts: int, slice_type: str) -> StartedGang:
        env = {**os.environ, "DORA_RUN": ticket.run, "DORA_TICKET": json.dumps(dataclasses.asdict(ticket))}
        command = [sys.executable, *self.arguments]
        children: list[subprocess.Popen] = []
        for number in range(hosts):
            with (self._logs / f"{ticket.gang}.{ticket.epoch}.{number}.log").open("w") as log:
                children.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        return LocalProcesses(children)

    def find(self, ticket: Ticket, hosts: int, slice_type: str, pids: Sequence[int]) -> StartedGang | None:
        processes = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):  # it has ended
                process = psutil.Process(pid)
                environ = process.environ()
                token = environ.get("DORA_TOKEN")  # of a process that another version has started
                run = environ.get("DORA_RUN") if token is None else run_of_token(token)
                if run == ticket.run:  # else its id is another's now
                    processes.append(process)
        found = LocalProcesses(processes)
        if len(found.pids) == hosts:
            return found
        found.kill()
        return None


class LocalProcesses(StartedGang):
    """Children, or processes that an earlier controller started and that outlived it. The machine tells them itself
    that it goes, by SIGTERM."""

    def __init__(self, processes: Sequence[subprocess.Popen | psutil.Process]):
        self._processes = processes
        self.pids = tuple(process.pid for process in processes)

    def ended(self) -> str | None:
        return next((f"process {each.pid} {end}" for each in self._processes if (end := _end_of(each))), None)

    def kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        while not all(map(_end_of, self._processes)):
            time.sleep(0.01)


def run_of_token(token: str) -> str:
    """The name of a run that had a token, and no authority."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


def _end_of(process: subprocess.Popen | psutil.Process) -> str | None:
    """How it has ended, in a few words; None: it is alive. A zombie has ended."""
    if isinstance(process, subprocess.Popen):
        return None if process.poll() is None else f"ended with code {process.returncode}"
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return None
    return "has ended"
