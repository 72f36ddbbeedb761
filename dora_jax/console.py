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
from collections.abc import Callable, Mapping
from typing import Any, TextIO

REFRESHES_PER_S = 8
RATE_WINDOW_S = 10.0  # tokens/s are counted over this much of the past
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

Metrics = Mapping[str, float | int | None]


class Console:
    """Thread-safe. `start` and `stop` bracket the moving line; step and note lines may come at any time."""

    def __init__(self, file: TextIO | None = None, *, tty: bool | None = None, period_s: float = 10.0,
                 clock: Callable[[], float] = time.monotonic):
        self._file = file or sys.stdout
        self._tty = self._file.isatty() if tty is None else tty
        self._period_s = period_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s = self._printed_s = clock()
        self._phases: dict[str, str] = {}
        self._facts: Mapping[str, Any] = {}
        self._held_out = ""
        self._tokens = 0
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self._stopping = threading.Event()
        self._live: Any = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._tty:
            self._live = self._new_live()
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
        """What this role does now; "all" speaks for everybody, an empty text says nothing any more."""
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

    def step(self, step: int, metrics: Metrics, waits: str = "") -> None:
        accuracy = metrics.get("eval/accuracy")
        if accuracy is not None:
            self._held_out = f"held-out {accuracy:.1%} (version {step})"
        self.note(step_line(step, metrics, self._held_out, waits))

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
            parts = [f"{self._tokens:,} tokens, {self._rate(now):,.0f} tokens/s"] if self._tokens else []
            parts += [text if role == "all" else f"{role}: {text}" for role, text in self._phases.items() if text]
            if self._facts.get("versions"):
                parts.append("samples " + " ".join(f"v{v}:{n}" for v, n in sorted(self._facts["versions"].items())))
            if self._facts.get("waits"):
                parts.append(str(self._facts["waits"]))
        seconds = int(now - self._began_s)
        return f"{seconds // 60}:{seconds % 60:02}  " + " | ".join(parts or ["starting"])

    # ------------------------------------------------------------ private

    def _rate(self, now: float) -> float:
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
            self._recent.popleft()
        span_s = max(min(now - self._began_s, RATE_WINDOW_S), 1.0)
        return sum(tokens for _, tokens in self._recent) / span_s

    def _new_live(self) -> Any:
        import rich.console
        import rich.live
        import rich.text

        def draw() -> rich.text.Text:
            frame = SPINNER[int(self._clock() * REFRESHES_PER_S) % len(SPINNER)]
            return rich.text.Text(f"{frame} {self.progress()}", no_wrap=True, overflow="ellipsis")

        console = rich.console.Console(file=self._file, force_terminal=True)
        return rich.live.Live(get_renderable=draw, console=console, refresh_per_second=REFRESHES_PER_S, transient=True)

    def _print_now_and_then(self) -> None:
        while not self._stopping.wait(min(self._period_s, 1.0) / 4):
            if self._clock() - self._printed_s >= self._period_s:
                self.note("... " + self.progress())


def step_line(step: int, metrics: Metrics, held_out: str = "", waits: str = "") -> str:
    """A record in one line: what a person watches, in a fixed order; what the record lacks is left out."""
    parts = [f"step {step:>4}"]
    for name, form in (("reward/mean", "reward {:.3f}"), ("sft/loss", "loss {:.3f}")):
        if metrics.get(name) is not None:
            parts.append(form.format(metrics[name]))
    parts += [held_out] if held_out else []
    if metrics.get("response/length") is not None:
        parts.append(f"length {metrics['response/length']:.0f}")
    parts += [_lags(metrics)] if _lags(metrics) else []
    if metrics.get("versions/live") is not None:
        parts.append(f"{metrics['versions/live']} versions live")
    parts += _waits(metrics, waits)
    if metrics.get("rollout/tokens_per_s") is not None:
        parts.append(f"{metrics['rollout/tokens_per_s']:,.0f} tokens/s")
    return "  ".join(parts)


def _lags(metrics: Metrics) -> str:
    """The histogram of groups over lags, from lag/0, lag/1, ..."""
    found = {name.removeprefix("lag/"): share for name, share in metrics.items() if name.startswith("lag/")}
    shares = sorted((int(lag), share) for lag, share in found.items() if lag.isdecimal())
    return "lag " + " ".join(f"{lag}:{share:.0%}" for lag, share in shares) if shares else ""


def _waits(metrics: Metrics, waits: str) -> list[str]:
    """Who waited, for what share of the step, and in words on whom."""
    shares = []
    wait_s, step_s = metrics.get("trainer/wait_s"), metrics.get("trainer/step_s")
    if wait_s is not None and step_s:
        shares.append(f"trainer {wait_s / (wait_s + step_s):.0%}")
    if metrics.get("rollout/idle_share") is not None:
        shares.append(f"rollout {metrics['rollout/idle_share']:.0%}")
    return ([f"waiting: {', '.join(shares)}"] if shares else []) + ([waits] if waits else [])
