"""What other programs hear of a run: /metrics and /healthz on loopback, and Weights & Biases."""

import dataclasses
import json
import math
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from dora_jax.base import prometheus
from dora_jax.base.metrics import Writer
from dora_jax.config import Config, ConfigError
from dora_jax.config.live import MonitorSection
from dora_jax.runtime.observe import monitoring
from tests.fakes.cluster import eventually
from tests.fakes.pinned_environment import ROOT, python_of
from tests.fakes.sinks import quiet

FACTS = {"base": 3, "training": True, "versions": {3: 5, 4: 2}, "waits": "for rewards", "groups": {"ready": 7}}


@pytest.fixture
def page():
    page = monitoring.LivePage(0)
    yield page
    page.close()


def get(page, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{page.port}{path}") as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def numbers(text):
    return {family.name: family.samples[0].value for family in text_string_to_metric_families(text)}


def test_the_newest_step_and_what_goes_on_now_are_gauges(page, tmp_path):
    assert numbers(get(page, "/metrics")[2]) == {}
    with Writer(tmp_path, quiet(), others=[page]) as writer:
        writer.write(3, {"reward/mean": 0.75, "lag/max": 1, "trainer/kl": math.nan})
        writer.write(3, {"eval/accuracy": 0.25})
        writer.write(4, {"reward/mean": 1.0})
        writer.status(FACTS)
    status, kind, text = get(page, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    live = {
        "live_verdicts": 0,
        "live_base": 3,
        "live_training": 1,
        "live_versions_3": 5,
        "live_versions_4": 2,
        "live_groups_ready": 7,
    }
    steps = {"step": 4, "reward_mean": 1.0, "lag_max": 1, "eval_accuracy": 0.25}
    assert numbers(text) == {f"dora_run_{name}": value for name, value in (live | steps).items()}
    assert "# HELP dora_run_reward_mean reward/mean\n# TYPE dora_run_reward_mean gauge\n" in text


def test_a_loop_that_says_nothing_is_not_healthy(page, monkeypatch):
    assert get(page, "/healthz") == (
        200,
        "application/json",
        '{"status": "ok", "step": 0, "verdicts": []}',
    )  # still compiling
    page.write(2, {})
    page.status(FACTS)
    assert json.loads(get(page, "/healthz")[2]) == {"status": "ok", "step": 2, "verdicts": []}
    monkeypatch.setattr(monitoring, "QUIET_S", -1.0)
    status, _, text = get(page, "/healthz")
    assert status == 503 and json.loads(text)["status"] == "the loop has reported nothing for 0 s"


def idle(page):
    """A connection that asks for nothing."""
    return socket.create_connection(("127.0.0.1", page.port))


def threads():
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_idle_connections_hold_few_threads_and_keep_nobody_out(page):
    held = [idle(page) for _ in range(3 * monitoring.CONNECTIONS)]
    eventually(lambda: threads() == monitoring.CONNECTIONS)
    for _ in range(3):
        assert get(page, "/healthz")[0] == 200 and threads() <= monitoring.CONNECTIONS
    for connection in held:
        connection.close()
    eventually(lambda: not threads())


def test_a_connection_ends_in_time_however_slowly_it_speaks(page, monkeypatch):
    monkeypatch.setattr(monitoring, "ANSWER_S", 0.3)
    with idle(page) as silent, idle(page) as slow:
        with pytest.raises(OSError):
            for _ in range(200):
                slow.sendall(b"G")
                time.sleep(0.02)
        assert silent.recv(1) == b""
    eventually(lambda: not threads())


def test_nothing_else_is_there(page):
    assert get(page, "/")[0] == get(page, "/metrics/x")[0] == 404
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", data=b"x")


def test_names_that_become_one_are_reported_once():
    registry = CollectorRegistry()
    registry.register(prometheus.Gauges(lambda: {"a/b": 1.0, "a-b": 2.0, "reward/term/größe": 3.0}))
    assert numbers(prometheus.generate_latest(registry).decode()) == {
        "dora_run_a_b": 1.0,
        "dora_run_reward_term_gr__e": 3.0,
    }


def settings(**monitor):
    return dataclasses.replace(Config(), monitor=MonitorSection(**monitor))


def test_a_port_that_is_taken_is_refused_in_one_sentence(page, tmp_path):
    sentence = f"monitor.port: 127.0.0.1:{page.port} cannot be listened on: Address already in use"
    with pytest.raises(ConfigError, match=sentence), monitoring.opened(settings(port=page.port), tmp_path):
        pass


def test_nothing_is_opened_that_is_not_asked_for(tmp_path):
    with monitoring.opened(settings(), tmp_path) as sinks:
        assert sinks == [] and not list(tmp_path.iterdir())


def test_without_wandb_its_option_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="monitor.wandb: wandb is not installed"):
        monitoring.WandbRun(settings(wandb="sums"), tmp_path)


WANDB_RUN = """
import dataclasses, sys
from pathlib import Path
sys.path += sys.argv[2:]
from dora_jax.config import Config
from dora_jax.config.live import MonitorSection
from dora_jax.base.metrics import Writer
from dora_jax.runtime.observe import monitoring
workdir = Path(sys.argv[1])
config = dataclasses.replace(Config(), monitor=MonitorSection(wandb="sums"))
for steps in ((1, 2, 3), (2, 3)):  # resumed at step 1
    with monitoring.opened(config, workdir) as sinks, Writer(workdir, others=sinks) as writer:
        for step in steps:
            writer.write(step, {"reward/mean": step / 10, "trainer/kl": float("nan")})
        sample = {"reward": 1.0, "text": "4" * 5000}
        writer.samples(3, "heldout", [{"group": -1, "prompt": "2 + 2 =", "expected": "4", "samples": [sample, sample]}])
"""
WANDB_READ = """
import json, sys
from wandb.proto import wandb_internal_pb2

def records(data, block=32768):  # LevelDB's log behind a header of seven bytes
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := block - at % block) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""

for path in sys.argv[1:]:
    for record in records(open(path, "rb").read()):
        if record.WhichOneof("record_type") == "run":
            print(json.dumps({"id": record.run.run_id, "project": record.run.project}))
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            print(json.dumps({name: value for name, value in items.items() if not name.startswith("_")}))
"""


@pytest.mark.parametrize("damage", [b"", b"\xff", b"a/b", b"a b", b"x" * 129])
def test_an_id_that_wandb_would_not_take_is_refused_in_one_sentence(tmp_path, monkeypatch, damage):
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    (tmp_path / "wandb_id").write_bytes(damage)
    with pytest.raises(ConfigError, match="wandb_id holds no id of a run: .* or remove it, and another run begins"):
        monitoring.WandbRun(settings(wandb="sums"), tmp_path)


@pytest.mark.slow
def test_wandb_gets_every_record_offline_and_a_resumed_run_is_the_same_run(tmp_path):
    python = python_of("wandb")
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    command = [sys.executable, "-c", WANDB_RUN, str(tmp_path), str(site)]
    environment = {"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = sorted(map(str, Path(tmp_path).glob("wandb/offline-run-*/run-*.wandb")))
    read = subprocess.run([python, "-c", WANDB_READ, *files], capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in read.splitlines()]
    runs = [row for row in rows if "id" in row]
    assert {row["id"] for row in runs} == {(tmp_path / "wandb_id").read_text()} and runs[0]["project"] == "sums"
    records = [row for row in rows if "id" not in row and "reward/mean" in row]
    assert records == [{"step": n, "reward/mean": n / 10} for n in (1, 2, 3, 2, 3)]
    tables = [json.loads(file.read_text()) for file in tmp_path.glob("wandb/offline-run-*/files/media/table/**/*.json")]
    assert [table["columns"] for table in tables] == [["group", "prompt", "expected", "reward", "text"]] * 2
    assert tables[0]["data"] == [["-1", "2 + 2 =", "4", "1.0", "4" * 4000]]
