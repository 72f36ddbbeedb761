"""What --help prints: what a program is, its own flags, and the fields of its configuration, as they are declared.

Consumes the configuration's dataclasses; ends with exit code 0. Fields that are tuning, right as they are on any
machine, are listed by --helpfull and in the page only.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app

from dora_jax.base import config_tree
from dora_jax.base.config_tree import AFRESH, FREE, LEARNS, Declared

HELP = re.compile(r"--?(help|helpshort|helpfull|h|\?)")
FULL = "--helpfull"
WIDTH = 120
MOST_CHOICES = 7  # that are listed
HELP_AT = 46  # column


INTRODUCTION = """# Configurations

A configuration is a Python file with `get_config(arg=None)`, which starts from `dora_jax.config.defaults()` and sets
what differs; its first line is the command that runs it. `--config=configs/quickstart.py:tiny` hands `tiny` to it,
`--config.field=value` overrides one field, and an optional `sweep()` lists the points of `python -m dora_jax.sweep`. A
field that is unknown or wrong is named in one sentence, all of them at once, before anything starts.

| file | what it runs |
|---|---|
| `quickstart.py` | a small base model made on the spot, then RL on sums: two cores, no network, minutes |
| `moe.py` | the quickstart with a small mixture of experts: the argument names the family |
| `rows.py` | rows of your own with an answer, and the reward that compares |
| `gsm8k.py` | grade-school word problems, of any chat model or of Qwen3's sizes; its curve is not measured |
| `qwen3.py` | Qwen3 of the hub's sizes on a machine or a slice: the argument names both |
| `slices.py` | any model that `model.size` names on a TPU slice, all weights or adapters: Qwen3.5, gpt-oss, ... |
| `gemma3.py` | the same of Gemma 3 and 4, by their sizes |
| `sim/` | the orchestrator in virtual time: the paper's clusters, fair tables of all modes, what-if questions |

## Every field

A default that is empty, 0 or `auto` where the help says so is chosen by the platform; `--dry_run` prints what was
chosen and why. Fields behind "tuning" are right as they are on any machine: `--help` leaves them out, `--helpfull`
lists them. Both lists are made of the declarations in `dora_jax/config/`;
`python tests/test_config_page.py` writes this page anew.

A run that goes on in its workdir may have other values than before in fields without a mark. The others are marked:

"""
MARKS = {  # in front of a field: what a change of it means to a run that goes on
    "": " ",  # of a program that has no such runs
    FREE: " ",
    LEARNS: "*",
    AFRESH: "^",
}
FIXED = "="
LEGEND = (
    f"{MARKS[LEARNS]}  changes what is learned: needs --accept_changes",
    f"{MARKS[AFRESH]}  so does this, and the run goes on from its newest checkpoint: what is in flight is of no use",
    f"{FIXED}  cannot change: take another --workdir",
)


def asked_for(args: Sequence[str]) -> bool:
    return any(HELP.fullmatch(arg) for arg in args)


def show(args: Sequence[str], config: type) -> None:
    """Prints the help and exits with code 0; it lists the flags defined so far. config: the dataclass of all
    sections."""
    app.usage(shorthelp=FULL not in args, writeto_stdout=True)
    lines = list(fields(config, tuning=FULL in args))
    print("\nconfiguration, as --config.field=value; a field's default and what it means:")
    if any(one.change for one in config_tree.declared(config).values()):
        print("\n".join(["in front of a field, where a run that goes on finds another value than before:", *LEGEND]))
    print("\n".join(lines))
    if FULL not in args:
        print("\nand what is right as it is on any machine, with --helpfull")
    raise SystemExit(0)


def fields(cls: type, prefix: str = "", tuning: bool = True) -> Iterator[str]:
    """Fields of this section, those that are tuning behind the others, then those inside its sections, each under its
    heading."""
    here = config_tree.fields_of(cls)
    sections: dict[str, Any] = {name: one.type for name, one in here.items() if dataclasses.is_dataclass(one.type)}
    entries = {  # of dictionaries, whose entries the user names
        f"{name}.NAME": each
        for name, one in here.items()
        if typing.get_origin(one.type) is dict
        for each in typing.get_args(one.type)
        if dataclasses.is_dataclass(each)
    }
    yield ""
    doc = inspect.getdoc(cls) or ""  # dataclasses writes a signature where a class has no docstring
    if re.match(r"\w", doc) and not doc.startswith(f"{cls.__name__}("):
        yield from textwrap.wrap(" ".join(doc.split()), WIDTH, initial_indent="  ", subsequent_indent="  ")
    plain = {name: one for name, one in here.items() if name not in sections}
    for name, one in plain.items():
        if not one.tuning:
            yield from _line(prefix + name, one)
    tuned = {name: one for name, one in plain.items() if one.tuning and tuning}
    if tuned:
        yield "  tuning:"
    for name, one in tuned.items():
        yield from _line(prefix + name, one)
    for name, inner in (sections | entries).items():
        yield from fields(inner, f"{prefix}{name}.", tuning)


def _line(name: str, one: Declared) -> list[str]:
    value = one.default if isinstance(one.default, str) and one.default else repr(one.default)
    words = ", ".join(choice or "empty" for choice in one.choices if len(one.choices) <= MOST_CHOICES)
    text = "; ".join(filter(None, (words, one.help)))
    head = f"{MARKS.get(one.change, FIXED)} {name}={value}"
    if not text:
        return [head]
    head = head.ljust(HELP_AT) if len(head) < HELP_AT else f"{head}  "
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * HELP_AT)


def page(config: type) -> str:
    """configs/README.md: every field, with default and help."""
    marks = "".join(f"- `{line[0]}` {line[1:].strip()}\n" for line in LEGEND)
    return f"{INTRODUCTION}{marks}\n```text{chr(10).join(fields(config))}\n```\n"
