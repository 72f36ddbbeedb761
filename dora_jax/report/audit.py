"""The books of a run, from its journal: what became of every group that was issued. For the report, not for a live
view: it replays the journal. That of a bucket comes to this machine first."""

from __future__ import annotations

import tempfile
from pathlib import Path

from dora_jax.report.load import RunData

MOST_BYTES = 32 * 2**20  # of a journal; half a second a megabyte
MOST_OBJECTS = 20_000  # of a journal in a bucket: a few minutes on their way
JOURNAL = "journal"


class _TooLong(Exception):
    """The journal is more than a report waits for; the message says how much it is."""


def audit(workdir: str, data: RunData) -> None:
    """Fills in `data.ledger` (groups by state, at the journal's end) and `data.audit` (a sentence)."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            if "://" in workdir:
                place = _brought(workdir, Path(scratch) / JOURNAL)
            else:
                place = str(Path(workdir) / JOURNAL)
                _fits(sum(path.stat().st_size for path in Path(place).glob("*.log")))
            _replay(place, data)
        except _TooLong as size:
            data.audit = (
                f"The journal of {size} is not audited: the report replays at most {MOST_BYTES / 2**20:.0f} MB."
            )
        except (RuntimeError, ValueError, OSError) as error:  # a journal of other code, or one that is cut short
            data.audit = f"The journal cannot be audited: {error}."


def _replay(place: str, data: RunData) -> None:
    from dora_jax.runtime.journal import journal_audit, log_stores  # a report without a journal needs none of it
    from dora_jax.runtime.journal.event_log import EventLog, unheard
    from dora_jax.runtime.journal.recovery import replay

    journal = EventLog(log_stores.log_at(place, read_only=True))
    numbers = journal.segments()
    if not numbers:
        data.audit = "There is no journal here to audit."
        return
    ledger = replay(journal, numbers, unheard).orchestrator.state.ledger
    data.ledger = {"admitted": ledger.admitted, **ledger.counts}
    if numbers[0] == 1:
        found = journal_audit.audit(place)
        data.audit = f"Audit of the journal, fact by fact: {found}."
        return
    balanced = ledger.admitted == sum(ledger.counts.values())
    data.audit = (
        f"The ledger at the journal's end {'balances' if balanced else 'does NOT balance'}: {ledger.admitted} groups "
        "admitted, each in one state of the table. The first facts are gone, for checkpoints hold what they led to "
        "(journal.keep_all keeps them for an audit of each)."
    )


def _brought(workdir: str, folder: Path) -> str:
    """Copy the bucket's journal and return the copy's URL. What a run adds meanwhile is not in it."""
    from dora_jax.runtime.journal import object_storage

    store, taken = object_storage.Objects(workdir), 0
    keys = store.keys(JOURNAL)
    if len(keys) > MOST_OBJECTS:
        raise _TooLong(f"{len(keys):,} objects")

    def bring(key: str) -> None:
        nonlocal taken
        _fits(taken)  # several at a time may pass: the bound is no promise
        content = store.get(key)
        if content is not None:  # None: its segment was dropped meanwhile
            file = folder / Path(key).relative_to(JOURNAL)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            taken += len(content)

    object_storage.side_by_side(bring, keys)
    _fits(taken)
    return f"file://{folder}"


def _fits(size_bytes: int) -> None:
    if size_bytes > MOST_BYTES:
        raise _TooLong(f"{size_bytes / 2**20:.0f} MB")
