"""What processes of the trainer's gang do while their devices are lent: they are an instance's gang, too.

    LendDevices -> the state leaves the devices -> Hello -> Begin -> Ready -> RolloutRole ... HandOver -> samples out
    -> weights and pages gone -> the state is back -> HandOverDone

An incarnation of the instance has a connection and a thread of its own, and ends with either. Consumes LendDevices;
produces what a RolloutRole does. Laws: the trainer computes nothing before `reload` returns; the engine is compiled
once; where the controller is lost, the incarnation ends and the trainer's role goes on; whatever goes wrong in an
incarnation ends the process.
"""

from __future__ import annotations

import threading

import jax

from dora_jax.config import Config, ConfigError
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.connection import ControllerConnection, join, turns_of
from dora_jax.runtime.cluster.rollout_role import InstanceParts
from dora_jax.runtime.common.credentials import Credential
from dora_jax.runtime.instances.shared_devices import MovableState, SharedDevices

LAST_WORDS_S = 5.0


class LentConnection(ControllerConnection):
    """Where it is lost the incarnation ends; the process does not."""

    def __init__(self, address: str, credential: Credential):
        super().__init__(address, credential, lambda: self.inbox.put(messages.HandOver()))


class LentRole:
    """The main thread of the process calls it."""

    def __init__(self, begin: messages.Begin, config: Config, link: ControllerConnection, trainer: MovableState):
        """Compiles the engine of the instance that this process is a part of."""
        own, tensor = jax.local_device_count(), config.rollout.tensor
        hosts = tensor // own
        if tensor % own or not hosts or begin.hosts % hosts:
            raise ConfigError(
                f"orchestrator.elastic: the trainer's {begin.hosts} processes have {own} devices each, which make up "
                f"no whole number of instances of rollout.tensor = {tensor}"
            )
        self._rank, self._hosts, self._link = begin.rank, begin.hosts, link
        self._worker: LentConnection | None = None
        moves = config.trainer.lent_memory == "host"
        self._state = SharedDevices(trainer, lambda engine: engine.device.free()) if moves else SharedDevices(None)
        self._instance = config.rollout.instances + begin.rank // hosts
        self._thread: threading.Thread | None = None
        first = begin.rank // hosts * hosts
        here = [device for device in jax.devices() if first <= device.process_index < first + hosts]
        self._state.acquire(self._instance)
        self._parts = InstanceParts(config, here, begin, link)
        self._free()

    def lend(self, call: messages.LendDevices) -> None:
        """Begins an incarnation of the instance, if this process is one of those that the call names."""
        if call.first <= self._rank < call.first + call.hosts:
            self.reload()
            self._thread = threading.Thread(
                target=self._live, args=(call,), name=f"instance {call.instance}", daemon=True
            )
            self._thread.start()

    def reload(self) -> None:
        """Returns when no incarnation has the devices, and the state is on them."""
        if self._thread is not None:
            self._thread.join()
        self._state.reload()

    def leave(self) -> int:
        """The process is about to end: an incarnation hands its samples over. Returns how many processes do so."""
        if (worker := self._worker) is not None:
            worker.inbox.put(messages.HandOver())
        self.reload()
        return self._hosts

    # ------------------------------------------------------------ private

    def _live(self, call: messages.LendDevices) -> None:
        try:
            self._state.acquire(self._instance)
            link = self._worker = LentConnection(call.controller, Credential(call.credential))
        except OSError:  # that controller is gone
            return self._free()
        except BaseException as error:
            return self._fail(error)
        listener, arrivals, status = join(link, self._rank)
        try:
            if isinstance(begin := link.inbox.get(), messages.Begin):
                role = self._parts.role(begin, link, status, turns_of(begin, link.credential, arrivals), self._free)
                link.send(messages.Ready(wanted=role.wanted))
                role.run(link.inbox)
                link.records.flush(LAST_WORDS_S)  # what is handed over is sent before the process may end
            self._free()
        except BaseException as error:
            self._fail(error)
        finally:
            self._worker = None
            status.ended.set()
            listener.close()
            self._parts.close()
            link.inbox.put(None)  # its threads end

    def _free(self) -> None:
        """Gives the devices back: no sample is on them."""
        engine = self._parts.engine
        for version in engine.versions:
            engine.drop(version)
        self._state.release(self._instance, engine)

    def _fail(self, error: BaseException) -> None:
        self._link.send(messages.ProcessFailed(error=f"{type(error).__name__}: {error}"))
