"""Verdicts on a run's health: the known ways in which RL runs die, as rules over the rows of metrics.jsonl.

Consumes rows of steps and evaluations in their order; produces a `Verdict` for each rule that holds at the newest step,
with what it saw, since which step, and what to try. Standard library only.
Laws: a verdict changes nothing in the run; none is passed on the first SETTLING steps, nor on one bad step.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

SETTLING = 5  # steps
WINDOW = 10  # steps that a rule looks at
EARLIER = 20  # settled steps whose median is what a run looked like, for rules in multiples of it
FALL = 0.1  # of the held-out accuracy, beyond its 95 % intervals, while the reward does not fall
TERM = 0.2  # by which one term of the reward rises and another falls
Row = Mapping[str, object]


def number(row: Row, name: str) -> float | None:
    value = row.get(name)
    if isinstance(value, int) and abs(value) >= 2**53:  # of a damaged file: no float holds it
        return None
    return float(value) if isinstance(value, int | float) else None


@dataclasses.dataclass(frozen=True)
class Rule:
    """`metric` beyond `limit` in `steps` of the last `window` steps."""

    name: str
    metric: str
    side: Literal["above", "below", "times", "missing"]  # times: above limit times the median of EARLIER
    limit: float
    remedy: str
    steps: int = 8
    window: int = WINDOW
    least: float = 0.0  # with times: and above this
    unless: tuple[str, float] | None = None  # no bad step where this metric is at least so much

    def bad(self, row: Row, usual: float | None) -> bool:
        if self.metric not in row:
            return False
        value = number(row, self.metric)
        if self.side == "missing" or value is None:
            return self.side == "missing" and value is None
        if self.unless is not None and (number(row, self.unless[0]) or 0.0) >= self.unless[1]:
            return False
        if self.side == "below":
            return value < self.limit
        if self.side == "times":
            return usual is not None and value > max(self.least, self.limit * usual)
        return value > self.limit

    def threshold(self) -> str:
        """The limit as text, for the page of metrics and a verdict."""
        text = {
            "above": f"above {self.limit:g}",
            "below": f"below {self.limit:g}",
            "times": f"above {self.limit:g} times its median of the {EARLIER} steps before",
            "missing": "not finite",
        }[self.side]
        if self.side == "times" and self.least:
            text += f", and above {self.least:g}"
        if self.unless is not None:
            text += f", where {self.unless[0]} is below {self.unless[1]:g}"
        return f"{text}, in {self.steps} of {self.window} steps"


@dataclasses.dataclass(frozen=True)
class Verdict:
    name: str
    since: int  # the first of the steps that it rests on
    seen: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} since step {self.since}: {self.seen}. Try: {self.remedy}"


RULES = (
    Rule("entropy collapse", "trainer/entropy", "below", 0.005,
         "a lower trainer.learning_rate, or trainer.entropy_coef above 0",
         unless=("reward/solved_all", 0.5)),
    Rule("truncated answers", "response/truncated", "above", 0.3,
         "a higher rollout.max_new_tokens, or a length penalty in the reward"),
    Rule("length explosion", "response/length", "times", 4.0,
         "a length penalty in the reward; look whether longer answers are right ones", least=64.0),
    Rule("nothing is solved", "reward/solved_none", "above", 0.9,
         "easier prompts, a warm start (sft), or a reward that also pays for partial answers"),
    Rule("everything is solved", "reward/solved_all", "above", 0.99,
         "harder prompts, or the end of the run: equal rewards teach nothing", steps=20, window=20),
    Rule("log-prob mismatch", "mismatch/mean", "above", 0.1,
         "model.dtype=float32, trainer.matmul=float32, and no rollout.kv or rollout.weights of fewer bits", steps=5),
    Rule("few effective samples", "trainer/ess_share", "below", 0.1,
         "a lower orchestrator.max_versions or trainer.learning_rate", steps=5),
    Rule("far from the anchor", "trainer/kl_anchor", "above", 0.5,
         "a lower trainer.learning_rate, or fewer updates a step", steps=5),
    Rule("stale groups", "lag/mean", "above", 8.0,
         "a lower orchestrator.max_versions or orchestrator.inflight"),
    Rule("gradient spikes", "trainer/grad_norm", "times", 10.0,
         "a lower trainer.learning_rate or trainer.max_grad_norm; look at the prompts of these steps",
         steps=3, window=20, least=5.0),
    Rule("skipped updates", "trainer/updates_skipped", "above", 0.0,
         "a lower trainer.learning_rate; three steps in a row without an update end the run", steps=2),
    Rule("numbers that are not finite", "trainer/loss", "missing", 0.0,
         "a lower trainer.learning_rate, or model.dtype=float32", steps=2),
    Rule("no instance", "instances/missing", "above", 0.0,
         "the console and the timeline name why instances die; fewer rollout.slots need less memory", steps=3),
    Rule("environment failures", "environment/failed_share", "above", 0.05,
         "the console names the causes; slow tools need a higher environment.step_timeout_s"),
    Rule("episodes cut by the template", "environment/cut_share", "above", 0.05,
         "a higher environment.branches, or environment.renderer: the chat template rewrites earlier turns"),
    Rule("groups without a score", "groups/failed_share", "above", 0.05,
         "the console names the causes; a slow reward needs a higher task.reward_timeout_s"),
    Rule("data exhausted", "groups/filtered_share", "above", 0.9,
         "more or other prompts: the samples of nearly every group score alike, and teach nothing"),
    Rule("prompts left out", "prompts/skipped_share", "above", 0.2,
         "a higher rollout.max_prompt_tokens, or shorter prompts"),
)  # fmt: skip


class Health:
    """Follows a run row by row."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []  # that hold at the newest step
        self._seen = 0
        self._bad: dict[str, collections.deque[tuple[int, float | None, bool]]] = {
            rule.name: collections.deque(maxlen=rule.window) for rule in RULES
        }
        self._values: dict[str, collections.deque[float]] = {
            rule.metric: collections.deque(maxlen=EARLIER) for rule in RULES if rule.side == "times"
        }
        self._steps: list[Row] = []  # since the last evaluation but one
        # version; accuracy and the ends of its interval; mean reward of the steps before
        self._evaluated: list[tuple[int, list[float], float | None]] = []
        self._terms: collections.deque[dict[str, float]] = collections.deque(maxlen=2 * EARLIER)

    def follow(self, row: Row) -> tuple[list[Verdict], list[Verdict]]:
        """(verdicts that begin, verdicts that end) with this row of metrics.jsonl."""
        before = {verdict.name: verdict for verdict in self.verdicts}
        if any(name.startswith("eval/") for name in row):
            rewards = [reward for r in self._steps if (reward := number(r, "reward/mean")) is not None]
            self._steps.clear()
            if (accuracy := number(row, "eval/accuracy")) is not None:
                ends = [number(row, f"eval/accuracy_{end}") or accuracy for end in ("low", "high")]
                mean = statistics.fmean(rewards) if rewards else None
                self._evaluated.append((int(number(row, "step") or 0), [accuracy, *ends], mean))
        else:
            self._step(row)
        now = {verdict.name: verdict for verdict in self._find()}
        now = {
            name: dataclasses.replace(v, since=before[name].since) if name in before else v for name, v in now.items()
        }
        self.verdicts = list(now.values())
        return [now[n] for n in now.keys() - before.keys()], [before[n] for n in before.keys() - now.keys()]

    # ------------------------------------------------------------ private

    def _step(self, row: Row) -> None:
        self._seen += 1
        if self._seen <= SETTLING:
            return
        row = {**row, "instances/missing": float("waiting for a rollout instance" in str(row.get("waits", "")))}
        for rule in RULES:
            values = self._values.get(rule.metric)
            usual = statistics.median(values) if values and len(values) >= SETTLING else None
            value = number(row, rule.metric)
            self._bad[rule.name].append((int(number(row, "step") or 0), value, rule.bad(row, usual)))
            if values is not None and value is not None and not self._bad[rule.name][-1][2]:
                values.append(value)  # a bad step does not become the usual
        self._steps.append(row)
        terms = {name: number(row, name) for name in row if name.startswith("reward/term/")}
        self._terms.append({name: value for name, value in terms.items() if value is not None})

    def _find(self) -> list[Verdict]:
        holding = []
        for rule in RULES:
            bad = [(step, value) for step, value, is_bad in self._bad[rule.name] if is_bad]
            if len(bad) >= rule.steps:
                last = bad[-1][1]
                shown = rule.metric if last is None else f"{rule.metric} is {last:.3g}"
                holding.append(Verdict(rule.name, bad[0][0], f"{shown} ({rule.threshold()})", rule.remedy))
        return [*holding, *self._hacking()]

    def _hacking(self) -> list[Verdict]:
        """The reward does not fall, and held-out prompts or another of its terms do."""
        remedy = "read samples of these steps: the reward pays for something else than what you want"
        if len(self._evaluated) > 2:
            accuracies = [share[0] for _, share, _ in self._evaluated]
            best = accuracies.index(max(accuracies))
            since, (accuracy, low, _), reward = self._evaluated[best]
            later = self._evaluated[best + 1 :][-2:]
            if len(later) == 2 and all(
                a < accuracy - FALL and high < low and r is not None and r >= (reward or 0.0)
                for _, (a, _, high), r in later
            ):
                seen = f"held-out accuracy fell from {accuracy:.3g} to {accuracies[-1]:.3g}, and the reward did not"
                return [Verdict("reward hacking", since, seen, remedy)]
        if len(self._terms) == 2 * EARLIER:
            moved = {}
            for name in set.intersection(*(set(terms) for terms in self._terms)):
                values = [terms[name] for terms in self._terms]
                moved[name] = statistics.fmean(values[EARLIER:]) - statistics.fmean(values[:EARLIER])
            up, down = (which(moved, key=moved.__getitem__, default="") for which in (max, min))
            if up != down and moved[up] > TERM and moved[down] < -TERM:
                seen = f"{up} rose by {moved[up]:.2f} in {EARLIER} steps while {down} fell by {-moved[down]:.2f}"
                return [Verdict("reward hacking", self._bad[RULES[0].name][-1][0] - EARLIER, seen, remedy)]
        return []


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """What holds at the end of these rows of metrics.jsonl."""
    health = Health()
    for row in rows:
        health.follow(row)
    return health.verdicts


def table() -> str:
    """The thresholds, for the page of metrics."""
    rows = [(rule.name, f"`{rule.metric}` {rule.threshold()}") for rule in RULES if rule.name != "no instance"]
    rows += [
        ("no instance", f"the trainer waits for a rollout instance, in 3 of {WINDOW} steps"),
        (
            "reward hacking",
            (
                f"`eval/accuracy` {FALL:g} below its best beyond 95 % intervals in two evaluations while the reward "
                f"does not fall, or one `reward/term/*` up by {TERM:g} and another down as far in {EARLIER} steps"
            ),
        ),
    ]
    return "| verdict | where |\n|---|---|\n" + "".join(f"| {name} | {where} |\n" for name, where in rows)
