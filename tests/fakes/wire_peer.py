"""The other end of a wire, in a process of its own: `python -m tests.fakes.wire_peer`.

A line on stdin names an epoch, a version, a receiver and a sequence number; the arrays of that version are offered to
it and the manifest printed as hex. "release" and the same numbers release it.
"""

import os
import sys

import ml_dtypes
import numpy as np

from dora_jax.runtime.common.credentials import Credential
from dora_jax.runtime.transfer.device_transfer import Wire
from dora_jax.runtime.transfer.slices import shard_of
from dora_jax.runtime.transfer.transfer_manifest import CODEC, Key
from tests.fakes.members import RUN, credential

MB = 1 << 20
NAMED = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "z": np.zeros(5, np.float32)}


def new_wire(role="rollout0", incarnation=1, authority=RUN, encrypted=True):
    return Wire("127.0.0.1", credential(role, incarnation, authority), encrypted)


def peer_wire():
    """In a process of its own, of the test's run."""
    return Wire("127.0.0.1", Credential(os.environ["WIRE_PEER_CREDENTIAL"]))


def arrays(version):
    """256 KiB of three dtypes; of version 99: 64 MiB."""
    rng = np.random.default_rng(version)
    return {
        "b": rng.normal(size=(33,)).astype(ml_dtypes.bfloat16),
        "i": np.array(version, np.int32),
        "w": rng.normal(size=(16384 if version == 99 else 64, 1024)).astype(np.float32),
    }


def whole(named):
    """Each array as one shard."""
    return {shard_of(name, x, ((0,) * x.ndim, x.shape)): x for name, x in named.items()}


def main():
    wire = peer_wire()
    print(wire.address, flush=True)
    for line in sys.stdin:
        word, epoch, version, receiver, sequence = line.split()
        key = Key(epoch=int(epoch), version=int(version), receiver=receiver, sequence=int(sequence))
        if word == "release":
            wire.release(key)
            print("released", flush=True)
        else:
            print(CODEC.encode(wire.give(key, whole(arrays(key.version)))).hex(), flush=True)


NUMBERS = iter(range(1, 1 << 30))


def key(version=3, receiver="rollout0/0", epoch=1):
    return Key(epoch=epoch, version=version, receiver=receiver, sequence=next(NUMBERS))


def assert_same(got, want):
    """What `take` returned; whole arrays."""
    got = {shard.path: x for shard, x in got.items()}
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype and got[name].shape == x.shape and got[name].tobytes() == x.tobytes(), name


def takes(receiver, manifest, named, k, timeout_s=10):
    assert_same(receiver.take(manifest, tuple(whole(named)), k, timeout_s), named)


if __name__ == "__main__":
    main()
