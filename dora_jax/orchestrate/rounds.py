"""Rounds of mode `rollpacker`: a step is a short round or a long one, and no other mode has any.

    short   P and `over_issued` groups are issued, and the first P that are ready train. The others are given up: their
            prompts wait, in the order in which they were given up
    long    once P prompts wait, the next step issues these, and trains them all

So no step waits for the longest answers but a long one, where all are long. Laws: every group trains on the version that
sampled it; a round gives a prompt up once at the most; what was given up trains in a long round, which the last step is
where any prompt waits.
Source: arXiv 2509.21009 (tail batching); `Decisions` says what is assumed.
"""

from __future__ import annotations

from dora_jax.orchestrate.ledger import OUTSTANDING
from dora_jax.orchestrate.state import State

GIVEN_UP = "it is not among the first {} of its round: its prompt waits for a long round"


def begin(s: State) -> None:
    """A step begins: its round is a long one where enough prompts wait."""
    if s.decisions.over_issued:
        s.ledger.long_round = len(s.redo) + s.returning >= s.config.groups_per_step or _overdue(s)


def end(s: State) -> None:
    """The step has its batch: what else is outstanding is given up."""
    reason = GIVEN_UP.format(s.config.groups_per_step)
    for group_id in [g for g, (state, _) in s.ledger.live.items() if state in OUTSTANDING]:
        s.give_up(group_id, reason)


def may_redo(s: State) -> bool:
    """Whether a prompt that was issued before is issued now: in a long round, and in modes without rounds."""
    return s.ledger.long_round or not s.decisions.over_issued or _overdue(s)


def waits_for_prompts(s: State) -> bool:
    """A prompt of this long round is not free yet: samples of its first issue are still being cancelled."""
    return s.ledger.long_round and s.returning > 0


# ---------------------------------------------------------------- private


def _overdue(s: State) -> bool:
    """More prompts wait than the steps after this one train."""
    later = s.config.total_steps - s.ledger.base - 1
    return len(s.redo) + s.returning > later * s.config.groups_per_step
