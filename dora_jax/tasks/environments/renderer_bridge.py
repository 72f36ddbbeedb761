"""Stage 3: the bridge by a published chat template of the package `renderers` (the extra agents): environment.renderer.

As bridge.py, but that the renderer of a model family extends an episode behind its exact tokens, closes a turn that was
cut, and reads tool calls and thinking out of the policy's tokens. Where it says that the template rewrites, a branch
begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dora_jax.config import ConfigError
from dora_jax.tasks.environment import Message
from dora_jax.tasks.environments.bridge import Conversation, shared_length
from dora_jax.types import NO_COLUMNS, Columns, GroupId, Prompt

if TYPE_CHECKING:
    from dora_jax.models.tokenizer import Tokenizer

JOINT = "\ue002"  # stands inside what looks like a control token, and is never encoded


class RendererBridge:
    """name: of a renderer, "qwen3" for one. variables: of its chat template. ConfigError: the package, the name or a
    variable is missing."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str,
        messages_at: Callable[[GroupId], list[Message]],
        variables: Columns = NO_COLUMNS,
    ):
        try:
            import renderers
        except ImportError as error:
            raise ConfigError(
                "environment.renderer: it needs the package renderers: pip install 'dora_jax[agents]'"
            ) from error
        known: dict[str, Any] = {}  # name of a renderer -> its configuration
        for each in vars(renderers).values():
            field = getattr(each, "model_fields", {}).get("name") if isinstance(each, type) else None
            if field is not None and isinstance(field.default, str):
                known[field.default] = each
        if name not in known:
            raise ConfigError(f"environment.renderer: {name!r} is none of: {', '.join(sorted(known))}")
        if unknown := sorted(variables.keys() - known[name].model_fields.keys()):
            raise ConfigError(f"task.template_kwargs: the renderer {name} has no variable {unknown[0]}")
        self._tokenizer = tokenizer
        self._renderer = renderers.create_renderer(_Encoder(tokenizer), known[name](**variables))
        self._messages_at = messages_at

    def begin(self, prompt: Prompt) -> Conversation:
        return Conversation(list(self._messages_at(prompt.group_id)), prompt.text)

    def message(self, turn: np.ndarray) -> Message:
        """What the policy wrote, with reasoning_content and tool_calls where there are some."""
        parsed = self._renderer.parse_response(turn.tolist())
        answer: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            answer["reasoning_content"] = parsed.reasoning_content
        calls = [call for call in parsed.tool_calls if call.name is not None]
        if calls:
            answer["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
        return answer

    def observe(
        self, conversation: Conversation, tokens: np.ndarray, turn: np.ndarray, observed: Sequence[Message]
    ) -> tuple[np.ndarray, int | None]:
        """See Bridge.observe."""
        new = [
            {**message, "content": self._tokenizer.jointed(message["content"], JOINT)}
            if isinstance(message.get("content"), str)
            else message
            for message in observed
        ]
        if len(turn):
            conversation.messages.append(self.message(turn))
        conversation.messages += new
        before = tokens[: len(tokens) - len(turn)].tolist()
        longer = self._renderer.bridge_to_next_turn(before, turn.tolist(), new) if len(turn) else None
        whole = longer or self._renderer.render(conversation.messages, add_generation_prompt=True)
        ids = np.array(whole.token_ids, np.int32)
        keep = min(shared_length(ids, tokens), len(ids) - 1)
        return ids[keep:], None if keep == len(tokens) else keep


class _Encoder:
    """What a renderer asks of a tokenizer."""

    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.name_or_path, self.eos_token_id = tokenizer, str(tokenizer.path), tokenizer.eos_ids[0]

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return [id for piece in re.split(JOINT, text) for id in self.tokenizer.encode(piece)]

    def decode(self, ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        return self.tokenizer.decode([ids] if isinstance(ids, int) else ids, keep_special=not skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self.tokenizer.token_id(tokens)
        return [self.tokenizer.token_id(token) for token in tokens]
