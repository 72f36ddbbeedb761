"""What the metric sinks wrote, read back."""

import io
import json

from dora_jax.base.console import Console


def quiet():
    return Console(io.StringIO(), tty=False)


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def scalars(folder):
    """Steps, names and values in the event files: records of u64 length, u32 crc, payload, u32 crc."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value
