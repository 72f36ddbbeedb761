"""On what the gap is measured where a step has no group of its base."""

import numpy as np
import pytest

from dora_jax.runtime.training.trainer_worker import MismatchProbe
from dora_jax.types import Sample, SampleId, ScoredGroup, Span


def group(version, *spans):
    sample = Sample(
        id=SampleId(0, 0),
        prompt_ids=np.zeros(1, np.int32),
        out_ids=np.zeros(4, np.int32),
        logprobs=np.zeros(4, np.float32),
        mask=np.ones(4, bool),
        spans=tuple(Span(version=v, start=a, stop=b) for v, a, b in spans or [(version, 0, 4)]),
        finish="stop",
    )
    return ScoredGroup(group_id=0, version=version, samples=(sample,), rewards=np.zeros(1, np.float32), parts={})


@pytest.fixture
def gap():
    gap = MismatchProbe(lambda group, version, weights: (group.version, version, weights))
    gap.keep(4, "of 4")
    return gap


def test_a_group_of_the_version_before_is_measured_under_its_own_weights(gap):
    assert gap.among([group(3), group(4)], base=5) == {"probe": (4, 4, "of 4")}


def test_a_sample_that_went_on_under_the_version_before_will_do(gap):
    assert gap.among([group(3, (3, 0, 2), (4, 2, 4))], base=5) == {"probe": (3, 4, "of 4")}


def test_a_group_of_the_base_needs_no_probe(gap):
    assert gap.among([group(4), group(5)], base=5) == {}


def test_other_weights_than_those_of_the_version_before_never_compare(gap):
    assert gap.among([group(4)], base=6) == {}  # version 5 was never kept
    assert gap.among([group(3)], base=5) == {}  # nobody sampled by version 4


def test_nothing_is_measured_where_nothing_is_wanted():
    gap = MismatchProbe(None)
    assert not gap.wanted and gap.among([group(4)], base=5) == {}
