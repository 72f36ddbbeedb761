"""Sessions of users as episodes of a run: who takes which place, what an answer is worth, and what becomes of both."""

import threading

import numpy as np
import pytest

from dora_jax.runtime.live_sessions import POSTED, AskedTurn, LiveSessions, SessionPrompts, SessionsOver
from dora_jax.tasks.pool import GroupFailure
from dora_jax.types import (
    WHOLE,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeLost,
    EpisodeSoFar,
    Observed,
    SampleId,
    ScoredGroup,
)
from tests.fakes.coordinator_world import STEPS, P, expected, trained_by
from tests.fakes.live_endpoint import Run, Tokenizer

A, B = SampleId(0, 0), SampleId(0, 1)
C, D = SampleId(1, 0), SampleId(1, 1)
ASKED = [{"role": "user", "content": "2 + 2 ="}]


class Pool:
    """A reward of as many points as the next message has letters; "?" is no message that it can score."""

    def __init__(self):
        self.asked, self.done, self.closed = [], [], False

    def submit(self, prompt, samples):
        self.asked.append((prompt, samples))
        reported = "".join(message["content"] for message in prompt.answer["next"])
        if reported == "?":
            self.done.append(GroupFailure(group_id=prompt.group_id, reason="no score", lengths=(1,)))
            return
        value = np.array([len(reported)], np.float32)
        self.done.append(
            ScoredGroup(group_id=prompt.group_id, version=0, samples=samples, rewards=value, parts={"right": value})
        )

    def poll(self):
        done, self.done = self.done, []
        return done

    def close(self):
        self.closed = True


def make(pool=None, **changes):
    limits = {"turn_tokens": 8, "max_turns": 2, "idle_s": 100.0, "context": 120} | changes
    sessions = LiveSessions(Tokenizer(), pool or Pool(), **limits)
    for id in (A, B):
        sessions.open(id, SessionPrompts(Tokenizer(), 64).prompt_at(0))
    return sessions


def take(sessions, session, messages, max_tokens=64, **more):
    return sessions.take(AskedTurn(session=session, messages=messages, max_tokens=max_tokens, **more))


def answers(sessions, observed, text="4\0", version=3):
    """The policy says this behind what it observed."""
    prompt = SessionPrompts(Tokenizer(), 64).prompt_at(0)
    turn = np.frombuffer(text.encode("latin-1"), np.uint8).astype(np.int32)
    tokens = np.concatenate([prompt.token_ids, observed.token_ids, turn])
    mask = np.concatenate([np.zeros(len(tokens) - len(prompt.token_ids) - len(turn), bool), np.ones(len(turn), bool)])
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    so_far = EpisodeSoFar(id=observed.id, version=version, tokens=tokens, mask=mask, logprobs=logprobs, room=64)
    sessions.turn(prompt, so_far)


def test_a_session_takes_the_oldest_place_and_its_next_message_is_the_score():
    sessions = make(pool := Pool())
    promise = take(sessions, "s", ASKED)
    (observed,) = sessions.poll()
    assert isinstance(observed, Observed) and observed.id == A and not promise.done()
    assert Tokenizer().decode([*prompt_ids(), *observed.token_ids]) == "user: 2 + 2 =\n"
    answers(sessions, observed)
    so_far = promise.result(0)
    assert (so_far.version, so_far.ids.tolist(), so_far.finish) == (3, [ord("4"), 0], "stop")
    assert take(sessions, "s", ASKED) is promise  # a retry
    reported = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "yes"}]
    assert "temperature" in take(sessions, "s", reported, differs="temperature is not the run's")  # the episode is over
    assert sessions.poll() == [EpisodeEnded(id=A, terms={"right": 3.0}, finish="length")]
    ((prompt, (sample,)),) = pool.asked
    assert prompt.answer == {"messages": ASKED, "next": reported[2:]} and prompt.text == "user: 2 + 2 =\n"
    assert sample.out_ids.tolist() == [ord("4"), 0]


def prompt_ids():
    return SessionPrompts(Tokenizer(), 64).prompt_at(0).token_ids


def test_sessions_that_end_or_fall_silent_are_scored_by_nothing():
    sessions = make(idle_s=0.0)
    for session, end in (("a", lambda: sessions.end("a")), ("b", lambda: None)):
        take(sessions, session, ASKED)
        (observed,) = sessions.poll()
        answers(sessions, observed)
        end()
        assert [*sessions.poll(), *sessions.poll()] == [
            EpisodeEnded(id=observed.id, terms={"right": 0.0}, finish="stop")
        ]
    assert not sessions.end("a") and "no group has a free place" in take(sessions, "c", ASKED)


def test_what_does_not_go_on_from_the_answer_ends_the_session_and_begins_another():
    sessions = make()
    take(sessions, "s", ASKED)
    answers(sessions, *sessions.poll())
    other = [{"role": "user", "content": "something else"}]
    assert take(sessions, "s", other) is not None
    observed, ended = sessions.poll()
    assert observed.id == B and ended == EpisodeEnded(id=A, terms={"right": 0.0}, finish="stop")


def test_a_score_that_fails_fails_the_episode_and_a_place_given_up_says_so():
    sessions = make()
    take(sessions, "s", ASKED)
    answers(sessions, *sessions.poll())
    reported = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "?"}]
    take(sessions, "s", reported, differs="it is not trained")
    assert sessions.poll() == [EpisodeFailed(id=A, reason="no score", kind="error")]
    promise = take(sessions, "t", ASKED)
    sessions.drop(B)
    sessions.poll()
    with pytest.raises(SessionsOver, match="given up"):
        promise.result(0)


def test_a_client_that_waits_when_the_run_ends_hears_of_it():
    sessions = make()
    promise = take(sessions, "s", ASKED)
    sessions.close()
    with pytest.raises(SessionsOver, match="the run has ended"):
        promise.result(0)
    assert "no group has a free place" in take(sessions, "t", ASKED)


def test_a_place_of_an_earlier_process_is_lost():
    sessions = make()
    sessions.drop(A)
    answers(sessions, Observed(id=A, token_ids=np.array([1], np.int32)))
    (lost,) = sessions.poll()
    assert isinstance(lost, EpisodeLost) and lost.id == A


def test_an_episode_goes_on_behind_the_exact_tokens_of_its_turn():
    sessions = make()
    take(sessions, "s", ASKED)
    answers(sessions, *sessions.poll())
    reported = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "and 3 + 3 ="}]
    assert not take(sessions, "s", reported).done()
    (observed,) = sessions.poll()
    assert observed.id == A and Tokenizer().decode(observed.token_ids) == "user: and 3 + 3 =\n"
    answers(sessions, observed, "6\0")
    reported += [{"role": "assistant", "content": "6"}, {"role": "user", "content": "thanks"}]
    assert "has had its 2 turns" in take(sessions, "s", reported)
    assert "goes on without training" in take(
        sessions, "s", [*reported, {"role": "assistant", "content": "hm"}, *ASKED]
    )
    assert sessions.poll() == [EpisodeEnded(id=A, terms={"right": 11.0 + 6.0}, finish="length")]


def test_a_turn_may_be_short_and_end_at_a_stop_string():
    sessions = make()
    take(sessions, "s", ASKED, 5, stop=("=",))
    (observed,) = sessions.poll()
    assert (observed.turn_tokens, observed.stop) == (5, ("=",))
    answers(sessions, observed, text="4 =")
    reported = [*ASKED, {"role": "assistant", "content": "4 ="}, {"role": "user", "content": "and?"}]
    take(sessions, "s", reported)
    (observed,) = sessions.poll()
    assert (observed.turn_tokens, observed.stop) == (8, ())
    assert Tokenizer().decode(observed.token_ids, keep_special=True) == "\0user: and?\n", "behind all of the turn"


def test_tools_are_shown_to_the_policy_in_front_of_what_it_has_seen():
    tools = [{"type": "function", "function": {"name": "add"}}]
    for place, text in (("after", "add ~ 2 + 2 =\n"), ("before", None)):
        sessions = make()
        promise = take(sessions, "s", ASKED, variables={"tools": tools, "place": place})
        if text is None:
            assert "begins otherwise" in promise
        else:
            (observed,) = sessions.poll()
            assert Tokenizer().decode(observed.token_ids) == text


def test_examples_in_front_of_a_session_are_observed_and_what_a_client_writes_stays_text():
    sessions = make()
    shots = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "3 + 3 ="}]
    assert not take(sessions, "s", shots).done()
    (observed,) = sessions.poll()
    text = Tokenizer().decode(observed.token_ids, keep_special=True)
    assert text == "2 + 2 =\n4\0user: 3 + 3 =\n"


def test_a_session_goes_on_from_a_tool_call_however_its_client_spells_it():
    call = {"function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}

    def shown(ids, finish):
        return {"role": "assistant", "content": "so ", "tool_calls": [call]}

    for arguments, goes_on in (({"a": 1, "b": 2}, True), ('{"a":1,"b":2}', True), ({"a": 2}, False)):
        sessions = make()
        take(sessions, "s", ASKED, shown=shown)
        answers(sessions, *sessions.poll(), text="so <call>\0")
        sent = {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}
        reported = [
            *ASKED,
            {"role": "assistant", "content": "so", "tool_calls": [sent]},
            {"role": "tool", "content": "3"},
        ]
        promise = take(sessions, "s", reported)
        answered, *ended = sessions.poll()[::-1] if goes_on else sessions.poll()
        assert answered.id == (A if goes_on else B) and not isinstance(promise, str)
        if goes_on:
            assert not ended and Tokenizer().decode(answered.token_ids) == "tool: 3\n", "behind its exact tokens"


def test_a_group_is_of_one_task():
    sessions = make()
    for id in (C, D):
        sessions.open(id, SessionPrompts(Tokenizer(), 64).prompt_at(1))
    for session, task in (("a", "x"), ("b", "y"), ("c", "y"), ("d", "x")):
        take(sessions, session, ASKED, task=task)
    assert [observed.id for observed in sessions.poll()] == [A, C, D, B]
    assert "no group has a free place" in take(sessions, "e", ASKED, task="x")
    sessions.drop(A)
    sessions.drop(B)
    sessions.open(A, SessionPrompts(Tokenizer(), 64).prompt_at(0))
    assert not isinstance(take(sessions, "e", ASKED, task="z"), str), "a group that begins again is of any task"


def test_a_posted_reward_ends_a_session_and_counts_once():
    sessions = make(reward_s=100.0)
    take(sessions, "s", ASKED)
    assert "has 0 turns" in sessions.reward("s", {0: 1.0})
    answers(sessions, *sessions.poll())
    assert [sessions.reward("s", {WHOLE: 0.5}) for _ in range(3)] == [""] * 3
    assert [*sessions.poll(), *sessions.poll()] == [
        EpisodeEnded(id=A, terms={"right": 0.0, POSTED: 0.5}, finish="stop")
    ]
    assert sessions.reward("s", {WHOLE: 0.5}) == "" and "0.5, has been posted" in sessions.reward("s", {WHOLE: 0.7})
    assert sessions.poll() == [] and "no session 't'" in sessions.reward("t", {WHOLE: 1.0})
    assert "serving.reward_s is 0" in make().reward("s", {WHOLE: 1.0})


def test_rewards_of_turns_add_up_and_may_come_after_the_end():
    sessions = make(reward_s=100.0)
    take(sessions, "s", ASKED)
    answers(sessions, *sessions.poll())
    assert sessions.reward("s", {0: 1.0}) == ""
    reported = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "more"}]
    take(sessions, "s", reported)
    answers(sessions, *sessions.poll())
    sessions.end("s")
    assert [*sessions.poll(), *sessions.poll()] == [], "the reward of the second turn may come"
    assert sessions.reward("s", {1: 0.25}) == ""
    assert sessions.poll() == [EpisodeEnded(id=A, terms={"right": 4.0, POSTED: 1.25}, finish="stop")]


def test_a_reward_that_never_comes_is_no_reward_of_zero():
    sessions = make(reward_s=1e-9)
    take(sessions, "s", ASKED)
    answers(sessions, *sessions.poll())
    sessions.end("s")
    failed = [*sessions.poll(), *sessions.poll()]
    assert [(each.id, each.kind) for each in failed] == [(A, "deadline")] and "no reward was posted" in failed[0].reason
    assert "later than" in sessions.reward("s", {WHOLE: 1.0})


class Bare(Tokenizer):
    def chat(self, messages, **variables):
        return "".join(message["content"] for message in messages)


def test_a_chat_template_that_begins_with_the_message_leaves_no_prompt():
    with pytest.raises(ValueError, match="nothing in front"):
        SessionPrompts(Bare(), 64)


def short(version, group, index, limit):
    """Tokens of a turn."""
    return 3 + (group + index) % 3


@pytest.mark.slow
def test_a_run_trains_on_what_its_users_say():
    """Every sample is one session's answer by the version that the session was given, worth what the user wrote next."""
    so_far, lock = {}, threading.Lock()

    def use(run, number):
        for count in range(1000):
            session, asked = f"{number} {count}", [{"role": "user", "content": f"q{number}"}]
            try:
                status, answer = run.ask(session=session, messages=asked, return_token_ids=True)
                if status != 200:
                    return
                choice = answer["choices"][0]
                says = "yes" if sum(choice["token_ids"]) % 2 else "no"
                with lock:
                    so_far[tuple(choice["token_ids"])] = (answer["weight_version"], says)
                reported = [*asked, {"role": "assistant", "content": choice["message"]["content"]}]
                run.ask(session=session, messages=[*reported, {"role": "user", "content": says}], max_tokens=1)
            except OSError:  # the run has ended
                return

    sessions = LiveSessions(Tokenizer(), Pool(), turn_tokens=16, max_turns=1, idle_s=100.0, context=72)
    with Run(short, sessions) as run:
        users = [threading.Thread(target=use, args=(run, number)) for number in range(6)]
        for user in users:
            user.start()
        run.release(STEPS)
        for user in users:
            user.join()
    trained = trained_by(run.records)
    assert run.halt.ok and len(trained) == STEPS * P and len({g.version for _, g in trained}) > 1
    for base, group in trained:
        assert base - group.version <= 2
        for sample, reward in zip(group.samples, group.rewards, strict=True):
            turn = sample.out_ids[sample.mask]
            np.testing.assert_array_equal(turn, expected(sample)[sample.mask])
            version, says = so_far[tuple(turn.tolist())]
            assert version == group.version and reward == len(says)
