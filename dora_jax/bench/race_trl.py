"""TRL's side of bench.race, and the scorer of both sides, in an interpreter that has TRL; imports nothing of ours.

    PYTHON race_trl.py train|score WORK      WORK: JSON, whose names `work_of` in race.py gives

train: GRPOTrainer with `transformers` generation; a folder OUT/checkpoint-STEP every so many steps and at the end,
which is after `steps` or, of the seconds since `began`, `limit_s`. Beside what the work says it has the optimizer of
our runs (b2 0.95, no weight decay, gradients clipped to 1) and no gradient checkpointing, which would only slow it
down. bfloat16: autocast over float32 weights.
score: the last line has, for each folder, the share of held-out rows whose greedy answer is right, and the prompts'
ids.
"""

import json
import re
import sys
import time

SCORED_AT_ONCE = 64
NUMBER = r"(?<![\w.])(?:(?<![)\]])[-+])?\$?\d[\d,]*(?:\.\d+)?"  # as the reward of ours reads them, fractions aside


def right(text, answer):
    """1.0 if the last number of the text is the answer."""
    found = [match[0] for match in re.finditer(NUMBER, text)]
    return float(bool(found) and float(re.sub("[,$]", "", found[-1])) == float(answer))


def rows_of(path, template):
    """Rows as TRL takes them: messages where the template is the model's chat template, else text."""
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    for row in rows:
        if template == "chat":
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        else:
            row["prompt"] = template.replace("{prompt}", row["prompt"])
    return rows


def reward(completions, answer, **_):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [right(text, each) for text, each in zip(texts, answer)]


def train(work):
    import datasets
    import transformers
    import trl

    class Limit(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if time.time() - work["began"] > work["limit_s"]:
                control.should_save = control.should_training_stop = True

    samples = work["groups"] * work["group_size"]
    config = trl.GRPOConfig(
        output_dir=work["out"],
        seed=work["seed"],
        max_steps=work["steps"],
        save_steps=work["every"],
        save_only_model=True,
        learning_rate=work["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=work["warmup_steps"],
        per_device_train_batch_size=min(work["micro_batch"], samples),
        gradient_accumulation_steps=max(1, samples // work["micro_batch"]),
        num_generations=work["group_size"],
        max_completion_length=work["max_new_tokens"],
        adam_beta2=0.95,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=work["dtype"] == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        report_to="none",
        logging_steps=1,
    )
    rows = datasets.Dataset.from_list(rows_of(work["rows"], work["template"]))
    trl.GRPOTrainer(
        model=work["model"], reward_funcs=reward, args=config, train_dataset=rows, callbacks=[Limit()]
    ).train()


def score(work):
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(work["model"], padding_side="left")
    rows, accuracies = rows_of(work["heldout"], work["template"]), []
    texts = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        if work["template"] == "chat"
        else row["prompt"]
        for row in rows
    ]
    for folder in work["folders"]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        marks = []
        for first in range(0, len(rows), SCORED_AT_ONCE):
            batch = slice(first, first + SCORED_AT_ONCE)
            ids = tokenizer(texts[batch], add_special_tokens=False, padding=True, return_tensors="pt")
            with torch.inference_mode():
                out = model.generate(
                    input_ids=ids["input_ids"],
                    attention_mask=ids["attention_mask"],
                    max_new_tokens=work["max_new_tokens"],
                    do_sample=False,
                )
            answers = tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            marks += [right(text, row["answer"]) for text, row in zip(answers, rows[batch])]
        accuracies.append(sum(marks) / len(marks))
    print(json.dumps({"accuracies": accuracies, "prompts": tokenizer(texts, add_special_tokens=False)["input_ids"]}))


if __name__ == "__main__":
    {"train": train, "score": score}[sys.argv[1]](json.loads(sys.argv[2]))
