"""Folders whose weights are packed in 8 or 4 bits: read as the numbers that they stand for, and exported in 16 or 32."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from dora_jax.models import decoder, hf, sharding
from dora_jax.models.families.config import Experts, Latent
from dora_jax.models.hf_config import read_config
from tests.fakes.hf_folder import folder
from tests.fakes.packed_folder import VALUES, as_fp8, as_mxfp4

SIZES = dict(vocab_size=32, d_model=160, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=40, d_ff=192)
GPT_OSS = decoder.new_config(
    "gpt_oss", **SIZES, tie_embeddings=False, experts=Experts(count=4, per_token=2, width=192, biased=True)
)
DEEPSEEK = decoder.new_config(
    "deepseek_v3",
    **SIZES | {"n_kv_heads": 4},
    tie_embeddings=False,
    latent=Latent(kv_rank=136, rope_dim=8, nope_dim=32, v_dim=32, q_rank=24),
    experts=Experts(count=4, per_token=2, width=130, shared=1, first_dense=1, router="sigmoid", corrected=True),
)


@pytest.fixture(scope="module", params=["mxfp4", "fp8"])
def twins(request, tmp_path_factory):
    """(a packed folder, the same numbers in float32)."""
    where = tmp_path_factory.mktemp(request.param)
    folder(where / "plain", GPT_OSS if request.param == "mxfp4" else DEEPSEEK)
    (as_mxfp4 if request.param == "mxfp4" else as_fp8)(where / "plain", where / "packed", where / "twin")
    return where / "packed", where / "twin"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_are_those_of_their_twin(twins, dtype):
    """Also by parts, on a mesh that cuts experts, widths and inner dimensions."""
    cfg, expected = hf.load(twins[1], dtype=jnp.dtype(dtype))
    for mesh in (None, sharding.make_mesh(jax.devices()[:8], 1, 2, 2, expert=2)):
        again, params = hf.load(twins[0], mesh, jnp.dtype(dtype))
        assert again == cfg
        jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_an_export_of_packed_weights_is_plain(twins, tmp_path):
    cfg, params = hf.load(twins[0], dtype=jnp.bfloat16)
    hf.save(tmp_path / "out", cfg, params, twins[0])
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    stored = load_file(tmp_path / "out" / hf.SINGLE)
    assert {x.dtype for name, x in stored.items() if "correction" not in name} == {np.dtype(ml_dtypes.bfloat16)}
    again, reread = hf.load(tmp_path / "out", dtype=jnp.bfloat16)
    assert again == cfg
    narrow = {  # gains, sinks and routers too, which a run keeps in float32
        name: jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), x) for name, x in params.items()
    }
    for tree in (reread, narrow):
        for name, layers in tree.items():
            if "layers" in name:
                layers.pop("router_bias", None)  # float32 in every folder
    jax.tree.map(np.testing.assert_array_equal, reread, narrow)


def test_what_a_scale_does_not_fit_is_refused_by_name(tmp_path):
    folder(tmp_path / "plain", DEEPSEEK)
    as_fp8(tmp_path / "plain", tmp_path / "packed", tmp_path / "twin", cut=1)
    with pytest.raises(
        ValueError, match=r"holds model.* of shape .*, to which .*_scale_inv of shape .* does not belong"
    ):
        hf.load(tmp_path / "packed")
    file = tmp_path / "packed" / "config.json"
    for described in ({"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [64, 64]}, {"bits": 4}):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": described}))
        with pytest.raises(ValueError, match="has quantization_config=.* for each square of 128, are read"):
            read_config(tmp_path / "packed")


def test_every_half_byte_is_the_number_of_its_code(twins):
    """The twin has all sixteen numbers of e2m1, times powers of two that differ from group to group."""
    if twins[0].parent.name.startswith("mxfp4"):
        stored = load_file(twins[1] / hf.SINGLE)["model.layers.0.mlp.experts.down_proj"]
        assert set(np.unique(stored / np.exp2(np.floor(np.log2(np.abs(stored) + 1e-30))))) <= {
            -1.5,
            -1.0,
            0.0,
            1.0,
            1.5,
        }
        assert len(np.unique(np.abs(stored))) > len(VALUES)
