"""A trainer or a replica as a process of its own, in a network namespace where one is named."""

from dataclasses import dataclass

import numpy as np

from dora_jax.runtime.common.codec import Codec
from dora_jax.runtime.transfer import weight_messages as ex
from dora_jax.types import Version

LEAVES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Which versions are there, and are all numbers of each its own?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    versions: tuple[int, ...]
    whole: bool


CODEC = Codec(*ex.RECORDS, ex.Holds, Put, Look, Seen)


def weights(version, size):
    return {f"{i}": np.full(size // LEAVES // 4, version * 100 + i, np.float32) for i in range(LEAVES)}


def like(size):
    """What such weights are, on one device."""
    import jax

    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) for name, x in weights(0, size).items()}


def run(end, size, credential, ip="127.0.0.1", space=None):
    """`credential`: PEM of who it is, by the test's run."""
    if space is not None:
        from tests.fakes.namespaces import enter

        enter(space)
    import jax

    from dora_jax.publish import HostWeights
    from dora_jax.runtime.common.credentials import Credential
    from dora_jax.runtime.transfer import slices
    from dora_jax.runtime.transfer.device_transfer import Wire
    from dora_jax.runtime.transfer.weight_receiver import WeightEndpoint

    jax.config.update("jax_platforms", "cpu")
    host = WeightEndpoint(0, Wire(ip, Credential(credential)), HostWeights(), like(size))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    while True:
        try:
            item = CODEC.decode(end.recv_bytes())
        except EOFError:
            return
        match item:
            case Put(version=version):
                host.weights.put(version, slices.offered(jax.device_put(weights(version, size), one)))
                answer = ex.Holds(world="trainer", epoch=1, version=version)
            case Look():
                versions = host.weights.versions
                whole = all(
                    bool((x.at(((0,), x.shape)) == version * 100 + int(name)).all())
                    for version in versions
                    for name, x in host.weights.get(version, None).items()
                )
                answer = Seen(versions=versions, whole=whole)
            case _:
                answer = host.execute(item)
        if answer is not None:
            end.send_bytes(CODEC.encode(answer))
