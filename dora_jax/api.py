"""The Python API behind `dora_jax.fit` and `dora_jax.load_policy`: what a script says -> a run, and what came of it.

Consumes a configuration and, beside it, a model, prompts and rewards as Python objects; produces the same `Config` that
a command line gives. Rows given as objects are written to WORKDIR/prompts-HASH.jsonl, so that a rerun and the programs
find them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_collections
import numpy as np

from dora_jax import config as configs
from dora_jax.base import callables
from dora_jax.cli import flags
from dora_jax.config import Config, ConfigError, field_context
from dora_jax.config import files as config_files
from dora_jax.report.load import Row, load, number, samples

if TYPE_CHECKING:
    from dora_jax.runtime.policy import Policy

BASE = "rows"  # the shipped configuration that a run without one starts from
GYM = "reasoning_gym:"
HELDOUT_SHARE = 4  # of rows given as objects, one in so many is held out, and at most what the configuration says

Configuration: TypeAlias = Config | Mapping[str, Any] | ml_collections.ConfigDict | str | None
Prompts: TypeAlias = str | os.PathLike[str] | Iterable[Mapping[str, Any] | str]  # a table of rows too
Reward: TypeAlias = Callable[..., float | Mapping[str, float]] | str
Series: TypeAlias = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """What came of a run.

    exit_code: 0 at its end, 42 where it was asked to stop and the same call goes on.
    metrics, evaluations: name -> f64[rows], a row a step or an evaluated version, of the workdir's whole history;
    "step" says which; NaN where a row has no such figure. checkpoints: steps that `policy` can take, oldest first.
    """

    exit_code: int
    workdir: str
    metrics: Series
    evaluations: Series
    checkpoints: tuple[int, ...]

    def __repr__(self) -> str:
        """One line, as a notebook shows it."""
        steps = f"{len(self.metrics.get('step', ()))} steps, {len(self.evaluations.get('step', ()))} evaluations"
        return (
            f"RunResult(exit_code={self.exit_code}, workdir={self.workdir!r}, {steps}, checkpoints={self.checkpoints})"
        )

    def policy(self, step: int | None = None) -> Policy:
        """The policy of a checkpoint; None: of the newest that verifies."""
        return load_policy(self.workdir, step)

    def samples(
        self, *, step: int | None = None, task: str | None = None, kind: str | None = None, contains: str | None = None
    ) -> list[Row]:
        """What the policy wrote in this run; see `dora_jax.samples`."""
        return samples(self.workdir, step=step, task=task, kind=kind, contains=contains)


def fit(
    config: Configuration,
    workdir: str | os.PathLike[str] | None,
    model: str | os.PathLike[str] | None,
    prompts: Prompts | None,
    reward: Reward | Sequence[Reward] | None,
    accept_changes: bool,
) -> RunResult:
    """See `dora_jax.fit`."""
    callables.end_import()
    script = getattr(sys.modules["__main__"], "__file__", None) or "fit"
    name = config_files.run_name(config) if isinstance(config, str) else Path(script).stem
    asked_workdir = os.fspath(workdir) if workdir is not None else str(Path("runs") / name)
    tree = _tree(config)
    if model is not None:
        tree["model"]["path"] = os.fspath(model)
    if reward is not None:
        tree["task"]["rewards"] = tuple(map(_path, [reward] if callable(reward) or isinstance(reward, str) else reward))
    if prompts is not None:
        keep_heldout = config is not None  # where the caller gave how many prompts are held out
        if isinstance(config, Mapping):
            keep_heldout = "task.heldout" in config or "heldout" in (config.get("task") or {})
        _take_prompts(tree, prompts, asked_workdir, keep_heldout)
    asked = flags.taken(tree, asked_workdir, accept_changes)
    from dora_jax.runtime.job import train  # JAX starts only after the configuration has passed
    from dora_jax.serving import live
    from dora_jax.trainer import manifest

    here, folder = flags.staged(asked, "train"), asked.workdir
    with live.opened(here) as endpoint:
        code = train(here, folder, endpoint=endpoint)
    history = load(folder, folder.name, texts=False)
    return RunResult(
        exit_code=code,
        workdir=asked_workdir,
        metrics=_arrays(history.steps),
        evaluations=_arrays(history.evaluations),
        checkpoints=tuple(manifest.steps(folder / "checkpoints")),
    )


def load_policy(workdir: str | os.PathLike[str], step: int | None) -> Policy:
    """See `dora_jax.load_policy`."""
    folder = flags.local(workdir, "evaluate")
    from dora_jax.runtime.policy import load as load_from  # JAX starts only now

    return load_from(folder, step)


# ---------------------------------------------------------------- private


def _tree(config: Configuration) -> dict[str, Any]:
    """The configuration as a tree of this call's own."""
    if isinstance(config, Config):
        return dataclasses.asdict(config)
    if isinstance(config, ml_collections.ConfigDict):
        return config.copy_and_resolve_references().to_dict()
    if not isinstance(config, str | Mapping | None):
        raise ConfigError(
            f"config: {config!r:.80} is a {type(config).__name__}, no configuration: give the name of a config file, "
            "fields as a dict, or what a config file returns"
        )
    tree: dict[str, Any] = config_files.load_file(config if isinstance(config, str) else BASE).to_dict()
    if isinstance(config, Mapping):
        _merge(tree, config)
    return tree


def _merge(tree: dict[str, Any], fields: Mapping[str, Any], prefix: str = "") -> None:
    """Fields by dotted name or nested go over those of the tree; what does not exist is refused later, by name."""
    for name, value in fields.items():
        first, _, rest = name.partition(".")
        below = tree.get(first)
        section = isinstance(value, Mapping) and f"{prefix}{first}" not in configs.free_form()
        if isinstance(below, dict) and (rest or section):
            _merge(below, {rest: value} if rest else value, f"{prefix}{first}.")
        else:
            tree[name] = value


def _path(reward: Any) -> str:
    if isinstance(reward, str):
        return reward
    with field_context("reward"):
        return callables.path_of(reward)


def _take_prompts(tree: dict[str, Any], prompts: Prompts, workdir: str, keep_heldout: bool) -> None:
    task = tree["task"]
    task["mix"] = {}
    if isinstance(prompts, str) and prompts.startswith(GYM):
        task["name"], task["path"] = prompts, ""
        return
    task["name"] = "rows"
    if isinstance(prompts, str | os.PathLike):
        task["path"] = os.fspath(prompts)
        return
    prompt_name, answer_name = task["prompt_column"] or "prompt", task["answer_column"] or "answer"
    with field_context("prompts"):
        if isinstance(prompts, Mapping):  # a datasets.DatasetDict too
            raise ValueError(
                f"a {type(prompts).__name__} of {', '.join(map(str, prompts))} is no list of rows; give the rows of "
                "one, or a list with a dict for each row"
            )
        rows = []
        for i, row in enumerate(_listed(prompts)):
            row = {prompt_name: row, answer_name: ""} if isinstance(row, str) else row
            if not isinstance(row, Mapping):
                raise ValueError(f"row {i} is a {type(row).__name__}, neither a text nor a dict of columns")
            rows.append(row)
        # The file of these rows, named by their content. ValueError: a row is no JSON.
        folder = flags.local(workdir, "train")
        try:
            text = "".join(json.dumps(dict(row), allow_nan=False, default=_plain) + "\n" for row in rows)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a row cannot be written as JSON: {error}") from error
        if not text:
            raise ValueError("there is no row")
        file = folder / f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(text)
            partial.replace(file)
        except OSError as error:
            raise ValueError(f"{file} cannot be written: {error.strerror}") from error
        task["path"] = str(file)
    if not keep_heldout:
        task["heldout"] = min(task["heldout"], max(1, len(rows) // HELDOUT_SHARE))
        tree["eval"]["prompts"] = min(tree["eval"]["prompts"], task["heldout"])


def _listed(prompts: Any) -> Iterable[object]:
    """The rows of a table of pandas, polars or pyarrow, which are known by their methods; of others their items."""
    if hasattr(prompts, "iterrows"):  # pandas: a missing value is null, not NaN
        return json.loads(prompts.to_json(orient="records", date_format="iso", double_precision=15))
    for method in ("to_dicts", "to_pylist"):
        if hasattr(prompts, method):
            return getattr(prompts, method)()
    if not isinstance(prompts, Iterable):
        raise ValueError(f"{prompts!r:.80} is a {type(prompts).__name__}, neither rows nor the name of a file of them")
    return prompts


def _plain(value: object) -> object:
    """Return an array or a date as JSON can hold it."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _arrays(rows: Sequence[Row]) -> Series:
    names = dict.fromkeys(key for row in rows for key in row if number(row[key]) is not None)
    return {name: np.array([number(row.get(name)) for row in rows], np.float64) for name in names}
