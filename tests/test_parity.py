"""Our logits against those of transformers, for each family, tied and untied, in both directions.

`python -m tests.test_parity` writes the golden folders in tests/data/golden again (it needs torch and transformers);
with them parity is also checked where torch is not installed.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors

from dora_jax.models import hf
from tests.fakes.hf_models import FAMILIES, OTHERS, our_logits, tokens, torch_logits, torch_model, transformers

GOLDEN = Path(__file__).parent / "data" / "golden"
TOLERANCE = 1e-4  # f32, CPU


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_both_ways(family, tied, tmp_path):
    library = transformers()
    model = torch_model(family, tied=tied)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="4KB" if tied else "1GB")
    assert (tmp_path / "theirs" / hf.INDEX).exists() == tied
    expected = torch_logits(model, tokens())
    ours = our_logits(tmp_path / "theirs", tokens(), serving=tied)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE)

    cfg, params = hf.load(tmp_path / "theirs")
    hf.save(tmp_path / "ours", cfg, params, tmp_path / "theirs", max_shard_bytes=4096)
    loaded, report = library.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    np.testing.assert_array_equal(torch_logits(loaded.eval(), tokens()), expected)


@pytest.mark.parametrize("family", OTHERS)
def test_experts_and_latents_have_the_same_logits_both_ways(family, tmp_path):
    """The folder as transformers 5 spells it, and as our export does, which is the hub's way."""
    library = transformers()
    model = torch_model(family, tied=False)
    model.save_pretrained(tmp_path / "theirs")
    expected = torch_logits(model, tokens())
    np.testing.assert_allclose(our_logits(tmp_path / "theirs", tokens(), serving=True), expected, atol=TOLERANCE)

    cfg, params = hf.load(tmp_path / "theirs")
    hf.save(tmp_path / "ours", cfg, params, tmp_path / "theirs")
    again, reread = hf.load(tmp_path / "ours")
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, reread, params)
    if family == "longcat_flash":  # its class wants matrices for the experts that compute nothing
        with safetensors.safe_open(tmp_path / "ours" / hf.SINGLE, "numpy") as file:
            assert not [name for name in file.keys() if ".experts.4." in name or ".experts.5." in name]
        hf.save(tmp_path / "padded", cfg, params, tmp_path / "theirs", padded=True)
        jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "padded")[1], params)
    loaded = library.AutoModelForCausalLM.from_pretrained(
        tmp_path / ("padded" if family == "longcat_flash" else "ours")
    )
    np.testing.assert_array_equal(torch_logits(loaded.eval(), tokens()), expected)


@pytest.mark.parametrize("family", FAMILIES + OTHERS)
def test_golden_logits(family):
    golden = np.load(GOLDEN / family / "logits.npz")
    np.testing.assert_allclose(our_logits(GOLDEN / family, golden["tokens"]), golden["logits"], atol=TOLERANCE)


def write_goldens() -> None:
    """One folder a family: qwen2 tied, llama in the spelling of transformers 4, all but these two in bf16."""
    import torch

    for family in FAMILIES + OTHERS:
        folder = GOLDEN / family
        model = torch_model(family, tied=family == "qwen2")
        if family == "qwen3" or family in OTHERS:
            model = model.bfloat16()
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        if family == "llama":
            config = json.loads((folder / "config.json").read_text())
            rope = config.pop("rope_parameters")
            config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": config.pop("dtype")}
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        read_back = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        np.savez(folder / "logits.npz", tokens=tokens(), logits=torch_logits(read_back, tokens()))


if __name__ == "__main__":
    write_goldens()
