"""Environments in worker processes: one answer a question, errors and deadlines that are no rewards, episodes made
again."""

import dataclasses
import os
import signal
import sys
import time

import numpy as np
import pytest

from dora_jax.config import Config, ConfigError, EnvironmentSection
from dora_jax.tasks import environment
from dora_jax.tasks.environment import PolicyFacts
from dora_jax.tasks.environments import EnvironmentPool
from dora_jax.tasks.environments.bridge import Bridge, TokenBridge
from dora_jax.tasks.environments.environment_worker import FAILED, Noise
from dora_jax.types import EpisodeEnded, EpisodeFailed, EpisodeLost, Observed, SampleId
from tests.fakes.episode_player import Letters, Player, answers, ids_of, prompt_of

FAKE = "tests.fakes.environments.Obedient"


@pytest.fixture(scope="module")
def shared():
    pool = open_pool()
    yield pool
    pool.close()


def open_pool(**changes):
    section = dataclasses.replace(
        EnvironmentSection(name=FAKE, step_timeout_s=5.0, observation="<{content}>"), **changes
    )
    return EnvironmentPool(section, Bridge(Letters(), section.observation), seed=0)


def test_turns_are_answered_behind_the_exact_tokens_and_terms_add_up(shared):
    assert shared.wait_ready() == ("right", "turns")
    shared.open(SampleId(3, 0), prompt_of(3))
    player = Player(shared, SampleId(3, 0))
    assert player.observed(player.answer()) == ""
    assert player.observed(player.ask("a")) == "<1:a>" and player.observed(player.ask("b")) == "<2:b>"
    assert player.ask("end") == EpisodeEnded(id=player.id, terms={"right": 1.0, "turns": 3.0})
    assert not shared.waiting and shared.stats()["environment/turns_an_episode"] == 3


def test_an_error_is_no_reward_and_fails_its_episode_alone(shared):
    failing, going = Player(shared, SampleId(4, 0)), Player(shared, SampleId(4, 1))
    going.observed(going.ask("a"))
    assert failing.ask("raise") == EpisodeFailed(
        id=failing.id, reason=f"{FAKE}: raised RuntimeError: a bug", kind="error"
    )
    assert "'wrong' is 1.0; terms are right, turns" in Player(shared, SampleId(4, 2)).ask("odd").reason
    assert going.observed(going.ask("b")) == "<2:b>"
    assert shared.stats()["environment/failed_error_to_256"] == 2


def test_a_variable_that_it_may_read_and_that_is_not_there_is_named(monkeypatch):
    monkeypatch.delenv("NO_SUCH_SETTING", raising=False)
    with pytest.raises(ConfigError, match="environment.env: the environment has no NO_SUCH_SETTING"):
        open_pool(env=("PATH", "NO_SUCH_SETTING"))


@pytest.fixture(scope="module")
def blocking():
    pool = open_pool(name="tests.fakes.environments.Blocking", step_timeout_s=2.0, observation_chars=20)
    yield pool
    pool.close()


def test_methods_that_block_keep_no_other_waiting_and_wait_for_a_thread_outside_their_deadline(blocking):
    players = [Player(blocking, SampleId(i, 0), room=5000) for i in range(150)]  # of which 64 have a thread at once
    began = time.monotonic()
    for player in players:
        player.say("1.2 a")
    found = answers(blocking, len(players))
    assert all(isinstance(answer, Observed) for answer in found), found[0]
    assert time.monotonic() - began > 3 and blocking.stats()["environment/seconds_a_turn"] < 2


def test_an_environment_of_a_mix_may_block_too():
    entry = {"name": "tests.fakes.environments.Blocking"}
    pool = open_pool(name="dora_jax.tasks.environments.by_task.ByTask", params={"t": entry})
    try:
        player = Player(pool)
        assert player.observed(player.ask("0 a")) == "<a>"
    finally:
        pool.close()


def test_only_what_can_be_sent_is_observed_and_no_more_than_its_bound(blocking):
    player = Player(blocking, SampleId(500, 0))
    assert player.observed(player.ask("0 parts")) == "<ab>"
    cut = "x" * 10 + "\n[80 characters left out]\n" + "y" * 10
    assert player.observed(player.ask("0 long")) == f"<{cut}>"
    assert player.observed(player.ask("0 many")) == "<xxxxx\n[40 characters left out]\nyyyyy><short>"
    began = time.monotonic()
    assert "Object of type object is not JSON serializable" in player.ask("0 object").reason
    assert (
        "an item of a content is no text: {'type': 'image_url'}"
        in Player(blocking, SampleId(501, 0)).ask("0 image").reason
    )
    assert time.monotonic() - began < 2


def test_threads_for_what_blocks_are_as_many_as_the_configuration_says():
    pool = open_pool(name="tests.fakes.environments.Blocking", threads=1)
    try:
        pool.wait_ready()
        began = time.monotonic()
        for i in range(3):
            Player(pool, SampleId(i, 0)).say("0.2 a")
        answers(pool, 3)
        assert time.monotonic() - began > 0.6
    finally:
        pool.close()


def test_what_cannot_be_asked_or_rendered_fails_its_episode_alone():
    class Template(Bridge):
        def observe(self, conversation, tokens, turn, observed):
            if observed and "odd" in observed[0]["content"]:
                raise AttributeError("this template knows no such role")
            return super().observe(conversation, tokens, turn, observed)

    section = EnvironmentSection(name=FAKE, observation="<{content}>")
    pool = EnvironmentPool(section, Template(Letters(), section.observation), seed=0)
    try:
        going = Player(pool, SampleId(0, 0))
        pool.open(SampleId(0, 1), prompt_of(answer=object()))
        assert "cannot be asked: Object of type object" in answers(pool, 1)[0].reason
        assert "AttributeError: this template" in Player(pool, SampleId(0, 2)).ask("an odd one").reason
        assert going.observed(going.ask("a")) == "<1:a>"
    finally:
        pool.close()


def test_limits_of_turns_and_tokens_end_an_episode_with_what_it_has():
    pool = open_pool(max_turns=2)
    try:
        player = Player(pool)
        player.observed(player.ask("a"))
        assert player.ask("b") == EpisodeEnded(id=player.id, terms={"turns": 2.0}, finish="length")
        narrow = Player(pool, SampleId(1, 0), room=5)
        assert narrow.ask("a").finish == "length"
        narrow = Player(pool, SampleId(2, 0), room=6)
        assert narrow.observed(narrow.ask("a")) == "<1:a>"
    finally:
        pool.close()


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_template_that_rewrites_too_often_ends_the_episode_with_what_it_has(allowed):
    class Rewriting(Bridge):
        def observe(self, conversation, tokens, turn, observed):
            ids, _ = super().observe(conversation, tokens, turn, observed)
            return ids, len(tokens) - 1

    section = EnvironmentSection(name=FAKE, observation="<{content}>", branches=allowed)
    pool = EnvironmentPool(section, Rewriting(Letters(), section.observation), seed=0)
    try:
        player = Player(pool)
        for turn in range(allowed):
            answer = player.ask("a")
            assert answer.keep == len(player.tokens) - 1, turn
            player.tokens, player.mask = np.append(player.tokens, answer.token_ids), np.append(player.mask, [False] * 5)
        assert player.ask("b") == EpisodeEnded(id=player.id, terms={"turns": allowed + 1.0}, finish="length")
        assert pool.stats()["environment/cut_share"] == 1 and pool.stats()["environment/failed_share"] == 0
    finally:
        pool.close()


def test_a_conversation_without_the_prompt_of_its_row_fails_its_group_in_a_sentence():
    class Foreign(Bridge):
        def observe(self, conversation, tokens, turn, observed):
            return super().observe(conversation, tokens, turn, observed)[0], 0

    section = EnvironmentSection(name=FAKE, observation="<{content}>", branches=1)
    pool = EnvironmentPool(section, Foreign(Letters(), section.observation), seed=0)
    try:
        reason = Player(pool).ask("a").reason
        assert reason == f"{FAKE}: its conversation has no token of the row's prompt in front"
    finally:
        pool.close()


def test_what_was_dropped_or_asked_again_gets_no_answer_of_before(shared):
    player, dropped = Player(shared, SampleId(5, 0)), Player(shared, SampleId(5, 1))
    dropped.say("sleep 0.3")
    shared.drop(dropped.id)
    player.say("sleep 3")
    player.tokens, player.mask = ids_of("ask "), np.zeros(0, bool)  # its instance died, and the turn was sampled again
    assert player.observed(player.ask("other")) == "<1:other>"
    time.sleep(0.4)
    assert not shared.poll() and not shared.waiting


@pytest.mark.parametrize("opening", [pytest.param("", marks=pytest.mark.slow), "hello"])
def test_an_episode_of_a_killed_process_is_made_again_by_its_messages(opening):
    pool = open_pool(params={"opening": opening})
    try:
        pool.open(SampleId(0, 0), prompt_of())
        player = Player(pool)
        player.observed(player.answer())
        player.observed(player.ask("a"))
        kill(pool)
        assert player.observed(player.ask("b")) == "<2:b>"
    finally:
        pool.close()


@pytest.mark.slow
def test_an_episode_of_a_killed_controller_is_made_again_where_the_policy_saw_the_same():
    player = Player(None)
    for turn, reported in enumerate(("a", "b", "c"), start=1):
        player.pool = open_pool()
        try:
            assert player.observed(player.ask(reported)) == f"<{turn}:{reported}>"
        finally:
            player.pool.close()
    player.tokens[-2], player.pool = ord("x"), open_pool()
    try:
        assert isinstance(player.ask("d"), EpisodeLost)
        assert player.pool.stats()["environment/redone"] == 1
    finally:
        player.pool.close()


def kill(pool):
    (before,) = pool.pids
    os.kill(before, signal.SIGKILL)
    while pool.pids in ((), (before,)):
        time.sleep(0.01)


def test_what_does_not_replay_begins_again():
    pool = open_pool(name="tests.fakes.environments.Forgetful")
    try:
        player = Player(pool)
        player.observed(player.ask("a"))
        kill(pool)
        assert isinstance(player.ask("b"), EpisodeLost)
        again = Player(pool)
        assert again.observed(again.ask("a")) == "<1:a>", "before its first answer nothing needs to be replayed"
    finally:
        pool.close()


def test_a_retryable_error_and_a_death_are_tried_again(tmp_path):
    for word in ("retry", "die"):
        pool = open_pool(params={"flag": str(tmp_path / word)})
        try:
            player = Player(pool)
            player.observed(player.ask("a"))
            assert player.observed(player.ask(word)) == f"<2:{word}>"
            assert pool.stats()["environment/retries"] == 1
        finally:
            pool.close()


@pytest.mark.slow
def test_a_late_answer_and_a_process_that_hangs_fail_their_episodes(monkeypatch):
    monkeypatch.setattr("dora_jax.tasks.environments.GRACE_S", 1.0)
    pool = open_pool(step_timeout_s=0.5)
    try:
        pool.wait_ready()
        late, other = Player(pool), Player(pool, SampleId(0, 1))
        answer = late.ask("sleep 5")
        assert answer.kind == "deadline" and "environment.step_timeout_s = 0.5 s" in answer.reason
        other.observed(other.ask("a"))
        answer = Player(pool, SampleId(0, 2)).ask("hang 60")
        assert answer.kind == "deadline" and "hung for" in answer.reason, answer
        assert other.observed(other.ask("b")) == "<2:b>"
    finally:
        pool.close()
    pool = open_pool(step_timeout_s=0.5, noise_late=1.0, noise_late_s=2.5)
    try:
        pool.wait_ready()
        player = Player(pool)
        assert player.observed(player.ask("a")) == "<1:a>", "what is late on purpose is not too late"
    finally:
        pool.close()


def test_an_environment_that_cannot_be_is_refused_in_a_sentence():
    for changes, reported in (
        ({"name": "tests.fakes.nothing.Here"}, "environment.name: tests.fakes.nothing.Here cannot be imported"),
        ({"name": "tests.fakes.environments.Lawless"}, "has no replays, reset, step, close"),
        ({"params": {"colour": 1}}, "environment.params: TypeError"),
    ):
        pool = open_pool(**changes)
        try:
            with pytest.raises(ConfigError, match=reported):
                pool.wait_ready()
        finally:
            pool.close()


def test_noise_is_decided_by_sample_and_turn_and_rises_with_the_groups():
    rates = dict(failed=0.1, truncated=0.1, late=0.0, irrelevant=0.2)
    loud = Noise(seed=1, **rates)
    drawn = [loud.kind((group, i), turn) for group in range(100) for i in range(4) for turn in range(5)]
    assert drawn == [loud.kind((group, i), turn) for group in range(100) for i in range(4) for turn in range(5)]
    for kind, rate in rates.items():
        assert abs(drawn.count(kind) / len(drawn) - rate) < 0.02
    ramp = Noise(seed=1, ramp_groups=100, **rates)
    shares = [np.mean([bool(ramp.kind((group, i), 0)) for i in range(2000)]) for group in (0, 50, 400)]
    np.testing.assert_allclose(shares, [0, 0.2, 0.4], atol=0.04)
    assert not any(loud.kind((-1, i), t) for i in (0, 2) for t in range(50))
    assert any(loud.kind((-1, i), t) for i in (1, 3) for t in range(50))


def test_noise_changes_what_is_observed_but_never_the_end():
    pool = open_pool(noise_failed=1.0)
    try:
        player = Player(pool)
        assert player.observed(player.ask("a")) == f"<{FAILED}>"
        assert isinstance(player.ask("end"), EpisodeEnded)
    finally:
        pool.close()


def test_an_environment_of_token_ids_hears_and_says_them():
    """In an interpreter that the configuration names."""
    section = EnvironmentSection(name="tests.fakes.environments.Echo", python=sys.executable)
    pool = EnvironmentPool(section, Bridge(Letters(), section.observation), 0, PolicyFacts(vocab=88, stop_ids=(33,)))
    try:
        assert pool.wait_ready() == ("right",)
        player = Player(pool)
        pool.open(player.id, prompt_of())
        assert player.observed(player.answer()) == "X" and player.observed(player.ask("ab")) == "X"
        player.version = 4
        assert player.ask("c!") == EpisodeEnded(id=player.id, terms={"right": 3.0})
    finally:
        pool.close()


def test_a_mix_has_environments_of_messages_and_of_token_ids_which_say_how_many_the_next_turn_may_have():
    params = {"ids": {"name": "tests.fakes.environments.Echo"}, "words": {"name": FAKE}}
    section = EnvironmentSection(
        name="dora_jax.tasks.environments.by_task.ByTask", params=params, observation="<{content}>"
    )
    pool = EnvironmentPool(section, Bridge(Letters(), section.observation), 0, PolicyFacts(vocab=88, stop_ids=(33,)))
    try:
        assert pool.wait_ready() == ("right", "turns")
        words = Player(pool, SampleId(0, 0), prompt=dataclasses.replace(prompt_of(), task="words"))
        assert words.observed(words.ask("a")) == "<1:a>"
        ids = Player(pool, SampleId(0, 1), prompt=dataclasses.replace(prompt_of(), task="ids"))
        pool.open(ids.id, ids.prompt)
        opening = ids.answer()
        assert opening.turn_tokens == 5 and ids.observed(opening) == "X" and ids.observed(ids.ask("ab")) == "X"
        assert ids.ask("c!") == EpisodeEnded(id=ids.id, terms={"right": -1.0})
        assert pool.try_episodes(ids.prompt, Letters().encode) == pool.try_episodes(words.prompt, Letters().encode)
    finally:
        pool.close()


def test_token_ids_that_do_not_extend_an_episode_begin_a_branch():
    bridge, tokens = TokenBridge((33,)), ids_of("ask ab!")
    received = bridge.begin(prompt_of())
    for whole, more, keep in (("ask ab!X", "X", None), ("ask abXY", "XY", 6), ("ask ", " ", 3), ("ask ab!", "", None)):
        ids, kept = bridge.observe(received, tokens, tokens[4:], [{"token_ids": ids_of(whole).tolist()}])
        assert (Letters().decode(ids), kept) == (more, keep)


def test_what_says_token_ids_has_no_noise_and_an_interpreter_is_there():
    pool = open_pool(name="tests.fakes.environments.Echo", noise_late=0.5)
    try:
        with pytest.raises(ConfigError, match="environment.noise_late: .*Echo says token ids, which have no noise"):
            pool.wait_ready()
    finally:
        pool.close()
    wrong = Config(environment=EnvironmentSection(name=FAKE, python="/no/python"))
    assert "environment.python: '/no/python' is no interpreter of this machine" in environment.problems(wrong)
