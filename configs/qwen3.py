# python -m dora_jax.train --config=configs/qwen3.py:8B,v5p-16 --config.model.path=FOLDER --config.task.path=train.jsonl
# --workdir=gs://BUCKET/mine
"""RL of a Qwen3 model on a machine of a known size: answers of up to 3072 tokens to rows of your own.

Argument: SIZE,SLICE. Sizes: 0.6B, 1.7B, 8B, 32B. Slices: laptop, v5e-8, v6e-8, h100-8, v5p-16, v5p-128. A slice of one
host runs everything in one process. Of v5p-16 one host trains and the other samples. v5p-128 is a v5p-64 that trains
and eight v5p-8 that sample, which launch/ray and launch/gke allocate. This file looks for the least lean layout that
the memory plan of --dry_run has no objection to; what else the slice decides is in dora_jax/plan/presets.py.
"""

import itertools

from dora_jax import config
from dora_jax.plan import presets

SIZES = ("0.6B", "1.7B", "8B", "32B")
SLICES = ("laptop", "v5e-8", "v6e-8", "h100-8", "v5p-16", "v5p-128")  # the smallest first
TENSORS = (1, 2, 4)  # devices of an instance


def get_config(arg=None):
    size, _, slice_name = (arg or "").partition(",")
    if size not in SIZES or slice_name not in SLICES:
        raise ValueError(
            f"the argument is {arg!r}; it is SIZE,SLICE with a size of {', '.join(SIZES)} and a slice of "
            f"{', '.join(SLICES)}"
        )
    found = fitting(size, slice_name)
    if found is None:
        smallest = next((name for name in SLICES if fitting(size, name)), "larger than all of these")
        raise ValueError(f"Qwen3-{size} does not fit {slice_name}; the smallest slice that holds it is {smallest}")
    return found


def fitting(size, slice_name):
    """The first layout whose memory plan fits with room for its slots; None: there is none."""
    in_cluster = slice_name.startswith("v5p")  # there an instance has all four devices of its host
    for tensor, lean in itertools.product((4,) if in_cluster else TENSORS, presets.LEAN):
        c = layout(size, slice_name)
        c.rollout.tensor = tensor
        if tensor == 4 and c.placement == "disjoint" or slice_name == "v5p-16":
            c.rollout.instances, c.rollout.residents = 1, 2  # it holds two versions: one can come while the other ends
        c.trainer.update(lean)
        if micro_batches := presets.micro_batches(c):
            c.trainer.micro_batches = micro_batches
            return c
    return None


def layout(size, slice_name):
    c = config.defaults()
    c.steps = 200
    c.model.size = f"Qwen3-{size}"
    c.task.name, c.task.template, c.task.rewards = "rows", "chat", ("dora_jax.tasks.rewards.numeric",)
    c.trainer.remat, c.trainer.learning_rate = "full", 1e-6
    c.eval.every, c.eval.prompts = 20, 64
    if slice_name == "laptop":
        c.slice = slice_name
        c.rollout.slots, c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 8, 256, 256
        c.orchestrator.groups_per_step, c.orchestrator.group_size = 4, 4
        c.trainer.pack_tokens = 512
        return c
    c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 1024, 3072
    c.orchestrator.groups_per_step, c.orchestrator.group_size = 16, 8
    c.trainer.pack_tokens = 4096
    if slice_name.startswith("v5p"):
        several_hosts(c, slice_name)
    else:
        c.slice, c.placement, c.rollout.instances = slice_name, "disjoint", 0
    return c


def several_hosts(c, slice_name):
    """Half of the chips train."""
    hosts = {"v5p-16": 1, "v5p-128": 8}[slice_name]
    c.cluster.launcher, c.cluster.wire = "ray", "transfer"
    c.cluster.trainer_slice, c.cluster.trainer_hosts = f"v5p-{8 * hosts}", hosts
    c.cluster.instance_slice, c.rollout.instances = "v5p-8", hosts
    c.orchestrator.groups_per_step = 32 * hosts
