"""Code that a model writes: rewards that run it on tests, and a Python tool, alone and as an environment.

A row of such a task (task.name = "rows"). time_limit_s is for all tests together, without the time in which a program
waited for a core; tolerance: how far, relatively or absolutely, a printed number may be off. Both may be left out:

    {"prompt": "Read a number and print its double.", "answer": {"tests": [{"stdin": "4\\n", "stdout": "8\\n"}]}}

The program is the last ```python block of the response, else all of the response. Each test runs it anew in the sandbox
(programs.py): it reads stdin and prints, and its output is compared here. So neither tests nor expected output, nor
anything that decides the reward, is ever where the program runs.
Laws: what a program does scores 0 at worst; what the machine does wrong is an error and never a score.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dora_jax.tasks import sandbox
from dora_jax.tasks.environment import EnvironmentError, EpisodePrompt, Message, in_thread
from dora_jax.tasks.rewards import RewardError, exact
from dora_jax.tasks.sandbox import programs
from dora_jax.tasks.sandbox.program_server import MOST_AT_ONCE

OURS = f"{__name__}."  # import paths of this file run programs without being asked

TIME_LIMIT_S = 6.0  # of all tests of a response: below the default of task.reward_timeout_s
BLOCK = re.compile(r"^```(?:python3?|py)?[^\S\n]*\n(.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL | re.IGNORECASE)
PROGRAMS = concurrent.futures.ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="program")  # of episodes
REPORTED_CHARS = 4000  # of what the tool tells a model


def stdio(prompt: str, response: str, answer: Any) -> float:
    """1.0 if the program passes every test."""
    return float(all(_outcomes("stdio", response, answer)))


def stdio_share(prompt: str, response: str, answer: Any) -> float:
    """The share of the tests that the program passes; those that the time limit leaves no time for count as failed."""
    return sum(_outcomes("stdio_share", response, answer)) / len(_tests("stdio_share", answer))


def python_tool(program: str, stdin: str = "", limits: programs.Limits = programs.DEFAULT_LIMITS) -> str:
    """What a model gets of its program: its output, and in a last line how it ended if that was not well.

    Waits for the program: `environment.in_thread` for one of many episodes. SandboxError is the machine's fault.
    """
    return reported(programs.run(program, stdin, limits))


def reported(ran: programs.Ran) -> str:
    """What a model gets of what it ran."""
    text = ran.stdout + ran.stderr
    if len(text) > REPORTED_CHARS:
        half = REPORTED_CHARS // 2
        text = f"{text[:half]}\n[{len(text) - REPORTED_CHARS} characters left out]\n{text[-half:]}"
    if ran.ended_by:
        return f"{text.rstrip()}\n[ended at its limit of {ran.ended_by}]".lstrip()
    return text if ran.exit_code == 0 else f"{text.rstrip()}\n[exit code {ran.exit_code}]".lstrip()


class PythonTool:
    """An environment: the policy's message is run where it has a ```python block, else its last line is the answer.

    Reward term: right, 1 where that line is the row's answer.
    """

    terms = ("right",)
    replays = False  # a program may read the clock

    async def reset(self, prompt: EpisodePrompt) -> list[Message]:
        self._answer = prompt.answer
        return []

    async def step(self, message: Message) -> tuple[list[Message], bool, dict[str, float]]:
        content = str(message["content"])
        if not (blocks := BLOCK.findall(content)):
            *_, last = content.strip().splitlines() or [""]
            return [], True, {"right": exact("", last, self._answer)}
        try:
            output = await in_thread(PROGRAMS, python_tool, blocks[-1], bounded=True)
        except programs.SandboxError as error:
            raise EnvironmentError(f"the sandbox did not run the program: {error}", retryable=True) from error
        return [{"role": "tool", "content": output}], False, {}

    async def close(self) -> None:
        """Nothing is open."""


def may_run(section: str, field: str, paths: Sequence[str], asked: bool, python: str = "") -> str | None:
    """The interpreter by which workers for these import paths may run programs, None where they run none; ConfigError
    where they do and this machine cannot."""
    from dora_jax.config import ConfigError

    ours = [path for path in paths if path.startswith(OURS)]
    if not (ours or asked):
        return None
    try:
        programs.check(python)
    except sandbox.NoSandbox as error:
        what = f"{section}.{field}: {ours[0]} runs what a model writes" if ours else f"{section}.sandbox = True"
        by = f" by {section}.sandbox_python = {python!r}" if python else ""
        raise ConfigError(f"{what}{by}, and {error}") from error
    return python


def _outcomes(name: str, response: str, answer: Any) -> Iterator[bool]:
    """Whether the program of a response passes each test."""
    program = (BLOCK.findall(response) or [response])[-1]

    def run(stdin: str, left_s: float) -> programs.Ran:
        try:
            return programs.run(program, stdin, programs.Limits(cpu_s=left_s, wall_s=left_s))
        except programs.SandboxError as error:
            raise RewardError(f"{name}: the sandbox did not run the program: {error}") from error

    return outcomes(name, answer, run)


def outcomes(name: str, answer: Any, run: Callable[[str, float], programs.Ran]) -> Iterator[bool]:
    """Whether each test of the answer is passed, up to the end of the time. run: of an input and the seconds left."""
    tests, left_s = _tests(name, answer), float(answer.get("time_limit_s", TIME_LIMIT_S))
    for test in tests:
        if left_s <= 0:
            yield False
            return
        ran = run(test["stdin"], left_s)
        left_s -= ran.spent_s
        right = _same(_lines(ran.stdout), _lines(test["stdout"]), float(answer.get("tolerance", 0.0)))
        yield not ran.ended_by and ran.exit_code == 0 and right


def _same(printed: list[str], expected: list[str], tolerance: float) -> bool:
    """Whether the lines are equal; with a tolerance, whether their numbers are, relatively or absolutely so far."""
    if printed == expected or not tolerance:
        return printed == expected
    pairs = [(line.split(), other.split()) for line, other in itertools.zip_longest(printed, expected, fillvalue="")]
    try:
        return all(
            a == b or math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)
            for fields, others in pairs
            for a, b in zip(fields, others, strict=True)
        )
    except ValueError:  # no number, or one too many
        return False


def _lines(text: str) -> list[str]:
    """White space at the ends of lines and of the text means nothing."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _tests(name: str, answer: Any) -> list[dict[str, str]]:
    tests = answer.get("tests") if isinstance(answer, dict) else None
    if not (isinstance(tests, list) and tests) or not all(
        isinstance(test, dict) and all(isinstance(test.get(key), str) for key in ("stdin", "stdout")) for test in tests
    ):
        raise RewardError(f'{name}: the answer {answer!r:.200} has no {{"tests": [{{"stdin": text, "stdout": text}}]}}')
    limit_s = answer.get("time_limit_s", TIME_LIMIT_S)
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < 3600:
        raise RewardError(f"{name}: time_limit_s {limit_s!r:.50} is no number of seconds up to an hour")
    tolerance = answer.get("tolerance", 0.0)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise RewardError(f"{name}: tolerance {tolerance!r:.50} is no number from 0 to 1")
    return tests
