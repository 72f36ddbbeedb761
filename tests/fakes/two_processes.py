"""One world of one process and one of two, side by side: what each process printed last, as JSON."""

import json
import os
import socket
import subprocess
import sys


def alone_and_together(module: str) -> tuple:
    """(of the process alone, [of the two of one world]); `python -m tests.fakes.MODULE ADDRESS RANK PROCESSES`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUM")}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.fakes.{module}", address, str(rank), str(processes)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, processes in ((0, 1), (0, 2), (1, 2))
    ]
    outputs = [process.communicate(timeout=500)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    alone, *together = (json.loads(text.splitlines()[-1]) for text in outputs)
    return alone, together
