"""What a scripted user makes of a run that trains on its sessions, and what training costs it in latency.

    python -m dora_jax.bench.satisfaction [--base=FOLDER] [--steps=40] [--users=32] [--workdir=runs/satisfaction]

The user asks the endpoint of a live run for sums and says "thanks" where the answer is right, else "wrong": what it
says next is the reward, and the run never sees the right answer. `satisfied` is the share of sessions that ended with
thanks, by quarters of the run. Then as many of the same sessions go to the base as `python -m dora_jax.serve` serves
it, without training: `p50`, `p99` are milliseconds from a question to its whole answer.
--base: a warm start for sums with a chat template; where it is missing it is made, which takes minutes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dora_jax.bench import harness

TEMPLATE = (  # the quickstart's "sum = working<end>", with a line break in front of each message of the user
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|endoftext|>"
    "{% else %}{{ '\\n' + m.content + ' ' }}{% endif %}{% endfor %}"
)
CONFIG = """
from dora_jax import config

def get_config():
    c = config.defaults()
    c.steps = {steps}
    c.task.name = "reasoning_gym:chain_sum"
    c.task.params = {{"min_terms": 3, "max_terms": 7, "min_digits": 1, "max_digits": 1}}
    c.task.extract, c.task.template = r": (.*)$", "\\n{{prompt}} "
    c.sft.out = c.model.path = {base!r}
    c.sft.examples, c.sft.slip_rate, c.sft.steps = 40960, 0.7, {warm}
    c.sft.batch_rows, c.sft.pack_tokens, c.sft.learning_rate, c.sft.warmup_steps = 8, 128, 5e-3, min(200, {warm})
    c.sft.d_model, c.sft.n_layers, c.sft.d_ff = 64, 2, 192
    c.sft.n_heads, c.sft.n_kv_heads, c.sft.head_dim = 4, 2, 32
    c.rollout.slots, c.rollout.decode_steps, c.rollout.residents = 64, 1, 3
    c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 64, 64
    c.orchestrator.groups_per_step, c.orchestrator.group_size, c.orchestrator.inflight = {groups}, 8, max(0.5, 1 / {groups})
    c.trainer.pack_tokens, c.trainer.micro_batches = 128, 4
    c.checkpoint.every = 0
    return c
"""
LIVE = (
    "--config.task.rewards=('dora_jax.bench.satisfaction.thanked',)",
    "--config.task.reward_sandbox=weak",
    "--config.serving.train=True",
    "--config.environment.max_turns=1",
)
ENGINE = (  # of the run, for the endpoint beside it
    "--config.rollout.slots=64",
    "--config.rollout.decode_steps=1",
    "--config.rollout.max_prompt_tokens=64",
    "--config.rollout.max_new_tokens=64",
)
GROUPS = 16
START_S = 900.0
POLL_S = 0.2


def thanked(prompt: str, response: str, answer: dict[str, Any]) -> float:
    """The reward: what the user wrote next."""
    return float(any(message["content"] == "thanks" for message in answer["next"]))


class Talk(NamedTuple):
    """One session."""

    satisfied: bool
    version: int
    latency_s: float
    tokens: int


class Ended(RuntimeError):
    """The endpoint has refused."""


class User:
    """So many sessions at once, one after the other in each of `users` threads. Port: of the endpoint, on loopback."""

    def __init__(self, port: int, users: int, seed: int):
        self.talks: list[Talk] = []
        self._port, self._over = port, threading.Event()
        self._threads = [threading.Thread(target=self._live, args=(seed * users + i,)) for i in range(users)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _live(self, number: int) -> None:
        rng, connection = random.Random(number), http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        for count in range(sys.maxsize):
            try:
                if self._over.is_set():
                    return
                self.talks.append(_talk(connection, rng, f"{number}-{count}"))
            except (OSError, http.client.HTTPException, Ended):
                connection.close()
                self._over.wait(POLL_S)  # the run ends, or has ended


def _talk(connection: http.client.HTTPConnection, rng: random.Random, session: str) -> Talk:
    def asked(**more: Any) -> dict[str, Any]:
        headers = {"content-type": "application/json", "x-session-id": session}
        connection.request("POST", "/v1/chat/completions", json.dumps({"messages": messages, **more}), headers)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise Ended(body.decode())
        return json.loads(body)

    terms = [str(rng.randint(1, 9)) for _ in range(rng.randint(3, 7))]
    question = terms[0] + "".join(f" {rng.choice('+-')} {term}" for term in terms[1:]) + " ="
    messages = [{"role": "user", "content": question}]
    latency_s, answer = harness.timed(asked)
    text = answer["choices"][0]["message"]["content"]
    found = re.search(r"#### (-?\d+)$", text)
    satisfied = found is not None and int(found[1]) == eval(question[:-1])
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "thanks" if satisfied else "wrong"},
    ]
    asked(max_tokens=1)
    return Talk(satisfied, answer["weight_version"], latency_s, answer["usage"]["completion_tokens"])


# ---------------------------------------------------------------- the two servers


@contextlib.contextmanager
def serving(log: Path, *command: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """(port, process) of the program, whose {port} is filled in, from when it answers there; it is ended where it has not
    ended."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with log.open("wb") as out:
        arguments = [word.replace("{port}", str(port)) for word in command]
        process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=out, stderr=out)
    try:
        deadline_s = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{command[0]} does not answer: see {log}")
            time.sleep(POLL_S)
        yield port, process
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
            return bool(json.load(answer)["data"])
    except (OSError, ValueError, http.client.HTTPException):
        return False


def satisfaction(
    base=Path("runs/satisfaction_base"), workdir=Path("runs/satisfaction"), steps=40, users=32, groups=GROUPS,
    warm_steps=4000,
) -> Iterator[str]:  # fmt: skip
    """groups: of eight sessions, a step. warm_steps: of the warm start, where it is made. Exits with 1 where the run
    fails."""
    workdir.mkdir(parents=True, exist_ok=True)
    config = workdir / "config.py"
    config.write_text(CONFIG.format(steps=steps, base=str(base), groups=groups, warm=warm_steps))
    if not (base / "config.json").exists():
        sft = (sys.executable, "-m", "dora_jax.sft", f"--config={config}", f"--workdir={workdir}/sft")
        with (workdir / "sft.log").open("wb") as out:
            subprocess.run(sft, check=True, stdout=out, stderr=out)
    (base / "chat_template.jinja").write_text(TEMPLATE)

    log, folders = workdir / "train.log", (f"--config={config}", f"--workdir={workdir}/run")
    with serving(log, "dora_jax.train", *folders, "--config.serving.port={port}", *LIVE) as (port, process):
        user = User(port, users, seed=1)
        code = process.wait()
    user.stop()
    if code:
        print(f"the run ended with exit code {code}: see {log}", file=sys.stderr)
        raise SystemExit(1)

    with serving(workdir / "serve.log", "dora_jax.serve", f"--model={base}", "--port={port}", *ENGINE) as (port, _):
        still = User(port, users, seed=2)
        while len(still.talks) < len(user.talks):
            time.sleep(POLL_S)
        still.stop()
    yield from page(user.talks, still.talks, steps)


def page(trained: Sequence[Talk], still: Sequence[Talk], steps: int) -> Iterator[str]:
    versions = len({talk.version for talk in trained})
    machine = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    yield f"{len(trained)} sessions over {steps} steps, answered by {versions} versions; {machine}"
    yield "                 satisfied  p50 ms  p99 ms  tokens an answer"
    ends = [i * max(1, len(trained) // 4) for i in range(4)]
    parts = {f"quarter {i + 1}": trained[ends[i] : stop] for i, stop in enumerate([*ends[1:], None])}
    for name, talks in (parts | {"all": trained, "no training": still}).items():
        if not talks:
            yield f"{name:16} no session"
            continue
        latency = sorted(talk.latency_s for talk in talks)
        p50, p99 = (1e3 * latency[min(len(latency) - 1, int(q * len(latency)))] for q in (0.5, 0.99))
        satisfied = sum(talk.satisfied for talk in talks) / len(talks)
        tokens = sum(talk.tokens for talk in talks) / len(talks)
        yield f"{name:16} {satisfied:9.1%} {p50:7.0f} {p99:7.0f} {tokens:17.1f}"


if __name__ == "__main__":
    harness.run(satisfaction)
