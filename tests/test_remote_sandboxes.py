"""Sandboxes elsewhere, each over the wire of its service (tests/fakes/remote_sandboxes.py)."""

import contextlib
import os
import shutil
import signal
import time

import pytest

from dora_jax.config import EnvironmentSection
from dora_jax.tasks.environments import EnvironmentPool
from dora_jax.tasks.environments.bridge import Bridge
from dora_jax.tasks.sandbox import remote
from dora_jax.tasks.sandbox.programs import SandboxError
from dora_jax.types import EpisodeEnded, SampleId
from tests.fakes import remote_sandboxes
from tests.fakes.episode_player import Letters, Player, prompt_of
from tests.fakes.sandbox import needs_sandbox

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "%s"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {token: t}}]
current-context: c
"""
pytestmark = needs_sandbox


@pytest.fixture(params=["docker", "podman", "e2b", pytest.param("kubernetes", marks=pytest.mark.slow)])
def service(request, tmp_path, monkeypatch):
    """(what makes a sandbox of a service, its state)."""
    state = tmp_path / "state"
    if request.param in ("docker", "podman"):
        remote_sandboxes.install(tmp_path / "bin", state, request.param)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        yield lambda **more: remote.Container(engine=request.param, **more), state
        return
    state.mkdir()
    api = remote_sandboxes.KubernetesApi if request.param == "kubernetes" else remote_sandboxes.E2BApi
    with remote_sandboxes.Service(state, api) as served:
        if request.param == "kubernetes":
            if shutil.which("kubectl") is None:
                pytest.skip("kubectl is not installed")
            (tmp_path / "kubeconfig").write_text(KUBECONFIG % served.url)
            monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
            monkeypatch.setenv("HOME", str(tmp_path))  # what it has discovered is of this server
            yield remote.Kubernetes, state
        else:
            monkeypatch.setenv("E2B_API_KEY", "key")
            yield lambda **more: remote.E2B(url=served.url, sandbox_url=served.url, **more), state


def test_a_sandbox_runs_commands_holds_files_and_ends(service):
    make, state = service
    box = make()
    box.write("/code/deep/a.bin", bytes(range(256)) * 400)
    assert box.read("/code/deep/a.bin") == bytes(range(256)) * 400
    ran = box.run(["sh", "-c", "cat; echo why >&2; exit 3"], stdin="4\n")
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.ended_by) == ("4\n", "why\n", 3, "")
    assert box.run(["wc", "-c", "/code/deep/a.bin"]).stdout == "102400 /code/deep/a.bin\n"
    for path in ("/code/nothing", "/code/deep"):
        with pytest.raises(FileNotFoundError):
            box.read(path)
    with pytest.raises(FileNotFoundError, match="more than 100 bytes"):
        box.read("/code/deep/a.bin", most=100)
    with pytest.raises(SandboxError, match="/usr/a: "):
        box.write("/usr/a", b"")
    box.close()
    box.close()
    assert not list((state / "boxes").iterdir())


def test_what_a_command_does_is_no_failure_of_its_sandbox(service):
    make, _ = service
    box = make()
    assert box.run(["sh", "-c", "kill -9 $$"]).exit_code == -signal.SIGKILL
    assert box.run(["sh", "-c", "exit 137"]).exit_code == 137
    assert box.run(["no-such-program"]).exit_code == 127
    began_s = time.monotonic()
    slow = box.run(["sh", "-c", "echo a; sleep 60"], wall_s=0.3)
    assert (slow.stdout, slow.ended_by) == ("a\n", "time") and time.monotonic() - began_s < 20
    flood = box.run(["sh", "-c", "yes | head -c 9000000; sleep 60"], output_bytes=1000, wall_s=1.0)
    assert flood.ended_by == "output" and len(flood.stdout) == 1000
    assert box.run(["sh", "-c", "yes | head -c 1002"], output_bytes=1000).ended_by == "output"
    for steps in "12":  # up to the shell that waits for it, and to the one that tells how it ended
        up = 'p=$PPID; for i in $(seq "$0"); do read -r _ _ _ p _ < "/proc/$p/stat"; done; kill -9 "$p"; sleep 60'
        killed = box.run(["sh", "-c", up, steps], wall_s=2.0)
        assert (killed.exit_code, killed.ended_by) == (-signal.SIGKILL, "")
    assert box.run(["echo", "still here"]).stdout == "still here\n"
    box.close()


def test_what_the_service_does_wrong_is_an_error_and_no_verdict(service, monkeypatch):
    make, state = service
    box = make()
    (state / "broken").write_text("the node is gone")
    with pytest.raises(SandboxError, match="the node is gone"):
        box.run(["true"])
    with pytest.raises(SandboxError):
        box.read("/code/a")
    box.close()


def test_a_sandbox_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    remote_sandboxes.install(tmp_path / "bin", tmp_path / "state")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match="^docker: .*No such image: no-such-image"):
        remote.Container(image="no-such-image")
    assert (tmp_path / "state/calls.txt").read_text().splitlines()[-1].startswith("docker rm --force dora-")
    remote.Container(memory_bytes=99, processes=5, options=["--gpus", "all"]).close()
    made = (tmp_path / "state/calls.txt").read_text().splitlines()[-2]
    for words in ("--memory 99", "--pids-limit 5", "--network none", "--gpus all --entrypoint sleep", " 3600"):
        assert words in made
    with pytest.raises(SandboxError, match="^no-engine: No such file"):
        remote.Container(engine="no-engine")
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with (
        remote_sandboxes.Service(tmp_path / "state", remote_sandboxes.E2BApi) as served,
        pytest.raises(SandboxError, match="^e2b: POST /sandboxes: 401 .*Invalid API key"),
    ):
        remote.E2B(url=served.url)
    with pytest.raises(SandboxError, match="^e2b: 127.0.0.1:9: "):
        remote.E2B(url="http://127.0.0.1:9")


ROW = {
    "files": {"/code/data.txt": "5"},
    "keep": ["/code/a.py"],
    "command": ["python3", "/code/a.py"],
    "tests": [{"stdin": "4\n", "stdout": "20\n"}],
}
RIGHT = "```bash\necho 'print(int(input()) * int(open(\"/code/data.txt\").read()))' > /code/a.py\n```"


def test_an_episode_in_a_sandbox_is_scored_in_a_fresh_one(tmp_path, monkeypatch):
    """What the policy did to the first one does not matter, only the files that are kept."""
    state = tmp_path / "state"
    monkeypatch.setenv("E2B_API_KEY", "key")
    name, options = "dora_jax.tasks.environments.shell.Shell", {"lifetime_s": 60.0}
    with remote_sandboxes.Service(state, remote_sandboxes.E2BApi) as served, contextlib.ExitStack() as opened:
        options |= {"url": served.url, "sandbox_url": served.url}
        params = {"sandbox": "dora_jax.tasks.sandbox.remote.E2B", "options": options, "wall_s": 5.0}
        section = EnvironmentSection(
            name=name, params=params, observation="<{content}>", retries=0, env=("E2B_API_KEY",)
        )
        pool = EnvironmentPool(section, Bridge(Letters(), section.observation), seed=0)
        opened.callback(pool.close)
        assert pool.wait_ready() == ("right",)
        players = [Player(pool, SampleId(0, i), prompt=prompt_of(answer=ROW)) for i in range(4)]
        for player in players:
            pool.open(player.id, player.prompt)
            assert player.observed(player.answer()) == ""
        good, cheat, idle, unlucky = players
        assert good.observed(good.ask("```python\nprint(open('/code/data.txt').read())\n```")) == "<5\n>"
        assert good.observed(good.ask(RIGHT)) == "<>"
        assert good.ask("done") == EpisodeEnded(id=good.id, terms={"right": 1.0})
        trick = "```sh\necho 'print(0)' > /code/a.py; echo 0 > /code/data.txt; exit 7\n```"
        assert cheat.observed(cheat.ask(trick)) == "<[exit code 7]>"
        assert cheat.ask("done") == EpisodeEnded(id=cheat.id, terms={"right": 0.0})
        assert idle.ask(" ") == EpisodeEnded(id=idle.id, terms={"right": 0.0})
        (state / "broken").write_text("the node is gone")
        assert unlucky.ask("done").reason.startswith(f"{name}: e2b: 502 "), "an error of the environment's own"
    assert sum(seen == "POST /sandboxes" for seen in served.seen) == 4 + 3, "a fresh one for each verdict"
    assert not list((state / "boxes").iterdir())
