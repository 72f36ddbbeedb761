"""Which agents' libraries does the endpoint serve? A table client x feature, by unchanged libraries with their own defaults.

    python -m tests.soak.agent_clients --envs=DIR [--only=openai,...] [--install] [--before=CHECKOUT]

Each client has an environment of its own, DIR/NAME (--install makes those that are missing, with the newest versions), in
which tests/data/clients/libraries.py runs it against a real server. The policy behind the server says by heart what an agent
needs to hear: a tool call where tools are shown and none has answered, JSON where the question wants it, else one sentence; so
an answer can be right or wrong, and a 200 whose content is wrong is a failure. --before: another checkout, whose endpoint
stands beside this one in the table. Exits with 1 where this checkout's endpoint fails a client.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/data/clients/libraries.py"
PACKAGES = {
    "openai": ["openai"],
    "anthropic": ["anthropic"],
    "openai-agents": ["openai-agents"],
    "pydantic-ai": ["pydantic-ai-slim[openai,anthropic]"],
    "langchain": ["langchain-openai", "langchain"],
    "litellm": ["litellm"],
    "llama-index": ["llama-index-llms-openai-like", "llama-index-core"],
    "smolagents": ["smolagents[openai]"],
    "instructor": ["instructor"],
    "dspy": ["dspy"],
    "autogen": ["autogen-agentchat", "autogen-ext[openai]"],
    "aider": ["aider-chat"],
    "verifiers": ["verifiers"],
}
FEATURES = ("chat", "stream", "temperature", "hints", "logprobs", "echo", "call", "required", "schema", "responses")
PATIENCE_S = 300
# What serves, run in a checkout: it names nothing that only some checkouts have.
SERVER = """
import dataclasses, json, sys, threading
import numpy as np
from tests.fakes.oracle import OracleEngine
from tests.fakes import endpoint

CONTEXT = 1 << 17
CALL = '<tool_call>{"name": %s, "arguments": %s}</tool_call>'


def says(prompt):
    shown = prompt.partition("\\x02")[0].split()
    answered = "tool: " in prompt or "user: Observation:" in prompt
    for name, arguments in (("final_result", {"n": 5}), ("Number", {"n": 5})):
        if name in shown:
            return CALL % (json.dumps(name), json.dumps(arguments))
    if "final_answer" in shown and answered:
        return CALL % ('"final_answer"', json.dumps({"answer": "5"}))
    if "add" in shown and not answered:
        return CALL % ('"add"', '{"a": 2, "b": 3}')
    if "[[ ## answer ## ]]" in prompt:
        return "[[ ## answer ## ]]\\n5\\n\\n[[ ## completed ## ]]"
    if "Answer as json" in prompt:
        return '{"n": 5}'
    return "The sum is 5."


class Letters(endpoint.Letters):
    def encode(self, text):
        return list(text.encode("latin-1", errors="replace"))

    def check_grammar(self, text):
        pass

    def chat(self, messages, tools=None, **variables):
        shown = "".join(f"{tool['function']['name']} " for tool in tools or ()) + "\\x02"
        return shown + "".join(f"{message['role']}: {message['content']}\\n" for message in messages)


class Scripted(OracleEngine):
    def __init__(self):
        section = dataclasses.replace(endpoint.SECTION, decode_steps=4, max_prompt_tokens=CONTEXT, max_new_tokens=CONTEXT)
        super().__init__(section, eos_ids=(endpoint.END,), version_in=lambda weights: weights,
                         length=lambda v, group, i, limit: min(len(self.texts[group]) + 1, limit))
        self.texts, self.given = {}, {}

    def submit(self, id, prompt_ids, *others, sampling=None, **more):
        own = sampling or next((x for x in others if hasattr(x, "top_p")), None)
        self.given[id] = getattr(own, "given", ())
        whole = [*prompt_ids, *self.given[id]]
        self.texts[id.group_id] = says(bytes(int(x) for x in whole).decode("latin-1")).encode()
        super().submit(id, prompt_ids, *others, **more, **({} if sampling is None else {"sampling": sampling}))

    def _right(self, id, out):
        right = [*self.given[id], *self.texts[id.group_id], endpoint.END]
        return np.array(right[: len(out)], np.int32)

    def tick(self):
        result = super().tick()
        finished = (dataclasses.replace(s, out_ids=self._right(s.id, s.out_ids)) for s in result.finished)
        return dataclasses.replace(result, finished=tuple(finished))

    def sampled(self, id, start=0, *rest):
        new = super().sampled(id, 0, *rest)
        cut = {"out_ids": self._right(id, new.out_ids)[start:], "logprobs": new.logprobs[start:]}
        if getattr(new, "top", None) is not None:
            cut["top"] = new.top[start:]
        return new._replace(**cut)


endpoint.Letters = Letters
endpoint.LIMITS = dataclasses.replace(endpoint.LIMITS, context=CONTEXT)  # older checkouts read it
section = dataclasses.replace(endpoint.SECTION, max_prompt_tokens=CONTEXT // 2, max_new_tokens=CONTEXT // 2)
with endpoint.Rig(engine=Scripted(), section=section).live() as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def serving(tree: Path) -> Iterator[str]:
    """The URL of this checkout's endpoint."""
    environment = os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and server.stdin is not None
        yield server.stdout.readline().strip()
        server.stdin.close()


def asked(python: Path, name: str, url: str) -> dict[str, str]:
    """feature -> "ok" or what went wrong."""
    command = [str(python), "-P", str(PROGRAM), name, url]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        return {"version": "?", "chat": f"{type(error).__name__}: {error}"[:300]}


def install(envs: Path, names: list[str]) -> None:
    """Makes the environments that are missing."""
    for name in names:
        if not (folder := envs / name).exists():
            venv.create(folder, with_pip=True)
            subprocess.run([folder / "bin" / "pip", "install", "-q", *PACKAGES[name]], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, required=True, help="folder of the clients' environments")
    parser.add_argument("--only", default=",".join(PACKAGES), help="names of clients")
    parser.add_argument("--install", action="store_true", help="make the environments that are missing")
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name]
    if unknown := set(names) - set(PACKAGES):
        parser.error(f"--only: {min(unknown)} is none of {', '.join(PACKAGES)}")
    if given.install:
        install(given.envs, names)
    trees = ([given.before.resolve()] if given.before else []) + [ROOT]
    wrong = []
    print("| client |", " | ".join(FEATURES), "|")
    print("|---|" + "---|" * len(FEATURES), flush=True)
    with contextlib.ExitStack() as servers:
        urls = [servers.enter_context(serving(tree)) for tree in trees]
        for name in names:
            if not (python := given.envs / name / "bin" / "python").exists():
                continue
            results = [asked(python, name, url) for url in urls]
            cells = []
            for feature in FEATURES:
                found = [result.get(feature) for result in results]
                cells.append(" -> ".join("" if each is None else "ok" if each == "ok" else "NO" for each in found))
            print(f"| {name} {results[-1]['version']} |", " | ".join(cells).replace(" -> |", "|"), "|", flush=True)
            for tree, result in zip(("before", "now")[-len(trees) :], results, strict=True):
                faults = {feature: text for feature, text in result.items() if feature != "version" and text != "ok"}
                wrong += [f"{tree}: {name} {feature}: {text}" for feature, text in faults.items()]
    print(*(line.replace("\n", " ") for line in wrong), sep="\n")
    return 1 if any(line.startswith("now") for line in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
