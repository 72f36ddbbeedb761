"""Stage 2, pure: continuous batching. What runs in the next tick, given what waits, what runs and which pages are free.

Consumes submitted or imported samples and, after each call, the sampled tokens; produces a TickPlan: samples to move
to host memory, pages to upload, prefill calls, one decode call a version and row batch; where versions are
adapters, rows of all of them share a call. No device, no clock, no randomness: the processes of an instance make the
same plan from the same inbox.
Laws:
  the order of arrival decides; the oldest sample is never preempted, so every sample finishes (no starvation);
  a preempted sample keeps its KV in host memory and goes before new ones once pages are free again;
  KV from the host comes in pieces, one a tick, between which the others decode; where none does, in larger ones;
  a sample's calls cut its positions at the same places whatever else runs (prefill at multiples of the chunk,
  decode at multiples of the steps from its first), so that its bits do not depend on the schedule;
  free + prefixes' + samples' pages = all pages (`check`), and so of recurrent states.

Stage 2, pure: episodes that wait for their environment and keep their pages in the meantime. No device.

Consumes samples whose turn has ended; gives their pages back to them when they go on, or, the longest-waiting first, to
others when pages run short. Law: a page of a resting episode is its own or its prefix's, as that of one that runs.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque

import numpy as np

from dora_jax.models.routes import RouteShape
from dora_jax.rollout.drafts import Decoding
from dora_jax.rollout.migrate import HostKV, InFlightSample, spent
from dora_jax.rollout.pages import DUMMY, Node, OutOfPages, PagePool, Prefix, PrefixIndex, StatePool, places
from dora_jax.rollout.rows import Rows
from dora_jax.rollout.seq import Seq, Upload
from dora_jax.rollout.shapes import PREFILL_HEADER, Shapes
from dora_jax.rollout.ticks import Chunk, Preempt, PrefillCall, TickPlan
from dora_jax.types import SampleId, Version


@dataclasses.dataclass(frozen=True, eq=False)
class Rest:
    seq: Seq  # as it was when its turn ended
    path: list[Node]
    table: list[int]  # page of each page-sized stretch: the path's, then its own from first_private
    first_private: int
    kv_len: int
    shed: int = 0  # see Seq
    state: int = 0  # the place of its recurrent state

    @property
    def private(self) -> list[int]:
        return self.table[self.first_private :]


class Scheduler:
    """All samples of one engine. `plan` commits what it decides: see TickPlan."""

    def __init__(self, shapes: Shapes, routes: RouteShape | None = None, host: HostKV | None = None):
        """routes: what the experts of a token look like, where samples carry them. host: where KV without pages is."""
        self.shapes = shapes
        self.adapters: dict[Version, int] = {}  # the place of each resident version's adapter, as device.py says it
        self.routes = routes
        self.pool = PagePool(shapes.pages, shapes.page_size, shapes.local_pages)
        self.states = StatePool(shapes.states)
        # a prompt with a recurrent state is one node: the state is that of its end
        self.index = PrefixIndex(self.pool, shapes.max_context if shapes.states else shapes.chunk, self.states)
        self.host = host or HostKV()
        self.resting: dict[SampleId, Rest] = {}  # the longest-waiting first
        self.seqs: dict[SampleId, Seq] = {}
        self._pinned: dict[Prefix, None] = {}
        self.rows = Rows(shapes, self.adapters)
        self.decoding = Decoding(shapes, self.rows)
        self._admitted: dict[Seq, None] = {}
        self._coming: dict[Seq, None] = {}  # admitted, and a part of their prefix has no KV yet
        self._uploading: dict[Seq, None] = {}
        self.resuming: list[tuple[int, Seq]] = []  # heap by arrival: preempted and imported, before new ones
        self._waiting: deque[Seq] = deque()
        self._free_slots = list(range(shapes.slots))  # a heap: low slots first
        self._arrivals = 0

    def add(self, request: InFlightSample, *, announce: bool) -> None:
        """ValueError where the sample can never run here."""
        s, n_prompt = self.shapes, len(request.prompt_ids)
        if n_prompt == 0:
            raise ValueError(f"{request.id} has an empty prompt")
        if spent(request, s.max_context):
            raise ValueError(f"{request.id} has no token left to sample of {request.max_new_tokens}")
        if n_prompt + (1 if request.turn_tokens else request.max_new_tokens) > s.max_context:
            raise ValueError(
                f"{request.id} may reach {n_prompt + request.max_new_tokens} tokens; the engine is "
                f"compiled for {s.max_context} (rollout.max_prompt_tokens + max_new_tokens)"
            )
        seq = Seq(request, self._arrivals, announce, s.max_context, s.kept, self.routes, s.exact)
        self._arrivals += 1
        self.seqs[seq.id] = seq
        if announce:
            self._waiting.append(seq)
        else:
            heapq.heappush(self.resuming, (seq.arrival, seq))

    def remove(self, seq: Seq) -> None:
        """Finished, cancelled or exported: frees what it holds."""
        self._leave(seq)
        if seq.slot is not None:
            self._free(seq)
        elif seq in self._waiting:
            self._waiting.remove(seq)
        else:
            self.resuming.remove((seq.arrival, seq))
            heapq.heapify(self.resuming)

    def rest(self, seq: Seq, kv_len: int, beyond: bool = False) -> None:
        """Its turn has ended: the pages that hold its KV stay until others need them; those beyond are free.

        beyond: it was decoded past its end; a recurrent state is then that of what follows, and all of its KV is
        made again."""
        if beyond and self.shapes.states:
            return self.remove(seq)
        self._leave(seq)
        self.shed(seq)
        self._keep(Rest(seq, seq.path, seq.table.tolist(), seq.first_private, kv_len, seq.shed, seq.state), kv_len)
        self._vacate(seq)

    def fit(self, request: InFlightSample) -> bool:
        """Whether the episode, which waits here, can go on in its pages: what it shares with what is in them is kept,
        the rest is cut."""
        rest = self.resting[request.id]
        ours, theirs = np.concatenate([request.prompt_ids, request.out_ids]), rest.seq.sequence
        n, n_prompt = min(len(ours) - 1, rest.kv_len), rest.seq.n_prompt
        other = np.flatnonzero(ours[:n] != theirs[:n])
        kv_len = int(other[0]) if len(other) else n
        hole = self.hole(rest)
        if request.version != rest.seq.version or len(request.prompt_ids) != n_prompt or kv_len < n_prompt:
            return False
        if hole and kv_len < hole[1] or self.shapes.states and kv_len < rest.kv_len:
            return False
        self._keep(rest, kv_len)
        return True

    def _keep(self, rest: Rest, kv_len: int) -> None:
        """The pages of so many positions, in its place among those that wait."""
        n = max(self.shapes.pages_for(kv_len), rest.first_private)
        self.pool.release(rest.table[n:])
        self.resting[rest.seq.id] = dataclasses.replace(rest, table=rest.table[:n], kv_len=kv_len)

    def _leave(self, seq: Seq) -> None:
        del self.seqs[seq.id]
        if (drafter := self.decoding.drafter) is not None:
            drafter.end(seq)

    def make_room(self, pages: int) -> list[Preempt]:
        """Takes the pages of episodes that wait, as far as so many are not available: what to copy before they are
        written to."""
        swaps = []
        while pages > self.index.available and self.resting:
            swaps.append(self.release(next(iter(self.resting))))
        return swaps

    def release(self, id: SampleId) -> Preempt:
        """Take the pages of an episode that waits, which hold its KV until the next call writes to them."""
        rest = self.resting.pop(id)
        self.index.release(rest.path)
        self.pool.release(rest.private)
        self.states.release(rest.state)
        return Preempt(rest.seq, rest.table, rest.kv_len, self.hole(rest), rest.state)

    def running(self, version: Version) -> int:
        return sum(seq.version == version for seq in self.seqs.values())

    def pin(self, version: Version, prompt_ids: np.ndarray) -> Prefix:
        """OutOfPages where they are short: a pinned prefix is never evicted."""
        prefix = Prefix(version, prompt_ids, self.index.acquire(version, prompt_ids[:-1]))
        self._pinned[prefix] = None
        return prefix

    def unpin(self, prefix: Prefix) -> None:
        del self._pinned[prefix]
        self.index.release(prefix.path)

    def leave(self, seq: Seq) -> None:
        """It decodes no more; its pages stay until `remove`."""
        seq.leaving = True
        if seq.slot is not None:
            self.rows.decodes[seq.row] = False

    def plan(self) -> TickPlan:
        plan = TickPlan()
        for seq, need in self.rows.growth():
            self.shed(seq)
            plan.swaps += self.make_room(need)
            while need > self.index.available and seq.slot is not None:  # else preempted for an older one
                self.preempt(self.victim(seq), plan)
            if seq.slot is not None:
                self.rows.append(seq, self.index.allocate(seq.version, need))
        if not plan.preempts:
            while self._free_slots and self.resuming and self._admit(self.resuming[0][1], plan):
                heapq.heappop(self.resuming)
            while self._free_slots and self._waiting and not self.resuming and self._admit(self._waiting[0], plan):
                self._waiting.popleft()
        self._begin_ready()
        plan.uploads = self.plan_uploads()
        while len(plan.prefills) < self.shapes.prefill_calls and (call := self.plan_prefill()):
            plan.prefills.append(call)
        self._begin_ready()
        plan.decodes = self.decoding.calls(self.seqs.values())
        return plan

    def check(self) -> None:
        """Pages, prefixes and slots are conserved."""
        held = [(node.version, node.pages) for node in self.index.nodes()]
        resting = [(rest.seq.version, rest.private) for rest in self.resting.values()]
        self.pool.check([*held, *resting, *((seq.version, seq.private) for seq in self._admitted)])
        states = [(node.version, node.state) for node in self.index.nodes()]
        states += [(seq.version, seq.state) for seq in self._admitted]
        self.states.check([*states, *((rest.seq.version, rest.state) for rest in self.resting.values())])
        self.index.check()
        self.rows.check(list(self._admitted))
        slots = [seq.row for seq in self._admitted]
        if sorted(slots + self._free_slots) != list(range(self.shapes.slots)):
            raise RuntimeError(f"slots {slots} in use and {self._free_slots} free are not {self.shapes.slots}")
        if len(self.seqs) != len(self._admitted) + len(self.resuming) + len(self._waiting):
            raise RuntimeError(f"{len(self.seqs)} samples are not those that run, resume or wait")

    # ----------------------------------------------------------- pages

    def shed(self, seq: Seq) -> None:
        """Frees its own pages of layers with a window that none of its later queries sees: those from the token on that
        has come back last, for drafts after it may not hold."""
        first = min(self.shapes.first_seen(seq.n_prompt + seq.n_out - 1), len(seq.table))
        if seq.slot is not None and first > max(seq.shed, seq.first_private) and seq.ready:
            for i in range(max(seq.shed, seq.first_private), first):
                seq.table[i] = self.pool.shed(int(seq.table[i]))
            seq.shed = first

    def hole(self, held: Seq | Rest) -> tuple[int, ...]:
        """What its pages lack: see InFlightSample."""
        s = self.shapes
        if held.shed <= held.first_private:
            return ()
        return held.first_private * s.page_size, s.pages_for(held.shed * s.page_size + s.local_window - 1) * s.page_size

    def victim(self, seq: Seq) -> Seq:
        """The cheapest to copy among those that came later; the sample itself when it is the youngest."""
        younger = [other for other in self._admitted if other.arrival > seq.arrival]
        if not younger and len(self._admitted) == 1:
            raise OutOfPages(f"{seq.id} alone needs more pages than there are")
        return min(younger or [seq], key=lambda other: (len(other.private), -other.arrival))

    def preempt(self, seq: Seq, plan: TickPlan) -> None:
        pages = seq.pages_to_read(self.shapes.pages_for(seq.kv_len))
        plan.preempts.append(Preempt(seq, pages, seq.kv_len, self.hole(seq), seq.source))
        self._free(seq)
        heapq.heappush(self.resuming, (seq.arrival, seq))

    def _free(self, seq: Seq) -> None:
        for _, node in seq.uploads:
            if node is not None:
                node.uploading = False
        seq.uploads.clear()
        self._uploading.pop(seq, None)
        self._coming.pop(seq, None)
        self.index.release(seq.path)
        self.pool.release(seq.private)
        self.states.release(seq.state)
        self._vacate(seq)

    def _vacate(self, seq: Seq) -> None:
        """It has no slot any more, and its pages are no longer its."""
        self.rows.free(seq)
        heapq.heappush(self._free_slots, seq.row)
        del self._admitted[seq]
        seq.slot, seq.path, seq.first_private, seq.shed, seq.tail_page = None, [], 0, 0, None
        seq.filled = seq.fill_to = seq.state = seq.source = 0
        seq.fresh = True

    # ------------------------------------------------------- admission

    def _admit(self, seq: Seq, plan: TickPlan) -> bool:
        """Give it a slot, its prefix and the pages of its first decode call; False where pages are short."""
        if (rest := self.resting.pop(seq.id, None)) is not None:
            return self._go_on(seq, rest, plan)
        if any(swap.seq.id == seq.id for swap in plan.swaps):
            return False  # its KV is on its way to the host
        s = self.shapes
        prefix = seq.sequence[:-1]
        bare = seq.request if seq.id in self.host else None
        if bare is not None:
            seq.request = self.host.take(bare)
        kv_len = 0 if seq.request is None else seq.request.kv_len
        # with all its KV, or all but that of what an episode has observed, it shares whole chunks of the prompt only
        own = 0 < kv_len == len(prefix) or bool(seq.turn_tokens) and kv_len >= seq.n_prompt
        shared = (seq.n_prompt - 1) // s.chunk * s.chunk if own else len(prefix)
        if own and s.states:  # its state is behind all of it
            shared = 0
        first_private = shared // s.page_size
        private = s.pages_for(len(prefix) + min(s.reach, seq.remaining)) - first_private
        gone = max(s.first_seen(kv_len) - first_private, 0) if own else 0
        # one page for each running sample to grow into, so that an admission does not preempt at once
        needed = private + len(self._admitted)
        while self.index.lacks(self.index.cost(seq.version, prefix[:shared]) + needed, gone) or (
            self.index.lacks_states(2)  # its own, and that of a prompt that nobody has computed
        ):
            if not (swaps := self.make_room(self.index.available + 1)):
                if bare is not None and seq.request is not None:
                    self.host.put(seq.request)
                    seq.request = bare
                return False
            plan.swaps += swaps
        seq.path = self.index.acquire(seq.version, prefix[:shared])
        nodes = [page for node in seq.path for page in node.pages]
        seq.first_private = first_private
        seq.tail_page = nodes[first_private] if len(nodes) > first_private else None
        seq.state = seq.source = self.index.allocate_state(seq.version)
        if not own:
            seq.source = seq.path[-1].state if seq.path else 0
        self._take_slot(seq, nodes[:first_private], private, plan, gone)
        seq.shed = first_private + gone
        if own:
            seq.filled, seq.fill_to = kv_len, len(prefix)
        if (request := seq.request) is not None:
            covered = request.hole[0] if request.hole else kv_len
            for node in seq.path:
                if not (node.ready or node.uploading) and node.stop <= covered:
                    seq.uploads.append((Upload(request, node.start // self.shapes.page_size, node.pages), node))
                    node.uploading = True
                    node.routes = seq.known_routes(node.start, node.stop)
            if own:
                pages = seq.table[seq.first_private : self.shapes.pages_for(kv_len)].tolist()
                seq.uploads.append((Upload(request, seq.first_private, pages, seq.state), None))
            if seq.uploads:
                self._uploading[seq] = None
            else:
                seq.request = None
        return True

    def _go_on(self, seq: Seq, rest: Rest, plan: TickPlan) -> bool:
        """Admit a waiting episode again, in the pages that it retains."""
        prefix = len(seq.sequence) - 1
        more = self.shapes.pages_for(prefix + min(self.shapes.reach, seq.remaining)) - len(rest.table)
        plan.swaps += self.make_room(more + len(self._admitted))
        if more + len(self._admitted) > self.index.available:
            self.resting = {seq.id: rest, **self.resting}
            return False
        seq.path, seq.first_private, seq.request = rest.path, rest.first_private, None
        seq.state = seq.source = rest.state
        self._take_slot(seq, rest.table, more, plan)
        seq.filled, seq.fill_to, seq.shed = rest.kv_len, prefix, rest.shed
        return True

    def _take_slot(self, seq: Seq, pages: list[int], more: int, plan: TickPlan, bare: int = 0) -> None:
        """Gives it a slot, these pages and so many more, the first `bare` of which hold nothing of layers with a
        window."""
        seq.prefix = tuple(seq.path)
        seq.slot = heapq.heappop(self._free_slots)
        self.rows.take(seq, pages + self.index.allocate(seq.version, more, bare))
        self._admitted[seq] = self._coming[seq] = None
        if seq.announce:
            plan.started.append(seq.id)
        seq.announce = False

    # ----------------------------------------------------------- calls

    def _begin_ready(self) -> None:
        for seq in [seq for seq in self._coming if seq.ready]:
            del self._coming[seq]
            if not seq.leaving:
                self.rows.decodes[seq.row] = True

    @property
    def copy_room(self) -> int:
        """Pages that may be copied to or from the host before the next decode calls."""
        return self.shapes.copy_pages if self.rows.any_decodes else self.shapes.alone_pages

    def plan_uploads(self) -> list[Upload]:
        """The next pieces of what came from the host, `copy_room` in all, the first sample's first."""
        plans: list[Upload] = []
        room = self.copy_room
        while room and self._uploading:
            seq = next(iter(self._uploading))
            upload, node = seq.uploads.popleft()
            piece = dataclasses.replace(upload, pages=upload.pages[:room])
            room -= len(piece.pages)
            if piece.stop < upload.stop:
                rest = dataclasses.replace(upload, start=piece.stop, pages=upload.pages[len(piece.pages) :], state=0)
                seq.uploads.appendleft((rest, node))
            elif node is not None:
                node.ready, node.uploading = True, False
            if not seq.uploads:
                del self._uploading[seq]
                seq.request = None
            if plans and plans[-1].request is piece.request and plans[-1].stop == piece.start:
                plans[-1] = dataclasses.replace(plans[-1], pages=[*plans[-1].pages, *piece.pages])  # one call for both
            else:
                plans.append(piece)
        return plans

    def plan_prefill(self) -> PrefillCall | None:
        """The next chunk of the longest-waiting prompts of one version, each chunk once for all samples that share
        it."""
        s, chunks = self.shapes, dict[Node | Seq, Chunk]()
        holders: list[Prefix | Seq] = [*self._pinned, *sorted(self._coming, key=lambda seq: seq.arrival)]
        for holder in holders:
            chunk = self._next_chunk(holder)
            if chunk is not None and (s.adapters or not chunks or chunk.version == next(iter(chunks)).version):
                chunks[chunk.of] = chunk
                if len(chunks) == s.prefill_rows:
                    break
        if not chunks:
            return None
        blocks = s.bucket(max(chunk.start for chunk in chunks.values()), s.prefill_buckets)
        read, width, own = PREFILL_HEADER + s.chunk, blocks * s.block_pages, s.chunk // s.page_size
        control = np.full(s.prefill_control(blocks), DUMMY, np.int32)
        for row, chunk in zip(control, chunks.values(), strict=False):
            adapter = self.adapters.get(chunk.version, 0)
            row[:PREFILL_HEADER] = chunk.start, len(chunk.tokens), chunk.kept, chunk.of.state, adapter
            row[PREFILL_HEADER : PREFILL_HEADER + len(chunk.tokens)] = chunk.tokens
            past_GxP = row[read : read + s.groups * width].reshape(s.groups, -1)
            past_GxP[:, : len(chunk.past)] = places(chunk.past, s.groups)
            own_GxW = row[read + s.groups * width :].reshape(s.groups, own)
            own_GxW[:, : len(chunk.pages)] = places(chunk.pages, s.groups)
            if isinstance(chunk.of, Seq):
                chunk.of.filled = chunk.start + len(chunk.tokens)
            else:
                chunk.of.filled += len(chunk.tokens)
                chunk.of.ready = chunk.of.filled == len(chunk.of.tokens)
        version = None if s.adapters else next(iter(chunks)).version
        return PrefillCall(version, blocks, control, tuple(chunks.values()))

    def _next_chunk(self, holder: Prefix | Seq) -> Chunk | None:
        """What it needs computed next; None: nothing, or what is on its way from the host."""
        if not holder.computed:
            i, node = next((i, node) for i, node in enumerate(holder.path) if not node.ready)
            if node.uploading:
                return None
            start, first = node.filled, node.filled // self.shapes.page_size
            tokens = node.tokens[start : start + self.shapes.chunk]
            pages = node.pages[first : self.shapes.pages_for(start + len(tokens))]
            past = [page for before in holder.path[:i] for page in before.pages] + node.pages[:first]
            return Chunk(node, node.version, node.start + start, tokens, pages, past, kept=0)
        if isinstance(holder, Prefix) or holder.uploads or holder.filled == holder.fill_to:
            return None
        s, first = self.shapes, holder.filled // self.shapes.page_size
        start, stop = first * s.page_size, min(first * s.page_size + s.chunk, holder.fill_to)
        pages, past = holder.table[first : s.pages_for(stop)].tolist(), holder.table[:first].tolist()
        return Chunk(holder, holder.version, start, holder.sequence[start:stop], pages, past, holder.filled - start)
