"""Who may read where a run's controller is."""

import os

from dora_jax.runtime.cluster.run_registry import ROSTER, RunRegistry


def test_only_its_owner_reads_the_token(tmp_path):
    old = os.umask(0)
    try:
        RunRegistry(str(tmp_path)).announce("127.0.0.1:9")
        assert (tmp_path / ROSTER).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(old)
