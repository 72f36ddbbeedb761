"""The language of `tests/scenarios/*.txt`: one line in, the orchestrator's answer out."""

import ast
import functools

from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.orchestrate.view import describe
from dora_jax.types import SampleId

SMALL = {"max_prompt_tokens": 16, "max_new_tokens": 48, "rebalance_period_s": 1.0}


def play(text: str) -> str:
    """The scenario's text with the answers that the orchestrator gives now."""
    body, out = Body(), []
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        out.append(line)
        if line.startswith("config:"):
            body.config = {**SMALL, **fields(line.split()[1:])}
        elif line.startswith("answers:"):
            body.answers = set(line.split()[1:])
        elif line.startswith("> "):
            out += ["    " + answer for answer in body.ask(line[2:].split())]
    return "\n".join(out) + "\n"


def fields(words: list[str]) -> dict:
    return {key: _value(text) for key, text in (word.split("=", 1) for word in words)}


def _value(text: str):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def ids(text: str) -> list[SampleId]:
    """3.0-2,4.1 -> samples 0 to 2 of group 3 and sample 1 of group 4"""
    found = []
    for part in text.split(","):
        group, indices = part.rsplit(".", 1)
        first, _, last = indices.partition("-")
        found += [SampleId(int(group), i) for i in range(int(first), int(last or first) + 1)]
    return found


class Body:
    def __init__(self):
        self.config: dict = {}
        self.answers: set[str] = set()
        self.incarnations: dict[int, int] = {}
        self.tokens: dict[SampleId, int] = {}
        self.free: dict[int, int] = {}

    @functools.cached_property
    def brain(self) -> Orchestrator:
        """Made at the first question: `config:` comes before it."""
        return Orchestrator(OrchestratorConfig(**self.config))

    def ask(self, words: list[str]) -> list[str]:
        if words[0] == "?":
            value = self.brain.summary()[words[1]]
            if isinstance(value, dict):
                value = " ".join(f"{k}:{v}" for k, v in value.items() if v) or "none"
            return [str(value)]
        return [line for fact in getattr(self, "_" + words[0])(*words[1:]) for line in self._tell(fact)]

    def _tell(self, fact: ev.Event) -> list[str]:
        """Feed one fact and what the body answers by itself to the commands that follow."""
        facts, notes = [fact], []
        while facts:
            commands = self.brain.step(facts.pop(0))
            notes += [describe(command) for command in commands]
            facts += [fact for command in commands for fact in self._react(command)]
        return notes

    def _react(self, command: ev.Command) -> list[ev.Event]:
        match command:
            case ev.LoadWeights(instance=i, version=v) if "loaded" in self.answers:
                return [ev.WeightsLoaded(instance=i, version=v, incarnation=self.incarnations[i])]
            case ev.Start(ids=ids, instance=i, version=v) if "started" in self.answers:
                return [ev.SampleStarted(id=id, instance=i, version=v, incarnation=self.incarnations[i]) for id in ids]
            case ev.Resume(ids=ids, instance=i) if "resumed" in self.answers:
                return [ev.SampleResumed(id=id, instance=i, incarnation=self.incarnations[i]) for id in ids]
            case ev.Park(ids=ids, instance=i) if "parked" in self.answers:
                return [ev.SampleParked(id=id, instance=i, incarnation=self.incarnations[i]) for id in ids]
            case ev.Cancel(ids=ids, reason=reason) if "cancelled" in self.answers:
                return [ev.SampleCancelled(id=id, reason=reason) for id in ids]
            case ev.Move(ids=ids, src=src, dst=dst, attempt=attempt) if "moved" in self.answers:
                return [ev.SampleMoved(id=id, src=src, dst=dst, attempt=attempt) for id in ids]
        return []

    # ------------------------------------------------------------------ the verbs of a scenario

    def _up(self, instance, *rest):
        size = {"slots": 4, "pages": 64, "page_size": 16, **fields(rest)}
        i = int(instance)
        self.incarnations[i] = self.incarnations.get(i, 0) + 1
        yield ev.InstanceUp(instance=i, incarnation=self.incarnations[i], **size)

    def _down(self, instance):
        yield ev.InstanceDown(instance=int(instance), reason="lost", incarnation=self.incarnations[int(instance)])

    def _unhealthy(self, instance):
        yield ev.InstanceUnhealthy(instance=int(instance), reason="NaN", incarnation=self.incarnations[int(instance)])

    def _loaded(self, instance, version):
        yield ev.WeightsLoaded(
            instance=int(instance), version=int(version), incarnation=self.incarnations[int(instance)]
        )

    def _started(self, text):
        for id in ids(text):
            unit = self.brain.state.unit(id)
            yield ev.SampleStarted(
                id=id, instance=unit.instance, version=unit.version, incarnation=self.incarnations[unit.instance]
            )

    def _progress(self, text, tokens):
        """Let each instance report all that it runs."""
        self.tokens |= dict.fromkeys(ids(text), int(tokens))
        for i, host in self.brain.state.fleet.instances.items():
            if host.units.keys() & set(ids(text)):
                progress = {id: self.tokens[id] for id in host.units if id in self.tokens}
                yield ev.InstanceReported.of(i, self.free.get(i, host.pages), progress, self.incarnations[i])

    def _done(self, text, tokens=24):
        for id in ids(text):
            group = self.brain.state.groups[id.group_id]
            unit = group.units[id.index]
            incarnation = 0 if unit.instance is None else self.incarnations[unit.instance]
            yield ev.SampleDone(
                id=id, instance=unit.instance, tokens=int(tokens), finish="stop", incarnation=incarnation
            )
            if group.left == 0 and "scored" in self.answers:
                yield ev.GroupScored(group_id=id.group_id, trainable=True)

    def _scored(self, group, how="trainable"):
        yield ev.GroupScored(group_id=int(group), trainable=how == "trainable")

    def _failed(self, group, *reason):
        yield ev.GroupFailed(group_id=int(group), reason=" ".join(reason) or "the reward raised")

    def _published(self, version):
        yield ev.StepPublished(version=int(version))

    def _moved(self, text):
        for id in ids(text):
            unit = self.brain.state.unit(id)
            src = -1 if unit.instance is None else unit.instance
            yield ev.SampleMoved(id=id, src=src, dst=unit.dst.id, attempt=unit.attempt)

    def _movefailed(self, text, *reason):
        for id in ids(text):
            unit = self.brain.state.unit(id)
            src = -1 if unit.instance is None else unit.instance
            why = " ".join(reason) or "cut off"
            yield ev.MoveFailed(id=id, src=src, dst=unit.dst.id, attempt=unit.attempt, reason=why)

    def _parked(self, text):
        for id in ids(text):
            i = self.brain.state.unit(id).instance
            yield ev.SampleParked(id=id, instance=i, incarnation=self.incarnations[i])

    def _waits(self, text, tokens=8, *kept):
        for id in ids(text):
            i = self.brain.state.unit(id).instance
            yield ev.SampleWaiting(
                id=id, instance=i, tokens=int(tokens), kept=bool(kept), incarnation=self.incarnations[i]
            )

    def _ready(self, text, tokens=12):
        for id in ids(text):
            yield ev.SampleReady(id=id, tokens=int(tokens))

    def _cancelled(self, text):
        for id in ids(text):
            yield ev.SampleCancelled(id=id, reason="asked for")

    def _pages(self, instance, free):
        self.free[int(instance)] = int(free)
        yield ev.InstanceReported(instance=int(instance), free=int(free), incarnation=self.incarnations[int(instance)])

    def _time(self, now_s):
        yield ev.TimePassed(now_s=float(now_s))
