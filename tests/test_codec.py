"""Records <-> bytes: what goes in comes out, bit for bit; anything else is an error with a sentence."""

import dataclasses
import random
import sys
import tracemalloc
import typing

import ml_dtypes
import msgpack
import numpy as np
import pytest

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common import codec
from dora_jax.types import Branch, Prompt, Sample, SampleId, ScoredGroup, Span

CODEC = codec.Codec()
FUZZED = 1000


def sample(group=3, index=1, n=5):
    return Sample(
        id=SampleId(group, index),
        prompt_ids=np.arange(4, dtype=np.int32),
        out_ids=np.arange(n, dtype=np.int32),
        logprobs=np.linspace(-1, 0, n, dtype=np.float32),
        mask=np.ones(n, bool),
        spans=(Span(version=2, start=0, stop=n),),
        finish="stop",
        branches=(
            Branch(
                prompt_ids=np.arange(4, dtype=np.int32),
                out_ids=np.arange(2, dtype=np.int32),
                logprobs=np.zeros(2, np.float32),
                mask=np.array([True, False]),
                version=2,
            ),
        ),
        terms={"solved": 1.0},
    )


def scored():
    return ScoredGroup(
        group_id=3,
        version=2,
        samples=(sample(), sample(index=2, n=0)),
        rewards=np.array([0.5, np.nan], np.float32),
        parts={"exact": np.array([0.5, -np.inf], np.float32)},
    )


DRAFTED = ev.Drafted(sampled=7, busy_s=0.5, row_s=1.5, guesses=4, held=3)
EXAMPLES = {int: 7, float: 0.5, str: "word", bool: True, SampleId: SampleId(4, 2), ev.Drafted: DRAFTED}


def field_types(cls):
    found = typing.get_type_hints(cls, {**vars(sys.modules[cls.__module__]), "np": np})
    return [found[field.name] for field in dataclasses.fields(cls)]


def example(cls):
    """A record of this class, every field filled."""
    values = {}
    for field, hint in zip(dataclasses.fields(cls), field_types(cls), strict=True):
        args = typing.get_args(hint)
        if hint in EXAMPLES:
            values[field.name] = EXAMPLES[hint]
        elif typing.get_origin(hint) is tuple:
            values[field.name] = (EXAMPLES[args[0]],) * 2
        else:
            values[field.name] = EXAMPLES[next(a for a in args if a is not type(None))]
    return cls(**values)


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    else:
        assert a == b


@pytest.mark.parametrize("cls", [*typing.get_args(ev.Event), *typing.get_args(ev.Command)])
def test_every_event_and_command_comes_back(cls):
    record = example(cls)
    same(CODEC.decode(CODEC.encode(record)), record)


def test_payload_comes_back_bit_for_bit():
    same(CODEC.decode(CODEC.encode(scored())), scored())
    prompt = Prompt(
        group_id=-3,
        task="t",
        uid="u",
        text="ü",
        token_ids=np.zeros(0, np.int32),
        answer={"a": [1, None, True, 2.5]},
        max_new_tokens=9,
    )
    same(CODEC.decode(CODEC.encode(prompt)), prompt)


@pytest.mark.parametrize("dtype", codec.DTYPES.values(), ids=str)
def test_arrays_of_every_dtype_and_shape(dtype):
    for shape in ((), (0,), (3,), (2, 0, 4), (2, 3)):
        array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape).astype(dtype)
        got = CODEC.decode(CODEC.encode(dataclasses.replace(sample(), out_ids=array)))
        same(got.out_ids, array)


def test_a_prompt_comes_back_with_its_row():
    prompt = Prompt(
        group_id=1,
        task="t",
        uid="u",
        text="",
        token_ids=np.arange(2, dtype=np.int32),
        answer=None,
        max_new_tokens=1,
        row={"question": "1+1", "tags": ["a"]},
    )
    records = codec.Codec(Prompt)
    assert records.decode(records.encode(prompt)).row == prompt.row


def test_a_transposed_array_keeps_its_values():
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    np.testing.assert_array_equal(CODEC.decode(CODEC.encode(dataclasses.replace(sample(), mask=array))).mask, array)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "record is expected"),
        (["Nothing"], "'Nothing' is no record"),
        (["StepPublished"], "has 1 fields, not 0"),
        (["StepPublished", "two"], "StepPublished.version: a str stands where a int is expected"),
        (["StepPublished", True], "a bool stands where a int"),
        (["SampleDone", [1], 0, 2, "stop", 1], "two numbers"),
        (["SampleDone", [1, 2.0], 0, 2, "stop", 1], "a float stands where a int"),
        (["Span", 1, 2, None], "Span.stop: a NoneType"),
        (["Sample", [1, 2], 1, 2, 3, 4, [["Train", [], 1]], "stop", None, [], None], "Sample.prompt_ids"),
        ({"a": 1}, "a dict stands where a record"),
    ],
)
def test_what_is_no_record_is_refused_by_field(row, message):
    with pytest.raises(codec.CodecError, match=message):
        CODEC.decode(msgpack.packb(row))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (["float32", [2**62, 2**62], b""], "needs"),
        (["float32", [-1], b""], "sizes"),
        (["float32", [1] * 9, b"1234"], "sizes"),
        (["object", [1], b"12345678"], "no dtype"),
        (["float32", [1], "1234"], "no dtype"),
        (["float32", [1]], "dtype, shape and bytes"),
        ([msgpack.ExtType(1, b"x"), [1], b"1234"], "inside an array"),
    ],
)
def test_an_array_that_lies_about_its_size_is_refused(array, message):
    data = msgpack.packb(["Sample", [1, 2], msgpack.ExtType(codec.ARRAY, msgpack.packb(array)), 0, 0, 0, [], "stop"])
    with pytest.raises(codec.CodecError, match=message):
        CODEC.decode(data)


def test_what_cannot_be_written_is_reported():
    with pytest.raises(codec.CodecError, match="a set cannot be written"):
        CODEC.encode(dataclasses.replace(scored(), parts={"a": {1}}))
    with pytest.raises(codec.CodecError, match="an array of object"):
        CODEC.encode(dataclasses.replace(sample(), mask=np.array([None])))


def fuzzed(seed, good):
    """One of: noise, a good record with bytes changed, cut or repeated, deep nesting, sizes that lie."""
    draw = random.Random(seed)
    data = bytearray(draw.choice(good))
    kind = seed % 6
    if kind == 0:
        return draw.randbytes(draw.randrange(400))
    if kind == 1:
        return bytes([0x91]) * draw.randrange(1, 5000) + b"\x01"
    if kind == 2:
        return bytes([draw.choice([0xDD, 0xDF, 0xDB, 0xC6, 0xC9])]) + draw.randbytes(4) + bytes(data)
    if kind == 3:
        del data[draw.randrange(len(data)) :]
    for _ in range(draw.randrange(1, 6)):
        if data:
            data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data) * (2 if kind == 4 else 1)


def test_fuzzed_bytes_are_a_record_or_an_error_with_a_sentence():
    good = [CODEC.encode(r) for r in (scored(), sample(), example(ev.Start), example(ev.InstanceUp))]
    tracemalloc.start()
    refused = 0
    for seed in range(FUZZED):
        try:
            record = CODEC.decode(fuzzed(seed, good))
        except codec.CodecError as error:
            refused += 1
            assert len(str(error)) > 10
        else:
            CODEC.encode(record)
    assert refused > FUZZED // 2
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_bfloat16_is_a_dtype():
    assert np.dtype(ml_dtypes.bfloat16) in codec.DTYPES.values()
