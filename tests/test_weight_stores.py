"""Weight stores: the same verbs in memory, on devices, in a folder and in a bucket."""

import os

import jax
import numpy as np
import pytest

from dora_jax.models import decoder, sharding
from dora_jax.publish import DeviceWeights, HostWeights, placed
from dora_jax.runtime.common.seams import WeightStore
from dora_jax.runtime.transfer import slices
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from tests.fakes import trainer_cases as cases
from tests.fakes.cluster import eventually

ONE = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
SPECS = sharding.param_specs(cases.MODEL, ONE)


def stored(url):
    """A store of one process, which is trainer, controller and receiver."""
    store = StoredWeights(url)
    store.clear()
    return store


STORES = {
    "devices": lambda folder: DeviceWeights(),
    "host": lambda folder: HostWeights(),
    "folder": lambda folder: stored(folder / "a b%20"),
    "bucket": lambda folder: stored(f"file://{folder}"),
}


def published(store: WeightStore, version, params):
    """Publish weights as the trainer of this kind of store does."""
    store.put(version, params if isinstance(store, DeviceWeights) else slices.offered(params))
    if isinstance(store, StoredWeights):
        assert version not in store.versions, "other processes may still be writing"
        store.seal(version)


def received(store: WeightStore, version):
    """Get a version as an engine with these shardings does."""
    if not isinstance(store, StoredWeights):
        return store.get(version, SPECS)
    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), cases.params(), SPECS)
    return placed(store.get(version, like), SPECS)


@pytest.mark.parametrize("kind", STORES)
def test_what_is_put_is_got_until_it_is_dropped(tmp_path, kind):
    store = STORES[kind](tmp_path)
    params = {seed: jax.device_put(cases.params(seed), SPECS) for seed in (3, 4)}
    for version, seed in enumerate(params):
        published(store, version, params[seed])
    assert store.versions == (0, 1)
    for version, seed in enumerate(params):
        got = received(store, version)
        assert decoder.layout_of(got) == decoder.layout_of(params[seed])
        jax.tree.map(np.testing.assert_array_equal, got, params[seed])
    for _ in range(2):  # it may be dropped twice
        store.drop(0)
        assert store.versions == (1,)
    jax.tree.map(np.testing.assert_array_equal, received(store, 1), params[4])
    if isinstance(store, StoredWeights):
        eventually(lambda: not any(name.startswith("v0") for name in names(tmp_path, kind)))
    else:
        with pytest.raises(KeyError, match=r"version 0 is not in the weight store: it holds \[1\]"):
            received(store, 0)


def names(tmp_path, kind):
    """Objects of a store, which may be going; a folder keeps no empty folders either."""
    weights = (tmp_path / "a b%20" if kind == "folder" else tmp_path) / "weights"
    return [
        os.path.relpath(os.path.join(folder, name), weights)
        for folder, folders, files in os.walk(weights)
        for name in (*files, *(folders if kind == "folder" else ()))
    ]
