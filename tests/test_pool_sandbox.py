"""What a hostile reward tries against the run: one attack a test, through the pool as a run has it."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from dora_jax.config import ConfigError
from dora_jax.tasks import sandbox
from dora_jax.tasks.pool import GroupFailure
from tests.fakes.reward_pool import full_sandbox, pools, scored

HOSTILE = '''
import json, os, socket, struct, time

def write(message, times=1):
    """On every descriptor that may be the worker's own socket."""
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    for fd in range(3, 4096):
        try:
            os.write(fd, (struct.pack("!I", len(body)) + body) * times)
        except OSError:
            pass

def hostile(prompt, response, answer):
    parts = {"hostile": 1000.0}
    if response == "ahead": write({"job": 1, "nonce": "0" * 32, "parts": parts}, times=50)
    if response == "bare": write({"parts": parts})
    if response == "deep": write(b'{"a":' * 100_000)
    if response == "heir":
        if os.fork() == 0:
            os.setsid()
            while True:
                write({"parts": parts})
                time.sleep(0.001)
        time.sleep(0.5)
    if response == "daemon":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                while True:
                    with open(answer, "a") as file: file.write(".")
                    time.sleep(0.01)
            os._exit(0)
        while not os.path.exists(answer): time.sleep(0.01)
    if response == "look":
        found = 0
        try:
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    with open(f"/proc/{pid}/environ", "rb") as file: found += b"MY_SECRET=hunter2" in file.read()
                except OSError: pass
        except PermissionError: pass
        return float(found)
    return 0.0
'''

needs_sandbox = pytest.mark.skipif(not full_sandbox()[0], reason=full_sandbox()[1])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(HOSTILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def opened(folder):
    with pools() as open_pool:
        yield open_pool


@pytest.mark.parametrize(
    "response, message",
    [
        ("ahead", "a reply without the request's nonce was written to the worker's own socket"),
        ("bare", "a reply without the request's nonce was written to the worker's own socket"),
        ("heir", "a reply without the request's nonce was written to the worker's own socket"),
        ("deep", "a frame is nested too deeply"),
    ],
)
def test_a_reply_that_the_worker_did_not_write_is_no_score(opened, response, message):
    with contextlib.ExitStack() as files:  # the socket's number is high, as it is in a process that has many files open
        for _ in range(100):
            files.enter_context(open(os.devnull))
        pool = opened("hostile", reward_retries=0)
        pool.wait_ready()
    result = scored(pool, response)
    assert isinstance(result, GroupFailure) and result.reason.startswith(f"reward hostile: {message}")
    assert scored(pool, "fine").rewards.tolist() == [0.0]


def test_a_worker_that_lies_about_terms_fails_its_group(opened, folder):
    (folder / "liar.py").write_text("""
import json
from dora_jax.tasks import rewards
async def lies(terms, prompt, responses, *rest): return [{"score": json.loads(responses[0])}]
rewards.score = lies
def score(prompt, response, answer): return 0.0
""")
    pool = opened("liar.score", reward_retries=0)
    for parts in ("[]", "{}", '{"a": "1"}', '{"a": null}', '{"a": 1e999}', "1" * 300):
        result = scored(pool, parts)
        assert isinstance(result, GroupFailure), parts
        assert result.reason.startswith("reward score: the worker replied without a finite number for each term")
    assert scored(pool, '{"a": 1.5}').rewards.tolist() == [1.5]


@pytest.mark.parametrize("sandbox_level", [pytest.param("full", marks=needs_sandbox), "weak"])
def test_a_daemon_of_a_reward_ends_with_the_pool(opened, folder, sandbox_level):
    pool = opened("hostile", reward_sandbox=sandbox_level)
    log = folder / "log"
    assert scored(pool, "daemon", answer=str(log)).rewards.tolist() == [0.0]
    pool.close()
    before = log.stat().st_size
    time.sleep(0.2)
    assert log.stat().st_size == before


@needs_sandbox
def test_a_reward_finds_no_secret_of_another_process(opened):
    keeper = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
        env={"MY_SECRET": "hunter2"},
        stdout=subprocess.PIPE,
    )
    try:
        keeper.stdout.readline()
        assert scored(opened("hostile", reward_sandbox="weak"), "look").rewards.tolist() == [1.0]
        assert scored(opened("hostile"), "look").rewards.tolist() == [0.0]
    finally:
        keeper.kill()
        keeper.communicate()


def test_a_machine_without_a_sandbox_refuses_rewards_of_one_s_own_unless_allowed(opened, monkeypatch, caplog):
    def lacks():
        raise sandbox.NoSandbox(
            "this machine cannot hide other processes from a program (namespaces: no; landlock: no)"
        )

    monkeypatch.setattr(sandbox, "full", lacks)
    for sandbox_level, reward in (("auto", "hostile"), ("full", "hostile"), ("full", "dora_jax.tasks.rewards.exact")):
        with pytest.raises(ConfigError, match=r"task.reward_sandbox: this machine cannot hide .* \"weak\" lets"):
            opened(reward, reward_sandbox=sandbox_level)
    assert scored(opened("hostile", reward_sandbox="weak"), "fine").rewards.tolist() == [0.0]
    assert not caplog.records
    assert scored(opened("dora_jax.tasks.rewards.exact", reward_sandbox="auto"), "4").rewards.tolist() == [1.0]
    assert "the shipped rewards run in the weak form of the sandbox: this machine" in caplog.text
