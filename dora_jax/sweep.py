"""A config's sweep, one run after the other.

    python -m dora_jax.sweep --config=configs/x.py [--only=2] [--workdir=DIR] [--dry_run]

Consumes the config file's `sweep()`, which lists or yields {field: value}; every flag that is not its own goes to every
run as it is. Produces a run folder a point under --workdir, each what `dora_jax.train` makes of it, and one table.
Laws: a folder is named by its point's overrides alone, so a longer or reordered sweep finds its runs again; every
config is checked before the first run starts; what ended well under the same config is skipped; a run that fails
stops no other. --only=i is one point of it, for launchers that give each a machine of its own.
Exit code: 0 all have ended well, 1 one has not, 2 wrong input, 42 asked to stop: the same command goes on.
"""

from __future__ import annotations

from dora_jax.base import exits

if __name__ == "__main__":
    exits.listen()  # before the imports, which take a second

import dataclasses
import hashlib
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app
from absl import flags as absl_flags

from dora_jax import config as configs
from dora_jax.base import helping
from dora_jax.base.config_tree import redact
from dora_jax.base.exits import RETRY
from dora_jax.cli import flags
from dora_jax.config import ConfigError
from dora_jax.config import files as config_files

TRAIN = ("-m", "dora_jax.train")  # arguments of this interpreter
MARKER = "finished.json"  # in a run folder: the resolved config under which it ended well
MAX_NAME = 120  # characters; file systems take 255, and what people read takes less

WORKDIR_HELP = "the folder of the run folders; default: runs/<name of the config file>_sweep"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One run of the sweep."""

    index: int
    workdir: Path
    args: tuple[str, ...]  # of dora_jax.train
    resolved: str  # its config as JSON

    @property
    def finished(self) -> bool:
        marker = self.workdir / MARKER
        return marker.is_file() and marker.read_bytes() == self.resolved.encode()


def parse(argv: Sequence[str], flag_values: absl_flags.FlagValues) -> tuple[SweepPoint, ...]:
    """The points that argv (program name first) asks for; ConfigError lists everything that is wrong with them."""
    if "--" in argv:
        raise ConfigError('argument \'--\': nothing behind "--" is read; leave the "--" out')
    absl_flags.DEFINE_string("config", "", flags.CONFIG_HELP, flag_values=flag_values)
    absl_flags.DEFINE_integer("only", None, "this point alone, counted from 0", lower_bound=0, flag_values=flag_values)
    absl_flags.DEFINE_string("workdir", "", WORKDIR_HELP, flag_values=flag_values, allow_overwrite=False)
    absl_flags.DEFINE_boolean("dry_run", False, "print the command of every run, and stop", flag_values=flag_values)
    if helping.asked_for(argv[1:]):
        helping.show(argv, configs.Config)
    flag_values.set_gnu_getopt(True)  # "--config.steps 3 --only 2": ours may follow the value of one that is not
    try:
        rest = flag_values(list(argv), known_only=True)[1:]
    except absl_flags.Error as error:
        raise ConfigError(" ".join(str(error).split())) from error
    spec, only = flag_values.config, flag_values.only
    # What sweep() of path.py[:arg] returns, its lists made tuples; ConfigError where it is no list of overrides.
    path = spec.partition(":")[0]
    module = config_files.load_module(path)
    if not hasattr(module, "sweep"):
        raise ConfigError(f"config: {path} has no sweep(); add one that returns a list of {{field: value}}")
    try:
        points = list(module.sweep())
    except Exception as error:  # the function is the user's: anything may come out of it
        raise ConfigError(config_files.field_context(config_files.config_file(path), error)) from error
    if not points or not all(isinstance(point, Mapping) and point for point in points):
        raise ConfigError(f"config: sweep() of {path} returned no list of {{field: value}}")
    sweep = [
        {field: tuple(value) if isinstance(value, list) else value for field, value in point.items()}
        for point in points
    ]
    names = [run_name(overrides) for overrides in sweep]
    problems = [f"sweep: {name} is there twice" for name in sorted({name for name in names if names.count(name) > 1})]
    if only is not None and only >= len(sweep):
        problems.append(f"only: {only} is not below {len(sweep)}, the number of points of {spec}")
    if problems:
        raise ConfigError(problems)
    if "://" in flag_values.workdir:
        raise ConfigError("workdir: a sweep keeps its runs in a folder of this machine, not in a bucket")
    root = Path(flag_values.workdir or Path("runs") / f"{config_files.run_name(spec)}_sweep")
    chosen = range(len(sweep)) if only is None else [only]
    return _points([(i, root / names[i], sweep[i]) for i in chosen], [f"--config={spec}", *rest])


def run_name(overrides: Mapping[str, Any]) -> str:
    """The folder of a point: readable, and different for different overrides."""
    full = ",".join(f"{field}={value}" for field, value in sorted(redact(dict(overrides)).items()))
    name = re.sub(r"[^\w.=,+-]", "_", full)
    if name != full or len(name) > MAX_NAME:
        name = f"{name[:MAX_NAME]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"
    return name


def run(points: Sequence[SweepPoint]) -> int:
    """Runs the points that have not finished; returns the exit code of the sweep."""
    for number in exits.SIGNALS:  # KeyboardInterrupt, here, whichever it is
        signal.signal(number, signal.default_int_handler)
    outcomes: dict[int, str] = {}
    code = 0
    for point in points:
        if point.finished:
            outcomes[point.index] = "had ended well"
            continue
        print(f"sweep: point {point.index}: {point.workdir}", flush=True)
        ended = _train(point)
        if ended == RETRY:
            outcomes[point.index] = "stopped; the same command goes on from here"
            code = RETRY
            break
        if ended == 0:
            (point.workdir / MARKER).write_text(point.resolved)
        outcomes[point.index] = f"failed with exit code {ended}" if ended else "ended well"
        code = 1 if ended else code
    for point in points:
        print(f"sweep: {point.index:>3}  {point.workdir}  {outcomes.get(point.index, 'not started')}", flush=True)
    return code


# ---------------------------------------------------------------- private


def _points(chosen: Sequence[tuple[int, Path, Mapping[str, Any]]], args: Sequence[str]) -> tuple[SweepPoint, ...]:
    given = {match[1] for arg in args if (match := re.match(r"--?(?:no)?config\.([^=]+)", arg))}
    points: list[SweepPoint] = []
    problems: dict[str, list[int]] = {}  # problem -> points that have it
    for index, workdir, overrides in chosen:
        try:
            if both := sorted(given & overrides.keys()):
                raise ConfigError([f"config.{field}: the sweep sets it; leave it out of the command" for field in both])
            fields = (f"--config.{field}={value}" for field, value in overrides.items())
            of_point = (*args, *fields, f"--workdir={workdir}")
            asked = flags.parse(["dora_jax.train", *of_point], flag_values=absl_flags.FlagValues())
            for field, value in overrides.items():
                if asked.overrides[field] != value:
                    raise ConfigError(f"config.{field}: {value!r} would be read as {asked.overrides[field]!r}")
            resolved = json.dumps(configs.to_json(asked.config), indent=2)
            points.append(SweepPoint(index=index, workdir=workdir, args=of_point, resolved=resolved))
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(index)
    if problems:
        raise ConfigError(
            [f"sweep, point {', '.join(map(str, where))}: {problem}" for problem, where in problems.items()]
        )
    return tuple(points)


def _train(point: SweepPoint) -> int:
    """The exit code of its run; RETRY where the sweep was asked to stop, which the run is then sent, once."""
    process = subprocess.Popen([sys.executable, *TRAIN, *point.args], process_group=0)  # Ctrl-C reaches only us
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()  # it is gone within its grace
        process.wait()
        return RETRY


def _main(points: Sequence[SweepPoint]) -> int:
    if not absl_flags.FLAGS.dry_run:
        return run(points)
    for point in points:
        print(shlex.join(["python", *TRAIN, *point.args]) + ("  # has ended well: skipped" if point.finished else ""))
    return 0


if __name__ == "__main__":
    try:
        app.run(_main, flags_parser=lambda argv: parse(argv, absl_flags.FLAGS))
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(exits.BAD_USAGE)
    except KeyboardInterrupt:  # between two runs
        sys.exit(RETRY)
