"""Stage 2: an engine that scores samples with the calls that draw them.

Consumes weights, prompts and answers; produces the log-prob of every token of the answers under these weights.
Law: where the weights are those that drew an answer, its log-probs are the ones that sampling reported, bit for bit: the
same compiled calls take the same positions at the same places, and a forced token enters as a drawn one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dora_jax.rollout.engine import Engine
from dora_jax.types import SampleId

Answer = tuple[np.ndarray, np.ndarray]  # i32[P] prompt, i32[U] sampled tokens
SCORED = 0  # the only version that it holds


class ReplayEngine(Engine):
    """Needs `rollout.exact`, as the engines whose samples it scores."""

    def logprobs(self, params: Any, answers: Sequence[Answer]) -> list[np.ndarray]:
        """f32[U] of each answer. params: in the layout of `param_shardings`."""
        if not self.shapes.exact:
            raise ValueError("an engine without rollout.exact takes no tokens to score")
        self.load(SCORED, params)
        for i, (prompt_ids, out_ids) in enumerate(answers):
            id = SampleId(group_id=i, index=0)
            self.submit(id, prompt_ids, SCORED, len(out_ids))
            self.scheduler.seqs[id].forced = np.asarray(out_ids, np.int32)
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(answers)
        while not self.idle:
            for sample in self.tick().finished:
                found[sample.id.group_id] = sample.logprobs
        self.drop(SCORED)
        for scored, (_, out_ids) in zip(found, answers, strict=True):
            if len(scored) != len(out_ids):
                raise RuntimeError(
                    f"{len(scored)} tokens of an answer of {len(out_ids)} were scored: it ends earlier here"
                )
        return found
