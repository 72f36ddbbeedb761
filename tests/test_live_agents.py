"""Agents on the endpoint of a run that trains on them, in the run's own order of wrappers: what is trained is what they
were answered, worth what they posted."""

import itertools
import threading
import time
import urllib.error

import numpy as np
import pytest

from dora_jax.runtime.live_sessions import POSTED, AskedTurn, LiveSessions, SessionPrompts, SessionsOver
from dora_jax.serving.client import AgentSession
from dora_jax.types import WHOLE
from tests.fakes import journaled_run
from tests.fakes.coordinator_world import SECTION, STEPS, G, P, expected, trained_by
from tests.fakes.live_endpoint import Run, Tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ASKED = [{"role": "user", "content": "2 + 2 ="}]
SHOTS = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "3 + 3 ="}]
KINDS = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "stop": {"stop": ["zz"]},
    "seed": {"seed": 3},
    "few-shot": {"messages": SHOTS},
    "short": {"max_tokens": 5},
    "logprobs": {"logprobs": True},
    "warm": {"temperature": 1.5},
}
UNTRAINED = {
    "temperature": {"temperature": 0},
    "top_p": {"temperature": 0.5, "top_p": 0.5},
    "two": {"n": 2},
    "version": {"model": "policy@0"},
    "top": {"logprobs": True, "top_logprobs": 2},
}


class Agents:
    """Threads that work on tasks until the run ends. answered: turn -> (version, task, reward, temperature)."""

    def __init__(self, url):
        self.url, self.answered, self.flags, self.lock = url, {}, {}, threading.Lock()
        self.threads = [threading.Thread(target=self._work, args=(number,)) for number in range(6)]

    def _work(self, number):
        for count in range(1000):
            kind = list(KINDS)[(number + count) % len(KINDS)]
            task = f"task {count % 2}"
            try:
                if not self._episode(kind, task):
                    return
            except (OSError, urllib.error.URLError, ValueError):  # the run has ended
                return

    def _episode(self, kind, task):
        with AgentSession(self.url, task=task) as session:
            status, answer = self.ask(session, **({"messages": ASKED, "max_tokens": 9} | KINDS[kind]))
            if status != 200:
                return False
            with self.lock:
                self.flags.setdefault(kind, set()).add((answer["trained"], answer.get("untrained_because")))
            if not answer["trained"]:
                return True
            ids = answer["choices"][0]["token_ids"]
            assert len(ids) <= (5 if kind == "short" else 9)
            reward = float(sum(ids) % 7)
            with self.lock:
                self.answered[tuple(ids)] = answer["weight_version"], task, reward, KINDS[kind].get("temperature")
            for _ in range(2):  # as a client whose first answer was lost
                session.reward(reward)
            return True

    def ask(self, session, **body):
        return self.run.ask(session=session.headers, return_token_ids=True, **body)


@pytest.mark.slow
def test_a_run_trains_on_agents_with_tools_and_says_which_answers_it_does_not_train():
    sessions = LiveSessions(Tokenizer(), None, turn_tokens=16, max_turns=2, idle_s=100.0, context=72, reward_s=100.0)
    with Run(lambda version, group, index, limit: 3 + (group + index) % 3, sessions, term=POSTED) as run:
        agents = Agents(run.url)
        agents.run = run
        for kind, body in UNTRAINED.items():
            status, answer = agents.ask(AgentSession(run.url), **({"messages": ASKED, "max_tokens": 3} | body))
            assert status == 200 and answer["trained"] is False, kind
            if kind == "top":
                content = answer["choices"][0]["logprobs"]["content"]
                assert content and all(len(entry["top_logprobs"]) == 2 for entry in content)
            assert answer["untrained_because"].startswith(
                {"two": "it wants 2 choices", "version": "it wants a version", "top": "top_logprobs"}.get(kind, kind)
            )
        for thread in agents.threads:
            thread.start()
        run.release(STEPS)
        for thread in agents.threads:
            thread.join()
    trained = trained_by(run.records)
    assert run.halt.ok and len(trained) == STEPS * P
    for kind, flags in agents.flags.items():
        assert (True, None) in flags, f"{kind}: {flags}"
        assert all(because is None or "no group has a free place" in because for _, because in flags)
    for base, group in trained:
        assert base - group.version <= 2 and len(group.samples) == G
        tasks = set()
        for sample, reward in zip(group.samples, group.rewards, strict=True):
            turn = sample.out_ids[sample.mask]
            np.testing.assert_array_equal(turn, expected(sample)[sample.mask])
            version, task, posted, temperature = agents.answered[tuple(turn.tolist())]
            assert version == group.version and reward == posted
            if temperature is None:
                assert sample.table.temperatures is None
            else:
                drawn_at = sample.table.temperatures[len(sample.prompt_ids) - 1 :]
                np.testing.assert_array_equal(drawn_at, np.where(sample.mask, np.float32(temperature), 0))
            tasks.add(task)
        assert len(tasks) == 1, "a baseline mixes no tasks"


@pytest.mark.slow
def test_a_run_killed_again_and_again_trains_each_reward_once(tmp_path):
    """Sessions call a tool and go on; rewards are numbers that come once, and those that are trained are among them."""
    made, numbers, accepted, over = [], itertools.count(1), set(), threading.Event()

    def environments():
        limits = {"turn_tokens": 16, "max_turns": 3, "idle_s": 100.0, "context": 72, "reward_s": 100.0}
        made.append(LiveSessions(Tokenizer(), None, **limits))
        return made[-1]

    def agent():
        while not over.is_set():
            sessions, session, talk = made[-1] if made else None, str(next(numbers)), ASKED
            try:
                for _ in range(2):
                    asked = AskedTurn(session=session, messages=talk, max_tokens=9, variables={"tools": TOOLS})
                    promise = sessions.take(asked)
                    turn = promise.result(20)
                    reply = {"role": "assistant", "content": Tokenizer().decode(turn.ids)}
                    talk = [*talk, reply, {"role": "tool", "content": "3"}]
                reward = float(next(numbers))
                if not sessions.reward(session, {WHOLE: reward}):
                    accepted.add(reward)
            except (AttributeError, SessionsOver):  # nothing runs, no place is free, or the run has been killed
                time.sleep(0.002)

    users = SessionPrompts(Tokenizer(), SECTION.max_new_tokens)
    history = journaled_run.Run(tmp_path, eval_every=0, environments=environments, users=users, term=POSTED)
    agents = [threading.Thread(target=agent) for _ in range(8)]
    for thread in agents:
        thread.start()
    incarnations, halt = 0, None
    while halt is None:
        incarnations += 1
        halt = history.incarnation(kill_at=90 + 61 * incarnations if incarnations < 8 else None)
    over.set()
    for thread in agents:
        thread.join()
    assert halt.ok and incarnations > 2
    history.audit()
    trained = [reward for rewards in history.rewards.values() for reward in rewards]
    assert len(trained) == len(set(trained)) == journaled_run.STEPS * P * G and set(trained) <= accepted
    print(f"{incarnations} incarnations, {len(accepted)} rewards accepted, {len(trained)} trained, each once")
