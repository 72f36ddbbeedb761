"""8 bits: values come back within half a step, the pool does not overflow, an engine drifts as far as 8 bits go."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.bench import train_step
from dora_jax.models import decoder, sharding
from dora_jax.rollout.quantize import PROJECTIONS, Narrow, narrow, stored
from dora_jax.runtime.assembly.run import engine_of
from dora_jax.types import SampleId
from tests.fakes.engine_rig import CFG, assert_undisturbed, finish, ids, loaded, new_engine, params, submit, weights

pytestmark = pytest.mark.slow  # many compilations


@pytest.mark.parametrize("dtype,step", [(jnp.int8, 1 / 127), (jnp.float8_e4m3fn, 1 / 8)])
def test_projections_come_back_within_half_a_step(dtype, step):
    tree = decoder.serving_layout(params(0))
    back = stored(tree, dtype)
    assert back["embed"] is tree["embed"] and back["final_norm"] is tree["final_norm"]
    for before, after in zip(tree["layers"], back["layers"], strict=True):
        assert before.keys() == after.keys()
        for name, w in before.items():
            if name not in PROJECTIONS:
                assert after[name] is w
                continue
            assert isinstance(after[name], Narrow) and after[name].values.dtype == dtype
            wide = jnp.eye(w.shape[0]) @ after[name]
            largest = np.abs(w).max(0, keepdims=True)
            unit = largest if dtype == jnp.int8 else np.maximum(np.abs(w), largest * 2**-14)
            assert (np.abs(wide - w) <= unit * step / 2 * 1.01).all() and not np.array_equal(wide, w)


def test_a_channel_of_zeros_and_one_of_nan():
    tree = {"layers": [{"q_proj": jnp.array([[0.0, jnp.nan], [0.0, 1.0]])}]}
    for dtype in (jnp.int8, jnp.float8_e4m3fn):
        back = jnp.eye(2) @ stored(tree, dtype)["layers"][0]["q_proj"]
        np.testing.assert_array_equal(back[:, 0], 0)
        assert np.isnan(back[:, 1]).all()


def test_the_pool_does_not_overflow():
    wide = jnp.array([1e4, -1e4, 1.0, jnp.nan])
    got = narrow(wide, jnp.float8_e4m3fn).astype(jnp.float32)
    assert got[:3].tolist() == [448, -448, 1] and np.isnan(got[3])
    assert narrow(wide, jnp.float32) is wide or narrow(wide, jnp.float32).dtype == jnp.float32


def test_drift_is_small_and_is_there():
    sizes = {
        option: np.abs(train_step.gap_of(CFG, params(0), ("float32", *option), 4, 24)[0]).mean()
        for option in (("", ""), ("int8", ""), ("", "float8"))
    }
    assert sizes["", ""] < 1e-5 and 1e-4 < sizes["int8", ""] < 0.05
    assert 1e-4 < sizes["", "float8"] < 0.2
    gap, forward = train_step.gap_of(CFG, params(0), ("float32", "bfloat16", ""), 4, 24)
    assert np.abs(gap).mean() < 1e-4 < forward, "the trainer rounds the same factors"


def test_an_engine_of_a_bfloat16_run_computes_in_bfloat16():
    """From the assembly that a run uses: the pool's type, and a gap no larger than two independent roundings make."""
    config = train_step.config_of("bfloat16", "", "", 4, 24)
    engine = engine_of(config, CFG, sharding.make_mesh(jax.devices()[:1], 1, 1, 1))
    assert {x.dtype.name for x in jax.tree.leaves(engine.device.pool)} == {"bfloat16"}
    gap, forward = train_step.gap_of(CFG, params(0), ("bfloat16", "", ""), 16, 64)
    assert 1e-4 < np.abs(gap).mean() <= 1.5 * forward


def test_narrow_kv_moves_bit_for_bit_and_to_wide_pools():
    there = new_engine(kv="float8", context_block=48)
    small = new_engine(kv="float8", device=1, pages=20, context_block=48)
    for engine in (there, small):
        engine.load(0, weights(engine))
    group = ids((3, 21), size=3)
    alone = {}
    for id in group:
        submit(there, id)
        alone |= finish(there)
    for id in group:
        submit(small, id)
    done = {s.id: s for _ in range(4) for s in small.tick().finished}
    for id in group[::2]:
        if small.holds(id):
            in_flight = small.export(id)
            assert in_flight.k_pages is None or in_flight.k_pages.dtype == jnp.float8_e4m3fn
            there.import_(in_flight)
    done |= finish(there, small)
    for id in group:
        np.testing.assert_array_equal(done[id].out_ids, alone[id].out_ids)
        np.testing.assert_array_equal(done[id].logprobs, alone[id].logprobs)
    id = SampleId(21, 2)
    submit(small, id)
    for _ in range(4):
        small.tick()
    with loaded("a") as a:
        a.import_(small.export(id))
        assert len(finish(a)[id].out_ids) > 0
        submit(a, SampleId(3, 1))
        plain = finish(a)[SampleId(3, 1)]
    assert_undisturbed(plain)
