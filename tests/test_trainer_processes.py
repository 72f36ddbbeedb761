"""The same step where the mesh spans two processes: values of the whole batch, whoever holds them."""

import json
import os
import socket
import subprocess
import sys

import pytest


def start(address, rank, processes):
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUM")}
    return subprocess.Popen([sys.executable, "-m", "tests.trainer_process", address, str(rank), str(processes)],
                            env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_make_the_step_of_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    running = [start(address, 0, 1), start(address, 0, 2), start(address, 1, 2)]
    outputs = [process.communicate(timeout=500)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    alone, *together = (json.loads(text.splitlines()[-1]) for text in outputs)
    assert together[0] == together[1]
    assert alone["metrics"]["trainer/value_loss"] > 0 and len(alone["weights"]) > 10
    for name, value in alone["metrics"].items():
        assert together[0]["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert together[0]["weights"] == pytest.approx(alone["weights"], rel=1e-5)
