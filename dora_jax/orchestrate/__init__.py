"""The brain: one event in, commands out; standard library only, no clock, no I/O, no randomness.

Read `events.py` (the two alphabets), `modes.py` (what is configured, what a mode decides), `ledger.py` (the deadline
rule), then `core.py` (the order of decisions), `facts.py` (what events commit), `place.py` and `balance.py` (which samples start
where, which instance loads what, which samples move), which ask `admission.py`, `partition.py` and `migration.py`, values in, values out.
`fleet.py`, `queue.py` and `state.py` hold what is known; `snapshot.py` writes it down, `view.py` shows it.
"""
