"""What a compiled step sends and holds: the reading of HLO, names of slices, and one compilation for a real TPU slice."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dora_jax.models import sharding
from dora_jax.trainer import aot, hlo
from tests import trainer_cases as cases

needs_libtpu = pytest.mark.skipif(not aot.installed(), reason="libtpu is not installed: the extra aot")


def compiled_text(fn, *args):
    return jax.jit(fn).lower(*args).compile().as_text()


def test_collectives_of_a_loop_count_as_often_as_it_runs():
    mesh = sharding.make_mesh(jax.devices()[:4], 1, 4, 1)
    x = np.ones((8, 16), np.float32)

    def run(x_local):
        def body(carry, _):
            return carry + jax.lax.psum(jax.lax.all_gather(carry, "fsdp", tiled=True).sum(0, keepdims=True), "fsdp"), None

        return jax.lax.scan(body, x_local, length=5)[0]

    rows = PartitionSpec("fsdp")
    found = hlo.collectives(compiled_text(jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows), x))
    assert found == {"all-gather": hlo.Traffic(5, 5 * 8 * 16 * 4), "all-reduce": hlo.Traffic(5, 5 * 16 * 4)}

    def unknown(x_local, n):
        return jax.lax.fori_loop(0, n, lambda i, c: c + jax.lax.psum(c, "fsdp"), x_local)

    text = compiled_text(jax.shard_map(unknown, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows), x, 3)
    assert hlo.collectives(text, loops=7) == {"all-reduce": hlo.Traffic(7, 7 * 2 * 16 * 4)}


TEXT = """
HloModule m
%fused (p: bf16[4]) -> bf16[8,4] {
  %p = bf16[4]{0} parameter(0)
  ROOT %ag.1 = bf16[8,4]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, dimensions={0}
}
%body (s: (s32[], bf16[4])) -> (s32[], bf16[4]) {
  %f.2 = bf16[8,4]{1,0} fusion(%x), kind=kOutput, calls=%fused
  ROOT %t = (s32[], bf16[4]) tuple(%i, %y)
}
%cond (s: (s32[], bf16[4])) -> pred[] {
  %c = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[] compare(%i, %c), direction=LT
}
ENTRY %main (a: bf16[4]) -> bf16[4] {
  %start = (bf16[4]{0}, bf16[8,4]{1,0}) all-gather-start(%a), channel_id=7, dimensions={0}
  %w = (s32[], bf16[4]) while(%t0), condition=%cond, body=%body
  %rs = (f32[2]{0}, f32[3]{0}) reduce-scatter(%u, %v), channel_id=9, to_apply=%add
  ROOT %r = bf16[4]{0} get-tuple-element(%w), index=1
}
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}
"""


def test_clones_of_one_channel_are_one_collective():
    """XLA:TPU clones an all-gather into the fusions that it overlaps with: it still runs once."""
    found = hlo.collectives(TEXT)
    assert found == {"all-gather": hlo.Traffic(1, 8 * 4 * 2), "reduce-scatter": hlo.Traffic(1, 20)}
    assert hlo.collectives(TEXT.replace("channel_id=7", "channel_id=8", 1))["all-gather"] == hlo.Traffic(7, 7 * 64)


def test_the_head_is_gathered_once_however_many_chunks_there_are():
    """Left to XLA, it would be gathered, and its gradient summed over the mesh, chunk by chunk."""
    from dora_jax.trainer import step

    mesh = sharding.make_mesh(jax.devices()[:4], 1, 4, 1)
    model = step.Model(dataclasses.replace(cases.MODEL, n_layers=1), mesh, jnp.float32, "none", 1.0, None)
    params = sharding.param_specs(model.cfg, mesh)
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                          step.decoder.abstract_params(model.cfg), params)
    arrays = {name: jax.ShapeDtypeStruct((4, 32), jnp.int32, sharding=sharding.batch_spec(mesh))
              for name in ("tokens", "targets", "segment_ids", "positions")}
    sent = []
    for chunks in (1, 8):
        chunked_model = model._replace(logits_bytes=4 * 48 * 32 // chunks)
        grad = jax.jit(jax.grad(lambda p, a, m=chunked_model: m.logprobs(p, a)[0].sum()), out_shardings=params)
        sent.append(hlo.collectives(grad.lower(shapes, arrays).compile().as_text()))
    whole, chunked = ({kind: t.bytes for kind, t in found.items()} for found in sent)
    assert whole == chunked and sent[0]["all-gather"] == sent[1]["all-gather"]


def test_a_kernels_metadata_does_not_end_its_computation():
    """What a Pallas kernel says of itself may stand on lines of its own, and start with a brace."""
    kernel = '  %k = bf16[4]{0} custom-call(%p), custom_call_target="tpu_custom_call", kernel_metadata={\n"a":1\n}}, x=1\n'
    marked = TEXT.replace("  %start = ", kernel + "  %start = ")
    assert marked != TEXT and hlo.collectives(marked) == hlo.collectives(TEXT)


@pytest.mark.parametrize("name,topology,chips", [
    ("v5e-4", "v5e:2x2", 4), ("v5litepod-64", "v5e:8x8", 64), ("v5e-32", "v5e:4x8", 32), ("v6e-16", "v6e:4x4", 16),
    ("v5p-8", "v5p:2x2x1", 4), ("v5p-16", "v5p:2x2x2", 8), ("v5p-32", "v5p:2x2x4", 16), ("v5p-128", "v5p:4x4x4", 64),
    ("v4-64", "v4:2x4x4", 32), ("tpu7x-128", "tpu7x:4x4x4", 64),
])
def test_names_of_slices(name, topology, chips):
    assert aot.topology(name) == topology and aot.parse(name)[1] == chips


@pytest.mark.parametrize("name,reason", [
    ("v9-8", "slice 'v9-8' is unknown: name one such as v5e-64"), ("v5e", "is unknown"),
    ("v5p-5", "slice 'v5p-5': 5 is not twice a power of two"), ("v5e-12", "12 is not a power of two")])
def test_slices_that_do_not_exist(name, reason):
    with pytest.raises(ValueError, match=reason):
        aot.parse(name)


def test_the_compilers_verdict_becomes_one_sentence():
    shape = aot.Shape(fsdp=4, rows=8, tokens=512)
    for said in ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (21.34G) "
                 "exceeds available HBM (15.75G).", "Ran out of memory in memory space hbm. Used 21.34G of 15.75G hbm."):
        got = aot._verdict(RuntimeError(said), "v5e-4", shape, cases.SECTION)
        assert isinstance(got, aot.DoesNotFit)
        assert "8 rows of 512 tokens in 1 micro-batches needs 21.34GiB a chip on v5e-4, which has 15.75GiB" in str(got)
    other = RuntimeError("INTERNAL: something else")
    assert aot._verdict(other, "v5e-4", shape, cases.SECTION) is other


MODEL = dataclasses.replace(cases.MODEL, d_model=256, head_dim=64, d_ff=512, vocab_size=1024)
compile_small = functools.partial(aot.compile_update, MODEL, slice_name="v5e-4",
                                  shape=aot.Shape(fsdp=2, context=2, rows=8, tokens=512))


@needs_libtpu
@pytest.mark.slow
def test_a_step_compiles_for_a_slice_that_is_not_here():
    section = cases.section(remat="full", micro_batches=2, pack_tokens=512)
    c = compile_small(section)
    weights = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: cases.decoder.abstract_params(MODEL))))
    assert 12 * weights / 2 < c.state_bytes < 13 * weights / 2  # masters and two moments over fsdp=2
    assert c.chips == 4 and c.tokens == 4096 and c.host_bytes == 0 and c.temporary_bytes > 0
    assert {"all-gather", "reduce-scatter"} <= set(c.collectives)
    assert 6 * c.tokens * weights < c.flops < 16 * c.tokens * weights  # recomputed, and the scores
    hosted = compile_small(dataclasses.replace(section, optimizer_memory="host"))
    assert hosted.host_bytes > 0.6 * c.state_bytes and hosted.state_bytes < 0.4 * c.state_bytes


@needs_libtpu
@pytest.mark.slow
def test_a_config_that_does_not_fit_says_so_before_it_is_launched():
    large = dataclasses.replace(MODEL, d_model=8192, d_ff=2**17, vocab_size=2**18)
    shape = aot.Shape(fsdp=4, rows=8, tokens=512)
    (problem,) = aot.problems(large, cases.section(pack_tokens=512), "v5e-4", shape)
    assert problem.startswith("trainer: one update of 8 rows of 512 tokens in 1 micro-batches needs ")
    assert "a chip on v5e-4, which has 15.75GiB: raise trainer.micro_batches" in problem
    (problem,) = aot.problems(large, cases.SECTION, "v5e-8", shape)
    assert problem == "mesh data=1 x fsdp=4 x context=1 x tensor=1 needs 4 devices, not 8"
