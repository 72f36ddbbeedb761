"""Checkpoints without a model: trees to save, their store, and what may happen to a step on the disk."""

import random
import types

import jax
import numpy as np

from dora_jax import config
from dora_jax.models import sharding
from dora_jax.trainer import checkpoint


def tree_on(n_devices):
    """Something to save without a model: one array over the devices, one whole on each."""
    mesh = sharding.make_mesh(jax.devices()[:n_devices], 1, n_devices, 1)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = {
        "w": jax.device_put(np.arange(64, dtype=np.float32) + 1, place),
        "layers": {"norm": jax.device_put(np.ones((2, 3), np.float32), whole)},
    }
    params = jax.tree.map(jax.numpy.asarray, params)
    return types.SimpleNamespace(params=params, state=types.SimpleNamespace(opt_state={"mu": params["w"] * 2}))


def host(tree):
    return jax.tree.map(np.array, tree)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, host(a), host(b))


def save(store, trainer, number):
    store.save(number, trainer.params, trainer.state.opt_state, {"next_group_id": number * 10}, {"reward/mean": 0.5})


def small(scale=1.0):
    """A tree without a mesh, so that a save takes milliseconds."""
    params = {"w": jax.numpy.arange(300.0).reshape(20, 15) * scale, "b": jax.numpy.ones(7)}
    return types.SimpleNamespace(params=params, state=types.SimpleNamespace(opt_state={"mu": params["w"] * 2}))


def store_of(tmp_path, notes=None, **section):
    return checkpoint.Checkpoints(
        tmp_path, config.CheckpointSection(**section), (notes if notes is not None else []).append
    )


def adopting(tmp_path, notes=None):
    return checkpoint.Checkpoints(
        tmp_path, config.CheckpointSection(), (notes if notes is not None else []).append, adopts=True
    )


def killed_before_its_manifest(tmp_path, trainer, number=4):
    """The digests that a save gave, of a step that lacks its manifest now."""
    store = store_of(tmp_path, keep=3)
    save(store, trainer, number)
    ((step, digests),) = store.take_saves()
    store.wait()
    store.close()
    (tmp_path / str(number) / "manifest.json").unlink()
    assert step == number and store.take_saves() == [] and all(digests)
    return digests


def files_of(root):
    return sorted(path for path in root.rglob("*") if path.is_file())


def damaged(path, kind, draw):
    """One fault: a flipped bit, a shorter file, or none at all."""
    content = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
        return
    if kind == "flip" and content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    else:
        del content[draw.randrange(max(1, len(content))) :]
    path.write_bytes(content)


def flipped(root, item):
    """One bit of the arrays of an item."""
    data = max((root / item).rglob("d/*"), key=lambda path: path.stat().st_size)
    damaged(data, "flip", random.Random(1))
