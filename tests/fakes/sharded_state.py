"""A small training state, sharded as a trainer has it."""

import jax
import numpy as np

from dora_jax.models import sharding


def like_on(devices):
    """The kinds of arrays that a trainer has: sharded, replicated, of two dtypes, and a count."""
    mesh = sharding.make_mesh(devices, 2, len(devices) // 2, 1)

    def like(shape, dtype, *spec):
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    f32, bf16 = np.float32, jax.numpy.bfloat16
    params = {
        "embed": like((8, 4), f32, "fsdp"),
        "layers": {"w": like((2, 8), bf16, None, ("data", "fsdp")), "norm": like((6,), f32)},
    }
    return {"params": params, "opt_state": [{"mu": params}, {"count": like((), np.int32)}]}


def values_of(like):
    def value(x):
        whole = np.arange(1, 1 + np.prod(x.shape, dtype=int)).reshape(x.shape).astype(x.dtype)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: whole[index])

    return jax.tree.map(value, like)
