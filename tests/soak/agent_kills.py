"""A run that trains on sessions with tools, killed with SIGKILL again and again while its agents go on, then its books.

    python -m tests.soak.agent_kills [--kills=4] [--processes] [--hostile] [--seed=0] [--steps=12] [--agents=24] [--workdir=DIR]

The run and its model are those of agent_training.py. Agents of the standard library work on sums with its two tools; an agent
whose session is gone begins another. Each session posts another number as its reward, so that a reward which counts twice
shows. A kill comes up to two seconds after so many rewards have been accepted since the start, and the same command starts
again. --processes: trainer and rollouts are processes of their own, the one that is killed is the controller, and at every
second kill a rollout's process goes with it. --hostile: all the while the endpoint is asked what
hostile_clients.py asks. Checked at the end: the books of the journal (issued = trained + filtered +
failed + in flight; lost, trained twice, generated again: 0); each trained reward is one that its session posted, once; each
trained turn is what its agent was answered, by that version.
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
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from dora_jax.runtime.journal.journal_audit import audit
from dora_jax.serving.client import AgentSession
from tests.soak.agent_training import GROUPS, SIZE, TRAIN, TURN_TOKENS, Run, sums, trained
from tests.soak.gang_run import PROCESSES, UP

PATIENCE_S, AGAIN_S = 900.0, 0.3
BEFORE_A_KILL = 40  # rewards
TASKS = 4  # that come again and again, so that a group gets all of its sessions whichever are lost
TOOLS = [
    {"type": "function", "function": {"name": name, "description": what, "parameters": {"type": "object"}}}
    for name, what in (("add", "a + b"), ("subtract", "a - b"))
]


class Agents:
    """Threads that work until they are answered to stop."""

    def __init__(self, url: str, number: int, seed: int):
        self.accepted: set[float] = set()
        self.unsure: set[float] = set()  # posted; no answer came
        self.answered: set[Any] = set()  # (version, turns of a session) and its reward
        self.lost = 0  # sessions that ended with the run's process
        self.over = threading.Event()
        self._url, self._numbers, self._questions = url, itertools.count(1), sums()[0][:TASKS]
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(seed, i), daemon=True) for i in range(number)]
        for thread in self._threads:
            thread.start()

    def _work(self, seed: int, i: int) -> None:
        draw = random.Random(seed * 1000 + i)
        while not self.over.is_set():
            try:
                if not self._episode(draw.choice(self._questions)):
                    time.sleep(AGAIN_S)
            except (OSError, http.client.HTTPException):
                time.sleep(AGAIN_S)

    def _episode(self, question: str) -> bool:
        """False: no group had a place for it."""
        session, turns = AgentSession(self._url, task=question), list[tuple[int, ...]]()
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        versions = set()
        for _ in range(5):
            body = {"messages": messages, "tools": TOOLS, "max_tokens": TURN_TOKENS, "return_token_ids": True}
            headers = {"content-type": "application/json", **session.headers}
            asked = urllib.request.Request(f"{session.base_url}/chat/completions", json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(asked, timeout=60) as reply:
                    answer = json.load(reply)
            except (OSError, http.client.HTTPException):
                self.lost += bool(turns)
                raise
            if not answer["trained"]:
                return False
            choice = answer["choices"][0]
            turns.append(tuple(choice["token_ids"]))
            versions.add(answer["weight_version"])
            messages.append(choice["message"])
            if not choice["message"].get("tool_calls"):
                break
            for call in choice["message"]["tool_calls"]:
                given = json.loads(call["function"]["arguments"])
                a, b = (given.get(name) for name in "ab")
                known = isinstance(a, int) and isinstance(b, int)
                result = (a + b if call["function"]["name"] == "add" else a - b) if known else "?"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
        assert len(versions) == 1
        with self._lock:
            reward = float(next(self._numbers))
            self.answered.add(((versions.pop(), tuple(turns)), reward))
        try:
            session.reward(reward)
            session.reward(reward)  # as an agent whose first answer was lost
            self.accepted.add(reward)
        except RuntimeError:  # the session went with the process that had it
            self.unsure.add(reward)
            self.lost += 1
        except OSError:
            self.unsure.add(reward)
            self.lost += 1
            raise
        return True


def struck(
    command: list[str], console: Path, agents: Agents, kills: int, before_a_kill: int, draw: random.Random
) -> tuple[int, int]:
    """Starts the run and kills it so often, each time once it has accepted so many rewards more, and lets it end; (starts, its
    exit code). Where it has rollouts of its own processes, one is killed with it every second time."""
    starts = 0
    while True:
        with console.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        starts, before, began_s = starts + 1, len(agents.accepted), time.monotonic()
        while process.poll() is None and (starts > kills or len(agents.accepted) < before + before_a_kill):
            if time.monotonic() - began_s > PATIENCE_S:
                process.kill()
                raise RuntimeError(f"nothing goes on: see {console}")
            time.sleep(0.05)
        if process.poll() is None:
            time.sleep(draw.uniform(0, 2))
        if process.poll() is not None:
            agents.over.set()
            return starts, process.returncode
        process.kill()
        process.wait()
        pids = {gang: pids for gang, _, pids in UP.findall(console.read_text())}
        for pid in pids.get("rollout 0", "").split(",") if "rollout 0" in pids and starts % 2 == 0 else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        print(f"kill {starts}: {len(agents.accepted)} rewards accepted, {agents.lost} sessions lost so far", flush=True)


def faults_of(made: list[tuple[Any, float, Any]], agents: Agents) -> list[str]:
    """What is wrong with these trained trajectories, by what the agents were answered and posted."""
    rewards = collections.Counter(reward for _, reward, _ in made)
    known = {((version, tuple(ids for ids, _, _ in turns)), reward) for (version, turns), reward, _ in made}
    faults = {
        "trained more than once": [reward for reward, times in rewards.items() if times > 1],
        "trained, and not posted": sorted(set(rewards) - agents.accepted - agents.unsure),
        "not what the agent was answered": sorted(reward for _, reward in known - agents.answered),
    }
    return [f"{name}: {values}" for name, values in faults.items() if values]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm_steps", type=int, default=1500)
    parser.add_argument("--agents", type=int, default=24)
    parser.add_argument("--workdir", type=Path, default=Path("runs/agent_kills"))
    parser.set_defaults(envs=Path())
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    os.environ.setdefault("DORA_COMPILE_CACHE", str((args.workdir / "cache").resolve()))
    run = Run(args, "processes" if args.processes else "run", args.seed)
    run.warm()
    shutil.rmtree(run.workdir, ignore_errors=True)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    command = [sys.executable, "-m", "dora_jax.train", f"--config={run.config}", f"--workdir={run.workdir}"]
    command += [word.replace("{port}", str(port)) for word in TRAIN]
    command += ["--config.journal.partial_s=0.2", "--config.checkpoint.every=3"]
    command += PROCESSES if args.processes else ()
    console = run.folder / "console.log"
    console.unlink(missing_ok=True)
    agents = Agents(f"http://127.0.0.1:{port}", args.agents, args.seed)
    asking = ["-m", "tests.soak.hostile_clients", "attack", f"--port={port}", "--forever", "--at_once=16"]
    hostile = subprocess.Popen([sys.executable, *asking]) if args.hostile else None
    try:
        starts, code = struck(command, console, agents, args.kills, BEFORE_A_KILL, random.Random(args.seed))
    finally:
        if hostile is not None:
            hostile.kill()
            hostile.wait()
    books, made = audit(run.workdir / "journal"), trained(run.workdir)
    print(f"{starts} starts, exit code {code}; {books}")
    rewards, wrong = {reward for _, reward, _ in made}, faults_of(made, agents)
    print(
        f"{len(agents.accepted)} rewards accepted, {len(made)} trained, {len(rewards)} of them different, "
        f"{len(rewards & agents.unsure)} of sessions whose agent got no answer; {agents.lost} sessions lost"
    )
    print(*wrong or ["each reward once, each trained turn as it was answered"], sep="\n")
    return 1 if wrong or not books.ok or code or len(made) != args.steps * GROUPS * SIZE else 0


if __name__ == "__main__":
    sys.exit(main())
