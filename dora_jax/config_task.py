"""Configuration: the sections that say what is asked and what is rewarded. config.py has the others and the laws."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TaskPart:
    """One of several tasks; templates and rewards are those of the section."""

    name: str = ""  # as in the section, and so the next four
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    path: str = ""
    heldout_path: str = ""
    extract: str = ""
    weight: int = 1  # prompts of it in each turn through the mix
    limit: float = 1.0  # its outstanding groups at most, in units of its share of inflight; all 1: no limits


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    name: str = ""  # "reasoning_gym:<dataset>" or "rows"
    params: dict[str, Any] = dataclasses.field(default_factory=dict)  # handed to the reasoning-gym dataset
    path: str = ""  # rows: a .jsonl or .parquet file
    heldout_path: str = ""  # rows: held-out file; empty: a share of `path` by uid
    mix: dict[str, TaskPart] = dataclasses.field(default_factory=dict)  # several tasks in place of `name`, each named
    lead: float = 0.0  # mix with limits: steps of prompts by which a task may be ahead of another; 0: any number
    adaptive: bool = False  # mix: a task with many filtered groups gets more of the load, up to 4 times its share
    heldout: int = 256  # distinct held-out prompts; in a mix an equal part of each task's
    template: str = "{prompt}"  # "{prompt}" is the question; "chat" applies the tokenizer's chat template
    extract: str = ""  # regex; its first group in the question replaces the question
    rewards: tuple[str, ...] = ("dora_jax.tasks.rewards.exact",)  # import paths; values add up
    answer_pattern: str = ""  # regex; its first group in the response is what rewards see
    reward_workers: int = 1  # processes
    reward_timeout_s: float = 10.0
    reward_retries: int = 2
    reward_walls: str = "auto"  # full: rewards see no other process; weak: they could; auto: full for shipped rewards
    sandbox: bool = False  # rewards of yours may run programs (tasks/programs.py); those of tasks/code.py always may
    reward_env: tuple[str, ...] = ()  # names of environment variables that rewards may read, beside PATH and the like
    max_failed_share: float = 0.01  # above this the run stops
    max_bad_rows_share: float = 0.01
    shuffle_rewards: bool = False  # control experiment: rewards permuted among a step's samples


@dataclass(frozen=True, kw_only=True)
class RewardModelSection:
    """A trained judge of finished samples: weight * score is a term of the reward, beside task.rewards if any."""

    path: str = ""  # a Hugging Face folder with a head `score.weight` [1, D] and the policy's token ids; empty: none
    weight: float = 1.0
    placement: str = "own"  # own: devices of its own; trainer: the first of the trainer's
    data: int = 1  # mesh axis: batch rows, parameters replicated
    fsdp: int = 1  # mesh axis: batch rows and parameters
    tensor: int = 1  # mesh axis: heads, d_ff
    pack_tokens: int = 512  # L: packed row length
    rows: int = 0  # B: packed rows a batch; 0: one a shard of data and fsdp


@dataclass(frozen=True, kw_only=True)
class EnvironmentSection:
    """What answers a policy of several turns, and rewards it in the place of task.rewards."""

    name: str = ""  # import path of an environment (tasks/environment.py); empty: a sample is one answer
    params: dict[str, Any] = dataclasses.field(default_factory=dict)  # keywords of its constructor
    observation: str = "\n{content}\n"  # what stands around a message of it, where task.template is not "chat"
    renderer: str = ""  # of the package renderers, such as qwen3, where task.template is "chat"; empty: the tokenizer's
    max_turns: int = 8  # of an episode; the policy's last message is still answered
    turn_tokens: int = 0  # that the policy may sample in one turn; 0: rollout.max_new_tokens, which holds all turns
    branches: int = 0  # times that the chat template may rewrite earlier turns of an episode; one more fails its group
    step_timeout_s: float = 60.0  # for one answer; later ones fail the group
    episode_timeout_s: float = 3600.0  # from its beginning until its last answer is asked for
    retries: int = 2  # of an answer, where the environment says that a retry can help
    workers: int = 1  # processes; each holds thousands of episodes
    python: str = ""  # their interpreter, where the environment's packages are installed apart; empty: the run's
    sandbox: bool = False  # it may run programs (tasks/programs.py); the PythonTool of tasks/code.py always may
    env: tuple[str, ...] = ()  # names of environment variables that they may read, beside PATH and the like
    noise_failed: float = 0.0  # share of the observations that say in their place that the tool failed
    noise_truncated: float = 0.0  # that end after half
    noise_late: float = 0.0  # that come noise_late_s later
    noise_irrelevant: float = 0.0  # that say something else
    noise_late_s: float = 1.0
    noise_ramp_groups: int = 0  # groups over which the shares rise from 0; held-out samples: every second one, in full
