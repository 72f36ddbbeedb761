"""Log-probs are of the distribution that was sampled from; what travels arrives whole."""

import jax
import jax.numpy as jnp
import numpy as np

from dora_jax.models import decoder, logits
from dora_jax.rollout import migrate
from dora_jax.types import SampleId
from tests.fakes import trainer_cases as cases


def test_logprobs_are_of_the_tempered_distribution(monkeypatch):
    monkeypatch.setattr(decoder, "logits", lambda cfg, params, hidden, narrow: hidden)
    hidden = np.random.default_rng(0).normal(size=(1, 3, cases.MODEL.vocab_size)).astype(np.float32)
    got = logits.policy_logits(cases.MODEL, None, jnp.asarray(hidden), temperature=0.5)
    np.testing.assert_allclose(jax.nn.log_softmax(got), jax.nn.log_softmax(2 * hidden), rtol=1e-5)


def test_pages_of_all_processes_make_the_whole():
    """A sample parted over the processes of one instance, and joined for another, has the KV that it had."""
    draw = np.random.default_rng(1)
    k, v = draw.normal(size=(1, 3, 4, 4, 8)).astype(np.float32), draw.normal(size=(1, 3, 4, 8, 4)).astype(np.float32)
    whole = migrate.InFlightSample(
        id=SampleId(0, 0),
        version=0,
        prompt_ids=np.arange(9, dtype=np.int32),
        out_ids=np.arange(9, dtype=np.int32),
        logprobs=np.zeros(9, np.float32),
        max_new_tokens=8,
        kv_len=17,
        page_size=8,
        k_pages=k,
        v_pages=v,
    )
    again = migrate.joined(migrate.parted(whole, 2))
    assert set(again.pages) == {"k", "v"} and again.n_pages == 3
    np.testing.assert_array_equal(again.k_pages, k)
    np.testing.assert_array_equal(again.v_pages, v)
