"""A trainer and rollout replicas of two processes each, and a network between them that loses, repeats and reorders."""

import collections
import typing

import jax
import numpy as np

from dora_jax.base.box_digest import LeafBox, box_sums, combined
from dora_jax.publish import HostWeights
from dora_jax.runtime.transfer import slices
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.runtime.transfer.transfer_manifest import Manifest, WireError, check
from dora_jax.runtime.transfer.weight_distribution import WIRE, WeightDistribution
from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
LIKE = {"w": jax.ShapeDtypeStruct((2,), np.float32, sharding=ONE)}


class CountingWire:
    """Gives what was offered; knows what was never released."""

    offers: typing.ClassVar[dict] = {}

    def __init__(self, host):
        self.host = host
        self.failing = False
        self.mine = {}

    def give(self, key, pieces):
        assert key not in self.mine
        number = len(CountingWire.offers) + 1
        CountingWire.offers[number] = pieces
        self.mine[key] = number
        mine = tuple(pieces) if self.host == 0 else ()  # one process sends what all of them hold
        return Manifest(
            key=key, sender="trainer", incarnation=1, address="here", number=number, shards=mine, crc32=(0,) * len(mine)
        )

    def release(self, key):
        self.mine.pop(key, None)

    def take(self, manifests, wanted, key, timeout_s):
        if self.failing:
            raise WireError("the peer is gone")
        check(manifests, wanted, key)
        return CountingWire.offers[manifests[0].number]


class World:
    def __init__(self, name, epoch, hosts, stored=None):
        self.name, self.epoch = name, epoch
        self.stored = stored
        self.build(hosts)

    def build(self, hosts):
        """New processes, that hold nothing."""
        self.wires = [CountingWire(h) for h in range(hosts)]
        self.hosts = [WeightEndpoint(wire.host, wire, HostWeights(), LIKE, self.stored) for wire in self.wires]

    def up(self):
        shards = tuple(host.wanted for host in self.hosts)
        return ex.WorldUp(world=self.name, epoch=self.epoch, shards=shards, trainer=self.name == "trainer")


def weights(version):
    return slices.offered({"w": jax.device_put(np.full(2, version, np.float32), ONE)})


class Net:
    """A trainer and replicas of two processes; carries messages in any order, twice, or not at all."""

    def __init__(self, replicas=2, paths=(WIRE,), hosts=2, fanout=2):
        self.brain = WeightDistribution(paths, fanout=fanout)
        self.stored = {}
        self.messages = []  # (world, epoch, host, command), or a fact
        self.outcomes = []
        self.worlds = {}
        self.fanout = fanout
        for name in ("trainer", *(f"r{i}" for i in range(replicas))):
            self.start(name, 1, hosts)

    def start(self, name, epoch, hosts=2):
        self.worlds[name] = World(name, epoch, hosts, self)
        self.tell(self.worlds[name].up())

    def get(self, version, like):
        """What storage gives."""
        if version not in self.stored:
            raise OSError(f"version {version} is not there")
        return self.stored[version]

    def publish(self, version, store=False, wire=True):
        trainer = self.worlds["trainer"]
        box = LeafBox(np.full(2, version, np.float32), 0, (0,), (2,))
        self.tell(ex.VersionDigest(version=version, digest=combined([box_sums(box)])))
        if store:
            self.stored[version] = weights(version)
            self.tell(ex.Stored(version=version, there=True))
        if wire:
            for host in trainer.hosts:
                host.weights.put(version, weights(version))
            self.tell(ex.Holds(world="trainer", epoch=trainer.epoch, version=version))

    def want(self, name, version):
        self.tell(ex.Wanted(world=name, version=version))

    def tell(self, fact):
        for item in self.brain.step(fact):
            if isinstance(item, ex.Outcome):
                self.happened(item)
            else:
                world = self.worlds[item.world]
                self.messages += [(world.name, world.epoch, host, item) for host in range(len(world.hosts))]
        serving = collections.Counter(source for source, _ in self.brain.transfers.values())
        assert max((serving[name] for name in self.worlds), default=0) <= self.fanout

    def happened(self, outcome):
        self.outcomes.append(outcome)
        if isinstance(outcome, ex.Loaded):
            for host in self.worlds[outcome.world].hosts:
                assert outcome.version in host.weights.versions, "loaded, and a process does not have it"

    def deliver(self, message):
        if not isinstance(message, tuple):
            self.tell(message)
            return
        name, epoch, number, command = message
        world = self.worlds[name]
        if world.epoch != epoch:
            return  # its process is gone
        host = world.hosts[number]
        if isinstance(command, ex.Commit) and host.staged == command.key:
            assert all(
                host.staged == command.key or command.key.version in host.weights.versions for host in world.hosts
            ), "half an update"
        fact = host.execute(ex.CODEC.decode(ex.CODEC.encode(command)))
        for host in world.hosts:
            for version in host.weights.versions:
                assert host.weights.get(version, None)["w"].at(((0,), (2,))).tolist() == [version, version]
        if fact is not None:
            self.messages.append(ex.CODEC.decode(ex.CODEC.encode(fact)))

    def run(self):
        while self.messages:
            self.deliver(self.messages.pop(0))
        return self

    def kill(self, name, rebuild=True):
        """All processes of a world are gone, the controller hears of it, another epoch comes up."""
        epoch = self.worlds[name].epoch
        self.worlds[name].epoch = -epoch  # nothing reaches the dead
        self.worlds[name].build(len(self.worlds[name].hosts))
        self.tell(ex.WorldDown(world=name, epoch=epoch))
        if rebuild:
            self.start(name, epoch + 1, len(self.worlds[name].hosts))

    def offers(self):
        return [key for world in self.worlds.values() for wire in world.wires for key in wire.mine]

    def commands(self, kind):
        return [m for m in self.messages if isinstance(m, tuple) and isinstance(m[3], kind)]
