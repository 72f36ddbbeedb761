"""The books of a run, from its journal: what became of every group that was issued. For the report, not for a live view: it
replays the journal."""

from __future__ import annotations

from pathlib import Path

from dora_jax.report.load import RunData

MOST_BYTES = 32 * 2**20  # of a journal; half a second a megabyte


def audit(workdir: str, data: RunData) -> None:
    """Fills in `data.ledger` (groups by state, at the journal's end) and `data.audit` (a sentence)."""
    folder = Path(workdir) / "journal"
    segments = [] if "://" in workdir else sorted(folder.glob("*.log"))
    if not segments:
        data.audit = "There is no journal here to audit."
        return
    size = sum(path.stat().st_size for path in segments)
    if size > MOST_BYTES:
        data.audit = f"The journal of {size / 2**20:.0f} MB is not audited: the report replays at most {MOST_BYTES / 2**20:.0f} MB."
        return
    from dora_jax.runtime.durability import journal_audit  # a report without a journal needs none of it
    from dora_jax.runtime.durability.event_log import EventLog
    from dora_jax.runtime.durability.recovery import replay

    try:
        journal = EventLog(journal_audit.reading(folder))
        numbers = journal.segments()
        ledger = replay(journal, numbers, lambda sentence: None).orchestrator.state.ledger
        data.ledger = {"admitted": ledger.admitted, **ledger.counts}
        if numbers[0] == 1:
            found = journal_audit.audit(folder)
            data.audit = f"Audit of the journal, fact by fact: {found}."
            return
        balanced = ledger.admitted == sum(ledger.counts.values())
        data.audit = (
            f"The ledger at the journal's end {'balances' if balanced else 'does NOT balance'}: {ledger.admitted} groups "
            "admitted, each in one state of the table. The first facts are gone, for checkpoints hold what they led to "
            "(journal.keep_all keeps them for an audit of each)."
        )
    except (RuntimeError, ValueError, OSError) as error:  # a journal of other code, or one that is cut short
        data.audit = f"The journal cannot be audited: {error}."
