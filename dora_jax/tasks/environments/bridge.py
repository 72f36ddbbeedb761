"""Stage 3: from what an environment says to the tokens that the policy observes, behind the exact tokens of its turns.

Consumes a prompt, the token ids of each turn, and messages; produces token ids, and how many of the earlier tokens
stay. Laws: no token of the policy is encoded again, unless the chat template rewrites it: then a branch begins where
the two differ. What an environment says is text: a control token written in it stays text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dora_jax.tasks.environment import Message
from dora_jax.types import NO_COLUMNS, Columns, GroupId, Prompt, Version

if TYPE_CHECKING:
    from dora_jax.models.tokenizer import Tokenizer

SLOT = "\ue000{}\ue001"  # stands for the i-th content while a template renders: of a private area, so no text has it
SLOTS = re.compile("\ue000([0-9]+)\ue001")


@dataclasses.dataclass
class Conversation:
    """An episode so far."""

    messages: list[Message]  # empty where there is no chat template
    text: str  # of its tokens up to the policy's last turn
    n_prompt: int = 0  # messages that were there before the environment spoke
    own: set[int] = dataclasses.field(default_factory=set)  # which messages the policy wrote, by their index
    variables: Columns = dataclasses.field(default_factory=dict)  # of its template, beside those of the bridge


class Bridge:
    """observation: what stands around a message, "{content}" in it; empty: the tokenizer's chat template says, with
    these variables."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        observation: str,
        messages_at: Callable[[GroupId], list[Message]] = lambda _: [],
        variables: Columns = NO_COLUMNS,
    ):
        self._tokenizer, self._variables = tokenizer, dict(variables)
        self._around = observation.split("{content}") if observation else None
        self._messages_at = messages_at

    def begin(self, prompt: Prompt) -> Conversation:
        messages = list(self._messages_at(prompt.group_id)) if self._around is None else []
        return Conversation(messages, prompt.text, len(messages))

    def message(self, turn: np.ndarray) -> Message:
        """What the policy wrote: i32[n] -> a message."""
        return {"role": "assistant", "content": self._tokenizer.decode(turn)}

    def observe(
        self, conversation: Conversation, tokens: np.ndarray, turn: np.ndarray, observed: Sequence[Message]
    ) -> tuple[np.ndarray, int | None]:
        """(i32[n] that follow, how many of `tokens` stay: None for all). tokens: the prompt and all that followed;
        turn: the policy's last message, at their end; empty before its first. `conversation` goes on to behind what is
        observed."""
        if self._around is not None:
            before, after = (self._tokenizer.encode(text) for text in self._around)
            plain: list[int] = []
            for message in observed:
                plain += [*before, *self._tokenizer.encode_text(str(message["content"])), *after]
            return np.array(plain, np.int32), None
        if len(turn):
            conversation.own.add(len(conversation.messages))
            conversation.messages.append(self.message(turn))
        seen = conversation.text + self._tokenizer.decode(turn, keep_special=True)
        conversation.messages += observed
        whole, contents = self._render(conversation, len(conversation.messages) - len(observed))
        if whole.startswith(seen):
            conversation.text = seen + _filled(tail := whole[len(seen) :], contents)
            return self._encoded(tail, contents), None
        whole, contents = self._render(conversation, conversation.n_prompt)
        conversation.text = _filled(whole, contents)
        ids = self._encoded(whole, contents)
        keep = min(shared_length(ids, tokens), len(ids) - 1)  # something is observed
        return ids[keep:], keep

    # ------------------------------------------------------------ private

    def _render(self, conversation: Conversation, first: int) -> tuple[str, list[str]]:
        """The rendered text with slots for what others than the policy write from message `first` on, and what goes
        there."""
        contents: list[str] = []
        slotted = conversation.messages[:first]
        for i, message in enumerate(conversation.messages[first:], first):
            if i not in conversation.own and message.get("content") and isinstance(message["content"], str):
                contents.append(message["content"])
                message = {**message, "content": SLOT.format(len(contents) - 1)}
            slotted.append(message)
        return self._tokenizer.chat(slotted, **(self._variables | dict(conversation.variables))), contents

    def _encoded(self, text: str, contents: Sequence[str]) -> np.ndarray:
        ids: list[int] = []
        for i, piece in enumerate(SLOTS.split(text)):
            ids += self._tokenizer.encode_text(contents[int(piece)]) if i % 2 else self._tokenizer.encode(piece)
        return np.array(ids, np.int32)


def shared_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens both have."""
    n = min(len(a), len(b))
    return int(np.argmin(np.append(a[:n] == b[:n], False)))


def _filled(text: str, contents: Sequence[str]) -> str:
    return SLOTS.sub(lambda match: contents[int(match[1])], text)


# Stage 3: between an engine and an environment that speaks token ids itself, such as a client with a renderer of its
# own.
#
# As bridge.py, but that nothing is encoded or decoded here: what the environment says is the whole prompt of the next
# turn. Where that does not begin with the exact earlier tokens, a branch begins at the first difference.


class TokenBridge:
    """stop_ids: the tokens that end a turn."""

    def __init__(self, stop_ids: Sequence[int]):
        self._stop_ids = frozenset(stop_ids)

    def begin(self, prompt: Prompt) -> Conversation:
        return Conversation([], "")

    def message(self, turn: np.ndarray, logprobs: np.ndarray, version: Version) -> Message:
        """i32[n], f32[n] -> what the environment receives."""
        return {
            "role": "assistant",
            "token_ids": turn.tolist(),
            "logprobs": logprobs.tolist(),
            "finish": "stop" if int(turn[-1]) in self._stop_ids else "length",
            "version": version,
        }

    def observe(
        self, conversation: Conversation, tokens: np.ndarray, turn: np.ndarray, observed: Sequence[Message]
    ) -> tuple[np.ndarray, int | None]:
        """See Bridge.observe."""
        (message,) = observed
        ids = np.array(message["token_ids"], np.int32)
        shared = shared_length(ids, tokens)
        if shared == len(tokens):
            return ids[shared:], None
        keep = min(shared, len(ids) - 1)  # something is observed
        return ids[keep:], keep
