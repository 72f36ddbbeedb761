"""A verdict for each known way in which a run dies, none for a healthy run, and the places that show it first."""

import io
import json
import re
import urllib.request

import numpy as np
import pytest
from rich.console import Console as Terminal

from dora_jax import config as configs
from dora_jax import top
from dora_jax.base import health
from dora_jax.base.console import Console
from dora_jax.base.metrics import Writer
from dora_jax.report.load import load
from dora_jax.report.page import page
from dora_jax.runtime.observe.monitoring import LivePage

STEPS = 60


def healthy(seed, **sick):
    """Rows of a run that learns, with an evaluation every 20 steps; sick: metric -> its value by step, from the middle
    of the run on."""
    rng, rows = np.random.default_rng(seed), []
    for step in range(1, STEPS + 1):
        learned = step / STEPS
        row = {
            "step": step,
            "reward/mean": 0.3 + 0.4 * learned + rng.normal(0, 0.05),
            "reward/term/right": 0.3 + 0.4 * learned + rng.normal(0, 0.05),
            "reward/term/short": 0.8 + rng.normal(0, 0.05),
            "reward/solved_all": 0.1 + 0.3 * learned + rng.uniform(0, 0.1),
            "reward/solved_none": max(0.0, 0.4 - 0.3 * learned + rng.normal(0, 0.1)),
            "response/length": 200 + 100 * learned + rng.normal(0, 20),
            "response/truncated": rng.uniform(0, 0.05),
            "lag/mean": 1 + rng.uniform(0, 1),
            "trainer/loss": rng.normal(0, 0.01),
            "trainer/grad_norm": float(np.exp(rng.normal(-1, 0.7))),
            "trainer/entropy": 0.4 * (1 - 0.7 * learned) + rng.normal(0, 0.01),
            "trainer/kl_anchor": rng.uniform(0, 0.05),
            "trainer/ess_share": rng.uniform(0.5, 1),
            "trainer/updates_skipped": 0.0,
            "mismatch/mean": rng.uniform(0.001, 0.01),
            "groups/failed_share": rng.uniform(0, 0.01),
            "groups/filtered_share": rng.uniform(0, 0.7),
            "environment/failed_share": rng.uniform(0, 0.01),
            "environment/cut_share": rng.uniform(0, 0.01),
            "prompts/skipped_share": rng.uniform(0, 0.02),
            "waits": "trainer idle 30%: waiting for rollouts",
        }
        if step > STEPS // 2:
            row |= {name: value(step) for name, value in sick.items() if "/accuracy" not in name}
        rows.append(row)
        if step % 10 == 0:
            accuracy = 0.3 + 0.4 * learned
            if step > STEPS // 2 and "eval/accuracy" in sick:
                accuracy = sick["eval/accuracy"](step)
            interval = {"eval/accuracy_low": accuracy - 0.12, "eval/accuracy_high": accuracy + 0.12}
            rows.append({"step": step, "eval/accuracy": accuracy, **interval, "eval/reward/mean": accuracy})
    return rows


def always(value):
    return lambda step: value


SICK = {
    "entropy collapse": {"trainer/entropy": always(1e-9)},
    "truncated answers": {"response/truncated": always(0.95)},
    "length explosion": {"response/length": lambda step: 250 * 1.2 ** (step - STEPS // 2)},
    "nothing is solved": {"reward/solved_none": always(1.0), "reward/mean": always(0.0)},
    "everything is solved": {"reward/solved_all": always(1.0), "reward/mean": always(1.0)},
    "log-prob mismatch": {"mismatch/mean": always(0.7)},
    "few effective samples": {"trainer/ess_share": always(0.01)},
    "far from the anchor": {"trainer/kl_anchor": always(2.0)},
    "stale groups": {"lag/mean": always(20.0)},
    "gradient spikes": {"trainer/grad_norm": lambda step: 500.0 if step % 4 == 0 else 0.4},
    "skipped updates": {"trainer/updates_skipped": lambda step: float(step % 3 == 0)},
    "numbers that are not finite": {"trainer/loss": always(None)},
    "no instance": {"waits": always("trainer idle 100%: waiting for a rollout instance")},
    "environment failures": {"environment/failed_share": always(0.2)},
    "episodes cut by the template": {"environment/cut_share": always(0.2)},
    "data exhausted": {"groups/filtered_share": always(0.97)},
    "groups without a score": {"groups/failed_share": always(0.1)},
    "prompts left out": {"prompts/skipped_share": always(0.4)},
    "reward hacking": {"eval/accuracy": lambda step: 0.3 - 0.003 * step},
}
TERMS = {"reward/term/right": lambda step: 0.0, "reward/term/short": lambda step: 1.4}


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_gets_its_verdict_and_no_other(name):
    (verdict,) = health.verdicts(healthy(0, **SICK[name]))
    assert verdict.name == name and STEPS // 2 - 10 <= verdict.since <= STEPS, verdict
    assert health.verdicts(healthy(0, **SICK[name])[: STEPS // 2]) == [], "not before it is sick"


def test_every_rule_has_a_sick_run():
    assert {rule.name for rule in health.RULES} | {"reward hacking"} == set(SICK)


def test_a_term_that_is_paid_for_at_the_cost_of_another_is_found():
    (verdict,) = health.verdicts(healthy(0, **TERMS))
    assert verdict.name == "reward hacking" and "reward/term/short rose by" in verdict.seen


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_gets_none_at_any_step(seed):
    follower = health.Health()
    assert [found for row in healthy(seed) if (found := follower.follow(row)[0])] == []


def test_first_steps_and_single_bad_ones_get_none():
    sick = {name: value for each in SICK.values() for name, value in each.items() if name != "waits"}
    rows = healthy(0)
    bad = {name: value(40) for name, value in sick.items() if "eval/" not in name}
    first = [row | bad for row in rows[: health.SETTLING]]
    assert health.verdicts(first) == []
    alone = [row | bad if row["step"] == 40 and "reward/mean" in row else row for row in rows]
    assert health.verdicts(alone) == []


@pytest.mark.parametrize("prompts", [16, 64])
def test_what_few_held_out_prompts_say_by_chance_is_no_verdict(prompts):
    """Without the intervals 6 of 20 runs that stay where they are would get one."""
    for seed in range(20):
        rng, follower = np.random.default_rng(seed), health.Health()
        for step in range(1, 41):
            follower.follow({"step": step, "reward/mean": 0.5 + rng.normal(0, 0.03)})
            if step % 4 == 0:
                p = rng.binomial(prompts, 0.5) / prompts
                half = 1.96 * np.sqrt(p * (1 - p) / prompts)
                row = {"step": step, "eval/accuracy": p, "eval/accuracy_low": p - half, "eval/accuracy_high": p + half}
                assert follower.follow(row)[0] == []


def test_a_certain_policy_that_is_right_has_not_collapsed():
    certain = {"trainer/entropy": always(1e-4), "reward/solved_all": always(0.95)}
    assert health.verdicts(healthy(0, **certain)) == []


def test_what_a_verdict_says_to_try_are_fields_that_exist():
    named = {name for rule in health.RULES for name in re.findall(r"\b[a-z]+\.[a-z_]+\b", rule.remedy)}
    assert len(named) > 8 and named <= set(configs.fields())


class Sink:
    def __init__(self):
        self.facts = {}

    def write(self, step, scalars): ...

    def status(self, facts):
        self.facts = facts


def written(workdir, rows):
    """(what the console printed, the facts that a sink has) of a run of these rows."""
    out, sink = io.StringIO(), Sink()
    with Writer(workdir, Console(out), [sink]) as writer:
        for row in rows:
            row = dict(row)
            waits = row.pop("waits", "")
            writer.write(row.pop("step"), row, waits=[waits] if waits else ())
        writer.status({"base": 3})
    return out.getvalue(), sink.facts


def numbers(rows):
    return [{name: float("nan") if value is None else value for name, value in row.items()} for row in rows]


def test_the_console_says_it_once_where_it_begins_and_where_it_ends(tmp_path):
    rows = healthy(0, **SICK["truncated answers"])
    well = [row | {"step": row["step"] + STEPS} for row in healthy(1)]
    text, facts = written(tmp_path, numbers(rows + well))
    begun = [line for line in text.splitlines() if line.startswith("health: truncated answers since step")]
    assert len(begun) == 1 and "rollout.max_new_tokens" in begun[0]
    assert text.count("health: truncated answers is over at step") == 1
    assert facts["verdicts"] == 0 and facts["health"] == []


def test_a_resumed_run_goes_on_with_the_verdict_and_does_not_repeat_it(tmp_path):
    rows = healthy(0, **SICK["truncated answers"])
    written(tmp_path, numbers(rows))
    out, sink = io.StringIO(), Sink()
    with Writer(tmp_path, Console(out), [sink]) as writer:
        writer.resume(STEPS - 1)
        writer.status({})
    assert "health:" not in out.getvalue()
    assert sink.facts["verdicts"] == 1 and sink.facts["health"][0].startswith("truncated answers since step")


def test_healthz_top_and_the_page_begin_with_it(tmp_path):
    rows = healthy(0, **SICK["log-prob mismatch"])
    _, facts = written(tmp_path, numbers(rows))
    live = LivePage(0)
    try:
        live.status(facts)
        with urllib.request.urlopen(f"http://127.0.0.1:{live.port}/healthz") as answer:
            found = json.load(answer)
        with urllib.request.urlopen(f"http://127.0.0.1:{live.port}/metrics") as answer:
            assert b"dora_run_live_verdicts 1.0" in answer.read()
    finally:
        live.close()
    assert found["status"] == "ok" and found["verdicts"][0].startswith("log-prob mismatch since step")
    data = load(tmp_path, "a")
    text = page([data])
    assert 0 < text.index("log-prob mismatch since step") < text.index("<h2>Curves")
    shown = io.StringIO()
    Terminal(file=shown, width=200).print(top.picture(data, 0.0))
    assert "log-prob mismatch since step" in shown.getvalue().partition("reward")[0]


def test_a_page_of_a_healthy_run_says_so(tmp_path):
    written(tmp_path, numbers(healthy(0)))
    assert "no rule finds anything" in page([load(tmp_path, "a")])
