"""An agent of openai-agents with two tools works on sums; run by tests/soak/agent_training.py in an environment of its own.

    PYTHON sums_agent.py URL client.py asked.json      asked.json: how to work, see `main`

Prints a line of JSON a session: its question, whether its answer was right, what was asked and what came of it. client.py:
dora_jax/serving/client.py, which needs nothing of dora_jax.
"""

import asyncio
import contextlib
import importlib.util
import json
import random
import sys
from pathlib import Path

import agents
import openai

MAX_TURNS = 6
PATIENCE_S = 120.0
AGAIN_S = 0.25  # a session that no group had a place for begins again


@agents.function_tool
def add(a: int, b: int) -> str:
    """a + b"""
    return str(a + b)


@agents.function_tool
def subtract(a: int, b: int) -> str:
    """a - b"""
    return str(a - b)


class Untrained(Exception):
    """No more is asked of this session."""


class Work:
    def __init__(self, url, client_file):
        spec = importlib.util.spec_from_file_location("session_client", client_file)
        self.sessions = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.sessions)
        self.url, self.answers = url, {}  # session -> answers of the endpoint, in their order
        http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [self._received]}, timeout=PATIENCE_S)
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)

    async def _received(self, response):
        await response.aread()
        headers = response.request.headers
        if response.status_code == 200:
            self.answers.setdefault(headers["x-agent"], []).append(answer := response.json())
            if "x-session-id" in headers and not answer["trained"]:
                raise Untrained
        elif response.status_code == 410:  # an untrained answer's version has gone meanwhile
            raise Untrained

    async def episode(self, question, task, temperature, train):
        """(whether it was right, the answers of the endpoint)."""
        session = self.sessions.AgentSession(self.url, task=task)
        headers = {"X-Agent": session.id} | (session.headers if train else {})
        settings = agents.ModelSettings(
            temperature=temperature,
            extra_headers=headers,
            extra_body={"return_token_ids": True, "logprobs": True, "max_tokens": self.turn_tokens},
        )
        model = agents.OpenAIChatCompletionsModel("policy", self.client)
        agent = agents.Agent(name="sums", model=model, tools=[add, subtract], model_settings=settings)
        try:
            output = str((await agents.Runner.run(agent, question, max_turns=MAX_TURNS)).final_output)
        except agents.exceptions.AgentsException as error:  # a tool that is not there, too many turns
            output = type(error).__name__
        except Untrained:
            if any(
                answer["trained"] for answer in self.answers.get(session.id, ())
            ):  # a turn behind the first is not: the session is given up
                with contextlib.suppress(RuntimeError):
                    await asyncio.to_thread(session.end)
            return False, []
        finally:
            answers = self.answers.pop(session.id, [])
        right = output.strip() == f"#### {eval(question)}"
        if train:
            with contextlib.suppress(RuntimeError):  # its group was given up
                await asyncio.to_thread(session.reward, float(right))
        return right, answers

    async def run(self, questions, sessions, at_once, temperatures, train):
        """sessions: of each question. Ends with the questions, or with the run that answers."""
        waiting, tried = iter(questions), 0

        async def work():
            nonlocal tried
            for question in waiting:
                tried += 1
                task = f"{tried} {question}"
                await asyncio.gather(*(session(question, task, i) for i in range(sessions)))

        async def session(question, task, i):
            temperature = temperatures[i % len(temperatures)]
            while True:
                right, answers = await self.episode(question, task, temperature, train)
                if answers:
                    break
                await asyncio.sleep(AGAIN_S)
            turns = [
                {
                    "version": answer["weight_version"],
                    "trained": answer.get("trained"),
                    "ids": answer["choices"][0]["token_ids"],
                    "logprobs": [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]],
                }
                for answer in answers
            ]
            found = {"question": question, "right": right, "temperature": temperature, "turns": turns}
            print(json.dumps(found), flush=True)

        try:
            await asyncio.gather(*(work() for _ in range(at_once)))
        except (openai.APIError, OSError, RuntimeError) as error:  # the run is over
            print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr)


def main(url, client_file, asked):
    asked = json.loads(Path(asked).read_text())
    agents.set_tracing_disabled(True)
    questions = asked["questions"]
    if asked["train"]:
        draw = random.Random(asked["seed"])
        questions = (draw.choice(asked["questions"]) for _ in range(10**9))
    work = Work(url, client_file)
    work.turn_tokens = asked["turn_tokens"]
    names = ("sessions", "at_once", "temperatures", "train")
    asyncio.run(work.run(questions, **{name: asked[name] for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
