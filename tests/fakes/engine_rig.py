"""Two engines, compiled once a process and shared by the engine tests; each test leaves them empty."""

import functools
import os

import jax
import numpy as np

from dora_jax.config import RolloutSection
from dora_jax.models import decoder, sharding
from dora_jax.plan import presets
from dora_jax.rollout.engine import Engine
from dora_jax.runtime.transfer.kv_transfer import PageShape
from dora_jax.types import SampleId

CFG = decoder.new_config("qwen3", vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=64)
SIZES = dict(
    slots=4,
    pages=96,
    page_size=4,
    max_prompt_tokens=20,
    max_new_tokens=24,
    prefill_tokens=16,
    prefill_chunk=8,
    context_block=24,
    decode_steps=4,
    residents=2,
)
ROOMY = SIZES | {"pages": 61, "max_new_tokens": 40, "context_block": 32}  # answers longer than several windows
EOS = (3, 5)
VOCAB = 60  # of 64 rows
# Compiler options of recurrent states: by the older emitters (conftest.py) the last bit of one depends on its row
OF_STATES = {"xla_cpu_use_fusion_emitters": True} if os.environ.get("XLA_FLAGS") else {}
QUICK = jax.config.read("jax_disable_most_optimizations")  # as tests compile, but for those that ask for full_compile


@functools.cache
def params(seed=0):
    """The same bits in every process: they are kept, and must not depend on how a test compiles."""
    quick = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        return decoder.init_params(CFG, seed)
    finally:
        jax.config.update("jax_disable_most_optimizations", quick)


def weights(engine, seed=0, scale=1.0):
    tree = jax.tree.map(lambda x: x * scale, decoder.serving_layout(params(seed), engine.shapes.layout))
    return jax.device_put(tree, engine.param_shardings)


def new_engine(device=0, decode=None, **changes):
    section = presets.on_cpu(RolloutSection(**{**SIZES, **changes}))
    mesh = sharding.make_mesh(jax.devices()[device : device + section.tensor], 1, 1, section.tensor)
    return Engine(CFG, section, mesh, seed=7, eos_ids=EOS, vocab_limit=VOCAB, decode=decode)


@functools.cache
def shared_engine(name):
    """The same shapes but for the pages: small, on another device, has few more than one long sample needs."""
    return new_engine(**{"a": dict(device=0), "small": dict(device=1, pages=20)}[name])


class loaded:
    """`with loaded("a", "small") as (a, small)`: shared engines that hold version 0, emptied afterwards."""

    def __init__(self, *names, versions=(0,)):
        self.engines = [shared_engine(name) for name in names]
        self.versions = versions

    def __enter__(self):
        for engine in self.engines:
            for version in self.versions:
                engine.load(version, weights(engine, seed=version))
        return self.engines if len(self.engines) > 1 else self.engines[0]

    def __exit__(self, *failure):
        for engine in self.engines:
            for id in list(engine.scheduler.seqs):
                engine.cancel(id)
            for id in list(engine.scheduler.resting):
                engine.forget(id)
            assert not engine.host.bytes
            engine.tick()
            engine.check()
            for version in engine.versions:
                engine.drop(version)
            assert engine.free_pages == engine.section.pages


def prompt(group_id, length=None):
    rng = np.random.default_rng(abs(group_id) + 1000 * (group_id < 0))
    return rng.integers(6, VOCAB, length or (3, 8, 9, 20, 17, 1)[group_id % 6]).astype(np.int32)


def submit(engine, id, version=0, max_new_tokens=24):
    engine.submit(id, prompt(id.group_id), version, max_new_tokens)


def ids(groups=(0, 1, 2, 3), size=2):
    return [SampleId(group, index) for group in groups for index in range(size)]


def finish(*engines, limit=300):
    """Ticks until all are idle; {id: Sample}."""
    done = {}
    for _ in range(limit):
        if all(engine.idle for engine in engines):
            return done
        for engine in engines:
            for sample in engine.tick().finished:
                assert sample.id not in done
                done[sample.id] = sample
            engine.check()
    raise AssertionError(f"not idle after {limit} ticks")


@functools.cache
def undisturbed(id, version=0):
    """This sample alone in engine a: what every disturbed run must reproduce bit for bit."""
    assert jax.config.read("jax_disable_most_optimizations") == QUICK, "engine a keeps its programs: bits are compared"
    with loaded("a", versions=(version,)) as engine:
        submit(engine, id, version)
        return finish(engine)[id]


def assert_undisturbed(sample):
    same = undisturbed(sample.id, sample.version)
    np.testing.assert_array_equal(sample.out_ids, same.out_ids)
    np.testing.assert_array_equal(sample.logprobs.view(np.int32), same.logprobs.view(np.int32))
    assert sample.finish == same.finish


LAYOUT = PageShape(layers=2, heads=2, head_dim=16, dtype="float32")


def taken_out(id, ticks=4, others=()):
    """A running sample's in_flight, out of engine a."""
    with loaded("a") as a:
        for each in (id, *others):
            submit(a, each)
        for _ in range(ticks):
            a.tick()
        return a.export(id)


def bits(pages):
    return pages.tobytes(), pages.shape, pages.dtype
