"""An in-flight sample with pages of random KV."""

import numpy as np

from dora_jax.rollout.migrate import InFlightSample
from dora_jax.types import SampleId


def request(kv_len=11, page_size=4, layers=2, heads=2, dim=8):
    rng = np.random.default_rng(0)
    pages = -(-kv_len // page_size)
    return InFlightSample(
        id=SampleId(1, 2),
        version=3,
        prompt_ids=np.arange(7, dtype=np.int32),
        max_new_tokens=9,
        out_ids=np.arange(kv_len - 6, dtype=np.int32),
        logprobs=np.zeros(kv_len - 6, np.float32),
        kv_len=kv_len,
        page_size=page_size,
        k_pages=rng.normal(size=(layers, pages, heads, dim, page_size)).astype(np.float32),
        v_pages=rng.normal(size=(layers, pages, heads, page_size, dim)).astype(np.float32),
    )
