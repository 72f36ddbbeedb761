"""What an answer must look like -> which tokens may come next, by llguidance (extra `grammar`). No JAX.

    of(schema, tools)   -> a grammar, as a text that travels with a request
    check(...)          the endpoint asks it before a request is sampled
    Matcher             one sample in its engine: the mask of its next token, then the token

Laws: a token whose bit is 0 completes to nothing that the grammar accepts; an end token is allowed where the text is
accepted. Masks are computed on the CPU, of one token each, while the tokens before are known.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MISSING = "llguidance is not installed in the environment of the endpoint: pip install 'dora_jax[grammar]'"
COMPACT = {"whitespace_flexible": False}  # a model that is not sure would write blanks for ever
CALL = ("<tool_call>\n", "\n</tool_call>")  # as the endpoint reads calls


def available() -> bool:
    return importlib.util.find_spec("llguidance") is not None


def of(schema: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """A text of JSON that the schema describes, or a call of one of these functions ({"name": ..., "parameters":
    schema}), and nothing around it."""
    rules, ways = [], []
    if schema is not None:
        ways.append("answer")
        rules.append(f"answer: %json {json.dumps({**schema, 'x-guidance': COMPACT})}")
    if tools:
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["name"]},
                    "arguments": tool.get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        ways.append(f"{json.dumps(CALL[0])} call {json.dumps(CALL[1])}")
        rules.append(f"call: %json {json.dumps({'anyOf': calls, 'x-guidance': COMPACT})}")
    lark = "\n".join([f"start: {' | '.join(ways)}", *rules])
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def check(folder: Path, eos_ids: tuple[int, ...], grammar: str) -> None:
    """ValueError: no text can be held to this grammar here."""
    if not available():
        raise ValueError(MISSING)
    import llguidance

    if fault := llguidance.LLMatcher.validate_grammar(grammar, _tokenizer(folder, eos_ids)):
        raise ValueError(fault.partition("\n")[0])


class Matcher:
    """One sample's place in its grammar."""

    def __init__(self, folder: Path, eos_ids: tuple[int, ...], grammar: str):
        import llguidance

        self._eos_ids = frozenset(eos_ids)
        self._matcher = llguidance.LLMatcher(_tokenizer(folder, eos_ids), grammar, log_level=0)

    def mask(self, width: int) -> np.ndarray:
        """i32[width]: bit i % 32 of number i // 32 is 1 where token i may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[:width]
        return np.pad(bits, (0, width - len(bits)))

    def take(self, ids: Sequence[int]) -> bool:
        """These tokens were sampled. False: the grammar does not go on from them."""
        return self._matcher.consume_tokens([id for id in ids if id not in self._eos_ids])


@functools.lru_cache(maxsize=4)
def _tokenizer(folder: Path, eos_ids: tuple[int, ...]) -> Any:
    import llguidance  # takes a second for a large vocabulary, once a process

    return llguidance.LLTokenizer(str(folder / "tokenizer.json"), eos_token=list(eos_ids))
