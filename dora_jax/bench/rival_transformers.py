"""`transformers` generate as a rival of bench/decode.py; runs in its own interpreter and imports nothing of ours.

Reads one JSON line a work, answers with seconds. A short part of the work comes first, with one thread and with all:
it warms up, and the better number of threads then does the work, because torch's barriers can cost a hundredfold where
another process takes a core. Log-probs come from the logits that generate returns.
"""

import json
import sys
import time

import torch
import transformers

PART_TOKENS = 16  # new tokens a sample


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


def seconds(model, work, threads):
    torch.set_num_threads(threads)
    began = time.perf_counter()
    run(model, **work)
    return time.perf_counter() - began


def main():
    model, most = load(sys.argv[1]), torch.get_num_threads()
    for line in sys.stdin:
        work = json.loads(line)
        batch = work["batch"]
        part = {"batch": batch, "prompts": work["prompts"][:batch], "lengths": [PART_TOKENS] * batch}
        taken = {threads: seconds(model, part, threads) for threads in (1, most)}
        print(seconds(model, work, min(taken, key=taken.__getitem__)), flush=True)


if __name__ == "__main__":
    main()
