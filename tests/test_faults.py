"""Where the fault points strike: what is done and what is not when a run passes one, and that it dies there."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from dora_jax.buffer.pack import MemoryGroupStore
from dora_jax.config import CheckpointSection
from dora_jax.orchestrate import events as ev
from dora_jax.runtime.common.worker import Finished, StepDone
from dora_jax.runtime.instances.rollout_worker import EngineWorker
from dora_jax.runtime.training.trainer_worker import StreamingTrainerWorker
from dora_jax.trainer.checkpoint import Checkpoints
from dora_jax.types import Prompt, SampleId, ScoredGroup
from tests.fakes import faults
from tests.fakes.coordinator_world import SECTION, SlowEngine, Weights
from tests.fakes.journaled_run import STEPS, Run


def python(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


RENAMES = """
import os, sys
from tests.fakes import faults
faults.arm(os.environ["DORA_FAULT"])
for i in range(5):
    open(f"{sys.argv[0]}/a.part", "w").close()
    os.rename(f"{sys.argv[0]}/a.part", f"{sys.argv[0]}/a.log")
    print(i, flush=True)
"""


def test_a_point_kills_at_its_pass_and_no_other(tmp_path):
    code = f"import sys; sys.argv = [{str(tmp_path)!r}]\n{RENAMES}"
    out = python(code, DORA_FAULT="journal.half_segment:3")
    assert out.returncode == -signal.SIGKILL and out.stdout.split() == ["0", "1"], out.stderr
    assert (tmp_path / "a.part").exists()
    assert python(code, DORA_FAULT="journal.after_segment:1").returncode == 0
    with pytest.raises(ValueError, match="'nowhere' is no fault point; there are journal.before_commit, "):
        faults.arm("nowhere:1")


@pytest.mark.parametrize("name", faults.POINTS + faults.FAULTS)
def test_each_point_stands_around_what_the_package_has_and_leaves_it_as_it_was(name):
    owners = [(owner, attribute) for owner, attribute, _ in faults.seams(name, bool)]
    before = [getattr(owner, attribute) for owner, attribute in owners]
    with faults.wrap(name, bool):
        assert owners and all(getattr(o, a) is not b for (o, a), b in zip(owners, before, strict=True))
    assert [getattr(owner, attribute) for owner, attribute in owners] == before


@contextlib.contextmanager
def passes(names, what):
    """The passes of these points: (name, what())."""
    seen = []
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(faults.wrap(name, lambda name=name: seen.append((name, what()))))
        yield seen


def test_the_points_of_the_journal(tmp_path):
    """What is in the files: nothing of a batch before its commit, all of it behind; half of a segment under its temporary
    name, then all of it."""

    def files():
        sizes = Counter()
        for path in tmp_path.glob("0*"):
            sizes[path.suffix] += path.stat().st_size
        return sizes

    names = ["before_commit", "half_commit", "after_commit", "half_segment", "after_segment"]
    with passes([f"journal.{name}" for name in names], files) as seen:
        assert Run(tmp_path).incarnation().ok
    order = [name.removeprefix("journal.") for name, _ in seen]
    assert order[:2] == ["half_segment", "after_segment"] and {"before_commit", "half_commit"} <= set(order)
    commits = [(name, files) for name, files in seen if name.endswith("_commit")]
    for (before, had), (half, _), (after, has) in zip(commits, commits[1:], commits[2:], strict=False):
        if before == "journal.before_commit" and half == "journal.half_commit":
            assert after == "journal.after_commit" and has[".log"] > had[".log"]
    for name, there in seen:
        assert (".part" in there) == (name == "journal.half_segment") or name.endswith("_commit")


def test_the_points_of_a_step(tmp_path):
    """Its weights have changed behind it, and its version is in the store before its fact."""
    run = Run(tmp_path)
    names = ["trainer.before_step", "trainer.after_step", "trainer.after_put"]
    with passes(names, lambda: (len(run.trained), max(run.weights.held))) as seen:
        assert run.incarnation().ok
    assert [name for name, _ in seen] == names * STEPS
    assert [held for _, (_, held) in seen[2::3]] == list(range(1, STEPS + 1))
    assert all(held == seen[i - 1][1][1] + 1 for i, (_, (_, held)) in enumerate(seen) if i % 3 == 2)


class Batches:
    params = 0

    def step(self, batches):
        return {"batches": float(len(list(batches)))}


def test_the_point_between_the_parts_of_a_step():
    groups, outbox = MemoryGroupStore(), queue.SimpleQueue()
    for i in range(3):
        groups.put(ScoredGroup(group_id=i, version=0, samples=(), rewards=np.zeros(0, np.float32), parts={}))
    packed = []

    def pack(part, base):
        packed.extend(group.group_id for group in part)
        return [part]

    worker = StreamingTrainerWorker(Batches(), pack, groups, Weights(), 1, outbox, groups_per_step=3)
    with passes(["trainer.before_step", "trainer.in_step", "trainer.after_step"], packed.copy) as seen:
        for ids in ((0,), (1,), (2,)):
            worker.post(worker.train, ids, 0)
        assert worker.turn()
    assert isinstance(outbox.get_nowait(), StepDone)
    assert [(name.removeprefix("trainer."), there) for name, there in seen] == [
        ("before_step", []), ("in_step", [0]), ("in_step", [0, 1]), ("after_step", [0, 1, 2]),
    ]  # fmt: skip


def test_the_points_of_a_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointSection(keep=1))

    def there():
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*manifest.json*"))

    names = ["started", "before_manifest", "half_manifest", "after_manifest"]
    with passes([f"checkpoint.{name}" for name in names], there) as seen:
        for step in (1, 2):
            checkpoints.save(step, {"w": jnp.ones(2)}, {"m": jnp.ones(2)}, {}, {})
            checkpoints.wait()
    checkpoints.close()
    assert [name.removeprefix("checkpoint.") for name, _ in seen] == names * 2
    first = ["1/manifest.json"]
    assert [files for _, files in seen] == [
        [], [], ["1/.manifest.json.partial"], first, first, first, [*first, "2/.manifest.json.partial"],
        [*first, "2/manifest.json"],
    ]  # fmt: skip
    assert there() == ["2/manifest.json"], "the older one is deleted behind the last point"


@pytest.mark.parametrize("name", faults.FAULTS)
def test_log_probs_are_spoilt_from_the_pass_on(name):
    """Either one sample has log-probs that are no numbers, or an engine's are off from one sample on."""
    outbox = queue.SimpleQueue()
    worker = EngineWorker(0, SlowEngine(SECTION, version_in=int), Weights(), outbox, 0.0, report_s=0.0)
    ids = np.arange(3, dtype=np.int32)
    with faults.wrap(name, faults.Pass(2)):
        worker.execute(ev.LoadWeights(instance=0, version=0))
        for i in range(4):
            prompt = Prompt(group_id=i, task="", uid="", text="", token_ids=ids, answer=None, max_new_tokens=4 + 8 * i)
            worker.execute(ev.Start(ids=(SampleId(i, 0),), instance=0, version=0), prompt)
        while worker.busy:
            worker.work()
    ends = [item.sample for item in iter_of(outbox) if isinstance(item, Finished)]
    assert len(ends) == 4
    # the oracle's own are between -2 and -1
    spoilt = [not bool((sample.logprobs >= -2).all()) for sample in ends]
    assert spoilt == ([False, True, False, False] if name == "rollout.nan" else [False, True, True, True])


def iter_of(outbox):
    while not outbox.empty():
        yield outbox.get_nowait()
