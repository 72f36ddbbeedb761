# python -m dora_jax.train --config=configs/sparse.py:Qwen3-30B-A3B,v5p-16 --config.model.path=FOLDER
# --config.task.path=train.jsonl --workdir=gs://BUCKET/mine
"""RL of a mixture of experts on TPU slices: answers of up to 3072 tokens to rows of your own.

Argument: MODEL,SLICE. Models: Qwen3-30B-A3B, DeepSeek-V3, LongCat-Flash. SLICE trains; instances have slices of their
own beside it, which launch/ray and launch/gke allocate. This file looks for the least lean layout that the memory plan
of --dry_run has no objection to; `--dry_run --aot` compiles it.
"""

from dora_jax import config
from dora_jax.base import chips
from dora_jax.plan import presets

SLICES = ("v5p-16", "v6e-64", "v5p-128", "v5p-256", "v5p-512", "v5p-1024")
INSTANCES = {  # model -> chip -> slice of an instance
    "Qwen3-30B-A3B": {"v5p": "v5p-8", "v6e": "v6e-8"},
    "DeepSeek-V3": {"v5p": "v5p-128", "v6e": "v6e-128"},
    "LongCat-Flash": {"v5p": "v5p-128", "v6e": "v6e-128"},
}
EXPERTS = {"Qwen3-30B-A3B": 8, "DeepSeek-V3": 64, "LongCat-Flash": 64}  # devices that share out the trainer's experts
GATHERED = 8  # of them, at most, each may as well have all tokens: a token has as many experts


def get_config(arg=None):
    model, _, slice_name = (arg or "").partition(",")
    if model not in INSTANCES or slice_name not in SLICES:
        raise ValueError(
            f"the argument is {arg!r}; it is MODEL,SLICE with a model of {', '.join(INSTANCES)} and a slice of "
            f"{', '.join(SLICES)}"
        )
    found = fitting(model, slice_name)
    if found is None:
        smallest = next((name for name in SLICES if fitting(model, name)), "larger than all of these")
        raise ValueError(f"{model} does not fit {slice_name}; the smallest slice that holds it is {smallest}")
    return found


def fitting(model, slice_name):
    """The first layout whose memory plan fits with room for its slots; None: there is none."""
    for lean in presets.LEAN:
        c = layout(model, slice_name)
        c.trainer.update(lean)
        if micro_batches := presets.micro_batches(c):
            c.trainer.micro_batches = micro_batches
            return c
    return None


def layout(model, slice_name):
    chip, number = chips.parse(slice_name)
    c = config.defaults()
    c.steps = 200
    c.model.size = model
    c.task.name, c.task.template, c.task.rewards = "rows", "chat", ("dora_jax.tasks.rewards.numeric",)
    c.trainer.remat, c.trainer.learning_rate, c.trainer.pack_tokens = "full", 1e-6, 4096
    c.trainer.routing_replay = "rollout"
    c.trainer.expert = EXPERTS[model]
    c.trainer.expert_dispatch = "gather" if c.trainer.expert <= GATHERED else "all_to_all"
    c.eval.every, c.eval.prompts = 20, 64
    small = model == "Qwen3-30B-A3B"
    c.rollout.slots, c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 128 if small else 16, 1024, 3072
    instance = chips.machine(INSTANCES[model][chip])
    c.rollout.tensor = c.rollout.expert = instance.devices
    c.cluster.launcher, c.cluster.wire = "ray", "transfer"
    c.cluster.trainer_slice, c.cluster.trainer_hosts = slice_name, chips.machine(slice_name).hosts
    c.cluster.instance_slice, c.cluster.hosts_per_instance = instance.name, instance.hosts
    c.rollout.instances = max(1, number // instance.devices)
    rows = 8 if small else 1  # of a chip and update, of 4096 tokens
    c.orchestrator.groups_per_step, c.orchestrator.group_size = rows * number // 8, 8
    return c
