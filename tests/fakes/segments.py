"""Segments of the journal from records, as this layout and the first one wrote them."""

import zlib

from dora_jax.runtime.journal.frames import MAGIC, UNNUMBERED, frames, preamble


def segment(records, number=1):
    return preamble(len(records)) + frames(records, number)


def unnumbered(records):
    """Write a segment as 10b51e5 did."""
    return b"".join(
        UNNUMBERED.pack(len(record), zlib.crc32(record, zlib.crc32(len(record).to_bytes(4, "little")))) + record
        for record in records
    )


def segment_of_layout(layout):
    """A segment whose frames a later version may have written."""
    start = MAGIC + layout.to_bytes(4, "little") + bytes(4)
    return start + zlib.crc32(start).to_bytes(4, "little") + b"frames that cannot be read here"
