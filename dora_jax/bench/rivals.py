"""The rivals of bench.decode and bench.train_step, each in an interpreter that has it; imports nothing of ours.

    PYTHON rivals.py transformers|torch_step|tunix FOLDER

Reads one JSON line a work, answers with a line.

transformers: `generate`; answers with seconds. A short part of the work comes first, with one thread and with all: it
warms up, and the better number of threads then does the work, because torch's barriers can cost a hundredfold where
another process takes a core. Of a mixture of experts the part is done by each implementation of the experts as well,
and the fastest does the work. Log-probs come from the logits that generate returns.

torch_step: transformers and torch make an update a line; (seconds, loss, gradient norm) is the answer. The first update
of a work starts from the weights of the folder. The time is the better of one thread and all; each line makes one
update with either.

tunix: Tunix's sampler; answers with seconds. A batch runs until its longest sample ends, with a cache of exactly that
length (attention goes over all of it at every step); a sampler a length is compiled in the untimed round. top_p is
given because without it the temperature is ignored and the sampler is greedy.
"""

import functools
import itertools
import json
import sys
import time

PART_TOKENS = 16  # new tokens a sample
PART_PROMPT = 8  # tokens of its prompt: most of a work is decoding
EXPERTS = ("eager", "batched_mm", "grouped_mm")  # implementations that run on a CPU


def load_transformers(folder):
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def generate(model, threads, experts, batch, prompts, lengths):
    """Its seconds."""
    import torch

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
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            model.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
    return time.perf_counter() - began


def transformers(folder):
    import torch

    torch.manual_seed(0)
    model, most = load_transformers(folder).eval(), torch.get_num_threads()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    experts = EXPERTS if "moe" in model.config.model_type else ("",)
    fastest = {}  # batch -> (threads, implementation of the experts)
    for line in sys.stdin:
        work = json.loads(line)
        if (batch := work["batch"]) not in fastest:
            prompts = [prompt[:PART_PROMPT] for prompt in work["prompts"][:batch]]
            part = {"batch": batch, "prompts": prompts, "lengths": [PART_TOKENS] * batch}
            taken = {how: generate(model, *how, **part) for how in itertools.product((1, most), experts)}
            fastest[batch] = min(taken, key=taken.__getitem__)
            if any(experts):
                timings = ", ".join(f"{name} on {threads} {took:.2f} s" for (threads, name), took in taken.items())
                print(f"transformers, {PART_TOKENS} tokens a sample: {timings}", file=sys.stderr)
        print(generate(model, *fastest[batch], **work), flush=True)


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


def torch_step(folder):
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
            results.append(update(model, optimizer, batch))
            seconds.append(time.perf_counter() - began)
        print(json.dumps([min(seconds), *results[0]]), flush=True)


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
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = params.create_model_from_safe_tensors(folder, config, mesh)
    sizes = dict(num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    return functools.cache(lambda n: sampler.Sampler(model, Ids(), sampler.CacheConfig(cache_size=n, **sizes)))


def sample(sampler_of, batch, prompts, lengths):
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


def tunix(folder):
    compiled, sampler_of = set(), load_tunix(folder)
    for line in sys.stdin:
        work = json.loads(line)
        if line not in compiled:
            sample(sampler_of, **work)
            compiled.add(line)
        began = time.perf_counter()
        sample(sampler_of, **work)
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    {"transformers": transformers, "torch_step": torch_step, "tunix": tunix}[sys.argv[1]](sys.argv[2])
