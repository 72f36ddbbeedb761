"""What --help prints: what a program is, its own flags, and every field of its configuration with default and comment.

Consumes the configuration's dataclasses, whose comments are the documentation of the fields; ends with exit code 0.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator, Sequence

from absl import app

HELP = re.compile(r"--?(help|helpshort|helpfull|h|\?)")
WIDTH = 120
COMMENT_AT = 46  # column


INTRODUCTION = """# Configurations

A configuration is a Python file with `get_config(arg=None)`, which starts from `dora_jax.config.defaults()` and sets what differs; its first line is the command that
runs it. `--config=configs/quickstart.py:tiny` hands `tiny` to it, `--config.field=value` overrides one field, and an optional `sweep()` lists the points of
`python -m dora_jax.sweep`. A field that is unknown or wrong is named in one sentence, all of them at once, before anything starts.

| file | what it runs |
|---|---|
| `quickstart.py` | a small base model made on the spot, then RL on sums: two cores, no network, minutes |
| `moe.py` | the quickstart with a small mixture of experts: the argument names the family |
| `rows.py` | rows of your own with an answer, and the reward that compares |
| `gsm8k.py` | grade-school word problems, of any chat model or of Qwen3's sizes; its curve is not measured |
| `qwen3.py` | Qwen3 of the hub's sizes on a machine or a slice: the argument names both |
| `sim/` | the orchestrator in virtual time: the paper's clusters, fair tables of all modes, what-if questions |

## Every field

A default that is empty, 0 or `auto` where the comment says so is chosen by the platform; `--dry_run` prints what was chosen and why. This list is what `--help` prints
and is made of the comments in `dora_jax/config.py` and `dora_jax/config_task.py`; `python tests/test_config_page.py` writes this page anew.
"""


def asked_for(args: Sequence[str]) -> bool:
    return any(HELP.fullmatch(arg) for arg in args)


def show(args: Sequence[str], config: type) -> None:
    """Prints the help and exits with code 0; it lists the flags defined so far. config: the dataclass of all sections."""
    app.usage(shorthelp="--helpfull" not in args, writeto_stdout=True)
    print(
        "\n".join(["", "configuration, as --config.field=value; a field's default and what it means:", *fields(config)])
    )
    raise SystemExit(0)


def fields(cls: type, prefix: str = "") -> Iterator[str]:
    """Fields of this section, then those inside its sections, each under its heading."""
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.MULTILINE))
    hints = typing.get_type_hints(cls)
    sections = {
        field.name: hints[field.name]
        for field in dataclasses.fields(cls)
        if dataclasses.is_dataclass(hints[field.name])
    }
    sections |= {
        f"{name}.NAME": each
        for name, hint in hints.items()
        if typing.get_origin(hint) is dict
        for each in typing.get_args(hint)
        if dataclasses.is_dataclass(each)
    }  # entries that the user names
    yield ""
    if re.match(r"\w", doc := inspect.getdoc(cls) or "") and not doc.startswith(
        f"{cls.__name__}("
    ):  # dataclasses writes a signature where a class has no docstring
        yield from textwrap.wrap(" ".join(doc.split()), WIDTH, initial_indent="  ", subsequent_indent="  ")
    for field in dataclasses.fields(cls):
        if field.name not in sections:
            yield from _line(f"{prefix}{field.name}={_default(field)}", comments.get(field.name, ""))
    for name, inner in sections.items():
        yield from fields(inner, f"{prefix}{name}.")


def _default(field: dataclasses.Field) -> str:
    make = field.default_factory
    value = field.default if make is dataclasses.MISSING else make()
    return value if isinstance(value, str) and value else repr(value)


def _line(setting: str, comment: str) -> list[str]:
    head = f"  {setting}"
    if not comment:
        return [head]
    head = head.ljust(COMMENT_AT) if len(head) < COMMENT_AT else f"{head}  "
    return textwrap.wrap(comment, WIDTH, initial_indent=head, subsequent_indent=" " * COMMENT_AT)


def page(config: type) -> str:
    """configs/README.md: every field, with default and comment."""
    return f"{INTRODUCTION}\n```text{chr(10).join(fields(config))}\n```\n"
