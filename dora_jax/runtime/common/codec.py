"""Records <-> bytes, for the journal and for messages between processes. Data only: no byte that is read is ever run.

    encode(record) -> bytes     msgpack: [class name, field, field, ...]; arrays as dtype, shape and raw bytes
    decode(bytes) -> record     checks every field against its annotation

Consumes and produces frozen dataclasses of a fixed list. Laws: decode(encode(x)) equals x, arrays bit for bit; any
other bytes raise `CodecError` with a sentence, after time and memory in proportion to their number.

msgspec would check types as it parses, about twice as fast on the journal of a run; encoding takes as long. But it
takes no union of dataclasses, so each record would need a Struct beside it, and its errors name a position, not the
field.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import msgpack
import numpy as np

from dora_jax.orchestrate import events as ev
from dora_jax.types import Branch, Prompt, Sample, SampleId, Sampling, ScoredGroup, Span, TokenTable

ARRAY = 1  # msgpack extension type
MAX_DIMENSIONS = 8
INTEGERS = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64"
FLOATS = ("float16", "float32", "float64", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
DTYPES = {dtype.name: dtype for dtype in map(np.dtype, (*INTEGERS.split(), *FLOATS))}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BUFFER_BYTES = (
    1 << 10
)  # grows where a record needs more; allocating msgpack's default, 1 MiB, costs more than the packing
RECORDS = (
    *typing.get_args(ev.Event | ev.Command),
    ev.Drafted,
    Sampling,
    Prompt,
    Span,
    TokenTable,
    Branch,
    Sample,
    ScoredGroup,
)

Check = Callable[[Any], Any]  # what msgpack gave -> the field's value; raises CodecError


class CodecError(ValueError):
    """These bytes are not a record: the message says what is wrong with them."""


class UnknownRecord(CodecError):
    """They are a record of a class that other code wrote."""


class Codec:
    """Encodes and decodes `RECORDS` and the classes given."""

    def __init__(self, *more: type):
        self._classes = {cls.__name__: cls for cls in (*RECORDS, *more)}
        self._names: dict[type, tuple[str, ...]] = {}
        self._checks: dict[type, tuple[Check, ...]] = {}
        for cls in self._classes.values():
            self._names[cls] = tuple(field.name for field in dataclasses.fields(cls))
            # numpy is only a name where a module imports it for types alone
            hints = typing.get_type_hints(cls, {**vars(sys.modules[cls.__module__]), "np": np})
            self._checks[cls] = tuple(self._check(hints[name]) for name in self._names[cls])

    def encode(self, record: Any) -> bytes:
        return msgpack.Packer(default=self._row, buf_size=BUFFER_BYTES).pack(self._row(record))

    def decode(self, data: bytes, upgrade: Callable[[Any], Any] | None = None) -> Any:
        """CodecError: the bytes are no record. upgrade: the row [class name, field, ...] of an older format ->
        today's."""
        try:
            row = msgpack.unpackb(data, ext_hook=_array_of)
        except CodecError:
            raise
        except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
            raise CodecError(f"{len(data)} bytes are not msgpack: {type(error).__name__} {error}".rstrip()) from error
        return self._record(upgrade(row) if upgrade else row)

    # ------------------------------------------------------------ private

    def _row(self, value: Any) -> Any:
        """A value that msgpack can write, for one that it cannot."""
        names = self._names.get(type(value))
        if names is not None:
            return [type(value).__name__, *(getattr(value, name) for name in names)]
        if isinstance(value, np.ndarray):
            name = NAMES.get(value.dtype)
            if name is None or value.ndim > MAX_DIMENSIONS:
                raise CodecError(f"an array of {value.dtype} with {value.ndim} dimensions cannot be written")
            return msgpack.ExtType(
                ARRAY, msgpack.Packer(default=None, buf_size=BUFFER_BYTES).pack([name, value.shape, value.tobytes()])
            )
        raise CodecError(f"a {type(value).__name__} cannot be written: it is neither a record, an array nor plain data")

    def _record(self, row: Any) -> Any:
        if not isinstance(row, list) or not row or not isinstance(row[0], str):
            raise CodecError(f"a {type(row).__name__} stands where a record is expected")
        cls = self._classes.get(row[0])
        if cls is None:
            raise UnknownRecord(f"{row[0][:40]!r} is no record that can be read here")
        names, checks = self._names[cls], self._checks[cls]
        if len(row) != len(names) + 1:
            raise CodecError(f"a {cls.__name__} has {len(names)} fields, not {len(row) - 1}")
        values = {}
        for name, check, value in zip(names, checks, row[1:], strict=True):
            try:
                values[name] = check(value)
            except CodecError as error:
                raise type(error)(f"{cls.__name__}.{name}: {error}") from error
        return cls(**values)

    def _check(self, hint: Any) -> Check:
        """The check of one annotation."""
        origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
        if hint is SampleId:
            return _sample_id
        if origin in (types.UnionType, typing.Union):  # None, or one of several records, or one plain kind
            optional = type(None) in args
            records = tuple(kind for kind in args if isinstance(kind, type) and dataclasses.is_dataclass(kind))

            def record(value: Any) -> Any:
                if not isinstance(found := self._record(value), records):
                    raise CodecError(f"a {type(found).__name__} does not belong here")
                return found

            one = record if records else self._check(next(kind for kind in args if kind is not type(None)))
            return lambda value: None if optional and value is None else one(value)
        if hint == tuple[int, ...]:
            return _ints
        if origin is tuple:
            each = self._check(args[0])
            return lambda value: tuple(each(x) for x in _of(value, list))
        if origin in (dict, Mapping):
            each_value = self._check(args[1])
            return lambda value: {_of(k, str): each_value(x) for k, x in _of(value, dict).items()}
        if hint is Any:
            return _plain
        if hint is float:
            return lambda value: float(value) if type(value) is int else _of(value, float)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return lambda value: _of(self._record(value), hint)
        return lambda value: _of(value, hint)


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise CodecError(f"a {type(value).__name__} stands where a {kind.__name__} is expected")
    return value


def _sample_id(value: Any) -> SampleId:
    pair = _of(value, list)
    if len(pair) != 2:
        raise CodecError(f"a sample's id has two numbers, not {len(pair)}")
    return SampleId(_of(pair[0], int), _of(pair[1], int))


def _ints(value: Any) -> tuple[int, ...]:
    """All numbers are checked at once: a controller reads millions of them a second."""
    for kind in set(map(type, _of(value, list))) - {int}:
        raise CodecError(f"a {kind.__name__} stands where a int is expected")
    return tuple(value)


def _plain(value: Any) -> Any:
    """Plain data, as in JSON, unchanged."""
    if isinstance(value, dict):
        return {_of(key, str): _plain(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_plain(x) for x in value]
    if value is None or type(value) in (int, float, str, bool):
        return value
    raise CodecError(f"a {type(value).__name__} stands where plain data is expected")


def _array_of(code: int, data: bytes) -> np.ndarray:
    """The array of an extension. It is read-only and shares the record's bytes."""
    if code != ARRAY:
        raise CodecError(f"extension {code} is not an array")
    fields = msgpack.unpackb(data, ext_hook=_no_extension)
    if not isinstance(fields, list) or len(fields) != 3:
        raise CodecError("an array is written as dtype, shape and bytes")
    name, shape, raw = fields
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None or not isinstance(raw, bytes):
        raise CodecError(f"{str(name)[:40]!r} is no dtype that can be read here")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise CodecError("an array's shape is a short list of sizes")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise CodecError(
            f"an array of {dtype.name}{shape} needs {math.prod(shape) * dtype.itemsize} bytes and has {len(raw)}"
        )
    return np.frombuffer(raw, dtype).reshape(shape)


def _no_extension(code: int, data: bytes) -> None:
    raise CodecError(f"extension {code} inside an array")
