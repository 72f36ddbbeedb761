"""An instance of the trainer's gang, as the controller sees it: it is up only while the trainer's devices are
lent.

    Lend -> LendDevices to the trainer's gang -> its processes join as a gang of this instance -> the version is loaded
    -> InstanceUp ... Return -> HandOver -> samples out, the state back -> InstanceDown

`LentRemoteInstance` is a RemoteInstance whose gangs begin when they are asked for. Laws: every Lend is answered by
InstanceUp or InstanceDown, every Return by InstanceDown; an incarnation is never begun again by itself, and
incarnations that come to nothing are counted; an incarnation ends with the trainer's gang, and with its controller: no
other controller takes it over.
"""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable
from typing import Any

from dora_jax.config import RunError
from dora_jax.orchestrate import events as ev
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.gang import Gang, GangDied
from dora_jax.runtime.cluster.gang_supervisor import LOOK_S, GangSupervisor
from dora_jax.runtime.cluster.launch_process import Launcher, StartedGang, Ticket
from dora_jax.runtime.cluster.remote_rollout import GangWorker, RemoteInstance
from dora_jax.runtime.instances.lent_instance import RETURNED
from dora_jax.types import InstanceId, Version


@dataclasses.dataclass
class LentProcesses(StartedGang):
    """Processes that the trainer's gang has already. They end with that gang; their part in this incarnation ends with
    its connections."""

    trainer: Gang

    def ended(self) -> str | None:
        return f"the trainer's gang is lost: {self.trainer.reason}" if self.trainer.dead.is_set() else None


@dataclasses.dataclass
class LentLauncher(Launcher):
    """Launcher of the instances that the trainer's processes make up. trainer: its gang; None: it is not there
    now."""

    ip: str
    trainer: Callable[[], Gang | None]
    instance: InstanceId
    first: int  # of the trainer's processes that are the instance

    def start(self, ticket: Ticket, hosts: int, slice_type: str) -> StartedGang:
        """RunError: there is no gang of the trainer to ask."""
        call = messages.LendDevices(
            instance=self.instance,
            first=self.first,
            hosts=hosts,
            controller=ticket.controller,
            credential=ticket.credential,
        )
        try:
            if (gang := self.trainer()) is None:
                raise GangDied("it is being started")
            gang.cast(call)
        except GangDied as error:
            raise RunError(f"the trainer's gang cannot lend its devices: {error}") from error
        return LentProcesses(gang)


class LentSupervisor(GangSupervisor):
    """One incarnation for each item in `asked`. After so many in a row that began and were lost as may come to nothing,
    no other begins: each may have cost the trainer its gang."""

    quiet = True  # devices change sides every few seconds

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._left = None  # none of an earlier controller is taken over
        self.asked: queue.SimpleQueue[None] = queue.SimpleQueue()  # an item a `Lend`
        self._begun = False  # the present incarnation
        self._lost = 0  # incarnations in a row

    # ------------------------------------------------------------ private

    def _run(self) -> None:
        while not self._closed.is_set():
            if (gang := self._next()) is None:
                continue
            self._begun = False
            came = self._one_incarnation(gang, None)
            if self._closed.is_set():
                return
            if not came:
                self._down(gang)
            if gang.leaving is not None:
                self._lost = 0
            elif self._begun:
                self._lost += 1
                stays = ", and it stays away" if (self._lost > self._limits.restarts) else ""
                self._notify(f"{self.name} (epoch {gang.epoch}) is lost: {gang.reason}{stays}")

    def _next(self) -> Gang | None:
        try:
            self.asked.get(timeout=LOOK_S)
        except queue.Empty:
            return None
        return super()._next()

    def _started(self, gang: Gang, ticket: Ticket) -> StartedGang | None:
        try:
            if self._lost > self._limits.restarts:
                raise RunError(f"{self._lost} incarnations in a row were lost")
            started = self._launcher.start(ticket, self._hosts, self._slice_type)
        except RunError as error:
            gang.die(str(error))
            return None
        self._begun = True
        return started


class LentRemoteInstance(RemoteInstance):
    on_demand = True
    supervisor: LentSupervisor

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._version: Version = 0  # that the next incarnation begins with
        self._coming: GangWorker | None = None  # the incarnation that loads it

    def lend(self, version: Version) -> None:
        self._version = version
        self.supervisor.asked.put(None)

    def reclaim(self, worker: GangWorker) -> None:
        worker.gang.leave(RETURNED)

    # ------------------------------------------------------------ private

    def _up(self, gang: Gang) -> None:
        """The gang is there; the instance is up once it has loaded the version that was named."""
        self._publisher.up(gang)
        worker, version = GangWorker(self, gang, self._publisher, self._notify), self._version
        self._coming, self._event = worker, dataclasses.replace(self._event, versions=(version,))
        load = messages.Command(what=ev.LoadWeights(instance=self.instance, version=version))
        self._publisher.want(gang, version, lambda: gang.post(load))

    def _on_message(self, item: Any) -> None:
        if (
            isinstance(item, ev.WeightsLoaded)
            and (worker := self._coming) is not None
            and item.incarnation == worker.incarnation
        ):
            self._coming = None
            return self.incarnation_ready(worker, lambda: self._admit(worker))
        super()._on_message(item)

    def gang_down(self, gang: Gang) -> None:
        self._coming = None
        super().gang_down(gang)
