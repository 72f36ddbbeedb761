# python -m dora_jax.train --config=configs/slices.py:Qwen3.5-4B,v5p-16 --config.model.path=FOLDER
# --config.task.path=train.jsonl --workdir=gs://BUCKET/mine
"""RL of a model of the hub on TPUs: answers of up to 3072 tokens to rows of your own.

Argument: MODEL,SLICE or MODEL,SLICE,adapters. Models: what model.size names, dense, hybrid or with experts, such as
Qwen3.5-4B, Qwen3.5-35B-A3B, gpt-oss-20b. Slices: v5e-8, v6e-8, v5p-16, v5p-32, v5p-64, v5p-128. A slice of one host
runs everything in one process; of the others half trains, and v5p-8 slices beside it sample, which launch/ray and
launch/gke allocate. This file looks for the least lean layout that the memory plan of --dry_run has no objection to;
`--dry_run --aot` compiles it. Adapters have rank 16.
"""

import itertools

from dora_jax import config
from dora_jax.base import chips
from dora_jax.models.families import KNOWN
from dora_jax.plan import presets

SLICES = ("v5e-8", "v6e-8", "v5p-16", "v5p-32", "v5p-64", "v5p-128")  # the smallest first
TENSORS = (1, 2, 4)  # devices of an instance
GATHERED = 8  # devices that share out a trainer's experts, at most: each has the tokens of all of them
WIDE_HEAD = 128  # numbers of a KV head; of wider ones the paged kernel reads one a device


def get_config(arg="Qwen3.5-4B,v5p-16", sizes=None):
    """sizes: short names of models, of a file that builds on this one."""
    sizes = sizes or dict(zip(KNOWN, KNOWN))
    size, slice_name, *trained = [*arg.split(","), ""] if "," not in arg else arg.split(",")
    if size not in sizes or slice_name not in SLICES or trained not in ([], ["adapters"]):
        raise ValueError(
            f"the argument is {arg!r}; it is SIZE,SLICE or SIZE,SLICE,adapters with a size of {', '.join(sizes)} and a "
            f"slice of {', '.join(SLICES)}"
        )
    model, adapters = sizes[size], bool(trained)
    found = fitting(model, slice_name, adapters)
    if found is None:
        smallest = next((name for name in SLICES if fitting(model, name, adapters)), "larger than all of these")
        lacking = presets.shortfall(layout(model, slice_name, adapters, TENSORS[-1], presets.LEAN[-1]))
        raise ValueError(
            f"{model} does not fit {slice_name}: {lacking}; the smallest slice that holds it is {smallest}"
        )
    return found


def fitting(model, slice_name, adapters):
    """The first layout whose memory plan fits with room for its slots; None: there is none."""
    least = max((heads for heads, width in KNOWN[model].kv_rows if width > WIDE_HEAD), default=1)
    tensors = TENSORS[-1:] if slice_name.startswith("v5p") else [size for size in TENSORS if size >= least]
    for tensor, lean in itertools.product(tensors, presets.LEAN):
        c = layout(model, slice_name, adapters, tensor, lean)
        if micro_batches := presets.micro_batches(c):
            c.trainer.micro_batches = micro_batches
            return c
    return None


def layout(model, slice_name, adapters, tensor, lean):
    c, known = config.defaults(), KNOWN[model]
    c.steps = 200
    c.model.size = model
    c.task.name, c.task.template, c.task.rewards = "rows", "chat", ("dora_jax.tasks.rewards.numeric",)
    c.trainer.remat, c.trainer.learning_rate = "full", 1e-6
    c.eval.every, c.eval.prompts = 20, 64
    c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 1024, 3072
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 16, 8
    c.trainer.pack_tokens = 4096
    if adapters:
        c.lora.rank, c.trainer.learning_rate = 16, 1e-5
    c.rollout.tensor = tensor
    c.trainer.update(lean)
    if known.sinks:
        c.rollout.attention = "reference"  # the one with a place for them
    chip, number = chips.parse(slice_name)
    if known.experts:
        c.trainer.routing_replay, c.rollout.expert = "rollout", tensor
        c.trainer.expert = min(GATHERED, number // 2 // c.trainer.tensor)
    if tensor == TENSORS[-1] and (chip != "v5p" or slice_name == "v5p-16") and not adapters:
        c.rollout.residents = 2  # the only instance holds two versions: one can come while the other ends
    if chip != "v5p":
        c.slice, c.placement, c.rollout.instances = slice_name, "disjoint", int(tensor == TENSORS[-1])
        return c
    hosts = number // 8  # of the trainer, and as many instances
    c.cluster.launcher, c.cluster.wire = "ray", "transfer"
    c.cluster.trainer_slice, c.cluster.trainer_hosts = f"v5p-{8 * hosts}", hosts
    c.cluster.instance_slice, c.rollout.instances = "v5p-8", hosts
    c.orchestrator.groups_per_step = 32 * hosts
    return c
