"""Checkpoints as Hugging Face folders while the run goes on: WORKDIR/hf/STEP, `checkpoint.export_hf_every`.

Consumes the steps that are saved; starts `python -m dora_jax.export_hf` for each that is due, one at a time, in a
process of its own, so that neither the step nor the memory of the devices is touched. Laws: a folder is there whole or
not at all; an export that fails is reported, and the run goes on; a rerun makes what is missing of the steps that are
still kept.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dora_jax.runtime.journal.object_storage import Objects, one_line, side_by_side
from dora_jax.runtime.journal.workdir_mirror import url_of
from dora_jax.types import Version

FOLDER = "hf"
LAST_LINE = 300  # characters of what a failed export printed


class HfExports:
    """Used by one thread. `due(step)`: whether this step is to be exported."""

    def __init__(self, workdir: Path, due: Callable[[Version], bool], notify: Callable[[str], None]):
        self._workdir, self._url, self._due, self._notify = workdir, url_of(workdir), due, notify
        self._running: tuple[Version, subprocess.Popen[str]] | None = None
        self._failed: set[Version] = set()

    def poll(self, steps: Sequence[Version]) -> None:
        """Hears of the export under way, and starts the next of these saved steps. Cheap."""
        if self._running is not None and self._running[1].poll() is not None:
            (step, process), self._running = self._running, None
            _, output = process.communicate()
            try:
                if process.returncode:
                    raise OSError((output.strip().splitlines() or [f"exit code {process.returncode}"])[-1][-LAST_LINE:])
                place = self._place(step)
                if self._url:
                    # to the bucket
                    store = Objects(str(self._url))
                    names = [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]
                    side_by_side(lambda name: store.put(f"{FOLDER}/{step}/{name}", (place / name).read_bytes()), names)
                place.rename(self._workdir / FOLDER / str(step))
            except OSError as error:
                self._failed.add(step)
                self._notify(f"step {step} is not exported as a Hugging Face folder: {one_line(error)}")
        waiting = [
            step
            for step in steps
            if self._due(step) and step not in self._failed and not (self._workdir / FOLDER / str(step)).exists()
        ]
        if self._running is None and waiting:
            step = waiting[0]
            place = self._place(step)
            shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
            place.parent.mkdir(exist_ok=True)
            workdir = self._url or self._workdir
            command = ["-m", "dora_jax.export_hf", f"--workdir={workdir}", f"--step={step}", f"--out={place}"]
            process = subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,  # Ctrl-C reaches the run alone
            )
            self._running = step, process

    def finish(self, steps: Sequence[Version]) -> None:
        """Blocks until every saved step that is due is exported, or has failed."""
        self.poll(steps)
        while self._running is not None:
            self._running[1].wait()
            self.poll(steps)

    def close(self) -> None:
        """What is under way is abandoned."""
        if self._running is not None:
            self._running[1].kill()
            self._running[1].communicate()
            self._running = None

    # ------------------------------------------------------------ private

    def _place(self, step: Version) -> Path:
        return self._workdir / FOLDER / f"{step}.partial"
