"""What a checkpoint must be to be believed: its manifest, and the digests of its save."""

import builtins
import errno
import random
import shutil
import subprocess
import sys

import pytest

from dora_jax.trainer import checkpoint, manifest
from tests.fakes.checkpoints import (
    adopting,
    assert_equal,
    damaged,
    files_of,
    flipped,
    host,
    killed_before_its_manifest,
    save,
    small,
    store_of,
    tree_on,
)


def test_a_step_killed_before_its_manifest_is_adopted_on_another_mesh_where_its_digests_agree(tmp_path):
    digests = killed_before_its_manifest(tmp_path, tree_on(4))
    (tmp_path / "8.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "9").mkdir()
    again, other = adopting(tmp_path), tree_on(2)
    assert again.unsealed() == [4] and again.steps() == [] and checkpoint.latest(tmp_path) is None
    assert {path.name for path in tmp_path.iterdir()} == {"4"}
    for wrong in ({"params": 1}, {"opt_state": 1}, {"rl_state": 1}):
        with pytest.raises(checkpoint.UnusableCheckpoint, match=f"{next(iter(wrong))} came back with other values"):
            again.adopt(4, other.params, other.state.opt_state, digests._replace(**wrong))
    assert again.unsealed() == [4]
    again.adopt(4, other.params, other.state.opt_state, digests)
    assert again.unsealed() == [] and again.latest(full=True) == 4
    save(again, other, 5)
    again.close()


def test_half_a_manifest_that_a_killed_seal_has_left_is_no_file_of_the_step(tmp_path):
    root = tmp_path / "4"
    root.mkdir()
    (root / "params").write_bytes(b"weights")
    for name in ("manifest.json.part", ".manifest.json.partial"):  # an older dora_jax, this one
        (root / name).write_text("half")
    manifest.write(root)
    assert list(manifest.listing(root)) == ["params"] and manifest.fault(root, full=True) is None


def test_a_step_without_a_manifest_that_nobody_adopts_is_set_aside_and_one_in_part_too(tmp_path):
    killed_before_its_manifest(tmp_path, small())
    (tmp_path / "6" / "params").mkdir(parents=True)
    (tmp_path / "6" / "params" / "d").write_bytes(b"weights")
    store = store_of(tmp_path, notes := [])
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["4.unproved", "6.broken"] and len(notes) == 2
    assert store.aside() == ["4.unproved", "6.broken"]
    save(store, small(), 4)
    store.close()
    assert checkpoint.latest(tmp_path, full=True) == 4


DAMAGES = {
    "flip in opt_state": lambda root: flipped(root, "opt_state"),
    "flip in params": lambda root: flipped(root, "params"),
    "empty rl_state": lambda root: (root / "rl_state/metadata").write_text(""),
    "another rl_state": lambda root: (root / "rl_state/metadata").write_text('{"next_group_id": 41}'),
    "no metrics": lambda root: (root / "metrics/metrics").write_text('{"reward/mean": 0.'),
    "other metrics": lambda root: (root / "metrics/metrics").write_text('{"reward/mean": 0.6}'),
    "no object": lambda root: (root / "rl_state/metadata").write_text("[" * 100_000),
    "empty metadata": lambda root: (root / "params/_METADATA").write_text(""),
    "no params": lambda root: shutil.rmtree(root / "params/d"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_step_without_a_manifest_that_is_damaged_is_never_adopted_nor_raises_what_libraries_raise(tmp_path, damage):
    tree = small()
    digests = killed_before_its_manifest(tmp_path, tree)
    DAMAGES[damage](tmp_path / "4")
    store = adopting(tmp_path)
    with pytest.raises(checkpoint.UnusableCheckpoint) as refused:
        store.adopt(4, tree.params, tree.state.opt_state, digests)
    assert 10 < len(str(refused.value)) < 400 and "\n" not in str(refused.value)
    assert store.unsealed() == [4] and store.steps() == []
    store.close()


def test_a_restore_checks_every_byte_and_the_digests_of_the_save(tmp_path):
    store, tree = store_of(tmp_path, keep=3), small()
    for number in (1, 2):
        save(store, small(number), number)
        store.wait()
    saves = dict(store.take_saves())
    like = tree.params, tree.state.opt_state
    assert_equal(store.restore(2, *like, saves[2]).params, small(2).params)
    with pytest.raises(checkpoint.UnusableCheckpoint, match="params and opt_state and rl_state came back with other"):
        store.restore(2, *like, saves[1])
    store.restore(2, *like, checkpoint.Digests(0, 0, 0))  # of an older format: not known
    flipped(tmp_path / "2", "params")
    with pytest.raises(checkpoint.UnusableCheckpoint, match="checksum"):
        store.restore(2, *like, saves[2])
    store.close()


def test_a_machine_without_memory_is_no_fault_of_the_checkpoint(tmp_path, monkeypatch):
    store, tree = store_of(tmp_path), small()
    save(store, tree, 1)
    store.wait()

    def no_memory(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(checkpoint, "restore", no_memory)
    with pytest.raises(MemoryError):
        store.restore(1, tree.params, tree.state.opt_state)
    store.close()


def test_a_writer_steps_over_what_is_broken_and_says_so(tmp_path):
    store = store_of(tmp_path, keep=3)
    for number in (1, 2, 3):
        save(store, small(number), number)
    store.close()
    (tmp_path / "2" / "manifest.json").write_text('{"step": 2}')
    notes = []
    again = store_of(tmp_path, notes, keep=3)
    assert again.steps() == [1, 3] and len(notes) == 1 and "manifest" in notes[0]
    again.set_aside(3, "broken")
    save(again, small(2), 2)
    again.close()
    assert checkpoint.latest(tmp_path, full=True) == 2
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {"1", "2", "2.broken", "3.broken"}


@pytest.mark.slow
def test_500_faults_are_noticed_or_proved_harmless(tmp_path):
    """Every file, the manifest too; what verifies after a fault restores to the same bits."""
    store = store_of(tmp_path / "good", keep=3)
    for number in (1, 2):
        save(store, small(number), number)
    store.close()
    want = host(small(2).params)
    draw, noticed, harmless = random.Random(0), 0, 0
    root = tmp_path / "good"
    files = files_of(root / "2")
    for i in range(500):
        path = draw.choice(files)
        content = path.read_bytes()
        damaged(path, ("flip", "flip", "truncate", "missing")[i % 4], draw)
        fault = checkpoint.verify(root, 2, full=True)
        if fault is None:
            harmless += 1
            assert_equal(checkpoint.read_arrays(root, 2, "params"), want)
        else:
            noticed += 1
            assert len(fault) > 10 and checkpoint.latest(root, full=True) == 1
        path.write_bytes(content)
    assert noticed > 480, (noticed, harmless)


def test_what_a_fallback_undoes_makes_room(tmp_path):
    store = store_of(tmp_path, notes := [], keep=3)
    for number in (1, 2, 3):
        save(store, small(number), number)
    store.wait()
    store.undo_after(1)
    save(store, small(9), 2)
    store.close()
    assert store.steps() == [1, 2] and len(notes) == 2
    assert_equal(checkpoint.read_arrays(tmp_path, 2, "params"), host(small(9).params))


ABANDONED = """
import gc
from dora_jax.trainer import checkpoint
class Read:
    def __del__(self):
        raise Exception("Encountered error while reading array index: (slice(0, 64, 1),). See full TensorStore details")
Read()
gc.collect()
"""


def test_reads_that_orbax_abandons_beside_an_unreadable_piece_print_no_trace():
    done = subprocess.run([sys.executable, "-c", ABANDONED], capture_output=True, text=True, check=True)
    assert "reading array index" not in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("unreadable", ["d", "manifest.json"])
def test_a_step_that_the_disk_does_not_read_is_unusable_and_not_the_end_of_the_start(tmp_path, monkeypatch, unreadable):
    store, trainer = store_of(tmp_path), small()
    save(store, trainer, 4)
    store.wait()
    opened = builtins.open

    def fails(name):
        if unreadable in (manifest.Path(name).name, manifest.Path(name).parent.name):
            raise OSError(errno.EIO, "Input/output error", str(name))

    monkeypatch.setattr(
        manifest.Path, "open", lambda path, *how, **named: (fails(path), opened(path, *how, **named))[1]
    )
    with pytest.raises(checkpoint.UnusableCheckpoint, match="cannot be read: Input/output error"):
        store.restore(4, trainer.params, trainer.state.opt_state)
    monkeypatch.undo()
    store.close()


def test_a_file_with_the_name_of_a_step_to_come_makes_room_for_it(tmp_path):
    (tmp_path / "4").write_bytes(b"no step")
    store = store_of(tmp_path, notes := [])
    assert store.aside() == ["4.broken"] and "4 is a file, no checkpoint, and is moved aside" in notes
    save(store, small(), 4)
    store.wait()
    assert store.latest(full=True) == 4
    store.close()
