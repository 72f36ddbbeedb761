"""A device that does what a plan says with numbers for pages, and checks it."""

import dataclasses

import numpy as np

from dora_jax.config import RolloutSection
from dora_jax.plan import presets
from dora_jax.rollout import plan as p
from dora_jax.rollout import shapes as columns
from dora_jax.rollout.migrate import InFlightSample
from dora_jax.rollout.shapes import shapes_of
from dora_jax.types import SampleId

SECTION = presets.on_cpu(
    RolloutSection(
        slots=4,
        pages=40,
        page_size=4,
        max_prompt_tokens=20,
        max_new_tokens=30,
        prefill_tokens=16,
        prefill_chunk=8,
        context_block=16,
        decode_steps=4,
    )
)


def request(group, index=0, version=0, prompt=None, n_prompt=9, limit=30):
    prompt = np.arange(100 * group, 100 * group + n_prompt) if prompt is None else np.asarray(prompt)
    return InFlightSample(
        id=SampleId(group, index),
        version=version,
        prompt_ids=prompt.astype(np.int32),
        max_new_tokens=limit,
        out_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
    )


class FakeDevice:
    """Remembers which (version, token, position) each page slot holds, so that a wrong table shows."""

    def __init__(self, section=SECTION, adapters=None, recurrent=False):
        """adapters: {version: place}, where versions are adapters. recurrent: samples have states."""
        self.scheduler = p.Scheduler(shapes_of(section, adapters is not None, recurrent=recurrent))
        self.scheduler.adapters.update(adapters or {})
        self.s = self.scheduler.shapes
        self.kv = {}
        self.states = {0: ()}  # by place: (version, token) of all that it stands for
        self.done = {}
        self.started = []
        self.plans = []

    def add(self, request, announce=True):
        self.scheduler.add(request, announce=announce)

    def tick(self, length=lambda id: 30):
        plan = self.scheduler.plan()
        self.plans.append(plan)
        self.started += plan.started
        for preempt in plan.preempts:
            self.preempt(preempt)
        for upload in plan.uploads:
            if upload.state:
                self.states[upload.state] = upload.request.state["state"]
            for i, page in enumerate(upload.pages):
                for offset in range(self.s.page_size):
                    self.kv[page, offset] = upload.request.k_pages.get((upload.start + i) * self.s.page_size + offset)
        for call in plan.prefills:
            self.prefill(call)
        for call in plan.decodes:
            self.decode(call, length)
        self.scheduler.check()

    def version(self, call, adapter):
        """The version of a row: its call's, or its adapter's."""
        if call.version is not None:
            return call.version
        return next(v for v, place in self.scheduler.adapters.items() if place == adapter)

    def read(self, pages, stop):
        return [self.kv.get((pages[i // self.s.page_size], i % self.s.page_size)) for i in range(stop)]

    def preempt(self, preempt):
        seq = preempt.seq
        kv = dict(enumerate(self.read(preempt.pages, preempt.kv_len)))
        seq.request = dataclasses.replace(
            request(seq.id.group_id, seq.id.index, seq.version, seq.prompt_ids),
            out_ids=seq.out_ids.copy(),
            logprobs=seq.logprobs.copy(),
            kv_len=preempt.kv_len,
            k_pages=kv,
            state={"state": self.states[preempt.state]} if preempt.state and preempt.kv_len else None,
        )

    def prefill(self, call):
        s = self.s
        n_read = call.blocks * s.block_pages
        for start, length, kept, state, adapter, *rest in call.control:
            version = self.version(call, adapter)
            tokens, past, write = rest[: s.chunk], rest[s.chunk : s.chunk + n_read], rest[s.chunk + n_read :]
            assert start % s.chunk == 0 and start <= n_read * s.page_size
            assert None not in self.read(past, start)
            if state:
                held = self.states[state] if start + kept else ()
                assert len(held) == start + kept and 0 < state <= s.states
                self.states[state] = (*held, *((version, token) for token in tokens[kept:length]))
            for i in range(kept, length):
                self.kv[write[i // s.page_size], i % s.page_size] = (version, tokens[i], start + i)

    def decode(self, call, length):
        s = self.s
        n_read = call.blocks * s.block_pages
        assert len(call.rows) <= len(call.control) and len(call.control) in (s.rows, *s.rungs)
        for (seq, steps), row in zip(call.rows, call.control, strict=False):
            position, version = row[columns.POSITION], self.version(call, row[columns.ADAPTER])
            past, window = row[columns.HEADER : columns.HEADER + n_read], row[columns.HEADER + n_read :]
            expected = [(version, token, i) for i, token in enumerate(seq.sequence[:-1])]
            assert self.read(past, position) == expected and seq.version == version
            slot, drawn, remaining = (row[column] for column in (columns.SLOT, columns.DRAWN, columns.REMAINING))
            assert (slot, drawn, remaining) == (seq.slot, seq.n_out, 30 - seq.n_out)
            old = self.read([*past, *[0] * s.window], n_read * s.page_size)
            first = position // s.page_size * s.page_size
            for i in range(first, position):  # the touched pages are rewritten whole
                self.kv[window[i // s.page_size - first // s.page_size], i % s.page_size] = old[i]
            seq.inflight -= steps
            if place := row[columns.STATE]:
                assert 0 < place <= s.states
                self.states[place] = self.states[row[columns.SOURCE]]
                assert self.states[place] == tuple((version, token) for token in seq.sequence[:-1])
            for _ in range(steps):
                self.states[place] += ((version, seq.sequence[-1]),) if place else ()
                i = len(seq.sequence) - 1
                page = window[i // s.page_size - first // s.page_size]
                assert page != p.DUMMY
                self.kv[page, i % s.page_size] = (version, seq.sequence[-1], i)
                seq.extend(np.array([1000 + i]), np.zeros(1), np.zeros((1, 0)))
                if seq.n_out == length(seq.id):
                    break
            if seq.n_out >= length(seq.id):
                self.done[seq.id] = seq
                self.scheduler.remove(seq)

    def finish(self, length=lambda id: 30, limit=500):
        for _ in range(limit):
            if not self.scheduler.seqs:
                return
            self.tick(length)
        raise AssertionError("not idle: a sample starves")
