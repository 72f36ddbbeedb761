"""JetStream's own orchestrator drives the engine through the adapter."""

import asyncio
import logging
import threading

import numpy as np
import pytest

from dora_jax.rollout.jetstream import import_jetstream, new_adapter
from dora_jax.types import SampleId
from tests.fakes.engine_rig import EOS, loaded, new_engine, prompt, weights

BOS = 1
ERRORS = []  # of JetStream's threads


@pytest.fixture(scope="module")
def orchestrator():
    """The module; importing it gives the root logger a handler and the level DEBUG, which a test must not keep.

    A thread of its that fails kills the process; here it is noticed. `Driver.stop` makes them fail now and then: it
    takes the channel of a request away while another thread closes it.
    """
    for name in ("jetstream", "grpc", "shortuuid", "prometheus_client"):
        pytest.importorskip(name, reason=f"{name} is not installed: see dora_jax/rollout/jetstream.py")
    import_jetstream()
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    from jetstream.core import orchestrator

    root.setLevel(level)
    root.handlers[:] = handlers

    def run(thread):
        try:
            threading.Thread.run(thread)
        except Exception as error:
            ERRORS.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orchestrator.JetThread, "run", run)
        yield orchestrator


@pytest.fixture
def engine():
    engine = new_engine(device=3, context_block=48)
    engine.load(0, weights(engine))
    return engine


def decode(orchestrator, adapter, requests):
    """requests: (token ids, max_tokens); the tokens of each, in order. All are in flight at once."""
    from jetstream.core.proto import jetstream_pb2 as pb

    driver = orchestrator.Driver(
        prefill_engines=[adapter],
        generate_engines=[adapter],
        prefill_params=[0],
        generate_params=[0],
        interleaved_mode=True,
    )
    server = orchestrator.LLMOrchestrator(driver)

    async def one(tokens, limit):
        content = pb.DecodeRequest.TokenContent(token_ids=tokens)
        out = []
        async for response in server.Decode(pb.DecodeRequest(token_content=content, max_tokens=limit)):
            out += response.stream_content.samples[0].token_ids
        return out

    async def every():
        return await asyncio.wait_for(asyncio.gather(*(one(*request) for request in requests)), timeout=120)

    try:
        return asyncio.run(every())
    finally:
        assert not ERRORS
        driver.stop()
        ERRORS.clear()


def test_their_orchestrator_gets_the_samples_of_the_engine(orchestrator, engine):
    """Ten requests over four slots; some end at a stop token, one at its own limit."""
    prompts = [prompt(group)[:15].tolist() for group in (0, 1, 2, 3, 4, 5, 0, 1, 2, 3)]
    limits = [24] * 9 + [5]
    adapter = new_adapter(engine, 0, max_new_tokens=24, bos_id=BOS)
    answers = decode(orchestrator, adapter, list(zip(prompts, limits, strict=True)))
    with loaded("a") as a:
        for number, tokens in enumerate(prompts):  # the order of the requests is that of their identities
            a.submit(SampleId(0, number), [BOS, *tokens], 0, 24)
        done = {}
        while not a.idle:
            done |= {sample.id.index: sample.out_ids for sample in a.tick().finished}
    for number, answer in enumerate(answers):
        expected = done[number][: limits[number]]
        np.testing.assert_array_equal(answer, expected[~np.isin(expected, EOS)])
    assert len(answers[-1]) <= 5 and any(np.isin(out, EOS).any() for out in done.values())


def test_slots_and_lengths_are_those_of_the_engine(orchestrator, engine):
    adapter = new_adapter(engine, 0, max_new_tokens=24, bos_id=BOS)
    assert adapter.max_concurrent_decodes == 4 and adapter.max_prefill_length == 16 and adapter.samples_per_slot == 1
    assert adapter.load_params() == 0 and adapter.mesh is engine.mesh
    with pytest.raises(NotImplementedError, match="existing_prefix"):
        adapter.prefill(params=0, existing_prefix=object(), padded_tokens=np.zeros(16), true_length=3)
