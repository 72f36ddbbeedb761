"""The configuration of the orchestrator (`OrchestratorConfig`) and what each mode decides (`Decisions`).

A mode is one row of choices; the code that carries them out is the same for all eight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from dora_jax.orchestrate.events import InstanceUp
from dora_jax.types import InstanceId, Version, issued_first_as

# Between 3 and 8 the simulated step time is flat; 0 costs 5 to 12 % where stragglers hold the trainer.
KV_WEIGHT = 8.0

# A task is never given more than four times its share, however few of its groups teach anything.
LEAST_RATE = 0.25

# Of the prompts that a step trains, so many more are issued in a short round of `rollpacker`: as published.
OVER_ISSUED = 0.25

MODES = ("sync", "one_step", "partial", "evict", "dora_paper", "dora", "rollpacker", "staleflow")
FIXED_LOAD = ("sync", "one_step", "rollpacker")  # they issue a batch at a time, whatever `inflight` says


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decisions:
    """max_lag      bound on staleness against the step's base; None: unbounded
    capped          the ledger's two sums hold (else only each member's own deadline)
    target_groups   groups outstanding beyond the batch in training at which admission stops
    admit_on        "stream": whenever credit and a slot are free; "publish": only at the end of a step
    admit_at        "newest" version; "batch": the version of the groups outstanding, if any
    count_awaited   while the trainer is idle, the batch that it waits for counts as the one in training: groups are
                    admitted when their version is published and not when the batch is taken, with the same tag
    kv_weight       a version's share of the instances counts its samples, and this times their tokens in mean lengths:
                    by samples alone a few long ones end in one batch, where each token takes the longest
    spread          "remainder": largest remainder and minimum needs; "round": the paper's plain rounding
    on_publish      "keep": running samples stay at their version; "swap": all go on under the new weights;
                    "evict": groups past their deadline are cancelled and their prompts redone
    over_issued     groups that a short round issues beyond P: those that are not among the first P are given up, and
                    their
                    prompts wait for a long round, which issues P such prompts and gives up none; 0: no rounds
                    (placement.py)
    parts           a step's batch is taken in up to so many parts, each as soon as its groups are ready: the trainer
                    works while the step still waits for its stragglers

    Parts and the awaited batch in the load are machinery, which a mode has unless its definition forbids it: a
    comparison is then one of modes. No parts: `sync`, whose runs are the same bit for bit, so that a part may not be
    what finished first; `dora_paper`, which trains when the whole batch is there; instances on the trainer's chips,
    which have nothing to overlap. Nothing awaited counts: `sync` and `one_step`, which issue a batch at a time;
    `dora_paper`, which admits at a step's end. What a mode would be with them is one row of the simulator:
    `orchestrator.decisions` replaces any choice.

    The two rivals are what their papers say, with these assumptions. `rollpacker` (arXiv 2509.21009): short rounds
    issue 1.25 P prompts and train the first P, the others wait until P of them fill a long round. The paper also issues
    1.25 G answers a prompt and keeps the first G; here all G are kept (C2). Its parallelism that changes within a step
    and its reward scheduler are left out; its trainer that works during the rollout is `parts`. `staleflow` (arXiv
    2601.12784): running samples go on under the new weights, as in `partial`, and a group is admitted only where the
    step that its oldest token allows has a place for it, which is the ledger's rule. The paper's surplus of requests is
    `inflight`, and what no step takes now is kept for the next one and not aborted (C2); its samples change their
    instance when the weights do; its choice of the moment at which an instance takes new weights is left out: all do at
    the publication.
    """

    max_lag: int | None
    capped: bool
    target_groups: int
    admit_on: str = "stream"
    admit_at: str = "newest"
    count_awaited: bool = False
    kv_weight: float = 0.0
    spread: str = "remainder"
    on_publish: str = "keep"
    over_issued: int = 0
    parts: int = 1

    @property
    def mixes_versions(self) -> bool:
        """A sample may have tokens of several versions."""
        return self.on_publish == "swap"

    @property
    def repartitions(self) -> bool:
        """Versions are sampled from side by side, and share the instances."""
        return self.max_lag != 0 and self.admit_at == "newest" and not self.mixes_versions


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrchestratorConfig:
    groups_per_step: int  # P
    group_size: int  # G
    total_steps: int  # the run ends when this version is published
    mode: str = "dora"
    max_versions: int = 3  # the paper's K
    stride: int = 1  # rollouts take every n-th version; 0: n follows what was measured (stride.py)
    max_mean_lag: float = 0.0  # of the groups of the last 10 steps, where the stride is 0; 0: up to max_lag
    inflight: float = 1.25  # groups outstanding beyond the batch in training, in units of P
    rebalance_period_s: float = 0.5
    max_filtered_rounds: int = 10  # filtered groups in a row, in units of P, that stop the run
    max_prompt_tokens: int = 128
    max_new_tokens: int = 128
    expected_new_tokens: int = 0  # to reserve pages for until lengths are known; 0: max_new_tokens
    eval_every: int = 0  # versions; 0: only version 0 and the last
    eval_groups: int = 0  # 0: no evaluation
    eval_samples: int = 1
    kv_pressure: float = 0.03  # share of free pages below which an instance sheds samples
    updates: int = 1  # optimizer updates a step; modes that take parts take the groups of each when they are ready
    task_cycle: tuple[str, ...] = ()  # the task of group g is task_cycle[g % len]; empty: tasks are not distinguished
    task_ratios: tuple[tuple[str, float], ...] = ()  # (task, oversampling in units of its share of `inflight`)
    task_lead: float = (
        0.0  # steps of prompts by which a task may be ahead of another, where tasks have limits; 0: any number
    )
    task_adaptive: bool = False  # a task of which many groups are filtered gets more of the load, up to 4 times as much
    colocated: bool = False  # instances share the trainer's chips: they stand still from a whole batch to its version
    hold_versions: int = 0  # versions that are kept for sessions of the endpoint, beside those that training needs
    hold_s: float = 0.0  # for so long after they were superseded
    lendable: tuple[InstanceId, ...] = ()  # instances that the trainer's chips make up while it waits; see state.py
    switch_s: float = 0.0  # expected of their switch to the rollouts and back, until one was measured

    @classmethod
    def of(cls, *sections: Any, **more: Any) -> Self:
        """Each field from the last of these dataclasses that has a field of its name; `more` names the others."""
        known = {field.name for field in dataclasses.fields(cls)}
        shared = {f.name: getattr(section, f.name) for section in sections for f in dataclasses.fields(section)}
        return cls(**{name: value for name, value in shared.items() if name in known} | more)

    @property
    def max_lag(self) -> int:
        return self.max_versions - 1

    @property
    def decisions(self) -> Decisions:
        groups, max_lag = self.groups_per_step, self.max_lag
        target = sum(self.task_limits.values()) or max(1, math.ceil(self.inflight * groups))
        parts = 1 if self.colocated else self.updates
        machinery = {"target_groups": target, "count_awaited": True, "parts": parts}
        rows: dict[str, dict] = {
            "sync": dict(max_lag=0, capped=True, target_groups=groups),
            "one_step": dict(max_lag=1, capped=True, target_groups=groups, admit_at="batch", parts=parts),
            "partial": dict(max_lag=None, capped=False, on_publish="swap", **machinery),
            "evict": dict(max_lag=max_lag, capped=False, on_publish="evict", **machinery),
            "dora_paper": dict(max_lag=max_lag, capped=True, target_groups=target, admit_on="publish", spread="round"),
            "rollpacker": dict(
                max_lag=0, capped=False, target_groups=groups, over_issued=math.ceil(OVER_ISSUED * groups), parts=parts
            ),
            "staleflow": dict(max_lag=max_lag, capped=True, on_publish="swap", **machinery),
        }
        dora = dict(max_lag=max_lag, capped=True, kv_weight=KV_WEIGHT, **machinery)
        return Decisions(**rows.get(self.mode, dora))

    # ------------------------------------------------------------------ tasks

    @functools.cached_property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.task_cycle)) or ("",)

    def task(self, group_id: int) -> str:
        return self.task_cycle[issued_first_as(group_id) % len(self.task_cycle)] if self.task_cycle else ""

    def next_of_task(self, task: str, group_id: int) -> int:
        """The first group from `group_id` on that is of this task."""
        while self.task(group_id) != task:
            group_id += 1
        return group_id

    @functools.cached_property
    def task_limits(self) -> dict[str, int]:
        """Groups of each task that may be outstanding; empty: no task has a limit of its own."""
        if not self.task_ratios and not (self.task_adaptive and self.task_cycle):
            return {}
        ratios = dict(self.task_ratios)
        each = self.inflight * self.groups_per_step / len(self.task_cycle)
        return {task: math.ceil(each * self.task_cycle.count(task) * ratios.get(task, 1.0)) for task in self.tasks}

    def adapted_limits(self, rates: Mapping[str, float]) -> dict[str, int]:
        """`task_limits` when only `rates` of each task's scored groups can be trained on: each in inverse proportion,
        their sum as before."""
        limits = self.task_limits
        wanted = {task: limit / max(rates[task], LEAST_RATE) for task, limit in limits.items()}
        scale = sum(limits.values()) / sum(wanted.values())
        return {task: max(1, round(scale * n)) for task, n in wanted.items()}

    # ------------------------------------------------------------------ evaluation

    def evaluation_due(self, version: Version) -> bool:
        if not self.eval_groups:
            return False
        every = self.eval_every
        return version in (0, self.total_steps) or (every > 0 and version % every == 0)

    def evaluation_ids(self, version: Version) -> tuple[int, ...]:
        # Evaluations due before `version`: pure, so that a resumed run counts on
        every = self.eval_every or max(1, self.total_steps)
        first = -(-version // every) * self.eval_groups
        return tuple(-1 - (first + i) for i in range(self.eval_groups))

    # ------------------------------------------------------------------ refusals

    def problems(self, instances: Sequence[InstanceUp] | None = None) -> list[str]:
        """Sentences that say why this run could never progress; empty when it can. `instances`, where known: those
        that it starts with."""
        found = [] if self.mode in MODES else [f"mode {self.mode!r} is none of {', '.join(MODES)}"]
        positive = ("groups_per_step", "updates", "group_size", "max_versions", "max_new_tokens", "max_filtered_rounds",
                    "eval_samples", "rebalance_period_s")  # fmt: skip
        not_negative = ("total_steps", "eval_groups", "eval_every", "max_prompt_tokens", "inflight",
                        "expected_new_tokens", "task_lead", "switch_s", "max_mean_lag")  # fmt: skip
        found += [f"{n} is {getattr(self, n)}: it must be positive" for n in positive if getattr(self, n) <= 0]
        found += [f"{n} is {getattr(self, n)}: it must not be negative" for n in not_negative if getattr(self, n) < 0]
        if self.updates > 0 and self.groups_per_step % self.updates:
            found.append(f"updates is {self.updates}: it does not divide groups_per_step, {self.groups_per_step}")
        if self.colocated and self.lendable:
            found.append("colocated instances have the trainer's chips already: there are none to lend")
        if not 0 <= self.stride <= max(1, self.max_versions):
            found.append(f"stride is {self.stride}: it must be between 0 and max_versions, {self.max_versions}")
        if self.stride != 1 and self.mode != "dora":
            found.append(f"stride is {self.stride}: mode {self.mode} takes every version, and has a stride of 1")
        if self.max_mean_lag and self.stride:
            found.append(
                f"max_mean_lag bounds the stride that follows what is measured: stride is {self.stride}, not 0"
            )
        elif 0 < self.max_mean_lag < self.inflight:
            found.append(
                f"max_mean_lag is {self.max_mean_lag:g}: with inflight {self.inflight:g} the mean lag is about that, "
                "whatever versions the rollouts take"
            )
        if self.task_adaptive and not self.task_cycle:
            found.append("task_adaptive is set, but task_cycle names no task")
        found += [
            f"task_ratios names {task!r}, which task_cycle does not"
            for task, _ in self.task_ratios
            if task not in self.task_cycle
        ]
        if not found and self.mode not in FIXED_LOAD:  # RBS against a group and against a batch
            samples, target = self.inflight * self.groups_per_step * self.group_size, self.decisions.target_groups
            if samples < self.group_size:
                found.append(
                    f"inflight {self.inflight} asks for {samples:g} samples in flight: "
                    f"that is less than one group of {self.group_size}"
                )
            elif target < self.groups_per_step and (self.task_limits or not self.decisions.count_awaited):
                found.append(
                    f"inflight {self.inflight} keeps at most {target} groups outstanding: a step takes "
                    f"{self.groups_per_step} and would never start"
                )
        if instances is not None and not found:
            found += [] if instances else ["there is no rollout instance"]
            for up in instances:
                problem = self.instance_problem(up.pages, up.page_size, up.slots)
                found += [f"instance {up.instance} cannot serve this run: {problem}"] if problem else []
        return found

    def instance_problem(self, pages: int, page_size: int, slots: int) -> str | None:
        """Why an instance of this size cannot serve the run; None: it can."""
        tokens = self.max_prompt_tokens + self.max_new_tokens
        if slots < 1:
            return "it has no slot"
        if pages * page_size < tokens:
            return (
                f"its {pages} pages of {page_size} tokens hold {pages * page_size} tokens, but one sample may need "
                f"{tokens} (max_prompt_tokens {self.max_prompt_tokens} + max_new_tokens {self.max_new_tokens})"
            )
        return None
