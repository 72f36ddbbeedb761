"""The floor under the step time of every schedule that keeps C1, C2 and C3, however it places its samples.

A group of version v starts after v is published, and no sample of it changes its version (C1) or is cut short (C2). It
trains in the step that produces version v + K at the latest (C3, K = max_versions). So between the publications of v and
of v + K its longest sample runs from its first token to its last, is scored, and trains in a part of a step:

    K * step_s  >=  longest_tokens * token_s + score_s + part_s

token_s is least for a sample that is alone on the fastest instance. The floor falls only with K: more chips do not lower
it. Mode `partial` has none: its samples change their version, and lag as far as they need.
"""

from __future__ import annotations

from dora_jax.costs import open_costs
from dora_jax.sim.config import SimConfig


def step_floor_s(config: SimConfig, longest_tokens: float = 0.0) -> float:
    """Seconds a step, where every version has a sample of `longest_tokens` (0: of max_new_tokens) and one turn."""
    costs, section = open_costs(config.model, config.hardware, config.cost), config.orchestrator
    tokens = longest_tokens or config.workload.max_new_tokens
    token_s = costs.decode_base_s(1) / max(config.hardware.speeds)
    reading_s = tokens**2 / 2 * costs.decode_kv_s / max(config.hardware.speeds)  # of its own KV, a token at a time
    part_s = costs.train_s(0, 0, 0.0) / section.updates  # of its tokens' training nothing is counted
    return (tokens * token_s + reading_s + costs.score_s + part_s) / section.max_versions
