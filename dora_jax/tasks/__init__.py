"""Stages 1 and 3: prompts go out, rewards come back.

    prompts.py           Task: prompt_at(group_id), pure in (seed, group_id); templates, length limit
    gym.py               source of prompts: reasoning-gym (datasets.py opens them)
    rows.py              source of prompts: your own jsonl or parquet
    mixture.py           source of prompts: several of these, each with its share
    source.py            what a source of questions does; randomness by identity, and what makes two prompts the same
    worked_solutions.py  worked solutions of some datasets, for the supervised warm start
    rewards.py           (prompt, response, answer) -> float | {name: float}: the shipped ones; how a path is resolved
    solved.py            what counts as solved on held-out prompts
    pool.py              ScorerPool: rewards in killable processes, beside generation; one real row is scored before
                         anything is compiled
    worker_process.py    WorkerPool: processes of rewards or environments, each asked many questions at once
    reward_model.py      ModelScorer: a trained judge on a mesh of its own, behind the pool
    code.py              rewards that run a response's program on tests; the Python tool, alone and as an environment
    environment.py       the Protocol of what answers a policy of several turns
    environments/        EnvironmentPool: environments in processes of their own, and those that are shipped
    sandbox/             sandboxed processes of ours: a model's program, rewards, chat templates

Laws: training and held-out prompts never share a uid; an error or a time-out is never a reward.
This file stays light, because the reward workers import the package: no JAX, no numpy, nothing eager.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from dora_jax.base import callables

if TYPE_CHECKING:
    from dora_jax.config import TaskSection
    from dora_jax.models.tokenizer import Tokenizer
    from dora_jax.tasks.prompts import Task, Wording
    from dora_jax.tasks.source import Source

GYM_REWARD = "dora_jax.tasks.rewards.reasoning_gym"


def open_task(
    section: TaskSection,
    tokenizer: Tokenizer,
    *,
    seed: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    heldout: int,
    quarantine_path: str | Path,
    supervised: bool = False,
    exclude: AbstractSet[str] = frozenset(),
) -> Task:
    """The task that a section names; mistakes in it raise ConfigError, a file that cannot be used ValueError.

    heldout: distinct held-out prompts, 0 for none. supervised: rows may carry `completion` in place of `answer`.
    exclude: uids never drawn (a warm start on other rows passes the main task's `heldout_uids`).
    Bad rows are written to quarantine_path.
    """
    from dora_jax.tasks.mixture import OWN, Mixture, blamed
    from dora_jax.tasks.prompts import Task, Wording

    path = Path(quarantine_path)

    def open_one(name: str, n: int, held: AbstractSet[str]) -> Source:
        own = {field: getattr(section.mix[name], field) for field in OWN}
        part = dataclasses.replace(section, mix={}, **own)
        with blamed(name):
            return _source(part, Wording(part, tokenizer), n, held, supervised, path.with_stem(f"{path.stem}.{name}"))

    wording = Wording(section, tokenizer)
    source: Source = (
        Mixture(section.mix, open_one, heldout, exclude)
        if section.mix
        else _source(section, wording, heldout, exclude, supervised, path)
    )
    return Task(source, wording, seed=seed, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens)


def _source(
    section: TaskSection,
    wording: Wording,
    heldout: int,
    exclude: AbstractSet[str],
    supervised: bool,
    quarantine_path: Path,
) -> Source:
    from dora_jax.config import ConfigError, field_context

    kind, _, dataset = section.name.partition(":")
    if kind == "reasoning_gym":
        from dora_jax.tasks.gym import GymSource

        return GymSource(
            dataset,
            section.params,
            wording,
            heldout=heldout,
            exclude=exclude,
            scored_by_dataset=GYM_REWARD in section.rewards,
        )
    if section.name == "rows":
        from dora_jax.tasks.rows import RowsSource

        if GYM_REWARD in section.rewards and not supervised:
            raise ConfigError(f"task.rewards: {GYM_REWARD} scores reasoning-gym datasets, not rows of your own")
        return RowsSource(
            section, wording, heldout=heldout, exclude=exclude, supervised=supervised, quarantine_path=quarantine_path
        )
    with field_context("task.name"):
        make = callables.imported(section.name, "source")
    try:
        source: Source = make(heldout=heldout, exclude=exclude, **section.params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task.params: {section.name} refuses {dict(section.params)}: {error}") from error
    if lacks := [each for each in ("name", "heldout", "heldout_uids", "draw", "exclude") if not hasattr(source, each)]:
        raise ConfigError(f"task.name: {section.name} has no {', '.join(lacks)} (dora_jax.tasks.source.Source)")
    return source
