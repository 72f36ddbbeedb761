"""What was sampled -> the JSON bodies and stream chunks of each route. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dora_jax.models.tokenizer import Tokenizer
from dora_jax.serving.answers import Answer, Piece, Top
from dora_jax.serving.parser import ToolCall
from dora_jax.serving.request import Form

Name = Callable[[int], str]  # token -> its text
DONE = "[DONE]"


@dataclasses.dataclass
class Reply:
    """The words of one route for one answer."""

    prefix, object, chunk, last = "", "", "", DONE  # last: the event that ends a stream; empty: none does

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
        version, why = self.answer.version, self.answer.untrained
        trained: dict[str, Any] = {} if why is None else {"trained": True}
        if why:
            trained = {"trained": False, "untrained_because": why}
        return {
            "id": f"{self.prefix}-{self.answer.id}",
            "object": kind,
            "created": int(self.answer.created_s),
            "model": f"{self.name}@{version}",
            "weight_version": version,
            **trained,
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

    def _prompt_logprobs(self, index: int) -> list[dict[str, Any] | None] | None:
        """By token of the prompt, as vLLM has it: log-prob, rank and text of it and of the most likely; null of the
        first. The rank of a token that is none of the most likely is null."""
        if (n := self.form.prompt_logprobs) is None:
            return None
        choice, scores = self.answer.choices[index], []
        tops = choice.tops(0, choice.n_scored) or ((),) * choice.n_scored
        for id, logprob, top in zip(choice.prompt[1:], choice.scored, tops, strict=True):
            ranked: dict[int, tuple[float, int | None]] = {
                other: (x, rank) for rank, (other, x) in enumerate(top[:n], 1)
            }
            ranked.setdefault(
                id, (logprob, next((rank for rank, (other, _) in enumerate(top, 1) if other == id), None))
            )
            scores.append(
                {
                    str(other): {"logprob": x, "rank": rank, "decoded_token": self._token(other)}
                    for other, (x, rank) in ranked.items()
                }
            )
        return [None, *scores]


class CompletionReply(Reply):
    prefix, object, chunk = "cmpl", "text_completion", "text_completion"

    def opening(self) -> list[dict[str, Any]]:
        self._offsets = [0] * self.answer.wanted.choices  # characters of its tokens that are sent
        return []

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        self.opening()
        return super().body(pieces)

    def choice(self, index: int, pieces: Sequence[Piece], whole: bool = True) -> dict[str, Any]:
        """whole: the prompt's tokens too."""
        (ids, logprobs, tops), text = _tokens(pieces), "".join(piece.text for piece in pieces)
        choice = self.answer.choices[index]
        all_logprobs: list[float | None] = [*logprobs]
        own = self._token_ids(ids, index, whole)
        if self.form.echo and not self._offsets[index]:
            assert self.tokenizer is not None
            text = self.tokenizer.decode(choice.prompt, keep_special=True) + text
            ids, tops = [*choice.prompt, *ids], [(), *choice.tops(0, choice.n_scored), *tops]
            all_logprobs = [None, *choice.scored, *logprobs]
        shown: dict[str, Any] | None = None
        if self.form.logprobs:
            tokens = [self._token(id) for id in ids]
            first = self._offsets[index]
            offsets = [first, *(first + n for n in itertools.accumulate(map(len, tokens)))]
            self._offsets[index] = offsets.pop()
            most_likely = None
            if self.form.top_logprobs:  # the token itself is among them, as in OpenAI's answers
                most_likely = [
                    None if logprob is None else {self._token(id): x for id, x in top} | {token: logprob}
                    for token, logprob, top in zip(tokens, all_logprobs, tops, strict=True)
                ]
            shown = {
                "tokens": tokens,
                "token_logprobs": all_logprobs,
                "top_logprobs": most_likely,
                "text_offset": offsets,
            }
        else:
            self._offsets[index] += len(text)
        scores = self._prompt_logprobs(index)
        return {
            "index": index,
            "text": text,
            "finish_reason": pieces[-1].finish,
            "logprobs": shown,
            **own,
            **({} if scores is None else {"prompt_logprobs": scores}),
        }

    def deltas(self, piece: Piece) -> Iterable[dict[str, Any]]:
        return [self.choice(piece.index, [piece], whole=False)]


class ChatReply(Reply):
    prefix, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        prompt: dict[str, Any] = {}
        if self.form.token_ids:
            prompt["prompt_token_ids"] = list(self.answer.wanted.prompts[0])
        if (scores := self._prompt_logprobs(0)) is not None:
            prompt["prompt_logprobs"] = scores
        return super().body(pieces) | prompt

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        calls = [call for piece in pieces for call in piece.calls]
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if thought := "".join(piece.thought for piece in pieces):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [self._call(call, index, i) for i, call in enumerate(calls)]
        ids, logprobs, tops = _tokens(pieces)
        return {
            "index": index,
            "message": message,
            "finish_reason": pieces[-1].finish,
            "logprobs": self._logprobs(ids, logprobs, tops),
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
        texts = {"reasoning_content": piece.thought, "content": piece.text}
        delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
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
                "logprobs": self._logprobs(piece.ids, piece.logprobs, piece.tops),
                **self._token_ids(piece.ids, piece.index, whole=False),
            }
        if piece.finish:
            yield {"index": piece.index, "delta": {}, "finish_reason": piece.finish, "logprobs": None}

    def _call(self, call: ToolCall, index: int, i: int) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self.answer.id}_{index}_{i}", "type": "function", "function": function}

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top]) -> dict[str, Any] | None:
        if not self.form.logprobs:
            return None

        def entry(id: int, logprob: float) -> dict[str, Any]:
            raw = list(self.tokenizer.token_bytes(id)) if self.tokenizer else None
            return {"token": self._token(id), "logprob": logprob, "bytes": raw}

        content = []
        for i, (id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            top = tops[i][: self.form.top_logprobs] if tops else ()
            content.append(entry(id, logprob) | {"top_logprobs": [entry(*pair) for pair in top]})
        return {"content": content, "refusal": None}


class GenerateReply(Reply):
    prefix, object = "gen", "generate"

    def body(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        found = super().body(pieces)
        return {"request_id": found.pop("id")} | found

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        ids, logprobs, _ = _tokens(pieces)
        content = [{"token": self._token(id), "logprob": x} for id, x in zip(ids, logprobs, strict=True)]
        return {
            "index": index,
            "token_ids": list(ids),
            "finish_reason": pieces[-1].finish,
            "logprobs": {"content": content},
        }


def event(data: dict[str, Any] | str) -> bytes:
    """One server-sent event, by its name where it has one."""
    name = f"event: {data['type']}\n" if isinstance(data, dict) and "type" in data else ""
    return f"{name}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def _tokens(pieces: Sequence[Piece]) -> tuple[list[int], list[float], list[Top]]:
    ids, logprobs, tops = (
        [x for piece in pieces for x in getattr(piece, name)] for name in ("ids", "logprobs", "tops")
    )
    return ids, logprobs, tops
