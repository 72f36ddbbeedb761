"""The cluster behind one run: what `runtime.local_backend.LocalBackend` is on one machine.

Consumes a configuration with a launcher; produces the trainer, the instances, the weight store and the checkpoints that
runtime/job.py assembles a run of. All gangs start at once; an instance takes part as soon as it is there.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dora_jax import config as configs
from dora_jax.base import callables
from dora_jax.config import ClusterSection, Config, ConfigError, field_context
from dora_jax.config.cluster import LAUNCHERS
from dora_jax.orchestrate.events import InstanceUp
from dora_jax.plan import devices
from dora_jax.runtime.assembly import run
from dora_jax.runtime.cluster.checkpoint_shards import steps_at
from dora_jax.runtime.cluster.gang import GangLimits, GangListener
from dora_jax.runtime.cluster.gang_supervisor import GangSupervisor
from dora_jax.runtime.cluster.launch_process import Launcher
from dora_jax.runtime.cluster.lent_gang import LentLauncher
from dora_jax.runtime.cluster.messages import Begin
from dora_jax.runtime.cluster.remote_rollout import RemoteInstance
from dora_jax.runtime.cluster.remote_trainer import RemoteCheckpoints, RemoteTrainer, part
from dora_jax.runtime.cluster.run_registry import RunRegistry, build_of
from dora_jax.runtime.cluster.weight_publisher import WeightPublisher
from dora_jax.runtime.common.seams import TrainerSide
from dora_jax.runtime.common.worker import Worker
from dora_jax.runtime.journal import recovery, workdir_mirror
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.log_stores import log_at
from dora_jax.runtime.journal.object_storage import JOURNAL, WANTED, Lease, Objects, StoreError
from dora_jax.runtime.journal.payload_state import Step
from dora_jax.runtime.local_backend import RunContext
from dora_jax.runtime.transfer.weight_distribution import STORAGE, WIRE
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from dora_jax.types import InstanceId, Version

FORMER_WANTED = "replicas"
WANTED_ADVICE = "write the number of rollout gangs into it, or remove it"
LOOK_S = 1.0  # how often the file of the wanted instances is read


class ClusterBackend:
    """`Backend` of a run whose stages compute in gangs. The controller opens it, and computes nothing itself."""

    def __init__(self, parts: RunContext, notify: Callable[[str], None], lease: Lease | None = None):
        """lease: where the workdir is in a bucket."""
        self._parts, self._notify = parts, notify
        config, workdir = parts.config, parts.workdir
        self._place = workdir_mirror.url_of(workdir) or os.path.abspath(workdir)
        self._tree = gang_config(config)
        try:
            self._registry = RunRegistry(
                self._place, build_of([self._tree, dataclasses.asdict(config.cluster)]), notify, lease
            )
            self._past = bool(self._registry.left) and self._registry.fits
            self._steps, stored = steps_at(self._place, notify, lease), StoredWeights(self._place, lease)
            (stored.look if self._past else stored.clear)()
        except StoreError as error:
            raise ConfigError(f"workdir: {error}") from error
        wire = config.cluster.wire == "transfer"
        self.weights = WeightPublisher(stored, (WIRE, STORAGE) if wire else (STORAGE,), notify, self._past)
        name, run_id = config.cluster.launcher, hashlib.sha256(self._place.encode()).hexdigest()[:16]
        with field_context("cluster.launcher"):
            make = callables.imported(LAUNCHERS.get(name, name), "launcher")
        self._launcher: Launcher = make(workdir, run_id)
        self._listener = GangListener(self._launcher.ip, self._registry)
        self._trainer = RemoteTrainer(
            self._steps, self._steps_since, self.weights, notify, functools.partial(self._supervisor, None)
        )
        self._instances: dict[InstanceId, RemoteInstance] = {}
        for instance in range(config.rollout.instances):
            self._instances[instance] = RemoteInstance(
                run.instance_up(instance, config),
                parts.outbox,
                self.weights,
                functools.partial(self._supervisor, instance),
                notify,
            )
        own = [remote.supervisor for remote in self._instances.values()]
        for instance in devices.lendable(config):  # of the trainer's processes
            first = (instance - config.rollout.instances) * config.cluster.hosts_per_instance
            launcher = LentLauncher(self._launcher.ip, lambda: self._trainer.gang, instance, first)
            self._instances[instance] = RemoteInstance(
                run.instance_up(instance, config),
                parts.outbox,
                self.weights,
                functools.partial(self._supervisor, instance, launcher=launcher),
                notify,
                on_demand=True,
            )
        self._scaler = InstanceScaler(wish_at(self._place), own, notify) if config.cluster.elastic else None
        self._registry.announce(self._listener.address)
        self._closed = False
        self._trainer.supervisor.start()
        for remote in self._instances.values():
            remote.supervisor.start()

    def trainer_side(self) -> TrainerSide:
        checkpoints = RemoteCheckpoints(self._steps, self._parts.config.checkpoint, self._trainer, self._notify)
        if self._past:  # a trainer that is taken over may be about to finish one
            self._trainer.catch_up()
            checkpoints.wait()
        self._steps.tidy()
        return TrainerSide(
            trainer=self._trainer,
            checkpoints=checkpoints,
            digest=RemoteTrainer.digest,
            pack=part,
            views=self._trainer.take,
            gaps=self._trainer.gaps if self._parts.config.trainer.max_instance_mismatch else None,
        )

    def instances(self) -> list[RemoteInstance]:
        return list(self._instances.values())

    def ready(self, instances: Sequence[RemoteInstance], worker: Worker | None) -> list[InstanceUp]:
        """Waits for no instance: each reports itself when it is up."""
        self.weights.settle()
        if worker is not None:
            self._trainer.on_up = lambda: worker.post(self._trainer.catch_up)
        return []

    def close(self) -> None:
        """Ends all gangs. It may be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._scaler:
            self._scaler.close()
        self._trainer.supervisor.close()
        for instance in self._instances.values():
            instance.stop()
        self.weights.close()
        self._listener.close()
        self._launcher.close()
        self._registry.close()

    # ------------------------------------------------------------ private

    def _supervisor(
        self, instance: InstanceId | None, name: str, launcher: Launcher | None = None, **hooks: Any
    ) -> GangSupervisor:
        section = self._parts.config.cluster
        hosts, slice_type = (
            (section.trainer_hosts, section.trainer_slice)
            if instance is None
            else (section.hosts_per_instance, section.instance_slice)
        )

        def begin(rank: int, coordinator: str, leader: str) -> Begin:
            return Begin(
                config=self._tree,
                workdir=self._place,
                instance=instance,
                rank=rank,
                hosts=hosts,
                coordinator=coordinator,
                leader=leader,
            )

        limits = GangLimits(
            heartbeat_timeout_s=section.heartbeat_timeout_s,
            stall_timeout_s=section.stall_timeout_s,
            start_s=section.start_s,
            restarts=section.max_restarts,
            elastic=section.elastic and instance is not None,
        )
        return GangSupervisor(
            self._listener,
            launcher or self._launcher,
            name,
            hosts,
            slice_type,
            begin=begin,
            notify=self._notify,
            limits=limits,
            **hooks,
        )

    def _steps_since(self, version: Version) -> Sequence[Step]:
        try:
            return recovery.steps_since(EventLog(log_at(f"{self._place}/{JOURNAL}", read_only=True)), version)
        except OSError as error:
            raise StoreError(str(error)) from error


def gang_config(config: Config) -> dict[str, Any]:
    """The configuration that gangs are begun with. Without a journal no later controller could take them over, so
    they end
    with this one."""
    section = config.cluster
    mine = ClusterSection(
        wire=section.wire,
        encrypt=section.encrypt,
        trainer_slice=section.trainer_slice,
        instance_slice=section.instance_slice,
        reattach_s=section.reattach_s if config.journal.on else 0.0,
    )
    return configs.to_json(dataclasses.replace(config, cpu_devices=section.devices_per_host, cluster=mine))


def wish_at(place: str) -> Callable[[], str | None]:
    """Reads the file of the wanted instances, None without one. `place`: a workdir, which may be a URL.

    ConfigError where the file has its former name, or cannot be read.
    """

    def read(name: str) -> bytes | None:
        if "://" in place:
            return Objects(place).get(name)
        try:
            return path.read_bytes() if (path := Path(place) / name).exists() else None
        except OSError as error:
            raise ConfigError(f"workdir: {place}/{name} cannot be read ({error.strerror}): {WANTED_ADVICE}") from error

    def wish() -> str | None:
        if read(FORMER_WANTED) is not None:
            raise ConfigError(f"workdir: {place}/{FORMER_WANTED} is not read, for its name is {WANTED}; rename it")
        return None if (data := read(WANTED)) is None else data.decode(errors="replace").strip()

    return wish


class InstanceScaler:
    """Reads the wish once before it returns, so that no gang is started for nothing; then on a thread of its own.

    ConfigError: at the start the wish is no number of gangs. While the run goes on, it only says so.
    """

    def __init__(
        self,
        wish: Callable[[], str | None],
        instances: Sequence[GangSupervisor],
        notify: Callable[[str], None],
        look_s: float = LOOK_S,
    ):
        self._wish, self._instances, self._notify = wish, instances, notify
        self._look_s = look_s
        self._text: str | None = None  # as it was read last; None: no file
        self._closed = threading.Event()
        self._started = False
        self._look()
        self._started = True
        self._thread = threading.Thread(target=self._run, name="instances", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    # ------------------------------------------------------------ private

    def _run(self) -> None:
        try:
            while not self._closed.wait(self._look_s):
                self._look()
        except ConfigError as error:
            self._notify(f"{error}; until the next start the number of instances stays")

    def _look(self) -> None:
        try:
            text = self._wish()
        except StoreError:
            return  # of which others speak
        if text in (self._text, ""):  # empty: somebody is about to write it
            return
        self._text = text
        most = len(self._instances)
        n = most if text is None else int(text) if re.fullmatch(r"\d{1,9}", text) else 0
        if not 1 <= n <= most:
            wrong = f"{WANTED}: {text!r:.60} is no number of rollout gangs from 1 to {most}"
            if not self._started:
                raise ConfigError(f"workdir: {wrong}: {WANTED_ADVICE}")
            self._notify(f"{wrong}; nothing is changed")
            return
        self._notify(f"{n} of {most} rollout gangs are wanted from now on")
        for number, instance in enumerate(self._instances):
            instance.want(number < n)
