"""Values -> text of the page. Law: nothing that a run wrote is markup."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from dora_jax.report.load import number

# Marks that turn the direction of what follows: one that is never closed would reach beyond its element.
TURNS = re.compile("[\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with the marks that turn its direction shown by their number."""
    return TURNS.sub(lambda mark: f"<U+{ord(mark[0]):04X}>", text)


def escaped(value: Any) -> str:
    return escape(visible(str(value)))


def isolated(value: Any) -> str:
    """Text whose direction of writing changes nothing around it."""
    return f"<bdi>{escaped(value)}</bdi>"


def table(head: Iterable[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Cells are text, whatever they hold."""
    names = list(head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escaped(cell)}</td>" for _, cell in zip(names, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<div class=scroll><table><tr>{''.join(f'<th>{escaped(h)}</th>' for h in names)}</tr>{lines}</table></div>"


def figure(value: Any, form: str = ".4g") -> str:
    """A number in this form; a dash for anything else."""
    known = number(value)
    return "-" if known is None else format(known, form)


def percent(value: Any) -> str:
    return figure(value, ".1%")


def rounded(value: Any) -> float | None:
    known = number(value)
    return None if known is None else float(f"{known:.5g}")


def as_json(value: Any) -> str:
    """JSON for a script element: no `<`, so that nothing in it ends the element, and no NaN."""
    return (
        json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    )
