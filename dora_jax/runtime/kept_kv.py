"""Which instance keeps the KV of each episode that waits for its environment.

The coordinator uses it, on the main thread. Laws: an episode goes on with the KV that an instance keeps, wherever it goes
on; KV of an episode that has ended is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dora_jax.rollout.migrate import InFlightSample
from dora_jax.runtime.common.seams import RolloutWorker
from dora_jax.types import GroupId, InstanceId, SampleId


class KeptKV:
    def __init__(self, instances: Mapping[InstanceId, RolloutWorker]):
        self._instances = instances
        self._keeper: dict[SampleId, InstanceId] = {}

    def keep(self, held: InFlightSample, instance: InstanceId) -> bool:
        """Notes an episode whose turn has ended there. False: its KV has come along, and nothing is kept."""
        if not held.n_pages:
            self._keeper[held.id] = instance
        return not held.n_pages

    def resume(self, held: InFlightSample, worker: RolloutWorker, attempt: int) -> None:
        """The sample goes on at this instance."""
        keeper = self._keeper.pop(held.id, worker.instance)
        if keeper == worker.instance:
            worker.post(worker.resume, held, attempt)
        else:
            source = self._instances[keeper]
            source.post(source.forward, held, worker, attempt)

    def forget(self, ids: Iterable[SampleId]) -> None:
        for id in ids:
            if (keeper := self._keeper.pop(id, None)) is not None:
                worker = self._instances[keeper]
                worker.post(worker.forget, id)

    def retained(self) -> set[GroupId]:
        """Groups of whose episodes an instance keeps KV."""
        return {id.group_id for id in self._keeper}

    def forget_group(self, group_id: GroupId) -> None:
        self.forget([id for id in self._keeper if id.group_id == group_id])
