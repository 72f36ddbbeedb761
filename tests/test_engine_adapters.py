"""Versions as adapters: one call serves rows of all of them, and what a row samples is as if it were alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax import presets
from dora_jax.bench import adapters
from dora_jax.config import RolloutSection
from dora_jax.models import decoder, lora, sharding
from dora_jax.models.logits import target_logprobs
from dora_jax.models.lora_config import Lora
from dora_jax.ops.segment_attention import segment_attention
from dora_jax.rollout.engine import Engine
from dora_jax.rollout.shapes import ADAPTER, REMAINING
from dora_jax.types import SampleId
from tests.fakes.engine_rig import CFG, EOS, SIZES, VOCAB, finish, ids, params, submit

pytestmark = pytest.mark.slow  # it compiles an engine of its own
LORA = Lora(rank=4, alpha=8.0)
RESIDENTS = 4


@functools.cache
def adapter(version):
    """Its first values from `init`; B random too, so that versions differ."""
    found = lora.init(CFG, LORA, version)
    keys = iter(jax.random.split(jax.random.key(version), len(jax.tree.leaves(found))))
    return jax.tree.map(lambda x: 0.3 * jax.random.normal(next(keys), x.shape), found)


def new_engine(device=0, tensor=1, **changes):
    section = presets.on_cpu(RolloutSection(**{**SIZES, "residents": RESIDENTS, "tensor": tensor, **changes}))
    mesh = sharding.make_mesh(jax.devices()[device : device + tensor], 1, 1, tensor)
    engine = Engine(CFG, section, mesh, seed=7, eos_ids=EOS, vocab_limit=VOCAB, lora=LORA)
    engine.take_base(jax.device_put(decoder.serving_layout(params(), engine.shapes.layout), engine.base_shardings))
    return engine


def load(engine, version, scale=1.0):
    found = jax.tree.map(lambda x: scale * x, decoder.serving_layout(adapter(version), engine.shapes.layout))
    engine.load(version, jax.device_put(found, engine.param_shardings))


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


@jax.jit
def recompute(params, tokens, positions, segments):
    hidden = decoder.forward(CFG, params, tokens, positions, segment_attention(segments, positions))
    return target_logprobs(CFG, params, hidden[:, :-1], tokens[:, 1:], vocab_limit=VOCAB)[0]


def merged_logprobs(sample):
    """The trainer's way, of the version's merged weights."""
    row = np.concatenate([sample.prompt_ids, sample.out_ids])
    tokens, positions = jnp.asarray(np.pad(row, (0, 48 - len(row))))[None], jnp.arange(48)[None]
    merged = lora.merge(params(), adapter(sample.version), LORA.gain)
    logprobs = recompute(merged, tokens, positions, (positions < len(row)).astype(jnp.int32))
    return np.asarray(logprobs)[0, len(sample.prompt_ids) - 1 : len(row) - 1]


def mixed(engine, versions=(1, 2, 3, 4)):
    """{id: sample} of samples of all versions, and how many versions shared a decode call at most."""
    most, generate = 0, engine.device.generate

    def counted(params, control, blocks):
        nonlocal most
        rows = control[control[:, REMAINING] > 0]
        most = max(most, len(set(rows[:, ADAPTER].tolist())))
        return generate(params, control, blocks)

    engine.device.generate = counted
    try:
        for id in sorted(ids((0, 1, 2, -1)), key=lambda id: id.index):
            submit(engine, id, versions[id.group_id % len(versions)])
        done = finish(engine)
    finally:
        engine.device.generate = generate
    return done, most


def test_rows_of_four_versions_share_calls_and_sample_as_alone():
    with holding(1, 2, 3, 4) as engine:
        done, most = mixed(engine)
    assert most == 4 and {sample.version for sample in done.values()} == {1, 2, 3, 4}
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


def test_the_bench_says_what_rows_of_several_versions_cost():
    args = adapters.flags().parse_args(["--versions=1,4", "--rows=4", "--tokens=4", "--rounds=1", "--width=32"])
    found = adapters.measured(args)
    full, mixed = adapters.table(found)[1:3], adapters.table(found)[3:]
    assert [line.split()[-5 - 1] for line in full] == ["1", "4"] and len(mixed) == 2
    small = found["adapters, rank 8"]
    assert small.engine.versions == (0, 1, 2, 3) and small.bytes < found["full weights"].bytes / 2
