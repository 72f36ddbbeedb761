"""A world for the orchestrator's tests: engines, rewards and a trainer in virtual time, with faults on request.

It checks what a body would suffer from: a slot used twice, a version that is not loaded, a drop under running
samples, a sample started twice or lost. Every random choice is a hash of (seed, what it is about), so no choice
depends on the order of the others.
"""

from __future__ import annotations

import heapq

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.types import SampleId, issued_first_as
from tests.fakes.orchestrator_audit import Audit
from tests.fakes.orchestrator_shape import Engine, Run, Shape, chance


class World(Audit):
    def __init__(self, config: OrchestratorConfig, shape: Shape, orchestrator: Orchestrator | None = None, **kwargs):
        self.config, self.shape = config, shape
        self.begun_with = tuple(kwargs.get("redo", ()))  # prompts of a run before, more perhaps than are trained
        self.brain = orchestrator or Orchestrator(config, **kwargs)
        self.heap: list[tuple[float, int, ev.Event | tuple]] = []
        self.sequence = 0
        self.now_s = 0.0
        self.engines: dict[int, Engine] = {}
        self.recorded: dict[SampleId, Run] = {}  # tokens of samples that run nowhere
        self.waiting: dict[SampleId, Run] = {}  # for their environments
        self.flying: dict[SampleId, tuple[Run, ev.Move, Engine, Engine | None]] = {}
        self.spans: dict[SampleId, list[int]] = {}
        self.started: dict[SampleId, int] = {}
        self.ended: dict[SampleId, str] = {}
        self.ends: dict[SampleId, int] = {}
        self.finished: dict[int, set[int]] = {}
        self.group_version: dict[int, int] = {}
        self.trained: list[tuple[int, tuple[int, ...]]] = []  # base, groups
        self.given_up: set[SampleId] = set()  # ended by Cancel
        self.given_up_ids: set[int] = set()  # groups of which something was cancelled
        self.discarded: set[int] = set()
        self.first_version = self.published = kwargs.get("start_version", 0)
        self.filtered_ids: list[int] = []
        self.failed_ids: list[int] = []
        self.refused_ids: set[int] = set()
        self.evaluated: dict[int, list[int]] = {}
        self.stop: ev.Halt | None = None
        self.log: list[tuple[ev.Event, tuple[ev.Command, ...]]] = []
        self.births = self.epoch = 0
        self.retired: set[int] = set()
        for i in range(len(shape.instances)):
            self.at(0.0, ("up", i))
        self.at(0.0, ("clock",))

    # ------------------------------------------------------------------ time

    def at(self, delay_s: float, what: ev.Event | tuple) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (self.now_s + delay_s, self.sequence, what))

    def run(self, *, max_events: int = 200_000, after=None) -> World:
        """Until Halt. `after(world, event, commands)` is called after each event."""
        while self.stop is None:
            if not self.heap or len(self.log) > max_events:
                raise AssertionError(f"stalled at {self.now_s:.1f} s: {self.brain.summary()}")
            self.now_s, _, what = heapq.heappop(self.heap)
            for event in self.facts(what):
                self.feed(event, after)
        return self

    def feed(self, event: ev.Event, after=None) -> None:
        if self.stop is not None:
            return
        commands = self.brain.step(event)
        self.log.append((event, commands))
        if after is not None:
            after(self, event, commands)
        for command in commands:
            getattr(self, "do_" + type(command).__name__.lower())(command)

    # ------------------------------------------------------------------ facts

    def facts(self, what: ev.Event | tuple) -> list[ev.Event]:
        if not isinstance(what, tuple):
            return [what]
        if what[0] in ("begin", "progress") and (engine := self.engines.get(what[1])) and engine.paused:
            return self.at(0.05, what) or []
        return getattr(self, "on_" + what[0])(*what[1:])

    def on_clock(self) -> list[ev.Event]:
        self.at(self.shape.period_s / 2, ("clock",))
        reports = [
            ev.InstanceReported(instance=i, free=self.free(e), incarnation=e.incarnation)
            for i, e in self.engines.items()
        ]
        return [*(reports if self.shape.reports_pages else ()), ev.TimePassed(now_s=self.now_s)]

    def report(self, i: int, engine: Engine) -> ev.InstanceReported:
        free = self.free(engine) if self.shape.reports_pages else self.shape.pages
        return ev.InstanceReported.of(
            i, free, {r.id: r.tokens for r in engine.runs.values() if r.tokens}, engine.incarnation
        )

    def free(self, engine: Engine) -> int:
        used = sum(-(-(self.shape.prompt_tokens + run.tokens) // self.shape.page_size) for run in engine.runs.values())
        return max(0, self.shape.pages - used)

    def on_up(self, i: int) -> list[ev.Event]:
        slots, speed, residents = self.shape.instances[i]
        self.births += 1
        self.engines[i] = Engine(slots, speed, residents, self.births)
        if chance(self.shape.seed, "death", i, self.births) < self.shape.deaths:
            self.at(self.shape.uptime_s * chance(self.shape.seed, "life", i, self.births), ("down", i))
        return [
            ev.InstanceUp(
                instance=i,
                slots=slots,
                pages=self.shape.pages,
                page_size=self.shape.page_size,
                residents=residents,
                speed=speed,
                incarnation=self.births,
            )
        ]

    def on_down(self, i: int) -> list[ev.Event]:
        if self.shape.back_s < 0 and len(self.engines) == 1:
            return []
        engine = self.engines.pop(i)
        for run in engine.runs.values():
            if run.began:
                self.advance(run, engine)
            if run.id in self.started:
                self.recorded[run.id] = run
        if self.shape.back_s >= 0:
            self.at(self.shape.back_s, ("up", i))
        return [ev.InstanceDown(instance=i, reason="killed by the test", incarnation=engine.incarnation)]

    def on_loaded(self, i: int, version: int, engine: Engine) -> list[ev.Event]:
        if self.engines.get(i) is not engine:
            return []
        engine.loading = None
        engine.versions.append(version)
        return [ev.WeightsLoaded(instance=i, version=version, incarnation=engine.incarnation)]

    def on_begin(self, i: int, run: Run, epoch: int, resumed: bool) -> list[ev.Event]:
        if run.epoch != epoch or i not in self.engines or self.engines[i].runs.get(run.id) is not run:
            return []
        run.began = True
        run.started_s = self.now_s
        self.schedule(run, i)
        incarnation = self.engines[i].incarnation
        if resumed:
            return [ev.SampleResumed(id=run.id, instance=i, incarnation=incarnation, attempt=run.attempt)]
        self.started[run.id] = self.started.get(run.id, 0) + 1
        assert self.started[run.id] == 1, f"{run.id} is started twice"
        return [
            ev.SampleStarted(id=run.id, instance=i, version=run.version, incarnation=incarnation, attempt=run.attempt)
        ]

    def on_progress(self, i: int, run: Run, epoch: int) -> list[ev.Event]:
        if run.epoch != epoch or i not in self.engines:
            return []
        self.advance(run, self.engines[i])
        if run.tokens < run.stop:
            self.schedule(run, i)
            return [self.report(i, self.engines[i])]
        del self.engines[i].runs[run.id]
        self.epoch += 1
        run.epoch = self.epoch
        return self.done(run, i) if run.turn == run.turns else self.wait(run, i)

    def wait(self, run: Run, i: int) -> list[ev.Event]:
        self.waiting[run.id] = run
        run.turn += 1
        seed, shape = self.shape.seed, self.shape
        self.at(2 * shape.environment_s * chance(seed, "wait", run.id, run.turn), ("answer", run, run.epoch))
        kept = chance(seed, "kept", run.id, run.turn) < 0.5
        here = {"instance": i, "incarnation": self.engines[i].incarnation, "attempt": run.attempt}
        return [ev.SampleWaiting(id=run.id, tokens=run.tokens, kept=kept, **here)]

    def on_answer(self, run: Run, epoch: int) -> list[ev.Event]:
        if self.waiting.get(run.id) is not run or run.epoch != epoch:
            return []
        key = (self.shape.seed, run.id, run.turn)
        group_id = run.id.group_id
        del self.waiting[run.id]
        self.recorded[run.id] = run
        if chance(*key, "breaks") < self.shape.breaks:
            self.failed_ids.append(group_id)
            return [ev.GroupFailed(group_id=group_id, reason="its environment broke")]
        if chance(*key, "ends") < 0.2:
            return self.done(run, None)
        return [ev.SampleReady(id=run.id, tokens=run.tokens, attempt=run.attempt)]

    def done(self, run: Run, i: int | None) -> list[ev.Event]:
        self.end(run.id, "done")
        self.finished.setdefault(run.id.group_id, set()).add(run.id.index)
        n = self.config.eval_samples if run.id.group_id < 0 else self.config.group_size
        if len(self.finished[run.id.group_id]) == n:
            self.at(self.shape.score_s, ("score", run.id.group_id))
        incarnation = 0 if i is None else self.engines[i].incarnation
        return [ev.SampleDone(id=run.id, instance=i, tokens=run.tokens, finish="stop", incarnation=incarnation)]

    def end(self, id: SampleId, how: str) -> None:
        assert id not in self.ended, f"{id} ends twice: {self.ended[id]}, {how}"
        self.ended[id] = how
        self.ends[id] = self.ends.get(id, 0) + 1

    def on_score(self, group_id: int) -> list[ev.Event]:
        if group_id in self.given_up_ids:
            return []
        key = (self.shape.seed, group_id)
        if chance(*key, "failed") < self.shape.failed:
            self.failed_ids.append(group_id)
            return [ev.GroupFailed(group_id=group_id, reason="the reward raised")]
        if group_id < 0:
            self.evaluated.setdefault(self.group_version[group_id], []).append(group_id)
            return [ev.GroupScored(group_id=group_id, trainable=False)]
        trainable = chance(*key, "filtered") >= self.shape.filtered
        if not trainable:
            self.filtered_ids.append(group_id)
        return [ev.GroupScored(group_id=group_id, trainable=trainable)]

    def on_moved(self, id: SampleId) -> list[ev.Event]:
        run, move, source, target = self.flying.pop(id)
        src, dst = move.src, move.dst
        self.epoch += 1
        run.epoch, run.started_s = self.epoch, self.now_s
        fails = chance(self.shape.seed, "move", id, src, dst, self.epoch) < self.shape.move_fails
        if target is not None and self.engines.get(dst) is target and not fails:
            run.attempt = move.attempt
            self.host(run, dst)
            self.schedule(run, dst)
            return [ev.SampleMoved(id=id, src=src, dst=dst, attempt=move.attempt)]
        if self.engines.get(src) is source:
            self.host(run, src)
            self.schedule(run, src)
        else:
            self.recorded[id] = run
        return [ev.MoveFailed(id=id, src=src, dst=dst, attempt=move.attempt, reason="the test wants it")]

    def on_published(self, version: int) -> list[ev.Event]:
        assert all(engine.paused for engine in self.engines.values()) == self.config.colocated or not self.engines
        self.published = version
        return [ev.StepPublished(version=version)]

    # ------------------------------------------------------------------ engines

    def length(self, id: SampleId) -> int:
        """Long-tailed: 1 in 8 samples is long."""
        u = chance(self.shape.seed, "length", id)
        top = self.config.max_new_tokens
        return max(1, int(top * (u / 4 if u < 0.875 else u)))

    def advance(self, run: Run, engine: Engine) -> None:
        elapsed = (self.now_s - run.started_s) * engine.speed / self.shape.token_s
        run.tokens = min(run.stop, run.tokens + (0 if engine.paused else round(elapsed)))
        run.started_s = self.now_s

    def schedule(self, run: Run, i: int) -> None:
        tokens = min(run.stop - run.tokens, max(1, run.length // 2))
        self.at(tokens * self.shape.token_s / self.engines[i].speed, ("progress", i, run, run.epoch))

    def host(self, run: Run, i: int) -> None:
        engine = self.engines[i]
        assert run.version in engine.versions, f"{run.id} goes to instance {i}, which has {engine.versions}"
        assert len(engine.runs) < engine.slots, f"instance {i} has no slot for {run.id}"
        assert run.id not in engine.runs
        assert run.id not in self.ended, f"{run.id} runs after its end"
        engine.runs[run.id] = run
        spans = self.spans.setdefault(run.id, [])
        if not spans or spans[-1] != run.version:
            spans.append(run.version)

    # ------------------------------------------------------------------ commands

    def do_loadweights(self, command: ev.LoadWeights) -> None:
        engine = self.engines[command.instance]
        assert command.version <= self.published and command.version not in self.retired
        if command.drop is not None:
            held = [r.id for r in engine.runs.values() if r.version == command.drop]
            assert not held, f"{command} drops the version of {held}"
            engine.versions.remove(command.drop)
        assert engine.loading is None and len(engine.versions) < engine.residents
        engine.loading = command.version
        self.at(self.shape.load_s, ("loaded", command.instance, command.version, engine))

    def do_start(self, command: ev.Start) -> None:
        for id in command.ids:
            assert id not in self.ended and id.group_id not in self.given_up_ids, f"{id} starts over"
            if chance(self.shape.seed, "refused", issued_first_as(id.group_id)) < self.shape.refused:
                self.refuse(id.group_id)
                continue
            self.epoch += 1
            run = Run(id, command.version, 0, self.length(id), self.now_s, self.epoch, attempt=command.attempt)
            run.turns = 1 + int(self.shape.turns * chance(self.shape.seed, "turns", id))
            tagged = self.group_version.setdefault(id.group_id, command.version)
            assert tagged == command.version or self.config.decisions.mixes_versions, f"{command} mixes versions"
            self.group_version[id.group_id] = command.version
            self.host(run, command.instance)
            self.at(0.01, ("begin", command.instance, run, run.epoch, False))

    def refuse(self, group_id: int) -> None:
        if group_id not in self.refused_ids:
            self.refused_ids.add(group_id)
            self.at(0.0, ev.GroupFailed(group_id=group_id, reason="the prompt is too long"))

    def do_resume(self, command: ev.Resume) -> None:
        for id in command.ids:
            run = self.recorded.pop(id, None) or self.waiting.pop(id)  # it waited, which nobody knew
            assert run.version == command.version or self.config.decisions.mixes_versions, f"{command} mixes versions"
            self.epoch += 1
            run.version, run.epoch, run.began = command.version, self.epoch, False
            run.attempt = command.attempt
            self.host(run, command.instance)
            self.at(0.05, ("begin", command.instance, run, run.epoch, True))

    def do_move(self, command: ev.Move) -> None:
        for id in command.ids:
            run = self.take_off(id, command.src)
            if run is not None:
                source, target = self.engines[command.src], self.engines.get(command.dst)
                self.flying[id] = (run, command, source, target)
                self.at(self.shape.move_s * (0.5 + chance(self.shape.seed, "slow", id)), ("moved", id))

    def do_park(self, command: ev.Park) -> None:
        for id in command.ids:
            run = self.take_off(id, command.instance)
            if run is not None:
                self.recorded[id] = run
                self.at(0.02, ("parked", id, command.instance, run.attempt))

    def take_off(self, id: SampleId, instance: int) -> Run | None:
        """Stop a sample where it is; None: it had just ended, which is reported instead."""
        engine = self.engines[instance]
        run = engine.runs.pop(id)
        self.advance(run, engine)
        self.epoch += 1
        run.epoch = self.epoch
        if run.tokens < run.stop:
            return run
        for event in self.done(run, instance) if run.turn == run.turns else self.wait(run, instance):
            self.at(0.0, event)
        return None

    def on_parked(self, id: SampleId, instance: int, attempt: int) -> list[ev.Event]:
        engine = self.engines.get(instance)
        return (
            [ev.SampleParked(id=id, instance=instance, incarnation=engine.incarnation, attempt=attempt)]
            if engine
            else []
        )

    def do_discard(self, command: ev.Discard) -> None:
        assert command.group_id not in self.discarded, f"group {command.group_id} ends twice"
        self.discarded.add(command.group_id)
        self.given_up_ids.add(command.group_id)

    def do_cancel(self, command: ev.Cancel) -> None:
        self.given_up_ids |= {id.group_id for id in command.ids}
        for id in command.ids:
            if command.instance is None:
                run = self.recorded.pop(id, None) or self.waiting.pop(id, None)
            else:
                engine = self.engines.get(command.instance)
                run = engine.runs.pop(id, None) if engine else None
            if run is not None:
                self.epoch += 1
                run.epoch = self.epoch
            if id not in self.ended:
                if id in self.started:
                    self.end(id, "cancelled")
                    self.given_up.add(id)
                self.at(0.02, ev.SampleCancelled(id=id, reason=command.reason))

    def do_train(self, command: ev.Train) -> None:
        assert command.base_version == self.published
        base, groups = self.trained.pop() if self.trained and self.trained[-1][0] == self.published else (None, ())
        assert base is None or len(groups) < self.config.groups_per_step, "a step is trained twice"
        self.trained.append((command.base_version, groups + command.group_ids))
        if len(groups + command.group_ids) == self.config.groups_per_step:
            self.at(self.shape.train_s, ("published", command.base_version + 1))

    def do_pause(self, command: ev.Pause | ev.Unpause) -> None:
        engine, pause = self.engines[command.instance], isinstance(command, ev.Pause)
        assert engine.paused != pause, f"{command}: instance {command.instance} already does"
        for run in filter(lambda run: run.began, engine.runs.values()):
            self.advance(run, engine)
        engine.paused = pause

    do_unpause = do_pause

    def do_retire(self, command: ev.Retire) -> None:
        for engine in self.engines.values():
            assert not any(r.version == command.version for r in engine.runs.values())
            assert engine.loading != command.version
        assert self.config.decisions.mixes_versions or command.version not in {
            run.version for run in self.waiting.values()
        }
        self.retired.add(command.version)

    def do_halt(self, command: ev.Halt) -> None:
        self.stop = command
