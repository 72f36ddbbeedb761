"""What the policy wrote -> the sections of the page where a person reads it, and the token data that page.js colours.

The text stands in the page; what each token got is data, of TOKEN_VIEWS samples at most, so that the page stays small.
Held-out prompts are shown in their order, each with its first sample: nothing is picked by what it looks like.
"""

from __future__ import annotations

from typing import Any

from dora_jax.report import markup
from dora_jax.report.load import Rollouts, Row, RunData, configured, number
from dora_jax.types import RENEWAL, issued_first_as

SHOWN_SAMPLES = 400  # groups; more are thinned out evenly
SHOWN_CHARACTERS = 4000  # of a text
TOKEN_VIEWS = 60  # samples with their tokens one by one
COLUMNS = ("text", "advantage", "gap")
PAIRS, MORE_PAIRS = 3, 21  # held-out prompts, in sight and behind a fold
PAIR_CHARACTERS = 1200  # of a text of those

Tokens = list[list[Any]]  # of a sample: a column each of COLUMNS


def before_and_after(data: RunData) -> str:
    """Held-out prompts with their answers of the first and of the last version evaluated side by side: HTML."""
    pairs = [pair for pair in data.rollouts.heldout if pair[0]["step"] < pair[1]["step"]]
    name, once = markup.escaped(data.name), data.rollouts.heldout and not pairs
    if once:
        pairs = data.rollouts.heldout
        sentence = f"each prompt was evaluated once, {len(pairs):,} in all (eval.every; eval.prompts, task.heldout)."
    elif not pairs:
        return f"<p>{name}: the workdir has no answer to a held-out prompt.</p>"
    else:
        sentence = f"the first sample of each of {len(pairs):,} prompts, which are not trained on."
        ends = [tuple(_samples(row)[0].get("solved") for row in pair) for pair in pairs]
        if all(isinstance(end, bool) for pair in ends for end in pair):
            both, after, before, neither = map(ends.count, ((True, True), (False, True), (True, False), (False, False)))
            sentence += f" Solved: {both:,} before and after, {after:,} only after, {before:,} only before, "
            sentence += f"{neither:,} neither."
    shown = []
    for pair in pairs[: PAIRS + MORE_PAIRS]:
        cells = ""
        for title, row in zip(("",) if once else ("before: ", "after: "), pair, strict=False):
            sample = _samples(row)[0]
            solved = ", solved" if sample.get("solved") is True else ""
            caption = f"{title}version {row['step']}; reward {markup.figure(sample.get('reward'))}{solved}"
            cells += f"<div><p class=note>{caption}</p>{_text(sample.get('text'), PAIR_CHARACTERS)}</div>"
        shown.append(
            f"<div class=pair>{_text(pair[0]['prompt'], PAIR_CHARACTERS)}<p class=note>expected: "
            f"{markup.isolated(str(pair[0].get('expected'))[:200])}</p><div class=two>{cells}</div></div>"
        )
    fold = f"<details><summary>{len(shown) - PAIRS} more prompts</summary>{''.join(shown[PAIRS:])}</details>"
    return f"<p>{name}: {sentence}</p>{''.join(shown[:PAIRS])}{fold if len(shown) > PAIRS else ''}"


def stored(data: RunData) -> str:
    """How much of what the policy wrote the workdir holds, and may hold: HTML."""
    texts = data.rollouts
    if not texts.groups:
        return ""
    kinds = ", ".join(f"{count:,} {'held-out' if kind == 'heldout' else kind}" for kind, count in texts.groups.items())
    budget = number(configured(data, "monitor.samples_bytes"))
    limit = f" of a budget of {budget / 2**20:,.0f} MiB (monitor.samples_bytes)" if budget else ""
    return (
        f"<p>Groups in the workdir: {kinds}; {texts.size_bytes / 2**20:,.1f} MiB{limit}. "
        "<code>dora_jax.samples(WORKDIR, step=...)</code> gives all of their samples; below are the best and the worst "
        "of each step's most mixed group.</p>"
    )


def section(texts: Rollouts, run: int) -> tuple[str, list[Tokens]]:
    """(HTML, the tokens to which it refers by their place in the list)."""
    rows = texts.steps
    # Evenly; rows with tokens one by one go first to their places.
    if len(rows) <= SHOWN_SAMPLES:
        shown = rows
    else:
        with_tokens = [i for i, row in enumerate(rows) if any(_tokens(sample) for sample in _samples(row))]
        chosen = (
            {with_tokens[i * len(with_tokens) // TOKEN_VIEWS] for i in range(TOKEN_VIEWS)}
            if len(with_tokens) > TOKEN_VIEWS
            else set(with_tokens)
        )
        rest = SHOWN_SAMPLES - len(chosen)
        chosen |= {i * len(rows) // rest for i in range(rest)}
        shown = [rows[i] for i in sorted(chosen)]
    found = [_tokens(sample) for row in shown for sample in _samples(row)]
    every = max(1, sum(tokens is not None for tokens in found) // TOKEN_VIEWS)
    views: list[Tokens] = []
    seen = 0
    items = []
    for row in shown:
        answers = ""
        for sample in _samples(row):
            tokens, place = _tokens(sample), ""
            if tokens is not None:
                seen += 1
                if seen % every == 0 and len(views) < TOKEN_VIEWS:
                    place = f"<p class=tokens data-run={run} data-view={len(views)}></p>"
                    views.append(tokens)
            answers += f"<p class=note>{_caption(sample, tokens)}</p>{_text(sample.get('text'))}{place}"
        rewards = ", ".join(markup.figure(s.get("reward")) for s in _samples(row))
        # A group as a person counts it: the place of its prompt in the stream, and whether it was given up before
        group = row.get("group")
        if isinstance(group, int) and group >= RENEWAL:
            group = f"{issued_first_as(group)} (issued again)"
        step, group, version = map(markup.isolated, (row.get("step"), group, row.get("version")))
        items.append(
            f"<details data-run={run} data-step='{markup.escaped(row.get('step'))}'><summary>step {step}, group "
            f"{group}, version {version}: rewards {rewards}</summary>{_text(row.get('prompt'))}<p class=note>expected: "
            f"{markup.isolated(str(row.get('expected'))[:200])}</p>{answers}</details>"
        )
    return "".join(items) or "<p>No sample is recorded.</p>", views


# ---------------------------------------------------------------- private


def _samples(row: Row) -> list[Row]:
    samples = row.get("samples")
    return [s for s in samples if isinstance(s, dict)] if isinstance(samples, list) else []


def _tokens(sample: Row) -> Tokens | None:
    """None: the row has none, or columns that do not fit together."""
    table = sample.get("by_token")
    columns = [table.get(name) for name in COLUMNS] if isinstance(table, dict) else []
    text, *figures = [column for column in columns if isinstance(column, list)] or [[]]
    if not text or [len(column) for column in figures] != [len(text)] * (len(COLUMNS) - 1):
        return None
    return [[markup.visible(str(piece)) for piece in text], *([number(x) for x in column] for column in figures)]


def _caption(sample: Row, tokens: Tokens | None) -> str:
    """A line of HTML."""
    caption = (
        f"reward {markup.figure(sample.get('reward'))}, {markup.figure(sample.get('reward_above_mean'))} above its "
        f"group's mean; {markup.isolated(sample.get('tokens', '-'))} tokens; "
        f"{markup.isolated(sample.get('finish', '-'))}; mean log-prob {markup.figure(sample.get('mean_logprob'))}, "
        f"lowest {markup.figure(sample.get('min_logprob'))}"
    )
    if tokens is None:
        return caption
    text, advantage, gap = tokens
    known = [(abs(x), i) for i, x in enumerate(gap) if x is not None]
    ends = [x for x in advantage if x is not None]
    if ends:
        caption += f"; advantage {markup.figure(min(ends))} to {markup.figure(max(ends))}"
    if known:
        most = max(known)[1]
        caption += f"; largest gap trainer - engine {markup.figure(gap[most])} at token {most} "
        caption += f"({markup.isolated(repr(text[most])[:40])})"
    return caption


def _text(value: Any, most: int = SHOWN_CHARACTERS) -> str:
    text = str(value if value is not None else "")
    more = f" [... {len(text) - most:,} characters]" if len(text) > most else ""
    return f"<pre dir=auto class=sample>{markup.escaped(text[:most] + more)}</pre>"
