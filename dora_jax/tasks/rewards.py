"""Stage 3, the shipped rewards, and how an import path becomes a callable. Runs in the reward workers.

A reward is any callable `(prompt, response, answer) -> float | {name: float}`, named by import path in task.rewards;
the working directory is on sys.path. Yours in my_rewards.py, with --config.task.rewards="('my_rewards.short',)":

    def short(prompt: str, response: str, answer) -> float:
        return 1.0 if str(answer) in response and len(response) < 80 else 0.0

One with a parameter `response` is called by keyword: prompt, response, answer and the columns of the row, those that
it names, or all of them where it takes **row. Any other gets the first three by position. One with a parameter
`responses` is a group reward: it is called once for a prompt, with the list of its samples' responses, and returns a
value for each. Each may be an `async def`; many of its calls are then awaited at once.

Laws: no response makes a shipped reward raise: it scores 0.0; an answer that a reward cannot use, or a value that is
no finite number within +-MAX_REWARD, is an error and never a score. With task.answer_pattern a reward sees the first
group of the pattern's first match in the response, and "" where it does not match.
Optional attributes of a reward: `prepare`, called once when its worker starts; `takes_item = True`, where it wants the
reasoning-gym item and not the plain answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import numbers
import os
import re
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from dora_jax.base import callables
from dora_jax.types import NO_COLUMNS, Columns

Reward = Callable[..., Any]  # a number or terms, of a group reward a list of them, where it is awaited what gives them
T = TypeVar("T")

RELATIVE_TOLERANCE = 1e-6  # of numbers that are not equal as fractions: 0.333333 is 1/3
MAX_NUMBER_CHARS = 200  # longer ones are no answer, and arithmetic on them takes forever
MAX_EXPONENT = 300
MAX_REWARD = 1e15  # of a term: float32 holds the squares of a group's differences from its mean


class RewardError(Exception):
    """One sentence that names the reward. kind: the part of it that every failure from the same cause shares."""

    def __init__(self, reason: str, kind: str = ""):
        super().__init__(reason)
        self.kind = kind or reason


# ---------------------------------------------------------------- shipped


def exact(prompt: str, response: str, answer: Any) -> float:
    """1.0 if the response is the answer, white space at the ends aside."""
    return float(response.strip() == str(answer).strip())


def numeric(prompt: str, response: str, answer: Any) -> float:
    """1.0 if the last number of the response equals the answer: signs, commas, fractions and percent understood."""
    gold = _number(str(answer))
    if gold is None:
        raise RewardError(f"numeric: the answer {answer!r} is not a number")
    given = _number(response)
    return float(given is not None and _same_number(given, gold))


def regex(prompt: str, response: str, answer: Any) -> float:
    """1.0 if the answer, a regular expression, is found in the response."""
    return float(re.search(str(answer), response) is not None)


def reasoning_gym(prompt: str, response: str, answer: Any) -> float:
    """The dataset's own score_answer."""
    from dora_jax.tasks import datasets

    if not (isinstance(answer, Mapping) and "reasoning_gym" in answer):
        raise RewardError(f'reasoning_gym: the answer {answer!r} is no item of task.name = "reasoning_gym:<dataset>"')
    return datasets.score(response, answer)


def math_verify(prompt: str, response: str, answer: Any) -> float:
    """math-verify on LaTeX and plain mathematics. It has no time limit of its own here: the worker's deadline is it."""
    gold_text, response = str(answer).strip(), response.strip()
    gold, given = _number(gold_text, whole=True), _number(response, whole=True)
    if gold is not None and given is not None:  # cheap, and what most answers are
        return float(_same_number(given, gold))
    from math_verify import parse, verify

    if "$" not in gold_text and "\\boxed" not in gold_text:  # a bare tuple is only read inside an environment
        gold_text = f"${gold_text}$"
    gold_parsed = parse(gold_text, parsing_timeout=None)
    if not gold_parsed:
        raise RewardError(f"math_verify: the answer {answer!r} is not mathematics that math-verify reads")
    return float(verify(gold_parsed, parse(response, parsing_timeout=None), timeout_seconds=None))


def _import_reasoning_gym() -> None:
    from dora_jax.tasks import datasets

    datasets.known()


def _import_math_verify() -> None:
    import math_verify

    math_verify.verify(math_verify.parse("$1$"), math_verify.parse("$x$"))  # the first parse builds its grammars


reasoning_gym.takes_item = True  # type: ignore[attr-defined]
reasoning_gym.prepare = _import_reasoning_gym  # type: ignore[attr-defined]
math_verify.prepare = _import_math_verify  # type: ignore[attr-defined]


def plain(answer: Any) -> Any:
    """What ordinary rewards compare with."""
    return answer["answer"] if (isinstance(answer, Mapping) and "reasoning_gym" in answer) else answer


# ---------------------------------------------------------------- numbers

# At most 50 groups of three: unbounded, a long run of them would take a time quadratic in its length.
_DIGITS = r"(?:\d{1,3}(?:,\d{3}){1,50}(?![\d,])|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = rf"(?:{_DIGITS})(?:[eE][-+]?\d+)?"
# A sign belongs to the number unless something stands right before it: 7-5 ends in 5, "= -5" in -5.
NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>(?<![)\]])[-+])?\$?(?P<top>{_NUMBER})(?:\s?/\s?(?P<bottom>{_NUMBER}))?"
    r"(?P<percent>\s?\\?%)?"
)


FRAC = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")


def _number(text: str, whole: bool = False) -> tuple[Fraction, bool] | None:
    """(value as written, whether a percent sign follows) of the last number in a text. whole: of a text that is one
    number and nothing else."""
    text, match = FRAC.sub(r"\1/\2", text.replace("\N{MINUS SIGN}", "-")), None
    for match in [NUMBER.fullmatch(text)] if whole else NUMBER.finditer(text):
        pass
    top, bottom = (_fraction(match["top"]), _fraction(match["bottom"] or "1")) if match else (None, None)
    if match is None or top is None or not bottom:
        return None
    value = top / bottom
    return (-value if (match["sign"] or "").startswith("-") else value), match["percent"] is not None


def _fraction(text: str) -> Fraction | None:
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > MAX_NUMBER_CHARS or len(exponent) > 5 or abs(int(exponent or 0)) > MAX_EXPONENT:
        return None
    return Fraction(mantissa.replace(",", "")) * Fraction(10) ** int(exponent or 0)


def _same_number(given: tuple[Fraction, bool], gold: tuple[Fraction, bool]) -> bool:
    """Where only one side has a percent sign, 50 % is both 50 and 0.5."""
    (a, a_percent), (b, b_percent) = given, gold
    if a_percent and not b_percent:
        a, b = b, a
    meant = [b] if a_percent == b_percent else [b, b / 100]
    return any(a == each or abs(a - each) <= RELATIVE_TOLERANCE * max(abs(a), abs(each)) for each in meant)


# ---------------------------------------------------------------- resolving and calling


def resolve(paths: tuple[str, ...] | list[str]) -> dict[str, Reward]:
    """Name of the term -> callable; RewardError names the path that cannot be used."""
    if len(set(paths)) < len(paths):
        raise RewardError(f"task.rewards: {', '.join(paths)} names one reward twice")
    last_words = [path.rpartition(".")[2] for path in paths]
    try:
        return {
            word if last_words.count(word) == 1 else path: callables.imported(path, "reward")
            for path, word in zip(paths, last_words, strict=True)
        }
    except ValueError as error:
        raise RewardError(f"task.rewards: {error}") from error


def of_group(reward: Reward) -> bool:
    """Whether it sees all responses of a prompt together."""
    return _signature(reward).of_group


def asynchronous(reward: Reward) -> bool:
    """Whether what it returns is awaited."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


async def score(
    rewards: Mapping[str, Reward], prompt: str, responses: Sequence[str], answer: Any, row: Columns = NO_COLUMNS
) -> list[dict[str, dict[str, float]]]:
    """The terms of each reward by its name, of each response. Raises RewardError only.

    answer: None where the row has none. row: its columns."""
    scores: list[dict[str, dict[str, float]]] = [{} for _ in responses]
    for name, reward in rewards.items():
        if not of_group(reward):
            for scored, response in zip(scores, responses, strict=True):
                value = await _called(reward, name, {"prompt": prompt, "response": response}, answer, row)
                scored[name] = _terms(value, name)
            continue
        values = await _called(reward, name, {"prompt": prompt, "responses": list(responses)}, answer, row)
        if isinstance(values, str | Mapping) or not hasattr(values, "__len__") or len(values) != len(responses):
            kind = f"reward {name} returned no list with a value for each response"
            raise RewardError(f"{kind} ({len(responses)}): {values!r:.100}", kind)
        for scored, value in zip(scores, values, strict=True):
            scored[name] = _terms(value, name)
    return scores


def finished(scoring: Coroutine[object, None, T]) -> T:
    """What rewards have scored that await nothing: without an event loop, because such a reward may run one itself."""
    try:
        scoring.send(None)
    except StopIteration as end:
        return end.value
    scoring.close()
    raise RewardError("a reward awaits something and is no `async def`")


def summed(
    of_rewards: Mapping[str, Mapping[str, float]], weights: Sequence[float] = ()
) -> tuple[dict[str, float], float]:
    """(the terms of every reward by name, their weighted sum: the reward of a sample). weights: of each reward; empty:
    1. RewardError where two rewards have a term of one name."""
    parts: dict[str, float] = {}
    total = 0.0
    for (name, terms), weight in zip(of_rewards.items(), weights or [1.0] * len(of_rewards), strict=True):
        for term, number in terms.items():
            if term in parts:
                raise RewardError(f"two rewards return a term {term!r}; the second is {name}")
            parts[term] = number
            total += weight * number
    return parts, total


async def _called(reward: Reward, name: str, given: dict[str, object], answer: object, row: Columns) -> Any:
    try:
        if answer is not None:
            given["answer"] = answer if getattr(reward, "takes_item", False) else plain(answer)
        positional, keywords = _arguments(reward, name, {**row, **given})
        value = reward(*positional, **keywords)
        return await value if inspect.isawaitable(value) else value
    except RewardError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # always raised again, with the reward's name
        frame = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"reward {name} raised {type(error).__name__}"
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        raise RewardError(f"{kind}: {error} ({where})", f"{kind} ({where})") from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Signature:
    """What a reward takes. Reading a signature takes longer than most rewards."""

    reward: Reward  # kept, so that its identity stays its own
    of_group: bool
    first: tuple[str, ...]  # by position
    named: tuple[tuple[str, bool], ...]  # by keyword: its name, and whether it must be there
    whole_row: bool  # it takes **row


_KNOWN: dict[int, _Signature] = {}  # by identity: a reward may have no hash


def _signature(reward: Reward) -> _Signature:
    if (known := _KNOWN.get(id(reward))) is not None:
        return known
    parameters: list[inspect.Parameter] = []
    with contextlib.suppress(TypeError, ValueError):  # of a function of a compiled module
        parameters = list(inspect.signature(reward).parameters.values())
    by_keyword = any(p.name in ("response", "responses") for p in parameters)
    if parameters and all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters):
        by_keyword = True
    first = () if by_keyword else ("prompt", "response", "answer")
    rest = [p for i, p in enumerate(parameters) if i >= len(first) or p.kind is p.KEYWORD_ONLY]
    rest = [p for p in rest if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    found = _KNOWN[id(reward)] = _Signature(
        reward=reward,
        of_group=any(p.name == "responses" for p in parameters),
        first=first,
        named=tuple((p.name, p.default is p.empty) for p in rest),
        whole_row=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
    return found


def _terms(value: object, name: str) -> dict[str, float]:
    terms = value if isinstance(value, Mapping) else {name: value}
    if not terms:
        raise RewardError(f"reward {name} returned no terms")
    return {str(term): _finite(number, name, term) for term, number in terms.items()}


def _arguments(reward: Reward, name: str, given: Columns) -> tuple[list[object], Columns]:
    """What a reward is called with, of what there is; RewardError names a parameter that nothing fills."""
    known = _signature(reward)
    first, wanted = known.first, [name for name, needed in known.named if needed or name in given]
    if lacking := [each for each in (*first, *wanted) if each not in given]:
        raise RewardError(
            f"reward {name} takes {lacking[0]!r}, and its row has {', '.join(map(str, given))}"
            + (" (task.answer_column names the column of the answer)" if lacking[0] == "answer" else "")
        )
    if known.whole_row:
        wanted = [each for each in given if each not in first]
    return [given[each] for each in first], {each: given[each] for each in wanted}


def _finite(number: Any, name: str, term: Any) -> float:
    if type(number) is float and abs(number) <= MAX_REWARD:
        return number
    where = f"reward {name}" + (f", term {term!r}," if term != name else "")
    if not isinstance(number, numbers.Real):
        kind = type(number).__name__
        raise RewardError(f"{where} returned {number!r:.100}, a {kind}, not a number", f"{where} returned a {kind}")
    if abs(number) <= MAX_REWARD:  # type: ignore[operator]  # a huge int cannot become a float
        return float(number)
    if number in (math.inf, -math.inf) or not number <= math.inf:
        raise RewardError(f"{where} returned {number}")
    raise RewardError(f"{where} returned a number beyond {MAX_REWARD:g}, the largest that a reward may have")
