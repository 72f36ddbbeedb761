"""`transformers` generate as a rival of bench/decode.py; runs in its own interpreter and imports nothing of ours.

Reads one JSON line a work, answers with seconds. A short part of the work comes first, with one thread and with all:
it warms up, and the better number of threads then does the work, because torch's barriers can cost a hundredfold where
another process takes a core. Of a mixture of experts the part is done by each implementation of the experts as well, and
the fastest does the work. Log-probs come from the logits that generate returns.
"""

import itertools
import json
import sys
import time

import torch
import transformers

PART_TOKENS = 16  # new tokens a sample
PART_PROMPT = 8  # tokens of its prompt: most of a work is decoding
EXPERTS = ("eager", "batched_mm", "grouped_mm")  # implementations that run on a CPU


def load(folder):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def run(model, batch, prompts, lengths):
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


def seconds(model, work, threads, experts):
    torch.set_num_threads(threads)
    if experts:
        model.set_experts_implementation(experts)
    began = time.perf_counter()
    run(model, **work)
    return time.perf_counter() - began


def main():
    model, most = load(sys.argv[1]), torch.get_num_threads()
    experts = EXPERTS if "moe" in model.config.model_type else ("",)
    fastest = {}  # batch -> (threads, implementation of the experts)
    for line in sys.stdin:
        work = json.loads(line)
        if (batch := work["batch"]) not in fastest:
            prompts = [prompt[:PART_PROMPT] for prompt in work["prompts"][:batch]]
            part = {"batch": batch, "prompts": prompts, "lengths": [PART_TOKENS] * batch}
            taken = {how: seconds(model, part, *how) for how in itertools.product((1, most), experts)}
            fastest[batch] = min(taken, key=taken.__getitem__)
            if any(experts):
                said = ", ".join(f"{name} on {threads} {took:.2f} s" for (threads, name), took in taken.items())
                print(f"transformers, {PART_TOKENS} tokens a sample: {said}", file=sys.stderr)
        print(seconds(model, work, *fastest[batch]), flush=True)


if __name__ == "__main__":
    main()
