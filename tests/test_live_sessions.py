"""Sessions of users as episodes of a run: who takes which place, what an answer is worth, and what becomes of both."""

import threading

import numpy as np
import pytest

from dora_jax.runtime.live_sessions import LiveSessions, SessionPrompts, SessionsOver
from dora_jax.tasks.pool import GroupFailure
from dora_jax.types import EpisodeEnded, EpisodeFailed, EpisodeLost, EpisodeSoFar, Observed, SampleId, ScoredGroup
from tests.fakes.coordinator_world import STEPS, P, expected, trained_by
from tests.fakes.live_endpoint import Run, Tokenizer

A, B = SampleId(0, 0), SampleId(0, 1)
ASKED = [{"role": "user", "content": "2 + 2 ="}]


class Pool:
    """A reward of as many points as the next message has letters; "?" is no message that it can score."""

    def __init__(self):
        self.asked, self.done, self.closed = [], [], False

    def submit(self, prompt, samples):
        self.asked.append((prompt, samples))
        said = "".join(message["content"] for message in prompt.answer["next"])
        if said == "?":
            self.done.append(GroupFailure(group_id=prompt.group_id, reason="no score", lengths=(1,)))
            return
        value = np.array([len(said)], np.float32)
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


def answers(sessions, observed, text="4\0", version=3):
    """The policy says this behind what it observed."""
    prompt = SessionPrompts(Tokenizer(), 64).prompt_at(0)
    turn = np.frombuffer(text.encode("latin-1"), np.uint8).astype(np.int32)
    tokens = np.concatenate([prompt.token_ids, observed.token_ids, turn])
    mask = np.concatenate([np.zeros(len(tokens) - len(prompt.token_ids) - len(turn), bool), np.ones(len(turn), bool)])
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    told = EpisodeSoFar(id=observed.id, version=version, tokens=tokens, mask=mask, logprobs=logprobs, room=64)
    sessions.turn(prompt, told)


def test_a_session_takes_the_oldest_place_and_its_next_message_is_the_score():
    sessions = make(pool := Pool())
    promise = sessions.take("s", ASKED, 64)
    (observed,) = sessions.poll()
    assert isinstance(observed, Observed) and observed.id == A and not promise.done()
    assert Tokenizer().decode([*prompt_ids(), *observed.token_ids]) == "user: 2 + 2 =\n"
    answers(sessions, observed)
    told = promise.result(0)
    assert (told.version, told.ids.tolist(), told.finish) == (3, [ord("4"), 0], "stop")
    assert sessions.take("s", ASKED, 64) is promise  # a retry
    said = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "yes"}]
    assert sessions.take("s", said, 1) is None  # too short for a turn: the episode is over
    assert sessions.poll() == [EpisodeEnded(id=A, terms={"right": 3.0}, finish="length")]
    ((prompt, (sample,)),) = pool.asked
    assert prompt.answer == {"messages": ASKED, "next": said[2:]} and prompt.text == "user: 2 + 2 =\n"
    assert sample.out_ids.tolist() == [ord("4"), 0]


def prompt_ids():
    return SessionPrompts(Tokenizer(), 64).prompt_at(0).token_ids


def test_sessions_that_end_or_fall_silent_are_scored_by_nothing():
    sessions = make(idle_s=0.0)
    for session, end in (("a", lambda: sessions.end("a")), ("b", lambda: None)):
        sessions.take(session, ASKED, 64)
        (observed,) = sessions.poll()
        answers(sessions, observed)
        end()
        assert [*sessions.poll(), *sessions.poll()] == [
            EpisodeEnded(id=observed.id, terms={"right": 0.0}, finish="stop")
        ]
    assert not sessions.end("a") and sessions.take("c", ASKED, 64) is None  # no place is left


def test_what_does_not_go_on_from_the_answer_ends_the_session_and_begins_another():
    sessions = make()
    sessions.take("s", ASKED, 64)
    answers(sessions, *sessions.poll())
    other = [{"role": "user", "content": "something else"}]
    assert sessions.take("s", other, 64) is not None
    observed, ended = sessions.poll()
    assert observed.id == B and ended == EpisodeEnded(id=A, terms={"right": 0.0}, finish="stop")
    assert sessions.take("t", [*other, {"role": "assistant", "content": "x"}, *other], 64) is None  # not its beginning


def test_a_score_that_fails_fails_the_episode_and_a_place_given_up_says_so():
    sessions = make()
    sessions.take("s", ASKED, 64)
    answers(sessions, *sessions.poll())
    sessions.take("s", [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "?"}], 1)
    assert sessions.poll() == [EpisodeFailed(id=A, reason="no score", kind="error")]
    promise = sessions.take("t", ASKED, 64)
    sessions.drop(B)
    sessions.poll()
    with pytest.raises(SessionsOver, match="given up"):
        promise.result(0)


def test_a_client_that_waits_when_the_run_ends_hears_of_it():
    sessions = make()
    promise = sessions.take("s", ASKED, 64)
    sessions.close()
    with pytest.raises(SessionsOver, match="the run has ended"):
        promise.result(0)
    assert sessions.take("t", ASKED, 64) is None


def test_a_place_of_an_earlier_process_is_lost():
    sessions = make()
    sessions.drop(A)
    answers(sessions, Observed(id=A, token_ids=np.array([1], np.int32)))
    (lost,) = sessions.poll()
    assert isinstance(lost, EpisodeLost) and lost.id == A


def test_an_episode_goes_on_behind_the_exact_tokens_of_its_turn():
    sessions = make()
    sessions.take("s", ASKED, 64)
    answers(sessions, *sessions.poll())
    said = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "and 3 + 3 ="}]
    assert not sessions.take("s", said, 64).done()
    (observed,) = sessions.poll()
    assert observed.id == A and Tokenizer().decode(observed.token_ids) == "user: and 3 + 3 =\n"
    answers(sessions, observed, "6\0")
    said += [{"role": "assistant", "content": "6"}, {"role": "user", "content": "thanks"}]
    assert sessions.take("s", said, 64) is None  # it has had its turns
    assert sessions.poll() == [EpisodeEnded(id=A, terms={"right": 11.0 + 6.0}, finish="length")]


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
    """Every sample is one session's answer by the version that the session was told, worth what was said to it."""
    told, lock = {}, threading.Lock()

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
                    told[tuple(choice["token_ids"])] = (answer["weight_version"], says)
                said = [*asked, {"role": "assistant", "content": choice["message"]["content"]}]
                run.ask(session=session, messages=[*said, {"role": "user", "content": says}], max_tokens=1)
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
            version, says = told[tuple(turn.tolist())]
            assert version == group.version and reward == len(says)
