"""Text <-> token ids, for the tasks (prompts), the scorers (responses) and the engine (end ids). No JAX.

Consumes a Hugging Face folder: tokenizer.json, and where present tokenizer_config.json, special_tokens_map.json,
generation_config.json, config.json and chat_template.jinja. Produces ids and strings.
Laws: `encode` adds nothing of its own (a template that wants a begin token writes it), and generated ids are never
encoded again. A chat template runs in a process of its own (tasks/sandbox/render.py): it is a program from the
tokenizer folder.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import tokenizers

from dora_jax.models import grammar
from dora_jax.models.hf_config import read_json, read_text
from dora_jax.tasks.sandbox import render

# Everything a tokenizer may consist of; copied along when a model is saved.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
LONG_TEXT = 1 << 14  # characters
INCOMPLETE = "\ufffd"  # stands for half a character
# How vocabularies of bytes spell them (GPT-2's table): those that print as themselves, the others from 256 on.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(byte): byte for byte in _PRINTED}
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)}
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """`Tokenizer.load(folder)`. Immutable and safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...],
        pad_id: int,
        special: dict[str, str],
        template: str | None,
        path: Path,
    ):
        self._backend = backend
        self.template = template or ""  # of its chats; empty: it has none
        setup = {"template": template, "special": special}  # special: {"eos_token": "<|im_end|>", ...}
        self._chat = render.Renderer(f"the chat template of {path}", setup) if template is not None else None
        added = sorted((token.content for token in backend.get_added_tokens_decoder().values()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        marks = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
        self.special = re.compile("|".join(map(re.escape, marks))) if marks else None  # tokens that decode leaves out
        self.path = path
        self.eos_ids = eos_ids  # any of them ends a sample; several are normal
        self.pad_id = pad_id
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have holes
        self.longest_token = max(map(len, vocabulary))  # characters: no text has fewer tokens than these would make

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{file} is missing; a tokenizer is read from tokenizer.json only")
        backend = _backend(file)
        settings = _json(path / "tokenizer_config.json")
        # {"eos_token": text}; a token is written as a string or as {"content": string}
        special_map = _json(path / "special_tokens_map.json")
        special = {}
        for name in SPECIAL_TOKENS:
            value = settings.get(name) or special_map.get(name)
            if value:
                special[name] = value["content"] if isinstance(value, dict) else value
        configs = [_json(path / name) for name in ("generation_config.json", "config.json")]
        # Union over the three files that may name end ids: chat models name the end of a turn in one of them only
        found = sum((_ids(config, "eos_token_id") for config in configs), ())
        eos_ids = tuple(dict.fromkeys(found + _token_id(backend, special, "eos_token", path)))
        if not eos_ids:
            raise ValueError(
                f"{path} names no end token: generation_config.json, config.json and tokenizer_config.json "
                "have no eos, so no sample would ever stop"
            )
        # The named padding token, else the first end id: padded positions are masked, the value only has to exist
        pad_ids = _token_id(backend, special, "pad_token", path)
        pad_id = (pad_ids + sum((_ids(config, "pad_token_id") for config in configs), ()) + eos_ids)[0]
        # The file first, then tokenizer_config.json (a string, or named templates with a default)
        file = path / "chat_template.jinja"
        source = read_text(file) if file.is_file() else settings.get("chat_template")
        if isinstance(source, list):
            named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
            source = named[-1].get("template") if named else None
        if not isinstance(source, (str, type(None))):
            raise ValueError(f"the chat template of {path} is a {type(source).__name__}, not a text")
        return cls(backend, eos_ids=eos_ids, pad_id=pad_id, special=special, template=source, path=path)

    def encode(self, text: str) -> list[int]:
        """Ids of exactly this text; special tokens written in it become their ids, none is added."""
        if len(text) > LONG_TEXT:  # of many texts, and not of one, it is computed while other threads go on
            return self._backend.encode_batch([text], add_special_tokens=False)[0].ids
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_text(self, text: str) -> list[int]:
        """Ids of text that somebody else wrote: a special token written in it stays text."""
        return [id for piece in self._pieces(text) for id in self.encode(piece)]

    def jointed(self, text: str, joint: str) -> str:
        """The text with a joint inside whatever looks like a special token."""
        return joint.join(self._pieces(text))

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _pieces(self, text: str) -> list[str]:
        """The text cut inside whatever looks like a special token."""
        cuts, at = [0], 0
        while self._added and (match := self._added.search(text, at)):
            at = match.start() + 1
            cuts.append(at)
        return [text[start:stop] for start, stop in itertools.pairwise([*cuts, len(text)])]

    def decode(self, ids, *, keep_special: bool = False) -> str:
        """Text of these ids; special tokens (end, padding) are left out unless asked for."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=not keep_special)

    def token_bytes(self, id: int) -> bytes:
        """What one token stands for; some stand for less than a character."""
        token = self._backend.id_to_token(id) or ""
        if (byte := re.fullmatch("<0x([0-9A-F]{2})>", token)) is not None:
            return bytes([int(byte[1], 16)])
        text = self.decode([id], keep_special=True)
        if INCOMPLETE in text and all(char in BYTE_OF for char in token):
            return bytes(BYTE_OF[char] for char in token)
        return text.encode()

    def check_grammar(self, text: str) -> None:
        """ValueError: no text of this tokenizer can be held to this grammar."""
        grammar.check(self.path, self.eos_ids, text)

    def chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Render the folder's chat template, by default up to where the assistant's turn begins."""
        if self._chat is None:
            raise ValueError(
                f"{self.path} has no chat template: neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json"
            )
        text = self._chat.ask(
            {"messages": messages, "add_generation_prompt": add_generation_prompt, "variables": variables}
        )
        assert text is not None  # which only expressions say
        return text


def vocabulary(path: str | Path) -> dict[str, int]:
    """Token -> id of a folder's tokenizer.json, added tokens included."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    return _backend(file).get_vocab(with_added_tokens=True)


def _backend(file: Path) -> tokenizers.Tokenizer:
    text = read_text(file)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    backend.no_truncation()  # settings of the program that saved the file: prompts are never cut silently
    backend.no_padding()
    return backend


def _json(file: Path) -> dict[str, Any]:
    """The object in this file; empty where the file is absent, since all of these are optional."""
    return read_json(file) if file.is_file() else {}


def _token_id(backend: tokenizers.Tokenizer, special: dict[str, str], name: str, path: Path) -> tuple[int, ...]:
    if name not in special:
        return ()
    token_id = backend.token_to_id(special[name])
    if token_id is None:
        raise ValueError(f"{path} names {name} {special[name]!r}, which its tokenizer.json does not hold")
    return (token_id,)


def _ids(config: dict, name: str) -> tuple[int, ...]:
    value = config.get(name)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
