"""Stage 3: an environment of a sandbox elsewhere, in which the policy runs commands and programs, turn by turn.

    environment.name = "dora_jax.tasks.environments.shell.Shell"
    environment.params = {"sandbox": "dora_jax.tasks.sandbox.remote.Container", "options": {"image": "python:3.12"}}

The answer of a row: its tests are those of tasks/code.py, of a command that runs in /code:

    {"files": {"/code/a.py": text}, "keep": ["/code/a.py"], "command": ["python3", "/code/a.py"], "tests": [...]}

A message with a ```bash or ```python block runs it in the episode's sandbox and is answered with its output; any other
ends the episode. Then a fresh sandbox gets the files, and of the episode's those of `keep`; the command runs there, and
what it prints is compared here: nothing else that the policy did to its sandbox reaches the verdict.
Laws: what the policy runs, or leaves out, scores 0 at worst; a failure of the sandbox is an EnvironmentError.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from dora_jax.base import callables
from dora_jax.tasks import code
from dora_jax.tasks.environment import EnvironmentError, EpisodePrompt, Message
from dora_jax.tasks.sandbox.programs import SandboxError
from dora_jax.tasks.sandbox.remote import RemoteSandbox

BLOCK = re.compile(r"^```(bash|sh|python3?|py)[^\S\n]*\n(.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL | re.IGNORECASE)


class Shell:
    """sandbox: the import path of a RemoteSandbox, options: its keywords. wall_s: of each block. Reward term: right, 1
    where all tests pass."""

    terms = ("right",)
    replays = False  # a program may read the clock

    def __init__(self, sandbox: str, options: Message | None = None, wall_s: float = 30.0):
        self._kind, self._options, self._wall_s = callables.imported(sandbox), dict(options or {}), wall_s
        self._box: RemoteSandbox | None = None

    def reset(self, prompt: EpisodePrompt) -> list[Message]:
        self._answer = prompt.answer if isinstance(prompt.answer, dict) else {}
        with _infrastructure():
            self._box = self._made()
        return []

    def step(self, message: Message) -> tuple[list[Message], bool, dict[str, float]]:
        assert self._box is not None
        with _infrastructure():
            if blocks := BLOCK.findall(str(message.get("content") or "")):
                kind, text = blocks[-1]
                program = ["python3", "-c"] if kind.lower().startswith("py") else ["sh", "-c"]
                ran = self._box.run([*program, text], wall_s=self._wall_s)
                return [{"role": "tool", "content": code.reported(ran)}], False, {}
            taken = dict[str, bytes]()
            for path in self._answer.get("keep", ()):
                with contextlib.suppress(FileNotFoundError):  # the tests fail then
                    taken[path] = self._box.read(path)
            fresh = self._made()
            try:
                for path, data in taken.items():
                    fresh.write(path, data)
                command = self._answer.get("command") or []
                passed = code.outcomes("Shell", self._answer, lambda stdin, left_s: fresh.run(command, stdin, left_s))
                return [], True, {"right": float(all(passed))}
            finally:
                fresh.close()

    def close(self) -> None:
        if self._box is not None:
            self._box.close()

    def _made(self) -> RemoteSandbox:
        """A sandbox with the row's files."""
        box: RemoteSandbox = self._kind(**self._options)
        try:
            for path, text in self._answer.get("files", {}).items():
                box.write(path, text.encode())
        except BaseException:
            box.close()
            raise
        return box


@contextlib.contextmanager
def _infrastructure() -> Iterator[None]:
    try:
        yield
    except SandboxError as error:
        raise EnvironmentError(str(error), retryable=True) from error
