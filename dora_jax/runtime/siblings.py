"""Siblings on other instances: which instance runs a sample of which group, and what it is told of the group's other samples.

A group's samples are often on several instances, and drafts are made of the siblings that an engine knows
(rollout/drafts.py). Consumes where the coordinator sends samples, and the samples that end; tells the instances that still
run samples of the group the tokens of those that have ended, and, where a sample comes to an instance that ran none of its
group, also those that running siblings elsewhere have in the journal. The coordinator uses it, on the main thread. Laws:
what is said of a sample is bounded (MOST_TOKENS); what is not told, told twice or comes late changes speed alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from dora_jax.runtime.common.seams import RolloutWorker
from dora_jax.runtime.sample_registry import SampleRegistry
from dora_jax.types import GroupId, InstanceId, Sample, SampleId

MOST_TOKENS = 2**16  # of a sample, from its first on: 256 KiB

_Place = tuple[InstanceId, int]  # a life of an instance


class Siblings:
    def __init__(self, instances: Mapping[InstanceId, RolloutWorker], samples: SampleRegistry):
        self._instances, self._samples = instances, samples
        self._at: dict[GroupId, dict[SampleId, _Place]] = {}  # where the samples that run were sent last

    def sent(self, ids: Iterable[SampleId], instance: InstanceId) -> None:
        """The samples start, go on or arrive there."""
        place = instance, self._instances[instance].life
        for id in ids:
            here = self._at.setdefault(id.group_id, {})
            if place not in here.values():
                here.pop(id, None)
                self._tell_all(id.group_id, place)
            here[id] = place

    def ended(self, sample: Sample) -> None:
        here = self._at.get(sample.id.group_id, {})
        ran = here.pop(sample.id, None)
        for place in dict.fromkeys(here.values()):
            if place != ran:
                self._tell(place, sample.id, sample.out_ids)
        if not here:
            self._at.pop(sample.id.group_id, None)

    def forget(self, group_ids: Iterable[GroupId]) -> None:
        """The groups were given up."""
        for group_id in group_ids:
            self._at.pop(group_id, None)

    def _tell_all(self, group_id: GroupId, place: _Place) -> None:
        if (group := self._samples.groups.get(group_id)) is not None:
            for sample in group.done.values():
                self._tell(place, sample.id, sample.out_ids)
        for id in self._at[group_id]:
            self._tell(place, id, self._samples.recorded(id))

    def _tell(self, place: _Place, id: SampleId, tokens: np.ndarray) -> None:
        instance, life = place
        worker = self._instances[instance]
        if len(tokens) and worker.life == life:
            worker.post(worker.know, id, tokens[:MOST_TOKENS])
