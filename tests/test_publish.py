"""Publication: a version never changes, whatever the trainer does to its buffers, and reaches any devices."""

import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.models import decoder, sharding
from dora_jax.publish import DeviceWeights
from tests.fakes import trainer_cases as cases

MODEL = cases.MODEL


def mesh(devices, tensor=1):
    return sharding.make_mesh(devices, 1, len(devices) // tensor, tensor)


def place(seed, on):
    return jax.device_put(cases.params(seed), sharding.param_specs(MODEL, on))


def donate(params):
    """What the step does to the buffers it was given."""
    jax.block_until_ready(jax.jit(lambda p: jax.tree.map(lambda x: x * 0 - 1, p), donate_argnums=0)(params))


def assert_equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_a_version_survives_the_donation_bit_for_bit_on_other_devices():
    trainer, engine = mesh(jax.devices()[:4]), mesh(jax.devices()[4:6], tensor=2)
    params = place(3, trainer)
    want = decoder.serving_layout(cases.params())
    store = DeviceWeights()
    store.put(0, params)
    early = store.get(0, sharding.param_specs(MODEL, engine, "serving"))
    donate(params)
    late = store.get(0, sharding.param_specs(MODEL, engine, "serving"))
    assert_equal(early, want)
    assert_equal(late, want)
    assert late["layers"][0]["q_proj"].sharding.device_set == set(jax.devices()[4:6])


def test_versions_on_the_trainers_own_device_do_not_share_its_buffers():
    one = mesh(jax.devices()[:1])
    params = place(3, one)
    store = DeviceWeights()
    specs = sharding.param_specs(MODEL, one, "serving")
    store.put(0, params)
    first = store.get(0, specs)
    want = jax.tree.map(np.array, first)
    donate(params)
    store.put(1, place(4, one))
    assert_equal(first, want)
    assert not np.array_equal(store.get(1, specs)["embed"], want["embed"])


def test_engines_may_ask_at_the_same_moment():
    params = place(3, mesh(jax.devices()[:4]))
    engines = [sharding.param_specs(MODEL, mesh([device]), "serving") for device in jax.devices()[4:]]
    store, switch_s = DeviceWeights(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(engines)) as threads:
            for version in range(30):
                store.put(version, params)
                got = list(threads.map(lambda engine, version=version: store.get(version, engine), engines))
    finally:
        sys.setswitchinterval(switch_s)
    for weights in got:
        assert_equal(weights, decoder.serving_layout(cases.params(3)))


def test_a_number_is_put_once_and_only_rises():
    store = DeviceWeights()
    params = jax.tree.map(jnp.asarray, cases.params())
    store.put(3, params)
    for version in (3, 2):
        with pytest.raises(ValueError, match=f"version {version} cannot be published after version 3"):
            store.put(version, params)
    store.put(5, params)
    store.drop(5)
    with pytest.raises(ValueError, match="version 5 cannot be published after version 5"):
        store.put(5, params)  # not even when it is gone
    assert store.versions == (3,)


def test_unknown_versions_are_named():
    store = DeviceWeights()
    store.put(3, jax.tree.map(jnp.asarray, cases.params()))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(KeyError, match=r"version 4 is not in the weight store: it holds \[3\]"):
        store.get(4, one)
    store.drop(4)
    assert store.versions == (3,)
    store.drop(3)
    assert store.versions == ()


def test_engines_may_compute_in_bfloat16():
    store = DeviceWeights("bfloat16")
    params = jax.tree.map(jnp.asarray, cases.params())
    store.put(0, params)
    got = store.get(0, jax.sharding.SingleDeviceSharding(jax.devices()[7]))
    assert got["embed"].dtype == jnp.bfloat16 and params["embed"].dtype == jnp.float32
    assert got["embed"].devices() == {jax.devices()[7]}


def test_engines_on_the_trainers_devices_get_one_copy_that_goes_over_no_host(monkeypatch):
    on = mesh(jax.devices()[:2])
    shardings = sharding.param_specs(MODEL, mesh(jax.devices()[:2], tensor=2), "serving")
    store = DeviceWeights("bfloat16")
    store.put(0, place(3, on))
    monkeypatch.setattr("dora_jax.publish.sliced", None)
    first, second = store.get(0, shardings), store.get(0, shardings)
    assert_equal(first, decoder.serving_layout(decoder.copied(cases.params(), jnp.bfloat16)))
    for a, b, where in zip(*map(jax.tree.leaves, (first, second, shardings)), strict=True):
        assert a is b and a.sharding == where
    assert store.get(0, None)["layers"][0]["q_proj"] is first["layers"][0]["q_proj"], "the stacked copy is let go"
    monkeypatch.undo()
    apart = store.get(0, jax.sharding.SingleDeviceSharding(jax.devices()[5]))
    assert_equal(apart, first)


@pytest.mark.parametrize("devices", [slice(0, 4), slice(4, 6)])
def test_engines_that_scan_their_layers_get_them_stacked(devices):
    params = place(3, mesh(jax.devices()[:4]))
    found = jax.devices()[devices]
    scanned = sharding.param_specs(MODEL, mesh(found, tensor=2 if len(found) == 2 else 1), "scanned")
    store = DeviceWeights()
    store.put(0, params)
    got = store.get(0, scanned)
    assert_equal(got, cases.params())
    assert got["layers"]["q_proj"].sharding == scanned["layers"]["q_proj"]


def test_a_second_publication_compiles_nothing(request):
    """Neither its copy nor its digest, nor the layout of engines on the trainer's devices or on others."""
    trainer, engine = mesh(jax.devices()[:2]), mesh(jax.devices()[4:6], tensor=2)
    store, compiled = DeviceWeights("bfloat16"), []
    where = [sharding.param_specs(MODEL, on, "serving") for on in (engine, trainer)]

    def count(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(count)
    request.addfinalizer(lambda: jax.monitoring.unregister_event_duration_listener(count))
    for version in range(2):
        params = place(version, trainer)
        compiled.clear()
        store.put(version, params)
        for shardings in where:
            store.get(version, shardings)
        assert version == 0 or not compiled
