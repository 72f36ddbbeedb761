"""The GPU's paged kernel: interpreted against its reference, lowered for CUDA, and under the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from dora_jax.models.decoder import Scores
from dora_jax.ops import attention, paged_gpu
from tests.fakes.engine_rig import finish, ids, new_engine, submit, undisturbed, weights

interpreted = functools.partial(paged_gpu.paged_attention, interpret=True)
EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 128, 129, 200)  # of pages, blocks and spans


def case(length, lens, group, dim, size, dtype, kv=2, table=256):
    """Pages that hold nan wherever no row has written; tables that name pages that do not exist beyond a row's own."""
    rng = np.random.default_rng(group)
    lens = np.array(lens, np.int32)
    pool = np.full((1 + len(lens) * (table // size), size, 2 * kv, dim), np.nan, np.float32)
    tables = rng.permutation(np.arange(1, len(pool), dtype=np.int32)).reshape(len(lens), -1)
    for pages, n in zip(tables, lens, strict=True):
        at = np.arange(n)
        pool[pages[at // size], at % size] = rng.normal(size=(n, 2 * kv, dim))
        pages[-(-n // size) :] = 10**6
    q = rng.normal(size=(len(lens), length, kv * group, dim))
    return jnp.asarray(q, dtype), jnp.asarray(pool, dtype), jnp.asarray(lens), jnp.asarray(tables)


def expected(q, pool, lens, tables, window=0, sinks=()):
    """In f32, from the same values."""
    tables = jnp.where(tables < len(pool), tables, 0)
    pool = jnp.nan_to_num(pool.astype(jnp.float32))
    attend = functools.partial(attention.paged_reference, scores=Scores(q.shape[-1] ** -0.5, window))
    more = {"sinks_H": sinks[0]} if sinks else {}
    return jax.jit(attend)(q.astype(jnp.float32), pool, lens, tables, **more)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("group,dim,size,dtype,atol", [
    (1, 64, 16, jnp.float32, 1e-6), (2, 128, 64, jnp.bfloat16, 0.01), (4, 64, 64, jnp.float32, 1e-6),
    (8, 16, 16, jnp.bfloat16, 0.01)])  # fmt: skip
def test_decode_equals_the_reference(group, dim, size, dtype, atol, window):
    inputs = case(1, EDGES, group, dim, size, dtype)
    got = interpreted(*inputs, Scores(dim**-0.5, window), span=64, block=32)
    np.testing.assert_allclose(got.astype(jnp.float32), expected(*inputs, window), rtol=0, atol=atol)
    np.testing.assert_array_equal(got[0], 0)


@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("length,group,size,dtype,atol", [
    (8, 2, 16, jnp.float32, 2e-6), (37, 4, 64, jnp.bfloat16, 0.01)])  # fmt: skip
def test_a_chunk_equals_the_reference(length, group, size, dtype, atol, window):
    inputs = case(length, (length, length + 1, 64, 200), group, 64, size, dtype)
    got = interpreted(*inputs, Scores(64**-0.5, window), block=32)
    np.testing.assert_allclose(got.astype(jnp.float32), expected(*inputs, window), rtol=0, atol=atol)


@pytest.mark.parametrize("length,lens", [(1, EDGES), (8, (8, 9, 64, 200))], ids=["decode", "chunk"])
def test_sinks_take_their_share_of_the_weights(length, lens):
    """A sink far below the scores changes nothing, one far above takes all; a single span is not combined."""
    inputs = case(length, lens, 2, 64, 16, jnp.float32)
    sinks = jnp.asarray([-1e9, -1.0, 0.5, 30.0], jnp.float32)
    scores = Scores(64**-0.5, 40)
    plain = expected(*inputs, 40)
    for span in (64, 256):
        got = interpreted(*inputs, scores, sinks, span=span, block=32)
        np.testing.assert_allclose(got, expected(*inputs, 40, (sinks,)), rtol=0, atol=2e-6)
    np.testing.assert_allclose(got[:, :, 0], plain[:, :, 0], atol=2e-6)
    assert float(jnp.abs(got[:, :, 3]).max()) < 1e-9 and float(jnp.abs(got - plain)[:, :, 2].max()) > 0.1


def test_no_bit_depends_on_the_table_s_width_or_on_other_rows():
    q, pool, lens, tables = case(1, (200, 3, 64), 2, 16, 16, jnp.float32)
    run = functools.partial(interpreted, scores=Scores(0.25), span=64, block=32)
    whole = run(q, pool, lens, tables)
    np.testing.assert_array_equal(whole[1:], run(q[1:], pool, lens[1:], tables[1:, :4]))
    np.testing.assert_array_equal(whole[1:2], run(q[1:2], pool, lens[1:2], tables[1:2, :8]))


def test_what_the_kernel_cannot_run_is_refused():
    q, pool, lens, tables = case(1, (4, 7), 1, 16, 16, jnp.float32)
    with pytest.raises(ValueError, match="heads of 12 come padded to 16, a power of two"):
        paged_gpu.paged_attention(q[..., :12], pool[..., :12], lens, tables, 1.0)
    with pytest.raises(ValueError, match="2 sequences have lengths"):
        paged_gpu.paged_attention(q, pool, lens[:1], tables, 1.0)
    with pytest.raises(ValueError, match="17 query heads share a KV head; the kernel takes 16"):
        paged_gpu.paged_attention(jnp.tile(q[:, :, :1], (1, 1, 34, 1)), pool, lens, tables, 1.0)
    wide = jax.ShapeDtypeStruct((2**20, 16, 16, 16), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="this one has 4294967296 values; set rollout.pages"):
        jax.eval_shape(
            functools.partial(paged_gpu.paged_attention, scores=Scores(1.0)),
            jnp.tile(q, (1, 1, 8, 1)),
            wide,
            lens,
            tables,
        )
    with pytest.raises(ValueError, match="rollout.attention gpu needs GPU devices; this instance's are cpu"):
        new_engine(attention="gpu")


# ----------------------------------------------------------------- for CUDA


def lowered(fn, *args):
    """StableHLO for an H100 that need not be here."""
    fields = {"device_kind": "NVIDIA H100 80GB HBM3", "num_cores": None, "platform": "cuda"}
    device = AbstractDevice(**{name: fields[name] for name in AbstractDevice.__dataclass_fields__})
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("length,heads,dtype,kv_dtype,calls", [
    (1, 16, jnp.bfloat16, jnp.bfloat16, 2), (1, 32, jnp.float32, jnp.float32, 2),
    (1, 32, jnp.bfloat16, jnp.float8_e4m3fn, 2), (256, 32, jnp.bfloat16, jnp.bfloat16, 1)])  # fmt: skip
def test_it_lowers_to_triton_and_gathers_nothing(length, heads, dtype, kv_dtype, calls):
    """Rows of 32k tokens in pages of 64, which a gather would copy: 17 GB of K and V."""
    array, i32 = jax.ShapeDtypeStruct, jnp.int32
    text = lowered(
        functools.partial(paged_gpu.paged_attention, scores=Scores(0.1)),
        array((64, length, heads, 128), dtype),
        array((40000, 64, 16, 128), kv_dtype),
        array((64,), i32),
        array((64, 512), i32),
    )
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == calls
    assert text.count("stablehlo.") <= calls + 4  # and reshapes
    assert "gather" not in text


# -------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def engine():
    """Two devices; few pages more than one long sample needs."""
    patch = pytest.MonkeyPatch()
    patch.setattr(paged_gpu, "paged_attention", functools.partial(interpreted, span=16, block=16))
    with patch.context() as anywhere:
        anywhere.setattr(attention, "check_platform", lambda impl, platform, **latent: None)
        engine = new_engine(device=2, tensor=2, pages=20, context_block=48, attention="gpu")
    engine.load(0, weights(engine))
    yield engine
    patch.undo()


def test_the_engine_gives_the_same_samples_as_with_the_reference(engine):
    for id in ids((0, 1, 3, 21), size=2):
        submit(engine, id)
    done = finish(engine)
    assert len(done) == 8
    for sample in done.values():
        same = undisturbed(sample.id, sample.version)
        np.testing.assert_array_equal(sample.out_ids, same.out_ids)
        np.testing.assert_allclose(sample.logprobs, same.logprobs, rtol=0, atol=1e-5)
