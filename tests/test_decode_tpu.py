"""The engine's decode step compiles for every TPU generation on a machine without one, and fits the chip."""

import importlib.util
import os
import subprocess
import sys

import pytest

from dora_jax.bench import decode_tpu

pytestmark = [pytest.mark.slow, pytest.mark.skipif(importlib.util.find_spec("libtpu") is None,
                                                   reason="libtpu is not installed: nothing compiles for TPUs")]
BILLIONS = {"qwen3-8b": 8.19, "qwen3-32b": 32.76}  # parameters, by the model cards


def table(*arguments):
    """The rows of the page: {(model, slice, call): (chips, weights, KV, scratch, share of HBM)}, GiB a chip."""
    out = subprocess.run([sys.executable, "-m", "dora_jax.bench.decode_tpu", *arguments], check=True, text=True,
                         stdout=subprocess.PIPE, env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"}).stdout
    print(out)
    rows = {}
    for line in out.splitlines()[2:]:
        model, topology, chips, call, *numbers, share, _ = line.split()
        rows[model, topology, call] = int(chips), *map(float, numbers), int(share.rstrip("%")) / 100
    return rows


@pytest.mark.parametrize("generation,layers", [("v5e", 0), ("v5p", 0), ("v6e", 0), ("tpu7x", 2)])
def test_the_decode_step_compiles_and_fits(generation, layers):
    """Whole models but for tpu7x, whose compiler takes minutes."""
    rows = table(f"--topologies={generation}", "--calls=decode", f"--layers={layers}")
    assert {model for model, _, _ in rows} == set(decode_tpu.MODELS)
    for (model, _, _), (chips, weights, kv, scratch, share) in rows.items():
        assert share < 0.95
        tokens = decode_tpu.SLOTS * decode_tpu.CONTEXT
        kv_bytes = (layers or decode_tpu.MODELS[model]["n_layers"]) * 2 * 8 * 128 * 2 * tokens  # K and V, bf16
        assert kv == pytest.approx(kv_bytes / chips / 2**30, abs=0.01)
        if not layers:
            assert weights * chips * 2**30 / 2e9 == pytest.approx(BILLIONS[model], rel=0.01)
