"""Floors under the step time: what no schedule of a row gets below, and what versions on instances of their own add.

Latency (`latency_floor_s`), for modes that keep C1, C2 and C3. A group of version v starts after v is published, and no
sample of it changes its version (C1) or is cut short (C2). It trains in the step that produces version v + K at the
latest (C3, K = max_versions). So between the publications of v and of v + K its longest sample runs from its first
token to its last, is scored, and trains in a part of a step:

    K * step_s  >=  longest_tokens * token_s + score_s + part_s

token_s is least for a sample that is alone on the fastest instance. This floor falls only with K: more chips do not
lower it. Modes `partial` and `staleflow` have none: their samples change their version. Nor has `rollpacker`, whose
short rounds give the longest samples up.

Memory (`memory_floor_s`), for every mode. The samples of a step hold W = sum(prompt * length + length^2 / 2) tokens of
KV for a tick each. An instance holds C tokens, so that it takes W / C ticks or more of some instance to decode them,
each no shorter than that of one sample, and W tokens are read.

Fragments (`fragment_s`), an estimate and no floor. With one version an instance (R = 1), a version that is no longer
started from holds whole instances until its last sample ends. Where samples were started at a steady rate until then, a
share k(n) of their KV is left n ticks later, k(n) = integral from n of y S(y) dy over that from 0, with S(y) the share
of samples longer than y. However well they are packed, ceil(N * k(n)) of N instances are held then, and their unused
parts add up to ticks in which an instance pays for its weights and decodes less than it could:

    fragments  =  sum over n of ceil(N * k(n)) - N * k(n)

N does not matter much: a version's tail costs about the same number of ticks on 6 instances as on 12, each version has
one, and a step as well. Samples that change their version (`partial`) leave none.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

from dora_jax.costs import open_costs
from dora_jax.sim.config import Row, SimConfig
from dora_jax.sim.drafts import DecodeTimes
from dora_jax.sim.run import orchestrator_config
from dora_jax.sim.workload import Workload
from dora_jax.types import GroupId, SampleId

LOOKS = 512  # ticks at which `fragment_s` looks
LONGEST_OF = 3  # steps, each with its longest sample: the shortest of these is what every version has


def step_floor_s(row: Row) -> float:
    """The larger of the two floors, for the lengths that the row's first steps have."""
    decisions, section = orchestrator_config(row.config, row.mode).decisions, row.config.orchestrator
    floor_s = memory_floor_s(row.config)
    if decisions.max_lag is None or decisions.on_publish != "keep" or decisions.over_issued:
        return floor_s
    work, groups = Workload(row.config.workload), section.groups_per_step
    longest = min(max(_lengths(work, range(step * groups, (step + 1) * groups), section.group_size))
                  for step in range(LONGEST_OF))  # fmt: skip
    return max(floor_s, latency_floor_s(row.config, longest, decisions.max_lag + 1))


def latency_floor_s(config: SimConfig, tokens: float, max_versions: int) -> float:
    """Seconds a step, where every version has a sample of so many tokens; K = max_versions."""
    costs = open_costs(config.model, config.hardware, config.cost)
    alone_s, reads = DecodeTimes(costs, config.draft).token(1)
    token_s = alone_s / max(config.hardware.speeds)
    local = min(tokens, costs.window)  # of its own KV, a token at a time
    reading_s = tokens**2 / 2 * costs.decode_kv_s + (tokens - local / 2) * local * costs.window_kv_s
    reading_s *= reads / max(config.hardware.speeds)
    part_s = costs.train_s(0, 0, 0.0) / config.orchestrator.updates  # of its tokens' training nothing is counted
    return (tokens * token_s + reading_s + costs.score_s + part_s) / max_versions


def memory_floor_s(config: SimConfig) -> float:
    """Seconds a step, of the samples of the first step's groups."""
    costs, section = open_costs(config.model, config.hardware, config.cost), config.orchestrator
    work = Workload(config.workload)
    held = local = 0.0
    for group in range(section.groups_per_step):
        for length in _lengths(work, [group], section.group_size):
            prompt = work.prompt_tokens(group)
            held += length * (prompt + length / 2)
            below = min(max(costs.window - prompt, 0), length)  # tokens of it that see all before them
            local += below * (prompt + below / 2) + (length - below) * costs.window
    ticks = held / (costs.pages * config.hardware.page_size)
    alone_s, reads = DecodeTimes(costs, config.draft).token(1)
    return (ticks * alone_s + (held * costs.decode_kv_s + local * costs.window_kv_s) * reads) / _speed(config)


def fragment_s(config: SimConfig) -> float:
    """Seconds a step that instances pay for the unused parts of those which older versions hold; see the page."""
    costs, section = open_costs(config.model, config.hardware, config.cost), config.orchestrator
    lengths = sorted(_lengths(Workload(config.workload), range(section.groups_per_step), section.group_size))
    step = max(1.0, lengths[-1] / LOOKS)
    left, kept = 0.0, []
    for look in reversed(range(LOOKS)):
        longer = 1 - bisect_right(lengths, look * step) / len(lengths)
        left += (config.workload.prompt_tokens + look * step) * longer
        kept.append(left)
    instances = config.hardware.instances - 1  # one holds the tail of the version before
    unused = sum(math.ceil(instances * k / left - 1e-9) - instances * k / left for k in kept)
    alone_s, _ = DecodeTimes(costs, config.draft).token(1)
    return unused * step * alone_s / _speed(config)


# ---------------------------------------------------------------- private


def _lengths(work: Workload, groups: Iterable[GroupId], samples: int) -> list[int]:
    return [work.length(SampleId(group, i)) for group in groups for i in range(samples)]


def _speed(config: SimConfig) -> float:
    """The relative speeds of all instances, summed."""
    return sum(config.hardware.speed(i) for i in range(config.hardware.instances))
