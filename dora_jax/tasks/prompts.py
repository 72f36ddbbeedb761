"""Stage 1: group ids -> prompts. Consumes a source of questions and a tokenizer; produces `Prompt` records.

Laws:
  prompt_at is a pure function of (seed, group_id), so that a resumed run meets the same prompts; a group that was given
  up and is issued again (types.RENEWAL) has the prompt of its first issue.
  group_id >= 0 draws from the training stream, group_id < 0 is row (-1 - group_id) % n_heldout of a fixed held-out
  set that does not depend on the seed: a base warm-started under one seed is clean for every other.
  uid is a hash of the question as the model meets it; no uid is both held-out and drawn for training.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from dora_jax.config import ConfigError, TaskSection
from dora_jax.tasks import worked_solutions
from dora_jax.tasks.sandbox.render import NeverEnds, Renderer
from dora_jax.tasks.source import Question, Source, TaskRow, identity_hash, share_hash, shorten
from dora_jax.types import GroupId, Prompt, is_eval, issued_first_as

if TYPE_CHECKING:
    from dora_jax.models.tokenizer import Tokenizer


SURVEYED = (
    64  # training prompts that are measured before a run: enough to tell a few that are too long from most of them
)
RECENT = 1024  # prompts that are kept: a group's is read when it starts, and again when its rows are logged


class PromptTooLong(ValueError):
    """The caller counts and skips the group; no device ever sees the prompt."""

    def __init__(self, group_id: GroupId, tokens: int, limit: int):
        super().__init__(f"prompt {group_id} has {tokens} tokens, over rollout.max_prompt_tokens = {limit}")
        self.group_id, self.tokens, self.limit = group_id, tokens, limit


class Wording:
    """How a question is worded for the model: extract, then uid, then template."""

    def __init__(self, section: TaskSection, tokenizer: Tokenizer):
        self._extract = section.extract
        self._extractor = Renderer(f"task.extract {section.extract!r}", {"extract": section.extract})
        self._template, self._system = section.template, section.system
        self._variables = dict(section.template_kwargs)
        self.tokenizer = tokenizer

    def question(self, raw: Question) -> Question:
        """What is left of the source's question; ValueError where the section does not fit it, ConfigError where its
        expression never ends."""
        if not isinstance(raw, str):
            if self._template != "chat":
                raise ValueError('the prompt is a list of messages, which needs task.template = "chat"')
            if self._extract:
                raise ValueError("the prompt is a list of messages, to which task.extract does not apply")
            return raw
        if not self._extract:
            return raw
        try:
            text = self._extractor.ask({"raw": raw})
        except NeverEnds as error:
            raise ConfigError(f"{error}, on the prompt {shorten(raw)!r}") from error
        if text is None:
            raise ValueError(f"task.extract {self._extract!r} does not match the prompt {shorten(raw)!r}")
        return text

    def messages(self, question: Question) -> list[dict[str, str]]:
        """The question as messages, before a chat template; a system message of its own stays the only one."""
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        if self._system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system})
        return messages

    def text(self, question: Question) -> str:
        if self._template == "chat":
            try:
                return self.tokenizer.chat(self.messages(question), **self._variables)
            except ValueError as error:
                raise ConfigError(f"task.template: {error}, on the prompt {shorten(str(question))!r}") from error
        return self._template.replace("{prompt}", str(question))  # not str.format: templates hold other braces


class Task:
    """prompt_at for the run, worked for the warm start. Holds the held-out rows and whatever its source holds."""

    def __init__(self, source: Source, wording: Wording, *, seed: int, max_prompt_tokens: int, max_new_tokens: int):
        self.source = source
        self._wording = wording
        self._seed = seed
        self._limit = max_prompt_tokens
        self._max_new_tokens = max_new_tokens
        self._prompt_at = functools.lru_cache(RECENT)(self._drawn)
        self._drawing = threading.Lock()  # a source is asked by one thread at a time
        self._heldout = [row for row in source.heldout if len(self._encode(row)[1]) <= max_prompt_tokens]
        self.n_heldout = len(self._heldout)
        self.heldout_uids = source.heldout_uids  # of every held-out prompt, those too long for this run included
        self.heldout_too_long = len(source.heldout) - self.n_heldout  # left out of evaluation, never trained on
        if source.heldout and not self._heldout:
            raise ValueError(
                f"all {len(source.heldout)} held-out prompts of {source.name} are over "
                f"rollout.max_prompt_tokens = {max_prompt_tokens}"
            )

    def prompt_at(self, group_id: GroupId) -> Prompt:
        """Pure in (seed, group_id); raises PromptTooLong over the limit."""
        return self._prompt_at(group_id)

    def _drawn(self, group_id: GroupId) -> Prompt:
        with self._drawing:
            row = self._row(group_id)
            text, ids = self._encode(row)
        if len(ids) > self._limit:
            raise PromptTooLong(group_id, len(ids), self._limit)
        if not ids:
            raise ValueError(f"the prompt of group {group_id} has no token: {shorten(text)!r}")
        return Prompt(
            group_id=group_id,
            task=row.part or row.task,
            uid=row.uid,
            text=text,
            token_ids=np.asarray(ids, dtype=np.int32),
            answer=row.answer,
            max_new_tokens=self._max_new_tokens,
            row=row.columns,
        )

    def survey(self) -> tuple[Prompt, list[str]]:
        """The first training prompt within the limit, and a sentence on each kind that is over it; ConfigError: all
        are."""
        prompts, tokens = [], []
        for i in range(SURVEYED):
            try:
                prompts.append(self.prompt_at(i))
                tokens.append(len(prompts[-1].token_ids))
            except PromptTooLong as error:
                tokens.append(error.tokens)
        over = f"over rollout.max_prompt_tokens = {self._limit}"
        if not prompts:
            raise ConfigError(
                f"rollout.max_prompt_tokens: the first {SURVEYED} prompts of {self.source.name} are all {over}; "
                f"the shortest has {min(tokens)} tokens"
            )
        remarks = []
        if len(prompts) < SURVEYED:
            remarks.append(
                f"{SURVEYED - len(prompts)} of the first {SURVEYED} prompts of {self.source.name} are {over} and are "
                f"skipped (median {np.median(tokens):.0f} tokens, longest {max(tokens)})"
            )
        if self.heldout_too_long:
            remarks.append(
                f"{self.heldout_too_long} of {len(self.source.heldout)} held-out prompts are {over} and are not "
                "evaluated"
            )
        return prompts[0], remarks

    def messages_at(self, group_id: GroupId) -> list[dict[str, str]]:
        """See Wording.messages."""
        return self._wording.messages(self._row(group_id).question)

    def worked_prompt(self, i: int, *, slip_rate: float = 0.0) -> tuple[str, Any, bool]:
        """(prompt text, answer, whether its dialogue slips) number i of the warm start."""
        row = self.source.draw("worked", self._seed, i)
        answer = row.answer if row.entry is None else row.entry["answer"]
        return self._wording.text(row.question), answer, share_hash("slip", self._seed, i) < slip_rate

    def worked(self, i: int, *, slip_rate: float = 0.0, answer_only: bool = False) -> tuple[str, str]:
        """(prompt text, solution text) number i, never of a held-out prompt; see worked_solutions.solution."""
        row = self.source.draw("worked", self._seed, i)
        text = self._wording.text(row.question)
        slips = share_hash("slip", self._seed, i) < slip_rate
        slip_seed = identity_hash("slip where", self._seed, i) if slips else None
        return text, worked_solutions.solution(row, slip_seed=slip_seed, answer_only=answer_only)

    def _row(self, group_id: GroupId) -> TaskRow:
        if not is_eval(group_id):
            return self.source.draw("train", self._seed, issued_first_as(group_id))
        if not self._heldout:
            raise ValueError(f"group {group_id} is held-out, and {self.source.name} was opened with none held out")
        return self._heldout[(-1 - group_id) % len(self._heldout)]

    def _encode(self, row: TaskRow) -> tuple[str, list[int]]:
        text = self._wording.text(row.question)
        return text, self._wording.tokenizer.encode(text)
