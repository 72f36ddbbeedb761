"""Tunix's sampler as a rival of bench/decode.py; runs in its own interpreter and imports nothing of ours.

Reads one JSON line a work, answers with seconds. A batch runs until its longest sample ends, with a cache of exactly
that length (attention goes over all of it at every step); a sampler a length is compiled in the untimed round.
top_p is given because without it the temperature is ignored and the sampler is greedy.
"""

import functools
import json
import sys
import time

import jax
from tunix.generate import sampler
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params


class Ids:
    """A "text" is the ids themselves, as characters from 1,000 on; no id is put before them, none ends a sample."""

    def encode(self, text, **_):
        return [ord(c) - 1000 for c in text]

    def decode(self, ids, **_):
        return ""

    def bos_id(self):
        return 0

    def eos_id(self):
        return 1 << 20

    def pad_id(self):
        return 0


def load(folder):
    with open(f"{folder}/config.json") as file:
        c = json.load(file)
    config = qwen3.ModelConfig(
        num_layers=c["num_hidden_layers"],
        vocab_size=c["vocab_size"],
        embed_dim=c["hidden_size"],
        hidden_dim=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        head_dim=c["head_dim"],
        num_kv_heads=c["num_key_value_heads"],
        norm_eps=c["rms_norm_eps"],
        rope_theta=int(c.get("rope_theta") or c["rope_parameters"]["rope_theta"]),
        use_tied_embedding=c["tie_word_embeddings"],
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return config, params.create_model_from_safe_tensors(folder, config, mesh)


@functools.cache
def loaded():
    return load(sys.argv[1])


@functools.cache
def sampler_of(cache_size):
    config, model = loaded()
    cache = sampler.CacheConfig(
        cache_size=cache_size, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
    return sampler.Sampler(model, Ids(), cache)


def run(batch, prompts, lengths):
    for first in range(0, len(lengths), batch):
        texts = ["".join(chr(1000 + i) for i in ids) for ids in prompts[first : first + batch]]
        n = max(lengths[first : first + batch])
        out = sampler_of(len(prompts[0]) + n)(
            texts,
            max_generation_steps=n,
            max_prompt_length=len(prompts[0]),
            eos_tokens=[1 << 20],
            temperature=1.0,
            top_p=1.0,
            seed=first,
            return_logprobs=True,
        )
        assert all(len(tokens) == n for tokens in out.tokens) and len(out.logprobs[0]) == n


def main():
    compiled = set()
    for line in sys.stdin:
        work = json.loads(line)
        if line not in compiled:
            run(**work)
            compiled.add(line)
        began = time.perf_counter()
        run(**work)
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
