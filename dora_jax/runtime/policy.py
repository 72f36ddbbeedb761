"""A trained policy in memory, for scripts: its weights, and text from them by the engine that sampled in training.

Consumes a workdir's config and, of a checkpoint, the params; produces completions. Law: prompts are worded, and tokens
are drawn, as the run's configuration says.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import overload

import jax
import numpy as np

from dora_jax.config import Config, workdirs
from dora_jax.models import hf, sharding
from dora_jax.models.families.config import ModelConfig
from dora_jax.models.lora_config import OFF
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.plan import devices, validate
from dora_jax.publish import DeviceWeights
from dora_jax.rollout.engine import Engine
from dora_jax.runtime.assembly import checkpoint_weights
from dora_jax.runtime.assembly import run as build
from dora_jax.runtime.common.seams import Tree
from dora_jax.runtime.job import of_this_machine, pick
from dora_jax.runtime.journal import staged_inputs
from dora_jax.tasks.prompts import Wording
from dora_jax.types import SampleId, Sampling, Version

Question = str | Sequence[Mapping[str, str]]  # text, or messages with role and content


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    text: str
    token_ids: np.ndarray  # i32[U], the stop token included when finish == "stop"
    logprobs: np.ndarray  # f32[U], nats, under the temperature that they were drawn at
    finish: str  # stop, length, or error: weights or KV are not numbers


class Policy:
    """One version of a run's policy.

    config: of the model; params: float32, stacked by layer; run: the run's configuration, as this machine fills it in.
    """

    def __init__(self, run: Config, config: ModelConfig, params: Tree, tokenizer: Tokenizer, version: Version):
        self.run = run
        self.config = config
        self.params = params
        self.tokenizer = tokenizer
        self.version = version
        self._groups = itertools.count()

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self, prompts: str, *, samples: int = ..., max_new_tokens: int | None = ..., temperature: float | None = ...
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Question],
        *,
        samples: int = ...,
        max_new_tokens: int | None = ...,
        temperature: float | None = ...,
    ) -> list[list[Completion]]: ...

    def generate(
        self,
        prompts: str | Sequence[Question],
        *,
        samples: int = 1,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[Completion] | list[list[Completion]]:
        """`samples` completions of one prompt, or of each of several. A second call draws others.

        max_new_tokens: at most rollout.max_new_tokens, which None means. temperature: None means the run's, 0 the
        likeliest token each time. ValueError: an argument is out of range, or a prompt is longer than
        rollout.max_prompt_tokens.
        """
        section = self.run.rollout
        limit = section.max_new_tokens if max_new_tokens is None else max_new_tokens
        heat = section.temperature if temperature is None else temperature
        if samples < 1 or not 1 <= limit <= section.max_new_tokens or not heat >= 0:
            raise ValueError(
                f"samples = {samples} is to be at least 1, max_new_tokens = {limit} between 1 and "
                f"rollout.max_new_tokens = {section.max_new_tokens}, temperature = {heat} at least 0"
            )
        asked = [prompts] if isinstance(prompts, str) else prompts
        wording, encoded = Wording(self.run.task, self.tokenizer), []
        for question in asked:
            text = wording.text(question if isinstance(question, str) else [dict(m) for m in question])
            encoded.append(np.asarray(self.tokenizer.encode(text), np.int32))
            if not 1 <= len(encoded[-1]) <= section.max_prompt_tokens:
                raise ValueError(
                    f"a prompt has {len(encoded[-1])} tokens; rollout.max_prompt_tokens = {section.max_prompt_tokens}"
                )
        engine, ids = self._engine, []
        sampling = None if heat == section.temperature else Sampling(temperature=heat)
        for tokens in encoded:
            group = next(self._groups)
            ids.append([SampleId(group, i) for i in range(samples)])
            for id in ids[-1]:
                engine.submit(id, tokens, self.version, limit, sampling=sampling)
        done: dict[SampleId, Completion] = {}
        while not engine.idle:
            for sample in engine.tick().finished:
                text = self.tokenizer.decode(sample.out_ids.tolist())
                done[sample.id] = Completion(
                    text=text, token_ids=sample.out_ids, logprobs=sample.logprobs, finish=sample.finish
                )
        found = [[done[id] for id in group] for group in ids]
        return found[0] if isinstance(prompts, str) else found

    # ------------------------------------------------------------ private

    @functools.cached_property
    def _engine(self) -> Engine:
        indices = devices.plan(len(jax.devices()), self.run).instances[0]
        mesh = sharding.make_mesh([jax.devices()[i] for i in indices], 1, 1, len(indices))
        engine = build.new_engine(self.run, self.tokenizer, self.config, mesh)
        weights = DeviceWeights(self.run.model.dtype)
        weights.put(self.version, self.params)
        engine.load(self.version, weights.get(self.version, engine.param_shardings))
        return engine


def load(workdir: Path, step: int | None = None) -> Policy:
    """The policy of a run's checkpoint; None: of the newest that verifies. ConfigError says what is missing."""
    run = validate.from_config_dict(workdirs.read(workdir), "evaluate")
    run = staged_inputs.staged(run, {field: url for field, url in validate.urls(run).items() if field == "model.path"})
    directory = workdir / "checkpoints"
    version = pick(directory, step)
    devices.setup_platform(run)
    run = of_this_machine(run)
    path = run.model.path
    params = checkpoint_weights.read(run, directory, version)
    run = dataclasses.replace(run, lora=OFF)  # an adapter is added up into them
    return Policy(run, hf.read_config(path), params, Tokenizer.load(path), version)
