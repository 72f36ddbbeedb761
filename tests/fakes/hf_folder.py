"""A small Hugging Face folder with random weights, and a tokenizer where one is asked for."""

import json

import jax
import numpy as np
import tokenizers

from dora_jax.models import decoder, hf

SIZES = dict(vocab_size=32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, d_ff=24)


QWEN3 = decoder.new_config("qwen3", **SIZES)


def draw(cfg, dtype=np.float32):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(dtype), decoder.abstract_params(cfg))


def folder(path, cfg=QWEN3, **options):
    hf.save(path, cfg, draw(cfg), **options)
    return path


def add_tokenizer(path, size=20, **settings):
    vocab = {"<eos>": 0, "<turn>": 1, **{str(i): i for i in range(2, size)}}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab)).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", **settings}))


BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) + ["<|im_start|>", "<|im_end|>"]


def byte_tokenizer(path, template=""):
    """A tokenizer of single bytes beside the control tokens of a chat, in a folder that is there."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(BYTES)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(BYTES[-2:])
    backend.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
