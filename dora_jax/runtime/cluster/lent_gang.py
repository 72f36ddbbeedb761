"""An instance of the trainer's gang: its processes are the trainer's, while these devices are lent.

    Lend -> LendDevices to the trainer's gang -> its processes join as a gang of this instance -> the version is loaded
    -> InstanceUp ... Return -> HandOver -> samples out, the state back -> InstanceDown

`LentLauncher` stands for the launcher of such an instance, which is one on demand: its supervisor starts a gang when it
is asked to, and none again by itself (gang_supervisor.py). Laws: an incarnation ends with the trainer's gang, and with
its controller: no other controller takes it over; where the trainer's gang is lost or being started, the incarnation
that was asked for ends before it begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from dora_jax.config import RunError
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.gang import Gang, GangDied
from dora_jax.runtime.cluster.launch_process import Launcher, StartedGang, Ticket
from dora_jax.types import InstanceId


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
