"""What a person sees while a run goes on: a progress line that moves, and one line a step above it.

Consumes phases, token counts and step records from any thread; on a terminal the progress line is redrawn eight times
a second by a thread of its own, so it moves while XLA compiles too; elsewhere (a file, CI) it is printed, without the
spinner, when nothing else was printed for `period_s`.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

REFRESHES_PER_S = 8
RATE_WINDOW_S = 10.0  # tokens/s are counted over this much of the past
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
WIDTH = 120  # columns of a line that stays
SHARES = {"failed": "groups/failed_share", "skipped": "prompts/skipped_share"}  # shown where they are not 0
EVAL_TERM = "eval/reward/term/"
TASK_SHARE = "task/share/"
UNITS = (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))  # of the time that is left; at least two of one

Metrics = Mapping[str, float | int | None]


class Console:
    """Thread-safe. `start` and `stop` bracket the moving line; step and note lines may come at any time."""

    def __init__(
        self,
        file: TextIO | None = None,
        *,
        tty: bool | None = None,
        period_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._file = file or sys.stdout
        self._tty = self._file.isatty() if tty is None else tty
        self._period_s = period_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s = self._printed_s = clock()
        self._phases: dict[str, str] = {}
        self._facts: Mapping[str, Any] = {}
        self._tokens = 0
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self._stopping = threading.Event()
        self._live: Any = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._tty:
            import rich.console
            import rich.live
            import rich.text

            def draw() -> rich.text.Text:
                frame = SPINNER[int(self._clock() * REFRESHES_PER_S) % len(SPINNER)]
                return rich.text.Text(f"{frame} {self.progress()}", no_wrap=True, overflow="ellipsis")

            console = rich.console.Console(file=self._file, force_terminal=True)
            self._live = rich.live.Live(
                get_renderable=draw, console=console, refresh_per_second=REFRESHES_PER_S, transient=True
            )
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._print_now_and_then, name="console", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._stopping.set()
        if self._live:
            self._live.stop()
            self._live = None
        if self._thread:
            self._thread.join()
            self._thread = None

    def phase(self, role: str, text: str) -> None:
        """What this role does now; "all" speaks for all roles, an empty text says nothing any more."""
        with self._lock:
            if role == "all":
                self._phases = {}
            self._phases.pop("all", None)
            self._phases[role] = text

    def count(self, tokens: int) -> None:
        with self._lock:
            self._tokens += tokens
            self._recent.append((self._clock(), tokens))

    def status(self, facts: Mapping[str, Any]) -> None:
        """facts: versions (live version -> samples that decode) and waits (words); either may be missing."""
        self._facts = facts

    def step(self, step: int, metrics: Metrics, waits: Sequence[str] = ()) -> None:
        """waits: phrases, the most important first."""
        self.note(evaluation_line(step, metrics) if "eval/prompts" in metrics else step_line(step, metrics, waits))

    def note(self, text: str) -> None:
        """One line that stays."""
        self._printed_s = self._clock()
        live = self._live
        if live:  # not under our lock: the redrawing thread takes Live's lock first, then ours
            live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        with self._lock, contextlib.suppress(OSError):  # a log on a full disk: the run goes on without this line
            print(text, file=self._file, flush=True)

    def progress(self) -> str:
        """The progress line without its spinner."""
        with self._lock:
            now = self._clock()
            while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
                self._recent.popleft()
            rate = sum(tokens for _, tokens in self._recent) / max(min(now - self._began_s, RATE_WINDOW_S), 1.0)
            parts = [f"{self._tokens:,} tokens, {rate:,.0f} tokens/s"] if self._tokens else []
            parts += [text if role == "all" else f"{role}: {text}" for role, text in self._phases.items() if text]
            if self._facts.get("versions"):
                parts.append("samples " + " ".join(f"v{v}:{n}" for v, n in sorted(self._facts["versions"].items())))
            if self._facts.get("waits"):
                parts.append(str(self._facts["waits"]))
        seconds = int(now - self._began_s)
        return f"{seconds // 60}:{seconds % 60:02}  " + " | ".join(parts or ["starting"])

    # ------------------------------------------------------------ private

    def _print_now_and_then(self) -> None:
        while not self._stopping.wait(min(self._period_s, 1.0) / 4):
            if self._clock() - self._printed_s >= self._period_s:
                self.note("... " + self.progress())


def step_line(step: int, metrics: Metrics, waits: Sequence[str] = ()) -> str:
    """A record in one line of at most WIDTH columns: what a person watches, in a fixed order; what the record lacks is
    left out, and what matters least where the line is too long."""
    live = metrics.get("versions/live")
    versions = "" if live is None else f"{live} version{'s' * (live != 1)}"
    length, lag = _form(metrics, "response/length", "length {:.0f}"), _form(metrics, "lag/mean", "lag {:.1f}")
    shares = [f"{word} {metrics[name]:.0%}" for word, name in SHARES.items() if metrics.get(name)]
    tasks = " ".join(
        f"{name.removeprefix(TASK_SHARE)} {share:.0%}" for name, share in metrics.items() if name.startswith(TASK_SHARE)
    )
    speed = _form(metrics, "rollout/tokens_per_s", "{:,.0f} tok/s")
    left_s = metrics.get("time/left_s")  # until the last step is published
    unit, seconds = next((u for u in UNITS if left_s and left_s >= 2 * u[1]), UNITS[-1])
    parts = [
        f"step {step:>4}",
        _form(metrics, "reward/mean", "reward {:.3f}"),
        _form(metrics, "sft/loss", "loss {:.3f}"),
        *shares,
        tasks,
        length,
        lag,
        versions,
        speed,
        f"ETA {left_s / seconds:.0f} {unit}" if left_s else "",
        *waits,
    ]
    return _fitting(parts, [*waits[1:], versions, length, lag, speed, tasks])


def evaluation_line(version: int, metrics: Metrics) -> str:
    """The evaluation of a version in one line."""
    k = metrics.get("eval/k")
    terms = [(name.removeprefix(EVAL_TERM), value) for name, value in metrics.items() if name.startswith(EVAL_TERM)]
    each = f"({', '.join(f'{name} {value:.3f}' for name, value in terms)})" if len(terms) > 1 else ""
    pass_at_k = _form(metrics, "eval/pass_at_k", f"pass@{k} {{:.1%}}") if k != 1 else ""
    interval = " to ".join(_form(metrics, f"eval/accuracy_{end}", "{:.1%}") for end in ("low", "high"))
    interval = f" ({interval})" if "eval/accuracy_low" in metrics else ""
    length = _form(metrics, "eval/response_length", "length {:.0f}")
    prompts = _form(metrics, "eval/prompts", "{} prompts")
    parts = [
        f"eval {version:>4}",
        _form(metrics, "eval/accuracy", "accuracy {:.1%}") + interval,
        pass_at_k,
        _form(metrics, "eval/reward/mean", "reward {:.3f}"),
        each,
        length,
        prompts,
        _form(metrics, "eval/failed", "{} without a score"),
    ]
    return _fitting(parts, [prompts, length, each, pass_at_k])


# ---------------------------------------------------------------- private


def _form(metrics: Metrics, name: str, form: str) -> str:
    return "" if metrics.get(name) is None else form.format(metrics[name])


def _fitting(parts: Sequence[str], expendable: Sequence[str]) -> str:
    """Joins the parts that are not empty; drops expendable parts, the first ones first, while the line is over
    WIDTH."""
    kept = [part for part in parts if part]
    for part in expendable:
        if len("  ".join(kept)) > WIDTH and part in kept:
            kept.remove(part)
    return "  ".join(kept)
