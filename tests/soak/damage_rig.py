"""The resume of a workdir as the command makes it, in this process, up to the moment at which the run's loop would
begin.

Consumes the command line of a run; produces `Resumed`, or the sentence with which it is refused, or a trace. Everything
is what the command runs - command line, journal, checkpoints, recovery, steps made again, readers of the run's files -
but two things: the trainer's compiled programs serve case after case, and there are no engines.
"""

from __future__ import annotations

import copy
import dataclasses
import queue
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from absl import flags as absl_flags

from dora_jax.base import exits
from dora_jax.base.metrics import Writer
from dora_jax.cli import flags
from dora_jax.config import ConfigError, RunError
from dora_jax.orchestrate import lending
from dora_jax.runtime import job, local_backend
from dora_jax.runtime.journal import resume
from dora_jax.runtime.local_backend import LocalBackend, RunContext
from tests.fakes.virtual_workdir import Quiet
from tests.soak.damage_truth import Resumed, batch_of, hashes, lends_always


class _Reached(BaseException):
    """The loop would begin now."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    resumed: Resumed | None = None
    refusal: str = ""
    trace: str = ""


class Rig:
    """`command`: what follows the program's name, without --workdir."""

    def __init__(self, command: Sequence[str]):
        self._command = command
        self._parts: RunContext | None = None
        self._trainer: Any = None
        self._first: Any = None  # params and optimizer state of version 0, on the host
        self._quiet = Quiet()
        self._remade: dict[int, Any] = {}
        self._journals: list[Any] = []
        self.after_begin: Callable[[Any], None] = lambda trainer: None  # a planted fault, for the judge to find
        self._install()

    @property
    def params(self) -> Any:
        """What the trainer holds after a resume."""
        return self._trainer.params

    def resume(self, workdir: Path) -> Outcome:
        self._quiet, self._remade, self._journals = Quiet(), {}, []
        argv = ["dora_jax.train", *self._command, f"--workdir={workdir}"]
        try:
            asked = flags.parse(argv, "train", absl_flags.FlagValues())
            flags.record(asked)
            job.train(asked.config, asked.workdir)
        except _Reached:
            return Outcome(resumed=self._resumed)
        except ConfigError as error:
            return self._refused(*error.problems)
        except exits.Stop as error:
            return self._refused(str(error))
        except Exception as error:
            sentence = str(error) if isinstance(error, RunError) else exits.refusal(error)
            if sentence is not None:
                return self._refused(sentence)
            return Outcome(trace="".join(traceback.format_exception(error)))
        finally:
            for journal in self._journals:
                journal.close()
        return Outcome(trace="the run ended before its loop")

    def _refused(self, *sentences: str) -> Outcome:
        text = " | ".join(sentences)
        return Outcome(refusal=text) if "\n" not in text else Outcome(trace=f"a refusal of several lines: {text}")

    # ------------------------------------------------------------ private

    def _install(self) -> None:
        new_trainer, trainer_side, open_journal = (
            local_backend.new_trainer,
            LocalBackend.trainer_side,
            resume.open_journal,
        )

        def kept_trainer(*args: Any) -> Any:
            if self._trainer is None:
                self._trainer = new_trainer(*args)
                self._first = jax.tree.map(np.asarray, self._trainer.state)
            first = jax.tree.map(np.array, self._first)
            self._trainer.load(first.params, first.opt_state, 0)
            return self._trainer

        def side_with_pack(backend: LocalBackend) -> Any:
            side = trainer_side(backend)

            def pack(groups: Any, base: int) -> Any:
                self._remade[base] = batch_of(groups)
                return side.pack(groups, base)

            return dataclasses.replace(side, pack=pack)

        def kept_parts(config: Any, workdir: Path, writer: Writer) -> RunContext:
            if self._parts is None:
                self._parts = RunContext(config, workdir)
                self._parts.scorer.close()
                self._parts.scorer = cast(Any, Quiet())
            parts = copy.copy(self._parts)
            parts.config, parts.workdir, parts.outbox = config, workdir, queue.SimpleQueue()
            return parts

        def kept_journal(*args: Any, **named: Any) -> Any:
            journal = open_journal(*args, **named)
            self._journals += [journal] if journal is not None else []
            return journal

        def stages(
            parts: RunContext, backend: Any, writer: Writer, orchestrator: Any, guard: Any, backing: Any, *rest: Any
        ) -> Any:
            self.after_begin(self._trainer)
            stored = {version: hashes(backend.weights.get(version, None)) for version in backend.weights.versions}
            self._resumed = Resumed.of(self._trainer, backing.begun, stored, self._remade, self._quiet.notes)
            return run_stages(parts, backend, writer, orchestrator, guard, backing, *rest)

        def loop(*args: Any) -> Any:
            raise _Reached

        run_stages = job.run_stages
        patched: list[tuple[Any, str, Any]] = [
            (local_backend, "new_trainer", kept_trainer),
            (LocalBackend, "trainer_side", side_with_pack),
            (LocalBackend, "instances", lambda backend: []),
            (LocalBackend, "ready", lambda backend, instances, trainer: []),
            (resume, "open_journal", kept_journal),
            (job, "opened", kept_parts),
            (job, "Writer", lambda workdir, others=(): Writer(workdir, cast(Any, self._quiet), others)),
            (job, "run_stages", stages),
            (job, "run", loop),
            (lending, "worth_lending", lends_always),
        ]
        for owner, name, planted in patched:
            setattr(owner, name, planted)
