"""An engine with latent pages and experts (DeepSeek-V3's shape) against the trainer's forward: log-probs and routes,
through preemption, a move, shared prompts, chunks."""

import dataclasses
import functools
import math
import queue
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.config import RolloutSection
from dora_jax.models import decoder, sharding
from dora_jax.models.families import KNOWN
from dora_jax.models.families.config import Experts, Latent, Yarn
from dora_jax.models.logits import policy_logits
from dora_jax.models.routes import RouteShape
from dora_jax.ops import attention, latent_attention
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.orchestrate import events as ev
from dora_jax.plan import presets
from dora_jax.rollout import device_calls
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.migrate import InFlightSample, without_pages
from dora_jax.rollout.seq import RouteLog
from dora_jax.rollout.shapes import kv_layout
from dora_jax.runtime.instances.rollout_worker import EngineWorker
from dora_jax.runtime.journal.payload_state import PayloadState
from dora_jax.runtime.journal.records import CODEC, Partial
from dora_jax.runtime.sample_registry import SampleRegistry
from dora_jax.runtime.transfer import kv_transfer
from dora_jax.runtime.transfer.transfer_manifest import Key
from dora_jax.types import Prompt, SampleId, TokenTable
from tests.fakes.engine_rig import SIZES, VOCAB, finish, ids, submit
from tests.fakes.engine_rig import prompt as prompt_ids
from tests.fakes.episode_rig import TURN, begin, play
from tests.fakes.wire_peer import new_wire

CFG = decoder.new_config(
    "deepseek_v3",
    vocab_size=64,
    d_model=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=4,
    head_dim=20,
    d_ff=64,
    rope_scaling=Yarn(factor=4.0, original_max_position=16, mscale=1.0, mscale_all_dim=0.7),
    latent=Latent(kv_rank=16, rope_dim=8, nope_dim=12, v_dim=10, q_rank=24),
    experts=Experts(
        count=8,
        per_token=2,
        width=16,
        shared=1,
        first_dense=1,
        router="sigmoid",
        corrected=True,
        groups=4,
        top_groups=2,
        scale=2.5,
    ),
)
ROUTES = RouteShape.of(CFG)
LONGCAT = decoder.new_config(
    "longcat_flash",
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=4,
    head_dim=20,
    d_ff=64,
    tie_embeddings=False,
    latent=dataclasses.replace(CFG.latent, scaled=True),
    experts=Experts(count=8, per_token=3, width=16, zero=4, corrected=True, renormalize=False, scale=2.0),
)


@functools.cache
def params(cfg):
    return decoder.init_params(cfg, 0)


def new_engine(device=0, cfg=CFG, **changes):
    section = presets.on_cpu(RolloutSection(**{**SIZES, **changes}))
    mesh = sharding.make_mesh(jax.devices()[device : device + section.tensor], 1, 1, section.tensor)
    engine = Engine(cfg, section, mesh, seed=7, eos_ids=(), vocab_limit=VOCAB, routes=RouteShape.of(cfg))
    tree = decoder.serving_layout(params(cfg), engine.shapes.layout)
    engine.load(0, jax.device_put(tree, engine.param_shardings))
    return engine


@functools.cache
def trainer_forward(cfg, width):
    """Expanded: (log-prob of each next token of one row of this width, experts of each token)."""

    @jax.jit
    def run(tokens_1xL):
        at_1xL = jnp.arange(width)[None]
        attend = segment_attention(jnp.ones_like(at_1xL), at_1xL)
        hidden, routed = decoder.forward_routed(cfg, params(cfg), tokens_1xL, at_1xL, attend)
        logprobs = jax.nn.log_softmax(policy_logits(cfg, params(cfg), hidden, vocab_limit=VOCAB, temperature=1.0))
        return jnp.take_along_axis(logprobs[0, :-1], tokens_1xL[0, 1:, None], axis=-1)[:, 0], routed.ids[:, 0]

    return run


def assert_as_the_trainer(sample, atol=1e-4, cfg=CFG):
    whole = np.concatenate([sample.prompt_ids, sample.out_ids])
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(whole)] = whole
    logprobs, routes = trainer_forward(cfg, 64)(padded)
    want = np.where(sample.mask, logprobs[len(sample.prompt_ids) - 1 : len(whole) - 1], 0)
    np.testing.assert_allclose(sample.logprobs, want, rtol=0, atol=atol)
    got = RouteShape.of(cfg).check(sample.table.routes, len(whole) - 1, str(sample.id))
    assert got.dtype == np.uint8
    if atol < 1e-3:
        np.testing.assert_array_equal(got, routes.swapaxes(0, 1)[: len(whole) - 1])


@pytest.fixture(scope="module")
def engines():
    """One with room; one on another device with few more pages than a long sample needs, of another size."""
    return new_engine(), new_engine(device=1, pages=12, page_size=8)


def test_samples_that_share_prompts_and_make_room_are_as_the_trainer_says(engines):
    """Prompts of up to 20 tokens are prefilled in chunks of 8; the small pool sends samples to the host and back."""
    _, small = engines
    preempts, plan = [], small.scheduler.plan
    small.scheduler.plan = lambda: (p := plan(), preempts.extend(p.preempts))[0]
    for id in ids((0, 1, 2, 3, 4), size=2):
        submit(small, id)
    done = finish(small)
    small.scheduler.plan = plan
    assert len(done) == 10 and preempts
    for sample in done.values():
        assert_as_the_trainer(sample)


@pytest.mark.slow
def test_drafts_are_verified_as_the_trainer_says():
    """Greedy siblings are alike; routes of the accepted tokens alone come along."""
    engine = new_engine(temperature=0.0, drafts=5, draft_cost=0.3)
    done = {}
    for group in range(3):
        for id in ids((group,), size=3):
            submit(engine, id)
        done |= finish(engine)
    assert len(done) == 9 and engine.scheduler.decoding.drafter.accepted
    for sample in done.values():
        assert_as_the_trainer(sample)


@pytest.mark.slow
def test_a_sample_moves_mid_answer_over_the_wire_with_latents_alone(engines):
    here, there = engines
    id = SampleId(3, 1)
    submit(here, id)
    for _ in range(6):
        here.tick()
    request = here.export(id)
    assert 0 < len(request.out_ids) < 24 and request.v_pages is None
    row = CFG.kv_layers * CFG.latent.cache_dim * 4
    assert request.kv_bytes == request.n_pages * here.shapes.page_size * row
    assert len(request.table.routes) == request.kv_len == len(request.prompt_ids) + len(request.out_ids) - 1
    key, wires = Key(epoch=1, version=0, receiver="rollout0/0", sequence=1), (new_wire(), new_wire())
    offered = kv_transfer.CODEC.decode(kv_transfer.CODEC.encode(kv_transfer.offer(wires[0], key, request)))
    arrived = kv_transfer.fetch(wires[1], offered, key, kv_transfer.layout_of(there.page()), 20)
    wires[0].release(key)
    np.testing.assert_array_equal(arrived.k_pages, request.k_pages)
    there.import_(arrived)
    moved = finish(there)[id]
    np.testing.assert_array_equal(moved.table.routes[: request.kv_len], request.table.routes)
    np.testing.assert_array_equal(moved.logprobs[: len(request.logprobs)], request.logprobs)
    assert_as_the_trainer(moved)


@pytest.mark.slow
def test_two_attentions_a_layer_and_experts_that_compute_nothing():
    """LongCat: each attention has a cache of its own; the routes name the experts that return their input."""
    engine = new_engine(device=3, cfg=LONGCAT, pages=24)
    for id in ids((1, 3, 4), size=2):
        submit(engine, id)
    done = finish(engine)
    assert len(done) == 6 and max(sample.table.routes.max() for sample in done.values()) >= LONGCAT.experts.count
    for sample in done.values():
        assert_as_the_trainer(sample, cfg=LONGCAT)


def test_episodes_carry_the_routes_of_what_they_observed(engines):
    """They go on in the other engine from turn to turn, whose pages are of another size."""
    here, there = engines
    for id in ids((1, 2, 3), size=2):
        begin(here, id)
    done = play(here, there, answer=lambda in_flight: there if in_flight.sampled <= TURN else here)
    assert len(done) == 6 and all(0 < sample.mask.sum() < len(sample.mask) for sample in done.values())
    for sample in done.values():
        assert_as_the_trainer(sample)


@pytest.mark.parametrize("rows", [True, False])
def test_a_sample_that_lost_its_pages_has_routes_all_the_same(engines, rows):
    """Its tokens are prefilled again: rows that came along stay, the others are of the call that computed their KV."""
    here, there = engines
    id = SampleId(3, 4 + rows)
    submit(here, id)
    for _ in range(4):
        here.tick()
    request = without_pages(here.export(id))
    assert len(request.out_ids) and request.table.routes is not None
    if rows:
        marked = request.table.routes.copy()
        marked[0] = marked[0, :, ::-1]  # another order of the same experts: nobody computes it
        request = dataclasses.replace(request, table=TokenTable(routes=marked))
    else:
        request = dataclasses.replace(request, table=TokenTable())
    there.import_(request)
    done = finish(there)[id]
    if rows:
        np.testing.assert_array_equal(done.table.routes[: len(marked)], marked)
        done.table.routes[0] = done.table.routes[0, :, ::-1]
    assert_as_the_trainer(done)


def test_a_sample_of_a_lost_instance_goes_on_from_the_journal_with_the_routes_that_sampled_it(engines):
    """Partial records carry the rows, over every report; rows of the journal stay where its tokens are prefilled
    again."""
    here, there = engines
    id, outbox, payloads = SampleId(3, 6), queue.SimpleQueue(), PayloadState()
    worker = EngineWorker(0, here, None, outbox, partial_s=1e-9)
    prompt = Prompt(group_id=3, task="", uid="", text="", token_ids=prompt_ids(3), answer=None, max_new_tokens=24)
    worker.execute(ev.Start(ids=(id,), instance=0, version=0, attempt=1), prompt)
    for _ in range(5):
        worker.work()
    here.cancel(id)  # the instance is lost: nothing is exported
    while not outbox.empty():
        if isinstance(record := outbox.get(), Partial):
            payloads.load(CODEC.decode(CODEC.encode(record)))
    chunks, n = payloads.partial[id], len(prompt.token_ids)
    assert len(chunks) > 1 and len(chunks[0].table.routes) == n + len(chunks[0].out_ids) - 1
    assert all(chunk.row == n + chunk.start - 1 for chunk in chunks[1:])  # each row is written once
    routes = chunks[0].table.routes.copy()
    routes[0] = marked = routes[0, :, ::-1].copy()  # an order that nobody computes
    chunks[0] = dataclasses.replace(chunks[0], table=TokenTable(routes=routes))

    registry = SampleRegistry(types.SimpleNamespace(prompt_at=lambda group: prompt))
    registry.payloads = payloads
    registry.opened(id.group_id)
    resumed = registry.resume(id, version=0)
    assert len(resumed.table.routes) == n + len(resumed.out_ids) - 1 and not resumed.pages
    there.import_(resumed)
    done = finish(there)[id]
    np.testing.assert_array_equal(done.table.routes[0], marked)
    np.testing.assert_array_equal(done.table.routes[: len(resumed.table.routes)], resumed.table.routes)
    done.table.routes[0] = marked[:, ::-1]
    assert_as_the_trainer(done)


def test_a_gap_in_the_routes_raises():
    request = InFlightSample(
        id=SampleId(0, 0),
        version=0,
        prompt_ids=np.arange(5, dtype=np.int32),
        out_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        max_new_tokens=4,
    )
    log = RouteLog(ROUTES, request, 8)
    with pytest.raises(RuntimeError, match="has the experts of 0 tokens, and the next ones begin at 4"):
        log.append(4, ROUTES.missing(2))


@pytest.fixture(scope="module")
def paged():
    """An engine as on a TPU: two devices that hold the same latents and half of the heads each, the kernel's reference in its
    place."""
    patch = pytest.MonkeyPatch()
    reference = latent_attention.latent_reference
    patch.setattr(attention, "paged_kernel", lambda impl, rank: functools.partial(reference, rank=rank))
    patch.setattr(device_calls, "CHOOSERS", ("cpu",))
    with patch.context() as anywhere:
        anywhere.setattr(attention, "check_platform", lambda *args, **latent: None)
        engine = new_engine(device=2, tensor=2, pages=20, context_block=48, attention="tpu")
    yield engine
    patch.undo()


def test_samples_move_between_kinds_of_pools(engines, paged):
    here, _ = engines
    there, back = SampleId(3, 2), SampleId(3, 3)
    submit(here, there)
    submit(paged, back)
    for id in ids((0, 1, 2), size=2):
        submit(paged, id)
    for _ in range(4):
        here.tick()
        paged.tick()
    paged.import_(here.export(there))
    here.import_(paged.export(back))
    done = finish(here, paged)
    assert len(done) == 8
    for sample in done.values():
        assert_as_the_trainer(sample)


def test_a_latent_pool_is_as_many_times_smaller_as_the_ranks_say(paged):
    """Measured of the pool's arrays, against K and V of every head; a kernel's rows are whole vectors of 128 lanes."""
    page = 4 * SIZES["page_size"]  # bytes of one number a position
    pages = 21 * CFG.kv_layers
    assert sum(x.nbytes for x in paged.device.pool) == pages * page * 128
    for name, ratio, token in (("DeepSeek-V3", 71, 61 * 1152), ("LongCat-Flash", 36, 56 * 1152)):
        cfg = KNOWN[name]
        layout = kv_layout(cfg)
        pool = jax.eval_shape(lambda layout=layout: device_calls.Gathered(layout, paged.shapes, jnp.bfloat16).empty())
        tokens = paged.shapes.page_size * (paged.shapes.pages + 1)
        measured = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(pool)) / tokens
        expanded = cfg.kv_layers * cfg.n_heads * (cfg.head_dim + cfg.latent.v_dim) * 2
        assert measured == token and round(expanded / measured) == ratio


@pytest.mark.slow
def test_latents_in_8_bits_move_and_stay_near_the_trainer(engines):
    here, _ = engines
    narrow = new_engine(device=3, kv="float8")
    id = SampleId(3, 1)
    submit(narrow, id)
    for _ in range(4):
        narrow.tick()
    request = narrow.export(id)
    assert request.kv_bytes == request.n_pages * SIZES["page_size"] * CFG.kv_layers * CFG.latent.cache_dim
    here.import_(request)
    assert_as_the_trainer(finish(here)[id], atol=0.2)


def test_a_kernel_without_latent_pages_is_refused():
    with pytest.raises(ValueError, match="rollout.attention gpu reads no latent pages"):
        new_engine(attention="gpu")
