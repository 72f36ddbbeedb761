"""Whether the log-probs of an instance agree with the trainer's, at the same version.

    StepDone -> the gaps that the step's trainer has measured (sample_gaps.py) -> `mark_unhealthy` of an instance

An instance with damaged weights, or with a kernel that computes something else, samples from another policy than it
says. Consumes gaps and the facts of samples; produces suspicions, which become InstanceUnhealthy. Laws: a sample that
more than one instance ran says nothing of either; where no instance agrees with the trainer, none is blamed; an
incarnation that is over is judged as long as a group that it sampled waits to be trained. Rounding in
bfloat16 moves a mean gap by 0.02 nats at most, and a single token does not move a mean over ENOUGH_TOKENS far.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.sample_gaps import SampleGap, SeenGaps
from dora_jax.runtime.common.seams import RunPlugin
from dora_jax.runtime.common.worker import StepDone
from dora_jax.types import GroupId, InstanceId, Version, is_training

if TYPE_CHECKING:
    from dora_jax.runtime.common.seams import Notify, RolloutWorker

ENOUGH_TOKENS = 64  # of an instance, the newest, before it is judged

Incarnation = tuple[InstanceId, int]


class Agreement(RunPlugin):
    """Listens to records, observes the loop, and reports each instance that is put in quarantine, whatever for. A
    sample whose instance an earlier process knew is not judged."""

    def __init__(
        self,
        limit: float,
        seen: SeenGaps | None,
        instances: Sequence[RolloutWorker],
        notify: Notify,
        write: Callable[[dict[str, Any]], object],
    ):
        """limit: nats a token; the mean of an instance's newest tokens may not exceed it. seen: None: no instance is
        judged. write: a row of the timeline."""
        self._limit, self._seen, self._notify, self._write = limit, seen, notify, write
        self._instances: Mapping[InstanceId, RolloutWorker] = {worker.instance: worker for worker in instances}
        self._ran: dict[GroupId, dict[int, Incarnation | None]] = {}  # None: more than one incarnation ran the sample
        self._newest: dict[Incarnation, collections.deque[SampleGap]] = collections.defaultdict(collections.deque)
        self._blamed: set[Incarnation] = set()
        self._warned = False

    def event(self, event: ev.Event, commands: Sequence[ev.Command]) -> None:
        for command in commands:
            if isinstance(command, ev.Quarantine):
                steps: dict[Version, list[GroupId]] = {}
                for group_id, step in zip(command.group_ids, command.steps, strict=True):
                    steps.setdefault(step, []).append(group_id)
                each = (f"step {step}: groups {', '.join(map(str, groups))}" for step, groups in sorted(steps.items()))
                sentence = (
                    f"rollout {command.instance} is in quarantine ({command.reason}). Nothing of what it sampled "
                )
                sentence += "will be trained; "
                trained = "; ".join(each)
                more = f"groups that it sampled a part of were trained in {trained}"
                sentence += more if trained else "no group was trained with it"
                self._notify(sentence)
                self._write({"quarantine": command.instance, "reason": sentence})
        if self._seen is None:
            return
        match event:
            case ev.SampleStarted(id=id, instance=instance, incarnation=incarnation) if is_training(id.group_id):
                self._ran.setdefault(id.group_id, {})[id.index] = (instance, incarnation)
            case ev.SampleResumed(id=id, instance=instance, incarnation=incarnation):
                ran = self._ran.get(id.group_id, {})
                if ran.get(id.index) != (instance, incarnation):
                    ran[id.index] = None
            case ev.SampleMoved(id=id) if id.group_id in self._ran:
                self._ran[id.group_id][id.index] = None
            case ev.SampleCancelled(id=id):
                self._ran.get(id.group_id, {}).pop(id.index, None)
            case ev.GroupFailed(group_id=group_id) | ev.GroupScored(group_id=group_id, trainable=False):
                self._ran.pop(group_id, None)

    def record(self, record: Any) -> None:
        if self._seen is None or not isinstance(record, StepDone):
            return
        for gap in self._seen(record.version):
            incarnation = self._ran.get(gap.id.group_id, {}).get(gap.id.index)
            if incarnation is not None and incarnation not in self._blamed:
                newest = self._newest[incarnation]
                newest.append(gap)
                while sum(g.tokens for g in newest) - newest[0].tokens >= ENOUGH_TOKENS:
                    newest.popleft()
        for group in record.groups:
            self._ran.pop(group.group_id, None)
        if over := [
            (i, incarnation) for i, incarnation in self._newest if self._instances[i].incarnation != incarnation
        ]:
            untrained = {incarnation for samples in self._ran.values() for incarnation in samples.values()}
            for each in over:
                if each not in untrained:
                    del self._newest[each]
        means = {}  # nats a token
        for of, gaps in self._newest.items():
            tokens = sum(g.tokens for g in gaps)
            if tokens >= ENOUGH_TOKENS:
                means[of] = sum(g.gap * g.tokens for g in gaps) / tokens
        far = {of: mean for of, mean in means.items() if mean > self._limit}
        if not far:
            return
        if len(far) == len(means) and len({i for i, _ in far}) == len(self._instances) and not self._warned:
            self._warned = True
            self._notify(
                f"the log-probs of every instance differ from the trainer's at the same version, by "
                f"{min(far.values()):.3g} nats a token or more, above trainer.max_instance_mismatch={self._limit}: no "
                "instance is blamed; trainer.max_mismatch would stop such a run"
            )
        if len(far) < len(means):
            for (instance, number), mean in far.items():
                gaps = self._newest.pop((instance, number))
                self._blamed.add((instance, number))
                self._instances[instance].mark_unhealthy(
                    number,
                    f"its log-probs differ from the trainer's by {mean:.3g} nats a token at the same version, measured "
                    f"on {sum(g.tokens for g in gaps)} tokens of version {gaps[-1].version}, above "
                    f"trainer.max_instance_mismatch={self._limit}",
                )
