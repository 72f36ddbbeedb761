"""Reward pools whose reward functions raise, hang, die and lie on request."""

import contextlib
import time

import numpy as np

from dora_jax.config import TaskSection
from dora_jax.tasks import sandbox
from dora_jax.tasks.pool import ScorerPool
from dora_jax.types import Prompt, Sample, SampleId, Span


def full_sandbox():
    """Whether this machine has them; the reason where not."""
    try:
        return bool(sandbox.full()), ""
    except sandbox.NoSandbox as error:
        return False, str(error)


SANDBOX = "full" if full_sandbox()[0] else "weak"


MY_REWARDS = '''
import os, sys, time, pathlib, threading

def short(prompt: str, response: str, answer) -> float:
    return 1.0 if str(answer) in response and len(response) < 80 else 0.0

def terms(prompt, response, answer):
    return {"right": response == answer, "length": len(response) / 10}

def uneven(prompt, response, answer):
    return {response: 1.0}

def seen(prompt, response, answer):
    return {"seen " + repr((prompt, response, answer)): 1.0}

def modules(prompt, response, answer):
    return {name: name in sys.modules for name in response.split()}

def environment(prompt, response, answer):
    return {name: name in os.environ for name in response.split()}

def noisy(prompt, response, answer):
    print("x" * 3_000_000, flush=True)
    os.write(1, b"\\x00\\x00\\x00\\x02{}"); os.write(2, b"noise")
    return float(len(response))

def trouble(prompt, response, answer):
    """What a response asks for."""
    count(answer)
    if response == "raise": raise ValueError("no good")
    if response == "hang": time.sleep(60)
    if response == "spin": threading.Event().wait(60)
    if response == "exit": print("bye", flush=True); os._exit(0)
    if response == "sysexit": sys.exit(0)
    if response == "segv": os.kill(os.getpid(), 11)
    if response == "text": return "1.0"
    if response == "nan": return float("nan")
    if response == "once":
        if count(answer) == 2: os._exit(3)
    return 1.0

def count(path):
    with open(path, "a") as file: file.write(".")
    return os.path.getsize(path)

def python(prompt, response, answer):
    import multiprocessing
    return float(os.system("true"))

import asyncio

async def judge(prompt, response, answer):
    """What the judge on a port of this machine says of a response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", answer)
    writer.write(response.encode() + b"\\n")
    score = float(await reader.readline())
    writer.close()
    return score

def ranked(responses: list[str]) -> list[dict]:
    by_length = sorted(responses, key=len)
    return [{"rank": by_length.index(each), "of": len(responses)} for each in responses]

async def ranked_later(responses, answer):
    await asyncio.sleep(0.01)
    return [len(each) for each in responses]

def forgets(responses): return [1.0] * (len(responses) - 1)

def own_loop(response): return asyncio.run(asyncio.sleep(0, result=2.0))

async def later(response, answer):
    """What a response asks for."""
    count(answer)
    if response == "raise": raise ValueError("no good")
    if response == "slow": await asyncio.sleep(60)
    if response == "block": time.sleep(60)
    if response == "once" and count(answer) == 2: raise ValueError("not yet")
    if response == "exit": os._exit(0)
    await asyncio.sleep(0.3)
    return 1.0
'''


@contextlib.contextmanager
def pools():
    """A function that opens pools; the end of the context closes them."""
    opened = []

    def open_pool(*names, **section):
        paths = tuple(name if "." in name else f"my_rewards.{name}" for name in names)
        opened.append(ScorerPool(TaskSection(rewards=paths, **{"reward_sandbox": SANDBOX, **section}), decode))
        return opened[-1]

    yield open_pool
    for pool in opened:
        pool.close()


def decode(ids):
    return "".join(map(chr, ids))


def group(*responses, answer="4", group_id=0, finish="stop"):
    prompt = Prompt(
        group_id=group_id,
        task="t",
        uid="u",
        text="2+2=",
        token_ids=np.zeros(1, np.int32),
        answer=answer,
        max_new_tokens=9,
    )
    samples = tuple(
        Sample(
            id=SampleId(group_id, i),
            prompt_ids=prompt.token_ids,
            out_ids=np.array([ord(c) for c in text], np.int32),
            logprobs=np.zeros(len(text), np.float32),
            mask=np.ones(len(text), bool),
            spans=(Span(version=3, start=0, stop=len(text)),),
            finish=finish,
        )
        for i, text in enumerate(responses)
    )
    return prompt, samples


def results(pool, n=1, timeout_s=20.0):
    done, end_s = [], time.monotonic() + timeout_s
    while len(done) < n:
        assert time.monotonic() < end_s, f"{len(done)} of {n} groups came back"
        done += pool.poll()
        time.sleep(0.005)
    return done


def scored(pool, *responses, **more):
    pool.submit(*group(*responses, **more))
    (result,) = results(pool)
    return result
