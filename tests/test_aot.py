"""What a compiled program sends and holds: the reading of HLO, names of slices, and a run compiled for a small TPU
slice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags as absl_flags
from jax.sharding import NamedSharding, PartitionSpec

from dora_jax import aot, config
from dora_jax.aot import roles as aot_roles
from dora_jax.aot import slices as aot_slices
from dora_jax.base import chips
from dora_jax.cli import flags
from dora_jax.models import expert_parallel, moe, sharding
from dora_jax.models.grouped_experts import EVEN_LOAD
from dora_jax.models.lora_config import OFF, Lora, adapter_params
from dora_jax.plan import presets
from dora_jax.runtime.assembly import run
from dora_jax.trainer import flops, hlo
from dora_jax.trainer.model import Model
from tests.fakes import trainer_cases as cases

needs_libtpu = pytest.mark.skipif(not aot_slices.installed(), reason="libtpu is not installed: the extra aot")


def compiled_text(fn, *args):
    return jax.jit(fn).lower(*args).compile().as_text()


def test_collectives_of_a_loop_count_as_often_as_it_runs():
    mesh = sharding.make_mesh(jax.devices()[:4], 1, 4, 1)
    x = np.ones((8, 16), np.float32)

    def run(x_local):
        def body(carry, _):
            return carry + jax.lax.psum(
                jax.lax.all_gather(carry, "fsdp", tiled=True).sum(0, keepdims=True), "fsdp"
            ), None

        return jax.lax.scan(body, x_local, length=5)[0]

    rows = PartitionSpec("fsdp")
    found = hlo.CompiledText(
        compiled_text(jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows), x)
    ).collectives()
    assert found == {"all-gather": hlo.Traffic(5, 5 * 8 * 16 * 4), "all-reduce": hlo.Traffic(5, 5 * 16 * 4)}

    def unknown(x_local, n):
        return jax.lax.fori_loop(0, n, lambda i, c: c + jax.lax.psum(c, "fsdp"), x_local)

    text = compiled_text(jax.shard_map(unknown, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows), x, 3)
    assert hlo.CompiledText(text, loops=7).collectives() == {"all-reduce": hlo.Traffic(7, 7 * 2 * 16 * 4)}
    named = text.replace('op_name="jit(unknown)/', 'op_name="jit(unknown)/even/')
    assert named != text
    assert hlo.CompiledText(named, 7, "even").collectives() == {"all-reduce": hlo.Traffic(1, 2 * 16 * 4)}
    assert not hlo.CompiledText(named.replace("/even/", "/short_rows/"), 7, "even").collectives()


def test_loops_in_loops_multiply():
    """A scan in a scan, as micro-batches, layers and head chunks are: 4 x 3 runs, and 4 x 5 of the one beside it."""
    mesh = sharding.make_mesh(jax.devices()[:4], 1, 4, 1)
    rows = PartitionSpec("fsdp")

    def run(x_local):
        def inner(carry, _):
            return carry + jax.lax.psum(carry, "fsdp"), None

        def beside(carry, _):
            return carry * jax.lax.all_gather(carry, "fsdp", tiled=True).sum(0, keepdims=True), None

        def outer(carry, _):
            return jax.lax.scan(beside, jax.lax.scan(inner, carry, length=3)[0], length=5)[0], None

        return jax.lax.scan(outer, x_local, length=4)[0]

    text = compiled_text(jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows), np.ones((8, 16), np.float32))
    found = hlo.CompiledText(text).collectives()
    assert {kind: one.runs for kind, one in found.items()} == {"all-reduce": 4 * 3, "all-gather": 4 * 5}


KERNELS = """
HloModule m
%body (s: (s32[], bf16[4])) -> (s32[], bf16[4]) {
  %f.1 = bf16[8,4]{1,0} fusion(%x), kind=kOutput, calls=%fused, backend_config={"window_config":{"estimated_cycles":"10"}}
  %k.2 = (bf16[8,4]{1,0}, f32[2]{0}) custom-call(%a, %b), custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[8,4]{1,0}, s8[3]{0}}, output_to_operand_aliasing={{0}: (0, {})}, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 1024}"
}}, metadata={op_name="jit(f)/while/body/flash/flash_fwd/pallas_call"}
  %g.3 = bf16[8]{0} fusion(%y), kind=kOutput, calls=%fused, backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
  %buffer = bf16[8]{0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %t = (s32[], bf16[4]) tuple(%i, %y)
}
%cond (s: (s32[], bf16[4])) -> pred[] {
  %c = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[] compare(%i, %c), direction=LT
}
%fused (p: bf16[4]) -> bf16[8,4] {
  ROOT %ag.1 = bf16[8,4]{1,0} broadcast(%p)
}, execution_thread="main"
ENTRY %main (a: bf16[4]) -> bf16[4] {
  %f.9 = bf16[8,4]{1,0} fusion(%x), calls=%fused, backend_config={"window_config":{"estimated_cycles":"7"}}
  ROOT %w = (s32[], bf16[4]) while(%t0), condition=%cond, body=%body
}
"""


def test_kernels_have_lines_of_their_own_and_cycles_are_those_of_the_rest():
    """A kernel's metadata runs over lines; what it updates in place counts once; XLA's largest number is no
    estimate."""
    program = hlo.CompiledText(KERNELS)
    assert program.cycles() == 6 * 10 + 7
    assert program.kernels() == (hlo.CustomCall("flash_fwd", 6, 6 * (8 * 4 * 2 + 3 + 2 * 4)),)


LAYERS = """
HloModule m
%body (s: (s32[], bf16[4])) -> (s32[], bf16[4]) {
  %p.1 = bf16[8,4]{1,0} fusion(%x), kind=kOutput, calls=%product
  %n.1 = s32[] add(%i, %one)
  %u.1 = bf16[8,4]{1,0} fusion(%x), kind=kCustom, calls=%places
  %c.1 = bf16[8,4]{1,0} copy(%x)
  %s.1 = (bf16[8,4]{1,0}, bf16[8,4]{1,0}, u32[]) copy-start(%x)
  %k.1 = bf16[8,4]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/write/pallas_call"}
  %k.2 = bf16[8,4]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/read/pallas_call"}
  %k.3 = bf16[8,4]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/read/pallas_call"}
  %r.1 = bf16[8,4]{1,0} all-reduce(%x), channel_id=1, to_apply=%add
  ROOT %t = (s32[], bf16[4]) tuple(%i, %y)
}
%product (p: bf16[4]) -> bf16[8,4] {
  %d.1 = bf16[8,4]{1,0} convolution(%p, %w)
  ROOT %a.1 = bf16[8,4]{1,0} add(%d.1, %p)
}
%places (p: bf16[4]) -> bf16[8,4] {
  %g.1 = bf16[8,4]{1,0} gather(%p, %i)
  ROOT %b.1 = bf16[8,4]{1,0} bitcast(%g.1)
}
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}
ENTRY %main (a: bf16[4]) -> bf16[4] {
  %f.9 = bf16[8,4]{1,0} copy(%x)
  ROOT %w = bf16[4] call(%a), to_apply=%body
}
"""


def test_small_operations_are_those_beside_products_and_kernels_of_a_layer():
    """A fusion is known by what it gathers; numbers alone, and copies that wait for none, are not counted."""
    assert hlo.CompiledText(LAYERS).small_ops() == {"gather": 1 / 2, "copy": 1 / 2}
    assert hlo.CompiledText(TEXT.lstrip()).small_ops() == {}


COPIES = """
HloModule m
%anew (p: f32[3,9,2,4]) -> f32[3,9,2,4] {
  ROOT %c.1 = f32[3,9,2,4]{3,1,2,0} copy(%p)
}
%in_place (p: f32[3,9,2,4]) -> f32[3,9,2,4] {
  %one = f32[1,9,2,4]{3,2,1,0} dynamic-slice(%p, %i)
  ROOT %u.1 = f32[3,9,2,4]{3,2,1,0} dynamic-update-slice(%p, %x, %i)
}
%body (s: (s32[], f32[3,9,2,4])) -> (s32[], f32[3,9,2,4]) {
  %old = f32[3,9,2,4]{3,2,1,0:T(2,128)} get-tuple-element(%s), index=1
  %new = f32[3,9,2,4]{3,2,1,0:T(2,128)} fusion(%old, %x), kind=kLoop, calls=%in_place
  %layer = f32[1,9,2,4]{3,2,1,0:T(2,128)S(1)} dynamic-slice(%new, %i)
  %kept = f32[4,2,4]{2,1,0} gather(%layer, %rows)
  ROOT %t = (s32[], f32[3,9,2,4]) tuple(%i, %new)
}
%cond (s: (s32[], f32[3,9,2,4])) -> pred[] {
  %c = s32[] constant(6)
  ROOT %lt = pred[] compare(%i, %c), direction=LT
}
ENTRY %main (a: f32[3,9,2,4], b: bf16[8,64,4]) -> f32[3,9,2,4] {
  %turned = f32[3,9,2,4]{3,1,2,0} fusion(%a), kind=kLoop, calls=%anew
  %w = (s32[], f32[3,9,2,4]) while(%t0), condition=%cond, body=%body
  %begun = (bf16[8,64,4]{2,1,0:T(8,128)}, bf16[8,64,4]{2,1,0}, u32[]{:S(2)}) copy-start(%b)
  %onto = (bf16[8,64,4]{2,1,0:T(8,128)S(1)}, bf16[8,64,4]{2,1,0}, u32[]{:S(2)}) copy-start(%b)
  ROOT %r = f32[3,9,2,4]{3,2,1,0} get-tuple-element(%w), index=1
}
"""


def test_copies_of_pools_are_counted_and_updates_in_place_are_none():
    """A fusion that ends in a copy makes its array anew; of an array that layers share, one layer's part counts too."""
    states, pages = {(3, 9, 2, 4): 3}, {(8, 64, 4): 1}
    program = hlo.CompiledText(COPIES)
    assert program.copies(states) == hlo.Traffic(1 + 6, (3 + 6) * 9 * 2 * 4 * 4)
    assert program.copies(pages) == hlo.Traffic(1, 8 * 64 * 4 * 2)
    assert program.copies(states | pages).runs == 8 and program.copies({(4, 2, 4): 1}) == hlo.Traffic()


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
    found = hlo.CompiledText(TEXT).collectives()
    assert found == {"all-gather": hlo.Traffic(1, 8 * 4 * 2), "reduce-scatter": hlo.Traffic(1, 20)}
    assert hlo.CompiledText(TEXT.replace("channel_id=7", "channel_id=8", 1)).collectives()["all-gather"] == hlo.Traffic(
        7, 7 * 64
    )


def test_collectives_of_a_shard_map_share_a_channel_and_count_each():
    """Rows that are gathered twice for different ends are sent twice."""
    second = "  %again = bf16[8,4]{1,0} all-gather(%a), channel_id=1, dimensions={0}\n"
    shared = TEXT.replace("channel_id=7", "channel_id=1").replace("  %w = ", second + "  %w = ")
    assert hlo.CompiledText(shared).collectives()["all-gather"] == hlo.Traffic(6 + 1 + 1, 8 * 64)


def test_what_is_started_with_several_operands_counts_its_result():
    """An operand may be longer than the result: the rows of a ragged exchange."""
    operands = "(bf16[9,4]{1,0:T(2,128)(2,1)}, bf16[5,4]{1,0:T(2,128)(2,1)}, s32[4]{0:T(128)})"
    line = f"  %x = ({operands}, bf16[5,4]{{1,0:T(2,128)(2,1)}}, u32[]{{:S(2)}}) ragged-all-to-all-start(%u), channel_id=1\n"
    found = hlo.CompiledText(TEXT.replace("  %rs = ", line + "  %rs = ")).collectives()
    assert found["ragged-all-to-all"] == hlo.Traffic(1, 5 * 4 * 2)


def test_groups_of_one_device_send_nothing():
    for groups in ("{{0},{1}}", "[2,1]<=[2]", "mesh['a'=1,'b'=2,'c'=1] {'a','c'}"):
        alone = TEXT.replace("channel_id=9", f"channel_id=9, replica_groups={groups}")
        assert set(hlo.CompiledText(alone).collectives()) == {"all-gather"}
    for groups in ("{{0,1}}", "mesh['a'=1,'b'=2,'c'=1] {'a','b'}", "mesh['a'=2,'b'=2] {'a':(1)2}"):
        several = TEXT.replace("channel_id=9", f"channel_id=9, replica_groups={groups}")
        assert hlo.CompiledText(several).collectives() == hlo.CompiledText(TEXT).collectives()


@pytest.mark.slow
def test_the_head_is_gathered_once_however_many_chunks_there_are():
    """Left to XLA, it would be gathered, and its gradient summed over the mesh, chunk by chunk."""
    from dora_jax.trainer import step

    mesh = sharding.make_mesh(jax.devices()[:4], 1, 4, 1)
    model = Model(dataclasses.replace(cases.MODEL, n_layers=1), mesh, jnp.float32, "none", 1.0, None)
    params = sharding.param_specs(model.cfg, mesh)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), step.decoder.abstract_params(model.cfg), params
    )
    arrays = {
        name: jax.ShapeDtypeStruct((4, 32), jnp.int32, sharding=sharding.batch_spec(mesh))
        for name in ("tokens", "targets", "segment_ids", "positions")
    }
    sent = []
    for chunks in (1, 8):
        chunked_model = model._replace(logits_bytes=4 * 48 * 32 // chunks)
        grad = jax.jit(jax.grad(lambda p, a, m=chunked_model: m.logprobs(p, a)[0].sum()), out_shardings=params)
        sent.append(hlo.CompiledText(grad.lower(shapes, arrays).compile().as_text()).collectives())
    whole, chunked = ({kind: t.bytes for kind, t in found.items()} for found in sent)
    assert whole == chunked and sent[0]["all-gather"] == sent[1]["all-gather"]


def test_a_scatter_counts_what_it_writes_and_not_the_pool():
    """XLA estimates no cycles of it; it stands in a fusion, whose update is a computed value or a parameter."""
    fused = """%write (p: bf16[99,64,4,128], i: s32[8,2], u: bf16[8,4,128]) -> bf16[99,64,4,128] {
  %u.1 = bf16[8,4,128]{2,1,0:T(4,128)(2,1)} parameter(2)
  ROOT %s.1 = bf16[99,64,4,128]{3,2,1,0} scatter(%p.1, %i.1, %u.1), update_window_dims={1,2}, to_apply=%add
}
"""
    body = "  %w.1 = bf16[99,64,4,128]{3,2,1,0} fusion(%pool, %at, %kv), kind=kCustom, calls=%write\n"
    text = (fused + TEXT.replace("  %f.2 = ", body + "  %f.2 = ")).lstrip()
    assert hlo.CompiledText(text).kernels() == (hlo.CustomCall("scatter", 6, 6 * 2 * 8 * 4 * 128 * 2),)


def test_a_kernels_metadata_does_not_end_its_computation():
    """What a Pallas kernel says of itself may stand on lines of its own, and start with a brace."""
    kernel = (
        '  %k = bf16[4]{0} custom-call(%p), custom_call_target="tpu_custom_call", kernel_metadata={\n"a":1\n}}, x=1\n'
    )
    marked = TEXT.replace("  %start = ", kernel + "  %start = ")
    assert marked != TEXT and hlo.CompiledText(marked).collectives() == hlo.CompiledText(TEXT).collectives()


@pytest.mark.parametrize(
    "name,topology,number",
    [
        ("v5e-4", "v5e:2x2", 4),
        ("v5litepod-64", "v5e:8x8", 64),
        ("v5e-32", "v5e:4x8", 32),
        ("v6e-16", "v6e:4x4", 16),
        ("v5p-8", "v5p:2x2x1", 4),
        ("v5p-16", "v5p:2x2x2", 8),
        ("v5p-32", "v5p:2x2x4", 16),
        ("v5p-128", "v5p:4x4x4", 64),
        ("v4-64", "v4:2x4x4", 32),
        ("tpu7x-128", "tpu7x:4x4x4", 64),
    ],
)
def test_names_of_slices(name, topology, number):
    assert aot_slices.topology(name) == topology and chips.parse(name)[1] == number


@pytest.mark.parametrize(
    "name,reason",
    [
        ("", "slice: empty; --aot compiles for a TPU slice such as v5e-8"),
        ("laptop", "slice: laptop; --aot compiles"),
        ("v9-8", "slice 'v9-8' is unknown: name one such as v5e-64"),
        ("v5e", "is unknown"),
        ("v5p-5", "slice 'v5p-5': 5 is not twice a power of two"),
        ("v5e-12", "12 is not a power of two"),
    ],
)
def test_slices_that_nothing_is_compiled_for(name, reason):
    with pytest.raises(config.ConfigError, match=reason):
        aot_slices.slice_devices(name)


def test_a_gpu_is_described_by_the_hardware_table():
    target = aot_slices.gpu_target("h200")
    assert "device_memory_size: 141000000000 memory_bandwidth: 4800000000000" in target and '"NVIDIA H200"' in target
    assert aot_slices.SlicePlacement(slice_name="h100-8", mesh=None).platform == "cuda"
    assert aot_slices.SlicePlacement(slice_name="v5p-8", mesh=None).platform == "tpu"


def test_without_the_plugin_for_cuda_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(aot_slices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(config.ConfigError, match=r"compiling for h100-8 needs .*: pip install 'dora_jax\[cuda\]'"):
        aot_slices.slice_devices("h100-8")


def test_the_report_of_a_gpu_names_no_seconds():
    """XLA estimates no cycles of it: what is counted and held is printed, and neither a model's time nor an MFU."""
    sizes = dict.fromkeys(("argument_bytes", "temporary_bytes", "output_bytes", "host_bytes", "compile_s"), 1)
    gpu, tpu = (
        aot_roles.describe(aot_roles.Compiled(
            name="train", flops=1e12, sent={}, copied=hlo.Traffic(0, 0), model_s=seconds, kernels=(), needed=1e12,
            chip=chips.CHIPS[chip], links_bytes_per_s=1e9, **sizes,
        ))
        for chip, seconds in (("h100", 0.0), ("v5p", 1.0))
    )  # fmt: skip
    assert "model" in tpu[0] and "MFU" in tpu[-1]
    assert "model" not in gpu[0] and "no pool copied" in gpu[0] and len(gpu) == len(tpu) - 1


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(aot_slices, "installed", lambda: False)
    with pytest.raises(config.ConfigError, match=r"compiling for v5e-4 needs libtpu: pip install 'dora_jax\[aot\]'"):
        aot_slices.slice_devices("v5e-4")


def parsed(*asked):
    return flags.parse(["program", *asked], "train", absl_flags.FlagValues())


def test_the_flag_belongs_to_a_dry_run_and_names_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["program"])
    spec = str(tmp_path / "c.py")
    (tmp_path / "c.py").write_text(
        "from dora_jax import config\ndef get_config():\n    c = config.defaults()\n"
        "    c.task.name, c.task.path, c.model.path = 'rows', 'rows.jsonl', 'gone'\n    return c\n"
    )
    with pytest.raises(config.ConfigError, match="aot: --aot goes with --dry_run, of dora_jax.train"):
        parsed(f"--config={spec}", "--aot")
    asked = parsed(f"--config={spec}", "--dry_run", "--aot")
    with pytest.raises(
        config.ConfigError, match="model.path: 'gone' has no config.json; --aot needs it, or model.size"
    ):
        aot.report(asked.config)
    asked = parsed(f"--config={spec}", "--dry_run", "--aot", "--config.model.size=Qwen3-0.6B")
    with pytest.raises(config.ConfigError, match="slice: empty; --aot compiles for a TPU slice"):
        aot.report(asked.config)


MODEL = dataclasses.replace(cases.MODEL, d_model=256, head_dim=128, d_ff=512, vocab_size=1024)


def run_of(slice_name="v5e-4", rollout=None, lora=OFF, **trainer):
    """A run on half of the slice for training, an instance on two chips of the other half."""
    c = config.Config()
    sizes = {"tensor": 2, "slots": 8, "max_prompt_tokens": 64, "max_new_tokens": 64} | (rollout or {})
    section = {"pack_tokens": 256, "remat": "full", "micro_batches": 2} | trainer
    c = dataclasses.replace(
        c,
        slice=slice_name,
        lora=lora,
        trainer=dataclasses.replace(c.trainer, **section),
        rollout=dataclasses.replace(c.rollout, instances=1, **sizes),
        orchestrator=dataclasses.replace(c.orchestrator, groups_per_step=2, group_size=2),
    )
    return presets.resolve(c, presets.machines(c))[0]


@pytest.mark.slow
@needs_libtpu
def test_a_run_is_compiled_for_a_slice_that_is_not_here(monkeypatch):
    reports, analysis = [], jax.stages.Compiled.memory_analysis
    monkeypatch.setattr(
        jax.stages.Compiled, "memory_analysis", lambda one: reports.append(analysis(one)) or reports[-1]
    )
    trainer, instance = aot.compile_roles(run_of(), MODEL, only=("train", "publish", "decode"))
    for one, xla in zip((*trainer.programs, *instance.programs), reports, strict=True):
        held = one.argument_bytes + one.temporary_bytes + one.output_bytes
        assert held == xla.peak_memory_in_bytes + xla.generated_code_size_in_bytes, "what XLA holds against a chip"
    weights = sum(x.size for x in jax.tree.leaves(cases.decoder.abstract_params(MODEL)))
    train, publish = trainer.programs
    assert (trainer.chips, instance.chips) == (2, 2)
    assert trainer.held["masters"] == pytest.approx(4 * weights / 2, rel=0.01)  # over fsdp=2
    assert trainer.held["moments"] == pytest.approx(8 * weights / 2, rel=0.01)
    assert train.argument_bytes == pytest.approx(
        sum(trainer.held[name] for name in ("masters", "moments", "batch")), rel=0.05
    )
    assert trainer.held["3 published versions"] == 3 * publish.output_bytes > 0
    assert {"all-gather", "all-reduce"} <= set(train.sent) and train.temporary_bytes > 0 and train.model_s > 0
    tokens = 4 * 256 / 2  # a chip
    assert 6 * tokens * weights < train.flops < 20 * tokens * weights  # recomputed, and the scores
    decode = instance.programs[0]
    assert decode.name.startswith("decode") and "all-reduce" in decode.sent
    kernels = {kernel.name: kernel for kernel in decode.kernels}
    # eight rows of 48 tokens in the mean, half of each limit's half, and not the pages of the pool
    attention = next(kernel for name, kernel in kernels.items() if "ragged" in name)
    live = 8 * 48 * 2 * 2 * 128 * 2 / 2
    assert live <= attention.bytes / attention.runs < live + 2**16 < instance.held["KV pool"] / 2
    written = kernels["turn_and_write_kv"]  # the rows' newest KV, and what a layer's products gave
    assert written.runs == attention.runs and 8 * 2 * 2 * 128 * 2 / 2 <= written.bytes / written.runs < 2**16
    assert decode.copied == hlo.Traffic() and "no pool copied" in aot_roles.describe(decode)[0] and not train.copied
    assert (
        instance.held["1 resident version"]
        == instance.held["the incoming one"]
        == pytest.approx(2 * weights / 2, rel=0.02)
    )
    rollout = run_of().rollout
    assert instance.held["KV pool"] == pytest.approx((rollout.pages + 1) * rollout.page_size * 2 * 2 * 128 * 2 * 2 / 2)
    assert trainer.chip_bytes == sum(trainer.held.values()) + trainer.work_bytes < trainer.chip.hbm_bytes


@needs_libtpu
@pytest.mark.slow
def test_short_rows_are_compiled_beside_whole_ones_and_a_page_is_of_these():
    whole, split = (
        aot.compile_roles(run_of(pack_tokens=512, row_splits=n), MODEL, only=("train",))[0].programs[0] for n in (1, 4)
    )
    assert whole.flops == split.flops and split.model_s == pytest.approx(whole.model_s, rel=0.05)
    runs = [{one.name: one.runs for one in each.kernels if "splash" in one.name} for each in (whole, split)]
    assert runs[0] == runs[1] and runs[0]


@needs_libtpu
@pytest.mark.parametrize("slice_name", ["v5e-4", pytest.param("v5p-8", marks=pytest.mark.slow)])
def test_a_layer_of_a_decode_step_has_no_small_change(slice_name):
    """Its KV is written by a kernel, and the places of it are found once a step; norms and angles of heads belong to
    that kernel. Eight layers: a loop of two turns."""
    place = aot_slices.place_of(run_of(slice_name), aot_roles.INSTANCE)
    calls = run.engine_calls(run_of(slice_name), dataclasses.replace(MODEL, n_layers=8), place.mesh, (1,), 1000)
    small = hlo.CompiledText(calls.decode_chosen.as_text()).small_ops()
    assert small and not {"scatter", "gather"} & {*small} and sum(small.values()) <= 8, small


@needs_libtpu
@pytest.mark.slow
def test_adapters_are_compiled_as_they_are_stacked():
    lora = Lora(rank=8)
    trainer, instance = aot.compile_roles(run_of(lora=lora), MODEL, only=("publish", "decode"))
    weights = sum(x.size for x in jax.tree.leaves(cases.decoder.abstract_params(MODEL)))
    assert trainer.held["masters"] == 4 * adapter_params(MODEL, lora, fsdp=2)
    assert trainer.held["the base, which stays as it is"] == pytest.approx(2 * weights / 2, rel=0.02)
    assert instance.held["base weights"] == pytest.approx(2 * weights / 2, rel=0.02)
    assert instance.held["the incoming one"] == 2 * adapter_params(MODEL, lora, tensor=2)
    assert instance.held["4 resident versions"] == 4 * instance.held["the incoming one"]
    sent, steps = instance.programs[0].sent, run_of().rollout.decode_steps
    assert "all-to-all" not in sent and sent["collective-permute"].runs <= 2 * steps  # those of the draw


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["gather", "all_to_all"])
def test_experts_over_a_slice_compile_for_it(dispatch):
    """Forward and backward: grouped kernels alone multiply; rows go to their experts and back, and so do gradients."""
    experts, d, width, tokens, k = 8, 256, 128, 512, 2
    mesh = sharding.make_mesh(aot_slices.slice_devices("v5p-16"), 1, 2, 1, expert=4)
    compute = expert_parallel.compute("megablox", mesh, dispatch)

    def given(*shape, axes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, sharding.spec(*axes)))

    rows = ("batch", "sequence")
    h, weights = given(8, tokens, d, axes=rows), given(8, tokens, k, axes=rows, dtype=jnp.float32)
    ids = given(8, tokens, k, axes=rows, dtype=jnp.int32)
    wide, back = given(experts, d, width, axes=moe.WIDE), given(experts, width, d, axes=moe.BACK)
    grad = jax.jit(jax.grad(lambda m, h, w, ids: jnp.sum(jnp.sin(compute(h, w, ids, *m))), argnums=(0, 1, 2)))
    traced = grad.trace((wide, wide, back), h, weights, ids)
    text = hlo.CompiledText(traced.lower(lowering_platforms=("tpu",)).compile().as_text(), 7, EVEN_LOAD)
    assert {kernel.name: kernel.runs for kernel in text.kernels()}.items() >= {"gmm": 3 + 5, "tgmm": 3}.items()
    block = 1.25 * k * tokens  # rows of a device
    assert flops.kernel_flops(traced.jaxpr.jaxpr)["gmm"] == 2 * block * d * width
    sent = text.collectives().get("ragged-all-to-all")
    if dispatch == "gather":
        assert sent is None
    else:
        assert sent == hlo.Traffic(5, int(2 * (3 * block + 2 * k * tokens) * d))


@needs_libtpu
@pytest.mark.slow
def test_moments_in_host_memory_come_to_the_chip_together():
    """So an update is planned with all of them: what leaves the arguments, XLA holds beside them at the peak."""
    (here,), (hosted,) = (
        aot.compile_roles(run_of(optimizer_memory=memory), MODEL, only=("train",)) for memory in ("device", "host")
    )
    assert hosted.programs[0].host_bytes > 0.6 * here.programs[0].argument_bytes and hosted.held["moments"] < 1e3
    assert hosted.work_bytes - here.work_bytes > 0.8 * here.held["moments"]


@needs_libtpu
@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_field_that_helps():
    large = dataclasses.replace(MODEL, d_model=8192, d_ff=2**17, vocab_size=2**18)
    with pytest.raises(
        aot_roles.DoesNotFit, match=r"^trainer: .* GiB a chip on v5e-4, which has 14.9.*trainer.micro_batches"
    ):
        aot.compile_roles(run_of(), large, only=("train",))
    with pytest.raises(
        aot_roles.DoesNotFit, match=r"^instance: .* GiB a chip on v5e-4.*lower rollout.pages \(now 199999\)"
    ):
        aot.compile_roles(
            run_of(rollout={"pages": 199_999, "max_new_tokens": 3968}),
            dataclasses.replace(MODEL, n_kv_heads=4),
            only=("decode",),
        )


def test_the_compilers_verdict_becomes_one_sentence():
    place = aot_slices.SlicePlacement(slice_name="v5e-4", mesh=sharding.make_mesh(jax.devices()[:4], 1, 4, 1))
    for reported in (
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (21.34G) "
            "exceeds available HBM (15.75G)."
        ),
        "Ran out of memory in memory space hbm. Used 21.34G of 15.75G hbm.",
    ):
        got = aot_roles.verdict(RuntimeError(reported), run_of(), place.role(aot_roles.TRAINER), "train")
        assert isinstance(got, aot_roles.DoesNotFit)
        assert "trainer: train needs 21.3 GiB a chip on v5e-4, which has 14.9: " in str(got)
    scalars = RuntimeError("RESOURCE_EXHAUSTED: allocation (size=2097152) would exceed memory, space=smem")
    assert "raise rollout.page_size (now 64)" in str(
        aot_roles.verdict(scalars, run_of(), place.role(aot_roles.INSTANCE), "decode")
    )
    other = RuntimeError("INTERNAL: something else")
    assert aot_roles.verdict(other, run_of(), place.role(aot_roles.TRAINER), "train") is other
