"""PEFT folders: ours are peft's to read and peft's are ours, and what the decoder does not compute is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dora_jax.models import decoder, hf, lora, peft
from dora_jax.models.lora_config import Lora
from dora_jax.ops.segment_attention import segment_attention
from tests.fakes.hf_folder import QWEN3, folder

LORA = Lora(rank=2, alpha=3.0, targets=("attention", "mlp"))


def adapter(cfg=QWEN3):
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), lora.abstract(cfg, LORA))


def edited(path, **fields):
    file = path / peft.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return path


@pytest.fixture
def saved(tmp_path):
    peft.save(tmp_path / "adapter", QWEN3, LORA, adapter(), "base")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"use_dora": True}, "adapter_config.json has use_dora=True; the decoder computes False only"),
        ({"r": 4}, "has r=4, and lora.rank is 2: they must be equal"),
        ({"lora_alpha": 32}, "has lora_alpha=32, and lora.alpha is 3: they must be equal"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank_pattern="),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_is_refused(saved, fields, message):
    with pytest.raises(ValueError, match=message):
        peft.check(edited(saved, **fields), LORA)


@pytest.mark.slow
def test_a_folder_comes_back_and_no_tensor_is_passed_over(saved, tmp_path):
    jax.tree.map(np.testing.assert_array_equal, peft.load(saved, QWEN3, LORA, 0), adapter())
    file = saved / peft.TENSORS
    tensors = load_file(file)
    some = {name: x for name, x in tensors.items() if ".q_proj." in name}
    save_file(some, file)
    found = peft.load(saved, QWEN3, LORA, 5)["layers"]  # the others are fresh
    np.testing.assert_array_equal(found["q_proj"]["b"], adapter()["layers"]["q_proj"]["b"])
    assert not found["up_proj"]["b"].any() and found["up_proj"]["a"].any()
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": np.zeros((2, 4), np.float32)}, file)
    with pytest.raises(ValueError, match=r"holds base_model.model.lm_head.lora_A.weight, which is no matrix"):
        peft.load(saved, QWEN3, LORA, 0)
    with pytest.raises(ValueError, match="base.safetensors|holds no adapter_config.json, so it is no PEFT folder"):
        peft.load(tmp_path, QWEN3, LORA, 0)


@pytest.mark.slow
def test_peft_reads_our_folders_and_computes_the_same(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = pytest.importorskip("peft")
    cfg = decoder.new_config(
        "qwen3", vocab_size=32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=24
    )
    folder(tmp_path / "base", cfg)
    peft.save(tmp_path / "ours", cfg, LORA, adapter(cfg), str(tmp_path / "base"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = theirs.PeftModel.from_pretrained(model, tmp_path / "ours")
    tokens = np.random.default_rng(0).integers(0, 32, (2, 9))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    attend = segment_attention(jnp.zeros((2, 9), jnp.int32), positions)

    def logits(found):
        options = dict(adapters=found, adapter_gain=LORA.gain)
        base = hf.load(tmp_path / "base")[1]
        return decoder.logits(cfg, base, decoder.forward(cfg, base, jnp.asarray(tokens), positions, attend, **options))

    np.testing.assert_allclose(logits(adapter(cfg)), expected, atol=2e-4)
    model.save_pretrained(tmp_path / "theirs")  # and the way back
    np.testing.assert_array_equal(logits(peft.load(tmp_path / "theirs", cfg, LORA, 0)), logits(adapter(cfg)))
