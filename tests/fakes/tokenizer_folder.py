"""A folder with a tokenizer of single characters."""

import json

import tokenizers

TOKENS = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>", "<think>", "a", "b", " ", "\n", "<unk>"]


def folder(path, *, settings=None, vocab=TOKENS, unknown="<unk>", **files):
    """A folder with a character tokenizer; unknown: what other characters become; files: name without .json =
    object."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({t: i for i, t in enumerate(vocab)}, unk_token=unknown))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([t for t in vocab[:4] if t.startswith("<")])
    backend.add_tokens([t for t in vocab[4:] if t == "<think>"])
    backend.enable_truncation(3)
    backend.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "pad_token": "<pad>"} if settings is None else settings
    for name, value in {"tokenizer_config": settings, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path
