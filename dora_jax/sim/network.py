"""Links in virtual time: a transfer takes its turn at both ends.

Every instance has one link in and one out; the trainer has as many lanes out as instances could be fed at once.
`publication` follows one version of given size through all its stages.
"""

from __future__ import annotations

import dataclasses
import heapq

from dora_jax.orchestrate.events import LoadWeights
from dora_jax.types import InstanceId, Version

PEER_LOOKS = 4  # instances that are asked for a version's weights before the trainer is


class Network:
    """`peers`: instances serve weights to each other, another one each time, as a cluster's publication spreads its
    transfers."""

    def __init__(self, load_s: float, lanes: int, peers: bool = False):
        self._load_s, self._peers = load_s, peers
        self.holds: dict[InstanceId, set[Version]] = {}
        self._loaded: dict[Version, list[InstanceId]] = {}  # some may have dropped it
        self._loads = 0
        self._trainer = [0.0] * max(1, lanes)  # when each lane is free
        self._out: dict[InstanceId, float] = {}
        self._in: dict[InstanceId, float] = {}

    def loaded(self, id: InstanceId, *versions: Version) -> None:
        """The instance holds these too."""
        self.holds.setdefault(id, set()).update(versions)
        for version in versions:
            self._loaded.setdefault(version, []).append(id)

    def bring(self, now: float, command: LoadWeights) -> float:
        """When the version has arrived, from an instance that holds it if there is one."""
        turn, self._loads = self._loads, self._loads + 1
        self.holds.get(command.instance, set()).discard(command.drop)
        peers = self._loaded.get(command.version, ()) if self._peers else ()
        asked = [peers[(turn + look) % len(peers)] for look in range(min(PEER_LOOKS, len(peers)))]
        source = next((peer for peer in asked if command.version in self.holds.get(peer, ())), None)
        return self.load(now, source, command.instance)

    def load(self, now: float, src: InstanceId | None, dst: InstanceId) -> float:
        """When the weights have arrived; `src` None: from the trainer."""
        if src is not None:
            return self.move(now, src, dst, self._load_s)
        end = max(now, self._in.get(dst, 0.0), self._trainer[0]) + self._load_s
        heapq.heapreplace(self._trainer, end)
        self._in[dst] = end
        return end

    def move(self, now: float, src: InstanceId, dst: InstanceId, seconds: float) -> float:
        """When what takes so long on free links has arrived."""
        end = max(now, self._out.get(src, 0.0), self._in.get(dst, 0.0)) + seconds
        self._out[src] = self._in[dst] = end
        return end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speeds:
    """Bytes of a version that each stage of its publication handles in a second."""

    copy: float  # cast on the trainer's devices, all together
    home: float  # from these to their instances
    out: float  # out of the trainer's instances
    into: float  # into the instances of one instance, and out of them
    join: float  # in these, from pieces into what the devices need
    place: float  # from these to the instance's devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishTimes:
    copy_s: float  # that the next step waits
    home_s: float
    first_s: float  # until the first instance has it in instance memory, everything before included
    last_s: float  # until all have
    pause_s: float  # of an instance


def publication(weight_bytes: float, speeds: Speeds, instances: int) -> PublishTimes:
    """One version to so many instances; those that have it serve the others."""
    copy_s, home_s = weight_bytes / speeds.copy, weight_bytes / speeds.home
    send_s = weight_bytes / min(speeds.into, speeds.out) + weight_bytes / speeds.join
    lanes = max(1, int(speeds.out // speeds.into))
    network = Network(send_s, lanes)
    begin = copy_s + home_s
    free: list[tuple[float, int, InstanceId | None]] = [(begin, -1, None)] * lanes  # when each source can send again
    ends = []
    for instance in range(instances):
        at, order, source = heapq.heappop(free)
        ends.append(network.load(at, source, instance))
        heapq.heappush(free, (ends[-1], order, source))
        heapq.heappush(free, (ends[-1], instance, instance))
    return PublishTimes(
        copy_s=copy_s, home_s=home_s, first_s=min(ends), last_s=max(ends), pause_s=weight_bytes / speeds.place
    )
