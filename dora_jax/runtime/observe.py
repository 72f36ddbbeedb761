"""What a person sees of a run: one metrics record a step, evaluations, trajectories in a readable file.

Consumes the payload records that `LocalWorld` tells and the events of the loop; decides nothing.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dora_jax.config import RunError
from dora_jax.orchestrate import events as ev
from dora_jax.patient import PatientFile
from dora_jax.runtime.workers import Finished, StepDone
from dora_jax.tasks.pool import GroupFailure
from dora_jax.types import GroupId, SampleId, ScoredGroup, Version, is_eval

MIN_GROUPS_FOR_FAILED_SHARE = 100  # below this one failure says nothing about a share


class Overlap:
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
            case ev.SampleStarted(id=sample, version=version) if not is_eval(sample.group_id):
                self._version[sample] = version
                self._running[version] += 1
            case ev.SampleDone(id=sample) | ev.SampleCancelled(id=sample):
                self._leave(sample)

    @property
    def share(self) -> float:
        return self.overlap_s / self.total_s if self.total_s else 0.0

    def _leave(self, sample: SampleId) -> None:
        version = self._version.pop(sample, None)
        if version is not None:
            self._running[version] -= 1
            if not self._running[version]:
                del self._running[version]


class RunLog:
    """Turns records and events into metrics, console lines and `trajectories.txt`."""

    def __init__(self, *, workdir: Path, writer: Any, orchestrator: Any, instances: Sequence[Any],
                 decode: Callable[[Sequence[int]], str], prompt_of: Callable[[GroupId], Any],
                 eval_groups: int, max_failed_share: float):
        self.accuracy: dict[Version, float] = {}
        self.evaluations: dict[Version, dict[str, float]] = {}
        self.metrics: dict[str, float] = {}
        self._writer = writer
        self._orchestrator = orchestrator
        self._instances = instances
        self._decode = decode
        self._prompt_of = prompt_of
        self._eval_groups = eval_groups
        self._max_failed_share = max_failed_share
        self._trajectories = PatientFile(workdir / "trajectories.txt", writer.note)
        self._overlap = Overlap()
        self._evaluating: dict[Version, list[ScoredGroup]] = collections.defaultdict(list)
        self._moved: set[SampleId] = set()
        self._moved_finished = 0
        self._scored = 0
        self._failed_lengths: list[int] = []
        self._failed = 0
        self._skipped = 0
        self._tokens = 0
        self._began_s = self._step_s = time.monotonic()
        self._idle_s = [0.0] * len(instances)

    def close(self) -> None:
        self._trajectories.close()

    # ---------------------------------------------------------- what is told

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
                self._evaluated(record)
            case ScoredGroup():
                self._scored += 1
            case GroupFailure():
                self._group_failed(record)
            case StepDone():
                self._step_done(record)
            case Exception():
                self._skipped += 1

    def event(self, event: ev.Event, commands: Sequence[ev.Command]) -> None:
        """Observer of the loop."""
        self._overlap(event)
        if isinstance(event, ev.SampleMoved):
            self._moved.add(event.id)
        elif isinstance(event, ev.TimePassed):
            self._writer.status(self._orchestrator.summary())
        for command in commands:
            if isinstance(command, ev.Train):
                self._writer.phase("trainer", f"training version {command.base_version + 1}")

    # ------------------------------------------------------------ private

    def _evaluated(self, group: ScoredGroup) -> None:
        done = self._evaluating[group.version]
        done.append(group)
        if len(done) < self._eval_groups:
            return
        del self._evaluating[group.version]
        metrics = accuracy([g.rewards for g in done])
        self.accuracy[group.version] = metrics["eval/accuracy"]
        self.evaluations[group.version] = metrics
        lengths = [len(s.out_ids) for g in done for s in g.samples]
        metrics["eval/response_length"] = float(np.mean(lengths))
        metrics["time/run_s"] = time.monotonic() - self._began_s
        self._writer.write(group.version, metrics)

    def _group_failed(self, failure: GroupFailure) -> None:
        self._failed += 1
        self._failed_lengths.extend(failure.lengths)
        total = self._failed + self._scored
        if total >= MIN_GROUPS_FOR_FAILED_SHARE and self._failed > self._max_failed_share * total:
            lengths = np.quantile(self._failed_lengths or [0], [0.5, 0.9])
            raise RunError(
                f"{self._failed} of {total} groups could not be scored (limit {self._max_failed_share:.1%}); "
                f"response length p50 {lengths[0]:.0f}, p90 {lengths[1]:.0f}; last reason: {failure.reason}")

    def _step_done(self, done: StepDone) -> None:
        now = time.monotonic()
        elapsed_s, self._step_s = now - self._step_s, now
        idle = [min(worker.wait_s, old + elapsed_s)  # of another process it comes once a second, which steps may not be
                for worker, old in zip(self._instances, self._idle_s, strict=True)]
        idle_s = [new - old for new, old in zip(idle, self._idle_s, strict=True)]
        self._idle_s = idle
        metrics = group_metrics(done.groups, done.version - 1)
        metrics |= done.metrics
        metrics |= {
            "rollout/tokens_per_s": self._tokens / elapsed_s,
            "rollout/idle_share": float(np.mean(idle_s)) / elapsed_s,
            "trainer/wait_s": done.wait_s,
            "trainer/step_s": done.step_s,
            "versions/side_by_side_share": self._overlap.share,
            "moves/finished": self._moved_finished,
            "groups/failed_share": self._failed / max(1, self._failed + self._scored),
            "groups/failed_length_p50": float(np.quantile(self._failed_lengths, 0.5)) if self._failed_lengths else 0.0,
            "groups/failed_length_p90": float(np.quantile(self._failed_lengths, 0.9)) if self._failed_lengths else 0.0,
            "prompts/skipped": self._skipped,
            "time/step_s": elapsed_s,
            "time/run_s": now - self._began_s,
        }
        facts = self._orchestrator.summary()
        metrics |= {"versions/live": len(facts["versions"]), "moves/total": facts["moves"],
                    "reloads/total": facts["reloads"]}
        self._tokens = 0
        self.metrics = metrics
        self._writer.phase("trainer", "idle")
        self._writer.write(done.version, metrics, waits=facts["waits"])
        self._write_trajectories(done)

    def _write_trajectories(self, done: StepDone) -> None:
        """The best and the worst answer of the step's most mixed group."""
        group = max(done.groups, key=lambda g: float(np.std(g.rewards)))
        order = np.argsort(group.rewards, kind="stable")
        prompt = self._prompt_of(group.group_id)
        text = (f"=== step {done.version}  group {group.group_id}  version {group.version}  "
                f"reward mean {group.rewards.mean():.3f}  expected {prompt.answer!r:.80}\n"
                f"prompt> {prompt.text}\n")
        for i in (order[-1], order[0]):
            sample = group.samples[i]
            text += (f"[{sample.id.index}] reward {group.rewards[i]:+.3f}, {len(sample.out_ids)} tokens, "
                     f"{sample.finish}> {self._decode(sample.out_ids)}\n")
        self._trajectories.write(text.encode(errors="replace"))


def group_metrics(groups: Sequence[ScoredGroup], base: Version) -> dict[str, Any]:
    """Rewards, lengths and lags of one step's batch."""
    rewards = np.concatenate([g.rewards for g in groups])
    samples = [s for g in groups for s in g.samples]
    lags = collections.Counter(base - g.version for g in groups)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/solved_all": float(np.mean([np.all(g.rewards == g.rewards[0]) and g.rewards[0] > 0 for g in groups])),
        "reward/solved_none": float(np.mean([np.all(g.rewards == g.rewards[0]) and g.rewards[0] <= 0 for g in groups])),
        "response/length": float(np.mean([len(s.out_ids) for s in samples])),
        "response/length_max": max(len(s.out_ids) for s in samples),
        "response/truncated": float(np.mean([s.finish == "length" for s in samples])),
        "lag/max": max(lags),
        "lag/mean": float(np.mean([base - g.version for g in groups])),
    }
    metrics |= {f"reward/{name}": float(np.mean([g.parts[name].mean() for g in groups])) for name in groups[0].parts}
    return metrics | {f"lag/{lag}": count / len(groups) for lag, count in sorted(lags.items())}


def accuracy(rewards: Sequence[np.ndarray]) -> dict[str, float]:
    """avg@k and pass@k over held-out groups; a sample passes with a reward of at least 1.

    Returns eval/accuracy (= avg@k) and eval/pass_at_k with their k; source: Chen et al. 2021, arXiv 2107.03374
    (with all k samples used, pass@k is the share of groups with a pass).
    """
    passed = [np.asarray(r) >= 1.0 for r in rewards]
    return {
        "eval/accuracy": float(np.mean([p.mean() for p in passed])),
        "eval/pass_at_k": float(np.mean([p.any() for p in passed])),
        "eval/k": len(passed[0]),
        "eval/prompts": len(passed),
    }
