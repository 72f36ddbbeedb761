"""The messages that carry the KV of a sample between the controller and the processes of its gangs: records, no behaviour.

messages.py has the codec that writes and reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.transfer.transfer_manifest import Lent


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchKV:
    """Rollout, every process: fetch the KV shard of the process of the same rank."""

    number: int
    epoch: int  # of the gang that fetches
    lent: tuple[Lent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStaged:
    number: int
    host: int
    fault: str  # empty: it is here


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKV:
    """Rollout, every process: the process's shard of the pages of a sample that resumes here. KVStaged answers it."""

    number: int
    in_flight: InFlightSample


@dataclass(frozen=True, slots=True, kw_only=True)
class DropStagedKV:
    """Drop the KV that was staged under this number: another process could not fetch its shard."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseKV:
    """Release the KV that was lent under this number."""

    number: int
