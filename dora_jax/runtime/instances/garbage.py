"""Whether what an instance says of its samples can be samples at all.

Consumes the records that carry sampled tokens; produces a phrase about what is wrong with them. What an environment said is
not looked at: it is no instance's fault.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dora_jax.runtime.common.worker import Finished, Parked, Waiting
from dora_jax.runtime.journal.records import Partial

MAX_LOGPROB = 0.01  # rounding may lift one over 0
NOT_FINITE = "its log-probs are not finite"


def fault(item: Any, vocab_size: int | None = None) -> str | None:
    """None: nothing is wrong, or the item carries no tokens. vocab_size: None where it is not known."""
    match item:
        case Finished(sample=sample):
            found = _fault(sample.out_ids, sample.logprobs, sample.mask, vocab_size)
            return found or (NOT_FINITE if sample.finish == "error" else None)
        case Partial():
            return _fault(item.out_ids, item.logprobs, None, vocab_size)
        case Waiting(in_flight=held) | Parked(in_flight=held):
            return _fault(held.out_ids, held.logprobs, held.mask, vocab_size)
    return None


def _fault(out_ids: np.ndarray, logprobs: np.ndarray, mask: np.ndarray | None, vocab_size: int | None) -> str | None:
    """mask: bool[U], False where an environment said the token; None: all of them were sampled."""
    if len(out_ids) != len(logprobs):
        return f"{len(out_ids)} tokens have {len(logprobs)} log-probs"
    if mask is not None:
        out_ids, logprobs = out_ids[mask], logprobs[mask]
    if not len(out_ids):
        return None
    if out_ids.min() < 0 or (vocab_size is not None and out_ids.max() >= vocab_size):
        return f"token {out_ids.max() if out_ids.min() >= 0 else out_ids.min()} of {vocab_size}"
    if not np.isfinite(logprobs).all():
        return NOT_FINITE
    return f"a log-prob of {logprobs.max()}" if logprobs.max() > MAX_LOGPROB else None
