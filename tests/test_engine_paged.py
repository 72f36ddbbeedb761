"""The engine over a paged pool (`rollout.attention = tpu`), its kernel replaced by the reference that stands beside it.

The kernel itself is held to that reference in test_attention.py; whether it compiles for TPUs, in test_aot.py.
"""

import jax
import numpy as np
import pytest

from dora_jax.ops import attention
from dora_jax.rollout import device_calls
from dora_jax.types import SampleId
from tests.fakes.engine_rig import finish, ids, loaded, new_engine, submit, undisturbed, weights
from tests.fakes.episode_rig import begin, play, quiet


@pytest.fixture(scope="module")
def paged():
    """Two devices; few pages more than one long sample needs."""
    patch = pytest.MonkeyPatch()
    patch.setattr(attention, "paged_kernel", lambda impl, rank: attention.paged_reference)
    patch.setattr(device_calls, "CHOOSERS", ("cpu",))  # how the weights lie is chosen as on a TPU
    with patch.context() as anywhere:
        anywhere.setattr(attention, "check_platform", lambda *args, **latent: None)
        engine = new_engine(device=2, tensor=2, pages=20, context_block=48, attention="tpu")
    engine.load(0, weights(engine))
    yield engine
    patch.undo()


def assert_same(sample):
    same = undisturbed(sample.id, sample.version)
    np.testing.assert_array_equal(sample.out_ids, same.out_ids)
    np.testing.assert_allclose(sample.logprobs, same.logprobs, rtol=0, atol=1e-5)


def test_the_same_samples_as_by_gathering(paged):
    """Groups share a page that they then write to; too many for the pages, so that some go to the host and back."""
    for id in ids((0, 1, 2, 3, 4, 21), size=2):
        submit(paged, id)
    preempts = []
    plan = paged.scheduler.plan
    paged.scheduler.plan = lambda: (p := plan(), preempts.extend(p.preempts))[0]
    done = finish(paged)
    paged.scheduler.plan = plan
    assert len(done) == 12 and preempts
    for sample in done.values():
        assert_same(sample)


def test_episodes_are_the_same_as_by_gathering(paged):
    """Turns end inside pages, and what is observed is written behind them."""
    for id in ids((0, 2, 3), size=2):
        begin(paged, id)
    for sample in play(paged).values():
        same = quiet(sample.id)
        np.testing.assert_array_equal(sample.out_ids, same.out_ids)
        np.testing.assert_array_equal(sample.mask, same.mask)
        np.testing.assert_allclose(sample.logprobs, same.logprobs, rtol=0, atol=1e-5)


def test_no_bit_depends_on_preemption_or_batch_mates(paged):
    for id in ids((3, 9, 21), size=3):
        submit(paged, id)
    crowded = finish(paged)
    for id in (SampleId(3, 1), SampleId(21, 2)):
        submit(paged, id)
        alone = finish(paged)[id]
        np.testing.assert_array_equal(crowded[id].out_ids, alone.out_ids)
        np.testing.assert_array_equal(crowded[id].logprobs.view(np.int32), alone.logprobs.view(np.int32))


def test_another_version_is_laid_out_by_the_programs_of_the_first(paged):
    """A program made for a tensor of one version would be compiled anew at every publication."""
    compiled, first, second = [], *(jax.tree.map(lambda x: x.astype("float16"), weights(paged, i)) for i in (1, 2))
    paged.load(1, first)
    paged.drop(1)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    paged.load(2, second)
    jax.monitoring.clear_event_listeners()
    paged.drop(2)
    assert not compiled


@pytest.mark.slow
def test_drafts_over_pages_change_no_token():
    """What a verifying call writes beyond the accepted tokens is written again before it is read."""
    found = []
    for drafts in (0, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "paged_kernel", lambda impl, rank: attention.paged_reference)
            patch.setattr(device_calls, "CHOOSERS", ("cpu",))
            patch.setattr(attention, "check_platform", lambda *args, **latent: None)
            sizes = dict(pages=20, context_block=48, attention="tpu", temperature=0.1)
            engine = new_engine(drafts=drafts, draft_cost=0.3, **sizes)
            engine.load(0, weights(engine))
            done = {}
            for group in range(3):
                for id in ids((group,), size=4):
                    submit(engine, id)
                done |= finish(engine)
        found.append(done)
    assert engine.scheduler.decoding.drafter.accepted
    for id, sample in found[0].items():
        np.testing.assert_array_equal(found[1][id].out_ids, sample.out_ids)
        np.testing.assert_allclose(found[1][id].logprobs, sample.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("ticks", [1, 4])
def test_samples_move_between_kinds_of_pools(paged, ticks):
    there, back = SampleId(21, 2), SampleId(3, 1)
    with loaded("a") as a:
        submit(paged, there)
        submit(a, back)
        for _ in range(ticks):
            paged.tick()
            a.tick()
        a.import_(paged.export(there))
        paged.import_(a.export(back))
        done = finish(a, paged)
    for sample in done.values():
        assert_same(sample)


def test_nothing_of_a_poisoned_version_reaches_another(paged):
    poisoned = [SampleId(group, 7) for group in (0, 1, 3)]
    paged.load(9, weights(paged, scale=np.nan))
    for id in [*poisoned, *ids((0, 3))]:
        submit(paged, id, 9 if id in poisoned else 0)
    done = finish(paged)
    assert {done.pop(id).finish for id in poisoned} == {"error"}
    paged.drop(9)
    pool = paged.device.pool[0].reshape(2, 21, *paged.device.pool[0].shape[1:])
    np.testing.assert_array_equal(pool[:, 0], 0)  # padding goes to page 0 of each layer
    assert np.isfinite(pool).all()  # a kernel multiplies what it masks by zero, which saves no nan
    for id in ids((1, 2, 4)):
        submit(paged, id)
    for sample in [*done.values(), *finish(paged).values()]:
        assert_same(sample)


def test_a_kernel_that_the_devices_cannot_run_is_refused():
    with pytest.raises(ValueError, match="rollout.attention tpu needs TPU devices; this instance's are cpu"):
        new_engine(attention="tpu")
