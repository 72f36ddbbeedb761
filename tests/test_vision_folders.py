"""Folders with other parts than text: the text model is read, computed and trained; the other parts go into an export
bit by bit."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dora_jax.models import hf, lora, peft
from dora_jax.models.hf_config import read_config
from dora_jax.models.lora_config import Lora
from tests.fakes.hf_models import NEWER, SIZES, our_logits, tokens, torch_logits, transformers

VISION = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
HUB = {  # what the text_config of a hub's folder says, which is less than transformers writes
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e3,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window_pattern": 6,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, model) with a vision tower, as transformers saves it."""
    library = transformers()
    import torch

    torch.manual_seed(0)
    config = library.Gemma3Config(
        text_config=SIZES | NEWER["gemma3_text"], vision_config=VISION, mm_tokens_per_image=1, eos_token_id=[1, 7]
    )
    model = library.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.3)
    path = tmp_path_factory.mktemp("vision") / "base"
    model.save_pretrained(path)
    return path, model


def of_file(folder):
    return load_file(folder / hf.SINGLE)


def test_the_text_of_a_folder_with_a_vision_tower_is_the_model(saved, capsys):
    path, model = saved
    cfg = hf.check(path)
    assert cfg.family == "gemma3_text" and len(cfg.windows) == 7
    beside = [name for name in of_file(path) if not name.startswith("language_model.")]
    text = f"the text model alone is computed; {len(beside)} tensors beside it"
    assert beside and text in capsys.readouterr().out
    np.testing.assert_allclose(our_logits(path, tokens()), torch_logits(model, tokens()), rtol=0, atol=5e-5)


def test_an_export_has_the_other_parts_bit_by_bit(saved, tmp_path):
    path, _ = saved
    cfg, params = hf.load(path)
    params = {**params, "embed": params["embed"] * 2}
    hf.save(tmp_path / "out", cfg, params, path)
    before, after = of_file(path), of_file(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {"language_model.model.embed_tokens.weight"}
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (path, tmp_path / "out"))
    assert {name: new[name] for name in old if name not in ("text_config", "dtype")} == {
        name: old[name] for name in old if name not in ("text_config", "dtype")
    }
    again = transformers().Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    np.testing.assert_allclose(our_logits(tmp_path / "out", tokens()), torch_logits(again, tokens()), rtol=0, atol=5e-5)
    assert read_config(tmp_path / "out") == cfg


def test_a_text_config_of_the_hub_says_the_same(saved, tmp_path):
    """Fields that it leaves out are those of the text model's class."""
    path, _ = saved
    config = json.loads((path / "config.json").read_text())
    text = {name: x for name, x in config["text_config"].items() if name not in ("rope_parameters", "layer_types")}
    config["text_config"] = text | HUB
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == read_config(path)
    few = ("hidden_size", "intermediate_size", "num_hidden_layers", "rope_scaling", "sliding_window")
    config["text_config"] = {name: config["text_config"][name] for name in few}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cfg = read_config(tmp_path)
    assert (cfg.n_heads, cfg.n_kv_heads, cfg.head_dim, cfg.vocab_size) == (8, 4, 256, 262208) and cfg.tie_embeddings


def test_adapters_of_its_text_are_those_that_peft_reads(saved, tmp_path):
    theirs = pytest.importorskip("peft")
    path, _ = saved
    cfg, base = hf.load(path)
    shape = Lora(rank=2, alpha=3.0, targets=("attention", "mlp"))
    rng = np.random.default_rng(2)
    ours = jax.tree.map(lambda x: rng.normal(size=x.shape, scale=0.3).astype(np.float32), lora.abstract(cfg, shape))
    peft.save(tmp_path / "ours", cfg, shape, ours, str(path))
    jax.tree.map(np.testing.assert_array_equal, peft.load(tmp_path / "ours", cfg, shape, 0), ours)
    hf.save(tmp_path / "merged", cfg, lora.merge(base, ours, shape.gain), path)
    model = transformers().Gemma3ForConditionalGeneration.from_pretrained(path)
    wrapped = theirs.PeftModel.from_pretrained(model, tmp_path / "ours").eval()
    assert not [name for name, _ in wrapped.named_parameters() if "lora" in name and "language_model" not in name]
    np.testing.assert_allclose(our_logits(tmp_path / "merged", tokens()), torch_logits(wrapped, tokens()), atol=2e-4)
    wrapped.save_pretrained(tmp_path / "theirs")
    jax.tree.map(np.testing.assert_array_equal, peft.load(tmp_path / "theirs", cfg, shape, 0), ours)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "has model_type='gemma3' and no text_config"),
        ({"quantization_config": {"bits": 4}}, "has quantization_config="),
    ],
)
def test_what_is_no_such_folder_is_refused(saved, tmp_path, changes, message):
    config = json.loads((saved[0] / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_a_gemma4_folder_keeps_its_towers(tmp_path):
    """Its text has a prefix of its own, and a second embedding; both ends of a turn stop a sample."""
    library = transformers()
    import torch

    torch.manual_seed(0)
    vision = VISION | {"num_key_value_heads": 2, "head_dim": 4, "position_embedding_size": 16}
    del vision["image_size"]
    config = library.Gemma4Config(
        text_config=SIZES | NEWER["gemma4_text"], vision_config=vision, audio_config=None, eos_token_id=[1, 7]
    )
    model = library.Gemma4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.3)
    model.save_pretrained(tmp_path / "base")
    expected = torch_logits(model, tokens())
    np.testing.assert_allclose(our_logits(tmp_path / "base", tokens()), expected, rtol=0, atol=2e-5)
    cfg, params = hf.load(tmp_path / "base")
    hf.save(tmp_path / "out", cfg, params, tmp_path / "base")
    before, after = of_file(tmp_path / "base"), of_file(tmp_path / "out")
    assert {name: x.tobytes() for name, x in before.items()} == {name: x.tobytes() for name, x in after.items()}
    again = library.Gemma4ForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    np.testing.assert_array_equal(torch_logits(again, tokens()), expected)
    assert read_config(tmp_path / "out") == cfg and cfg.family == "gemma4_text" and cfg.per_layer
