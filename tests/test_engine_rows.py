"""Layers whose keys have other heads, and layers that read the keys of others: pages, moves, replays, meshes, plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax import publish
from dora_jax.base.digest import digest
from dora_jax.config import RolloutSection
from dora_jax.models import decoder, grouped_experts, lora, moe, sharding
from dora_jax.models.families.config import Experts, Kind, Proportional, check_mesh
from dora_jax.models.lora_config import Lora, adapter_params
from dora_jax.ops import attention
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.plan import memory, presets
from dora_jax.rollout.engine import Engine
from dora_jax.runtime.assembly.run import EngineReplay
from dora_jax.runtime.transfer import kv_transfer
from tests.fakes.engine_rig import ROOMY, VOCAB, finish, ids, prompt, submit

LOCAL, WIDE = Kind(window=6, theta=1e4), Kind(head_dim=32, kv_heads=1)
SIZES = dict(vocab_size=64, d_model=32, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=64, embed_scale=32**0.5)
SIZES |= dict(rope_scaling=Proportional(share=0.25), logit_cap=3.0)
CFGS = {
    "readers": decoder.new_config(  # in four stacks, whose order repeats nowhere
        "gemma4_text",
        **SIZES,
        n_layers=5,
        per_layer=8,
        kinds=(
            LOCAL,
            Kind(window=6, theta=1e4, kv="shared"),
            Kind(head_dim=32, kv_heads=1, kv="shared"),
            Kind(window=6, theta=1e4, kv="read", d_ff=96),
            Kind(head_dim=32, kv_heads=1, kv="read", d_ff=96),
        ),
    ),
    "experts": decoder.new_config(
        "gemma4_text",
        **SIZES,
        n_layers=3,
        kinds=(LOCAL, LOCAL, Kind(head_dim=32, kv_heads=1, tied_values=True)),
        experts=Experts(count=8, per_token=2, width=16, beside=True),
    ),
}
NEW = 40


@functools.cache
def params(name):
    return decoder.init_params(CFGS[name], 0)


def new_engine(name, kind=Engine, device=0, **changes):
    section, cfg = presets.on_cpu(RolloutSection(**ROOMY | changes)), CFGS[name]
    mesh = sharding.make_mesh(jax.devices()[device : device + section.tensor], 1, 1, section.tensor)
    engine = kind(cfg, section, mesh, seed=7, eos_ids=(), vocab_limit=VOCAB, dtype="float32")
    if kind is Engine:
        weights = decoder.serving_layout(params(name), engine.shapes.layout)
        engine.load(0, jax.device_put(weights, engine.param_shardings))
    return engine


@functools.cache
def shared(name, kept=True):
    return new_engine(name) if kept else new_engine(name, window_pages=40)


@functools.cache
def quiet(name):
    engine = shared(name)
    for id in ids((0, 2, 3, 4), size=2):
        submit(engine, id, max_new_tokens=NEW)
    return finish(engine)


def assert_same(name, sample):
    same = quiet(name)[sample.id]
    np.testing.assert_array_equal(sample.out_ids, same.out_ids)
    np.testing.assert_array_equal(sample.logprobs.view(np.int32), same.logprobs.view(np.int32))


def trained_logprobs(name, sample, layout):
    cfg, tokens = CFGS[name], np.concatenate([sample.prompt_ids, sample.out_ids])[None]
    positions = np.arange(tokens.shape[1])[None]
    attend = segment_attention(np.zeros_like(positions), positions)

    @jax.jit
    def run(weights):
        weights = decoder.serving_layout(weights) if layout == "serving" else weights
        return decoder.logits(cfg, weights, decoder.forward(cfg, weights, tokens, positions, attend))

    logits = np.asarray(run(params(name)))[0, len(sample.prompt_ids) - 1 : -1, :VOCAB]
    assert np.abs(logits).max() <= cfg.logit_cap
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs[np.arange(len(sample.out_ids)), sample.out_ids]


@pytest.mark.parametrize("name", CFGS)
def test_the_engine_samples_what_the_trainer_scores(name):
    """Unrolled and under scan, where kept keys leave one run of layers and enter another."""
    sample = quiet(name)[ids((3,), size=1)[0]]
    for layout in ("serving", "stacked"):
        np.testing.assert_allclose(sample.logprobs, trained_logprobs(name, sample, layout), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CFGS)
def test_samples_move_between_pools_and_back(name):
    """Pools: one, and two, whose windows have gone; each array of pages has its own layers and heads."""
    for id in ids((3,), size=2):
        here, there = shared(name), shared(name, kept=False)
        assert there.shapes.groups == 2
        submit(here, id, max_new_tokens=NEW)
        for _ in range(4):
            here.tick()
        moved = here.export(id)
        assert moved.k_pages.shape[0] == 2 and moved.k_pages.shape[2:4] == (2, 16)
        assert moved.k2_pages.shape[0] == 1 and moved.k2_pages.shape[2:4] == (1, 32)
        layout = kv_transfer.layout_of(moved.pages)
        assert layout == kv_transfer.layout_of(there.page()) and layout.second == (1, 1, 32)
        there.import_(moved)
        for _ in range(2):
            there.tick()
        here.import_(there.export(id))
        (sample,) = finish(here).values()
        assert_same(name, sample)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", CFGS)
def test_bytes_of_the_pools_are_those_of_the_plan(name, kept):
    engine = shared(name, kept)
    measured = sum(x.nbytes for x in jax.tree.leaves(engine.device.pool))
    assert measured == memory.pages_bytes(CFGS[name], engine.section, "float32")
    assert len(engine.device.pool["k"]) == CFGS[name].kv_owners


@pytest.mark.parametrize("name", CFGS)
def test_a_kernel_that_reads_pages_finds_the_same(name, monkeypatch):
    monkeypatch.setattr(attention, "paged_kernel", lambda impl, rank: attention.paged_reference)
    monkeypatch.setattr(attention, "check_platform", lambda *args, **latent: None)
    engine = new_engine(name, device=1, pages=50, window_pages=40, context_block=60, attention="tpu")
    assert engine.shapes.groups == 2 and engine.shapes.layout == "scanned" and len(engine.device.pool) == 2
    for id in quiet(name):
        submit(engine, id, max_new_tokens=NEW)
    engine.tick()
    back = engine.export(ids((3,), size=1)[0])
    engine.import_(back)
    for sample in finish(engine).values():
        np.testing.assert_array_equal(sample.out_ids, quiet(name)[sample.id].out_ids)
        np.testing.assert_allclose(sample.logprobs, quiet(name)[sample.id].logprobs, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CFGS)
def test_drafts_and_preemption_change_no_token(name):
    engine = new_engine(name, device=1, pages=42, drafts=3, draft_cost=0.5)
    for id in quiet(name):
        submit(engine, id, max_new_tokens=NEW)
    for sample in finish(engine).values():
        np.testing.assert_array_equal(sample.out_ids, quiet(name)[sample.id].out_ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", CFGS)
def test_a_replay_has_the_bits_of_sampling(name):
    first, replay = new_engine(name, exact=True), new_engine(name, EngineReplay, exact=True)
    for id in ids((0, 2, 3), size=2):
        submit(first, id, max_new_tokens=NEW)
    for _ in range(3):
        first.tick()
    for id in ids((0, 3), size=1):
        first.import_(first.export(id))
    done = finish(first)
    scored = replay(params(name), [(prompt(id.group_id), sample.out_ids) for id, sample in done.items()])
    for sample, logprobs in zip(done.values(), scored, strict=True):
        np.testing.assert_array_equal(sample.logprobs.view(np.int32), logprobs.view(np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("name", CFGS)
def test_gradients_and_shards_agree(name):
    """Rematerialized or not, on one device or eight; what is no parameter of transformers has no gradient."""
    cfg, tokens = CFGS[name], np.random.default_rng(0).integers(0, VOCAB, (8, 24))
    positions = np.broadcast_to(np.arange(24), tokens.shape)

    def loss(weights, remat, attend, **options):
        hidden = decoder.forward(cfg, weights, tokens, positions, attend, remat=remat, **options)
        return (decoder.logits(cfg, weights, hidden) ** 2).mean()

    attend = segment_attention(np.zeros_like(positions), positions)
    plain, full = (jax.jit(jax.grad(functools.partial(loss, remat=x, attend=attend))) for x in ("none", "full"))
    grads, again = plain(params(name)), full(params(name))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), grads, again)
    for stack in decoder.stack_names(grads):
        assert not grads[stack]["layer_scale"].any()
        assert all(np.abs(x).max() > 0 for at, x in grads[stack].items() if at != "layer_scale")
    mesh = sharding.make_mesh(jax.devices(), 2, 4, 1)
    sharded = jax.device_put(params(name), sharding.param_specs(cfg, mesh))
    options = {"constrain": sharding.constrain_rows(mesh)}
    on_mesh = jax.jit(jax.grad(functools.partial(loss, remat="full", attend=attend, **options)))(sharded)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), on_mesh, grads)


def test_routes_are_those_of_the_layers_in_their_order():
    """Layers with experts lie in two stacks: what is replayed is each one's own."""
    cfg, tokens = CFGS["experts"], np.random.default_rng(0).integers(0, VOCAB, (2, 12))
    positions = np.broadcast_to(np.arange(12), tokens.shape)
    attend = segment_attention(np.zeros_like(positions), positions)
    found = {}
    for layout in ("serving", "stacked"):
        weights = decoder.serving_layout(params("experts")) if layout == "serving" else params("experts")
        run = jax.jit(functools.partial(decoder.forward_routed, cfg, weights, tokens, positions, attend))
        hidden, routed = run()
        ids_BxLxMxk = np.moveaxis(np.asarray(routed.ids), 0, 2)
        again, replayed = run(routes_BxLxMxk=ids_BxLxMxk)
        np.testing.assert_array_equal(again, hidden)
        assert not replayed.changed.any()
        forced = np.broadcast_to(np.arange(6).reshape(1, 1, 3, 2), ids_BxLxMxk.shape)
        np.testing.assert_array_equal(np.moveaxis(np.asarray(run(routes_BxLxMxk=forced)[1].ids), 0, 2), forced)
        found[layout] = routed.ids
    np.testing.assert_array_equal(found["serving"], found["stacked"])


@pytest.mark.parametrize("kind", moe.COMPUTES)
def test_experts_have_the_activation_of_the_model(kind):
    """Each compute with GELU is the plain sum of its experts; `megablox` in its own form, for tests."""
    rng = np.random.default_rng(1)
    h, gate, up, down = (rng.normal(size=s).astype(np.float32) for s in ((2, 16, 8), (4, 8, 6), (4, 8, 6), (4, 6, 8)))
    chosen = rng.integers(0, 4, (2, 16, 2)).astype(np.int32)
    weights = rng.random((2, 16, 2)).astype(np.float32)
    options = {"interpret": True} if kind == "megablox" else {}
    inputs = map(jnp.asarray, (h, weights, chosen, gate, up, down))
    found = moe.COMPUTES[kind](*inputs, gate="gelu_tanh", **options)
    inner = np.asarray(grouped_experts.GATES["gelu_tanh"](np.einsum("bld,edf->blef", h, gate))) * np.einsum(
        "bld,edf->blef", h, up
    )
    each = np.einsum("blef,efd->bled", inner, down)
    expected = (np.take_along_axis(each, chosen[..., None], 2) * weights[..., None]).sum(2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CFGS)
def test_layouts_are_the_same_weights(name):
    """One list for several stacks has the digest of the stacked copy, and goes back into it."""
    stacked = params(name)
    listed = decoder.serving_layout(stacked)
    jax.tree.map(np.testing.assert_array_equal, decoder.stacked_layout(CFGS[name], listed), stacked)
    like = jax.eval_shape(lambda: stacked)
    assert publish.host_digest(publish.sliced(listed), like) == digest(stacked)


@pytest.mark.parametrize("name", CFGS)
def test_plans_count_the_matrices_that_there_are(name):
    cfg, shape = CFGS[name], Lora(rank=3, targets=("attention", "mlp"))
    leaves = jax.tree_util.tree_leaves_with_path(decoder.abstract_params(cfg))
    small = ("norm", "scale", "gain")
    assert cfg.gain_params == sum(x.size for path, x in leaves if path[-1].key.endswith(small))
    assert cfg.matrix_params == sum(x.size for path, x in leaves if not path[-1].key.endswith(small))
    assert adapter_params(cfg, shape) == sum(x.size for x in jax.tree.leaves(lora.abstract(cfg, shape)))
    copied = jax.eval_shape(functools.partial(decoder.copied, dtype="bfloat16"), decoder.abstract_params(cfg))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(copied))
    assert held == 2 * (cfg.matrix_params + cfg.gain_params) + memory.wide_bytes(cfg, "bfloat16")


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="the last 1 read keys and values, and not each of their windows has one"):
        decoder.new_config("gemma4_text", **SIZES, n_layers=3, kinds=(LOCAL, LOCAL, Kind(window=6, kv="read")))
    check_mesh(CFGS["readers"], fsdp=4, tensor=1)
    with pytest.raises(ValueError, match="model n_layers x per_layer 40 is not divisible by mesh axis fsdp=16"):
        check_mesh(CFGS["readers"], fsdp=16, tensor=1)
    with pytest.raises(ValueError, match="model n_kv_heads 1 is not divisible by mesh axis tensor=2"):
        check_mesh(CFGS["readers"], fsdp=1, tensor=2, serving=True)
