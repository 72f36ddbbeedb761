"""Stage 3: observations that are wrong on purpose, so that a policy learns to live with broken tools.

A draw is decided by the run's seed, the sample and the turn alone. Its rate rises linearly with the number of the group
up to `ramp_groups`. The last observation of an episode, and its reward, are never touched. Standard library only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dora_jax.tasks.environment import Message
from dora_jax.tasks.source import identity_hash, share_hash
from dora_jax.types import is_eval, issued_first_as

FAILED = "error: the tool did not answer"
IRRELEVANT = ("status: idle", "0 messages", "the file is empty", "ok", "see the log for details")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Shares of the observations that fail, end after half, come `late_s` later, or say something else."""

    seed: int = 0
    failed: float = 0.0
    truncated: float = 0.0
    late: float = 0.0
    irrelevant: float = 0.0
    late_s: float = 1.0
    ramp_groups: int = 0

    def kind(self, id: tuple[int, int], turn: int) -> str:
        """ "" where the observation stays as it is. Of held-out samples every second one meets the noise in full."""
        group, index = id
        if is_eval(group):
            strength = float(index % 2)
        else:
            strength = min(issued_first_as(group) / self.ramp_groups, 1.0) if self.ramp_groups else 1.0
        draw = share_hash("noise", self.seed, issued_first_as(group), index, turn)
        for kind in ("failed", "truncated", "late", "irrelevant"):
            draw -= strength * getattr(self, kind)
            if draw < 0:
                return kind
        return ""

    async def on(self, observed: list[Message], id: tuple[int, int], turn: int) -> list[Message]:
        kind = self.kind(id, turn)
        if not kind or not observed:
            return observed
        if kind == "late":
            await asyncio.sleep(self.late_s)
            return observed
        last = dict(observed[-1])
        content = str(last.get("content", ""))
        other = IRRELEVANT[identity_hash("irrelevant", self.seed, *id, turn) % len(IRRELEVANT)]
        last["content"] = {"failed": FAILED, "truncated": content[: len(content) // 2], "irrelevant": other}[kind]
        return [*observed[:-1], last]
