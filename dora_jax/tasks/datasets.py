"""Stage 1 and 3: the datasets of reasoning-gym, opened by name; the prompts and the reward workers both use it.

Laws: an item is a function of (name, params, index) in every process; a dataset without this property, or whose
reference answer does not get a full score, is refused. The library is imported on first use, since that takes seconds.
Some of its scorers evaluate expressions that a response holds: one more reason to run rewards in their own processes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import threading
from collections.abc import Mapping
from typing import Any

from dora_jax.base.config_tree import nearest
from dora_jax.config import ConfigError
from dora_jax.tasks.source import share_hash

NO_UNIQUE_GOLD = "its reference answer scores 0: it has no unique gold answer"
REFUSED = {
    "codeio": "the same seed gives different items",
    "boxnet": NO_UNIQUE_GOLD,
    "graph_color": NO_UNIQUE_GOLD,
    "propositional_logic": NO_UNIQUE_GOLD,
    "rubiks_cube": NO_UNIQUE_GOLD,
    "rush_hour": NO_UNIQUE_GOLD,
}
# These walk over sets of strings, so that an item also depends on Python's hash seed.
HASH_ORDERED = frozenset(
    {
        "intermediate_integration",
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
GLOBAL_RANDOM = frozenset({"list_functions"})  # one of its generators draws from the global `random`
# Items that most datasets make on demand, and the few that prepare (or bound) all of them when opened.
SIZE = 2**31 - 1
PREPARED_SIZE = {"acre": 5_000, "gsm_symbolic": 100_000, "list_functions": 100_000, "word_ladder": 20_000}
DATASET_SEED = 0  # the run's seed picks indices, not the dataset: held-out prompts are the same for every seed
UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, SyntaxError, RecursionError)
_global_random = threading.Lock()


class Dataset:
    """One reasoning-gym dataset, or several by weight (`composite`: ours, so that one dataset may appear twice with
    other parameters): entry(index) is pure; score is the dataset's own."""

    def __init__(self, parts: list[tuple[float, str, Any]]):
        """parts: (weight, name, what the library opened) of each."""
        self.size = min(dataset.size for _, _, dataset in parts)
        self._parts = parts
        self._total = sum(weight for weight, _, _ in parts)

    def entry(self, index: int) -> dict[str, Any]:
        name, dataset = self._part(index)
        if name not in GLOBAL_RANDOM:
            return dataset[index]
        with _global_random:
            state = random.getstate()
            random.seed(index)
            try:
                return dataset[index]
            finally:
                random.setstate(state)

    def score(self, response: str, index: int, entry: dict[str, Any]) -> float:
        return self._part(index)[1].score_answer(response, entry=entry)

    def _part(self, index: int) -> tuple[str, Any]:
        left = share_hash("part", index) * self._total
        for weight, name, dataset in self._parts:
            left -= weight
            if left < 0:
                break  # else the last one: rounding of the last sum
        return name, dataset


def open_dataset(name: str, params: Mapping[str, Any]) -> Dataset:
    """The dataset of this name with these parameters; raises ConfigError in one sentence."""
    if name != "composite":
        return Dataset([(1.0, name, _open_one(name, params, "task.params", "task.name"))])
    specs = params.get("datasets")
    if set(params) != {"datasets"} or not isinstance(specs, (list, tuple)) or not specs:
        raise ConfigError("task.params: composite takes `datasets`, a tuple of {name, weight, config}, and no more")
    parts = []
    for i, spec in enumerate(specs):
        field = f"task.params.datasets[{i}]"
        if not isinstance(spec, Mapping) or not {"name"} <= set(spec) <= {"name", "weight", "config"}:
            raise ConfigError(f"{field}: {spec!r} is not {{name, weight, config}}")
        weight = spec.get("weight", 1.0)
        if not isinstance(weight, (int, float)) or not weight > 0:
            raise ConfigError(f"{field}.weight: {weight!r} is not a number above 0")
        dataset = _open_one(spec["name"], spec.get("config", {}), f"{field}.config", f"{field}.name")
        parts.append((weight, spec["name"], dataset))
    return Dataset(parts)


def _open_one(name: str, params: Mapping[str, Any], field: str, name_field: str) -> Any:
    """What the library opens by this name."""
    registered = known()
    if name in REFUSED:
        raise ConfigError(f"{name_field}: reasoning-gym's {name} is refused: {REFUSED[name]}")
    if name not in registered or name == "composite":
        raise ConfigError(
            f"{name_field}: reasoning-gym has no dataset {name!r}; the nearest is "
            f"{nearest(name, registered.keys() - REFUSED.keys() - {'composite'})}"
        )
    if name in HASH_ORDERED and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise ConfigError(
            f"{name_field}: reasoning-gym's {name} depends on Python's hash seed, so that a resumed run "
            "would meet other prompts; set PYTHONHASHSEED=0 in the environment"
        )
    settings = registered[name][1]
    fields = {f.name for f in dataclasses.fields(settings)}
    for key in params:
        if key == "seed":
            raise ConfigError(f"{field}.seed: prompts are drawn by the run's own seed; leave it out")
        if key not in fields:
            raise ConfigError(f"{field}.{key}: {name} has no such parameter; the nearest is {nearest(key, fields)}")
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(
            name, **{"seed": DATASET_SEED, "size": PREPARED_SIZE.get(name, SIZE), **params}
        )
        dataset[0]  # a wrong type often shows only when an item is made
    except Exception as error:  # each dataset raises what it likes; always raised again, with the field
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{field}: reasoning-gym's {name} refuses {dict(params)}: {reason}") from error
    return dataset


def known() -> dict[str, tuple[type, type]]:
    """name -> (dataset class, config class) of everything the installed library registers."""
    import reasoning_gym  # noqa: F401  (registers the datasets)
    from reasoning_gym.factory import DATASETS

    return DATASETS


@functools.lru_cache(maxsize=8)
def _opened(name: str, params_json: str) -> Dataset:
    return open_dataset(name, json.loads(params_json))


@functools.lru_cache(maxsize=8)  # the samples of a group share an item, and some take a second to make
def _entry(name: str, params_json: str, index: int) -> dict[str, Any]:
    return _opened(name, params_json).entry(index)


def score(response: str, answer: Mapping[str, Any]) -> float:
    """The dataset's own score of a response to the item that `answer` names.

    Several scorers raise on text they cannot read. Where the same scorer grades the reference answer, the fault is the
    response's, and it scores 0.0; where it does not, the error stands.
    """
    name, params_json, index = answer["reasoning_gym"], json.dumps(answer["params"]), answer["index"]
    dataset, entry = _opened(name, params_json), _entry(name, params_json, index)
    try:
        return float(dataset.score(response, index, entry))
    except UNREADABLE:
        if dataset.score(entry["answer"], index, entry) > 0:
            return 0.0
        raise
