"""Stage 1, source of prompts: your own rows, from a .jsonl, .json, .csv or .parquet file, or shards of one.

A row: `prompt` (text, or messages with role and content) and `answer` (anything JSON), which task.prompt_column and
task.answer_column rename; optionally `task`, `id` and `completion` (a teacher's solution, for the warm start). Rewards
may name any column. An answer is missing in all rows of a file, or a row without one is bad.
Laws:
  a bad row goes to the quarantine file with its line number and the reason, and the run goes on; above
  task.max_bad_rows_share, and for a file that is truncated or is not what its name says, it stops with a sentence.
  Held out are the rows of task.heldout_path, else the smallest uids of task.path (a uid is a hash): rows of one uid
  are all held out or all trained on, whatever their number and order.
  An epoch is a permutation of the training rows decided by (stream, seed, epoch) alone.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import json
import logging
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dora_jax.config import ConfigError, TaskSection
from dora_jax.config.task import ROW_FILES, SHARD, splits
from dora_jax.tasks.prompts import Wording
from dora_jax.tasks.source import TaskRow, identity_hash, shorten, uid_of
from dora_jax.types import Columns

FEISTEL_ROUNDS = 4  # of a keyed permutation: enough to look random

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    file: str
    line: int  # 1-based: line of a .jsonl, row of a .parquet
    reason: str
    row: str  # the beginning of it


class RowsSource:
    """Source of the rows of one file, or two where the held-out rows have a file of their own."""

    def __init__(
        self,
        section: TaskSection,
        wording: Wording,
        *,
        heldout: int,
        exclude: AbstractSet[str],
        supervised: bool,
        quarantine_path: Path,
    ):
        self.name = section.path
        self.bad: list[BadRow] = []
        files = [section.path, *([section.heldout_path] if section.heldout_path and heldout else [])]
        read = [self._read(Path(path), section, wording, supervised, quarantine_path) for path in files]
        distinct: dict[str, TaskRow] = {}  # the first row of each uid
        for row in read[-1]:
            if row.uid not in exclude:
                distinct.setdefault(row.uid, row)
        if len(files) == 1:
            self.heldout = sorted(distinct.values(), key=lambda row: row.uid)[:heldout]
            self.heldout_uids = frozenset(row.uid for row in self.heldout)
        else:
            self.heldout = list(distinct.values())[:heldout]
            self.heldout_uids = frozenset(distinct)
        self._training = read[0]
        if len(self.heldout) < heldout:
            raise ValueError(f"{files[-1]} has {len(distinct)} distinct prompts, and task.heldout = {heldout}")
        self.exclude(self.heldout_uids | exclude)

    def exclude(self, uids: AbstractSet[str]) -> None:
        self._training = [row for row in self._training if row.uid not in uids]
        if not self._training:
            raise ValueError(
                f"{self.name} has no prompt left to train on: task.heldout takes all distinct ones, of this file or of "
                "another"
            )

    def draw(self, stream: str, seed: int, i: int) -> TaskRow:
        n = len(self._training)
        epoch, position = divmod(i, n)
        return self._training[permuted(position, n, stream, seed, epoch)]

    def _read(
        self, path: Path, section: TaskSection, wording: Wording, supervised: bool, quarantine_path: Path
    ) -> list[TaskRow]:
        good, bad, max_bad_share = [], [], section.max_bad_rows_share
        rows = [(file, *row) for file in files_of(path) for row in read_rows(file)]
        total, name = len(rows), section.answer_column or "answer"
        answered = any(isinstance(raw, dict) and column(raw, name) is not None for _, _, raw in rows)
        for file, line, raw in rows:
            try:
                good.append(_row(raw, section, wording, supervised, path.stem, answered))
            except ConfigError:
                raise  # not this row's fault alone
            except ValueError as error:
                text = raw if isinstance(raw, str) else json.dumps(raw, default=str)
                reason = (
                    str(error).encode(errors="backslashreplace").decode()
                )  # half a surrogate pair in a column's name
                bad.append(BadRow(file=str(file), line=line, reason=reason, row=shorten(text, 200)))
        self.bad += bad
        # The file of the bad rows always describes the newest reading: it is absent where nothing is bad.
        if self.bad:
            quarantine_path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(asdict(row)) for row in self.bad]
            quarantine_path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        else:
            quarantine_path.unlink(missing_ok=True)
        if not total:
            raise ValueError(f"{path} has no rows")
        if bad:
            message = f"{len(bad)} of {total} rows of {path} are bad; the first: line {bad[0].line}: {bad[0].reason}"
            if len(bad) > max_bad_share * total:
                raise ValueError(
                    f"{message} (all in {quarantine_path}; limit task.max_bad_rows_share = {max_bad_share})"
                )
            _log.warning("%s (all in %s)", message, quarantine_path)
        return good


def permuted(position: int, n: int, *identity: str | int) -> int:
    """Where a permutation of range(n) named by `identity` sends a position; no table, so any epoch is as cheap."""
    bits = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:  # a Feistel network permutes range(4**bits); walk on until inside range(n)
        left, right = position >> bits, position & mask
        for turn in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (identity_hash(*identity, turn, right) & mask)
        position = left << bits | right
        if position < n:
            return position


# ---------------------------------------------------------------- files


def files_of(path: Path) -> list[Path]:
    """The files whose rows a path means: itself, or the shards of one split under a folder or behind a common name,
    data/train for data/train-00000-of-00002.parquet. ValueError names what there is to choose from."""
    if path.is_file():
        return [path]
    inside = path.rglob("*") if path.is_dir() else path.parent.glob(f"{glob.escape(path.name)}*")
    known = splits(str(file) for file in inside)
    if not known:
        raise ValueError(f"{path} is neither a file of rows nor a folder of them ({', '.join(ROW_FILES)})")
    if len(known) > 1 and str(path) not in known:
        raise ValueError(f"{path} may mean {', '.join(list(known)[:8])}; name one of them")
    files = known.get(str(path)) or next(iter(known.values()))
    of = int((SHARD.search(files[0]) or ["", "", ""])[2] or len(files))
    if len(files) != of:
        raise ValueError(f"{path} has {len(files)} of its {of} shards")
    return [Path(file) for file in files]


def column(raw: Columns, name: str) -> object:
    """The value of a column; a dotted name that is none itself goes into nested ones. None: there is none."""
    if name in raw:
        return raw[name]
    first, _, rest = name.partition(".")
    return column(raw[first], rest) if rest and isinstance(raw.get(first), Mapping) else None


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, parsed row, or the text of one that is no JSON); ValueError for a file beyond reading."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if path.suffix == ".csv":
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.DictReader(file, strict=True)
                for row in reader:
                    whole = None not in row and None not in row.values()
                    yield reader.line_num, row if whole else ",".join(map(str, row.values()))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error
        return
    if path.suffix == ".json":
        with path.open("rb") as file:
            is_list = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
        if is_list:  # else it is .jsonl by another name, as many a hub has it
            try:
                yield from enumerate(json.loads(path.read_text(encoding="utf-8-sig")), 1)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path} is not whole JSON in UTF-8: {error}") from error
            return
    if path.suffix == ".parquet":
        import pyarrow.parquet  # other rows do without

        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                yield from enumerate((row for batch in file.iter_batches() for row in batch.to_pylist()), 1)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path} is not a whole parquet file: {error}") from error
        return
    if path.suffix not in ROW_FILES:
        raise ValueError(f"{path} is none of {', '.join(ROW_FILES)}")
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            text = raw.decode("utf-8-sig" if line == 1 else "utf-8", errors="replace")
            try:
                yield line, json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8"))
            except ValueError as error:  # no UTF-8 or no JSON
                if not raw.endswith(b"\n"):
                    raise ValueError(f"{path} is truncated: its last line, {line}, ends within a row") from error
                yield line, text
            except RecursionError:
                yield line, text


def _row(
    raw: Any, section: TaskSection, wording: Wording, supervised: bool, default_task: str, answered: bool
) -> TaskRow:
    """answered: rows of its file have an answer. ValueError names what is wrong with the row."""
    if isinstance(raw, str):
        raise ValueError("not a JSON object in UTF-8")  # of a .csv: more or fewer values than its first line
    if not isinstance(raw, dict):
        raise ValueError(f"a {type(raw).__name__}, not an object")
    name, answer_name = section.prompt_column or "prompt", section.answer_column or "answer"
    answer, completion, task = column(raw, answer_name), raw.get("completion"), raw.get("task")
    if completion is not None and not (isinstance(completion, str) and completion):
        raise ValueError("completion is not a text")
    required = answered or supervised or bool(section.answer_column)
    if answer is None and required and not (supervised and completion is not None):
        raise ValueError(f"{answer_name} is missing" + (" (and so is completion)" if supervised else ""))
    try:
        json.dumps(answer, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{answer_name} cannot be written as JSON: {error}") from error
    columns = {}
    for key in raw.keys() - {"prompt", "answer"}:
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # no reward can have a date, or bytes
            json.dumps(raw[key], allow_nan=False)
            columns[key] = raw[key]
    if task is not None and not isinstance(task, str):
        raise ValueError("task is not a text")
    if not isinstance(raw.get("id"), (str, int, type(None))):
        raise ValueError("id is neither a text nor a whole number")
    prompt = column(raw, name)
    if prompt is None:
        known = ", ".join(map(str, raw)) or "no column"
        raise ValueError(f"{name} is missing; the row has {known} (task.prompt_column names the prompt's)")
    if isinstance(prompt, str) and not prompt.strip():
        raise ValueError(f"{name} is empty")
    if not isinstance(prompt, str):
        if not isinstance(prompt, list) or not prompt:
            raise ValueError(f"{name} is neither a text nor a list of messages")
        for message in prompt:
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise ValueError(f"a message of {name} lacks a text role or content")
        if prompt[-1]["role"] == "assistant":
            raise ValueError(f"{name} ends with a message of the assistant, so that nothing is left to answer")
        prompt = [{"role": message["role"], "content": message["content"]} for message in prompt]
    question = wording.question(prompt)
    return TaskRow(
        uid=uid_of(question),
        task=task or default_task,
        question=question,
        answer=answer,
        solution=completion,
        columns=columns,
    )
