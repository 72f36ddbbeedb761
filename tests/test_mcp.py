"""The tools of an MCP server as an environment: the server is the official package's, tests/data/clients/mcp_server.py."""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from dora_jax.config import ConfigError, EnvironmentSection
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.tasks.environments import EnvironmentPool
from dora_jax.tasks.environments.bridge import Bridge
from dora_jax.types import EpisodeEnded, SampleId
from tests.fakes import tokenizer_folder
from tests.fakes.episode_player import Letters, Player, prompt_of
from tests.fakes.pinned_environment import ROOT, python_of

NAME = "dora_jax.serving.mcp.Tools"
SERVER = str(ROOT / "tests/data/clients/mcp_server.py")
TEMPLATE = "{% for t in tools %}{{ t.function.name }}({{ t.function.parameters.properties|join(',') }}) {% endfor %}{% for m in messages %}{{ m.content }}{{ '|' }}{% endfor %}"


@pytest.fixture(scope="module")
def python():
    return str(python_of("mcp"))


@pytest.fixture(scope="module")
def url(python):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([python, SERVER, str(port)], stderr=subprocess.DEVNULL)
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    server.kill()
    server.communicate()


def open_pool(python, server, **section):
    params = {"server": server, "rewards": ["dora_jax.tasks.rewards.numeric"]}
    section = EnvironmentSection(
        name=NAME, params=params, python=python, observation="<{content}>", retries=0, **section
    )
    return EnvironmentPool(section, Bridge(Letters(), section.observation), seed=0)


def begun(pool, index):
    player = Player(pool, SampleId(0, index))
    pool.open(player.id, prompt_of())
    assert player.observed(player.answer()) == ""
    return player


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("wire", ["stdin", "http"])
def test_an_episode_calls_the_tools_of_a_server(wire, python, url):
    server = {"url": url} if wire == "http" else {"command": [python, SERVER], "env": {"MARK": "one"}}
    pool = open_pool(python, server, observation_chars=200)
    try:
        assert pool.wait_ready() == ("numeric",)
        one, other = begun(pool, 0), begun(pool, 1)
        assert one.observed(one.ask(f"<think>\n3 and 4\n</think>\n{call('add', a=3, b=4)}")) == "<7>"
        both = call("add", a=1, b=1) + "\n" + call("count", word="b")
        assert one.observed(one.ask(both)).startswith("<2><b is number 1 of ")
        again = other.observed(other.ask(call("count", word="c")))
        assert again == ("<c is number 2 of none>" if wire == "http" else "<c is number 1 of one>")
        assert len(one.observed(one.ask(call("long", n=200_000)))) < 300
        assert one.observed(one.ask(call("fail"))) == "<Error executing tool fail>"
        assert one.observed(one.ask(call("add", a="x", b=4))).startswith("<")
        assert one.observed(one.ask(call("rob"))) == "<error: there is no tool rob>"
        assert one.ask("<think>\nhm\n</think>\nso it is 7") == EpisodeEnded(id=one.id, terms={"numeric": 1.0})
        assert other.ask("<tool_call>\n{</tool_call> 8") == EpisodeEnded(id=other.id, terms={"numeric": 0.0})
        if wire == "stdin":
            last = begun(pool, 2)
            assert f"{NAME}: {python}: " in last.ask(call("leave")).reason
    finally:
        pool.close()


def test_a_server_that_is_not_there_is_no_reward_and_one_that_is_none_is_refused(python):
    pool = open_pool(python, {"url": "http://127.0.0.1:9/mcp"})
    try:
        pool.wait_ready()
        player = Player(pool)
        pool.open(player.id, prompt_of())
        assert "http://127.0.0.1:9/mcp: ConnectError" in player.answer().reason
    finally:
        pool.close()
    pool = open_pool(python, {"path": "x"})
    try:
        with pytest.raises(ConfigError, match="environment.params: ValueError: server: {'path': 'x'} is neither"):
            pool.wait_ready()
    finally:
        pool.close()


def test_the_tools_are_printed_for_the_chat_template(python, tmp_path):
    program = [sys.executable, "-m", "dora_jax.serving.mcp", f"--python={python}"]
    how = {"capture_output": True, "text": True, "cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    server = json.dumps({"command": [python, SERVER]})
    tools = json.loads(subprocess.run([*program, server], check=True, **how).stdout)
    assert [tool["function"]["name"] for tool in tools] == ["add", "count", "long", "fail", "leave"]
    settings = {"eos_token": "<eos>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    path = tokenizer_folder.folder(tmp_path, vocab=["<eos>", *"abc"], settings=settings, unknown="a")
    text = Tokenizer.load(path).chat([{"role": "user", "content": "3 and 4"}], tools=tools)
    assert text == "add(a,b) count(word) long(n) fail() leave() 3 and 4|"
    refused = subprocess.run([*program, '{"url": "http://127.0.0.1:9/mcp"}'], check=False, **how)
    assert refused.returncode == 2 and "ConnectError" in refused.stderr and not refused.stdout


@pytest.mark.skipif(bool(importlib.util.find_spec("mcp")), reason="mcp is installed")
def test_without_the_package_a_sentence_names_what_is_missing():
    pool = open_pool("", {"url": "http://127.0.0.1:9/mcp"})
    try:
        with pytest.raises(ConfigError, match="environment.name: .*Tools: No module named 'mcp'"):
            pool.wait_ready()
    finally:
        pool.close()
