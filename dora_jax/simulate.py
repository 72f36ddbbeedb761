"""The orchestrator in virtual time:  python -m dora_jax.simulate --config=configs/sim/x.py [--trace=FILE] [--tune]
[--advise]

Runs every row of the configuration and prints one table; --trace writes the last row as a Chrome trace for Perfetto;
--tune first looks for each row's fastest point of the configuration's grid of splits, loads and bounds;
--advise searches staleness bound, split and load for the configuration's chips and lengths instead.
--replay=JOURNAL needs no configuration: it feeds a recorded run to a new orchestrator and compares every command.
Starts without JAX.
"""

from __future__ import annotations

from dora_jax.base import exits

if __name__ == "__main__":
    exits.listen()  # before the imports, which take a second

import dataclasses
import sys
from collections.abc import Sequence

import ml_collections
from absl import app, flags

from dora_jax.base import helping
from dora_jax.cli import arguments
from dora_jax.config import ConfigError
from dora_jax.config import files as config_files
from dora_jax.sim import advise, config, many, replay, table, tune
from dora_jax.sim.config import Row, SimConfig
from dora_jax.sim.meter import Trace
from dora_jax.sim.run import StoppedEarly, simulate

CONFIG_HELP = "path.py[:argument]; --config.field=value overrides a field"
TRACE_HELP = "write the last row as a Chrome trace, to be opened in Perfetto"
REPLAY_HELP = "feed this journal to a new orchestrator and compare; needs no --config"
TUNE_HELP = "each row at its fastest point of the configuration's grid; those points come first"
ADVISE_HELP = "search staleness bound, split and load in place of the table"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimFlags:
    """What one command line asks for."""

    config: SimConfig
    trace: str
    tune: bool
    advise: bool
    replay: str


def main(asked: SimFlags) -> int:
    if asked.replay:
        print(replay.render(replay.replay(asked.replay)))
    elif asked.advise:
        print(advise.report(asked.config, progress=_progress))
    else:
        rows = config.rows(asked.config)
        ran = run_rows(tuned(rows) if asked.tune else rows, asked.config.seeds)
        spreads = [line.spread for line in ran] if asked.config.seeds > 1 else []
        print(table.render([(line.row, line.mean) for line in ran], spreads))
        if asked.trace:
            trace = Trace(rows[-1].label)
            simulate(rows[-1], trace=trace)
            trace.save(asked.trace)
    return 0


def tuned(rows: Sequence[Row]) -> list[Row]:
    """The rows at their fastest points, which are printed."""
    found = []
    for best in many.each(tune.tune, rows):
        _progress(f"{best.row.label}: {best.result.step_s / 60:.2f} min a step at {best.changes}")
        found.append(best)
    print(tune.render(found), "\n")
    return [best.row for best in found]


def run_rows(rows: Sequence[Row], seeds: int) -> list[many.RowResults]:
    lines = []
    for ran in many.run_rows(rows, seeds):
        minutes = sum(result.seconds for result in ran.results) / 60
        _progress(f"{ran.row.label}: {minutes:.0f} minutes in {ran.seconds:.1f} s")
        lines.append(ran)
    return lines


def parse(argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS) -> SimFlags:
    """What argv (program name first) asks for; ConfigError says what is wrong with it."""
    spec, rest = arguments.split(argv)
    flags.DEFINE_string("trace", "", TRACE_HELP, flag_values=flag_values)
    flags.DEFINE_boolean("tune", False, TUNE_HELP, flag_values=flag_values)
    flags.DEFINE_boolean("advise", False, ADVISE_HELP, flag_values=flag_values)
    flags.DEFINE_string("replay", "", REPLAY_HELP, flag_values=flag_values)
    if helping.asked_for(rest):
        flags.DEFINE_string("config", None, CONFIG_HELP, flag_values=flag_values)
        helping.show(rest, SimConfig)
    replays = any(arg.lstrip("-").startswith("replay") for arg in rest)
    tree = config.defaults() if replays and not spec else load_file(spec)
    arguments.apply_overrides(tree, rest, flag_values, SimConfig)
    return SimFlags(
        config=config.from_config_dict(tree),
        trace=flag_values.trace,
        tune=flag_values.tune,
        advise=flag_values.advise,
        replay=flag_values.replay,
    )


def load_file(spec: str) -> ml_collections.ConfigDict:
    """get_config(arg) of path.py[:arg]; ConfigError where it returns the configuration of another program."""
    if not spec:
        raise ConfigError("config: missing; name a file, e.g. --config=configs/sim/paper_64.py")
    return config_files.load_file(spec, SimConfig)


# ---------------------------------------------------------------- private


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        app.run(main, flags_parser=parse)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
    except (StoppedEarly, replay.Differs) as error:  # the orchestrator gave the run up, or is another one
        print(f"error: {error}", file=sys.stderr)
    sys.exit(exits.BAD_USAGE)
