"""Files of a workdir beside journal and checkpoints: state, one JSON object a file, and logs, one JSON object a line.

    config.json  controller.json  instances.json  checkpoints/base.json     state: a format number and a checksum
    metrics.jsonl  samples/...  timeline.jsonl  evaluations/...             logs: plain rows, so that anything reads
                   them

Consumes and produces bytes; standard library only. Laws: a state file is replaced as a whole, and damage to it is found
before anything is taken from it; a damaged line of a log costs neither the run nor the other lines, and is moved aside,
not deleted. A digit of a log that became another digit is beyond it: rows carry no checksum.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT, CHECKSUM = "format", "checksum"  # fields of a state file, beside its own
UNNUMBERED = 1  # the format of files from before formats had numbers: neither field, otherwise as format 2
DAMAGED = "damaged"  # ends the name of what is moved aside
MOST_SPANS = 8  # of line numbers that a sentence lists

Row = dict[str, Any]


class StateError(ValueError):
    """A state file that is not used; the message names the file and what is wrong with it."""


class NewerFormat(StateError):
    """A state file that is whole, written by a dora_jax that knows more."""


# ---------------------------------------------------------------- state


def encode(fields: Row, format: int, indent: int | None = None) -> bytes:
    """Return the bytes of a state file that `decode` gives `fields` back from."""
    whole: Row = json.loads(json.dumps(fields | {FORMAT: format}, default=dict))
    return json.dumps(whole | {CHECKSUM: _checksum(whole)}, indent=indent).encode() + b"\n"


def decode(data: bytes, name: str, newest: int) -> Row:
    """Return the fields of a state file. `newest`: the highest format that the caller reads.

    StateError: the bytes are damaged. NewerFormat: they are not, and their format is above `newest`.
    """
    try:
        found = json.loads(data)
    except UnicodeDecodeError as error:
        raise StateError(f"{name} is not text in UTF-8: {error}") from error
    except RecursionError as error:
        raise StateError(f"{name} is nested too deep to be read") from error
    except ValueError as error:
        raise StateError(f"{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise StateError(f"{name} holds a JSON {type(found).__name__}, not an object")
    if FORMAT not in found and CHECKSUM not in found:
        return found
    if found.pop(CHECKSUM, None) != _checksum(found):
        raise StateError(f"{name} does not match its checksum: it is damaged, or was changed by hand")
    number = found.pop(FORMAT, None)
    if type(number) is not int or number <= UNNUMBERED:
        raise StateError(f"{name} has format {number!r:.40}, which no dora_jax writes")
    if number > newest:
        raise NewerFormat(
            f"{name} has format {number}, and this dora_jax reads formats up to {newest}: go on with the dora_jax that "
            "wrote it"
        )
    return found


def read(file: Path, newest: int) -> Row:
    """Return the fields of a state file. StateError: as of `decode`, and where it is no file."""
    if not file.is_file():
        raise StateError(f"{file} {'is no file' if file.exists() else 'is missing'}")
    return decode(file.read_bytes(), str(file), newest)


def replace(file: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file that is whole or as it was, also after a power cut. A folder in its place is moved aside."""
    if file.is_dir():
        set_aside(file)
    partial = file.with_name(f".{file.name}.partial")
    partial.unlink(missing_ok=True)  # it may have another mode
    with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, file)


# ---------------------------------------------------------------- logs


@dataclass(kw_only=True)
class LogLines:
    """The lines of a log by what they are worth. Numbers count lines from 1."""

    rows: list[tuple[int, Row]] = field(default_factory=list)
    damaged: list[tuple[int, bytes]] = field(default_factory=list)
    torn: bytes = b""  # a last line that a crash cut short: there is no line break behind it


def read_lines(data: bytes, valid: Callable[[Row], bool] = lambda row: True) -> LogLines:
    """Sort the lines of a log; a line counts as damaged where it is no JSON object, or not `valid`."""
    found = LogLines()
    lines = data.split(b"\n")
    last = len(lines)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        rows = _objects(line)
        if rows and all(map(valid, rows)):
            found.rows += [(number, row) for row in rows]
        elif number == last:
            found.torn = line
        else:
            found.damaged.append((number, line))
    return found


def numbers(listed: Iterable[int]) -> str:
    """Return numbers in short: "3, 7-9"."""
    spans: list[list[int]] = []
    for number in sorted(set(listed)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:MOST_SPANS]]
    return ", ".join(shown) + (", ..." if len(spans) > MOST_SPANS else "")


def set_aside(file: Path, lines: Iterable[bytes] | None = None, why: str = DAMAGED) -> Path:
    """Append lines of a file to FILE.WHY, or rename the file or folder itself. Return where they are."""
    place = file.with_name(f"{file.name}.{why}")
    if lines is not None and not place.is_dir():
        with place.open("ab") as out:
            out.write(b"".join(line + b"\n" for line in lines))
            out.flush()
            os.fsync(out.fileno())
        return place
    number = 1
    while place.exists():
        number += 1
        place = file.with_name(f"{file.name}.{why}.{number}")
    if lines is not None:
        place.write_bytes(b"".join(line + b"\n" for line in lines))
    else:
        file.rename(place)
    return place


# ---------------------------------------------------------------- private


def _checksum(fields: Row) -> str:
    """CRC-32 of the values, however they are laid out in the file."""
    return f"{zlib.crc32(json.dumps(fields, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _objects(line: bytes) -> list[Row]:
    """Return the objects of a line, none where it holds anything else.

    There are two where the line break between them became another byte.
    """
    try:
        text = line.decode(errors="surrogateescape").strip()
        row, end = _DECODER.raw_decode(text)
        text[:end].encode()  # ValueError: the row itself is not UTF-8
        rows = [row]
        if end < len(text):
            begin = end + 1
            row, end = _DECODER.raw_decode(text, begin)
            text[begin:end].encode()
            rows.append(row)
        return rows if end == len(text) and all(isinstance(row, dict) for row in rows) else []
    except (ValueError, RecursionError):
        return []


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    """Refuse an object that names a key twice: one of the two was another key."""
    if len(row := dict(pairs)) != len(pairs):
        raise ValueError("a key is there twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
