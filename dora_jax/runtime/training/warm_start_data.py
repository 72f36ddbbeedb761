"""The data of the supervised warm start: texts, the tokenizer that they make, packed rows and their order. No JAX.

Consumes rows of a file, or worked solutions of the config's task; produces (prompt, completion) texts, a folder with a
tokenizer trained on them, and `TextRows`. Laws: none of the texts has a held-out prompt; everything here is a function
of configuration and seed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dora_jax import tasks
from dora_jax.config import Config, SftSection
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.tasks.environments import Dialogue, worked_dialogues
from dora_jax.types import Columns

END, PAD = "<|endoftext|>", "<|pad|>"
TOKENIZER_SIZE = 512  # 256 bytes, two special tokens, merges for the task's words; a small head is a fast one
# Merges stay inside a piece: a word, one digit, a sign with the blanks around it. Digits have one form wherever they
# stand, and a sign never merges with what it follows ("= -" would have to be decided a token too early).
PIECES = r"\p{N}| ?#+ ?| ?[^\s\p{L}\p{N}#] ?| ?\p{L}+|\s+"
Pair = tuple[str, str | Dialogue]  # prompt and completion


def examples(config: Config, workdir: Path) -> Sequence[Pair]:
    """The (prompt, completion) texts that `config.sft` asks for; none of a held-out prompt."""
    section = config.sft
    tokenizer = tokenizer_of(section)
    opened = functools.partial(
        tasks.open_task,
        tokenizer=tokenizer,
        seed=config.seed,
        max_prompt_tokens=section.pack_tokens,
        max_new_tokens=section.pack_tokens,
    )
    task = opened(config.task, heldout=config.task.heldout, quarantine_path=workdir / "quarantine.jsonl")
    if section.rows:
        rows = dataclasses.replace(config.task, name="rows", path=section.rows, heldout_path="")
        task = opened(
            rows,
            heldout=0,
            supervised=True,
            exclude=task.heldout_uids,
            quarantine_path=workdir / "sft_quarantine.jsonl",
        )
    if config.environment.name and not section.rows:
        prompts = [task.worked_prompt(i, slip_rate=section.slip_rate) for i in range(section.examples)]
        return worked_dialogues(config.environment, prompts, config.seed)
    return [task.worked(i, slip_rate=section.slip_rate) for i in range(section.examples)]


def encoded(tokenizer: Tokenizer, end: int, around: str, completion: str | Dialogue) -> tuple[list[int], list[bool]]:
    """(ids, which of them the policy says): a text, or the turns of a dialogue as `Bridge` joins them."""
    ids: list[int] = []
    sampled: list[bool] = []
    before, _, after = around.partition("{content}")
    for text, own in completion if isinstance(completion, tuple) else ((completion, True),):
        turn = [*tokenizer.encode(text), end]
        new = turn if own else [*tokenizer.encode(before), *tokenizer.encode_text(text), *tokenizer.encode(after)]
        ids += new
        sampled += [own] * len(new)
    return ids, sampled


def tokenizer_of(section: SftSection) -> Any:
    """The tokenizer of `section.init`; without one, bytes: the tokenizer that the texts will make does not exist
    yet."""
    return Tokenizer.load(section.init) if section.init else _Bytes()


class _Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    encode_text = encode

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return bytes(map(int, ids)).decode(errors="replace")

    def chat(self, messages: Sequence[Columns], **variables: object) -> str:
        raise ValueError(
            "the tokenizer that the warm start makes has no chat template; sft.init names a model that has one"
        )


def make_tokenizer(pairs: Sequence[Pair], folder: Path, rows: int = 0) -> Path:
    """A byte-level BPE of these texts in a Hugging Face folder: any text encodes, each digit is one token.

    rows: of the embedding; the tokenizer is never larger (0: TOKENIZER_SIZE).
    """
    size = min(rows or TOKENIZER_SIZE, TOKENIZER_SIZE)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if size < len(alphabet) + 2:
        raise ValueError(f"sft.vocab_size={rows} is too small: bytes and special tokens take {len(alphabet) + 2} rows")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END, PAD], initial_alphabet=alphabet, show_progress=False
    )
    texts: list[str] = []
    for prompt, completion in pairs:
        texts += [prompt, *(text for text, _ in completion)] if isinstance(completion, tuple) else [prompt, completion]
    backend.train_from_iterator(texts, trainer)
    backend.save(str(folder / "tokenizer.json"))
    ids = {"eos_token_id": backend.token_to_id(END), "pad_token_id": backend.token_to_id(PAD)}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD})
    )
    return folder


class TextRows(NamedTuple):
    """Packed examples [n, L]; `mask` marks positions whose target is trained on."""

    tokens: np.ndarray  # i32
    targets: np.ndarray  # i32
    segment_ids: np.ndarray  # i32, 0 = padding
    positions: np.ndarray  # i32
    mask: np.ndarray  # bool


def pack_rows(
    pairs: Sequence[tuple[Sequence[int], Sequence[int], Sequence[bool]]], length: int, pad_id: int
) -> TextRows:
    """(prompt ids, completion ids with the end token, which of them are trained on), packed in order: an example opens
    a new row if it must."""
    rows: list[list[int]] = []
    room = 0
    for i, (prompt, completion, _) in enumerate(pairs):
        n = len(prompt) + len(completion) - 1
        if not 0 < n <= length:
            raise ValueError(f"example {i} has {n + 1} tokens, and a row holds {length + 1}: raise sft.pack_tokens")
        if n > room:
            rows.append([])
            room = length
        rows[-1].append(i)
        room -= n
    shape = (len(rows), length)
    padding, zeros = np.full(shape, pad_id, np.int32), np.zeros(shape, np.int32)
    out = TextRows(padding, padding.copy(), zeros, zeros.copy(), np.zeros(shape, bool))
    for r, members in enumerate(rows):
        start = 0
        for segment, i in enumerate(members, 1):
            prompt, completion, trained = pairs[i]
            text = np.array([*prompt, *completion], np.int32)
            here = slice(start, start + len(text) - 1)
            out.tokens[r, here], out.targets[r, here] = text[:-1], text[1:]
            out.segment_ids[r, here], out.positions[r, here] = segment, np.arange(len(text) - 1)
            out.mask[r, start + len(prompt) - 1 : here.stop] = trained
            start = here.stop
    return out


def row_order(n_rows: int, per_step: int, steps: int, seed: int) -> np.ndarray:
    """i32[steps, per_step]: every row once an epoch, shuffled anew each time."""
    rng = np.random.default_rng(seed)
    epochs = math.ceil(steps * per_step / n_rows)
    order = np.concatenate([rng.permutation(n_rows) for _ in range(epochs)])
    return order[: steps * per_step].reshape(steps, per_step).astype(np.int32)
