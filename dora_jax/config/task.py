"""Configuration: the sections that say what is asked and what is rewarded. config.py has the others and the laws."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dora_jax.base.config_tree import AFRESH, FREE, LEARNS, field

HELD_OUT = "prompts that were trained on would be held out"

ROW_FILES = (".jsonl", ".json", ".csv", ".parquet")
ABOUT_ROWS = ("dataset_infos.json", "dataset_dict.json", "state.json")  # which the libraries of a hub write beside them
SHARD = re.compile(r"(-\d+-of-(\d+))?\.\w+$")


def splits(files: Iterable[str]) -> dict[str, list[str]]:
    """Split -> its files, of the names of any files: data/train of data/train-00000-of-00002.parquet and its like."""
    known: dict[str, list[str]] = {}
    for file in sorted(files):
        name = file.rpartition("/")[2]
        if name.endswith(ROW_FILES) and name not in ABOUT_ROWS and not name.startswith("."):
            known.setdefault(SHARD.sub("", file), []).append(file)
    return known


@dataclass(frozen=True, kw_only=True)
class TaskPart:
    """One of several tasks; templates and rewards are those of the section."""

    change: ClassVar[str] = AFRESH

    name: str = field("", "as in the section, and so the next six")
    params: dict[str, Any] = field({})
    path: str = ""
    heldout_path: str = ""
    prompt_column: str = ""
    answer_column: str = ""
    extract: str = ""
    weight: int = field(1, "prompts of it in each turn through the mix", ge=1)
    limit: float = field(1.0, "most outstanding groups, in units of its share of inflight; all 1: no limits", gt=0)


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    change: ClassVar[str] = AFRESH

    name: str = field(
        "", '"reasoning_gym:<dataset>", "rows", or the import path of a Source of yours (tasks/source.py)'
    )
    params: dict[str, Any] = field({}, "handed to the reasoning-gym dataset, or to your own source")
    path: str = field("", "rows: a .jsonl, .json, .csv or .parquet file")
    heldout_path: str = field("", "rows: held-out file; empty: a share of `path` by uid", change=HELD_OUT)
    prompt_column: str = field(
        "", "rows: column of the prompt, text or messages; a.b: field b of column a; empty: prompt"
    )
    answer_column: str = field("", "rows: column of what rewards compare with; empty: answer")
    mix: dict[str, TaskPart] = field({}, "several tasks in place of `name`, each named")
    lead: float = field(
        0.0, "mix with limits: steps of prompts by which a task may be ahead; 0: any number", ge=0, change=LEARNS
    )
    adaptive: bool = field(
        False, "mix: tasks with many filtered groups get up to 4 times their share of the load", change=LEARNS
    )
    heldout: int = field(256, "distinct held-out prompts; in a mix an equal part of each task's", ge=1, change=HELD_OUT)
    template: str = field("{prompt}", 'text around {prompt}; "chat" applies the tokenizer\'s chat template')
    template_kwargs: dict[str, Any] = field(
        {}, "chat: variables of the template: enable_thinking of Qwen3, the day of gpt-oss (strftime_now)"
    )
    system: str = field("", "chat: system message in front of prompts that have none")
    extract: str = field("", "regex; its first group in the question replaces the question")
    rewards: tuple[str, ...] = field(("dora_jax.tasks.rewards.exact",), "import paths; values add up", change=LEARNS)
    reward_weights: tuple[float, ...] = field((), "of each of rewards in their sum; empty: 1", change=LEARNS)
    answer_pattern: str = field("", "regex; its first group in the response is what rewards see", change=LEARNS)
    reward_workers: int = field(1, "processes", ge=1, change=FREE)
    reward_concurrency: int = field(256, "calls of an async def reward at once, in each process", ge=1, change=FREE)
    reward_timeout_s: float = field(10.0, "for one sample, or for a group where it takes responses", gt=0, change=FREE)
    reward_retries: int = field(2, "of a sample whose reward failed", ge=0, tuning=True, change=FREE)
    reward_sandbox: Literal["auto", "full", "weak"] = field(
        "auto", "full: rewards see no other process; weak: they could; auto: full for shipped rewards", change=FREE
    )
    sandbox: bool = field(
        False,
        "your rewards may run programs (tasks/sandbox/programs.py); those of tasks/code.py always do",
        change=FREE,
    )
    sandbox_python: str = field(
        "", "interpreter of programs in the sandbox, with its packages, such as numpy; empty: that of /usr", change=FREE
    )
    reward_env: tuple[str, ...] = field(
        (), "environment variables that rewards may read, beside PATH and the like", change=FREE
    )
    max_failed_share: float = field(
        0.01, "of groups whose scoring failed; above this the run stops", ge=0, le=1, change=FREE
    )
    max_bad_rows_share: float = field(
        0.01, "of rows that cannot be read, else the run stops", ge=0, le=1, tuning=True, change=FREE
    )
    shuffle_rewards: bool = field(False, "control experiment: rewards permuted among a step's samples", change=LEARNS)


@dataclass(frozen=True, kw_only=True)
class RewardModelSection:
    """A trained judge of finished samples: weight * score is a term of the reward, beside task.rewards if any."""

    change: ClassVar[str] = FREE

    path: str = field(
        "", "Hugging Face folder with a head `score.weight` [1, D] and the policy's token ids", change=LEARNS
    )
    weight: float = field(1.0, "of its score in the reward", change=LEARNS)
    placement: Literal["own", "trainer"] = field("own", "own: devices of its own; trainer: the first of the trainer's")
    data: int = field(1, "mesh axis: batch rows, parameters replicated", ge=1)
    fsdp: int = field(1, "mesh axis: batch rows and parameters", ge=1)
    tensor: int = field(1, "mesh axis: heads, d_ff", ge=1)
    pack_tokens: int = field(512, "L: packed row length", ge=1)
    rows: int = field(0, "B: packed rows a batch; 0: one a shard of data and fsdp", ge=0)


@dataclass(frozen=True, kw_only=True)
class EnvironmentSection:
    """What answers a policy of several turns, and rewards it in the place of task.rewards."""

    change: ClassVar[str] = AFRESH

    name: str = field("", "import path of an environment (tasks/environment.py); empty: a sample is one answer")
    params: dict[str, Any] = field({}, "keywords of its constructor")
    observation: str = field("\n{content}\n", 'what stands around a message of it, where task.template is not "chat"')
    renderer: str = field("", "of the package renderers, such as qwen3, for the template chat; empty: the tokenizer's")
    max_turns: int = field(8, "of an episode; the policy's last message is still answered", ge=1)
    turn_tokens: int = field(0, "most tokens that one turn samples; 0: rollout.max_new_tokens, that of all turns", ge=0)
    branches: int = field(
        -1,
        "most times that the chat template may rewrite an episode's earlier turns; one more ends it there; -1: as many "
        "as it makes",
        ge=-1,
        change=FREE,
    )
    step_timeout_s: float = field(60.0, "for one answer; later ones fail the group", gt=0, change=FREE)
    episode_timeout_s: float = field(
        3600.0, "from its beginning until its last answer is asked for", gt=0, tuning=True, change=FREE
    )
    observation_chars: int = field(
        65536, "most characters of an observation; the middle of a longer text is left out", ge=1
    )
    retries: int = field(
        2, "of an answer, where the environment says that a retry can help", ge=0, tuning=True, change=FREE
    )
    workers: int = field(1, "processes; each holds thousands of episodes", ge=1, change=FREE)
    threads: int = field(64, "of a process, for methods that block", ge=1, le=512, tuning=True, change=FREE)
    python: str = field(
        "", "their interpreter, where the environment's packages are installed apart; empty: the run's", change=FREE
    )
    sandbox: bool = field(
        False,
        "it may run programs (tasks/sandbox/programs.py); the PythonTool of tasks/code.py always may",
        change=FREE,
    )
    sandbox_python: str = field("", "as task.sandbox_python", change=FREE)
    env: tuple[str, ...] = field((), "environment variables that they may read, beside PATH and the like", change=FREE)
    noise_failed: float = field(0.0, "share of observations that say instead that the tool failed", ge=0, le=1)
    noise_truncated: float = field(0.0, "share that end after half", ge=0, le=1)
    noise_late: float = field(0.0, "share that come noise_late_s later", ge=0, le=1)
    noise_irrelevant: float = field(0.0, "share that say something else", ge=0, le=1)
    noise_late_s: float = field(1.0, ge=0, tuning=True)
    noise_ramp_groups: int = field(0, "groups over which the shares rise from 0; held-out: every second in full", ge=0)

    @property
    def most_branches(self) -> int:
        """How many an episode may have; 0 where the chat template has not been tried, or makes none."""
        return max(self.branches, 0)
