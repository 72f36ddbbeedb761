"""What a run says of its groups: failures with their sample, evaluations term by term, and what waited for what."""

import types

import numpy as np
import pytest

from dora_jax.base.console import step_line
from dora_jax.base.metrics import wilson
from dora_jax.config import RunError
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.common import idle_time
from dora_jax.runtime.common.idle_time import IdleReport
from dora_jax.runtime.observe.evaluations import Evaluations, closing, evaluation
from dora_jax.runtime.observe.metrics_log import EpisodeFailures, ScoringFailures, TaskShares, group_metrics
from dora_jax.tasks.pool import GroupFailure
from dora_jax.tasks.solved import Solved
from dora_jax.types import Sample, SampleId, ScoredGroup, Span


def group(group_id=0, version=0, **parts):
    """A group whose samples have two tokens each; its reward is the sum of its terms."""
    parts = {name: np.array(values, np.float32) for name, values in parts.items()}
    rewards = sum(parts.values())
    samples = tuple(
        Sample(
            id=SampleId(group_id, i),
            prompt_ids=np.zeros(1, np.int32),
            out_ids=np.zeros(2, np.int32),
            logprobs=np.zeros(2, np.float32),
            mask=np.ones(2, bool),
            spans=(Span(version=version, start=0, stop=2),),
            finish="stop",
        )
        for i in range(len(rewards))
    )
    return ScoredGroup(group_id=group_id, version=version, samples=samples, rewards=rewards, parts=parts)


# ---------------------------------------------------------------- rewards


def test_terms_of_any_name_leave_the_total_alone():
    metrics = group_metrics([group(mean=[5, 5], std=[7, 7], solved_all=[-1, 1])], base=0)
    assert (metrics["reward/mean"], metrics["reward/std"], metrics["reward/solved_all"]) == (12.0, 1.0, 0.0)
    assert [metrics[f"reward/term/{name}"] for name in ("mean", "std", "solved_all")] == [5.0, 7.0, 0.0]


def test_a_term_that_only_some_groups_have_is_the_mean_of_those():
    metrics = group_metrics([group(right=[0, 1]), group(right=[1, 1], short=[-1, -2])], base=0)
    assert (metrics["reward/term/right"], metrics["reward/term/short"]) == (0.75, -1.5)


def test_episodes_that_fail_are_reported_once_by_cause_and_length():
    notes = []
    stats = {"environment/failed_share": 0.01, "environment/failed_deadline_to_256": 3, "environment/turns": 9}
    failures = EpisodeFailures(types.SimpleNamespace(stats=lambda: stats), notes.append)
    assert failures.metrics() == stats and not notes
    stats["environment/failed_share"] = 0.02
    assert failures.metrics() == failures.metrics() == stats
    assert notes == [
        (
            "2.0% of the episodes have failed, and their groups with them; by cause and response length: "
            "failed_deadline_to_256 3"
        )
    ]
    assert EpisodeFailures(None, notes.append).metrics() == {} and len(notes) == 1


def test_accuracy_is_reported_with_and_without_noise():
    metrics = evaluation([group(right=[1, 0, 1, 1]), group(right=[1, 0, 0, 0])], Solved(term="right"), noisy=True)
    assert (metrics["eval/accuracy_clean"], metrics["eval/accuracy_noisy"]) == (0.75, 0.25)


def test_the_shares_of_a_mix_are_those_that_were_trained_on():
    served = TaskShares(
        OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=2, task_cycle=("sums", "games", "sums"))
    )
    first = served.metrics([group(0, right=[1, 0]), group(2, right=[1, 1])])
    assert first == {"task/share/games": 0.0, "task/share/sums": 1.0, "task/reward/sums": 0.75}
    second = served.metrics([group(4, right=[0, 0]), group(5, right=[0, 1])])
    assert second == {
        "task/share/games": 0.25,
        "task/share/sums": 0.75,
        "task/reward/games": 0.0,
        "task/reward/sums": 0.5,
    }
    assert "  games 25% sums 75%  " in step_line(2, {"reward/mean": 0.2, "response/length": 2.0} | second)
    assert not TaskShares(OrchestratorConfig(groups_per_step=2, group_size=2, total_steps=2)).metrics(
        [group(0, right=[1])]
    )


# ---------------------------------------------------------------- evaluations


def test_an_evaluation_has_the_total_every_term_and_accuracy_by_the_rule():
    groups = [group(-1, right=[1, 0], short=[-0.5, -0.5]), group(-2, right=[0, 0], short=[0, -1])]
    metrics = evaluation(groups, Solved(term="right"))
    assert metrics == pytest.approx(
        {
            "eval/accuracy": 0.25,
            "eval/accuracy_low": wilson(0.25, 3)[0],  # of four samples, what two unlike prompts amount to
            "eval/accuracy_high": wilson(0.25, 3)[1],
            "eval/pass_at_k": 0.5,
            "eval/pass_at_k_low": wilson(0.5, 2)[0],
            "eval/pass_at_k_high": wilson(0.5, 2)[1],
            "eval/k": 2,
            "eval/prompts": 2,
            "eval/response_length": 2.0,
            "eval/reward/mean": -0.25,
            "eval/reward/std": np.std([0.5, -0.5, 0, -1]),
            "eval/reward/term/right": 0.25,
            "eval/reward/term/short": -0.5,
        }
    )
    assert evaluation(groups, Solved(term="total", least=0.0))["eval/accuracy"] == 0.5
    assert "eval/accuracy" not in evaluation(groups, None)
    with pytest.raises(RunError, match="eval.solved: the reward of group -1 has no term 'exact'"):
        evaluation(groups, Solved(term="exact"))


class State:
    """Three held-out groups of version 4, of which none has ended."""

    def __init__(self, ids=(-1, -2, -3)):
        self.groups = {i: types.SimpleNamespace(version=4) for i in ids}
        self.evaluating = {4: len(ids)}


def received(state):
    records, lines = {}, []
    return Evaluations(state, Solved(term="right"), lambda v, m: records.update({v: m}), lines.append), records, lines


def test_an_evaluation_ends_though_a_group_of_it_fails():
    evaluations, records, _ = received(State())
    evaluations.scored(group(-1, 4, right=[1]))
    evaluations.failed(GroupFailure(group_id=-2, reason="no", lengths=(2,)))
    assert not records
    evaluations.scored(group(-3, 4, right=[0]))
    assert (records[4]["eval/accuracy"], records[4]["eval/prompts"], records[4]["eval/failed"]) == (0.5, 2, 1)


def test_groups_that_an_earlier_process_scored_count_once():
    evaluations, records, _ = received(State(ids=(-2,)))
    evaluations.scored(group(-1, 4, right=[1]))  # from the journal: the orchestrator has counted it
    assert not records
    evaluations.scored(group(-2, 4, right=[0]))
    assert records[4]["eval/prompts"] == 2 and "eval/failed" not in records[4]


def test_an_evaluation_without_any_score_is_reported():
    evaluations, records, lines = received(State(ids=(-1,)))
    evaluations.failed(GroupFailure(group_id=-1, reason="no", lengths=(2,)))
    assert lines == ["version 4 is not evaluated: none of its 1 groups has a score"] and not records


def test_the_closing_line_knows_all_evaluations():
    assert closing({}) == "held-out accuracy: not measured"
    assert closing({20: {"eval/accuracy": 0.916}, 0: {"eval/accuracy": 0.354}}) == (
        "held-out accuracy: 35.4% at version 0, 91.6% at version 20"
    )
    ends = {"eval/accuracy_low": 0.882, "eval/accuracy_high": 0.941}
    assert closing({20: {"eval/accuracy": 0.916} | ends}) == "held-out accuracy: 91.6% (88% to 94%) at version 20"
    assert closing({0: {"eval/reward/mean": -0.25}}) == "held-out reward: -0.250 at version 0"


# ---------------------------------------------------------------- failures


def unscored(share=0.01):
    lines = []
    prompt = types.SimpleNamespace(text="3 + 4 =", answer="7")
    return ScoringFailures(share, lambda group_id: prompt, lines.append), lines


def failure(kind="reward r raised KeyError (r.py:3)", reason="reward r raised KeyError: 'boxed' (r.py:3)"):
    return GroupFailure(group_id=3, reason=reason, lengths=(2, 4), kind=kind, response="the answer\nis 7")


def test_the_first_failure_of_each_kind_is_printed_at_once_with_its_sample():
    log, lines = unscored(share=1.0)
    for _ in range(3):
        log.failed(failure())
        log.failed(failure(kind="reward r took over 10 s", reason="reward r took over 10 s (9 tokens, sample (3, 1))"))
    assert lines[0].splitlines() == [
        (
            "a group cannot be scored: reward r raised KeyError: 'boxed' (r.py:3); others like it are only counted, in "
            "groups/failed_share"
        ),
        "  prompt   '3 + 4 ='",
        "  answer   '7'",
        "  response 'the answer\\nis 7'",
    ]
    assert len(lines) == 2 and "took over 10 s" in lines[1]


def test_kinds_without_end_do_not_flood_the_console():
    log, lines = unscored(share=1.0)
    for i in range(100):
        log.failed(failure(kind=str(i)))
    assert len(lines) == 20


def test_a_run_ends_where_rewards_fail_too_often():
    log, _ = unscored()
    log.scored += 10
    for _ in range(89):
        log.failed(failure())
    with pytest.raises(RunError, match=r"90 of 100 groups could not be scored \(task.max_failed_share = 1.0%\)"):
        log.failed(failure())
    assert log.metrics()["groups/failed_share"] == 0.9


def test_a_run_none_of_whose_groups_is_scored_ends_after_ten():
    log, _ = unscored()
    for _ in range(9):
        log.failed(failure())
    with pytest.raises(RunError, match="10 of 10 groups could not be scored .* last reason: reward r raised KeyError"):
        log.failed(failure())


def test_shares_of_failed_and_skipped_groups():
    log, _ = unscored(share=1.0)
    assert (log.metrics()["groups/failed_share"], log.metrics()["prompts/skipped_share"]) == (0.0, 0.0)
    log.failed(failure())
    log.scored += 3
    log.skipped += 36
    metrics = log.metrics()
    assert (metrics["groups/failed_share"], metrics["prompts/skipped"], metrics["prompts/skipped_share"]) == (
        0.25,
        36,
        0.9,
    )
    assert metrics["groups/failed_length_p50"] == 3.0


# ---------------------------------------------------------------- waiting


def test_the_cause_of_a_wait_is_what_held_longest_in_the_step(monkeypatch):
    clock = types.SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(idle_time, "time", clock)
    waiting = {}
    log = IdleReport(lambda: dict(waiting))
    happened = ev.TimePassed(now_s=0.0)
    for trainer, rollouts, seconds in [
        ("rollouts", "", 3.0),
        ("rewards", "", 2.0),
        ("", "the trainer", 9.0),
        ("", "", 1.0),
    ]:
        waiting.update(trainer=trainer, rollouts=rollouts)
        log(happened)
        waiting.update(trainer="stragglers")
        log(ev.InstanceReported.of(0, 1, {SampleId(0, 0): 3}))  # not asked again
        clock.now_s += seconds
    assert log.phrases({"trainer": 0.34, "rollouts": 0.6}) == [
        "rollouts idle 60%: waiting for the trainer",
        "trainer idle 34%: waiting for rollouts",
    ]
    log(happened)
    clock.now_s += 1.0
    assert log.phrases({"trainer": 1.0, "rollouts": 0.004}) == [
        "trainer idle 100%: waiting for stragglers",
        "rollouts idle 0%",
    ]


def test_a_run_that_waits_for_nothing_says_no_cause():
    log = IdleReport(lambda: {"trainer": "", "rollouts": ""})
    assert log.phrases({"trainer": 0.02, "rollouts": 0.0}) == ["trainer idle 2%", "rollouts idle 0%"]
