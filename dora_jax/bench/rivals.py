"""The rivals of bench.decode and bench.train_step, each in an interpreter that has it; imports nothing of ours.

    PYTHON rivals.py transformers|transformers_bf16|openvino|torch_step|tunix FOLDER

Reads one JSON line a work, answers with a line: of a sampler its seconds, or, where the work has "greedy": true, the
tokens of each sample.

transformers: `generate`, in float32 or in bfloat16. A short part of the work comes first, with one thread and with all: it
warms up, and the better number of threads then does the work, because torch's barriers can cost a hundredfold where
another process takes a core. Of a mixture of experts the part is done by each implementation of the experts as well,
and the fastest does the work. Log-probs come from the logits that generate returns.

openvino: the same `generate` over OpenVINO's compiled graph (optimum-intel), in float32, KV too: by default it rounds
both where the CPU allows.

torch_step: transformers and torch make an update a line; (seconds, loss, gradient norm) is the answer. The first update
of a work starts from the weights of the folder. The time is the better of one thread and all; each line makes one
update with either.

tunix: Tunix's sampler; answers with seconds. A batch runs until its longest sample ends, with a cache of exactly that
length (attention goes over all of it at every step); a sampler a length is compiled in the untimed round. top_p is
given because without it the temperature is ignored and the sampler is greedy. Two mistakes are kept out. Qwen3 of 0.1.7
rotates by a theta of 1,000,000 whatever its config says: with the folder's theta its greedy tokens are those of
transformers (48 of 48 samples of the quickstart's base, none before). And it takes every pad id for padding, sampled
ones too, so the pad id is none of the vocabulary. A larger cache changes no token.
"""

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable

PART_TOKENS = 16  # new tokens a sample
PART_PROMPT = 8  # tokens of its prompt: most of a work is decoding
EXPERTS = ("eager", "batched_mm", "grouped_mm")  # implementations that run on a CPU


def load_transformers(folder, dtype="float32"):
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def load_openvino(folder):
    from optimum.intel import OVModelForCausalLM

    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return OVModelForCausalLM.from_pretrained(folder, export=True, ov_config=exact)


def generate(model, threads, experts, batch, prompts, lengths, greedy=False):
    """(seconds, tokens of each sample)."""
    import torch

    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    tokens = []

    torch.set_num_threads(threads)
    if experts:
        model.set_experts_implementation(experts)
    began = time.perf_counter()
    for first in range(0, len(lengths), batch):
        ids = torch.tensor(prompts[first : first + batch])
        n = max(lengths[first : first + batch])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n,
                min_new_tokens=n,
                output_logits=True,
                return_dict_in_generate=True,
                **how,
            )
            model.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
        tokens += out.sequences[:, ids.shape[1] :].tolist()
    return time.perf_counter() - began, [ids[:n] for ids, n in zip(tokens, lengths)]


def transformers(folder, load=load_transformers):
    import torch

    torch.manual_seed(0)
    model, most = load(folder).eval(), torch.get_num_threads()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    experts = EXPERTS if "moe" in model.config.model_type else ("",)
    fastest = {}  # batch -> (threads, implementation of the experts)
    for line in sys.stdin:
        work = json.loads(line)
        if (batch := work["batch"]) not in fastest:
            prompts = [prompt[:PART_PROMPT] for prompt in work["prompts"][:batch]]
            part = {"batch": batch, "prompts": prompts, "lengths": [PART_TOKENS] * batch}
            taken = {how: generate(model, *how, **part)[0] for how in itertools.product((1, most), experts)}
            fastest[batch] = min(taken, key=taken.__getitem__)
            if any(experts):
                timings = ", ".join(f"{name} on {threads} {took:.2f} s" for (threads, name), took in taken.items())
                print(f"transformers, {PART_TOKENS} tokens a sample: {timings}", file=sys.stderr)
        seconds, tokens = generate(model, *fastest[batch], **work)
        print(json.dumps(tokens if work.get("greedy") else seconds), flush=True)


def update(model, optimizer, batch):
    import torch

    optimizer.zero_grad(set_to_none=True)
    logprobs = torch.log_softmax(model(input_ids=batch["tokens"]).logits, -1)  # causal: padding comes last
    chosen = logprobs.gather(-1, batch["targets"][..., None])[..., 0]
    ratio, adv = torch.exp(chosen - batch["behavior_logprobs"]), batch["advantages"]
    per_token = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2))
    loss = torch.where(batch["mask"], batch["loss_weights"] * per_token, 0.0).sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm.item()


def torch_step(folder, narrow=False):
    """narrow: under autocast to bfloat16."""
    import torch

    name, most = None, torch.get_num_threads()
    for line in sys.stdin:
        work = json.loads(line)
        if work["name"] != name:
            name, model = work["name"], load_transformers(folder).train()
            model.config.use_cache = False
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0)
        batch = {key: torch.tensor(x) for key, x in work.items() if key != "name"}
        seconds, results = [], []
        for threads in sorted({most, 1}, reverse=True):
            torch.set_num_threads(threads)
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                results.append(update(model, optimizer, batch))
            seconds.append(time.perf_counter() - began)
        print(json.dumps([min(seconds), *results[0]]), flush=True)


OUTSIDE = 1 << 20  # of every vocabulary


class Ids:
    """A "text" is the ids themselves, as characters from 1,000 on; no id is put before them, none ends a sample."""

    def encode(self, text, **_):
        return [ord(c) - 1000 for c in text]

    def decode(self, ids, **_):
        return ""

    def bos_id(self):
        return 0

    def eos_id(self):
        return OUTSIDE

    def pad_id(self):
        return OUTSIDE


def load_tunix(folder):
    """The sampler whose cache has so many tokens."""
    import jax
    from tunix.generate import sampler
    from tunix.models.qwen3 import model as qwen3
    from tunix.models.qwen3 import params

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
    qwen3.apply_rope = functools.partial(qwen3.apply_rope, rope_theta=config.rope_theta)
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = params.create_model_from_safe_tensors(folder, config, mesh)
    sizes = dict(num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    return functools.cache(lambda n: sampler.Sampler(model, Ids(), sampler.CacheConfig(cache_size=n, **sizes)))


def sample(sampler_of, batch, prompts, lengths, greedy=False):
    """(seconds, tokens of each sample)."""
    how, tokens, began = {"temperature": 0.0} if greedy else {"temperature": 1.0, "top_p": 1.0}, [], time.perf_counter()
    for first in range(0, len(lengths), batch):
        texts = ["".join(chr(1000 + i) for i in ids) for ids in prompts[first : first + batch]]
        n = max(lengths[first : first + batch])
        out = sampler_of(len(prompts[0]) + n)(
            texts,
            max_generation_steps=n,
            max_prompt_length=len(prompts[0]),
            eos_tokens=[OUTSIDE],
            seed=first,
            return_logprobs=True,
            **how,
        )
        assert all(len(each) == n for each in out.tokens) and len(out.logprobs[0]) == n
        tokens += [each.tolist() for each in out.tokens]
    return time.perf_counter() - began, [ids[:n] for ids, n in zip(tokens, lengths)]


def tunix(folder):
    compiled, sampler_of = set(), load_tunix(folder)
    for line in sys.stdin:
        work = json.loads(line)
        if line not in compiled and not work.get("greedy"):
            sample(sampler_of, **work)
            compiled.add(line)
        seconds, tokens = sample(sampler_of, **work)
        print(json.dumps(tokens if work.get("greedy") else seconds), flush=True)


if __name__ == "__main__":
    load_bf16 = functools.partial(load_transformers, dtype="bfloat16")
    rivals: dict[str, Callable[[str], None]] = {
        "transformers": transformers,
        "transformers_bf16": functools.partial(transformers, load=load_bf16),
        "openvino": functools.partial(transformers, load=load_openvino),
        "torch_step": torch_step,
        "torch_step_bf16": functools.partial(torch_step, narrow=True),
        "tunix": tunix,
    }
    rivals[sys.argv[1]](sys.argv[2])
