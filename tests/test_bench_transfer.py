"""What moves between processes is measured by commands that run: a sample's KV, and a version of the weights."""

import pytest

from dora_jax.bench import transfer

pytestmark = pytest.mark.slow


def test_a_sample_goes_to_another_process_with_its_kv_and_without():
    head, row = transfer.migrate(contexts=(32,), processes=True, rounds=1)
    context, _, *milliseconds = row.split()
    assert head.split()[0] == "context" and context == "32" and float(milliseconds[0]) > 0


def test_a_version_goes_to_an_instance_by_both_wires():
    rows = [line.split() for line in transfer.publish(mib=8, instances=(1,), rounds=1)]
    assert [row[0] for row in rows[-2:]] == ["transfer", "storage"]
