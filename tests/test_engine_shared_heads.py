"""An engine with more devices than the model has KV heads (`rollout.tensor`): neighbours hold the same one."""

import jax
import numpy as np
import pytest

from dora_jax.models import sharding
from dora_jax.ops import attention
from dora_jax.publish import DeviceWeights
from dora_jax.rollout import device_calls
from dora_jax.trainer import hlo
from dora_jax.types import SampleId
from tests.fakes.engine_rig import CFG, finish, ids, loaded, new_engine, params, submit, undisturbed

TENSOR = 2 * CFG.n_kv_heads


@pytest.fixture(scope="module", params=["reference", "tpu"])
def engine(request):
    """On four devices, its weights as a trainer on two others has published them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "paged_kernel", lambda impl, rank: attention.paged_reference)
        if request.param != "reference":
            patch.setattr(device_calls, "CHOOSERS", ("cpu",))
            patch.setattr(attention, "check_platform", lambda *args, **latent: None)
        engine = new_engine(device=2, tensor=TENSOR, context_block=48, attention=request.param)
        store = DeviceWeights()
        trainers = sharding.make_mesh(jax.devices()[:2], 1, 1, 2)
        store.put(0, jax.device_put(params(), sharding.param_specs(CFG, trainers)))
        engine.load(0, store.get(0, engine.param_shardings))
        yield engine


def test_it_samples_what_one_device_does_also_after_a_move(engine):
    """Both ways: a request carries each head once."""
    there, back = SampleId(3, 1), SampleId(2, 0)
    with loaded("a") as single:
        for id in [there, *ids((4, 1))]:
            submit(engine, id)
        submit(single, back)
        done = {sample.id: sample for _ in range(2) for one in (engine, single) for sample in one.tick().finished}
        request = engine.export(there)
        assert request.k_pages.shape[2] == CFG.n_kv_heads
        single.import_(request)
        engine.import_(single.export(back))
        done |= finish(engine, single)
    assert len(done) == 6
    for sample in done.values():
        same = undisturbed(sample.id)
        np.testing.assert_array_equal(sample.out_ids, same.out_ids)
        np.testing.assert_allclose(sample.logprobs, same.logprobs, rtol=0, atol=1e-5)


def test_a_device_holds_the_head_of_its_queries_and_the_pool_stays_where_it_is(engine):
    for leaf in jax.tree.leaves(engine.device.pool):
        assert leaf.sharding.shard_shape(leaf.shape) != leaf.shape
        assert TENSOR // CFG.n_kv_heads * leaf.nbytes == sum(shard.data.nbytes for shard in leaf.addressable_shards)
    # The logits of a call's rows may be sorted across devices, in the branch of rows with sampling values of their own.
    most = max(
        2 * engine.shapes.page_size * CFG.head_dim * 4, 4 * engine.shapes.rows * CFG.vocab_size
    )  # a page, logits
    assert most < min(leaf.nbytes for leaf in jax.tree.leaves(engine.device.pool)) / 4
    programs = engine.calls.programs()
    call, arguments, static = programs[next(name for name in programs if name.startswith("decode"))]
    sent = hlo.CompiledText(call.trace(*arguments, **static).lower().compile().as_text()).collectives()
    assert sent.pop("all-reduce").runs
    assert all(one.bytes <= one.runs * most for one in sent.values())
