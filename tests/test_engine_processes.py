"""One tensor-parallel instance over two processes: both make the same plan from the same inbox, and what one would."""

import json
import os
import socket
import subprocess
import sys

import pytest


def start(address, rank, processes):
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUM")}
    return subprocess.Popen([sys.executable, "-m", "tests.engine_process", address, str(rank), str(processes)],
                            env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_sample_what_one_does():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    running = [start(address, 0, 1), start(address, 0, 2), start(address, 1, 2)]
    outputs = [process.communicate(timeout=500)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    alone, *together = (json.loads(text.splitlines()[-1]) for text in outputs)
    assert together[0] == together[1] and len(alone) == 6
    for id, (tokens, logprobs) in alone.items():
        assert together[0][id][0] == tokens
        assert together[0][id][1] == pytest.approx(logprobs, abs=1e-5)
