"""What the metric sinks wrote, read back."""

import io
import json

from dora_jax.base.console import Console


def quiet():
    return Console(io.StringIO(), tty=False)


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def events(folder):
    """Read the records of event files: records of u64 length, u32 crc, payload, u32 crc."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def scalars(folder):
    """Steps, names and values in the event files."""
    return [(e.step, value.tag, value.simple_value) for e in events(folder) for value in e.summary.value]


def texts(folder):
    """Names and texts in the event files."""
    found = [(value.tag, value.tensor.string_val) for e in events(folder) for value in e.summary.value]
    return [(name, strings[0].decode()) for name, strings in found if strings]
