"""Versions as adapters: one call serves rows of all of them, and what a row samples is as if it were alone."""

import collections
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.bench import decode
from dora_jax.config import RolloutSection
from dora_jax.models import decoder, lora, sharding
from dora_jax.models.families.config import Experts, Latent
from dora_jax.models.logits import target_logprobs
from dora_jax.models.lora_config import ADAPTED, Lora
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.plan import presets
from dora_jax.rollout import quantize
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.shapes import ADAPTER, REMAINING
from dora_jax.types import SampleId
from tests.fakes import engine_rig
from tests.fakes.engine_rig import CFG, EOS, SIZES, VOCAB, finish, ids, params, submit

pytestmark = pytest.mark.slow  # it compiles an engine of its own
LORA = Lora(rank=4, alpha=8.0)
RESIDENTS = 4
MIXTURE = decoder.new_config(
    "deepseek_v3", vocab_size=64, d_model=32, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=12, d_ff=48,
    latent=Latent(kv_rank=16, q_rank=16, rope_dim=4, nope_dim=8, v_dim=8),
    experts=Experts(count=4, per_token=2, width=16, shared=1, router="sigmoid", corrected=True),
)  # fmt: skip


def lora_of(cfg):
    return dataclasses.replace(LORA, targets=ADAPTED) if cfg.experts else LORA


@functools.cache
def base(cfg):
    return decoder.init_params(cfg, 0) if cfg.experts else params()


@functools.cache
def adapter(version, cfg=CFG):
    """Its first values from `init`; B random too, so that versions differ."""
    found = lora.init(cfg, lora_of(cfg), version)
    keys = iter(jax.random.split(jax.random.key(version), len(jax.tree.leaves(found))))
    return jax.tree.map(lambda x: 0.3 * jax.random.normal(next(keys), x.shape), found)


def new_engine(device=0, cfg=CFG, **changes):
    section = presets.on_cpu(RolloutSection(**{**SIZES, "residents": RESIDENTS, **changes}))
    mesh = sharding.make_mesh(jax.devices()[device : device + section.tensor], 1, 1, section.tensor)
    engine = Engine(cfg, section, mesh, seed=7, eos_ids=EOS, vocab_limit=VOCAB, lora=lora_of(cfg))
    engine.residents.take_base(
        jax.device_put(decoder.serving_layout(base(cfg), engine.shapes.layout), engine.base_shardings)
    )
    return engine


def load(engine, version, scale=1.0):
    one = decoder.serving_layout(adapter(version, engine.cfg), engine.shapes.layout)
    engine.load(version, jax.device_put(jax.tree.map(lambda x: scale * x, one), engine.param_shardings))


@functools.cache
def shared():
    return new_engine()


class holding:
    """`with holding(1, 2) as engine`: the shared engine with these versions, in this order; emptied afterwards."""

    def __init__(self, *versions):
        self.versions = versions

    def __enter__(self):
        for version in self.versions:
            load(shared(), version)
        return shared()

    def __exit__(self, *failure):
        for id in list(shared().scheduler.seqs):
            shared().cancel(id)
        shared().tick()
        shared().check()
        for version in shared().versions:
            shared().drop(version)


@functools.cache
def alone(id, version):
    with holding(version) as engine:
        submit(engine, id, version)
        return finish(engine)[id]


def assert_as_alone(sample):
    same = alone(sample.id, sample.version)
    np.testing.assert_array_equal(sample.out_ids, same.out_ids)
    np.testing.assert_array_equal(sample.logprobs.view(np.int32), same.logprobs.view(np.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def recompute(cfg, temperature, params, tokens, positions, segments):
    hidden = decoder.forward(cfg, params, tokens, positions, segment_attention(segments, positions))
    options = {"vocab_limit": VOCAB, "temperature": temperature}
    return target_logprobs(cfg, params, hidden[:, :-1], tokens[:, 1:], **options)[0]


def merged(version, cfg=CFG, weights=None):
    return lora.merge(weights or base(cfg), adapter(version, cfg), LORA.gain)


def merged_logprobs(sample, cfg=CFG, weights=None, temperature=1.0):
    """The trainer's way, of the version's merged weights. weights: of the base; None: those of `base`."""
    row = np.concatenate([sample.prompt_ids, sample.out_ids])
    tokens, positions = jnp.asarray(np.pad(row, (0, 48 - len(row))))[None], jnp.arange(48)[None]
    params, segments = merged(sample.version, cfg, weights), (positions < len(row)).astype(jnp.int32)
    logprobs = recompute(cfg, temperature, params, tokens, positions, segments)
    return np.asarray(logprobs)[0, len(sample.prompt_ids) - 1 : len(row) - 1]


def mixed(engine, versions=(1, 2, 3, 4), size=2):
    """{id: sample} of samples of all versions, and of each kind of call how many versions shared one at most."""
    most = collections.Counter()

    def counted(call, kind):
        def run(params, control, blocks, *options):
            narrow = kind == "generate" and len(control) in engine.shapes.rungs
            rows = control[control[:, REMAINING] > 0]
            name = "narrow" if narrow else kind
            most[name] = max(most[name], len(set(rows[:, ADAPTER].tolist())))
            return call(params, control, blocks, *options)

        return mock.patch.object(engine.device, kind, run)

    with counted(engine.device.generate, "generate"), counted(engine.device.verify, "verify"):
        for id in sorted(ids((0, 1, 2, -1), size), key=lambda id: id.index):
            submit(engine, id, versions[id.group_id % len(versions)])
        return finish(engine), most


def test_rows_of_four_versions_share_calls_and_sample_as_alone():
    with holding(1, 2, 3, 4) as engine:
        done, most = mixed(engine)
    assert most == {"generate": 4} and {sample.version for sample in done.values()} == {1, 2, 3, 4}
    for sample in done.values():
        assert_as_alone(sample)
        np.testing.assert_allclose(sample.logprobs, merged_logprobs(sample), rtol=0, atol=1e-5)
    texts = [tuple(alone(SampleId(0, 0), version).out_ids) for version in (1, 2, 3, 4)]
    assert len(set(texts)) == 4


def test_an_adapter_lies_at_the_same_place_of_every_engine_where_it_can():
    """Products round by place in the last bit: a sample that moves keeps its bits where its version lies alike."""
    id = SampleId(3, 0)
    for before, place in (((4, 2), 1), ((5, 4, 2), 3)):
        with holding(*before, 1) as engine:
            assert engine.scheduler.adapters[1] == place
            submit(engine, id, 1)
            done = finish(engine)[id]
        if place == 1:
            assert_as_alone(done)
        np.testing.assert_array_equal(done.out_ids, alone(id, 1).out_ids)
        np.testing.assert_allclose(done.logprobs, alone(id, 1).logprobs, rtol=0, atol=1e-5)


def test_nothing_of_a_poisoned_version_reaches_another():
    poisoned = SampleId(0, 7)
    with holding(1, 2) as engine:
        load(engine, 9, np.nan)
        submit(engine, poisoned, 9)
        for id in ids((1, 2, 3), size=1):
            submit(engine, id, 1 + id.group_id % 2)
        done = finish(engine)
        assert done.pop(poisoned).finish == "error"
        engine.drop(9)
        load(engine, 3)  # into the same place
        submit(engine, poisoned, 3)
        done |= finish(engine)
    for sample in done.values():
        assert_as_alone(sample)


def test_an_engine_whose_devices_were_given_back_samples_beside_the_same_base():
    """A lent instance ends and begins again: no version, no pages, then the newest version."""
    id = SampleId(1, 0)
    with holding(1, 2) as engine:
        for version in engine.versions:
            engine.drop(version)
        engine.device.free()
        load(engine, 3)
        submit(engine, id, 3)
        done = finish(engine)[id]
    assert_as_alone(done)


def test_no_program_is_compiled_for_another_version():
    engine = shared()
    engine.warmup()
    compiled = engine.compiled
    with holding(1, 2, 3, 4):
        mixed(engine)
    with holding(5, 6):
        submit(engine, SampleId(0, 0), 6)
        engine.tick()
        engine.import_(engine.export(SampleId(0, 0)))
        finish(engine)
    assert engine.compiled == compiled


ONE_SHAPE = dict(context_block=48)
DRAFTS = dict(drafts=5, draft_cost=0.3, narrow_rows=2, narrow_cost=0.5)


def of_four(engine):
    for version in (1, 2, 3, 4):
        load(engine, version)
    return mixed(engine, size=4)


def assert_scored(done, atol=1e-4, **options):
    assert len(done) == 16
    for sample in done.values():
        np.testing.assert_allclose(sample.logprobs, merged_logprobs(sample, **options), rtol=0, atol=atol)


def test_drafts_and_the_narrow_call_take_rows_of_several_versions():
    """A cold policy, whose siblings are alike."""
    (plain, _), (done, most) = (
        of_four(new_engine(device=2, temperature=0.1, **ONE_SHAPE, **changes)) for changes in ({}, DRAFTS)
    )
    assert most["generate"] == 4 and most["verify"] > 1 and most["narrow"] == 2
    assert_scored(done, temperature=0.1)
    for id, sample in done.items():
        np.testing.assert_array_equal(sample.out_ids, plain[id].out_ids)


def test_adapters_stand_beside_a_base_in_8_bits_over_two_devices():
    done, most = of_four(new_engine(device=2, tensor=2, weights="int8", **ONE_SHAPE))
    narrow = lambda x: isinstance(x, quantize.Narrow)
    wide = lambda x: x.values.astype(jnp.float32) * x.scale if narrow(x) else x
    base_of_8_bits = jax.tree.map(wide, quantize.stored(params(), jnp.int8), is_leaf=narrow)
    assert most["generate"] == 4
    assert_scored(done, weights=base_of_8_bits)


def test_adapters_over_kv_in_8_bits_sample_as_merged_weights_do():
    done, most = of_four(new_engine(device=2, kv="float8", **ONE_SHAPE))
    beside = engine_rig.new_engine(device=3, kv="float8", residents=RESIDENTS, **ONE_SHAPE)
    for version in (1, 2, 3, 4):
        whole = decoder.serving_layout(merged(version), beside.shapes.layout)
        beside.load(version, jax.device_put(whole, beside.param_shardings))
    expected, _ = mixed(beside, size=4)
    assert most["generate"] == 4
    for id, sample in done.items():
        np.testing.assert_array_equal(sample.out_ids, expected[id].out_ids)
        np.testing.assert_allclose(sample.logprobs, expected[id].logprobs, rtol=0, atol=1e-3)


def test_a_mixture_with_latents_takes_each_row_s_experts():
    done, most = of_four(new_engine(cfg=MIXTURE, **ONE_SHAPE))
    assert most["generate"] == 4
    assert_scored(done, cfg=MIXTURE)


def test_the_bench_says_what_rows_of_several_versions_cost():
    found = decode.residents((1, 4), rows=4, rank=8, tokens=4, samples=0, rounds=1, width=32)
    _, *lines = decode.adapter_table(found)
    full, mixed = lines[:2], lines[2:]
    assert [line.split()[-5 - 1] for line in full] == ["1", "4"] and len(mixed) == 2
    small = found["adapters, rank 8"]
    assert small.engine.versions == (0, 1, 2, 3) and small.bytes < found["full weights"].bytes / 2
