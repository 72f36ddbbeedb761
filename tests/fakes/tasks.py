"""Tasks over a tokenizer whose ids are code points."""

import json

from dora_jax import tasks
from dora_jax.config import TaskSection

SUMS = TaskSection(
    name="reasoning_gym:chain_sum",
    params={"min_terms": 2, "max_terms": 4, "max_digits": 2},
    extract=r": (.*) =$",
    template="{prompt}=",
)


class Letters:
    """A tokenizer whose ids are code points."""

    def encode(self, text):
        return [ord(c) for c in text]

    def chat(self, messages):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def opened(section=SUMS, *, seed=0, heldout=64, limit=1000, **more):
    return tasks.open_task(
        section,
        Letters(),
        seed=seed,
        max_prompt_tokens=limit,
        max_new_tokens=8,
        heldout=heldout,
        quarantine_path="unused.jsonl",
        **more,
    )


def write(path, rows):
    """Rows that are text are written as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def sums(n, start=0):
    return [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "id": i} for i in range(start, start + n)]


def length(prompt, response, answer):
    """A reward that samples of any model differ in."""
    return len(response) % 5 / 4


def together(responses):
    """A reward of a group."""
    return [float(len(each)) for each in responses]
