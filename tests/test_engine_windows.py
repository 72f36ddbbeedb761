"""Layers with a window beside others: their pages are given back once the window has passed, and nobody notices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.config import RolloutSection
from dora_jax.models import decoder, sharding
from dora_jax.models.families.config import Kind
from dora_jax.ops import attention
from dora_jax.plan import memory, presets
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import cut_kv, observed
from dora_jax.rollout.pages import LOCAL, PagePool
from dora_jax.runtime.transfer import kv_transfer
from dora_jax.runtime.transfer.transfer_manifest import Key
from dora_jax.types import SampleId
from tests.fakes.engine_rig import ROOMY, VOCAB, finish, ids, submit
from tests.fakes.episode_rig import begin, play, reply
from tests.fakes.wire_peer import new_wire

WINDOW = 6
KINDS = (Kind(window=WINDOW, theta=1e4), Kind(window=5), Kind())
CFG = decoder.new_config(
    "gemma3_text", vocab_size=64, d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=64, kinds=KINDS
)
NEW, POOL = 40, 40  # tokens of an answer; pages of the layers with a window


@functools.cache
def params():
    return decoder.init_params(CFG, 0)


def section(**changes):
    return presets.on_cpu(RolloutSection(**ROOMY | changes))


def new_engine(device=0, **changes):
    mesh = sharding.make_mesh(jax.devices()[device : device + 1], 1, 1, 1)
    engine = Engine(CFG, section(**changes), mesh, seed=7, eos_ids=(), vocab_limit=VOCAB)
    weights = decoder.serving_layout(params(), engine.shapes.layout)
    engine.load(0, jax.device_put(weights, engine.param_shardings))
    return engine


@functools.cache
def shared(name):
    """kept: one pool, in which nothing is given back; freed: two, and what is free is no number, nor is the dummy."""
    if name == "kept":
        return new_engine()
    engine = new_engine(window_pages=POOL)
    assert engine.shapes.groups == 2
    plan = engine.scheduler.plan

    def poisoned():
        found = plan()
        held = [page for node in engine.scheduler.index.nodes() for page in node.pages]
        held += [page for seq in engine.scheduler.seqs.values() if seq.slot is not None for page in seq.private]
        held += [page for rest in engine.scheduler.resting.values() for page in rest.private]
        pool, free = (
            engine.device.pool,
            np.setdiff1d(np.arange(POOL + 1), [page // LOCAL for page in held if page >= LOCAL]),
        )
        for layer, window in enumerate(engine.calls.kv.windows):
            for pages in pool.values() if window else ():
                pages[layer] = pages[layer].at[free].set(jnp.nan)
        return found

    engine.scheduler.plan = poisoned
    return engine


@functools.cache
def quiet(id):
    engine = shared("kept")
    submit(engine, id, max_new_tokens=NEW)
    return finish(engine)[id]


def assert_same(sample, same=None):
    same = same or quiet(sample.id)
    np.testing.assert_array_equal(sample.out_ids, same.out_ids)
    np.testing.assert_array_equal(sample.logprobs.view(np.int32), same.logprobs.view(np.int32))


def held_local(engine):
    return {seq.id: sum(page >= LOCAL for page in seq.private) for seq in engine.scheduler.seqs.values() if seq.path}


def test_no_bit_depends_on_pages_that_were_given_back():
    """Groups share prompts of every length; each free place of a layer with a window holds nan."""
    assert shared("kept").shapes.groups == 1
    engine = shared("freed")
    for id in (asked := ids((0, 1, 2, 3, 4, 5), size=2)):
        submit(engine, id, max_new_tokens=NEW)
    done, most = {}, 0
    while not engine.idle:
        done |= {sample.id: sample for sample in engine.tick().finished}
        engine.check()
        most = max(most, *held_local(engine).values(), 0)
    assert set(done) == set(asked) and max(len(sample.out_ids) for sample in done.values()) == NEW
    assert 0 < most <= -(-(WINDOW + 8) // 4) + 2, "a window and what is in flight"
    for sample in done.values():
        assert_same(sample)
    assert engine.free_pages == POOL


def test_bytes_of_the_pools_are_those_of_the_plan():
    for name in ("kept", "freed"):
        engine = shared(name)
        measured = sum(x.nbytes for x in jax.tree.leaves(engine.device.pool))
        assert measured == memory.pages_bytes(CFG, engine.section, "float32")
    assert measured == memory.page_bytes(CFG, engine.section, "float32") * (62 * 1 + (POOL + 1) * 3) / 4


@pytest.mark.parametrize("free_bytes", [5e4, 2e5, 2.2e5, 2.4e5, 3e5])
def test_pages_are_the_most_that_fit(free_bytes):
    """One pool where every slot can hold a longest sample, or too few fit for a window each; two in between."""
    rollout = section(pages=0)
    pages, local = memory.pages_within(CFG, rollout, "float32", free_bytes)
    assert (local == 0) == (free_bytes not in (2.2e5, 2.4e5))
    held = [
        memory.pages_bytes(
            CFG, dataclasses.replace(rollout, pages=pages + n, window_pages=local + n * (local > 0)), "float32"
        )
        for n in (0, 1)
    ]
    assert held[0] <= free_bytes < held[1]
    assert memory.window_pages(CFG, dataclasses.replace(rollout, pages=1000)) == 0


def over_a_wire(moved, kv):
    """The same sample: of layers with a window only what they still hold has travelled."""
    ends, key = (new_wire(), new_wire()), Key(epoch=1, version=0, receiver="rollout0/0", sequence=1)
    layout = kv_transfer.layout_of(moved.pages, kv)
    offered = kv_transfer.offer(ends[0], key, moved, layout)
    page, layers = moved.kv_bytes // moved.n_pages // 4, sum(map(bool, kv.windows))
    behind = (moved.hole[1] - WINDOW + 1) // 4 - moved.hole[0] // 4
    assert 0 < behind and sum(shard.bytes for shard in offered.manifest.shards) == page * (
        4 * moved.n_pages - layers * behind
    )
    got = kv_transfer.fetch(ends[1], kv_transfer.CODEC.decode(kv_transfer.CODEC.encode(offered)), key, layout, 20)
    for name, pages in moved.pages.items():
        np.testing.assert_array_equal(got.pages[name], pages)
    return got


@pytest.mark.parametrize("page_size", [4, 8])
def test_a_sample_moves_without_what_is_behind_its_window(page_size):
    id, a = SampleId(3, 0), shared("freed")
    submit(a, id, max_new_tokens=NEW)
    for _ in range(8):
        a.tick()
    moved = a.export(id)
    start, stop = moved.hole
    assert 16 <= start < stop <= moved.kv_len and 0 < len(moved.out_ids) < NEW
    window = [i for i, kind in enumerate(map(CFG.kind, range(4))) if kind.window]
    assert not moved.k_pages[window, start // 4 : (stop - WINDOW + 1) // 4].any() and moved.k_pages[window].any()
    b = shared("kept") if page_size == 4 else new_engine(page_size=8, window_pages=30)
    assert b.shapes.groups == (1 if page_size == 4 else 2)
    b.import_(over_a_wire(moved, a.calls.kv))
    (sample,) = finish(b).values()
    if page_size == 4:
        assert_same(sample)
    else:
        np.testing.assert_array_equal(sample.out_ids, quiet(id).out_ids)


def test_a_move_back_into_two_pools_takes_only_what_the_window_needs():
    id, a = SampleId(4, 1), shared("freed")
    submit(a, id, max_new_tokens=NEW)
    for _ in range(7):
        a.tick()
    moved = a.export(id)
    a.import_(moved)
    a.tick()
    assert held_local(a)[id] <= -(-(WINDOW + 8) // 4) + 2
    (sample,) = finish(a).values()
    assert_same(sample)


def test_kv_is_cut_to_where_all_layers_have_it():
    id, a = SampleId(3, 1), shared("freed")
    submit(a, id, max_new_tokens=NEW)
    for _ in range(9):
        a.tick()
    moved = a.export(id)
    start, stop = moved.hole
    assert cut_kv(moved, stop).hole == moved.hole and cut_kv(moved, stop).kv_len == stop
    assert (cut_kv(moved, stop - 1).kv_len, cut_kv(moved, stop - 1).hole) == (start, ())
    assert cut_kv(moved, start - 1).kv_len == start - 1
    back = cut_kv(moved, stop - 1)
    a.import_(back)
    (sample,) = finish(a).values()
    np.testing.assert_array_equal(sample.out_ids, quiet(id).out_ids)
    np.testing.assert_allclose(sample.logprobs, quiet(id).logprobs, rtol=0, atol=1e-5)


def test_few_pages_send_samples_to_the_host_and_back():
    engine = new_engine(device=1, pages=42, window_pages=40)
    assert engine.shapes.groups == 2
    preempts, plan = [], engine.scheduler.plan
    engine.scheduler.plan = lambda: (found := plan(), preempts.extend(found.preempts))[0]
    for id in ids((3, 9, 15, 21), size=1):
        submit(engine, id, max_new_tokens=NEW)
    done = finish(engine)
    assert any(preempt.hole for preempt in preempts)
    for sample in done.values():
        assert_same(sample)


def test_episodes_wait_with_their_pages_and_go_back_behind_their_window():
    """An environment that takes back most of the last turn finds no KV of it: it is prefilled again."""
    answers = {}
    for name in ("kept", "freed"):
        engine = shared(name)
        for id in ids((0, 2, 3), size=1):
            begin(engine, id, max_new_tokens=60, turn_tokens=20)
        answers[name] = play(engine, turns=2)
    for id, sample in answers["freed"].items():
        assert_same(sample, answers["kept"][id])
    cut = {}
    for name in ("kept", "freed"):
        engine, id = shared(name), SampleId(3, 0)
        begin(engine, id, max_new_tokens=40, turn_tokens=20)
        while not (waiting := engine.tick().waiting):
            pass
        if name == "freed":
            assert engine.scheduler.hole(engine.scheduler.resting[id])[1] > 25
        engine.import_(observed(waiting[0], reply(waiting[0]), keep=25))
        (cut[name],) = play(engine, turns=1).values()
    np.testing.assert_array_equal(cut["freed"].out_ids, cut["kept"].out_ids)
    np.testing.assert_allclose(cut["freed"].logprobs, cut["kept"].logprobs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_drafts_change_no_token():
    engine = new_engine(device=1, window_pages=POOL, drafts=3, draft_cost=0.5)
    assert engine.shapes.groups == 2
    for id in ids((1, 2, 3, 4), size=3):
        submit(engine, id, max_new_tokens=NEW)
    for sample in finish(engine).values():
        np.testing.assert_array_equal(sample.out_ids, quiet(sample.id).out_ids)


def test_a_kernel_that_reads_pages_finds_the_same(monkeypatch):
    monkeypatch.setattr(attention, "paged_kernel", lambda impl, rank: attention.paged_reference)
    monkeypatch.setattr(attention, "check_platform", lambda *args, **latent: None)
    engine = new_engine(device=1, pages=50, window_pages=POOL, context_block=60, attention="tpu")
    assert engine.shapes.groups == 2 and engine.shapes.layout == "scanned"
    for id in ids((0, 2, 3, 4), size=2):
        submit(engine, id, max_new_tokens=NEW)
    for sample in finish(engine).values():
        np.testing.assert_array_equal(sample.out_ids, quiet(sample.id).out_ids)
        np.testing.assert_allclose(sample.logprobs, quiet(sample.id).logprobs, rtol=0, atol=1e-5)
    measured = sum(x.nbytes for x in jax.tree.leaves(engine.device.pool))
    lanes = engine.device.pool[0].shape[-1]
    assert measured == memory.pages_bytes(CFG, engine.section, "float32") * lanes / CFG.head_dim


def test_a_pool_that_no_sample_fits_is_refused():
    with pytest.raises(ValueError, match="rollout.window_pages 9 cannot hold one longest sample, which needs 16"):
        new_engine(window_pages=9)


def test_the_pool_loses_no_place():
    pool = PagePool(8, 4, local=3)
    pages = pool.allocate(0, 4, bare=1)
    assert pool.free == 0 and pool.lacks(1) and not pool.lacks(1, bare=1)
    pages[2] = pool.shed(pages[2])
    assert pool.free == 1 and pages[2] < LOCAL and pool.shed(pages[2]) == pages[2]
    pool.check([(0, pages)])
    with pytest.raises(RuntimeError, match="held"):
        pool.check([(0, pages[:-1])])
    pool.release(pages)
    pool.check([])
    assert pool.free == 3
