"""Figures of a run -> the sentences and tables at the top of the page. Values in, values out."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from dora_jax.base.health import Verdict, verdicts
from dora_jax.report.load import Row, RunData, configured, number, series, version_of
from dora_jax.report.markup import figure, percent

MARGIN = 0.10  # between the idle shares of the two roles, before one of them is called the bottleneck
BUSY = 0.05  # an idle share below this is no loss worth a sentence
KOLMOGOROV = 1.36  # 5 % point of sqrt(n m / (n + m)) * D, for independent samples
ADVICE = {  # what the busier role waits for -> which role is the bottleneck, and what to change
    "rollouts": "Rollout is the bottleneck: give it more devices; on some of its own, raise orchestrator.inflight.",
    "a rollout instance": "Rollout is the bottleneck: no instance was up.",
    "stragglers": (
        "The longest answers are the bottleneck: a higher orchestrator.max_versions lets the trainer go on without "
        "them."
    ),
    "rewards": "Rewards are the bottleneck: raise task.reward_workers, or .reward_concurrency; or make them faster.",
    "weights": (
        "Publication is the bottleneck: instances wait for weights, so a faster transfer of them shortens the step."
    ),
    "the trainer": "The trainer is the bottleneck: give it more devices; rollout would do with fewer.",
    "evaluation": "Evaluation is the bottleneck: make eval.every larger, or eval.prompts smaller.",
}
BOTH = (
    "Both roles wait, for each other or for the machine: neither more rollout nor a faster trainer alone shortens the "
    "step."
)
NEITHER = "Neither role waits: the devices are well divided, and more of both kinds make the run faster."


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def idle_shares(steps: Sequence[Row]) -> tuple[float | None, float | None]:
    """(trainer, rollout): the share of the time in which the role had nothing to do."""
    waits = [(number(s.get("trainer/wait_s")), number(s.get("trainer/step_s"))) for s in steps]
    known = [(wait, work) for wait, work in waits if wait is not None and work is not None]
    whole = sum(wait + work for wait, work in known)
    return (sum(wait for wait, _ in known) / whole if whole else None), mean(series(list(steps), "rollout/idle_share"))


def causes(steps: Sequence[Row]) -> dict[str, Counter[str]]:
    """role -> cause -> steps in which that cause held longest, out of the `waits` line of each step."""
    found: dict[str, Counter[str]] = {"trainer": Counter(), "rollouts": Counter()}
    for step in steps:
        for role, cause in re.findall(r"(trainer|rollouts) idle \d+%: waiting for ([^;]+)", str(step.get("waits", ""))):
            found[role][cause.strip()] += 1
    return found


def bottleneck(steps: Sequence[Row]) -> str:
    """One sentence or two: which role waits for which, why, and what to change."""
    settled = steps[1:] if len(steps) > 2 else steps  # the first step compiles
    trainer, rollout = idle_shares(settled)
    if trainer is None or rollout is None:
        return "No step has ended yet, so nothing is known about the bottleneck."
    summary = f"The trainer is idle for {trainer:.0%} of a step and rollout for {rollout:.0%}."
    if abs(trainer - rollout) <= MARGIN:
        return f"{summary} {NEITHER if max(trainer, rollout) < BUSY else BOTH}"
    role, name = ("trainer", "trainer") if trainer > rollout else ("rollouts", "rollout")
    top = causes(settled)[role].most_common(1)
    cause = top[0][0] if top else ("rollouts" if role == "trainer" else "the trainer")
    return f"{summary} The {name} waits mostly for {cause}. {ADVICE.get(cause, '')}".rstrip()


def health(data: RunData) -> list[Verdict]:
    """What holds at the newest step."""
    rows = sorted([*data.steps, *data.evaluations], key=lambda row: row["step"])
    return verdicts(rows)


def progress(data: RunData) -> str:
    """How far the run has come, and when it last wrote."""
    last, wanted = (data.steps[-1]["step"] if data.steps else 0), configured(data, "steps")
    last_t = max((row["t"] for row in data.timeline), default=None)
    when = f"; the last row is of {time.strftime('%Y-%m-%d %H:%M', time.gmtime(last_t))} UTC" if last_t else ""
    return f"{last} of {wanted or '?'} steps are published{when}."


def length_bias(lengths: Mapping[str, Mapping[int, int]]) -> tuple[float, float, str] | None:
    """(largest distance between the distributions of generated and of trained lengths, the distance that chance
    allows, a sentence). None without both. Source: the two-sample Kolmogorov-Smirnov test; samples of one group are
    alike, so the limit counts a group's samples as independent and is on the strict side."""
    made, trained = lengths.get("generated", {}), lengths.get("trained", {})
    n, m = sum(made.values()), sum(trained.values())
    if not n or not m:
        return None
    distance = over = under = 0.0
    for bucket in sorted(set(made) | set(trained)):
        over, under = over + made.get(bucket, 0) / n, under + trained.get(bucket, 0) / m
        distance = max(distance, abs(over - under))
    limit = KOLMOGOROV * math.sqrt((n + m) / (n * m))
    verdict = (
        "the lengths trained on follow the lengths generated"
        if distance <= limit
        else "the lengths trained on differ from the lengths generated: look at failed and filtered groups, and at "
        "samples still under way"
    )
    return distance, limit, f"Length bias: the distributions are {distance:.3f} apart (chance: {limit:.3f}); {verdict}."


def ledger(data: RunData) -> list[tuple[str, str]]:
    """What the metrics say about groups: rows of a table."""
    last = data.steps[-1] if data.steps else {}
    rows = [
        ("steps published", str(last.get("step", 0))),
        ("groups without a score", percent(last.get("groups/failed_share"))),
        ("prompts skipped", percent(last.get("prompts/skipped_share"))),
        ("moves of running samples", figure(last.get("moves/total"), ",.0f")),
        ("loads of weights", figure(last.get("reloads/total"), ",.0f")),
        ("largest lag", figure(max((x for x in series(data.steps, "lag/max") if x is not None), default=None), ",.0f")),
    ]
    states = [(f"groups {state}", figure(n, ",.0f")) for state, n in data.ledger.items() if n or state == "admitted"]
    return [*states, *rows]


def quarantines(data: RunData) -> dict[int, list[str]]:
    """instance -> a sentence each time that it was put in quarantine, with the steps that had trained on its tokens."""
    found: dict[int, list[str]] = {}
    for row in data.timeline:
        if (instance := version_of(row.get("quarantine"))) is not None:
            summary = str(row.get("reason", row.get("said")))
            found.setdefault(instance, []).append(f"{summary[:1].upper()}{summary[1:]}.")
    return found


def suspicious(data: RunData) -> dict[int, str]:
    """instance -> what is wrong with it, as far as its finished samples show."""
    found = {}
    logprobs = {
        i: row.get("logprob_sum", 0.0) / row["tokens"] for i, row in data.instances.items() if row.get("tokens")
    }
    middle = sorted(logprobs.values())[len(logprobs) // 2] if logprobs else 0.0
    for i, row in data.instances.items():
        if row.get("nonfinite"):
            found[i] = f"{row['nonfinite']:.0f} log-probs are not finite"
        elif i in logprobs and abs(logprobs[i] - middle) > max(0.5, abs(middle)):
            found[i] = f"its mean log-prob {logprobs[i]:.2f} is far from the median instance's {middle:.2f}"
    return found
