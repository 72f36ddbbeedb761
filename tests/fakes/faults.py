"""Named points at which a test has a run break, at the Nth pass. The seams of the package are wrapped where it runs:

    DORA_FAULT=trainer.after_put:3 python -m tests.fakes.faults dora_jax.train --config=... --workdir=...

At those of POINTS the process dies as if the power had failed; at those of FAULTS it goes on. The processes of a gang
are armed too where `cluster.launcher` is `tests.fakes.faults.ArmedLauncher`.
"""

import contextlib
import dataclasses
import functools
import os
import runpy
import signal
import sys
from pathlib import Path
from unittest import mock

import numpy as np

from dora_jax.runtime.cluster.launch_process import ProcessLauncher

POINTS = (
    "journal.before_commit",  # facts are reported, nothing is written
    "journal.half_commit",  # part of a record is in the file
    "journal.after_commit",  # facts are durable, the orchestrator has not seen them
    "journal.half_segment",  # a new segment is written under its temporary name
    "journal.after_segment",  # a new segment stands, older ones are not dropped
    "rollout.verifying",  # drafts are on the device, and nothing of them has come back
    "trainer.before_step",  # a batch was taken
    "trainer.in_step",  # a part of a step is trained, the next has not come
    "trainer.after_step",  # the weights have changed, and nothing has been reported
    "trainer.after_put",  # the version can be loaded, its fact is not written
    "chips.lent",  # the trainer's devices hold an instance's weights, and the instance is not up
    "chips.returned",  # the samples of a lent instance are out, and the instance is not down
    "checkpoint.started",  # being written in the background
    "checkpoint.before_manifest",  # all files are there, nothing vouches for them
    "checkpoint.half_manifest",  # the manifest stands under its temporary name
    "checkpoint.after_manifest",  # the step verifies, older ones are not deleted
    "resume.replaying",  # a killed run is killed again while it makes a step again
)
FAULTS = (
    "rollout.nan",  # the log-probs of a sample that has ended become NaN
    "rollout.skew",  # the log-probs of an engine's samples are off, from one that has ended on
)
SKEW = 1.0  # nats a token


class ArmedLauncher(ProcessLauncher):
    arguments = ("-m", "tests.fakes.faults", "dora_jax.runtime.cluster.process_main")


class Pass:
    """True at the Nth call."""

    def __init__(self, number):
        self._left = number

    def __call__(self):
        self._left -= 1
        return self._left == 0


def arm(spec):
    """NAME:N, or nothing."""
    name, _, number = spec.partition(":")
    if name:
        wrap(name, Pass(int(number)))


def wrap(name, hit):
    """Call `hit` at each pass of this point; where it says True the process dies, or the sample is spoilt. Return what
    undoes it."""
    if name not in POINTS + FAULTS:
        raise ValueError(f"DORA_FAULT: {name!r} is no fault point; there are {', '.join(POINTS + FAULTS)}")
    undo = contextlib.ExitStack()
    for owner, attribute, how in seams(name, hit):
        undo.enter_context(mock.patch.object(owner, attribute, around(getattr(owner, attribute), how)))
    return undo


def around(real, how):
    """A function, since a partial is no method of the object that it is looked up on."""
    return lambda *args, **named: how(real, *args, **named)


def pass_(hit):
    if hit():
        os.kill(os.getpid(), signal.SIGKILL)


def before(hit, when=lambda *args, **named: True):
    def how(real, *args, **named):
        if when(*args, **named):
            pass_(hit)
        return real(*args, **named)

    return how


def after(hit, when=lambda *args, **named: True):
    def how(real, *args, **named):
        result = real(*args, **named)
        if when(*args, **named):
            pass_(hit)
        return result

    return how


def within(inner, how):
    """While the method runs, `how` stands around the attribute of (owner, name) = inner(*its arguments)."""

    def outer(real, *args, **named):
        owner, name = inner(*args, **named)
        with mock.patch.object(owner, name, around(getattr(owner, name), how)):
            return real(*args, **named)

    return outer


def seams(name, hit):
    """(owner, attribute, what stands around it) of each place where this point is passed."""
    import orbax.checkpoint as ocp

    from dora_jax.rollout.device import Device
    from dora_jax.runtime.cluster.remote_rollout import RemoteInstance
    from dora_jax.runtime.instances.instance_proxy import RETURNED, InstanceProxy
    from dora_jax.runtime.instances.rollout_worker import EngineWorker
    from dora_jax.runtime.instances.supervised_worker import LocalInstance
    from dora_jax.runtime.journal import resume
    from dora_jax.runtime.journal.event_log import EventLog
    from dora_jax.runtime.journal.log_stores import FileLogStore
    from dora_jax.runtime.training.trainer_worker import StreamingTrainerWorker, TrainerWorker
    from dora_jax.trainer import checkpoint
    from dora_jax.trainer.checkpoint import Checkpoints

    match name:
        case "journal.before_commit":  # the batch of a new version first waits for what was written before it
            yield EventLog, "wait_synced", before(hit)
            yield EventLog, "commit", before(hit, lambda log, sync=False, urgent=None: urgent is False)
        case "journal.after_commit":  # a commit that says nothing of urgency is of no batch
            yield EventLog, "commit", after(hit, lambda log, sync=False, urgent=None: urgent is not None)
        case "journal.half_commit":
            yield FileLogStore, "append", functools.partial(append_half, hit)
        case "journal.half_segment":
            yield os, "rename", before(hit, lambda old, new: (Path(old).suffix, Path(new).suffix) == (".part", ".log"))
        case "journal.after_segment":
            yield FileLogStore, "begin", after(hit)
        case "rollout.verifying":
            yield Device, "verify", after(hit)
        case "trainer.before_step":
            yield TrainerWorker, "take_groups", after(hit, first_of_step)
        case "trainer.in_step":
            yield StreamingTrainerWorker, "batches", functools.partial(in_parts, hit)
        case "trainer.after_step":
            yield TrainerWorker, "publish", before(hit)
        case "trainer.after_put":
            yield TrainerWorker, "publish", within(lambda worker, *args: (worker.weights, "put"), after(hit))
        case "chips.lent":
            yield InstanceProxy, "incarnation_ready", before(hit, lambda instance, *args: instance.on_demand)
        case "chips.returned":
            yield (
                LocalInstance,
                "incarnation_down",
                before(hit, lambda instance, worker, number, reason, *last: reason == RETURNED),
            )
            yield RemoteInstance, "gang_down", before(hit, lambda instance, *args: instance.on_demand)
        case "checkpoint.started":
            yield Checkpoints, "save", after_save(hit)
        case "checkpoint.before_manifest":
            waited = within(lambda checkpoints: (ocp.CheckpointManager, "wait_until_finished"), after(hit))
            yield Checkpoints, "seal", waited
        case "checkpoint.half_manifest":
            yield os, "replace", before(hit, lambda old, new: Path(new).name == "manifest.json")
        case "checkpoint.after_manifest":
            yield Checkpoints, "sealed", within(lambda checkpoints: (checkpoint, "to_keep"), before(hit))
        case "resume.replaying":
            yield resume, "make_again", within(lambda found, starts, *args: (starts.trainer, "step"), after(hit))
        case "rollout.nan" | "rollout.skew":
            yield EngineWorker, "work", functools.partial(spoil, hit, name)


def append_half(hit, real, store, data):
    if hit():
        real(store, data[: len(data) // 2 + 1])
        os.kill(os.getpid(), signal.SIGKILL)
    real(store, data)


def first_of_step(worker, group_ids, base):
    """Later parts of a step have its base."""
    first, worker.base_before = getattr(worker, "base_before", None) != base, base
    return first


def in_parts(hit, real, worker, part, base, taken):
    pack = worker.pack

    def packed(part, base):
        yield from pack(part, base)
        if len(taken) < worker.groups_per_step:
            pass_(hit)

    with mock.patch.object(worker, "pack", packed):
        yield from real(worker, part, base, taken)


def after_save(hit):
    def how(real, *args):
        started = real(*args)
        if started:
            pass_(hit)
        return started

    return how


def spoil(hit, name, real, worker):
    tick = worker.engine.tick

    def spoilt(sample):
        off = 0.0
        if name == "rollout.nan":
            off = np.nan if hit() else 0.0
        elif hit():
            worker.skewed = True
        off = SKEW if getattr(worker, "skewed", False) else off
        return dataclasses.replace(sample, logprobs=sample.logprobs - np.float32(off)) if off else sample

    def ticked():
        result = tick()
        return dataclasses.replace(result, finished=tuple(map(spoilt, result.finished)))

    with mock.patch.object(worker.engine, "tick", ticked):
        real(worker)


if __name__ == "__main__":
    arm(os.environ.get("DORA_FAULT", ""))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
