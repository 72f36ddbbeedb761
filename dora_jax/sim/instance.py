"""One rollout instance in virtual time: continuous batching, advanced from change to change and not token by token.

Between two changes of its batch every sample in it gains one token a tick, and a tick takes

    base(batch) + kv * context      with the context growing by `batch` tokens a tick

(of layers with a window, by one for each sample that is shorter)

(where versions are decoded side by side, as the engine does it: one call a version, so a base for each one's samples;
where versions are adapters, one call and one base for all)
so n ticks take a * n + b * n^2 / 2 seconds, which is solved for n where a time is given. Prompts are prefilled before
decoding goes on (the same work as chunked prefill, in one piece). When the pages run out, the sample that joined last
goes back to the queue and is prefilled again.

`advance(now)` brings the instance to a time; `happen()` then says what has come to its end. All other methods expect
that `advance` was called first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from dora_jax.costs import Costs
from dora_jax.sim.drafts import DecodeTimes, DraftSection, SimDecoding
from dora_jax.sim.workload import Turn
from dora_jax.types import InstanceId, SampleId, Version

DECODE, PREFILL, LOAD, WAIT, PAUSED, HELD, IDLE = "decode", "prefill", "load", "wait", "paused", "held", "idle"
ACTIVITIES = (DECODE, PREFILL, LOAD, WAIT, PAUSED, HELD, IDLE)

# What `happen` returns beside the sample.
ENTERED, STOPPED, REPORT = "entered", "stopped", "report"

# After the pages ran out, a queued sample waits until so large a part of them is free.
ROOM_SHARE = 1 / 64
# Two ends closer than this, in ticks, are one: floating point must not make an empty interval of them.
TICK_EPS = 1e-6
# What is left of standing still is over when it is shorter than this: added to a clock of days it must make a
# difference.
HELD_EPS_S = 1e-9


@dataclass(slots=True, eq=False, repr=False)
class Job:
    """One unfinished sample, wherever it is."""

    id: SampleId
    version: Version
    prompt: int
    turns: list[Turn]
    attempt: int = 0  # that placed it where it is
    observed: int = 0  # tokens that environments have appended
    turn: int = 0
    sampled: int = 0  # tokens before it joined the batch
    cached: int = 0  # tokens with KV
    mixed: bool = False  # its tokens are of more than one version
    join: float = 0.0  # tick of its instance at which it joined
    stop: float = math.inf  # tick at which its turn ends
    arrival: str = ""  # how it entered: Start, Resume, ...; reported when it decodes

    @property
    def response(self) -> int:
        return self.observed + self.sampled

    @property
    def tokens(self) -> int:
        return self.prompt + self.response

    def observe(self) -> None:
        """Its environment has answered, and its next turn begins."""
        self.observed += self.turns[self.turn].observation_tokens
        self.turn += 1


class SimInstance:
    """`live` is shared by all instances: version -> samples that decode."""

    def __init__(
        self, id: InstanceId, incarnation: int, costs: Costs, live: dict[Version, int], *,
        slots: int, page_size: int, speed: float, report_ticks: int, draft: DraftSection | None = None,
    ):  # fmt: skip
        self.id = id
        self.incarnation = incarnation
        self.slots = slots
        self.speed = speed
        self.slowed = 1.0  # by others on its machine
        self.capacity = costs.pages * page_size  # tokens of KV
        self.time = 0.0
        self.ticks = 0.0
        self.decoding: dict[SampleId, Job] = {}
        self.loading = False
        self.paused = False
        self.spent = dict.fromkeys(ACTIVITIES, 0.0)
        self.slot_s = 0.0
        self.sampled = 0.0
        self.preempted = 0
        self.counts: dict[Version, int] = {}  # of the batch
        self.wakeup = 0  # counts changes: an older appointment is void
        self._costs, self._times = costs, DecodeTimes(costs, draft or DraftSection())
        self._live = live
        self._context = 0.0  # tokens of KV in the batch
        self._seen = 0.0  # of them, those within each sample's window
        self._short: list[tuple[float, SampleId]] = []  # shorter than it, and the tick at which they are not
        self._held = 0  # tokens of KV of samples that wait here for their environment or are being prefilled
        self._stops: list[tuple[float, SampleId, Job]] = []
        self._queue: deque[Job] = deque()
        self._entering: list[Job] = []
        self._prefill_left_s = 0.0
        self._still_s = 0.0  # that it still stands still
        self.waiting: dict[SampleId, Job] = {}
        self.decoded = SimDecoding()
        self._report_ticks = report_ticks
        self._report_at = float(report_ticks)

    # ------------------------------------------------------------------ time

    @property
    def activity(self) -> str:
        if self.paused:
            return PAUSED
        if self._still_s:
            return HELD
        if self._entering:
            return PREFILL
        if self.decoding:
            return DECODE
        if self.loading:
            return LOAD
        return WAIT if self.waiting else IDLE

    def advance(self, now: float) -> None:
        elapsed = now - self.time
        self.time = now
        if elapsed <= 0:
            return
        activity = self.activity
        self.spent[activity] += elapsed
        if activity == HELD:
            left = self._still_s - elapsed
            self._still_s = left if left > HELD_EPS_S else 0.0
        elif activity == PREFILL:
            self._prefill_left_s = max(0.0, self._prefill_left_s - elapsed * self.speed / self.slowed)
        elif activity == DECODE:
            batch = len(self.decoding)
            a, b = self._tick_s(batch)
            work = elapsed * self.speed / self.slowed
            ticks = 2 * work / (a + math.sqrt(a * a + 2 * b * work))
            self._grow(ticks)
            self.decoded.add(ticks, batch, elapsed, self._times.drafts(self._batches()))
            self.slot_s += batch * elapsed

    def next_time(self) -> float:
        """When something happens here without outside help; inf: never."""
        activity = self.activity
        if activity == HELD:
            return self.time + self._still_s
        if activity == PREFILL:
            return self.time + self._prefill_left_s * self.slowed / self.speed
        if activity != DECODE:
            return math.inf
        n = self._next_tick() - self.ticks
        batch = len(self.decoding)
        a, b = self._tick_s(batch)
        return self.time + max(0.0, n * a + n * n * b / 2) * self.slowed / self.speed

    def happen(self) -> list[tuple[str, Any]]:
        """What has come to its end at this time: samples that entered the batch, turns that stopped, a report."""
        activity, found = self.activity, []
        # what is left may be less than the clock can tell apart, or cost nothing: it happens now, or never
        if activity == PREFILL and (self._prefill_left_s <= 1e-12 or SimInstance.next_time(self) <= self.time):
            entering, self._entering = self._entering, []
            for job in entering:
                self._held -= job.tokens
                self._join(job)
                found.append((ENTERED, job))
        elif activity == DECODE:
            due = self._next_tick()
            if due - self.ticks < TICK_EPS * max(1.0, due) or SimInstance.next_time(self) <= self.time:
                self._grow(due - self.ticks)
                found += self._due()
        self._prefill()
        return found

    def hold(self, seconds: float) -> None:
        """It stands still for so long, whatever it has to do."""
        self._still_s += seconds

    # ------------------------------------------------------------------ samples

    def submit(self, job: Job, arrival: str) -> None:
        """The sample waits for its prefill."""
        job.arrival, job.cached = arrival, 0
        self._queue.append(job)
        self._prefill()

    def where(self, job: Job) -> dict[str, int]:
        return {"instance": self.id, "incarnation": self.incarnation, "attempt": job.attempt}

    def receive(self, job: Job) -> None:
        """The sample goes on with the KV that came with it: what that lacks is prefilled."""
        if job.cached < job.tokens:
            self._held += job.cached
            self._queue.append(job)
            self._prefill()
        else:
            self._join(job)

    def take(self, id: SampleId) -> Job | None:
        """Take the sample out, with the KV that it has; None: it is not here."""
        job = self.decoding.get(id)
        if job is not None:
            self._leave(job)
        elif id in self.waiting:
            job = self.waiting.pop(id)
            self._held -= job.tokens
        else:
            job = self._unqueue(id)
        self._prefill()
        return job

    def wait_for_environment(self, job: Job) -> None:
        """The sample keeps its slot and its KV."""
        self.waiting[job.id] = job
        self._held += job.tokens

    def answered(self, job: Job) -> None:
        """Prefill what the environment answered behind the KV that is still here."""
        del self.waiting[job.id]  # its KV stays held
        job.observe()
        job.arrival = ""
        self._queue.append(job)
        self._prefill()

    def clear(self, keeps_kv: bool = False) -> list[Job]:
        """The instance is lost: its samples, with no KV; or it hands them over, with what KV they have."""
        jobs = [*self.decoding.values()]
        for job in jobs:
            self._leave(job)
        jobs += [*self._queue, *self._entering, *self.waiting.values()]
        self._queue.clear()
        self._entering, self.waiting, self._held, self._prefill_left_s = [], {}, 0, 0.0
        for job in () if keeps_kv else jobs:
            job.cached = 0
        return jobs

    @property
    def free_tokens(self) -> int:
        return max(0, int(self.capacity - self._context - self._held))

    # ------------------------------------------------------------------ private

    def _tick_s(self, batch: int) -> tuple[float, float]:
        """(seconds of a tick, seconds by which the next one takes longer). The context is taken to lie alike in all
        rows."""
        base_s = reads = 0.0
        for rows in self._batches():
            token_s, read = self._times.token(rows)
            base_s, reads = base_s + token_s, reads + read * rows
        kv_s = self._costs.decode_kv_s * reads / batch
        if not self._costs.window:
            return base_s + self._context * kv_s, batch * kv_s
        local_s = self._costs.window_kv_s * reads / batch
        return base_s + self._context * kv_s + self._seen * local_s, batch * kv_s + len(self._short) * local_s

    def _batches(self) -> Collection[int]:
        """Samples of each call."""
        return [len(self.decoding)] if self._costs.mixes else self.counts.values()

    def _grow(self, ticks: float) -> None:
        self.ticks += ticks
        self._context += ticks * len(self.decoding)
        self._seen += ticks * len(self._short)
        self.sampled += ticks * len(self.decoding)

    def _next_tick(self) -> float:
        stops = self._stops
        while stops and (stops[0][2].stop != stops[0][0] or self.decoding.get(stops[0][1]) is not stops[0][2]):
            heapq.heappop(stops)
        full = self.ticks + (self.capacity - self._held - self._context) / len(self.decoding)
        return min(stops[0][0], self._report_at, max(full, self.ticks), *(short[0] for short in self._short[:1]))

    def _due(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        stops, now = self._stops, self.ticks + TICK_EPS * max(1.0, self.ticks)
        while self._short and self._short[0][0] <= now:
            heapq.heappop(self._short)
        while stops and stops[0][0] <= now:
            stop, id, job = heapq.heappop(stops)
            if job.stop == stop and self.decoding.get(id) is job:
                self._leave(job)
                job.sampled = sum(turn.tokens for turn in job.turns[: job.turn + 1])
                job.cached = job.tokens
                found.append((STOPPED, job))
        if self._report_at <= now:
            self._report_at = self.ticks + self._report_ticks
            found.append((REPORT, None))
        if self.decoding and self.capacity - self._held - self._context < len(self.decoding):
            join, last = next(reversed(self.decoding.values())).join, reversed(self.decoding.values())
            job = max(itertools.takewhile(lambda one: one.join == join, last), key=lambda one: one.id)
            if len(self.decoding) == 1:
                raise RuntimeError(f"instance {self.id}: {job.id} alone needs more than {self.capacity} tokens of KV")
            self._leave(job)
            job.cached, job.arrival = 0, ""
            self._queue.appendleft(job)
            self.preempted += 1
        return found

    def _join(self, job: Job) -> None:
        if len(self.decoding) >= self.slots:
            raise RuntimeError(f"instance {self.id} has {self.slots} slots: sample {job.id} is one too many")
        id, job.cached = job.id, job.tokens
        job.join = self.ticks
        job.stop = self.ticks + (sum(turn.tokens for turn in job.turns[: job.turn + 1]) - job.sampled)
        self.decoding[id] = job
        context, window = job.tokens, self._costs.window
        self._context, self._seen = self._context + context, self._seen + min(context, window)
        if context < window:
            heapq.heappush(self._short, (self.ticks + window - context, id))
        heapq.heappush(self._stops, (job.stop, id, job))
        self._count(job.version, 1)

    def _leave(self, job: Job) -> None:
        id, ticks = job.id, self.ticks - job.join
        del self.decoding[id]
        context = job.tokens + ticks
        self._context, self._seen = self._context - context, self._seen - min(context, self._costs.window)
        self._short = [one for one in self._short if one[1] != id]
        heapq.heapify(self._short)
        job.sampled += int(ticks + TICK_EPS)
        job.cached = job.tokens
        job.stop = math.inf
        self._count(job.version, -1)
        if not self.decoding:
            self._context = self._seen = 0.0  # no drift from one batch to the next

    def _count(self, version: Version, by: int) -> None:
        for counts in (self.counts, self._live):
            counts[version] = counts.get(version, 0) + by
            if not counts[version]:
                del counts[version]

    def _unqueue(self, id: SampleId) -> Job | None:
        for line in (self._queue, self._entering):
            for job in line:
                if job.id == id:
                    line.remove(job)
                    self._held -= job.tokens if line is self._entering else job.cached
                    return job
        return None

    def _prefill(self) -> None:
        """Start on everything in the queue that there is room for."""
        if self._entering or not self._queue:
            return
        self._prefill_left_s = 0.0
        while self._queue:
            job = self._queue[0]
            slack = ROOM_SHARE * self.capacity if self.decoding or self._entering else 0
            full = len(self.decoding) + len(self._entering) >= self.slots
            if full or self.free_tokens - slack < job.tokens - job.cached:
                break
            self._queue.popleft()
            self._entering.append(job)
            self._held += job.tokens - job.cached
            self._prefill_left_s += self._costs.prefill_s(job.tokens - job.cached, job.cached)
