"""What a person sees of a run: one metrics record a step, evaluations, trajectories in a readable file.

Consumes the payload records that `Coordinator` tells and the events of the loop; decides nothing.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dora_jax.base.lanes import WAITING, doing, summed
from dora_jax.base.metrics import Writer
from dora_jax.config import RunError
from dora_jax.orchestrate import events as ev
from dora_jax.orchestrate.core import Orchestrator
from dora_jax.orchestrate.modes import OrchestratorConfig
from dora_jax.runtime.common.idle_time import IdleReport, StepSeconds
from dora_jax.runtime.common.sample_log import SampleLog, SeenTokens
from dora_jax.runtime.common.seams import Environments, RunPlugin
from dora_jax.runtime.common.worker import Finished, StepDone
from dora_jax.runtime.observe.evaluations import Evaluations, reward_metrics, sampled_tokens
from dora_jax.tasks.pool import GroupFailure
from dora_jax.tasks.prompts import PromptTooLong
from dora_jax.tasks.solved import TOTAL, Solved
from dora_jax.tasks.source import shorten
from dora_jax.types import GroupId, Prompt, SampleId, ScoredGroup, Version, is_eval, is_training

MIN_GROUPS_FOR_FAILED_SHARE = 100  # below this one failure says nothing about a share
MIN_GROUPS_ALL_FAILED = 10  # nothing was scored so far: a hanging reward takes minutes for each of these
MAX_KINDS = 20  # of failures that are printed
WIDTH = 100  # columns of a printed text
FAILED_SHARE = 0.01  # of the episodes: above it the run says so
SHOWN_INSTANCES = 16  # whose seconds stand in timeline.jsonl, one by one
RECENT_STEPS = 20  # whose mean duration says when the run will end


class VersionOverlap:
    """Time during which training samples of two or more versions held slots."""

    def __init__(self) -> None:
        self._version: dict[SampleId, Version] = {}
        self._running: collections.Counter[Version] = collections.Counter()
        self._last_s = time.monotonic()
        self.total_s = 0.0
        self.overlap_s = 0.0

    def __call__(self, event: ev.Event) -> None:
        now = time.monotonic()
        self.total_s += now - self._last_s
        if len(self._running) >= 2:
            self.overlap_s += now - self._last_s
        self._last_s = now
        match event:
            case ev.SampleStarted(id=sample, version=version) if is_training(sample.group_id):
                self._version[sample] = version
                self._running[version] += 1
            case ev.SampleDone(id=sample) | ev.SampleCancelled(id=sample):
                if (ended := self._version.pop(sample, None)) is not None:
                    self._running[ended] -= 1
                    if not self._running[ended]:
                        del self._running[ended]


class TaskShares:
    """For a mix: each task's share of the groups trained on since this process began, and its rewards in the last
    step."""

    def __init__(self, config: OrchestratorConfig):
        self._config = config
        self._groups: collections.Counter[str] = collections.Counter()

    def metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Return the metrics after a step on these groups; none where there is one task."""
        if not self._config.task_cycle:
            return {}
        of_task: dict[str, list[np.ndarray]] = {task: [] for task in sorted(self._config.tasks)}
        for group in groups:
            of_task[self._config.task(group.group_id)].append(group.rewards)
        self._groups.update({task: len(rewards) for task, rewards in of_task.items()})
        shares = {f"task/share/{task}": self._groups[task] / self._groups.total() for task in of_task}
        return shares | {f"task/reward/{task}": float(np.mean(rewards)) for task, rewards in of_task.items() if rewards}


class ScoringFailures:
    def __init__(self, max_failed_share: float, prompt_of: Callable[[GroupId], Prompt], notify: Callable[[str], None]):
        self._max_failed_share, self._prompt_of, self._notify = max_failed_share, prompt_of, notify
        self._kinds: set[str] = set()
        self._lengths: list[int] = []
        self.scored = 0
        self.skipped = 0  # their prompts are too long
        self._failed = 0

    def failed(self, failure: GroupFailure) -> None:
        """RunError where more groups fail than task.max_failed_share allows."""
        self._failed += 1
        self._lengths.extend(failure.lengths)
        kind = failure.kind or failure.reason
        if kind not in self._kinds and len(self._kinds) < MAX_KINDS:
            self._kinds.add(kind)
            prompt = self._prompt_of(failure.group_id)
            lines = [
                f"a group cannot be scored: {failure.reason}; others like it are only counted, in groups/failed_share",
                f"  prompt   {shorten(repr(prompt.text), WIDTH)}",
                f"  answer   {shorten(repr(prompt.answer), WIDTH)}",
            ]
            self._notify("\n".join(lines + [f"  response {shorten(repr(failure.response), WIDTH)}"]))
        total = self._failed + self.scored
        enough = total >= MIN_GROUPS_FOR_FAILED_SHARE or self._failed == total >= MIN_GROUPS_ALL_FAILED
        if enough and self._failed > self._max_failed_share * total:
            lengths = np.quantile(self._lengths or [0], [0.5, 0.9])
            raise RunError(
                f"{self._failed} of {total} groups could not be scored (task.max_failed_share = "
                f"{self._max_failed_share:.1%}); response length p50 {lengths[0]:.0f}, p90 {lengths[1]:.0f}; last "
                f"reason: {failure.reason}"
            )

    def metrics(self) -> dict[str, float]:
        """Since this process began."""
        groups = self._failed + self.scored
        lengths = np.quantile(self._lengths or [0], [0.5, 0.9])
        return {
            "groups/failed_share": self._failed / max(1, groups),
            "groups/failed_length_p50": float(lengths[0]),
            "groups/failed_length_p90": float(lengths[1]),
            "prompts/skipped": self.skipped,
            "prompts/skipped_share": self.skipped / max(1, groups + self.skipped),
        }


class EpisodeFailures:
    """Notes once that the share of failed episodes is above FAILED_SHARE."""

    def __init__(self, environments: Environments | None, notify: Callable[[str], None]):
        self._environments, self._notify = environments, notify
        self._warned = False

    def metrics(self) -> Mapping[str, float]:
        """What the environments count, where the run has some."""
        counted = self._environments.stats() if self._environments else {}
        share = counted.get("environment/failed_share", 0.0)
        if share > FAILED_SHARE and not self._warned:
            self._warned = True
            counts = {
                name.rpartition("/")[2]: n for name, n in counted.items() if "/failed_" in name and "_to_" in name
            }
            self._notify(
                f"{share:.1%} of the episodes have failed, and their groups with them; by cause and response length: "
                f"{', '.join(f'{name} {n:.0f}' for name, n in counts.items())}"
            )
        return counted


class RunLog(RunPlugin):
    """Turns records and events into metrics, console lines and the samples to read."""

    does = "metrics"

    def __init__(
        self,
        *,
        workdir: Path,
        writer: Writer,
        orchestrator: Orchestrator,
        seconds: StepSeconds,
        in_timeline: Callable[..., None],
        decode: Callable[[Sequence[int]], str],
        prompt_of: Callable[[GroupId], Prompt],
        solved: Solved | None,
        steps: int,
        max_failed_share: float,
        views: SeenTokens | None = None,
        environments: Environments | None = None,
        noisy: bool = False,
        log_bytes: int = 0,
        samples_bytes: int = 0,
    ):
        """seconds: of the lanes of the run. in_timeline: writes a row of timeline.jsonl. noisy: every second held-out
        sample meets noise. log_bytes, samples_bytes: budgets, see `SampleLog`."""
        # records of versions that an earlier process of this run has evaluated; those to come are added
        self.evaluations: dict[Version, Mapping[str, float]] = dict(writer.evaluations)
        self.metrics: dict[str, float] = {}
        self._writer = writer
        self._orchestrator = orchestrator
        self._seconds, self._in_timeline = seconds, in_timeline
        self._steps = steps
        self.samples = SampleLog(
            workdir, writer.note, decode, prompt_of, views,
            log_bytes=log_bytes, samples_bytes=samples_bytes, resumed_at=writer.resumed_at,
        )  # fmt: skip
        self._solved = solved
        self._scored: dict[GroupId, ScoredGroup] = {}  # whose GroupScored has not been seen
        self._trainable: collections.Counter[bool] = collections.Counter()  # groups scored since the last step
        self._overlap = VersionOverlap()
        self._idle = IdleReport(orchestrator.waiting)
        self._evaluating = Evaluations(orchestrator.state, solved, self._evaluated, writer.note, noisy)
        self._unscored = ScoringFailures(max_failed_share, prompt_of, writer.note)
        self._episodes = EpisodeFailures(environments, writer.note)
        self._moved: set[SampleId] = set()
        self._moved_finished = 0
        self._served = TaskShares(orchestrator.state.config)
        self._tokens = 0
        self._began_s = time.monotonic()
        self._step_s: float | None = None  # when the last step ended; None: nothing has happened yet
        self._recent_s: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)  # of steps but the first

    # ---------------------------------------------------------- console

    def record(self, record: Any) -> None:
        """Listener of the world's payload records."""
        match record:
            case Finished(sample=sample):
                self._tokens += len(sample.out_ids)
                self._writer.count_tokens(len(sample.out_ids))
                if sample.id in self._moved:
                    self._moved.discard(sample.id)
                    self._moved_finished += 1
            case ScoredGroup() if is_eval(record.group_id):
                with doing("evaluation"):
                    if record.group_id in self._orchestrator.state.groups:  # else an earlier process has written it
                        rule = self._solved
                        named = rule is not None and rule.term in (*record.parts, TOTAL)
                        solved = rule.of(record) if rule and named else None
                        self.samples.keep(record.version, "heldout", record, solved=solved)
                    self._evaluating.scored(record)
            case ScoredGroup():
                self._unscored.scored += 1
                self._scored[record.group_id] = record
            case GroupFailure():
                if record.samples:
                    rewards = np.full(len(record.samples), np.nan, np.float32)
                    version = record.samples[0].version
                    group = ScoredGroup(
                        group_id=record.group_id, version=version, samples=record.samples, rewards=rewards, parts={}
                    )
                    self.samples.keep(self._orchestrator.state.ledger.base + 1, "failed", group, reason=record.reason)
                if is_eval(record.group_id):
                    self._evaluating.failed(record)
                self._unscored.failed(record)
            case StepDone():
                self._step_done(record)
            case PromptTooLong():
                self._unscored.skipped += 1

    def event(self, event: ev.Event, commands: Sequence[ev.Command]) -> None:
        """Observer of the loop."""
        if self._step_s is None:  # compiling and waiting for instances is no part of the first step
            self._step_s = time.monotonic()
            self._seconds.begin()
        self._overlap(event)
        self._idle(event)
        match event:
            case ev.SampleMoved():
                self._moved.add(event.id)
            case ev.GroupScored(group_id=group_id, trainable=trainable):
                scored = self._scored.pop(group_id, None)
                self._trainable[trainable] += is_training(group_id)
                if scored is not None and not trainable:
                    self.samples.keep(self._orchestrator.state.ledger.base + 1, "filtered", scored)
            case ev.TimePassed():
                self._writer.status(self._orchestrator.summary())
                self._show()
        for command in commands:
            if isinstance(command, ev.Train):
                self._writer.phase("trainer", f"training version {command.base_version + 1}")

    def close(self) -> None:
        """Wait until all samples are written."""
        self.samples.close()
        self._show()

    # ------------------------------------------------------------ private

    def _show(self) -> None:
        """Give sinks the samples that are ready for them."""
        while not self.samples.tables.empty():
            self._writer.samples(*self.samples.tables.get())

    def _evaluated(self, version: Version, metrics: dict[str, float]) -> None:
        metrics["time/run_s"] = time.monotonic() - self._began_s
        self.evaluations[version] = metrics
        self._writer.write(version, metrics)
        self.samples.evaluated(version)

    def _step_done(self, done: StepDone) -> None:
        now = time.monotonic()
        # since the last step ended
        first, began_s, self._step_s = not self.metrics, self._step_s, now
        elapsed_s = now - (self._began_s if began_s is None else began_s)
        if not first:
            self._recent_s.append(elapsed_s)
        lanes = self._seconds.take(self._idle.causes())
        instances = [spent_s for name, spent_s in lanes.items() if name.isdigit()]
        mean = {does: s / len(instances) for does, s in summed(*instances).items()}
        idle_share = sum(s for does, s in mean.items() if does.startswith(WAITING)) / elapsed_s
        shown = {name: spent_s for name, spent_s in lanes.items() if not name.isdigit() or int(name) < SHOWN_INSTANCES}
        rounded = {name: {does: round(s, 4) for does, s in spent_s.items()} for name, spent_s in shown.items()}
        self._in_timeline({"spent": rounded, "step": done.version, "seconds": round(elapsed_s, 4)})
        metrics = group_metrics(done.groups, done.version - 1)
        metrics |= {**self._served.metrics(done.groups), **done.metrics}
        metrics |= {**self._unscored.metrics(), **self._episodes.metrics()}
        if scored := self._trainable.total():
            metrics["groups/filtered_share"] = self._trainable[False] / scored
            self._trainable.clear()
        metrics |= {
            "rollout/tokens_per_s": self._tokens / elapsed_s,
            "rollout/idle_share": idle_share,
            "trainer/wait_s": done.wait_s,
            "trainer/step_s": done.step_s,
            "versions/side_by_side_share": self._overlap.overlap_s / (self._overlap.total_s or 1.0),
            "moves/finished": self._moved_finished,
            **{
                f"seconds/{role}/{does.replace(' ', '_')}": s
                for role, spent_s in (("instances", mean), *lanes.items())
                if not role.isdigit()
                for does, s in spent_s.items()
            },
            "time/step_s": elapsed_s,
            "time/run_s": now - self._began_s,
        }
        if self._recent_s:
            metrics["time/left_s"] = (self._steps - done.version) * float(np.mean(self._recent_s))
        facts = self._orchestrator.summary()
        metrics |= {
            "versions/live": len(facts["versions"]),
            "versions/stride": facts["stride"],
            "moves/total": facts["moves"],
            "reloads/total": facts["reloads"],
            **facts["metrics"],
        }
        self._tokens = 0
        self.metrics = metrics
        self._writer.phase("trainer", "")
        waits = self._idle.phrases(
            {"trainer": done.wait_s / max(done.wait_s + done.step_s, 1e-9), "rollouts": idle_share}
        )
        self._writer.write(done.version, metrics, waits=waits)
        self.samples.write(done.version, done.groups)


def group_metrics(groups: Sequence[ScoredGroup], base: Version) -> dict[str, Any]:
    """Rewards, lengths and lags of one step's batch."""
    samples = [s for g in groups for s in g.samples]
    lags = collections.Counter(base - g.version for g in groups)
    lengths = [sampled_tokens(s) for s in samples]
    metrics = reward_metrics(groups) | {
        "reward/solved_all": float(np.mean([np.all(g.rewards == g.rewards[0]) and g.rewards[0] > 0 for g in groups])),
        "reward/solved_none": float(np.mean([np.all(g.rewards == g.rewards[0]) and g.rewards[0] <= 0 for g in groups])),
        "response/length": float(np.mean(lengths)),
        "response/length_max": max(lengths),
        "response/truncated": float(np.mean([s.finish == "length" for s in samples])),
        "lag/max": max(lags),
        "lag/mean": float(np.mean([base - g.version for g in groups])),
    }
    return metrics | {f"lag/{lag}": count / len(groups) for lag, count in sorted(lags.items())}
