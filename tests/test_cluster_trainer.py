"""The trainer gang behind its stand-in: deaths at any moment, and what is asked of the gang that follows."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dora_jax.config import CheckpointSection, RunError
from dora_jax.models import sharding
from dora_jax.publish import placed
from dora_jax.runtime.cluster import messages
from dora_jax.runtime.cluster.checkpoint_shards import StepFolder
from dora_jax.runtime.cluster.gang import GangListener
from dora_jax.runtime.cluster.gang_supervisor import GangSupervisor
from dora_jax.runtime.cluster.remote_trainer import RemoteCheckpoints, RemoteTrainer, part
from dora_jax.runtime.cluster.run_registry import RunRegistry
from dora_jax.runtime.cluster.weight_publisher import WeightPublisher
from dora_jax.runtime.common.sample_gaps import SampleGap
from dora_jax.runtime.common.sample_log import TokenView
from dora_jax.runtime.journal.object_storage import Objects
from dora_jax.runtime.journal.payload_state import Step
from dora_jax.runtime.journal.records import Published, Saved
from dora_jax.runtime.transfer import slices
from dora_jax.runtime.transfer.transfer_manifest import WireError
from dora_jax.runtime.transfer.weight_distribution import STORAGE, WIRE
from dora_jax.runtime.transfer.weight_storage import StoredWeights
from dora_jax.trainer import manifest
from dora_jax.trainer.checkpoint import Digests
from dora_jax.types import SampleId
from tests.fakes.cluster import LIMITS, FakeLauncher, begin, eventually, scored_group


class Learners(FakeLauncher):
    """Trainer gangs whose weights are the list of what they were trained on; `dies`: calls that a process dies over."""

    def __init__(self, folder, dies=()):
        super().__init__(self._do)
        self.folder, self.dies, self.log = folder, list(dies), []
        self.flips = set()  # (gang's epoch, version) of copies that come out with a flipped bit

    def _do(self, host, what):
        name = type(what).__name__
        trained, begun = host.__dict__.setdefault("trained", []), host.__dict__.setdefault("begun", [])
        rank = host.began.rank
        if rank == 0:
            self.log.append((host.ticket.epoch, name))
        match what:
            case messages.TrainGroups(base=base, groups=groups):
                assert base == len(trained), "steps come in order"
                begun += [g.group_id for g in groups]
            case messages.FinishStep(base=base):
                assert base == len(trained), "steps come in order"
                trained.append(begun.copy())
                begun.clear()
            case messages.RestoreCheckpoint(step=step):
                trained[:] = json.loads((self.folder / str(step) / "trained").read_text())
            case messages.PublishWeights(version=version):
                assert version == len(trained)
                host.__dict__.setdefault("kept", set()).add(version)
            case messages.WriteWeights(version=version):
                assert version in host.kept
        if rank == 1 and name in self.dies:
            self.dies.remove(name)
            host.die()
            return None
        if isinstance(what, messages.FinishStep | messages.ComputeDigest):
            digest = hash(str(trained)) & 0xFFFF
            view = TokenView(id=SampleId(len(trained), 0), advantages=np.ones(2), logprobs=np.zeros(2))
            gap = SampleGap(id=view.id, version=len(trained) - 1, gap=0.01, tokens=2)
            metrics = {"loss": float(len(trained))}
            made = messages.StepFinished(digest=digest, metrics=metrics, views=(view,), gaps=(gap,))
            return made if isinstance(what, messages.FinishStep) else messages.Done(value=digest)
        flipped = isinstance(what, messages.PublishWeights) and (host.ticket.epoch, what.version) in self.flips
        return messages.Done(value=len(trained) ^ 0x40 * flipped)

    def save(self, step, trained):
        """A checkpoint that verifies."""
        path = self.folder / str(step)
        path.mkdir(parents=True)
        (path / "trained").write_text(json.dumps(trained))
        manifest.write(path)


class Rig:
    def __init__(self, tmp_path, dies=(), journaled=True, paths=(STORAGE,)):
        self.launcher = Learners(tmp_path / "checkpoints", dies)
        self.stored = StoredWeights(tmp_path)
        self.stored.clear()
        self.hub, self.notes, self.journal = GangListener("127.0.0.1", RunRegistry()), [], []
        self.steps = StepFolder(self.launcher.folder, self.notes.append)
        self.publisher = WeightPublisher(self.stored, paths, self.notes.append)
        self.journaled = journaled
        self.trainer = RemoteTrainer(
            self.steps,
            lambda v: [s for s in self.journal if s.base >= v],
            self.publisher,
            self.notes.append,
            self._keeper,
        )

    def __enter__(self):
        self.trainer.supervisor.start()
        return self

    def __exit__(self, *error):
        self.trainer.supervisor.close()
        self.publisher.close()
        self.hub.close()

    def step(self, base):
        """Make a step as TrainerWorker does; then the journal has it, as a rule."""
        groups = (scored_group(2 * base), scored_group(2 * base + 1))
        return self.published(base, groups, self.trainer.step(part(groups, base)))

    def step_in_parts(self, base, between=lambda: None):
        """Make a step as StreamingTrainerWorker does; `between`: while the second part is waited for."""
        groups = (scored_group(2 * base), scored_group(2 * base + 1))

        def parts():
            yield from part(groups[:1], base)
            between()
            yield from part(groups[1:], base)

        return self.published(base, groups, self.trainer.step(parts()))

    def published(self, base, groups, metrics):
        copy = self.publisher.put(base + 1, self.trainer.params)
        if self.journaled:
            published = Published(epoch=0, digest=self.trainer.digest(), copy=copy)
            self.journal.append(Step(base=base, groups=groups, published=published))
        return metrics

    def kill(self):
        gang = self.trainer.gang
        self.launcher.gangs["trainer", gang.epoch][0].die()
        eventually(gang.dead.is_set)

    def trained(self):
        """What every process of the newest gang was trained on."""
        hosts = self.launcher.gangs[max(self.launcher.gangs)]
        return [host.trained for host in hosts]

    def _keeper(self, name, **hooks):
        return GangSupervisor(
            self.hub, self.launcher, name, 2, "", begin=begin, notify=self.notes.append, limits=LIMITS, **hooks
        )


def steps(n):
    return [[2 * base, 2 * base + 1] for base in range(n)]


@pytest.mark.parametrize(
    "dies",
    [
        (),
        ("TrainGroups",),
        ("FinishStep",),
        ("PublishWeights",),
        ("WriteWeights",),
        ("TrainGroups", "FinishStep", "PublishWeights"),
    ],
)
def test_each_step_is_made_once_whoever_dies_over_it(tmp_path, dies):
    with Rig(tmp_path, dies) as rig:
        assert [rig.step(base)["loss"] for base in range(3)] == [1.0, 2.0, 3.0]
        assert rig.trained() == [steps(3), steps(3)]
        assert {1, 2, 3} <= set(rig.stored.versions)
        assert list(rig.trainer.take(3)) == [SampleId(3, 0)] and not rig.trainer.take(2), "tokens of the newest step"
        assert len(rig.launcher.gangs) == 1 + len(dies)  # a gang a death


@pytest.mark.parametrize(
    "dies",
    [
        (),
        ("TrainGroups",),
        ("TrainGroups", "TrainGroups", "FinishStep"),
        ("FinishStep", "TrainGroups", "PublishWeights"),
    ],
)
def test_a_step_in_parts_is_made_once_whoever_dies_over_them(tmp_path, dies):
    with Rig(tmp_path, dies) as rig:
        for base in range(3):
            rig.step_in_parts(base)
        assert rig.trained() == [steps(3), steps(3)] and len(rig.launcher.gangs) == 1 + len(dies)


def test_a_trainer_that_is_lost_between_two_parts_is_brought_back_before_the_second_comes(tmp_path):
    def lose():
        rig.kill()
        rig.trainer.catch_up()  # what its worker receives once the new gang is there
        assert [host.begun for host in rig.launcher.gangs["trainer", 2]] == [[4], [4]]

    with Rig(tmp_path) as rig:
        rig.step(0)
        rig.step_in_parts(1)
        rig.step_in_parts(2, between=lose)
        assert rig.trained() == [steps(3), steps(3)]
        again = [name for epoch, name in rig.launcher.log if epoch == 2]
        assert [name for name in again if name in ("TrainGroups", "FinishStep")] == [
            "TrainGroups",
            "FinishStep",
        ] * 2 + ["TrainGroups"] * 2 + ["FinishStep"]


def test_a_lost_trainer_comes_back_from_its_checkpoint_and_the_journal(tmp_path):
    with Rig(tmp_path) as rig:
        for base in range(5):
            rig.step(base)
        rig.launcher.save(3, steps(3))
        rig.kill()
        rig.trainer.catch_up()
        assert rig.trained() == [steps(5), steps(5)]
        assert [name for epoch, name in rig.launcher.log if epoch == 2] == [
            "RestoreCheckpoint",
            *["TrainGroups", "FinishStep"] * 2,
        ]
        assert "the trainer is back at version 5: checkpoint 3, 2 steps made again, 0 remembered" in rig.notes[-1]


def test_versions_that_only_the_lost_trainer_held_are_published_again(tmp_path):
    with Rig(tmp_path, paths=(WIRE, STORAGE)) as rig:
        rig.publisher.put(0, rig.trainer.params)
        for base in range(3):
            rig.step(base)
        eventually(lambda: {*range(4)} <= set(rig.stored.versions))
        for version in (1, 3):
            rig.stored.drop(version)  # as if they had not been written yet
        rig.publisher.drop(0)
        rig.kill()
        rig.trainer.catch_up()
        eventually(lambda: {1, 3} <= set(rig.stored.versions))
        assert [name for epoch, name in rig.launcher.log if epoch == 2 and name == "PublishWeights"] == [
            "PublishWeights"
        ] * 2


def test_a_gang_whose_copy_is_not_the_one_that_was_published_ends_and_another_one_publishes(tmp_path):
    with Rig(tmp_path, paths=(WIRE, STORAGE)) as rig:
        for base in range(2):
            rig.step(base)
        assert [step.published.copy for step in rig.journal] == [1, 2], "the digests that the gang took"
        eventually(lambda: {1, 2} <= set(rig.stored.versions))
        rig.stored.drop(2)
        rig.launcher.flips = {(2, 2)}
        rig.kill()
        rig.trainer.catch_up()
        eventually(lambda: 2 in rig.stored.versions)
        assert rig.trainer.gang.epoch == 3 and rig.publisher.digests[2] == 2
        reason = (
            "its copy of version 2 has the digest 0000000000000042, and the one that was published 0000000000000002"
        )
        assert any(reason in sentence for sentence in rig.notes), rig.notes


def test_a_checkpoint_later_than_a_version_that_only_the_lost_trainer_held_is_no_start(tmp_path):
    with Rig(tmp_path, paths=(WIRE, STORAGE)) as rig:
        for base in range(4):
            rig.step(base)
        eventually(lambda: {*range(1, 5)} <= set(rig.stored.versions))
        rig.stored.drop(2)
        rig.launcher.save(1, steps(1))
        rig.launcher.save(3, steps(3))
        rig.kill()
        rig.trainer.catch_up()
        eventually(lambda: 2 in rig.stored.versions)
        assert "the trainer is back at version 4: checkpoint 1, 3 steps made again" in rig.notes[-1]


def test_a_checkpoint_that_does_not_verify_is_no_start(tmp_path):
    with Rig(tmp_path) as rig:
        for base in range(3):
            rig.step(base)
        rig.launcher.save(2, steps(2))
        (rig.launcher.folder / "2" / "trained").write_text("[[9]]")
        rig.kill()
        rig.step(3)
        assert rig.trained() == [steps(4), steps(4)]


def test_the_step_that_the_journal_does_not_have_yet_is_made_again_too(tmp_path):
    with Rig(tmp_path) as rig:
        rig.step(0)
        rig.journaled = False
        rig.step(1)
        rig.kill()
        rig.trainer.catch_up()
        assert rig.trained() == [steps(2), steps(2)]


def test_without_a_journal_a_lost_trainer_ends_the_run_in_one_sentence(tmp_path):
    with Rig(tmp_path, journaled=False) as rig:
        rig.step(0)
        rig.step(1)
        rig.kill()
        with pytest.raises(RunError, match="step 1 cannot be made again.*journal.on"):
            rig.step(2)


def test_weights_that_come_out_otherwise_are_spoken_of(tmp_path):
    with Rig(tmp_path) as rig:
        rig.step(0)
        rig.step(1)
        rig.journal[0] = dataclasses.replace(rig.journal[0], published=Published(epoch=0, digest=1))
        rig.kill()
        rig.trainer.catch_up()
        assert any("version 1 came out with other weights" in text for text in rig.notes)


def test_processes_that_disagree_end_the_run(tmp_path):
    with Rig(tmp_path) as rig:
        rig.launcher.answer = lambda host, what: (
            messages.StepFinished(digest=host.began.rank, metrics={})
            if isinstance(what, messages.FinishStep)
            else messages.Done(value=0)
        )
        with pytest.raises(RuntimeError, match="disagree over FinishStep"):
            rig.trainer.step(part((scored_group(0),), 0))


def test_a_save_that_a_death_cuts_short_is_reported_and_the_run_goes_on(tmp_path):
    with Rig(tmp_path, dies=("SaveCheckpoint",)) as rig:
        checkpoints = RemoteCheckpoints(rig.steps, CheckpointSection(), rig.trainer, rig.notes.append)
        rig.step(0)
        checkpoints.save(1, None, None, {"cursors": (1, 2)}, {"reward/mean": np.float32(0.5)})
        checkpoints.wait()
        assert any("did not finish with its checkpoint" in text for text in rig.notes)
        rig.step(1)
        checkpoints.save(2, None, None, {}, {})
        checkpoints.close()
        assert (2, "SaveCheckpoint") in rig.launcher.log


def mesh_of(tensor):
    return sharding.make_mesh(jax.devices()[:tensor], 1, 1, tensor)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_stored_weights_come_back_on_another_mesh_and_only_when_whole(tmp_path, scheme):
    stored = StoredWeights(f"{scheme}{tmp_path}")
    stored.clear()
    tree = {
        "embed": np.arange(24, dtype=np.float32).reshape(4, 6),
        "layers": {"w": np.arange(32, dtype=jax.numpy.bfloat16).reshape(2, 4, 4)},
    }
    rows = jax.sharding.NamedSharding(sharding.make_mesh(jax.devices()[:4], 2, 2, 1), P("fsdp"))
    columns = jax.sharding.NamedSharding(mesh_of(2), P(None, "tensor"))
    stored.put(3, slices.offered(jax.device_put(tree, rows)))
    assert stored.versions == ()
    like = {
        "embed": jax.ShapeDtypeStruct((4, 6), np.float32, sharding=columns),
        "layers": {"w": jax.ShapeDtypeStruct((2, 4, 4), jax.numpy.bfloat16, sharding=columns)},
    }
    stored.seal(3)
    assert stored.versions == (3,)
    back = placed(
        stored.get(3, like),
        {"embed": columns, "layers": [{"w": jax.sharding.NamedSharding(mesh_of(2), P("tensor"))}] * 2},
    )
    jax.tree.map(np.testing.assert_array_equal, back, {**tree, "layers": [{"w": w} for w in tree["layers"]["w"]]})
    assert back["layers"][0]["w"].dtype == jax.numpy.bfloat16 and back["embed"].sharding == columns
    other = {"embed": jax.ShapeDtypeStruct((4, 6), jax.numpy.bfloat16, sharding=columns)}
    with pytest.raises(WireError, match=r"bfloat16\[4, 6\] is wanted, and is stored as float32\[4, 6\]"):
        stored.get(3, other)
    stored.drop(3)
    assert stored.versions == ()
    eventually(lambda: not Objects(f"file://{tmp_path}").keys("weights"))


def refusing(rig, params):
    """Gangs that hold these params of checkpoints, whatever the manifest says: step -> digest."""
    answer = rig.launcher.answer

    def checked(host, what):
        match what:
            case (
                messages.RestoreCheckpoint(step=step, params=wanted)
                | messages.CheckCheckpoint(step=step, params=wanted)
            ) if wanted and wanted != params[step]:
                return messages.CallDeclined(error="params came back with other values than were saved")
            case messages.SaveCheckpoint(version=version):
                return Saved(version=version, params=params[version], opt_state=2, rl_state=3)
        return answer(host, what)

    rig.launcher.answer = checked
    return rig


def test_what_a_gang_says_of_a_save_is_taken_once(tmp_path):
    rig = refusing(Rig(tmp_path), {1: 11})
    with rig:
        store = RemoteCheckpoints(rig.steps, CheckpointSection(), rig.trainer, rig.notes.append)
        rig.step(0)
        store.save(1, None, None, {"cursors": (1, 2)}, {})
        assert store.take_saves(wait=True) == [(1, Digests(11, 2, 3))] and store.take_saves(wait=True) == []
        assert rig.trainer.digests == {1: Digests(11, 2, 3)}


def test_a_new_gang_steps_over_a_checkpoint_with_other_digests(tmp_path):
    rig = refusing(Rig(tmp_path), {1: 11, 2: 22})
    with rig:
        for base in range(3):
            rig.step(base)
        rig.launcher.save(1, steps(1))
        rig.launcher.save(2, [["other"], ["weights"]])
        rig.trainer.digests |= {1: Digests(11, 2, 3), 2: Digests(23, 2, 3)}
        rig.kill()
        rig.trainer.catch_up()
        assert rig.trained() == [steps(3)] * 2
        assert "checkpoint 2 cannot be trusted and is stepped over: params came back with other" in " ".join(rig.notes)
