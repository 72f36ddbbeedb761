"""The reward workers: scores come back; raising, hanging, dying and lying rewards fail their group, never score 0."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest

from dora_jax.config import ConfigError
from dora_jax.tasks import GYM_REWARD, sandbox
from dora_jax.tasks.pool import GroupFailure
from dora_jax.tasks.sandbox import calls
from dora_jax.types import ScoredGroup
from tests.fakes.reward_pool import MY_REWARDS, group, pools, results, scored

EXACT = "dora_jax.tasks.rewards.exact"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(MY_REWARDS)
    monkeypatch.chdir(tmp_path)  # as for a user: the module lies where the command is run
    return tmp_path


@pytest.fixture
def opened(folder):
    with pools() as open_pool:
        yield open_pool


# ---------------------------------------------------------------- scores


def test_a_group_comes_back_with_its_rewards_terms_and_version(opened):
    pool = opened("short", "terms")
    result = scored(pool, "4", "no", "4" * 100, group_id=7)
    assert isinstance(result, ScoredGroup) and (result.group_id, result.version) == (7, 3)
    assert {name: part.tolist() for name, part in result.parts.items()} == {
        "short": [1, 0, 0],
        "right": [1, 0, 0],
        "length": [pytest.approx(0.1), pytest.approx(0.2), 10],
    }
    np.testing.assert_allclose(result.rewards, [2.1, 0.2, 10], rtol=1e-6)
    assert result.rewards.dtype == np.float32 and len(result.samples) == 3


def test_weights_are_of_the_sum_and_terms_stay_as_they_are(opened):
    result = scored(opened("short", "terms", reward_weights=(2.0, -0.5)), "4", "no")
    assert result.parts["right"].tolist() == [1, 0]
    np.testing.assert_allclose(result.rewards, [2 - 0.5 * 1.1, -0.1], rtol=1e-6)


def test_a_reward_sees_the_prompt_the_text_and_any_json_answer(opened):
    answer = {"value": [1, None, "\N{SNOWMAN}"]}
    result = scored(opened("seen"), "a\n\N{SNOWMAN}\ud800", answer=answer)
    assert list(result.parts) == ["seen " + repr(("2+2=", "a\n\N{SNOWMAN}\ud800", answer))]


def test_rewards_see_what_the_answer_pattern_takes_and_nothing_where_it_does_not_match(opened):
    pool = opened(EXACT, answer_pattern=r"#### (-?\d+)$")
    result = scored(pool, "2+2=4 #### 4", "4", "#### 4 or 5", "")
    assert result.rewards.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_many_groups_on_two_workers_each_come_back_once(opened):
    pool = opened("short", reward_workers=2)
    for i in range(200):
        pool.submit(*group("4", "5", group_id=i))
    done = results(pool, 200)
    assert sorted(result.group_id for result in done) == list(range(200))
    assert all(result.rewards.tolist() == [1.0, 0.0] for result in done)
    assert pool.stats()["rewards/queued_groups"] == 0


def test_neither_submit_nor_poll_waits_for_a_reward(opened):
    pool = opened("trouble", reward_timeout_s=60.0)
    for i in range(200):
        pool.submit(*group("hang", answer="log", group_id=i))
    assert pool.poll() == []
    assert pool.stats()["rewards/queued_groups"] == 200


def test_what_a_reward_prints_is_only_noise(opened):
    assert scored(opened("noisy"), "a", "bb", "ccc").rewards.tolist() == [1.0, 2.0, 3.0]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "response, reason, kind",
    [
        (
            "raise",
            "reward trouble raised ValueError: no good (my_rewards.py:",
            "reward trouble raised ValueError (my_rewards.py:",
        ),
        ("sysexit", "reward trouble raised SystemExit: 0", "reward trouble raised SystemExit (my_rewards.py:"),
        (
            "exit",
            "reward trouble: the worker exited with code 0; it last printed: bye",
            "reward trouble: the worker exited with code 0",
        ),
        (
            "segv",
            "reward trouble: the worker was killed by SIGSEGV",
            "reward trouble: the worker was killed by SIGSEGV",
        ),
        ("text", "reward trouble returned '1.0', a str, not a number", "reward trouble returned a str"),
        ("nan", "reward trouble returned nan", "reward trouble returned nan"),
    ],
)
def test_a_reward_that_fails_is_tried_again_and_then_fails_its_group(opened, folder, response, reason, kind):
    pool = opened("trouble", reward_retries=1)
    log = folder / "calls"
    pool.wait_ready()
    first = pool.pids
    result = scored(pool, "fine", response, "never reached", answer=str(log), group_id=5)
    assert isinstance(result, GroupFailure) and result.group_id == 5
    assert result.reason.startswith(reason) and result.reason.endswith(
        f"({len(response)} tokens, sample (5, 1), 2 attempts)"
    )
    assert result.lengths == (4, len(response), 13)
    assert result.kind.startswith(kind) and "no good" not in result.kind and "printed" not in result.kind
    assert result.response == response
    assert pool.pids != first  # each failure is followed by a fresh process
    assert log.read_text() == "..."  # one call for the first sample, two for the second, none for the third
    assert scored(pool, "fine", answer=str(log)).rewards.tolist() == [1.0]  # and the pool goes on
    stats = pool.stats()
    assert (stats["rewards/failed_share"], stats["rewards/retries"]) == (0.5, 1)
    assert stats["rewards/failed_length_p50"] == np.median(result.lengths)


def test_quick_rewards_are_asked_about_a_group_at_once_and_none_of_it_is_blamed_for_another(opened, folder):
    pool, log = opened("trouble", reward_retries=1, reward_timeout_s=20.0), folder / "calls"
    for i in range(3):  # it is known to be quick after the first
        assert scored(pool, "fine", "fine", group_id=i, answer=str(log)).rewards.tolist() == [1.0, 1.0]
    log.write_text("")
    result = scored(pool, "fine", "raise", "never reached", answer=str(log), group_id=5)
    assert isinstance(result, GroupFailure)
    assert result.reason.endswith("(5 tokens, sample (5, 1), 2 attempts)") and result.response == "raise"
    assert log.read_text() == "....."  # the first two together, the first alone, the second alone and again
    assert scored(pool, "fine", "fine", answer=str(log)).rewards.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("response", ["hang", "spin"])
def test_a_reward_that_hangs_is_killed_at_the_deadline(opened, folder, response):
    pool = opened("trouble", reward_retries=0, reward_timeout_s=0.3)
    pool.wait_ready()
    result = scored(pool, response, answer=str(folder / "calls"))
    assert isinstance(result, GroupFailure)
    assert result.reason == "reward trouble took over 0.3 s (4 tokens, sample (0, 0), 1 attempts)"
    assert scored(pool, "fine", answer=str(folder / "calls")).rewards.tolist() == [1.0]


def test_an_answer_pattern_that_never_ends_is_named(opened):
    pool = opened(EXACT, answer_pattern="^((?:a+)+)$", reward_retries=0, reward_timeout_s=0.5)
    pool.wait_ready()
    result = scored(pool, "a" * 40 + "b")
    assert result.kind == "task.answer_pattern '^((?:a+)+)$' or reward exact took over 0.5 s"


def test_a_hanging_reward_does_not_hold_up_the_other_worker(opened, folder):
    pool = opened("trouble", reward_workers=2, reward_timeout_s=60.0)
    pool.submit(*group("hang", answer=str(folder / "a"), group_id=0))
    pool.submit(*group("fine", answer=str(folder / "b"), group_id=1))
    assert [result.group_id for result in results(pool, 1, timeout_s=50.0)] == [1]


def test_a_failure_of_the_moment_is_forgiven(opened, folder):
    result = scored(opened("trouble"), "once", answer=str(folder / "calls"))
    assert result.rewards.tolist() == [1.0]


def test_samples_with_different_terms_fail_the_group(opened):
    result = scored(opened("uneven"), "a", "b")
    assert result.reason == "rewards returned the terms ['a'] for one sample and ['b'] for another"


def test_a_sample_that_ended_in_an_error_has_no_score(opened):
    result = scored(opened("short"), "4", finish="error")
    assert isinstance(result, GroupFailure) and "ended in an error" in result.reason


def test_math_verify_is_held_to_the_deadline(opened):
    """Its own limit needs signal.alarm; a power tower is what it cannot finish."""
    pool = opened("dora_jax.tasks.rewards.math_verify", reward_retries=0, reward_timeout_s=1.5)
    assert scored(pool, "$\\frac{2}{4}$", "1", answer="1/2").rewards.tolist() == [1.0, 0.0]
    result = scored(pool, "$10^{10^{10}} + 1$", answer="x^2+1")
    assert isinstance(result, GroupFailure) and "math_verify took over 1.5 s" in result.reason
    assert scored(pool, "$x^2 + 1$", answer="1+x^2").rewards.tolist() == [1.0]


# ---------------------------------------------------------------- rewards that are awaited, rewards of groups


class Judge:
    """A judge on a port of this machine. It answers once `held` calls are out, or each after a moment."""

    def __init__(self, held=0):
        self.held, self.out, self.most, self.calls = held, 0, 0, 0
        self.loop, started = asyncio.new_event_loop(), threading.Event()
        self.together = asyncio.Event()
        threading.Thread(target=self._serve, args=(started,), daemon=True).start()
        started.wait()

    def _serve(self, started):
        async def listen():
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=512)
            self.port = server.sockets[0].getsockname()[1]
            started.set()

        self.loop.create_task(listen())
        self.loop.run_forever()

    async def _answer(self, reader, writer):
        response = (await reader.readline()).decode().strip()
        self.out, self.calls = self.out + 1, self.calls + 1
        self.most = max(self.most, self.out)
        if self.held:
            if self.out == self.held:
                self.together.set()
            await self.together.wait()
        else:
            await asyncio.sleep(0.01)
        self.out -= 1
        writer.write(f"{len(response)}\n".encode())
        await writer.drain()
        writer.close()


def test_the_calls_of_a_judge_are_out_at_once(opened):
    """It says nothing before all of them have come."""
    judge, pool = Judge(held=128), opened("judge")
    for i in range(16):
        pool.submit(*group(*("x" * n for n in range(1, 9)), answer=judge.port, group_id=i))
    done = results(pool, 16)
    assert sorted(result.group_id for result in done) == list(range(16)) and judge.calls == 128
    assert all(result.rewards.tolist() == [1, 2, 3, 4, 5, 6, 7, 8] for result in done)


@pytest.mark.parametrize("beside", [(), ("terms",)])
def test_no_more_calls_are_out_than_the_config_says(opened, beside):
    judge, pool = Judge(), opened("judge", *beside, reward_concurrency=3)
    pool.submit(*group(*"abcdefghijkl", answer=judge.port))
    results(pool)
    assert (judge.most, judge.calls) == (3, 12)


def test_rewards_of_all_kinds_score_one_group_in_the_order_of_the_config(opened):
    judge = Judge()
    pool = opened("ranked", "judge", "short", "ranked_later", reward_weights=(1.0, 10.0, 100.0, 1000.0))
    result = scored(pool, "aaa", "b", "cc", answer=judge.port)
    assert list(result.parts) == ["rank", "of", "judge", "short", "ranked_later"]
    assert result.parts["rank"].tolist() == [2, 0, 1] and result.parts["ranked_later"].tolist() == [3, 1, 2]
    assert result.rewards.tolist() == [3035, 1013, 2024]
    assert judge.calls == 3 and len(pool.pids) == 2  # the plain ones have a process of their own


def test_rewards_that_are_all_awaited_need_no_process_beside_theirs(opened):
    pool = opened("judge", "ranked_later", reward_workers=2)
    assert scored(pool, "aa", answer=Judge().port).rewards.tolist() == [4.0]
    assert len(pool.pids) == 2


def test_two_rewards_with_a_term_of_one_name_fail_the_group(opened, folder):
    (folder / "others.py").write_text("async def rank(responses): return [{'rank': 1.0} for each in responses]\n")
    result = scored(opened("ranked", "others.rank"), "a", "b")
    assert result.reason == "two rewards return a term 'rank'; the second is rank"


def test_a_reward_that_returns_too_few_values_fails_its_group(opened):
    pool = opened("forgets", reward_retries=1)
    result = scored(pool, "a", "b", group_id=4)
    reason = "reward forgets returned no list with a value for each response (2): [1.0]"
    assert result.reason == f"{reason} (2 samples of group 4, 2 attempts)" and result.lengths == (1, 1)


def test_a_plain_reward_may_run_an_event_loop(opened):
    assert scored(opened("own_loop"), "a").rewards.tolist() == [2.0]


@pytest.mark.parametrize(
    "response, reason",
    [("raise", "reward later raised ValueError: no good (my_rewards.py:"), ("slow", "reward later took over 1 s")],
)
def test_a_call_that_fails_is_made_again_and_its_process_stays(opened, folder, response, reason):
    pool = opened("later", reward_retries=1, reward_timeout_s=1.0)
    pool.wait_ready()
    pids, log, other = pool.pids, str(folder / "calls"), str(folder / "others")
    pool.submit(*group(response, answer=log, group_id=0))
    pool.submit(*group("fine", answer=other, group_id=1))
    failed, fine = sorted(results(pool, 2), key=lambda result: result.group_id)
    assert failed.reason.startswith(reason) and failed.reason.endswith(", sample (0, 0), 2 attempts)")
    assert (folder / "calls").read_text() == ".." and (folder / "others").read_text() == "."
    assert fine.rewards.tolist() == [1.0] and pool.pids == pids
    assert scored(pool, "once", answer=str(folder / "third")).rewards.tolist() == [1.0]


@pytest.mark.parametrize(
    "response, reason",
    [("block", "reward later took over 2 s"), ("exit", "reward later: the worker exited with code 0")],
)
def test_a_call_that_stops_its_process_fails_alone(opened, folder, response, reason):
    """What else was out is asked again of the next process, without a retry of its own."""
    pool = opened("later", reward_retries=0, reward_timeout_s=1.0)
    pool.wait_ready()
    for i in range(4):
        pool.submit(*group(response if i == 2 else "fine", answer=str(folder / f"calls{i}"), group_id=i))
    done = sorted(results(pool, 4), key=lambda result: result.group_id)
    assert done[2].reason.startswith(reason), done[2]
    assert [each.rewards.tolist() for each in done if each.group_id != 2] == [[1.0]] * 3


# ---------------------------------------------------------------- loading


@pytest.mark.parametrize(
    "path, message",
    [
        ("no_such.reward", "there is no module no_such"),
        ("my_rewards.shor", "has no shor; the nearest is short"),
        ("my_rewards.sys", "is a module, not a callable"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_a_config_error_for_every_caller(opened, path, message):
    pool = opened(path)
    with pytest.raises(ConfigError, match=message):
        pool.wait_ready()
    for call in (pool.poll, lambda: pool.submit(*group("4"))):
        with pytest.raises(ConfigError, match=f"task.rewards: {path}"):
            call()


def test_a_reward_whose_import_kills_the_worker_fails_the_run_with_its_words(opened, folder):
    (folder / "deadly.py").write_text("import os, sys\nprint('licence expired', flush=True)\nos._exit(9)\n")
    pool = opened("deadly.reward")
    message = "failed 3 times to load deadly.reward; .*code 9; it last printed: licence expired"
    with pytest.raises(RuntimeError, match=message):
        pool.wait_ready()


# ---------------------------------------------------------------- processes


def test_workers_start_without_jax_models_or_numpy(opened):
    pool = opened("modules", EXACT)
    names = (
        "jax jaxlib flax numpy dora_jax.models dora_jax.config tokenizers reasoning_gym math_verify sympy "
        "multiprocessing"
    )
    result = scored(pool, names)
    assert {name for name in names.split() if result.parts[name][0]} == set()


def test_the_heavy_rewards_load_before_the_first_deadline_and_without_jax(opened):
    pool = opened("modules", "dora_jax.tasks.rewards.math_verify", GYM_REWARD, reward_timeout_s=1.0)
    item = {"reasoning_gym": "chain_sum", "params": {}, "index": 3, "answer": "-1"}
    result = scored(pool, "jax jaxlib flax tokenizers dora_jax.rollout sympy", answer=item)
    assert [name for name, part in result.parts.items() if part[0]] == ["sympy"]


def test_workers_see_no_variable_that_was_not_named(opened, monkeypatch):
    names = ("HF_TOKEN", "AWS_SESSION", "MY_SETTING", "MY_OTHER_SETTING")
    for name in names:
        monkeypatch.setenv(name, "x")
    result = scored(opened("environment", reward_env=("MY_SETTING",)), " ".join([*names, "PATH", "JAX_PLATFORMS"]))
    assert [name for name, part in result.parts.items() if part[0]] == ["MY_SETTING", "PATH", "JAX_PLATFORMS"]
    with pytest.raises(ConfigError, match="task.reward_env: the environment has no NO_SUCH_SETTING"):
        opened("environment", reward_env=("NO_SUCH_SETTING",))


def test_close_kills_the_workers_even_in_the_middle_of_a_job(opened, folder):
    pool = opened("trouble", reward_timeout_s=60.0)
    pool.submit(*group("hang", answer=str(folder / "calls")))
    while not (folder / "calls").exists():
        time.sleep(0.01)
    pids = pool.pids
    began_s = time.perf_counter()
    pool.close()
    pool.close()
    assert time.perf_counter() - began_s < 30.0  # half of what the reward takes
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="closed"):
        pool.poll()


ORPHAN = """
import os, time
from tests.fakes.reward_pool import *
pool = ScorerPool(TaskSection(rewards=("my_rewards.trouble",), reward_timeout_s=60.0, reward_sandbox=SANDBOX), decode)
pool.submit(*group("spin", answer="calls"))
while not os.path.exists("calls"): time.sleep(0.01)
print(pool.pids[0], flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_worker_ends_with_a_parent_that_was_killed(folder):
    root = os.path.dirname(os.path.dirname(__file__))
    path = os.pathsep.join([*filter(None, sys.path), root])
    out = subprocess.run(
        [sys.executable, "-c", ORPHAN],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert out.returncode == -signal.SIGKILL, out.stderr
    pid, end_s = int(out.stdout), time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------- the protocol


def test_frames_that_are_none_are_refused():
    import socket

    for payload, error in [
        (b"\xff\xff\xff\xff", ValueError),
        (b"\x00\x00\x00\x02[]", ValueError),
        (b"\x00\x00\x00\x02ab", ValueError),
        (b"\x00\x00\x00\x09{}", EOFError),
        (b"", EOFError),
    ]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(payload)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(error):
                calls.receive(ours)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        calls.receive(ours, time.monotonic() + 0.05)


def test_a_process_that_is_closed_leaves_no_file_to_the_garbage_collector():
    process = calls.Process("dora_jax.tasks.sandbox.render", {"extract": "a(b)"}, form=sandbox.best())
    process.start()
    process.close()
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        del process
        gc.collect()
    assert not reported
