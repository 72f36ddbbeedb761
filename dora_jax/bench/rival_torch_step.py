"""transformers + torch as a rival of bench/train_step.py; runs in its own interpreter and imports nothing of ours.

Reads one JSON line an update: (seconds, loss, gradient norm) is the answer. The first update of a work starts from the
weights of the folder. The time is the better of one thread and all, because torch's barriers can cost a hundredfold
where another process takes a core; each line makes one update with either.
"""

import json
import sys
import time

import torch
import transformers


def fresh():
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).train()
    model.config.use_cache = False
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0)


def update(model, optimizer, batch):
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


def main():
    name, most = None, torch.get_num_threads()
    for line in sys.stdin:
        work = json.loads(line)
        if work["name"] != name:
            name, (model, optimizer) = work["name"], fresh()
        batch = {key: torch.tensor(x) for key, x in work.items() if key != "name"}
        seconds, results = [], []
        for threads in sorted({most, 1}, reverse=True):
            torch.set_num_threads(threads)
            began = time.perf_counter()
            results.append(update(model, optimizer, batch))
            seconds.append(time.perf_counter() - began)
        print(json.dumps([min(seconds), *results[0]]), flush=True)


if __name__ == "__main__":
    main()
