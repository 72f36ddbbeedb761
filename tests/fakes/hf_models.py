"""Tiny Hugging Face models: a random one of each family, and the config.json of one."""

import pytest

FAMILIES = ("qwen3", "qwen2", "llama")


SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=1,
    bos_token_id=None,
    pad_token_id=0,
)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


EXTRAS = {
    "qwen3": {"head_dim": 6, "rope_theta": 1e6},
    "qwen2": {"rope_theta": 1e4},
    "llama": {"rope_parameters": LLAMA3_ROPE},
}


def transformers():
    pytest.importorskip("torch", reason="torch is not installed: parity is checked against tests/data/golden instead")
    return pytest.importorskip("transformers", reason="transformers is not installed: see tests/data/golden")


def torch_model(family: str, *, tied: bool, seed: int = 0):
    """A tiny random model whose every parameter, gains and biases included, is away from its usual start."""
    library = transformers()
    import torch

    torch.manual_seed(seed)
    config = library.AutoConfig.for_model(family, **SIZES, **EXTRAS[family], tie_word_embeddings=tied)
    model = library.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 300,
}
