"""What the journal of a workdir knows of a checkpoint's params: for readers of checkpoints beside a run or after it.

Consumes the segments of WORKDIR/journal, newest first, without following them; produces a digest (digest.py). Law: it
writes nothing, and waits for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.codec import CodecError
from dora_jax.runtime.journal.event_log import EventLog
from dora_jax.runtime.journal.journal_audit import reading
from dora_jax.runtime.journal.log_stores import JournalError
from dora_jax.runtime.journal.object_storage import JOURNAL
from dora_jax.runtime.journal.records import Batch, Fact, Head, Published, Saved, reader
from dora_jax.runtime.journal.workdir_mirror import url_of
from dora_jax.types import Version

NAMES = (Saved.__name__.encode(), Published.__name__.encode())  # a record of another kind is not decoded


def params_digest(workdir: Path, version: Version) -> int | None:
    """The digest of the params that the checkpoint of this version was given, else of those that were published as it.

    None: the workdir has no journal, or it does not reach back to the version."""
    place = url_of(workdir) or workdir
    published: int | None = None
    if place == workdir and not (workdir / JOURNAL).is_dir():
        return None
    try:
        journal = EventLog(reading(f"{place}/{JOURNAL}"))
        numbers = sorted(journal.segments(), reverse=True)
    except (JournalError, OSError):
        return None
    for number in numbers:
        try:
            saved, found = _known(journal.read(number).records, version)
        except (JournalError, CodecError, OSError):
            continue  # damaged, or of a newer format: an older segment may know the version
        if saved is not None:
            return saved
        published = found if published is None else published
    return published


# ---------------------------------------------------------------- private


def _known(records: Sequence[bytes], version: Version) -> tuple[int | None, int | None]:
    """(what was saved as the version, what was published as it), by this segment; the last of several holds."""
    saved: dict[Version, int] = {}
    published: dict[Version, int] = {}
    if not records:
        return None, None
    read = reader(records[0])
    for item in map(read, [data for data in records if any(name in data for name in NAMES) or data is records[0]]):
        match item:
            case Head():
                saved |= {int(at): each.params for at, each in item.saved.items()}
                published |= {int(at): each.digest for at, each in item.digests.items()}
            case Batch(entries=entries):
                for entry in entries:
                    match entry:
                        case Saved(version=at, params=digest):
                            saved[at] = digest
                        case Fact(event=ev.StepPublished(version=at), payload=Published(digest=digest)):
                            published[at] = digest
    return saved.get(version), published.get(version)
