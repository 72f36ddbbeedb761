"""What ordinary clients of an endpoint wait for while others do to it whatever they can.

    python -m tests.soak.hostile_clients --base=DIR [--tree=DIR] [--hostile=1000] [--at_once=32] [--clients=4] [--seconds=60]
    python -m tests.soak.hostile_clients --base=DIR --train [--steps=400]
    python -m tests.soak.hostile_clients attack --port=N [--hostile=1000]

`clients` ask for eight tokens behind a short prompt, one request after the other: `seconds` long while nothing else is
asked, then beside `hostile` requests of all KINDS from another process, `at_once` at a time, until these are answered or
three times `seconds` have passed: five of the kinds hold a connection for HOLD_S, which alone takes hostile * 5 / 18 * HOLD_S /
at_once seconds. A request that has no answer then counts with what it has waited. Printed are p50 and
p99 of both times, what the hostile ones were answered, and the most memory that the endpoint's process held.

--base is a folder with a chat template, such as agent_training.py makes. --tree: of another source tree, whose programs
answer. --train: the endpoint of a run that trains on the sessions of 16 agents of agent_kills.py, whose steps' times are
printed of both times, too. `python -m tests.soak.agent_kills --hostile` kills such a run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dora_jax.bench import harness
from dora_jax.bench.learning import serving
from tests.soak.agent_kills import Agents
from tests.soak.agent_training import ENGINE, TRAIN, Run

HOLD_S = 5.0  # that a connection is held open with half of a request
ANSWER_S = 60.0  # for what a hostile client waits
JSON_HEADERS = {"Content-Type": "application/json"}
MB = 2**20
TEXT = "the quick brown fox "


def asked(path: str, body: bytes | str, headers: dict[str, str] | None = None) -> Callable[[int], str]:
    """A hostile request; what it is answered, by port."""

    def ask(port: int) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        with contextlib.closing(connection):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read all
                connection.request("POST", path, body, JSON_HEADERS | (headers or {}))
            return str(connection.getresponse().status)

    return ask


def held(sent: bytes) -> Callable[[int], str]:
    """A connection that sends so much and then nothing."""

    def hold(port: int) -> str:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as opened:
            opened.sendall(sent)
            time.sleep(HOLD_S)
        return "left"

    return hold


def talk(**changes: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "1 + 2"}], "max_tokens": 8} | changes)


def kinds() -> dict[str, Callable[[int], str]]:
    completion, chat = "/v1/completions", "/v1/chat/completions"
    many = [{"role": "user", "content": "a"}] * 20_000
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(5_000)
    ]
    nested = {
        "type": "object",
        "properties": {f"p{i}": {"type": "array", "items": {"enum": [*range(500)]}} for i in range(500)},
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": nested}}
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return {
        "a prompt of 4 MB": asked(completion, json.dumps({"prompt": TEXT * (4 * MB // len(TEXT)), "max_tokens": 8})),
        "a chat of 4 MB": asked(chat, talk(messages=[{"role": "user", "content": TEXT * (4 * MB // len(TEXT))}])),
        "a prompt of 30 MB": asked(completion, json.dumps({"prompt": TEXT * (30 * MB // len(TEXT)), "max_tokens": 8})),
        "a prompt at the edge": asked(completion, json.dumps({"prompt": TEXT * 2_000, "max_tokens": 8})),
        "20,000 messages": asked(chat, talk(messages=many)),
        "5,000 tools": asked(chat, talk(tools=tools)),
        "a schema of 250,000 values": asked(chat, talk(response_format=form)),
        "100,000 brackets": asked(completion, "[" * 100_000),
        "16 MB that are no JSON": asked(completion, b"\xff" * 16 * MB),
        "10,000 answers": asked(completion, json.dumps({"prompt": "1 +", "n": 10_000})),
        "10,000 stop texts": asked(completion, json.dumps({"prompt": "1 +", "stop": [str(i) for i in range(10_000)]})),
        "a million biases": asked(completion, json.dumps({"prompt": "1 +", "logit_bias": {str(i): 1 for i in range(100_000)}})),
        "another host": asked(completion, json.dumps({"prompt": "1 +"}), {"Host": "evil.example"}),
        "headers that do not end": held(head),
        "a connection that says nothing": held(b""),
        "a body that does not come": held(head + b"Content-Length: 100\r\n\r\n{"),
        "bytes": held(random.Random(0).randbytes(10_000)),
        "an answer that nobody reads": held(
            head + b"Content-Length: 58\r\n\r\n" + json.dumps({"prompt": "1 +", "max_tokens": 200, "stream": True}).ljust(58).encode()[:58]
        ),
    }  # fmt: skip


def attack(port=0, hostile=1000, at_once=32, forever=False) -> Iterator[str]:
    """One kind after the other, over and over."""
    made = list(kinds().items())
    answers: collections.Counter[str] = collections.Counter()
    numbers, lock = itertools.count(), threading.Lock()

    def work() -> None:
        while (i := next(numbers)) < hostile or forever:
            name, ask = made[i % len(made)]
            try:
                answer = ask(port)
            except (OSError, http.client.HTTPException) as error:
                answer = type(error).__name__
                time.sleep(0.1 * forever)  # the run may be down
            with lock:
                answers[f"{name}: {answer}"] += 1

    threads = [threading.Thread(target=work, daemon=True) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(1.0)
        yield f"{sum(answers.values())} of {hostile}"
    yield ", ".join(f"{name} x{times}" for name, times in sorted(answers.items()))


class Clients:
    """Threads that ask one short request after the other; when each was asked and how long it took."""

    def __init__(self, port: int, number: int):
        self.times: list[tuple[float, float]] = []
        self.failed: collections.Counter[str] = collections.Counter()
        self._port, self._over = port, threading.Event()
        self._open: dict[int, float] = {}
        self._threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(number)]
        for thread in self._threads:
            thread.start()

    def _work(self, i: int) -> None:
        body = json.dumps({"prompt": "1 + 2", "max_tokens": 8})
        while not self._over.is_set():
            began_s = self._open[i] = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
            try:
                connection.request("POST", "/v1/completions", body, JSON_HEADERS)
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    self.failed[str(answer.status)] += 1
            except (OSError, http.client.HTTPException) as error:
                self.failed[type(error).__name__] += 1
                self._over.wait(0.2)  # the run may be down
            finally:
                connection.close()
            self.times.append((began_s, time.monotonic() - began_s))
            del self._open[i]

    def of(self, since_s: float, until_s: float) -> list[float]:
        """Seconds of the requests that began in between, those without an answer included."""
        taken = [took_s for began_s, took_s in list(self.times) if since_s <= began_s < until_s]
        return sorted(taken + [until_s - began_s for began_s in list(self._open.values()) if began_s < until_s - 1.0])

    def end(self) -> None:
        self._over.set()


def percentiles(name: str, taken: list[float]) -> str:
    p50, p99 = statistics.median(taken), taken[min(len(taken) - 1, int(0.99 * len(taken)))]
    return f"{name:9} {len(taken):6} requests   p50 {1000 * p50:8.1f} ms   p99 {1000 * p99:8.1f} ms   longest {1000 * taken[-1]:8.1f} ms"


def peak_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return 1024 * int(fields["VmHWM"].split()[0])


def hostile_clients(
    base=Path("runs/agent_training/base"), tree=Path(__file__).parents[2], workdir=Path("runs/hostile_clients"), hostile=1000,
    at_once=32, clients=4, seconds=60.0, train=False, steps=400,
) -> Iterator[str]:  # fmt: skip
    workdir = workdir.resolve()
    workdir.mkdir(parents=True, exist_ok=True)
    base, tree, own = base.resolve(), tree.resolve(), Path(__file__).parents[2]
    os.environ["PYTHONPATH"] = str(tree)
    os.chdir(tree)  # what is imported first
    command = ["dora_jax.serve", f"--model={base}", "--port={port}", *ENGINE]
    if train:
        options = argparse.Namespace(workdir=workdir, envs=Path(), steps=steps, warm_steps=1)
        run = Run(options, "run", 0)
        config = run.config.read_text().replace(str(run.base.resolve()), str(base))
        run.config.write_text(config)
        command = ["dora_jax.train", f"--config={run.config}", f"--workdir={run.workdir}", *TRAIN]
    with contextlib.ExitStack() as opened:
        port, process = opened.enter_context(serving(workdir / "console.log", *command))
        agents = Agents(f"http://127.0.0.1:{port}", 16, 0) if train else None
        ordinary, published = Clients(port, clients), list[float]()
        opened.callback(ordinary.end)

        def pass_by(seconds: float, until: Callable[[], bool] = lambda: False) -> None:
            """Looks at the steps that are published meanwhile."""
            over_s, metrics = time.monotonic() + seconds, run.workdir / "metrics.jsonl" if train else Path(os.devnull)
            while time.monotonic() < over_s and not until():
                made = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
                published.extend([time.monotonic()] * (made - len(published)))
                time.sleep(0.1)

        if train:
            pass_by(600, lambda: len(published) >= 3)  # what is compiled at first is no step's time
        pass_by(5)
        before_bytes, quiet_s = peak_bytes(process.pid), time.monotonic()
        pass_by(seconds)
        hostile_s = time.monotonic()
        with (workdir / "attack.txt").open("wb") as out:
            asking = [
                "-m",
                "tests.soak.hostile_clients",
                "attack",
                f"--port={port}",
                f"--hostile={hostile}",
                f"--at_once={at_once}",
            ]
            env = os.environ | {"PYTHONPATH": str(own)}
            attacker = subprocess.Popen([sys.executable, *asking], stdout=out, env=env, cwd=own)
        opened.callback(attacker.kill)
        pass_by(3 * seconds, lambda: attacker.poll() is not None)
        over_s, ended = time.monotonic(), attacker.poll() is not None
        if agents is not None:
            agents.over.set()
        quiet, beside = ordinary.of(quiet_s, hostile_s), ordinary.of(hostile_s, over_s)
        yield percentiles("quiet", quiet)
        yield percentiles("hostile", beside)
        yield f"failed: {dict(ordinary.failed) or 'none'}; {beside[int(0.99 * len(beside))] / quiet[int(0.99 * len(quiet))]:.2f} times quiet's p99"
        yield (
            f"{hostile} hostile requests {'answered' if ended else 'not all answered'} in {over_s - hostile_s:.0f} s: "
            + ((workdir / "attack.txt").read_text().splitlines() or [""])[-1]
        )
        yield f"memory: {before_bytes / MB:.0f} MiB at most before, {peak_bytes(process.pid) / MB:.0f} MiB after"
        if train:
            for name, since_s, until_s in (("quiet", quiet_s, hostile_s), ("hostile", hostile_s, over_s)):
                made = [at for at in published if since_s <= at < until_s]
                took = sorted(b - a for a, b in itertools.pairwise(made))
                yield f"{name:9} {len(took)} steps, " + (
                    f"median {statistics.median(took):.2f} s, longest {took[-1]:.2f} s" if took else ""
                )


if __name__ == "__main__":
    harness.run(hostile_clients, attack)
