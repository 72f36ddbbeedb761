# python -m dora_jax.train --config=configs/gemma3.py:4B,v5p-16 --config.model.path=FOLDER
# --config.task.path=train.jsonl --workdir=gs://BUCKET/mine
"""RL of a Gemma 3 or 4 model, text, on TPUs; slices.py has the layouts, and says what SLICE and adapters are.

Argument: SIZE,SLICE or SIZE,SLICE,adapters. Sizes: 1B, 4B, 27B of Gemma 3, E2B of Gemma 4.
"""

from dora_jax.config.files import load_module

SIZES = {"1B": "Gemma-3-1B", "4B": "Gemma-3-4B", "27B": "Gemma-3-27B", "E2B": "Gemma-4-E2B"}


def get_config(arg="4B,v5p-16"):
    return load_module("slices").get_config(arg, SIZES)
