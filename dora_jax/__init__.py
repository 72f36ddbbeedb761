"""dora_jax: asynchronous reinforcement learning of language models, with several policy versions decoding at once.

            payload (tokens, log-probs, rewards, weights): one way
 1 prompts -> 2 rollout -> 3 reward -> 4 buffer -> 5 train -> 6 publish -+
                 ^                                                       | weights, version v+1
                 +-------------------------------------------------------+   (the only back edge)

            control (ids and counts only): a star
   stages -- events (facts) -->  orchestrator.step(*events)  -- commands -->  stages

README.md says what each package holds. Read types.py, orchestrate/core.py, runtime/coordinator.py; then stages 1 to 6.
The algorithm is DORA (arXiv 2604.26256): each trajectory by exactly one version, none dropped, staleness bounded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dora_jax.base import old_paths
from dora_jax.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dora_jax.api import Configuration, Prompts, Reward, RunResult
    from dora_jax.report.load import Row
    from dora_jax.runtime.policy import Policy

__all__ = ["__version__", "fit", "load_policy", "samples"]

old_paths.install()


def fit(
    config: Configuration = None,
    workdir: str | os.PathLike[str] | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    prompts: Prompts | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    accept_changes: bool = False,
) -> RunResult:
    """Runs a configuration to its end, resuming what `workdir` (a path, or gs://bucket/folder) holds.

    config: a config file as of --config ("configs/x.py:arg"), what its get_config returns, a `Config`, or the fields
    that differ from configs/rows.py: {"steps": 20, "trainer.learning_rate": 1e-6}. workdir: runs/NAME of the config
    file or of the script where it is None. The other arguments go over the configuration. model: a Hugging Face folder.
    prompts: rows {"prompt": ..., "answer": ...} or texts, a table of them (datasets, pandas, polars, pyarrow), the path
    of a file of rows, or "reasoning_gym:DATASET"; task.prompt_column and task.answer_column rename the two.
    reward: one or several callables (prompt, response, answer) -> float | {term: float}, or their import paths; a
    parameter of another name gets that column of the row. Worker processes import the file that defines it; where that
    file is the script itself, they run it down to this call. accept_changes: as --accept_changes, go on in a workdir
    whose run learned under other values.

    Raises ConfigError for wrong input and RunError for a run that cannot go on. On the main thread Ctrl-C and SIGTERM
    stop the run, whose exit_code is then 42; any other thread may call it too. The process is the caller's and never
    ended.
    """
    from dora_jax import api

    return api.fit(config, workdir, model, prompts, reward, accept_changes)


def load_policy(workdir: str | os.PathLike[str], step: int | None = None) -> Policy:
    """The trained policy of the run in `workdir`, as of `fit`; `step` None means the newest checkpoint that verifies.

    ConfigError says what is missing.
    """
    from dora_jax import api

    return api.load_policy(workdir, step)


def samples(
    workdir: str | os.PathLike[str],
    *,
    step: int | None = None,
    task: str | None = None,
    kind: str | None = None,
    contains: str | None = None,
) -> list[Row]:
    """What the policy wrote in the run of `workdir` (a folder, or gs://bucket/folder), a row a sample, the oldest step
    first, as far as `monitor.samples_bytes` reaches back.

    step: of this step alone, of held-out samples of this version. task: the name of a task of a mix. kind: trained,
    filtered (its group taught nothing), failed (it has no reward; `reason` tells why) or heldout. contains: in the
    prompt or in the answer. A row has step, kind, task, group, version (that sampled it), prompt, expected, index,
    reward, terms, tokens, finish, mean_logprob and text, a held-out one also solved.

    FileNotFoundError: there is no such workdir.
    """
    from dora_jax.report import load

    return load.samples(os.fspath(workdir), step=step, task=task, kind=kind, contains=contains)
