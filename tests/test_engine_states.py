"""Recurrent states beside pages: they follow their samples everywhere, are nobody else's, and are never cut."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dora_jax.config import RolloutSection
from dora_jax.models import decoder, sharding
from dora_jax.models.families.config import Delta, Experts, Kind
from dora_jax.ops import attention
from dora_jax.plan import memory, presets
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import cut_kv, observed
from dora_jax.rollout.pages import OutOfPages, StatePool
from dora_jax.rollout.shapes import STATE
from dora_jax.runtime.assembly.run import EngineReplay
from dora_jax.runtime.transfer import kv_transfer
from dora_jax.runtime.transfer.transfer_manifest import Key
from dora_jax.types import SampleId
from tests.fakes.engine_rig import OF_STATES, ROOMY, VOCAB, finish, ids, submit
from tests.fakes.episode_rig import begin, play, reply
from tests.fakes.wire_peer import new_wire

SIZES = dict(vocab_size=64, d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=64, rope_part=0.25)
SIZES |= dict(kinds=(*[Kind(linear=True)] * 2, Kind()), delta=Delta(key_heads=2, value_heads=4, key_dim=8, value_dim=6))
CFG = decoder.new_config("qwen3_5_text", **SIZES)
MOE = decoder.new_config(
    "qwen3_5_moe_text", **SIZES, experts=Experts(count=4, per_token=2, width=16, shared=1, shared_gate=True)
)
NEW = 40  # tokens of an answer


@functools.cache
def params(cfg=CFG, seed=0):
    return decoder.init_params(cfg, seed)


def new_engine(device=0, cfg=CFG, versions=(0,), eos_ids=(), kind=Engine, **changes):
    section = presets.on_cpu(RolloutSection(**ROOMY | {"compiler_options": OF_STATES} | changes))
    mesh = sharding.make_mesh(jax.devices()[device : device + section.tensor], 1, 1, section.tensor)
    engine = kind(cfg, section, mesh, seed=7, eos_ids=eos_ids, vocab_limit=VOCAB, dtype="float32")
    for version in versions:
        weights = decoder.serving_layout(params(cfg, version), engine.shapes.layout)
        engine.load(version, jax.device_put(weights, engine.param_shardings))
    return engine


@functools.cache
def shared(name):
    return {
        "a": lambda: new_engine(versions=(0, 1)),
        "b": lambda: new_engine(device=1, versions=(0, 1)),
        "few": lambda: new_engine(device=1, pages=24),
    }[name]()


@functools.cache
def quiet(id, version=0, new=NEW):
    """This sample alone."""
    engine = shared("a")
    submit(engine, id, version, max_new_tokens=new)
    return finish(engine)[id]


def assert_same(sample, same=None):
    same = same or quiet(sample.id, sample.version)
    np.testing.assert_array_equal(sample.out_ids, same.out_ids)
    np.testing.assert_array_equal(sample.logprobs.view(np.int32), same.logprobs.view(np.int32))


def test_groups_and_versions_side_by_side_are_as_alone():
    """Six prompts of every length, three samples each, of two resident versions: nine more slots' worth wait."""
    engine = shared("a")
    for version in (0, 1):
        for id in ids((0, 1, 2, 3, 4, 5), size=2):
            submit(engine, SampleId(id.group_id, id.index + 2 * version), version, max_new_tokens=NEW)
    done = finish(engine)
    assert len(done) == 24
    for sample in done.values():
        assert_same(sample)
    assert max(len(sample.out_ids) for sample in done.values()) == NEW
    engine.check()
    assert engine.scheduler.states.free < engine.shapes.states, "prompts stay with their states until evicted"


def test_a_move_takes_the_state_along():
    """Over a wire, between engines; the state is that of a sample that stayed, bit by bit."""
    a, b, id = shared("a"), shared("b"), SampleId(3, 0)
    for each in (id, SampleId(3, 1)):
        submit(a, each, max_new_tokens=NEW)
    for _ in range(4):
        a.tick()
    moved = a.export(id)
    assert 0 < moved.kv_len == len(moved.prompt_ids) + len(moved.out_ids) - 1 and moved.state is not None
    assert moved.kv_bytes == sum(x.nbytes for x in moved.pages.values()) + CFG.state_bytes_on(1, 4)
    ends, key = (new_wire(), new_wire()), Key(epoch=1, version=0, receiver="rollout0/0", sequence=1)
    layout = kv_transfer.layout_of(a.page(), a.calls.kv, a.device.no_state())
    assert not any(x.any() for x in a.device.no_state().values()), "place 0 is never written"
    offered = kv_transfer.offer(ends[0], key, moved, layout)
    got = kv_transfer.fetch(ends[1], kv_transfer.CODEC.decode(kv_transfer.CODEC.encode(offered)), key, layout, 20)
    for name, x in moved.state.items():
        assert got.state[name].tobytes() == x.tobytes() and x.any()
    b.import_(got)
    for _ in range(2):
        b.tick()
    back = b.export(id)
    a.import_(back)
    for sample in finish(a).values():
        assert_same(sample)
    assert b.idle and len(back.out_ids) > len(moved.out_ids)


def test_before_its_first_step_a_sample_leaves_with_its_prompts_state():
    a, b, id = shared("a"), shared("b"), SampleId(0, 0)  # a prompt of three tokens
    submit(a, id, max_new_tokens=NEW)
    launched, a.scheduler.decoding.calls = a.scheduler.decoding.calls, lambda seqs: []
    a.tick()
    moved = a.export(id)
    a.scheduler.decoding.calls = launched
    assert not len(moved.out_ids) and moved.kv_len == 2 and moved.state["state"].any()
    b.import_(moved)
    assert_same(finish(b)[id])


def test_few_pages_send_states_to_the_host_and_back():
    engine, preempts = shared("few"), []
    plan = engine.scheduler.plan
    engine.scheduler.plan = lambda: (found := plan(), preempts.extend(found.preempts))[0]
    for id in ids((3, 9, 15, 21), size=1):
        submit(engine, id, max_new_tokens=NEW)
    done = finish(engine)
    engine.scheduler.plan = plan
    assert any(preempt.state and preempt.kv_len for preempt in preempts)
    for sample in done.values():
        assert_same(sample)


def test_a_state_cannot_be_cut():
    a, id = shared("a"), SampleId(4, 1)
    submit(a, id, max_new_tokens=NEW)
    for _ in range(5):
        a.tick()
    moved = a.export(id)
    assert cut_kv(moved, moved.kv_len).state is moved.state
    cut = cut_kv(moved, moved.kv_len - 1)
    assert (cut.kv_len, cut.state, cut.n_pages) == (0, None, 0)
    a.import_(cut)  # all of it is prefilled again
    (sample,) = finish(a).values()
    np.testing.assert_array_equal(sample.out_ids, quiet(id).out_ids)
    np.testing.assert_allclose(sample.logprobs, quiet(id).logprobs, rtol=0, atol=1e-5)


def played(engine, **how):
    for id in ids((0, 2, 3), size=2):
        begin(engine, id, max_new_tokens=20)
    return play(engine, **how)


def test_episodes_keep_their_states_and_go_on_without_a_second_prefill():
    """Two turns in place, on the host, and elsewhere are as alone; an environment that takes back a token makes the
    engine read all of it again."""
    a, b = shared("a"), shared("b")
    together = played(a)
    for id, sample in together.items():
        begin(a, id, max_new_tokens=20)
        assert_same(sample, play(a)[id])
    elsewhere = {}
    for id in together:
        begin(a, id, max_new_tokens=20)
    elsewhere = play(a, b, answer=lambda in_flight: b)
    for id, sample in elsewhere.items():
        assert_same(sample, together[id])
    id = SampleId(3, 0)
    begin(a, id, max_new_tokens=20)
    while not (waiting := a.tick().waiting):
        pass
    rest = a.scheduler.resting[id]
    assert rest.state and rest.kv_len == len(waiting[0].prompt_ids) + len(waiting[0].out_ids) - 1
    prefills, run = [], a.device.prefill
    a.device.prefill = lambda params, control, blocks: (prefills.append(control), run(params, control, blocks))[1]
    a.import_(observed(waiting[0], reply(waiting[0])))
    a.tick()
    assert min(row[0] for control in prefills for row in control if row[1]) > 16, "what it knew is not read again"
    a.cancel(id)
    begin(a, id, max_new_tokens=20)
    while not (waiting := a.tick().waiting):
        pass
    prefills.clear()
    short = observed(waiting[0], reply(waiting[0]), keep=len(waiting[0].prompt_ids) + 2)
    a.import_(short)
    (one,) = play(a, turns=1).values()
    assert any(row[0] == 0 and row[1] for control in prefills for row in control)
    a.device.prefill = run
    b.import_(dataclasses.replace(short, kv_len=0, state=None, k_pages=None, v_pages=None, page_size=0))
    (other,) = play(b, turns=1).values()
    assert_same(one, other)


def test_what_a_row_leaves_when_it_is_done_is_what_it_found():
    """A call in which one row ends early: its state, and that of everybody who is not in the call, stay to the bit."""
    engine = shared("a")
    for id in (SampleId(1, 0), SampleId(2, 0)):
        submit(engine, id, max_new_tokens=NEW if id.group_id == 1 else 5)
    for _ in range(3):
        engine.tick()
    states = jax.tree.map(np.asarray, engine.device.pool["states"])
    (seq,) = [seq for seq in engine.scheduler.seqs.values()]
    others = np.setdiff1d(np.arange(engine.shapes.states + 1), [seq.state])
    engine.tick()
    for name, before in states.items():
        after = np.asarray(engine.device.pool["states"][name])
        assert before[:, others].tobytes() == after[:, others].tobytes()
        assert before[:, seq.state].tobytes() != after[:, seq.state].tobytes()
    finish(engine)


@pytest.mark.parametrize("column", ["state", "source"])
def test_a_wrong_place_raises(column):
    engine = shared("b")
    submit(engine, SampleId(1, 0), max_new_tokens=NEW)
    for _ in range(2):
        engine.tick()
    (seq,) = engine.scheduler.seqs.values()
    right = getattr(seq, column)
    setattr(seq, column, engine.shapes.states + 1)
    engine.scheduler.rows.again(seq)
    with pytest.raises(RuntimeError, match="recurrent state 9 is none of the 8 of this engine"):
        engine.tick()
    setattr(seq, column, right)
    with pytest.raises(RuntimeError, match="recurrent state -1 is none of the 8"):
        engine.device.write_state(-1, {})
    engine.cancel(seq.id)
    shared.cache_clear(), quiet.cache_clear()


def test_the_pool_loses_no_state():
    pool = StatePool(2)
    places = [pool.allocate(version) for version in (0, 1)]
    pool.check([(0, places[0]), (1, places[1])])
    for wrong in ([(0, places[0])], [(0, places[0]), (1, places[0])], [(1, places[0]), (0, places[1])]):
        with pytest.raises(RuntimeError, match="recurrent states"):
            pool.check(wrong)
    with pytest.raises(OutOfPages, match="all 2 are in use"):
        pool.allocate(0)
    pool.release(places[0])
    pool.check([(1, places[1])])


def test_bytes_of_the_states_are_those_of_the_plan():
    engine = shared("a")
    measured = sum(x.nbytes for x in jax.tree.leaves(engine.device.pool))
    assert measured == memory.pages_bytes(CFG, engine.section, "float32")
    assert decoder.new_config("qwen3_5_text", **SIZES).state_bytes_on(2, 4) == CFG.state_bytes_on(1, 4) / 2


def test_a_kernel_that_reads_pages_finds_the_same(monkeypatch):
    """Stacked weights, whose layers are traced."""
    monkeypatch.setattr(attention, "paged_kernel", lambda impl, rank: attention.paged_reference)
    monkeypatch.setattr(attention, "check_platform", lambda *args, **latent: None)
    engine = new_engine(device=1, context_block=60, attention="tpu")
    assert engine.shapes.layout == "scanned"
    for id in ids((0, 2, 3, 5), size=2):
        submit(engine, id, max_new_tokens=NEW)
    for sample in finish(engine).values():
        np.testing.assert_array_equal(sample.out_ids, quiet(sample.id).out_ids)
        np.testing.assert_allclose(sample.logprobs, quiet(sample.id).logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cfg", [CFG, pytest.param(MOE, marks=pytest.mark.slow)], ids=["dense", "mixture"])
@pytest.mark.parametrize("episodes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exact_scores_have_the_bits_of_sampling(episodes, cfg):
    """A replay cuts a prompt, and what is observed, where sampling did. Some leave and come back, and pages are few."""
    sizes = {"exact": True, "context_block": 60, "cfg": cfg, "versions": ()}
    engine, replay = new_engine(pages=24, **sizes), new_engine(kind=EngineReplay, **sizes)
    # a log-prob near 0 shows what one of -4 rounds away
    sharp = params(cfg) | {"final_norm": params(cfg)["final_norm"] + 20}
    engine.load(0, jax.device_put(decoder.serving_layout(sharp, engine.shapes.layout), engine.param_shardings))
    preempts, plan = [], engine.scheduler.plan
    engine.scheduler.plan = lambda: (found := plan(), preempts.extend(found.preempts))[0]
    asked = ids((0, 3, 4), size=2)
    if episodes:
        for id in asked:
            begin(engine, id, max_new_tokens=20)
        done = play(engine, turns=4, answer=lambda waiting: engine)
    else:
        for id in asked:
            submit(engine, id, max_new_tokens=NEW)
        done = {sample.id: sample for _ in range(5) for sample in engine.tick().finished}
        left = [engine.export(id) for id in asked[:2] if engine.holds(id)]
        for _ in range(2):
            done |= {sample.id: sample for sample in engine.tick().finished}
        for sample in left:
            assert sample.state
            engine.import_(sample)
        done |= finish(engine)
        assert left and any(preempt.state and preempt.kv_len for preempt in preempts)
    assert set(done) == set(asked)
    answers, masks = [(x.prompt_ids, x.out_ids) for x in done.values()], [x.mask for x in done.values()]
    for sample, logprobs in zip(done.values(), replay(sharp, answers, masks), strict=True):
        np.testing.assert_array_equal(sample.logprobs.view(np.int32), logprobs.view(np.int32))


@pytest.mark.parametrize("cfg", [CFG, pytest.param(MOE, marks=pytest.mark.slow)], ids=["dense", "mixture"])
def test_drafts_take_a_state_as_far_as_they_hold(cfg):
    """A cold policy, whose siblings are alike; two versions, and moves. The tokens, and a sample's state on the way, are
    those of an engine of one slot without drafts; what is in no call, and place 0, stays to the bit."""
    cold = {"cfg": cfg, "versions": (0, 1), "temperature": 0.1, "draft_cost": 0.3, "context_block": 60}
    engine, alone = new_engine(drafts=5, **cold), new_engine(device=1, slots=1, decode_steps=1, **cold)
    untouched, verify = [], engine.device.verify

    def watched(weights, control, blocks):
        before = jax.tree.map(np.asarray, engine.device.pool["states"])
        result = verify(weights, control, blocks)
        others = np.setdiff1d(np.arange(engine.shapes.states + 1), control[control[:, STATE] > 0, STATE])
        after = jax.tree.map(np.asarray, engine.device.pool["states"])
        untouched.extend((before[name][:, others], after[name][:, others]) for name in after)
        return result

    engine.device.verify = watched
    done, moved = {}, {}
    for group in range(3):
        for id in ids((group,), size=4):
            submit(engine, id, group % 2, max_new_tokens=NEW)
        for _ in range(8):
            done |= {sample.id: sample for sample in engine.tick().finished}
        if engine.holds(id := SampleId(group, 3)):
            moved[id] = engine.export(id)
            alone.import_(moved[id])
        done |= finish(engine, alone)
    assert engine.scheduler.decoding.drafter.accepted > 20 and len(done) == 12 and moved and untouched
    for before, after in untouched:
        assert before.tobytes() == after.tobytes()
    for id, sample in done.items():
        submit(alone, id, sample.version, max_new_tokens=NEW)
        while id in moved and len(alone.sampled(id).out_ids) < len(moved[id].out_ids):
            alone.tick()
        if id in moved:
            same = alone.export(id)
            for name, x in same.state.items():
                np.testing.assert_allclose(moved[id].state[name], x, rtol=0, atol=1e-5)
            alone.import_(same)
        same = finish(alone)[id]
        np.testing.assert_array_equal(sample.out_ids, same.out_ids)
        # by calls of other rows and positions, whose last bits a temperature of 0.1 multiplies
        np.testing.assert_allclose(sample.logprobs, same.logprobs, rtol=0, atol=2e-3)


@pytest.mark.slow
def test_two_devices_and_experts_find_the_same():
    """Heads of states on two devices, experts beside them."""
    found = []
    for engine in (new_engine(device=2, cfg=MOE), new_engine(device=4, cfg=MOE, tensor=2)):
        for id in ids((0, 2, 3, 5), size=2):
            submit(engine, id, max_new_tokens=NEW)
        found.append(finish(engine))
    for id, sample in found[1].items():
        np.testing.assert_array_equal(sample.out_ids, found[0][id].out_ids)
        np.testing.assert_allclose(sample.logprobs, found[0][id].logprobs, rtol=0, atol=1e-5)
