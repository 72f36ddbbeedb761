"""Who may read where a run's controller is."""

import os

from dora_jax.base import state_files
from dora_jax.runtime.cluster.launch_process import run_of_token
from dora_jax.runtime.cluster.run_registry import ROSTER, RunRegistry


def test_only_its_owner_reads_the_key_of_the_authority(tmp_path):
    old = os.umask(0)
    try:
        RunRegistry(str(tmp_path)).announce("127.0.0.1:9")
        assert (tmp_path / ROSTER).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(old)


def test_what_a_version_with_a_token_has_left_is_known_and_of_no_use(tmp_path):
    """The launcher finds its processes by the run's name, and their gangs end, as those of other code do."""
    gangs = {"trainer": [3, [7, 8]]}
    left = {"token": "ab" * 32, "address": "127.0.0.1:9", "build": "build", "gangs": gangs}
    (tmp_path / ROSTER).write_bytes(state_files.encode(left, 2))
    registry = RunRegistry(str(tmp_path), "build")
    assert not registry.fits and registry.left["trainer"].epoch == 3
    assert registry.authority.run == run_of_token("ab" * 32)
    registry.announce("127.0.0.1:10")
    assert b"ab" * 32 not in (tmp_path / ROSTER).read_bytes() and RunRegistry(str(tmp_path), "build").fits
