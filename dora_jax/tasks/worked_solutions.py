"""Worked solutions for the supervised warm start: one small function per dataset, `entry, slip -> (steps, answer)`.

A solution reads "step step ... #### answer"; the template says what stands between the prompt and it. With a slip, one
step goes wrong and everything after it follows from the wrong value, as in what people write; its final answer is then
wrong, so that there is something left for RL to learn.
Laws: pure in (entry, slip seed); a clean solution ends in the dataset's own answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from dora_jax.tasks.source import TaskRow

ANSWER_MARK = "#### "
SLIP_TRIES = 16  # a slip may cancel out (a common divisor may survive it): so many places are tried

Entry = dict[str, Any]
Slip = random.Random | None  # decides where and how; None: no slip


def solution(row: TaskRow, *, slip_seed: int | None = None, answer_only: bool = False) -> str:
    """The row's own completion, else its worked solution; the bare answer only where asked for."""
    if row.solution is not None:
        return row.solution
    if row.entry is None or answer_only:
        answer = row.entry["answer"] if row.entry is not None else row.answer
        return answer if isinstance(answer, str) else str(answer)
    if row.task not in SOLVERS:
        raise ValueError(
            f"{row.task} has no worked solutions ({', '.join(sorted(SOLVERS))} have); warm-start on rows "
            "of your own (sft.rows), or ask for bare answers"
        )
    solve = SOLVERS[row.task]
    entry = row.entry
    steps, answer = solve(entry, None)
    if answer != entry["answer"]:
        raise RuntimeError(f"the worked solution of {entry['question']!r} ends in {answer}, not {entry['answer']}")
    if slip_seed is not None:
        slip = random.Random(slip_seed)
        for _ in range(SLIP_TRIES):
            slipped_steps, slipped_answer = solve(entry, slip)
            if slipped_answer != answer:
                steps, answer = slipped_steps, slipped_answer
                break
    return " ".join([*steps, ANSWER_MARK + answer])


# ---------------------------------------------------------------- one function per dataset


def chain_sum(entry: Entry, slip: Slip) -> tuple[list[str], str]:
    """4 + 3 - 7 -> 7 - 7 = 0: what is left is written down after each addition. The slip is to stop one step early."""
    terms = entry["metadata"]["expression"].split(" ")
    total, sums = int(terms[0]), []
    for i in range(1, len(terms), 2):
        if slip is not None and i + 2 == len(terms):
            break
        total += int(terms[i + 1]) if terms[i] == "+" else -int(terms[i + 1])
        sums.append(" ".join([str(total), *terms[i + 2 :]]))
    return [" = ".join(sums)] if sums else [], str(total)


def gcd(entry: Entry, slip: Slip) -> tuple[list[str], str]:
    """12, 18 -> 12%18=12 18%12=6 12%6=0"""
    numbers = entry["metadata"]["numbers"]
    at = _slip_at(slip, 4)  # pairs of up to three digits take about five steps
    a = numbers[0]
    steps: list[str] = []
    for b in numbers[1:]:
        while b:
            rest = a % b
            if slip is not None and len(steps) == at and b > 1:
                rest = (rest + slip.randrange(1, b)) % b  # another possible remainder, so that the walk still ends
            steps.append(f"{a}%{b}={rest}")
            a, b = b, rest
    return steps, str(a)


def spell_backward(entry: Entry, slip: Slip) -> tuple[list[str], str]:
    """sun -> n u s"""
    letters = list(entry["metadata"]["word"][::-1])
    _swap_neighbours(letters, slip)
    return [" ".join(letters)], "".join(letters)


def number_sorting(entry: Entry, slip: Slip) -> tuple[list[str], str]:
    """3, 1, 2 ascending -> 1 < 2 < 3"""
    metadata = entry["metadata"]
    numbers = list(metadata["sorted_numbers"])
    _swap_neighbours(numbers, slip)
    sign = " < " if metadata["direction"] == "ascending" else " > "
    return [sign.join(numbers)], str(numbers)


def letter_counting(entry: Entry, slip: Slip) -> tuple[list[str], str]:
    """e in "the green hat" -> the:1 green:2 0+1=1 1+2=3"""
    letter = entry["metadata"]["target_letter"]
    counts = [(word, word.lower().count(letter)) for word in entry["metadata"]["span"]]
    counts = [(word, count) for word, count in counts if count]
    at = _slip_at(slip, len(counts))
    if slip is not None and at is not None:
        word, count = counts[at]
        counts[at] = word, count + 1 if count == 1 else count + slip.choice((-1, 1))
    total, sums = 0, []
    for _, count in counts:
        sums.append(f"{total}+{count}={total + count}")
        total += count
    return [f"{word}:{count}" for word, count in counts] + sums, str(total)


SOLVERS: dict[str, Callable[[Entry, Slip], tuple[list[str], str]]] = {
    "chain_sum": chain_sum,
    "gcd": gcd,
    "spell_backward": spell_backward,
    "number_sorting": number_sorting,
    "letter_counting": letter_counting,
}


def _slip_at(slip: Slip, steps: int) -> int | None:
    """The step that goes wrong; None where none does."""
    return slip.randrange(steps) if slip is not None and steps else None


def _swap_neighbours(items: list[str], slip: Slip) -> None:
    at = _slip_at(slip, len(items) - 1)
    if at is not None:
        items[at], items[at + 1] = items[at + 1], items[at]
