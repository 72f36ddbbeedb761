"""Which instance runs a sample of which group, and what it receives of the group's other samples, its draft sources.

A group's samples are often on several instances, and drafts are made of the samples that an engine has the tokens of
(rollout/drafts.py). Consumes ends and commands of a run; sends instances that still run samples of a group the tokens
of those that have ended, and, where a sample comes to an instance that ran none of its group, also those that running
samples elsewhere have in the journal. Laws: what is sent of a sample is bounded (MOST_TOKENS); what is lost, repeated
or late changes speed alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.seams import RolloutWorker, RunPlugin
from dora_jax.runtime.common.worker import Finished, TokensElsewhere
from dora_jax.runtime.sample_registry import SampleRegistry
from dora_jax.types import GroupId, InstanceId, SampleId

MOST_TOKENS = 2**16  # of a sample: 256 KiB

_Place = tuple[InstanceId, int]  # an incarnation of an instance


class DraftSources(RunPlugin):
    def __init__(self, instances: Sequence[RolloutWorker], samples: SampleRegistry):
        self._instances, self._samples = {worker.instance: worker for worker in instances}, samples
        self._at: dict[GroupId, dict[SampleId, _Place]] = {}  # where the samples that run were sent last

    def record(self, record: object) -> None:
        if not isinstance(record, Finished):
            return
        sample = record.sample
        here = self._at.get(sample.id.group_id, {})
        ran = here.pop(sample.id, None)
        for place in dict.fromkeys(here.values()):
            if place != ran:
                self._send(place, sample.id, sample.out_ids)
        if not here:
            self._at.pop(sample.id.group_id, None)

    def observe(self, events: Sequence[ev.Event], commands: Sequence[ev.Command]) -> None:
        for command in commands:
            match command:
                case ev.Start(ids=ids, instance=to) | ev.Resume(ids=ids, instance=to) | ev.Move(ids=ids, dst=to):
                    self.sent(ids, to)
                case ev.Cancel(ids=ids):
                    for id in ids:
                        self._at.pop(id.group_id, None)
                case ev.Discard(group_id=group_id):
                    self._at.pop(group_id, None)

    def sent(self, ids: Iterable[SampleId], instance: InstanceId) -> None:
        """The samples start, go on or arrive there."""
        place = instance, self._instances[instance].incarnation
        for id in ids:
            here = self._at.setdefault(id.group_id, {})
            if place not in here.values():
                here.pop(id, None)
                if (group := self._samples.groups.get(id.group_id)) is not None:
                    for sample in group.done.values():
                        self._send(place, sample.id, sample.out_ids)
                for source in here:
                    recorded, _, _ = self._samples.payloads.tokens(source)
                    self._send(place, source, recorded)
            here[id] = place

    def _send(self, place: _Place, id: SampleId, tokens: np.ndarray) -> None:
        instance, incarnation = place
        worker = self._instances[instance]
        if len(tokens) and worker.incarnation == incarnation:
            worker.send(TokensElsewhere(id=id, tokens=tokens[:MOST_TOKENS]))
