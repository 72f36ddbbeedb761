"""Stage 3: a calculator as an environment, for sums of one line: a small task of several turns that needs nothing.

The policy writes one operation a turn, "4 + 3", and reads its result; the number behind "####" is its answer and ends
the episode. Standard library only.
"""

from __future__ import annotations

import operator
import re

from dora_jax.tasks.environment import EpisodePrompt, Message

OPERATION = re.compile(r"(-?\d{1,9}) ([-+*]) (-?\d{1,9})")
ANSWER = re.compile(r"#### (-?\d{1,18})$")
RESULT = {"+": operator.add, "-": operator.sub, "*": operator.mul}
UNREADABLE = "?"  # the answer to a message that is neither


SIGNED = re.compile(r"([-+*]) (-?\d+)")


class Calculator:
    """Reward term: right, 1 for the right answer."""

    terms = ("right",)
    replays = True

    @staticmethod
    def worked(prompt: EpisodePrompt, slips: bool) -> list[str]:
        """What a policy says to solve "4 + 3 - 7": one operation after the other. The slip is to stop one early."""
        first, _, rest = prompt.text.partition(" ")
        total, steps = int(first), []
        operations = SIGNED.findall(rest)
        for sign, number in operations[:-1] if slips else operations:
            steps.append(f"{total} {sign} {number}")
            total = RESULT[sign](total, int(number))
        return [*steps, f"#### {total}"]

    async def reset(self, prompt: EpisodePrompt) -> list[Message]:
        self._answer = str(prompt.answer)
        return []

    async def step(self, message: Message) -> tuple[list[Message], bool, dict[str, float]]:
        text = message["content"].strip()
        if answer := ANSWER.search(text):
            return [], True, {"right": float(answer[1] == self._answer)}
        asked = OPERATION.fullmatch(text)
        result = str(RESULT[asked[2]](int(asked[1]), int(asked[3]))) if asked else UNREADABLE
        return [{"role": "tool", "content": result}], False, {}

    async def close(self) -> None:
        """Nothing is open."""
