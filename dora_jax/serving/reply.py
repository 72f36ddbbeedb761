"""What was sampled -> the JSON bodies and stream chunks of each route. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dora_jax.models.tokenizer import Tokenizer
from dora_jax.serving.answers import Answer, Piece
from dora_jax.serving.chat import ToolCall
from dora_jax.serving.request import Form

Name = Callable[[int], str]  # token -> its text
DONE = "[DONE]"


@dataclasses.dataclass
class Reply:
    """The words of one route for one answer."""

    prefix, object, chunk = "", "", ""

    answer: Answer
    form: Form
    name: str  # of the policy
    tokenizer: Tokenizer | None  # None: `form` names tokens by their ids

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """All of it at once."""
        choices = [
            self.choice(index, [piece for piece in pieces if piece.index == index])
            for index in range(self.answer.wanted.choices)
        ]
        return self._head(self.object) | {"choices": choices, "usage": self.usage(pieces)}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of a stream."""
        return [self._head(self.chunk) | {"choices": [choice]} for choice in self.deltas(piece)]

    def opening(self) -> list[dict[str, Any]]:
        return []

    def closing(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        if not self.form.include_usage:
            return []
        return [self._head(self.chunk) | {"choices": [], "usage": self.usage(pieces)}]

    def usage(self, pieces: Iterable[Piece]) -> dict[str, int]:
        prompt = sum(map(len, self.answer.wanted.prompts))
        sampled = sum(len(piece.ids) for piece in pieces)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        raise NotImplementedError

    def deltas(self, piece: Piece) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    def _head(self, kind: str) -> dict[str, Any]:
        version = self.answer.version
        return {
            "id": f"{self.prefix}-{self.answer.id}",
            "object": kind,
            "created": int(self.answer.created_s),
            "model": f"{self.name}@{version}",
            "weight_version": version,
        }

    def _token(self, id: int) -> str:
        if self.form.token_names or self.tokenizer is None:
            return f"token_id:{id}"
        return self.tokenizer.decode([id], keep_special=True)

    def _token_ids(self, ids: Sequence[int], index: int, whole: bool) -> dict[str, Any]:
        """whole: the prompt's too."""
        if not self.form.token_ids:
            return {}
        prompt = self.answer.choices[index].prompt
        return {"token_ids": list(ids)} | ({"prompt_token_ids": list(prompt)} if whole else {})


class CompletionReply(Reply):
    prefix, object, chunk = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, pieces: Sequence[Piece], whole: bool = True) -> dict[str, Any]:
        """whole: the prompt's tokens too."""
        ids, logprobs = _tokens(pieces)
        shown: dict[str, Any] | None = None
        if self.form.logprobs:
            tokens = [self._token(id) for id in ids]
            offsets = [0, *itertools.accumulate(map(len, tokens))][: len(tokens)]
            shown = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "finish_reason": pieces[-1].finish,
            "logprobs": shown,
            **self._token_ids(ids, index, whole),
        }

    def deltas(self, piece: Piece) -> Iterable[dict[str, Any]]:
        return [self.choice(piece.index, [piece], whole=False)]


class ChatReply(Reply):
    prefix, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        prompt = {"prompt_token_ids": list(self.answer.wanted.prompts[0])} if self.form.token_ids else {}
        return super().body(pieces) | prompt

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        calls = [call for piece in pieces for call in piece.calls]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [self._call(call, index, i) for i, call in enumerate(calls)]
        ids, logprobs = _tokens(pieces)
        return {
            "index": index,
            "message": message,
            "finish_reason": pieces[-1].finish,
            "logprobs": self._logprobs(ids, logprobs),
            **self._token_ids(ids, index, whole=False),
        }

    def opening(self) -> list[dict[str, Any]]:
        self._called = [0] * self.answer.wanted.choices
        delta = {"role": "assistant", "content": ""}
        roles = [
            {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
            for index in range(self.answer.wanted.choices)
        ]
        prompt = {"prompt_token_ids": list(self.answer.wanted.prompts[0])} if self.form.token_ids else {}
        return [self._head(self.chunk) | {"choices": [role]} | prompt for role in roles]

    def deltas(self, piece: Piece) -> Iterable[dict[str, Any]]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            first = self._called[piece.index]
            calls = enumerate(piece.calls, first)
            delta["tool_calls"] = [{"index": i} | self._call(call, piece.index, i) for i, call in calls]
            self._called[piece.index] += len(piece.calls)
        if piece.ids or delta:
            yield {
                "index": piece.index,
                "delta": delta,
                "finish_reason": None,
                "logprobs": self._logprobs(piece.ids, piece.logprobs),
                **self._token_ids(piece.ids, piece.index, whole=False),
            }
        if piece.finish:
            yield {"index": piece.index, "delta": {}, "finish_reason": piece.finish, "logprobs": None}

    def _call(self, call: ToolCall, index: int, i: int) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self.answer.id}_{index}_{i}", "type": "function", "function": function}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self.form.logprobs:
            return None
        content = []
        for id, logprob in zip(ids, logprobs, strict=True):
            token = self._token(id)
            raw = list(self.tokenizer.token_bytes(id)) if self.tokenizer else None
            content.append({"token": token, "logprob": logprob, "bytes": raw, "top_logprobs": []})
        return {"content": content, "refusal": None}


class GenerateReply(Reply):
    prefix, object = "gen", "generate"

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        found = super().body(pieces)
        return {"request_id": found.pop("id")} | found

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        ids, logprobs = _tokens(pieces)
        content = [{"token": self._token(id), "logprob": x} for id, x in zip(ids, logprobs, strict=True)]
        return {
            "index": index,
            "token_ids": list(ids),
            "finish_reason": pieces[-1].finish,
            "logprobs": {"content": content},
        }


def event(data: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def _tokens(pieces: Sequence[Piece]) -> tuple[list[int], list[float]]:
    return [id for piece in pieces for id in piece.ids], [x for piece in pieces for x in piece.logprobs]
