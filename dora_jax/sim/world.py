"""A `World` without devices: commands become appointments in virtual time, appointments become events.

Consumes the orchestrator's commands and a workload, produces the facts that a real body would report. The same
`orchestrate.loop.run` drives it; a call of `events` moves the clock to the next moment at which something happens.

Law of the trainer's chips, which may be lent to the rollouts: it begins nothing while an instance has them.
Laws: nothing here decides; every command is answered as the orchestrator's page says; the same configuration gives the
same run. If nothing is left to happen the run has stalled, and that raises.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from dora_jax.costs import Costs, open_costs
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.modes import Decisions
from dora_jax.sim import instance as inst
from dora_jax.sim import prefill
from dora_jax.sim import workload as work
from dora_jax.sim.config import SimConfig
from dora_jax.sim.instance import Job, SimInstance
from dora_jax.sim.meter import EndOfMeasurement, Meter, Trace
from dora_jax.sim.network import Network
from dora_jax.sim.trainer import SimGroup, SimTrainer
from dora_jax.sim.workload import Workload
from dora_jax.types import GroupId, InstanceId, SampleId, Version

# A run stalls after so many periods in which only the clock ticks.
STALLED_PERIODS = 10_000
# The orchestrator learns the time with every fact, but not finer than this share of a rebalance period.
CLOCK_SHARE = 1e-3

_TO_ONE = (ev.Start, ev.LoadWeights, ev.Park, ev.Resume, ev.Pause, ev.Unpause, ev.Return)


class SimWorld:
    """See the page. `until`: the version whose publication ends the simulation; `decisions`: of the mode that runs."""

    def __init__(self, config: SimConfig, decisions: Decisions, *, until: Version, trace: Trace | None = None):
        self.now = 0.0
        # A heap: when, which of one moment, what is called, and with what.
        self._appointments: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._agreed = itertools.count()
        self.costs: Costs = open_costs(config.model, config.hardware, config.cost)
        self.meter = Meter(config, decisions)
        self._config, self._cost = config, config.cost
        self._swapped_kv = config.orchestrator.swapped_kv if decisions.mixes_versions else "parked"
        self._repartitions, self._balanced = decisions.repartitions, 0  # the newest version that they balanced for
        self._until, self._trace = until, trace
        self._workload, self._seed = Workload(config.workload), config.workload.seed
        hardware = config.hardware
        self._network = Network(
            self.costs.load_s(), hardware.trainer_chips // hardware.instance_chips, config.orchestrator.peer_weights
        )
        self._instances: dict[InstanceId, SimInstance] = {}
        self._live: dict[Version, int] = {}
        self._incarnations = [0] * (hardware.instances + len(hardware.lendable))  # how often each instance came up
        self._away: dict[SampleId, Job] = {}  # parked, recorded, or on their way
        self._groups: dict[GroupId, SimGroup] = {}
        self._ready: set[GroupId] = set()
        self._trainer = SimTrainer(config.orchestrator, self.costs)
        pools = hardware.prefill_chips // hardware.instance_chips
        self._prefill_pool = prefill.PrefillPool(self.costs, pools) if hardware.prefill_chips else None
        self._lendable = frozenset(hardware.lendable)
        self._out: dict[InstanceId, float] = {}  # lent instances, since when their chips are not the trainer's
        self._returning: set[InstanceId] = set()
        self._wanted_s: float | None = None  # since when the trainer waits for its chips
        self._outbox: list[ev.Event] = []
        self._quiet, self._ticked_s = 0, 0.0
        self._clock_s = CLOCK_SHARE * config.orchestrator.rebalance_period_s
        for id in range(hardware.instances):
            self._up(id, versions=(0,))
        self._at(0.0, self._clock)

    # ------------------------------------------------------------------ World

    def events(self) -> list[ev.Event]:
        """The facts of the next moment at which there are any."""
        while not self._outbox:
            if not self._appointments:
                raise RuntimeError(f"the run stalled after {self.now:.0f} s: nothing is left to happen")
            self.now, _, call, args = heapq.heappop(self._appointments)
            call(*args)
        out = self._outbox.copy()
        self._outbox.clear()
        if self.now - self._ticked_s >= self._clock_s:
            self._ticked_s = self.now
            out.insert(0, ev.TimePassed(now_s=self.now))
        return out

    def execute(self, command: ev.Command) -> None:
        self._quiet = 0
        if not isinstance(command, _TO_ONE) or command.instance in self._instances:
            self._COMMANDS[type(command)](self, command)  # else it is lost, and the fact that says so on its way

    # ------------------------------------------------------------------ commands

    def _start(self, command: ev.Start) -> None:
        instance = self._touch(command.instance)
        for id in command.ids:
            self._groups.setdefault(id.group_id, SimGroup(command.version, self._workload.task(id.group_id)))
            prompt, turns = self._workload.prompt_tokens(id.group_id), self._workload.turns(id)
            instance.submit(Job(id, command.version, prompt, turns, command.attempt), "start")
        self._schedule(instance)

    def _load(self, command: ev.LoadWeights) -> None:
        instance = self._touch(command.instance)
        instance.loading = True
        self.meter.reloads += 1
        self.meter.weight_bytes += self.costs.weight_bytes
        if self._config.orchestrator.stride != 1:
            self._balance(command.version)
        self._at(self._network.bring(self.now, command), self._loaded, instance, command)
        self._schedule(instance)

    def _move(self, command: ev.Move) -> None:
        src = self._touch(command.src) if command.src in self._instances else None
        for id in command.ids:
            job = src.take(id) if src else None
            if src is None or job is None:
                way: dict[str, Any] = {"id": id, "src": command.src, "dst": command.dst, "attempt": command.attempt}
                self._notify(ev.MoveFailed(**way, reason="it is not there any more"))
                continue
            self._away[id] = job
            end = self._network.move(self.now, src.id, command.dst, self.costs.move_s(job.cached))
            self._at(end, self._arrive, job, src, self._instances.get(command.dst), command)
        if src:
            self._schedule(src)

    def _park(self, command: ev.Park) -> None:
        """Its KV leaves the devices; where weights are swapped under a sample, see `swapped_kv`."""
        instance = self._touch(command.instance)
        end = self.now
        for id in command.ids:
            job = instance.take(id)
            if job is not None:
                self._away[id] = job
                end += self.costs.park_s(job.cached) if self._swapped_kv == "parked" else 0.0
                job.cached *= self._swapped_kv != "dropped"
                self._at(end, self._brought, job, instance, ev.SampleParked)
        self._schedule(instance)

    def _resume(self, command: ev.Resume) -> None:
        instance = self._touch(command.instance)
        end = self.now
        for id in command.ids:
            job = self._away[id]
            if job.version != command.version:  # other weights: its KV is of no use, or used all the same
                job.version = command.version
                job.cached *= self._swapped_kv == "reused"
                job.mixed |= job.sampled > 0
            job.attempt, job.arrival = command.attempt, "" if job.cached else "resume"
            if job.cached:
                end += 0.0 if self._swapped_kv == "reused" else self.costs.park_s(job.cached)
                self._at(end, self._brought, job, instance, ev.SampleResumed)
            else:
                del self._away[id]
                self.meter.reprefilled += job.tokens
                instance.submit(job, "resume")
        self._schedule(instance)

    def _cancel(self, command: ev.Cancel) -> None:
        for id in command.ids:
            instance = None if command.instance is None else self._instances.get(command.instance)
            job = None
            if instance is not None:
                instance.advance(self.now)
                job = instance.take(id)
                self._schedule(instance)
            if job is None:
                job = self._away.pop(id, None)
            if job is not None:
                self.meter.cancelled_tokens += job.sampled
            if job is not None or command.instance is not None:
                self._notify(ev.SampleCancelled(id=id, reason=command.reason))
            self._ready.discard(id.group_id)  # a group of which something was cancelled will not be trained
            self._groups.pop(id.group_id, None)

    def _discard(self, command: ev.Discard | ev.Retire) -> None:
        if isinstance(command, ev.Discard):
            self._ready.discard(command.group_id)
            self._groups.pop(command.group_id, None)

    def _train(self, command: ev.Train) -> None:
        groups = [self._groups.pop(g) for g in command.group_ids]
        if self._out:
            raise RuntimeError(f"the trainer begins while instances {sorted(self._out)} have its chips")
        if self._wanted_s is not None:
            self.meter.late_s = max(self.meter.late_s, self.now - self._wanted_s)
            self._wanted_s = None
        self._ready.difference_update(command.group_ids)
        if not self._trainer.busy:
            self.meter.train_begins(self.now, self._all())
            self._trainer_works(True)
        self.meter.trained(command.base_version, groups)
        begin, end, last = self._trainer.begins(self.now, groups)
        if self._trace:
            self._trace.train(begin, end, command)
        self._at(end, self._part_trained, command.base_version + 1, last)

    def _trainer_works(self, works: bool) -> None:
        """Instances that share its machine are slower meanwhile."""
        if self.costs.contention == 1.0:
            return
        for instance in self._all():
            instance.slowed = self.costs.contention if works else 1.0
            self._schedule(instance)

    def _pause(self, command: ev.Pause | ev.Unpause) -> None:
        instance = self._touch(command.instance)
        instance.paused = isinstance(command, ev.Pause)
        self._schedule(instance)

    def _lend(self, command: ev.Lend) -> None:
        if command.instance in self._out:
            raise RuntimeError(f"instance {command.instance} is lent twice")
        self._out[command.instance] = self.now
        self._at(self.now + self.costs.lend_s(), self._up, command.instance, (command.version,))

    def _reclaim(self, command: ev.Return) -> None:
        """The KV of its samples goes to host memory before the instance is down."""
        instance = self._touch(command.instance)
        jobs = instance.clear(keeps_kv=True)
        self._returning.add(instance.id)
        instance.paused = True
        if self._wanted_s is None:
            self._wanted_s = self.now
        self._at(self.now + self.costs.return_s(*(job.cached for job in jobs)), self._down, instance, jobs)

    _COMMANDS: ClassVar[dict[type, Callable[[SimWorld, Any], None]]] = {
        ev.Start: _start, ev.LoadWeights: _load, ev.Move: _move, ev.Park: _park, ev.Resume: _resume,
        ev.Cancel: _cancel, ev.Train: _train, ev.Retire: _discard,
        ev.Pause: _pause, ev.Unpause: _pause,
        ev.Discard: _discard, ev.Lend: _lend, ev.Return: _reclaim,
    }  # fmt: skip

    # ------------------------------------------------------------------ appointments

    def _clock(self) -> None:
        self.meter.live(len(self._live))
        self._quiet += 1
        if self._quiet > STALLED_PERIODS:
            raise RuntimeError(f"the run stalled after {self.now:.0f} s: only the clock goes on")
        self._ticked_s = self.now
        self._notify(ev.TimePassed(now_s=self.now))
        self._at(self.now + self._config.orchestrator.rebalance_period_s, self._clock)

    def _wake(self, instance: SimInstance, wakeup: int) -> None:
        if wakeup != instance.wakeup:
            return
        instance.advance(self.now)
        for what, job in instance.happen():
            if what == inst.ENTERED:
                if job.arrival == "start":
                    self._notify(ev.SampleStarted(id=job.id, version=job.version, **instance.where(job)))
                elif job.arrival == "resume":
                    self._notify(ev.SampleResumed(id=job.id, **instance.where(job)))
                job.arrival = ""
            elif what == inst.STOPPED:
                if job.turn < len(job.turns) - 1:
                    self._ask(instance, job)
                    continue
                done = ev.SampleDone(
                    id=job.id, instance=instance.id, tokens=job.response, finish="stop",
                    incarnation=instance.incarnation,
                )  # fmt: skip
                self._notify(done)
                if self._trace:
                    self._trace.last_done[job.id.group_id] = (self.now, instance.id)
                group = self._groups.get(job.id.group_id)
                if group is None:
                    continue
                group.ended(job)
                if group.done == self._config.orchestrator.group_size:
                    self._at(self.now + self.costs.score_s, self._scored, job.id.group_id, group)
            else:
                progress = {
                    id: job.response + int(instance.ticks - job.join + inst.TICK_EPS)  # whole tokens
                    for id, job in instance.decoding.items()
                }
                free = instance.free_tokens // self._config.hardware.page_size
                self._notify(
                    ev.InstanceReported.of(
                        instance.id, free, progress, instance.incarnation, **instance.decoded.measured()
                    )
                )
        self._schedule(instance)

    def _ask(self, instance: SimInstance, job: Job) -> None:
        """The environment answers the turn that has stopped after a while, and the sample goes on with what it
        answered.

        A sample that waits holds no slot, and its KV is in host memory until a Resume brings it back. With hold_slots
        nobody hears of the wait: the sample keeps slot and KV where it is, as in an engine that knows no waiting.
        """
        due_s = self.now + job.turns[job.turn].environment_s
        if self._config.orchestrator.hold_slots:
            instance.wait_for_environment(job)
            self._at(due_s, self._answered, job, instance)
            return
        self._away[job.id] = job
        self.meter.waits(self.now, 1)
        way: dict[str, Any] = {"incarnation": instance.incarnation, "attempt": job.attempt}
        self._notify(ev.SampleWaiting(id=job.id, instance=instance.id, tokens=job.response, **way))
        self._at(due_s, self._answered, job, None)

    def _answered(self, job: Job, place: SimInstance | None) -> None:
        """`place`: where it has kept its slot."""
        if place is None:
            self.meter.waits(self.now, -1)
            if self._away.get(job.id) is job:  # else its group was given up
                job.observe()
                self._notify(ev.SampleReady(id=job.id, tokens=job.response, attempt=job.attempt))
        elif place.waiting.get(job.id) is job:
            place.advance(self.now)
            place.answered(job)
            self._schedule(place)

    def _scored(self, group_id: GroupId, group: SimGroup) -> None:
        if self._groups.get(group_id) is not group:
            return  # evicted meanwhile
        if self._workload.failed(group_id):
            del self._groups[group_id]
            self._notify(ev.GroupFailed(group_id=group_id, reason="its reward could not be computed"))
            return
        trainable = not self._workload.filtered(group_id)
        if trainable:
            self._ready.add(group_id)
            self.meter.ready(self.now, len(self._ready))
        else:
            del self._groups[group_id]
            self.meter.filtered += 1
        self._notify(ev.GroupScored(group_id=group_id, trainable=trainable))

    def _loaded(self, instance: SimInstance, command: ev.LoadWeights) -> None:
        if self._instances.get(instance.id) is instance:
            instance.advance(self.now)
            instance.loading = False
            self._network.loaded(instance.id, command.version)
            self._schedule(instance)
            loaded = ev.WeightsLoaded(
                instance=instance.id, version=command.version, incarnation=instance.incarnation, attempt=command.attempt
            )
            self._notify(loaded)

    def _arrive(self, job: Job, src: SimInstance, dst: SimInstance | None, move: ev.Move) -> None:
        if self._away.get(job.id) is not job:
            return  # cancelled on its way
        fate = work.uniform(self._seed, work.MOVE, *job.id, round(self.now * 1e3))
        way: dict[str, Any] = {"id": job.id, "src": src.id, "dst": move.dst, "attempt": move.attempt}
        if self._instances.get(move.dst) is dst and dst is not None and fate >= self._config.fault.failed_moves:
            self.meter.moves += 1
            self.meter.move_bytes += self.costs.kv_bytes(job.cached)
            job.attempt = move.attempt
            self._settle(job, dst)
            self._notify(ev.SampleMoved(**way))
            return
        if self._instances.get(src.id) is src:
            self._settle(job, src)
        self._notify(ev.MoveFailed(**way, reason="the transfer broke off"))

    def _settle(self, job: Job, instance: SimInstance) -> None:
        """The sample goes on where its KV is."""
        del self._away[job.id]
        self._touch(instance.id).receive(job)
        self._schedule(instance)

    def _brought(self, job: Job, instance: SimInstance, fact: type[ev.SampleParked | ev.SampleResumed]) -> None:
        """Its KV is in host memory, or back from there."""
        if self._away.get(job.id) is job and self._instances.get(instance.id) is instance:
            if fact is ev.SampleResumed:
                self._settle(job, instance)
            self._notify(fact(id=job.id, **instance.where(job)))

    def _part_trained(self, version: Version, last: bool) -> None:
        if not self._trainer.ends(self.now):
            return
        self._trainer_works(False)
        self.meter.train_ends(self.now, self._all(), len(self._ready))
        if last:
            self._at(self.now + self._cost.publish_s, self._published, version)
        elif self._config.orchestrator.elastic:
            self._notify(ev.PartTrained(base_version=version - 1, groups=self._trainer.trained))

    def _published(self, version: Version) -> None:
        self.meter.published(self.now, version, self._all(), len(self._ready))
        if self._config.orchestrator.stride == 1:
            self._balance(version)
        if version >= self._until:
            raise EndOfMeasurement
        self._notify(ev.StepPublished(version=version))

    def _balance(self, version: Version) -> None:
        """The rollouts take a version: at its publication, or, where they pass over some, when the first instance loads
        it. All versions are balanced anew."""
        if self._repartitions and self._cost.balance_s and version > self._balanced:
            self._balanced = version
            for instance in self._all():
                instance.hold(self._cost.balance_s)
                self._schedule(instance)

    # ------------------------------------------------------------------ instances

    def _up(self, id: InstanceId, versions: tuple[Version, ...] = ()) -> None:
        self._incarnations[id] += 1
        config, hardware = self._config, self._config.hardware
        more: dict[str, Any] = {"slots": hardware.slots, "page_size": hardware.page_size, "speed": hardware.speed(id)}
        more |= {"report_ticks": config.report_tokens, "draft": config.draft}
        empty = (id, self._incarnations[id], self.costs, self._live)
        pool = self._prefill_pool
        instance = prefill.DecodingInstance(pool, *empty, **more) if pool else SimInstance(*empty, **more)
        instance.time, instance.slowed = self.now, self.costs.contention if self._trainer.busy else 1.0
        self._instances[id] = instance
        self.meter.up(self.now, id)
        self._network.loaded(id, *versions)
        up = ev.InstanceUp(
            instance=id, slots=hardware.slots, pages=self.costs.pages, page_size=hardware.page_size,
            residents=hardware.residents, versions=versions, incarnation=instance.incarnation,
        )  # fmt: skip
        self._notify(up)
        fault = self._config.fault
        if fault.mtbf_s:
            uptime_s = -fault.mtbf_s * math.log(work.uniform(self._seed, work.FAULT, id, self._incarnations[id]))
            self._at(self.now + uptime_s, self._down, instance)

    def _down(self, instance: SimInstance, left: list[Job] | None = None) -> None:
        """An incarnation is over. `left`: samples that have left it as it gave its chips back, which what has come to
        it meanwhile follows; None: it is lost."""
        if left is None and (self._instances.get(instance.id) is not instance or instance.id in self._returning):
            return
        instance.advance(self.now)
        jobs = [*(left or ()), *instance.clear(keeps_kv=left is not None)]
        reason = "lost" if left is None else "returned"
        self._away.update((job.id, job) for job in jobs)
        instance.wakeup += 1
        del self._instances[instance.id]
        self._network.holds.pop(instance.id, None)
        if lent := instance.id in self._lendable:  # else its chips were never the trainer's
            self._returning.discard(instance.id)
            self.meter.lends += 1
            self.meter.lent_s += self.now - self._out.pop(instance.id)
        self.meter.lost(self.now, instance, comes_back=not lent)
        self._notify(ev.InstanceDown(instance=instance.id, reason=reason, incarnation=instance.incarnation))
        if not lent:
            self._at(self.now + self._config.fault.repair_s, self._up, instance.id)

    # ------------------------------------------------------------------ private

    def _at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        """Call it then. Calls of one moment come in the order in which they were agreed on."""
        heapq.heappush(self._appointments, (time, next(self._agreed), call, args))

    def _touch(self, id: InstanceId) -> SimInstance:
        instance = self._instances[id]
        instance.advance(self.now)
        return instance

    def _all(self) -> Iterable[SimInstance]:
        """The instances as they are now."""
        for instance in self._instances.values():
            instance.advance(self.now)
        return self._instances.values()

    def _schedule(self, instance: SimInstance) -> None:
        """Make the next appointment with an instance whose batch or state has changed; older ones are void."""
        instance.wakeup += 1
        time = instance.next_time()
        if time < math.inf:
            self._at(time, self._wake, instance, instance.wakeup)
        if self._trace:
            self._trace.state(self.now, instance)

    def _notify(self, event: ev.Event) -> None:
        """A fact takes its time to the orchestrator: the way of the command that follows from it is in it."""
        if self._cost.control_s:
            self._at(self.now + self._cost.control_s, self._outbox.append, event)
        else:
            self._outbox.append(event)
