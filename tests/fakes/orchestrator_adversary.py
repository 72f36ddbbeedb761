"""A body without time that is out to confuse the orchestrator: it keeps what a body owes, in the worst order.

Each source (an incarnation of an instance, its supervisor, the scorer, the trainer, the clock) says its facts in order;
between sources any order and any delay is possible. A fact may be sent twice. Instances die whenever they like, with
commands and facts on their way; facts of an incarnation that is over still arrive. Samples wait for environments, which
answer when they like. Facts are decided on alone or many together. The job is killed, or the orchestrator restored from
a snapshot, between any two facts. Chips of the trainer are lent, and lost on the way. Instances sample with drafts.
Rollouts pass over versions, by a stride that stays or that follows what was measured, which may change at each step.
Faults stop after `calm_after` moves, so that a run that can end does.

    python -m tests.fakes.orchestrator_adversary 5000           so many configurations, one after the other
    python -m tests.fakes.orchestrator_adversary 5000 --stride  in each rollouts pass over versions and chips are lent
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import random
from unittest import mock

from dora_jax.orchestrate import balance, stride
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import MODES, OrchestratorConfig
from dora_jax.orchestrate.snapshot import restart
from dora_jax.types import SampleId, is_eval
from tests.fakes.orchestrator_ends import Ends
from tests.fakes.orchestrator_environment import Environments, OtherSources
from tests.fakes.orchestrator_lending import Chips
from tests.fakes.orchestrator_suspicions import Suspicions
from tests.fakes.orchestrator_timeline import InFlightSample, InstanceIncarnation

MAX_MOVES = 60_000
# states of a given-up sample whose end still counts: its Cancel is out, or follows when it is parked or has moved
LEAVING = ("cancelling", "parking", "moving")
DEATH, REBIRTH, TWICE, RESTORED, KILLED, PROGRESS, SUSPICION = 0.01, 0.1, 0.1, 0.01, 0.003, 0.3, 0.003
AGAIN = 0.05  # how often a fact of the last ones is repeated


class Adversary(OtherSources):
    def __init__(
        self, config: OrchestratorConfig, sizes: list[tuple[int, int]], seed: int, calm_after: int, batched: float,
        turns: float,
    ):  # fmt: skip
        self.config, self.sizes, self.calm_after = config, sizes, calm_after
        self.batched = batched  # how likely it is that a fact waits for the next one
        self.draw = random.Random(seed)
        self.brain = Orchestrator(config)
        self.incarnations: dict[int, InstanceIncarnation] = {}
        self.born = collections.Counter()
        self.says: dict[object, collections.deque] = collections.defaultdict(collections.deque)
        self.dead: list[InstanceIncarnation] = []  # whose facts still arrive
        self.requests: list[InFlightSample] = []
        self.recorded: dict[SampleId, int] = {}
        self.environments, self.suspicions, self.chips = Environments(self, turns), Suspicions(self), Chips(self)
        self.done: dict[int, set[int]] = collections.defaultdict(set)
        self.started: set[SampleId] = set()
        self.versions: dict[int, int] = {}
        self.given_up: set[int] = set()
        self.scoring: list[int] = []
        self.ready: set[int] = set()
        self.batches: dict[int, list[int]] = collections.defaultdict(list)
        self.retired: set[int] = set()
        self.taken: set[int] = {0}  # versions that rollouts have taken
        self.published = self.moves = self.received = 0
        self.ends = Ends()
        self.now_s = 0.0
        self.halt: ev.Halt | None = None

    @mock.patch.object(balance, "SWAPPED_A_DECISION", 3)  # of modes that swap weights under samples
    @mock.patch.multiple(stride, WINDOW=1, REVIEW=2, WORTH=-1.0)  # a stride may change at each of few steps
    def play(self) -> Adversary:
        while self.halt is None:
            self.moves += 1
            assert self.moves < MAX_MOVES, f"nothing ends: {self.brain.summary()}"
            self.fault()
            self.draw.choice(self.acts())()
        return self

    def fault(self) -> None:
        calm = self.moves > self.calm_after
        for i in range(len(self.sizes)):
            if i not in self.incarnations and i not in self.config.lendable and (calm or self.draw.random() < REBIRTH):
                self.rise(i)
        if calm:
            return
        if self.incarnations and self.draw.random() < DEATH:
            self.die(self.draw.choice(sorted(self.incarnations)))
        if self.incarnations and self.draw.random() < SUSPICION:
            self.suspicions.say(
                self.draw.choice([self.incarnations[i] for i in sorted(self.incarnations)] + self.dead[-3:])
            )
        if self.draw.random() < RESTORED:
            self.decide()
            self.brain = Orchestrator.restore(self.config, json.loads(json.dumps(self.brain.snapshot())))
        if self.draw.random() < KILLED:
            self.kill()
        if self.ends.past and self.draw.random() < AGAIN:
            self.hear(self.ends.again(self.brain, self.draw.choice(self.ends.past)))

    def acts(self) -> list:
        """Everything that may happen next; what is overheard least often is as likely as the rest."""
        sources = [
            *(incarnation.sent for incarnation in (*self.incarnations.values(), *self.dead)),
            *self.says.values(),
        ]
        acts = [lambda sent=sent: self.deliver(sent) for sent in sources if sent]
        for incarnation in self.incarnations.values():
            if incarnation.inbox:
                acts.append(lambda incarnation=incarnation: self.obey(incarnation))
            if incarnation.loading or (incarnation.runs and not incarnation.paused):
                acts.append(lambda incarnation=incarnation: self.work(incarnation))
        acts += [lambda request=request: self.arrive(request) for request in self.requests]
        if self.scoring:
            acts.append(self.score)
        if self.environments.asked:
            acts.append(self.environments.answer)
        acts.append(self.tick)
        return acts

    def deliver(self, sent: collections.deque) -> None:
        twice = self.moves <= self.calm_after and self.draw.random() < TWICE
        self.hear(sent[0] if twice else sent.popleft())

    def hear(self, event: ev.Event) -> None:
        """The controller keeps what comes with a fact that counts, as the journal would."""
        if self.halt is not None:
            return
        if self.brain.counts(event):
            self.keep(event)
            self.suspicions.hear(event)
            self.ends.keep(event)
        self.received += 1
        self.brain.commit(event)
        self.brain.state.ledger.check()
        if self.draw.random() >= self.batched:
            self.decide()

    def decide(self) -> None:
        commands = self.brain.decide()
        self.brain.state.ledger.check()
        self.taken.add(self.brain.state.ledger.taken)
        self.environments.check()
        for command in commands:
            getattr(self, "do_" + type(command).__name__.lower())(command)

    def keep(self, event: ev.Event) -> None:
        match event:
            case ev.SampleStarted(id=id):
                assert id not in self.started, f"{id} is started twice"
                self.started.add(id)
            case ev.SampleWaiting(id=id, attempt=attempt):
                self.environments.ask(id, attempt)
            case ev.SampleDone(id=id):
                assert id.index not in self.done[id.group_id], f"{id} ends twice"
                assert id.group_id not in self.given_up or self.brain.state.unit(id).state in LEAVING
                self.done[id.group_id].add(id.index)
                size = self.config.eval_samples if is_eval(id.group_id) else self.config.group_size
                if len(self.done[id.group_id]) == size and id.group_id not in self.given_up:
                    self.scoring.append(id.group_id)
            case ev.GroupScored(group_id=group_id, trainable=True):
                self.ready.add(group_id)

    # ------------------------------------------------------------------ instances

    def rise(self, i: int, versions: tuple[int, ...] = ()) -> None:
        self.born[i] += 1
        slots, residents = self.sizes[i]
        self.incarnations[i] = InstanceIncarnation(i, self.born[i], slots, residents)
        self.incarnations[i].versions += versions
        up = ev.InstanceUp(
            instance=i, slots=slots, pages=64, page_size=16, residents=residents, incarnation=self.born[i]
        )
        self.says["supervisor", i].append(dataclasses.replace(up, versions=versions))

    def die(self, i: int, reason: str = "killed") -> None:
        """Its debts are paid right behind its end; what it sent before may arrive before or after."""
        incarnation = self.incarnations.pop(i)
        incarnation.over = True
        self.dead.append(incarnation)
        sent = self.says["supervisor", i]
        sent.append(ev.InstanceDown(instance=i, reason=reason, incarnation=incarnation.number))
        self.recorded |= {id: version for id, version in incarnation.runs.items() if id in incarnation.begun}
        for command in incarnation.inbox:
            if isinstance(command, ev.Move):
                self.move_failed(sent, command)
        for request in [request for request in self.requests if request.dst is incarnation]:
            self.requests.remove(request)
            self.recorded[request.id] = request.version
            sent.append(ev.SampleMoved(id=request.id, src=request.move.src, dst=i, attempt=request.move.attempt))

    def obey(self, incarnation: InstanceIncarnation) -> None:
        command = incarnation.inbox.popleft()
        i, number, sent = incarnation.instance, incarnation.number, incarnation.sent
        match command:
            case ev.LoadWeights(version=version, drop=drop):
                if drop is not None:
                    assert drop not in incarnation.runs.values(), f"{command} drops weights under {incarnation.runs}"
                    incarnation.versions.remove(drop)
                assert len(incarnation.versions) + len(incarnation.loading) < incarnation.residents, (
                    f"{command} has no room"
                )
                incarnation.loading.append((version, command.attempt))
            case ev.Park(ids=ids):
                for id in ids:
                    if id in incarnation.runs:
                        self.recorded[id] = incarnation.runs.pop(id)
                        sent.append(
                            ev.SampleParked(id=id, instance=i, incarnation=number, attempt=incarnation.attempts[id])
                        )
            case ev.Cancel(ids=ids):
                for id in ids:
                    incarnation.runs.pop(id, None)
                    sent.append(ev.SampleCancelled(id=id, reason=command.reason))
            case ev.Move(ids=ids):
                dst = incarnation.destinations.popleft()
                for id in ids:
                    if id in incarnation.runs:
                        self.requests.append(InFlightSample(id, incarnation.runs.pop(id), command, incarnation, dst))
                    else:
                        self.move_failed(sent, dataclasses.replace(command, ids=(id,)))
            case ev.Return():
                self.die(i, "returned")
            case ev.Pause() | ev.Unpause():
                incarnation.paused = isinstance(command, ev.Pause)
            case tuple():
                id, version, resumed, attempt = command
                self.take_in(incarnation, id, version, attempt)
                incarnation.begun.discard(id)
                if resumed:
                    incarnation.begun.add(id)
                    sent.append(ev.SampleResumed(id=id, instance=i, incarnation=number, attempt=attempt))

    def take_in(self, incarnation: InstanceIncarnation, id: SampleId, version: int, attempt: int) -> None:
        assert version in incarnation.versions, (
            f"{id} goes to instance {incarnation.instance}, which has {incarnation.versions}"
        )
        assert len(incarnation.runs) < incarnation.slots, f"instance {incarnation.instance} has no slot for {id}"
        elsewhere = [other for other in self.incarnations.values() if id in other.runs]
        assert not elsewhere, f"{id} runs twice"
        incarnation.runs[id], incarnation.attempts[id] = version, attempt

    def work(self, incarnation: InstanceIncarnation) -> None:
        i, number, sent = incarnation.instance, incarnation.number, incarnation.sent
        if incarnation.loading and (not incarnation.runs or self.draw.random() < 0.5):
            version, attempt = incarnation.loading.pop(0)
            incarnation.versions.append(version)
            sent.append(ev.WeightsLoaded(instance=i, version=version, incarnation=number, attempt=attempt))
            return
        if not incarnation.runs or incarnation.paused:
            return
        id = self.draw.choice(sorted(incarnation.runs))
        if id not in incarnation.begun:
            incarnation.begun.add(id)
            placed = {"instance": i, "incarnation": number, "attempt": incarnation.attempts[id]}
            sent.append(ev.SampleStarted(id=id, version=incarnation.runs[id], **placed))
        elif self.draw.random() < PROGRESS:
            progress = {id: self.draw.randrange(1, self.config.max_new_tokens) for id in incarnation.runs}
            decoded = self.chips.decoded(len(incarnation.runs))
            sent.append(ev.InstanceReported.of(i, self.draw.randrange(64), progress, number, **decoded))
        elif self.environments.ends_turn():
            self.environments.wait(incarnation, id)
        else:
            del incarnation.runs[id]
            sent.append(ev.SampleDone(id=id, instance=i, tokens=3, finish="stop", incarnation=number))

    def do_loadweights(self, command: ev.LoadWeights) -> None:
        assert command.version <= self.published and command.version not in self.retired
        wanted = command.version in self.taken or self.config.evaluation_due(command.version)
        assert wanted, f"{command}: no rollout takes it"
        self.post(command.instance, command)

    def do_start(self, command: ev.Start) -> None:
        for id in command.ids:
            if id.group_id not in self.versions:
                self.ends.open.add(id.group_id)
            self.suspicions.start(id)
            assert id.group_id not in self.given_up and id not in self.started, f"{id} starts over"
            tagged = self.versions.setdefault(id.group_id, command.version)
            assert tagged == command.version or self.config.decisions.mixes_versions, f"{command} mixes versions"
            if not self.environments.resets(self.known(command.instance), id, command):
                self.post(command.instance, (id, command.version, False, command.attempt))
            if self.draw.random() < 0.002 and self.moves < self.calm_after:
                self.says["controller"].append(ev.GroupFailed(group_id=id.group_id, reason="the prompt is too long"))

    def do_resume(self, command: ev.Resume) -> None:
        for id in command.ids:  # without a record it goes on from its prompt
            assert id not in self.environments.asked, f"{id} goes on before its environment has answered"
            version = self.recorded.pop(id, command.version)
            assert version == command.version or self.config.decisions.mixes_versions, f"{command} mixes versions"
            self.post(command.instance, (id, command.version, True, command.attempt))

    def do_move(self, command: ev.Move) -> None:
        self.post(command.src, command)

    def do_cancel(self, command: ev.Cancel) -> None:
        self.given_up |= {id.group_id for id in command.ids}
        self.ready -= {id.group_id for id in command.ids}
        for id in command.ids:
            self.environments.asked.pop(id, None)
        if command.instance is not None:
            return self.post(command.instance, command)
        for id in command.ids:
            self.recorded.pop(id, None)
            self.says["controller"].append(ev.SampleCancelled(id=id, reason=command.reason))

    def do_discard(self, command: ev.Discard) -> None:
        self.ends.end(command.group_id)
        self.ready.discard(command.group_id)
        self.given_up.add(command.group_id)

    def do_train(self, command: ev.Train) -> None:
        assert command.base_version == self.published and set(command.group_ids) <= self.ready
        self.chips.train()
        self.suspicions.train(command.group_ids)
        self.ends.train(command)
        self.ready -= set(command.group_ids)
        batch = self.batches[command.base_version]
        batch += command.group_ids
        if len(batch) == self.config.groups_per_step:
            self.says["trainer"].append(ev.StepPublished(version=command.base_version + 1))
            self.published = command.base_version + 1
        elif self.config.lendable:
            self.says["trainer"].append(ev.PartTrained(base_version=command.base_version, groups=len(batch)))

    def do_retire(self, command: ev.Retire) -> None:
        assert not any(command.version in incarnation.runs.values() for incarnation in self.incarnations.values())
        assert self.config.decisions.mixes_versions or command.version not in self.environments.asked.values()
        self.chips.retire(command.version)
        self.retired.add(command.version)

    def do_lend(self, command: ev.Lend) -> None:
        self.chips.lend(command)

    def do_park(self, command: ev.Park | ev.Pause | ev.Unpause | ev.Return) -> None:
        self.post(command.instance, command)

    do_pause = do_unpause = do_return = do_park

    def do_quarantine(self, command: ev.Quarantine) -> None:
        self.suspicions.check(command)
        if (incarnation := self.incarnations.get(command.instance)) is not None and incarnation in self.suspicions.sent:
            self.die(command.instance)

    def do_halt(self, command: ev.Halt) -> None:
        self.halt = command

    def kill(self) -> None:
        """End the process: only the orchestrator at its last fact and the journal are left."""
        for command in self.brain.decide():
            if isinstance(command, ev.Discard):  # of the others nothing is carried out
                self.do_discard(command)
        self.brain = Orchestrator.restore(self.config, json.loads(json.dumps(self.brain.snapshot())))
        outstanding = restart(self.brain.state, self.brain.step)
        self.ends.kill(self.brain, outstanding)
        self.suspicions.kill()
        self.incarnations, self.dead, self.requests, self.scoring = {}, [], [], list(outstanding.score)
        self.born.clear()
        self.says.clear()
        self.recorded = dict(outstanding.recorded | outstanding.waiting)
        self.environments.asked, self.environments.attempts = (
            dict(outstanding.waiting),
            dict.fromkeys(outstanding.waiting, 0),
        )
        self.published = self.brain.state.ledger.base
        if outstanding.cancel is not None:
            self.do_cancel(outstanding.cancel)
        if outstanding.train is not None:
            self.batches[outstanding.train.base_version] = []
            self.ready |= set(outstanding.train.group_ids)
            self.do_train(outstanding.train)

    # ------------------------------------------------------------------ what must hold

    def audit(self) -> None:
        assert self.halt.ok, self.halt.reason
        trained = [g for groups in self.batches.values() for g in groups]
        assert len(trained) == len(set(trained)) == self.config.total_steps * self.config.groups_per_step
        self.ends.audit(self.brain)
        lag = self.brain.state.decisions.max_lag
        for base, groups in self.batches.items():
            for g in groups:
                assert len(self.done[g]) == self.config.group_size, f"group {g} is trained, but not whole"
                assert lag is None or base - self.versions[g] <= lag, f"group {g} of {self.versions[g]} at base {base}"


def drawn(seed: int, stride: bool = False) -> Adversary:
    """stride: rollouts pass over versions, and chips are lent, whatever the seed says."""
    draw = random.Random(seed)
    parts = draw.choice([1, 2, 3])
    config = OrchestratorConfig(
        mode=MODES[seed % len(MODES)], groups_per_step=parts * draw.choice([1, 2]), group_size=draw.choice([1, 2, 4]),
        total_steps=draw.randint(1, 4), max_versions=draw.randint(1, 4), inflight=draw.choice([1.0, 1.25, 2.0, 3.0]),
        updates=parts, eval_every=draw.randint(0, 2), eval_groups=draw.choice([0, 0, 2]), max_filtered_rounds=50,
        max_prompt_tokens=16, max_new_tokens=48, kv_pressure=draw.choice([0.03, 0.3]), colocated=draw.random() < 0.2)  # fmt: skip
    sizes = [(draw.choice([1, 2, 4]), draw.choice([1, 1, 2, 3])) for _ in range(draw.randint(1, 4))]
    calm_after = draw.choice([300, 1000, 3000])
    batched, turns = draw.choice([0.0, 0.5, 0.9]), draw.choice([0.0, 0.3, 0.6])
    if stride:
        config = dataclasses.replace(config, mode="dora", colocated=False, max_versions=draw.randint(2, 6))
    if not config.colocated and (stride or draw.random() < 0.5):
        lendable = tuple(range(len(sizes), len(sizes) + draw.randint(1, 2)))
        config = dataclasses.replace(config, lendable=lendable, switch_s=draw.choice([0.0, 0.5]))
        sizes += [(draw.choice([1, 2, 4]), draw.choice([1, 1, 2])) for _ in lendable]
    if config.mode == "dora" and (stride or draw.random() < 0.75):
        most = config.max_versions
        config = dataclasses.replace(
            config, total_steps=draw.randint(2, 12), stride=draw.choice([0, 0, most, 2 % most])
        )
        if not config.stride and draw.random() < 0.5:
            config = dataclasses.replace(config, max_mean_lag=config.inflight + draw.choice([0.0, 0.5, 1.0]))
    return Adversary(config, sizes, seed, calm_after, batched, turns)


def main(configurations: int, first: int = 0, strides: bool = False) -> None:
    facts, lends, passed, drafts, dropped = 0, 0, 0, 0, collections.Counter()
    for seed in range(first, first + configurations):
        try:
            game = drawn(seed, strides).play()
            game.audit()
        except BaseException:
            print(f"configuration {seed}", flush=True)
            raise
        facts, _ = facts + game.received, dropped.update(game.brain.state.dropped)
        lends, drafts = lends + game.chips.lent, drafts + game.chips.drafted
        passed += len(set(range(game.published)) - game.taken)
    print(
        f"{configurations} configurations, {facts} facts, {lends} lends, {drafts} reports of drafts, {passed} versions "
        f"passed over, no law broken; dropped: {dict(dropped)}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("configurations", type=int)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("--stride", action="store_true")
    asked = parser.parse_args()
    main(asked.configurations, asked.first, asked.stride)
