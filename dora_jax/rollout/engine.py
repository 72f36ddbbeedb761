"""Stage 2: one engine instance: continuous batching over paged KV that belongs to policy versions.

Consumes prompts tagged with a version and, in the background, versions of weights; produces samples with log-probs.
  tick = plan (pure, plan.py) -> run (jitted calls, device_calls.py) -> commit (tokens back into the plan) -> emit
Inside a tick the verbs are JetStream's: prefill fills a prefix, insert gives it to slots (a group's samples share one),
generate decodes every slot of a version, free_resource returns a slot's pages; jetstream.py offers them one by one.
One thread uses an engine. Laws: R versions decode side by side and read only their own weights, pages and prefixes;
at the same compiled shapes a sample's tokens and log-probs depend on (seed, group, index, prompt, version) alone, not
on batch-mates, order, preemption or migration; a tick waits for the device only in `np.asarray`, without the GIL.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.config import RolloutSection
from dora_jax.models import decoder
from dora_jax.models.grammar import Matcher
from dora_jax.models.lora_config import OFF, Lora
from dora_jax.models.routes import RouteShape
from dora_jax.rollout import migrate
from dora_jax.rollout.device import Device, PagesCopy, Residents, fetched
from dora_jax.rollout.device_calls import Calls
from dora_jax.rollout.migrate import HostKV, InFlightSample, SampledTokens
from dora_jax.rollout.pages import Prefix
from dora_jax.rollout.plan import Scheduler
from dora_jax.rollout.seq import Seq, StopStrings, Upload
from dora_jax.rollout.shapes import shapes_of
from dora_jax.rollout.ticks import DecodeCall, GrowingResult, Preempt, PrefillCall, TickResult
from dora_jax.types import SampleId, Sampling, Version

__all__ = ["Engine", "TickResult"]


class Engine:
    """One instance on its own mesh (axis "tensor"). Samples are keyed by id, never by slot."""

    def __init__(
        self,
        cfg: decoder.ModelConfig,
        section: RolloutSection,
        mesh: jax.sharding.Mesh,
        *,
        seed: int,
        eos_ids: tuple[int, ...],
        vocab_limit: int,
        dtype=jnp.float32,
        decode: Callable[[Sequence[int]], str] | None = None,
        matcher: Callable[[str], Matcher] | None = None,
        routes: RouteShape | None = None,
        host: HostKV | None = None,
        lora: Lora = OFF,
    ):
        """decode: ids -> text, for stop strings. matcher: a grammar -> its masks; None: no sample has one. routes: what
        the experts of a token look like, where samples carry them; None: they do not. host: KV in host memory, which
        engines of a process may share. lora: versions are adapters, if it is on."""
        self.cfg = cfg
        self.section = section
        self.mesh = mesh
        self._matcher = matcher
        self.shapes = shapes_of(section, lora.on, cfg.local_window, cfg.linear_layers > 0)
        stop_strings = section.stop_strings
        self._stops = functools.lru_cache(lambda own: StopStrings((*stop_strings, *own), decode))  # by a sample's own
        self._stops(())  # of the section, which cannot do without `decode`
        self.eos_ids = tuple(eos_ids)
        options = {"eos_ids": self.eos_ids, "vocab_limit": vocab_limit, "dtype": dtype, "routes": routes, "lora": lora}
        calls = Calls(cfg, section, mesh, seed=seed, **options)
        self.device = Device(calls, self.shapes)
        self.calls = calls
        self.param_shardings, self.base_shardings = calls.param_shardings, calls.base_shardings
        self._routes = routes
        self.host = host or HostKV(section.host_kv_bytes)
        self.scheduler = Scheduler(self.shapes, routes, self.host)
        self.residents = Residents(calls, section.residents, self.scheduler.adapters)
        self._flights: list[_Flight] = []  # launched, not yet read back
        self._decoded_only = True  # the last plan
        self._emit = GrowingResult()

    # ---------------------------------------------------------- versions

    @property
    def versions(self) -> tuple[Version, ...]:
        return self.residents.versions

    def load(self, version: Version, params: Any) -> None:
        """Takes a version's weights (in the layout of `param_shardings`) beside those that run."""
        self.residents.load(version, params)

    def drop(self, version: Version) -> None:
        """Forgets a version with its prefixes; raises while a sample of it is here. KV of its episodes that wait goes
        to the host."""
        if running := self.scheduler.running(version):
            raise RuntimeError(f"cannot drop version {version}: {running} of its samples run")
        waiting = [id for id, rest in self.scheduler.resting.items() if rest.seq.version == version]
        self._swap([self.scheduler.release(id) for id in waiting])
        self.residents.drop(version)
        self.scheduler.index.drop(version)

    def warmup(self) -> None:
        """Compiles every shape, so that no tick compiles. Uses a loaded version, or zeros for the time it takes."""
        if self.scheduler.seqs:
            raise RuntimeError("warmup before the first sample: it writes to the KV pool's dummy page")
        params = self.residents.any()
        self.device.warmup(params, self.scheduler.decoding.costs)
        self.device.measure(params, self.scheduler.decoding.costs)

    @property
    def compiled(self) -> int:
        """Shapes compiled so far: constant in the steady state."""
        return self.device.compiled() + self.residents.compiled

    # ----------------------------------------------------------- samples

    def submit(
        self,
        id: SampleId,
        prompt_ids: Any,
        version: Version,
        max_new_tokens: int,
        turn_tokens: int = 0,
        sampling: Sampling | None = None,
    ) -> None:
        """Queues one sample; it is reported as started when it gets a slot.

        turn_tokens: of an episode, whose every turn samples so many at most and ends with the sample in
        `TickResult.waiting`; `import_` continues it with what was observed. 0: the sample is one answer. sampling: how
        its tokens are drawn; None: by the section."""
        self._add(migrate.begun(id, prompt_ids, version, max_new_tokens, turn_tokens, sampling), announce=True)

    def prefill(self, prompt_ids: Any, version: Version) -> Prefix:
        """Computes a prompt's KV now and holds it until `release`: samples of this prompt share it."""
        self._check_loaded(version, "a prefix")
        tokens = np.asarray(prompt_ids, np.int32)
        self._swap(self.scheduler.make_room(self.scheduler.index.cost(version, tokens[:-1])))
        prefix = self.scheduler.pin(version, tokens)
        while not prefix.computed:
            self._run_uploads(self.scheduler.plan_uploads())  # a part of it may be on its way from the host
            if call := self.scheduler.plan_prefill():
                self._flights.append(self._run_prefill(call))
        return prefix

    def release(self, prefix: Prefix) -> None:
        """The samples that share it keep it; without any, it goes when pages run short."""
        self.scheduler.unpin(prefix)

    def page(self) -> dict[str, np.ndarray]:
        """One as requests carry it, of the heads that this process holds; what is in it means nothing."""
        return self.device.read_pages([0])

    def import_(self, request: InFlightSample) -> None:
        """Continues a sample of another engine, or an episode with what it has observed: only tokens without KV are
        prefilled; an episode without pages finds those that it has kept here or on the host.

        An episode without room for a token ends with the next tick, by length; one whose turn is over waits again."""
        self._check_loaded(request.version, request.id)
        own_stops = request.sampling.stop if request.sampling else ()
        if request.turn_tokens and self._stops(own_stops).ends_turn(request, self.eos_ids):
            return self._emit.waiting.append(request)
        if request.turn_tokens and migrate.spent(request, self.shapes.max_context):
            self.forget(request.id)
            return self._emit.finished.append(migrate.ended(request, "length"))
        self._add(migrate.repaged(request, self.shapes.page_size), announce=False)

    def export(self, id: SampleId) -> InFlightSample:
        """Takes one sample out, with its KV as host arrays; `import_` anywhere continues it.

        The others decode while a long one is copied: what they sample comes with the next tick.
        """
        self._land()
        seq = self._held(id)
        self.scheduler.leave(seq)
        kv_len, path = seq.kv_len, seq.path
        copy = PagesCopy(self.device, seq.pages_to_read(self.shapes.pages_for(kv_len)))
        state = self.device.launch_state(seq.source) if self.shapes.states and copy.more else None
        whole = copy.launch(self.scheduler.copy_room)
        while whole and copy.more:  # each piece lands while the others' next step is on the device
            self._emit.decodes_only = False  # no tick that is timed
            self._step()
            copy.land()
            whole = seq.path is path  # else preempted for an older one: its request, or other pages, hold the KV
            if whole:
                copy.launch(self.scheduler.copy_room)
        if whole:
            copy.land()
        else:  # it has no pages, or others than before
            self._land()
            kv_len = seq.kv_len
        copied, pages = copy.arrays if whole else None, seq.pages_to_read(self.shapes.pages_for(kv_len))
        left = Preempt(seq, pages, kv_len, self.scheduler.hole(seq), seq.source)
        request = self.with_kept(self._request(left, copied, state if whole else None))
        self._forget(seq)
        return request

    def with_kept(self, request: InFlightSample) -> InFlightSample:
        """The sample with the KV that it has kept here or on the host, which is then no longer there."""
        if request.id in self.scheduler.resting:
            self._swap([self.scheduler.release(request.id)])
        return self.host.take(request)

    def forget(self, id: SampleId) -> None:
        """An episode that waits does not go on here: its KV goes."""
        if id in self.scheduler.resting:
            self.scheduler.release(id)
        self.host.forget(id)

    def know(self, id: SampleId, tokens: np.ndarray) -> None:
        """The response, so far, of a sample of another engine: drafts for its siblings are made of it."""
        if (drafter := self.scheduler.decoding.drafter) is not None:
            drafter.know(id, tokens)

    def cancel(self, id: SampleId) -> bool:
        """True where the sample was here and had not ended its turn; KV that it has kept goes."""
        self.forget(id)
        if id not in self.scheduler.seqs:
            return False
        self._forget(self.scheduler.seqs[id])
        return True

    def holds(self, id: SampleId) -> bool:
        """A sample that finished but has not been handed out by a tick is no longer held."""
        self._land()
        return id in self.scheduler.seqs

    def version_of(self, id: SampleId) -> Version:
        return self._held(id).version

    def sampled(self, id: SampleId, start: int = 0, row: int = 0) -> SampledTokens:
        """A running sample's tokens from `start` on and its table's rows from `row` on, without what is in flight."""
        seq = self._held(id)
        return SampledTokens(
            seq.out_ids[start:].copy(), seq.logprobs[start:].copy(), seq.table_from(row), seq.top_from(start)
        )

    @property
    def idle(self) -> bool:
        return not self.scheduler.seqs and not (self._emit.finished or self._emit.waiting)

    @property
    def free_pages(self) -> int:
        """Pages that are free; those of waiting episodes are for the samples that need them."""
        return self.scheduler.index.available + sum(len(rest.private) for rest in self.scheduler.resting.values())

    def check(self) -> None:
        """Raises where a page, a prefix or a slot is lost or held twice."""
        self.scheduler.check()

    def tick(self) -> TickResult:
        """Make one plan, run its calls and commit their tokens."""
        self._step()
        grown, self._emit = vars(self._emit), GrowingResult()
        rows = len(grown["progress"]) if grown.pop("decodes_only") else 0
        grown |= {name: tuple(grown[name]) for name in ("started", "finished", "waiting")}
        return TickResult(**grown, rows=rows, free_pages=self.free_pages)

    # ----------------------------------------------------------- private

    def _step(self) -> None:
        if self._flights and self.scheduler.decoding.needs_tokens:
            self._land()
        plan = self.scheduler.plan()
        self._swap(plan.swaps)
        if plan.preempts:
            self._land()  # a request holds all tokens whose KV it holds
        for preempt in plan.preempts:
            if self.scheduler.seqs.get(preempt.seq.id) is preempt.seq:  # else it has just finished
                self.host.put(request := self._request(preempt))
                preempt.seq.request = migrate.without_pages(request)
        self._run_uploads(plan.uploads)
        verifies = any(call.drafts is not None for call in plan.decodes)
        decodes_only = not (plan.swaps or plan.preempts or plan.uploads or plan.prefills)
        self._emit.decodes_only &= decodes_only and self._decoded_only
        self._decoded_only = decodes_only  # what is landed in the next step was started with this plan
        flights = [self._run_prefill(call) for call in plan.prefills]
        for call in plan.decodes:
            params = self.residents.of(call.version)
            if self.shapes.ladder and self.device.climb(params, self.scheduler.decoding.costs):
                self._emit.decodes_only = False  # no tick that is timed
            if call.drafts is None:
                masks = None
                if call.options is not None and any(seq.matcher for seq, _ in call.rows):
                    masks = np.zeros(self.shapes.decode_masks(self.calls.vocab, len(call.control)), np.int32)
                    for row, (seq, _) in enumerate(call.rows):
                        if seq.matcher:
                            masks[row] = seq.matcher.mask(masks.shape[1])
                flights.append((call, *self.device.generate(params, call.control, call.blocks, call.options, masks)))
            else:
                flights.append((call, *self.device.verify(params, call.control, call.blocks)))
        self._emit.started += plan.started
        self._land()
        self._flights = flights
        if self.section.late_results == "off" or verifies:
            self._land()  # where a verifying call has left its rows is known then

    def _swap(self, swaps: Sequence[Preempt]) -> None:
        """Copies the KV of episodes that wait to the host, before others write to their pages."""
        for swap in swaps:
            self.host.put(self._request(swap))

    def _check_loaded(self, version: Version, what: Any) -> None:
        if version not in self.versions:
            raise RuntimeError(f"{what} needs version {version}; loaded: {self.versions}")

    def _run_uploads(self, uploads: list[Upload]) -> None:
        for upload in uploads:
            span = slice(upload.start, upload.stop)
            self.device.write_pages(upload.pages, {name: x[:, span] for name, x in upload.request.pages.items()})
            self.device.write_state(upload.state, upload.request.state)

    def _run_prefill(self, call: PrefillCall) -> _Flight:
        return call, None, self.device.prefill(self.residents.of(call.version), call.control, call.blocks), None

    def _add(self, request: InFlightSample, announce: bool) -> None:
        self._check_loaded(request.version, request.id)
        if request.id in self.scheduler.seqs:
            raise RuntimeError(f"{request.id} is already here")
        if request.id in self.scheduler.resting and not self.scheduler.fit(request):
            self._swap([self.scheduler.release(request.id)])
        if (own := request.sampling) is not None and own.draws:
            unsaid = [name for name in ("temperature", "top_k", "top_p", "min_p") if getattr(own, name) is None]
            own = dataclasses.replace(own, **{name: getattr(self.section, name) for name in unsaid})
            request = dataclasses.replace(request, sampling=own)
        self.scheduler.add(request, announce=announce)
        if own is not None and own.grammar:
            assert self._matcher is not None
            seq = self.scheduler.seqs[request.id]
            seq.matcher = self._matcher(own.grammar)
            seq.matcher.take(seq.out_ids[seq.n_given :].tolist())

    def _held(self, id: SampleId) -> Seq:
        if id not in self.scheduler.seqs:
            raise KeyError(f"{id} is not in this engine")
        return self.scheduler.seqs[id]

    def _forget(self, seq: Seq) -> None:
        """It ends here without a result: no tick speaks of it any more."""
        self.scheduler.remove(seq)
        self._emit.progress.pop(seq.id, None)

    def _land(self) -> None:
        """Reads back what is in flight and commits it."""
        flights, self._flights = self._flights, []
        for call, result, routes, top in flights:
            if isinstance(call, DecodeCall):
                self._commit(call, np.asarray(result), *(None if x is None else np.asarray(x) for x in (routes, top)))
            elif routes is not None:
                for chunk, rows in zip(call.chunks, np.asarray(routes), strict=False):
                    chunk.of.route(chunk.start, rows[: len(chunk.tokens)])

    def _commit(self, call: DecodeCall, result: np.ndarray, routes: np.ndarray | None, top: np.ndarray | None) -> None:
        steps = self.shapes.steps if call.drafts is None else self.shapes.drafts + 1
        rows, emit, held = len(call.rows), self._emit, self.scheduler.seqs
        tokens, logprobs = result[:rows, :steps], result[:rows, steps : 2 * steps].view(np.float32)
        counts, kept = result[:rows, 2 * steps], result[:rows, 2 * steps + 1 :].reshape(rows, steps, -1)
        last = tokens[np.arange(rows), counts - 1]
        ends = (last[:, None] == np.array(self.eos_ids, np.int32)).any(axis=1) & (counts > 0)
        sound = np.all(np.isfinite(logprobs) | (np.arange(steps) >= counts[:, None]), axis=1)
        results = zip(call.rows, counts.tolist(), ends.tolist(), sound.tolist(), strict=True)
        emit.drafted |= call.drafts is not None
        drafter = self.scheduler.decoding.drafter if rows <= self.shapes.draft_rows else None
        run_stops = bool(self.section.stop_strings)
        for row, ((seq, planned), count, stops, numbers) in enumerate(results):
            seq.inflight -= planned
            if held.get(seq.id) is not seq:
                continue  # cancelled while in flight
            given, decoded = 0, count
            text_stops = False  # which the device does not see
            own_stops: tuple[str, ...] = ()
            if (sampling := seq.sampling) is not None:
                given = max(0, min(count, seq.n_given - seq.n_out))  # no sample ends there
                stops, own_stops = stops & (given < count), sampling.stop
            if (run_stops or own_stops) and given < count:
                first = max(seq.turn_start, seq.n_given)
                count, text_stops = self._stops(own_stops).end(seq.out_ids[first:], tokens[row, given:count])
                count, stops = given + count, stops | text_stops
            if routes is not None:
                seq.route(seq.n_prompt + seq.n_out - 1, routes[row, :count])
            if drafter is not None:
                draft = None if call.drafts is None else call.drafts[row]
                guesses, right = drafter.learn(seq, draft, tokens[row, :count])
                emit.guesses, emit.held = emit.guesses + guesses, emit.held + right
            new_top = None if top is None else top[row, :count]
            seq.extend(tokens[row, :count], logprobs[row, :count], kept[row, :count], new_top, len(call.control))
            if seq.matcher is not None:
                numbers &= seq.matcher.take(tokens[row, given:count].tolist())
            emit.tokens += count
            emit.progress[seq.id] = seq.n_out
            if numbers and seq.turn_tokens and (stops or seq.limit == seq.n_out < seq.budget):
                self.scheduler.rest(
                    seq, len(seq.sequence) - 1, beyond=text_stops and (count < decoded or seq.inflight > 0)
                )
                emit.waiting.append(seq.in_flight)  # its environment is to answer
            elif stops or not numbers or seq.n_out == seq.limit:
                self._end(seq, "error" if not numbers else "stop" if stops else "length")
            elif call.drafts is not None:
                self.scheduler.rows.again(seq)

    def _end(self, seq: Seq, finish: str) -> None:
        """`error`: its weights or KV are not numbers: never a sample to train on."""
        request = seq.in_flight
        sample = migrate.ended(request, finish)
        if self._routes is not None:
            self._routes.check(sample.table.routes, len(seq.sequence) - 1, str(seq.id))
        self._emit.finished.append(sample)
        if request.kept is not None:
            self._emit.kept[seq.id] = request.kept
        if request.top is not None:
            self._emit.tops[seq.id] = request.top
        self.scheduler.remove(seq)

    def _request(self, left: Preempt, copied: dict[str, np.ndarray] | None = None, state=None) -> InFlightSample:
        if left.seq.request is not None:
            return left.seq.request  # it waits or is uploaded, and has not changed since it came
        size, hole = self.shapes.page_size, left.hole if left.pages else ()
        if self.shapes.states and left.pages:
            state = fetched(state or self.device.launch_state(left.state))
        request = dataclasses.replace(left.seq.in_flight, kv_len=left.kv_len, page_size=size, hole=hole, state=state)
        return migrate.with_pages(request, copied or (self.device.read_pages(left.pages) if left.pages else {}))


# a call; of a decode call its result; routes and most likely tokens, where they are asked for
_Flight = tuple[DecodeCall | PrefillCall, jax.Array | None, jax.Array | None, jax.Array | None]
