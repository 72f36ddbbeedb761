"""The bytes of a segment of the journal: its preamble, then a numbered frame a record.

    preamble = "DORA" | layout u32 | frames of its head u32 | crc32 of these u32
    frame    = size u32 | crc32 of the rest and the data u32 | segment u32 | index in the segment u32 | data

Segments of the first layout have no preamble, and their frames no number: size | crc32 of size and data | data. Laws:
what is read is a prefix of what was written, record for record: damage ends it, and so does a frame that is repeated,
missing or of another segment; a segment of a layout to come is no damage.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from dora_jax.config import UnknownFormat

PREAMBLE = struct.Struct("<4sIII")  # magic, layout, frames of the head, crc32 of these
FRAME = struct.Struct("<IIII")  # size, crc32, segment, index
UNNUMBERED = struct.Struct("<II")  # size, crc32: a frame of the first layout
MAGIC = b"DORA"  # read as the size of an unnumbered frame, it is over MAX_RECORD_BYTES
LAYOUT = 2
MAX_SEGMENT = (1 << 32) - 1
MAX_RECORD_BYTES = 1 << 30  # no record comes near this: a snapshot is many records


class Segment(NamedTuple):
    records: tuple[bytes, ...]
    fault: str | None  # the sentence that says what ended the reading early
    lost_bytes: int  # behind the fault


def preamble(head_frames: int) -> bytes:
    """What a segment begins with whose head has so many frames."""
    start = PREAMBLE.pack(MAGIC, LAYOUT, head_frames, 0)[:-4]
    return start + zlib.crc32(start).to_bytes(4, "little")


def frames(records: Iterable[bytes], segment: int, first: int = 0) -> bytes:
    """The frames of records that follow each other in a segment, from index `first` on."""
    return b"".join(frame(record, segment, index) for index, record in enumerate(records, start=first))


def frame(record: bytes, segment: int, index: int) -> bytes:
    size = len(record)
    return FRAME.pack(size, _checksum(record, size, segment, index), segment, index) + record


def unframe(data: bytes, segment: int) -> Segment:
    """The records of a segment's bytes, up to the first frame that is not whole or not in its place. UnknownFormat: the
    preamble is whole, and of a layout that this version does not read."""
    records: list[bytes] = []
    view, at, fault = memoryview(data), 0, None
    header = UNNUMBERED
    if data.startswith(MAGIC) and len(data) >= PREAMBLE.size:
        _, layout, _, crc = PREAMBLE.unpack_from(data)
        if zlib.crc32(data[: PREAMBLE.size - 4]) == crc:  # else it reads as a frame that is torn
            if layout != LAYOUT:
                raise UnknownFormat(
                    f"its frames are of layout {layout}, and this version of dora_jax reads 1 to {LAYOUT}"
                )
            header, at = FRAME, PREAMBLE.size
    while at < len(data) and fault is None:
        fault = _fault(view[at:], header, segment, len(records))
        if fault is None:
            end = at + header.size + header.unpack_from(view, at)[0]
            records.append(bytes(view[at + header.size : end]))
            at = end
    if fault:
        fault = f"record {len(records) + 1} at byte {at} {fault}"
    return Segment(tuple(records), fault, len(data) - at)


def _fault(view: memoryview, header: struct.Struct, segment: int, index: int) -> str | None:
    """What is wrong with the first frame of these bytes, which should have this number."""
    if len(view) < header.size:
        return "is torn"
    size, crc, *place = header.unpack_from(view)
    if size > len(view) - header.size:
        return f"is torn: {size} bytes were announced, {len(view) - header.size} are there"
    if _checksum(view[header.size : header.size + size], size, *place) != crc:
        return "does not match its checksum"
    if place and place != [segment, index]:
        return f"is out of place: it is record {place[1] + 1} of segment {place[0]}"
    return None


def _checksum(data: bytes | memoryview, *numbers: int) -> int:
    return zlib.crc32(data, zlib.crc32(struct.pack(f"<{len(numbers)}I", *numbers)))
