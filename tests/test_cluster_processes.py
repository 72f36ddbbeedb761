"""The real thing, small: a controller, a trainer of two processes, two instances; one is killed, one asked to leave, and
then the controller is killed, too, when a step is half made. And what a run of one process makes of the same."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journal_audit import audit, facts
from dora_jax.runtime.journal.log_stores import log_at
from dora_jax.runtime.journal.records import Published
from tests.fakes.tiny_run import CONFIG


def lines_of(console, pattern):
    return re.findall(pattern, console.read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.alone  # a process that sends nothing for ten seconds is taken for dead
def test_a_run_of_many_processes_outlives_those_that_are_killed_or_preempted(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(base=str(tmp_path / "base")))
    console = tmp_path / "console.log"
    run = start(tmp_path, console, DORA_FAULT="trainer.in_step:2")
    try:
        for instance, blow in ((1, signal.SIGKILL), (0, signal.SIGTERM)):
            up = rf"^rollout {instance} \(epoch 1\) is up.*pids (\d+)"
            while not (pids := lines_of(console, up)) and run.poll() is None:
                time.sleep(0.05)
            os.kill(int(pids[0]), blow)
        while not (trainers := lines_of(console, r"^trainer \(epoch 1\) is up: pids (.*)")) and run.poll() is None:
            time.sleep(0.05)
        assert set(listening(run.pid)) == {"127.0.0.1"}
        assert run.wait(400) == -signal.SIGKILL  # the controller alone
        run = start(tmp_path, console)
        assert run.wait(400) == 0, console.read_text()
    finally:
        run.kill()
    text = console.read_text()
    assert "rollout 1 (epoch 1) is lost" in text
    started = (tmp_path / "run" / "started.txt").read_text().splitlines()
    assert {"trainer 2", "rollout 0 1", "rollout 1 1"} <= set(started)
    assert re.search(r"rollout 0 \(epoch 1\) has left: preempted: process 0 \(pid \d+\) received SIGTERM", text), text
    assert f"trainer (epoch 1) is up, taken over: pids {trainers[0]}" in text, text
    assert "version 4 is published" in text
    books = audit(tmp_path / "run" / "journal")
    assert books.ok and books.trained == 16, books
    journal = EventLog(log_at(tmp_path / "run" / "journal", read_only=True))
    records = [fact.payload for number in journal.segments() for fact in facts(journal.read(number).records)]
    copies = [payload.copy for payload in records if isinstance(payload, Published)]
    assert len(copies) == 4 and all(copies), "every copy that travelled has its digest there"


@pytest.mark.slow
def test_one_process_and_a_cluster_train_the_same_weights_in_mode_sync(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG.format(base=str(tmp_path / "base")))
    digests = []
    for launcher, devices in (("", 3), ("process", 0)):
        workdir = tmp_path / f"run{launcher}"
        command = [
            *(sys.executable, "-m", "dora_jax.train", f"--config={tmp_path}/config.py", f"--workdir={workdir}"),
            *("--config.orchestrator.mode=sync", "--config.steps=2", "--config.rollout.instances=2"),
            "--config.task.rewards=('tests.fakes.tasks.length',)",
            *(f"--config.cluster.launcher={launcher}", "--config.cluster.trainer_hosts=1"),
            f"--config.cpu_devices={devices}",
        ]
        env = {**os.environ, "DORA_COMPILE_CACHE": str(tmp_path / "cache")}
        env["TPU_WORKER_ID"] = "WARNING: could not determine TPU worker number"  # libtpu's, where it finds no TPU
        ran = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=400)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        journal = EventLog(log_at(workdir / "journal", read_only=True))
        records = [fact.payload for number in journal.segments() for fact in facts(journal.read(number).records)]
        digests.append([payload.digest for payload in records if isinstance(payload, Published)])
    assert digests[0] == digests[1] and len(set(digests[0])) == 2 and all(digests[0]), digests


def listening(pid):
    """The addresses at which a controller and its gangs' processes wait for callers."""
    controller = psutil.Process(pid)
    hosts = []
    for child in controller.children():
        with contextlib.suppress(psutil.ZombieProcess):  # of a gang that was killed a moment ago
            hosts += [child] if "dora_jax.runtime.cluster.process_main" in child.cmdline() else []
    assert hosts
    return [
        found.laddr.ip.removeprefix("::ffff:")
        for each in (controller, *hosts)
        for found in each.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    ]


def start(folder, console, **env):
    """One group beyond the batch in training: each step has parts that it must wait for."""
    with console.open("a") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.fakes.faults",
                "dora_jax.train",
                f"--config={folder}/config.py",
                f"--workdir={folder}/run",
                "--config.orchestrator.groups_per_step=4",
                "--config.trainer.updates=4",
                "--config.rollout.slots=4",
                "--config.orchestrator.inflight=0.25",
                "--config.cluster.launcher=tests.fakes.plugins.Announced",  # a user's own
            ],
            stdout=log,
            stderr=log,
            env={**os.environ, **env, "DORA_COMPILE_CACHE": str(folder / "cache")},
        )
