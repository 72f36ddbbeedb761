"""Named points at which a test has something break, at the Nth pass: DORA_FAULT=NAME:N. At those of POINTS the process
dies as if the power had failed; at those of FAULTS it goes on.

Consumes one environment variable, produces nothing; without it a point is one comparison. Law: the two tuples name all
there are.
"""

from __future__ import annotations

import os
import signal

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

_name, _at, _passes = "", 0, 0


def point(name: str) -> None:
    """Dies here, if this is the point and the pass."""
    if armed(name):
        os.kill(os.getpid(), signal.SIGKILL)


def armed(name: str) -> bool:
    """True at the pass at which the process is to die; for a point that has something to break first."""
    global _passes
    if name != _name:
        return False
    _passes += 1
    return _passes == _at


def arm(spec: str) -> None:
    """NAME:N, or nothing."""
    global _name, _at
    _name, _, number = spec.partition(":")
    if _name and _name not in POINTS + FAULTS:
        raise ValueError(f"DORA_FAULT: {_name!r} is no fault point; there are {', '.join(POINTS + FAULTS)}")
    _at = int(number or 0)


arm(os.environ.get("DORA_FAULT", ""))
