"""The other end of a wire, in a process of its own: `python -m tests.wire_peer`.

A line on stdin names an epoch, a version, a receiver and a sequence number; the tree of that version is offered to it
and the manifest printed as hex. "release" and the same numbers release it.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

MB = 1 << 20


def tree(version):
    """256 KiB of three dtypes, one leaf split over both devices; of version 99: 64 MiB."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(version)
    rows = 16384 if version == 99 else 64
    return {"b": jax.device_put(jnp.array(rng.normal(size=(33,)), jnp.bfloat16), jax.devices()[0]),
            "i": jax.device_put(np.int32(version), jax.devices()[1]),
            "w": jax.device_put(rng.normal(size=(rows, 1024)).astype(np.float32),
                                jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))}


def like(leaves):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), leaves)


def main():
    from dora_jax.runtime.shards import CODEC, Key
    from dora_jax.runtime.wire import Wire

    wire = Wire()
    print(wire.address, flush=True)
    for line in sys.stdin:
        word, epoch, version, receiver, sequence = line.split()
        key = Key(epoch=int(epoch), version=int(version), receiver=receiver, sequence=int(sequence))
        if word == "release":
            wire.release(key)
            print("released", flush=True)
        else:
            print(CODEC.encode(wire.offer(key, tree(key.version))).hex(), flush=True)


if __name__ == "__main__":
    main()
