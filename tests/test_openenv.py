"""Environments of OpenEnv over their websocket: the server's wire is tests/data/clients/openenv_server.py."""

import contextlib
import importlib.util
import subprocess
import time

import pytest

from dora_jax.config import ConfigError, EnvironmentSection
from dora_jax.tasks.environments import EnvironmentPool
from dora_jax.tasks.environments.bridge import Bridge
from dora_jax.types import EpisodeEnded, SampleId
from tests.fakes.episode_player import Letters, Player, prompt_of
from tests.fakes.pinned_environment import ROOT, python_of

NAME = "dora_jax.tasks.environments.openenv.OpenEnv"


@pytest.fixture(scope="module")
def python():
    return str(python_of("openenv"))


@contextlib.contextmanager
def serving(python, *most):
    program = [python, ROOT / "tests/data/clients/openenv_server.py", *most]
    server = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        yield f"ws://127.0.0.1:{server.stdout.readline().strip()}/ws"
    finally:
        server.kill()
        server.communicate()


@pytest.fixture(scope="module")
def url(python):
    with serving(python) as url:
        yield url


def open_pool(python, step_timeout_s=60.0, **params):
    section = EnvironmentSection(
        name=NAME, params=params, python=python, observation="<{content}>", retries=0, step_timeout_s=step_timeout_s
    )
    return EnvironmentPool(section, Bridge(Letters(), section.observation), seed=0)


def new_player(pool, index):
    player = Player(pool, SampleId(0, index))
    pool.open(player.id, prompt_of())
    return player


def test_an_episode_is_a_connection_and_its_reward_the_sum(python, url):
    pool = open_pool(python, url=url, observation="echoed_message", more={"mark": "!"})
    try:
        assert pool.wait_ready() == ("reward",)
        one = new_player(pool, 0)
        assert one.observed(one.answer()) == "<seed True>"
        other = new_player(pool, 1)
        assert other.observed(other.answer()) == "<seed True>"
        assert one.observed(one.ask("a")) == "<a!>" and other.observed(other.ask("b")) == "<b!>"
        assert one.ask("end") == EpisodeEnded(id=one.id, terms={"reward": 1.5})
        assert "CAPACITY_REACHED: no room" in other.ask("full").reason
        last = new_player(pool, 2)
        last.observed(last.answer())
        assert "ConnectionClosed" in last.ask("leave").reason
    finally:
        pool.close()


def test_episodes_wait_for_a_server_that_is_full(python):
    with serving(python, "1") as url:
        pool = open_pool(python, url=url, observation="echoed_message")
        try:
            pool.wait_ready()
            one, other = new_player(pool, 0), Player(pool, SampleId(0, 1))
            assert one.observed(one.answer()) == "<seed True>"
            pool.open(other.id, prompt_of())
            time.sleep(0.5)
            assert not pool.poll()
            assert isinstance(one.ask("end"), EpisodeEnded)
            assert other.observed(other.answer()) == "<seed True>"
        finally:
            pool.close()


def test_an_episode_that_does_not_begin_leaves_no_connection_open(python):
    with serving(python, "1") as url:
        hangs = open_pool(python, step_timeout_s=0.5, url=url, reset={"silent": True})
        pool = open_pool(python, url=url, observation="echoed_message")
        try:
            hangs.wait_ready(), pool.wait_ready()
            assert "environment.step_timeout_s = 0.5 s" in new_player(hangs, 0).answer().reason
            one = new_player(pool, 0)
            assert one.observed(one.answer()) == "<seed True>"
        finally:
            hangs.close(), pool.close()


def test_what_is_no_action_is_observed_and_a_server_that_is_not_there_is_no_reward(python, url):
    pool = open_pool(python, url=url, action="", opening=False)
    try:
        pool.wait_ready()
        player = new_player(pool, 0)
        assert player.observed(player.answer()) == ""
        assert player.observed(player.ask("up")) == "<the action is no JSON object>"
        assert player.observed(player.ask("{}")) == "<Invalid message: ['message']>"
        assert player.observed(player.ask('{"message": "a"}')) == '<{"echoed_message": "a", "message_length": 1}>'
    finally:
        pool.close()
    pool = open_pool(python, url="ws://127.0.0.1:9/ws")
    try:
        pool.wait_ready()
        assert "ws://127.0.0.1:9/ws: " in new_player(pool, 0).answer().reason
    finally:
        pool.close()


@pytest.mark.skipif(bool(importlib.util.find_spec("websockets")), reason="websockets is installed")
def test_without_the_package_a_sentence_names_what_is_missing(url):
    pool = open_pool("", url=url)
    try:
        with pytest.raises(ConfigError, match="environment.name: .*OpenEnv: No module named 'websockets'"):
            pool.wait_ready()
    finally:
        pool.close()
