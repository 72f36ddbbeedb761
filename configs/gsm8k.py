# python -m dora_jax.train --config=configs/gsm8k.py --config.model.path=models/Qwen3-0.6B --workdir=runs/gsm8k_qwen3
"""GSM8K: grade-school word problems, from the rows that a recipe makes of the hub's files (dora_jax/tasks/README.md).

The last number of a response is compared with the answer. Argument: SIZE,SLICE as of configs/qwen3.py; without it any
chat model, with answers of up to 640 tokens. The curve of this recipe is not measured.
"""

from dora_jax.config import files as config_files


def get_config(arg=None):
    c = config_files.load_file(f"qwen3:{arg}" if arg else "rows:chat")
    c.steps = 200
    c.task.path, c.task.heldout_path = "runs/gsm8k/train.jsonl", "runs/gsm8k/test.jsonl"
    c.task.template_kwargs = {"enable_thinking": False}  # Qwen3's thoughts alone are longer than such an answer
    c.task.heldout = c.eval.prompts = 256
    c.trainer.learning_rate = 1e-6
    if not arg:
        c.rollout.max_prompt_tokens, c.rollout.max_new_tokens = 384, 640
    return c
