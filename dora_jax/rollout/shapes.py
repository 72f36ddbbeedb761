"""Stage 2, pure: the static shapes of one engine, derived once from its configuration. No JAX.

Every compiled call has one of these shapes. Results on one device depend on a call's row count, so rows are fixed:
`rows` for decoding, `prefill_rows` x `chunk` for prefill; narrower decode calls (`rungs`) and the verifying call of
drafts are shapes of their own. Results do not depend on the number of context blocks
(ops/attention.py), so that one may follow the longest sample of the call.

Stage 2, pure: what one position leaves in the KV cache, by the kind of attention. No JAX.

  GQA  K and V of every KV head: heads x key_dim and heads x value_dim numbers
  MLA  one latent row that all heads share: key_dim = kv_rank + rope_dim numbers, of which the first `rank` are the
       value
kv_xla.py and kv_pallas.py hold such rows in pages; a copy of pages on its way to or from the host has one array a name:
  "k"  [layers, pages, heads, key_dim, page_size]
  "v"  [layers, pages, heads, page_size, value_dim], of GQA only
and "k2", "v2" of the layers whose rows have other heads than the first layer's.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import TYPE_CHECKING, TypeVar

from dora_jax.config import RolloutSection
from dora_jax.models.families.config import ModelConfig
from dora_jax.types import MAX_BIASES, MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    import numpy as np


POSITIONS = {"k": -1, "v": -2, "k2": -1, "v2": -2}  # the axis of positions in an array of that name


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVLayout:
    layers: int  # attentions that keep KV, each for itself
    heads: int  # rows a position; query heads share them evenly
    key_dim: int
    value_dim: int  # numbers beside the key; 0: the value is a part of the key
    rank: int = 0  # how many of the key's first numbers are the value, where value_dim is 0
    windows: tuple[int, ...]  # of each attention; 0: it sees all positions up to its own
    second: tuple[int, int] = (0, 0)  # heads, and numbers of a head, of keys and of values, of
    of_second: tuple[int, ...] = ()  # these layers

    @property
    def names(self) -> tuple[str, ...]:
        return (("k", "v") if self.value_dim else ("k",)) + (("k2", "v2") if self.of_second else ())

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(heads, numbers of a key) of each kind of rows."""
        return ((self.heads, self.key_dim), self.second)[: 1 + bool(self.of_second)]

    def layers_of(self, row: int) -> tuple[int, ...]:
        """The attentions with rows of this kind: those of "k2" and "v2", or of the others."""
        return self.of_second if row else tuple(i for i in range(self.layers) if i not in self.of_second)

    def shape(self, name: str, layer: int, positions: int) -> tuple[int, int, int]:
        """Shape of one attention's "k" or "v" for so many positions."""
        heads, width = self.rows[layer in self.of_second]
        width = width if name == "k" or layer in self.of_second else self.value_dim
        return (heads, width, positions) if name == "k" else (heads, positions, width)


def kv_layout(cfg: ModelConfig) -> KVLayout:
    layers, latent = cfg.kv_layers, cfg.latent
    if latent is not None:
        width, rank = latent.cache_dim, latent.kv_rank
        return KVLayout(layers=layers, heads=1, key_dim=width, value_dim=0, rank=rank, windows=(0,) * layers)
    kinds = [kind for kind in cfg.every_kind[: cfg.kv_owners] if not kind.linear]
    (heads, width), *more = cfg.kv_rows
    if len(more) > 1:
        raise ValueError(f"rows of keys in {1 + len(more)} shapes: an engine has pages for two at most")
    windows = tuple(kind.window for kind in kinds) * cfg.sublayers
    second = tuple(i for i, kind in enumerate(kinds) if cfg.kv_row(kind))
    return KVLayout(
        layers=layers,
        heads=heads,
        key_dim=width,
        value_dim=width,
        windows=windows,
        second=more[0] if more else (0, 0),
        of_second=second,
    )


# columns of a decode call's control array; then the pages to read, then those to write
# STATE: the place of the row's recurrent state; SOURCE: where it lies before the call
SLOT, FRESH, TOKEN, POSITION, REMAINING, DRAWN, GROUP, INDEX, REPEATS, ADAPTER, STATE, SOURCE, HEADER = range(13)
# of a prefill call's: the chunk's start, its length, how many of its first positions have KV, place of the recurrent
# state, adapter
PREFILL_HEADER = 5
PREFILL_STATE = 3
COPY_PAGES = 16  # of a moving sample that one call takes, and one tick: the others decode in between
ALONE_PAGES = 144  # where nobody decodes, for a call costs as much as many pages: 128, and what has been sampled since
COPY_TOKENS = 1024  # of pages in one copy where a kernel reads pages, so that reading and writing are compiled once
SMEM_BYTES = 2**20  # a TPU core's scalar memory: the kernels prefetch a call's whole page table into it
SMEM_SPARE_BYTES = 2**14  # lengths, offsets and semaphores beside it
SMEM_LANES = 128  # a table's rows are padded to it


class Option(enum.IntEnum):
    """Columns of a decode call's options array, floats as bits: what rows draw by in the place of the run's sampling.
    Then come the ids of a row's logit bias, the biases, its tokens so far, and what this call's steps take in the place
    of drawn tokens; -1 where there is none."""

    OWN = 0  # the row has values of its own; 0: no other column counts
    TEMPERATURE = 1
    TOP_K = 2
    TOP_P = 3
    MIN_P = 4
    MIN_TOKENS = 5
    PRESENCE = 6
    FREQUENCY = 7
    REPETITION = 8
    N_PROMPT = 9
    TOP_LOGPROBS = 10  # how many of the most likely tokens are reported
    MASKED = 11  # only tokens of its mask may be drawn


BIASED = len(Option)  # where the ids of a logit bias begin,
BIASES = BIASED + MAX_BIASES  # the biases,
HISTORY = BIASES + MAX_BIASES  # and the tokens so far
TOP_COLUMNS = 2 * MAX_TOP_LOGPROBS  # of the most likely tokens at a token: their ids, then the bits of their log-probs

Positions = TypeVar("Positions", int, "np.ndarray")  # of one sample, or of several


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    slots: int  # samples that hold pages and decode
    rows: int  # of one decode call
    ladder: bool  # decode calls of shorter contexts and of fewer rows are compiled beside what runs
    narrow_rows: int  # of the narrowest decode call that is compiled at start; 0: there is none
    narrow_cost: float  # its time over that of a decode call; 0: measured
    steps: int  # decode steps a call
    chunk: int  # positions a prefill call gives one prompt; prefixes are shared in such chunks
    prefill_rows: int  # of one prefill call
    prefill_calls: int  # of one tick, at most
    page_size: int
    pages: int
    copy_pages: int  # that one call, and one tick, copies to or from the host while samples decode
    alone_pages: int  # the same where none does
    block: int  # positions of one context block
    max_context: int  # prompt + new tokens
    expert_matmul: str  # of a mixture of experts; see models/moe.py
    whole_experts: bool  # whether a device has some of them whole, else a part of each
    attention: str  # how KV lies in pages, and what reads it; see ops/attention.py
    kv: str  # type of the KV pool; empty: the compute type
    max_repeats: int  # 0: no limit
    kept: int  # ids of the keep set that come along with each token
    drafts: int  # tokens that one verifying call checks of each sample; 0: there is no such call
    draft_rows: int  # of a verifying call
    draft_cost: float  # its time over that of a decode call; 0: measured
    adapters: int  # that lie beside one another: each row of a call takes its own; 0: a call's rows are of one version
    local_window: int  # positions that the layers of a pool of their own see; 0: there is one pool
    local_pages: int  # of these layers
    states: int  # places for recurrent states; 0: the model has none
    exact: bool  # decode calls take tokens that are to be drawn, so that they can score a sample

    @property
    def paged(self) -> bool:
        """Whether a kernel reads the pages themselves: then a call's cost follows its rows' lengths, not its table's
        width, and there is one width."""
        return self.attention != "reference"

    @property
    def layout(self) -> str:
        """Layout of the weights (decoder.serving_layout). On a GPU a product is a library's call, before which XLA
        copies the layer's slice of stacked weights."""
        return "serving" if self.attention in ("reference", "gpu") else "scanned"

    @property
    def block_pages(self) -> int:
        return self.block // self.page_size

    @property
    def reach(self) -> int:
        """Tokens that one call may draw of a sample, at most."""
        return max(self.steps, self.drafts + 1)

    @property
    def groups(self) -> int:
        """Pools of pages: that of layers that attend in full, or of all, and that of layers with a window."""
        return 2 if self.local_window else 1

    def first_seen(self, position: int) -> int:
        """The first page that layers with a window read for queries from the page of this position on: a chunk begins
        with a page, and what it reads is finite; 0 where there is one pool."""
        start = position // self.page_size * self.page_size
        return max(start + 1 - self.local_window, 0) // self.page_size if self.local_window else 0

    @property
    def window(self) -> int:
        """Pages that a decode call's consecutive positions may touch."""
        return (self.steps + self.page_size - 2) // self.page_size + 1

    @property
    def verify_window(self) -> int:
        """The same of a verifying call."""
        return (self.drafts + self.page_size - 1) // self.page_size + 1

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Context lengths that decode calls are compiled for, in blocks: powers of two, then the longest; where pages
        are read by a kernel, the longest alone."""
        longest = -(-(self.max_context - 1) // self.block)
        powers = [1 << i for i in range(longest.bit_length()) if 1 << i < longest and not self.paged]
        return (*powers, longest)

    @property
    def first_buckets(self) -> tuple[int, ...]:
        """Contexts whose decode call a warm-up compiles: with a ladder the longest alone, which takes every sample."""
        return self.decode_buckets[-1:] if self.ladder and not self.drafts else self.decode_buckets

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Past lengths that prefill calls are compiled for: most prompts have none, which a kernel sees by itself. An
        exact engine has one program: a prompt's bits would depend on what is prefilled beside it."""
        return self.decode_buckets if self.paged else (0, self.decode_buckets[-1])[self.exact :]

    @functools.cached_property
    def rungs(self) -> tuple[int, ...]:
        """Rows of the narrower decode calls, ascending; fewer of them where all are compiled at start."""
        rungs, wider = [self.narrow_rows or 1] if self.narrow_rows or self.ladder else [], 2 if self.ladder else 4
        while rungs and wider * rungs[-1] < self.rows:
            rungs.append(wider * rungs[-1])
        return tuple(rungs)

    @property
    def result(self) -> int:
        """Columns of a decode call's result: tokens, log-prob bits, how many of them count, keep sets."""
        return (2 + self.kept) * self.steps + 1

    def decode_control(self, blocks: int, rows: int = 0) -> tuple[int, int]:
        """Shape of a decode call's control array: header, pages to read, pages to write; of an exact engine the tokens
        to draw behind them, -1 where the call is to draw."""
        columns = HEADER + self.groups * (blocks * self.block_pages + self.window) + self.exact * self.steps
        return rows or self.rows, columns

    def decode_options(self, rows: int = 0) -> tuple[int, int]:
        """Shape of a decode call's options array."""
        return rows or self.rows, HISTORY + self.max_context + self.steps

    def decode_masks(self, vocab: int, rows: int = 0) -> tuple[int, int]:
        """Shape of a decode call's masks: a bit a token of the vocabulary."""
        return rows or self.rows, -(-vocab // 32)

    def verify_control(self, blocks: int) -> tuple[int, int]:
        """Shape of a verifying call's: as a decode call's, and the drafts behind it."""
        return self.draft_rows, HEADER + self.groups * (blocks * self.block_pages + self.verify_window) + self.drafts

    def prefill_control(self, blocks: int) -> tuple[int, int]:
        """Shape of a prefill call's: start, length, kept, tokens, pages to read, pages to write."""
        pages = blocks * self.block_pages + self.chunk // self.page_size
        return self.prefill_rows, PREFILL_HEADER + self.chunk + self.groups * pages

    def bucket(self, positions: int, buckets: tuple[int, ...]) -> int:
        """The smallest bucket whose blocks hold this many positions."""
        return next(b for b in buckets if b * self.block >= positions)

    def pages_for(self, positions: Positions) -> Positions:
        return -(-positions // self.page_size)

    def copy_call(self, pages: int) -> int:
        """Pages of the compiled call that copies so many, or the first of them: the larger where half of it is used."""
        return self.alone_pages if 2 * pages > self.alone_pages else self.copy_pages

    def worst_pages(self, n_prompt: int, max_new_tokens: int) -> int:
        """Pages that one sample may need at the end; one more where the prompt ends inside a shared page."""
        return self.pages_for(n_prompt + max_new_tokens - 1) + int((n_prompt - 1) % self.page_size > 0)


# fields that have the name and the value of the section's
OF_SECTION = ("slots", "narrow_rows", "narrow_cost", "page_size", "pages", "expert_matmul", "attention", "kv",
              "max_repeats", "drafts", "draft_cost", "exact")  # fmt: skip


def local_pages(section: RolloutSection, window: int) -> int:
    """Pages for layers with a window of at most so many positions, beside others that attend in full: every slot has
    those of a whole prompt, which its prefix keeps, and those that a window and the calls in flight touch."""
    size, reach = section.page_size, max(section.decode_steps, section.drafts + 1)
    each = -(-section.max_prompt_tokens // size) + -(-(window + 2 * reach) // size) + 3
    longest = -(-(section.max_prompt_tokens + section.max_new_tokens) // size) + 1
    return max(section.slots * each, longest)


def state_places(section: RolloutSection) -> int:
    """Recurrent states of an engine: a slot's own, and that at the end of its prompt, from which its group starts."""
    return 2 * section.slots


def shapes_of(section: RolloutSection, adapters: bool = False, window: int = 0, recurrent: bool = False) -> Shapes:
    """adapters: versions are adapters of the same base weights. window: ModelConfig.local_window. recurrent: the model
    has linear layers. ValueError: the section's sizes cannot work together."""
    size, paged = section.page_size, section.attention != "reference"
    rows = section.decode_rows or section.slots
    _check(section, rows)
    max_context = section.max_prompt_tokens + section.max_new_tokens
    chunk = min(
        _up(section.prefill_chunk, size), _up(section.max_prompt_tokens, size), section.prefill_tokens // size * size
    )
    prefill_rows = max(1, min(section.prefill_call_tokens, section.prefill_tokens) // chunk)
    copy_pages = max(1, COPY_TOKENS // size) if paged else COPY_PAGES
    local = section.window_pages if window and section.window_pages < section.pages else 0
    shapes = Shapes(
        **{name: getattr(section, name) for name in OF_SECTION},
        rows=rows,
        ladder=section.ladder == "on" and not section.narrow_rows,
        steps=section.decode_steps,
        chunk=chunk,
        prefill_rows=prefill_rows,
        prefill_calls=section.prefill_tokens // (prefill_rows * chunk),
        copy_pages=copy_pages,
        alone_pages=copy_pages if paged else max(copy_pages, min(ALONE_PAGES, -(-max_context // size))),
        block=size if paged else min(_up(section.context_block, size), _up(max_context, size)),
        max_context=max_context,
        whole_experts=section.expert > 1,
        kept=section.top_k if section.keep_set else 0,
        draft_rows=min(section.draft_rows, rows),
        adapters=section.residents if adapters else 0,
        local_window=window if local else 0,
        local_pages=local,
        states=state_places(section) if recurrent else 0,
    )
    needed = shapes.worst_pages(section.max_prompt_tokens, section.max_new_tokens)
    for name in ("pages", "window_pages")[: 1 + (local > 0)]:
        if needed > (pages := getattr(section, name)):
            raise ValueError(f"rollout.{name} {pages} cannot hold one longest sample, which needs {needed}")
    # a TPU kernel holds a call's page table in SMEM
    for name, rows, written in (
        ("decode_rows", shapes.rows, shapes.reach),
        ("prefill_tokens", shapes.prefill_rows, shapes.chunk),
    ):
        table = table_bytes(rows, max_context - 1, written, size)
        if section.attention in ("tpu", "tokamax") and table > SMEM_BYTES - SMEM_SPARE_BYTES:
            raise ValueError(
                f"rollout.page_size {size} makes a page table of {table} bytes for {rows} rows "
                f"of {max_context} positions, and the kernel has {SMEM_BYTES - SMEM_SPARE_BYTES}: "
                f"raise rollout.page_size, or lower rollout.{name}"
            )
    return shapes


def table_bytes(rows: int, positions: int, written: int, page_size: int) -> int:
    """Page table of a call whose rows hold so many positions at most and write so many: 32 bits a page, the pages that
    are read, then those that are written, for a write may begin inside a page."""
    pages = -(-positions // page_size) + -(-written // page_size) + 1
    return 4 * rows * _up(pages, SMEM_LANES)


def _check(section: RolloutSection, rows: int) -> None:
    if section.min_new_tokens > section.max_new_tokens:
        raise ValueError(
            f"rollout.min_new_tokens {section.min_new_tokens} is not between 0 and rollout.max_new_tokens "
            f"{section.max_new_tokens}"
        )
    if section.exact and section.drafts:
        raise ValueError("rollout.exact replays decode calls, and none that verify drafts: rollout.drafts must be 0")
    if section.keep_set and section.top_k < 1:
        raise ValueError("rollout.keep_set sends the kept ids along, so rollout.top_k must bound their number")
    if "" in section.stop_strings:
        raise ValueError("rollout.stop_strings has an empty string, which every text contains")
    if section.slots % rows:
        raise ValueError(f"rollout.slots {section.slots} is not a multiple of rollout.decode_rows {rows}")
    if section.prefill_tokens < section.page_size:
        raise ValueError(f"rollout.prefill_tokens {section.prefill_tokens} is less than a page of {section.page_size}")
    if section.expert not in (1, section.tensor):
        raise ValueError(f"rollout.expert {section.expert} is neither 1 nor rollout.tensor {section.tensor}")
    if section.narrow_rows >= rows:
        raise ValueError(f"rollout.narrow_rows {section.narrow_rows} is not less than the {rows} rows of a decode call")


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
