"""The brain: one event in, commands out; standard library only, no clock, no I/O, no randomness.

Read `events.py` (the two alphabets), `modes.py` (what is configured, what a mode decides), `ledger.py` (the deadline
rule and admission), then `core.py` (the order of decisions and the loop), `transitions.py` (which events count, and
what they commit), `placement.py` and `balance.py` (which samples start where, which instance loads what, which samples
move). `fleet.py`, `measured.py` and `state.py` hold what is known; `snapshot.py` writes it down, `view.py` shows it.
"""
