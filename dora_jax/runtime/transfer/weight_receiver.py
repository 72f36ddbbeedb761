"""Stage 6, publish, between worlds: the part of one process, of the trainer or of an instance.

    Offer -> Offered   Pull | Read -> Staged   Commit -> Committed   Abort, Release -> nothing

Consumes the commands of `weight_distribution.WeightDistribution`, produces its facts; what arrives waits in host memory
until an engine takes it. Laws: what is staged is reported with its sums, by which the controller knows it; what is
staged becomes visible at its commit, all at once; a process receives one version at a time: a command of an older
transfer is refused, and a command that was carried out already is answered again, so that commands may come twice, late
and in any order.
"""

from __future__ import annotations

import dataclasses
import threading

import jax

from dora_jax.base.box_digest import Sums
from dora_jax.models import sharding
from dora_jax.models.families.config import ModelConfig
from dora_jax.publish import HostWeights, Tree
from dora_jax.runtime.common.seams import WeightStore
from dora_jax.runtime.transfer import slices
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.device_transfer import Wire
from dora_jax.runtime.transfer.transfer_manifest import Key, WireError, words
from dora_jax.types import Version


class WeightEndpoint:
    """`host`: this process's number in its world. `wire` None: storage alone. `weights`: the versions that it serves
    and keeps. `like`: the weights that it needs, as stacked ShapeDtypeStructs with shardings; None: it only serves.
    `stored`: where `Read` reads from. Any thread may call it."""

    def __init__(
        self,
        host: int,
        wire: Wire | None,
        weights: HostWeights,
        like: Tree | None = None,
        stored: WeightStore | None = None,
    ):
        self.weights = weights
        self._host = host
        self._wire = wire
        self._like = like
        self.wanted = slices.wanted(like) if like is not None else ()
        self._stored = stored
        self._offers: dict[Key, ex.Offered] = {}
        self._released: dict[str, int] = {}  # receiver -> the newest transfer whose offer is over
        self._newest: Key | None = None  # of the transfers that were begun or aborted here
        self._phase: type | None = None  # what was answered to it last, or is to be; None: it was aborted
        self._staged: Tree | None = None
        self._sums: tuple[Sums, ...] = ()  # of what was staged last
        self._lock = threading.Lock()

    def execute(self, command: ex.Command) -> ex.Fact | None:
        """Returns the answer; None: there is none. Pull and Read take their time; an Abort that comes meanwhile ends
        their effect."""
        try:
            match command:
                case ex.Offer(key=key):
                    with self._lock:
                        if key.sequence <= self._released.get(key.receiver, 0):
                            return None  # the command came late: its transfer is over
                        if key not in self._offers:
                            weights = self.weights.get(key.version, None)
                            manifests = [
                                self._wire_for(key).give(_of_host(key, host), slices.pieces(weights, shards))
                                for host, shards in enumerate(command.wanted)
                            ]
                            self._offers[key] = ex.Offered(key=key, host=self._host, manifests=tuple(manifests))
                        return self._offers[key]
                case ex.Pull() | ex.Read():
                    return self._stage(command)
                case ex.Commit(key=key):
                    with self._lock:
                        self._check(key)
                        if self._phase is ex.Staged:
                            if self._staged is None:
                                raise WireError(f"{words(key)} is to be committed and is not staged")
                            self.weights.put(key.version, self._staged)
                            self._phase, self._staged = ex.Committed, None
                    return ex.Committed(key=key, host=self._host)
                case ex.Abort(key=key):
                    with self._lock:
                        if self._newest is None or key.sequence >= self._newest.sequence:
                            self._newest, self._phase, self._staged = key, None, None
                case ex.Release():
                    self._release(command)
            return None
        # the failures of one transfer, which concern no other
        except (WireError, OSError, KeyError, ValueError, jax.errors.JaxRuntimeError) as error:
            reason = " ".join(str(error).split())
            return ex.TransferFailed(key=command.key, host=self._host, reason=f"process {self._host}: {reason}")

    def settle(self) -> tuple[Version, ...]:
        """Ends every transfer under way: the controller that asked for them is gone. Returns the versions that are
        held."""
        for offered in tuple(self._offers.values()):
            self._release(ex.Release(world="", key=offered.key, hosts=len(offered.manifests)))
        with self._lock:
            self._newest = self._phase = self._staged = None
        return self.weights.versions

    @property
    def staged(self) -> Key | None:
        """The transfer that has arrived and waits for its commit."""
        return None if self._staged is None else self._newest

    # ------------------------------------------------------------ private

    def _release(self, release: ex.Release) -> None:
        key = release.key
        with self._lock:
            self._released[key.receiver] = max(key.sequence, self._released.get(key.receiver, 0))
            self._offers.pop(key, None)
            for host in range(release.hosts):
                self._wire_for(key).release(_of_host(key, host))

    def _wire_for(self, key: Key) -> Wire:
        if self._wire is None:
            raise WireError(f"{words(key)} is to go over the wire, and this process has none")
        return self._wire

    def _stage(self, command: ex.Pull | ex.Read) -> ex.Staged | None:
        key = command.key
        with self._lock:
            if key == self._newest and self._phase is not None:  # the command came twice
                there = self._staged is not None or self._phase is ex.Committed  # else the first call answers
                return ex.Staged(key=key, host=self._host, sums=self._sums) if there else None
            if self._newest is None or key.sequence > self._newest.sequence:
                self._newest, self._phase, self._staged = key, ex.Staged, None
            self._check(key)
        if isinstance(command, ex.Pull):
            wire, manifests = self._wire_for(key), command.manifests[self._host]
            got = wire.take(manifests, self.wanted, _of_host(key, self._host), command.timeout_s)
            tree = slices.received(self._like, got)
        elif self._stored is None:
            raise WireError(f"{words(key)} is to be read from storage, and this process has none")
        else:
            tree = self._stored.get(key.version, self._like)
        sums = slices.sums(tree, self.wanted)
        with self._lock:
            self._check(key)
            self._staged, self._sums = tree, sums
        return ex.Staged(key=key, host=self._host, sums=sums)

    def _check(self, key: Key) -> None:
        if key != self._newest or self._phase is None:
            raise WireError(f"{words(key)} is over here, or has not begun")


def like(cfg: ModelConfig, shardings: Tree, published: Tree) -> Tree:
    """What an engine with these shardings needs of a version, as ShapeDtypeStructs: the tensors that the trainer
    publishes, stacked, split as the engine's are."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        published,
        sharding.stacked_like(cfg, shardings),
    )


# ---------------------------------------------------------------- private


def _of_host(key: Key, host: int) -> Key:
    """The key under which the wire carries the part of one process of the receiver."""
    return dataclasses.replace(key, receiver=f"{key.receiver}/{host}")
