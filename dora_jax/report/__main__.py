"""One HTML page of one or several runs:  python -m dora_jax.report --workdir=runs/a[,runs/b] [--out=page.html]

The page needs no network and opens by file://. A run that goes on may be reported at any time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import app, flags

from dora_jax.config import ConfigError
from dora_jax.report.audit import audit
from dora_jax.report.load import load
from dora_jax.report.page import page


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        print(f"error: {argv[1]!r} is not understood; the flags are --workdir and --out", file=sys.stderr)
        return 2
    workdirs = [name for value in flags.FLAGS.workdir for name in value.split(",")]
    names = [Path(workdir).name or workdir for workdir in workdirs]
    if len(set(names)) < len(names):
        names = workdirs
    first = Path(f"{names[0]}_report.html") if "://" in workdirs[0] else Path(workdirs[0]) / "report.html"
    out = Path(flags.FLAGS.out) if flags.FLAGS.out else first
    try:
        runs = [load(workdir, name) for workdir, name in zip(workdirs, names, strict=True)]
        for workdir, run in zip(workdirs, runs, strict=True):
            if {"config.json is not there", "metrics.jsonl is not there"} <= set(run.remarks):
                raise ConfigError(f"{workdir} holds no run")
            audit(workdir, run)
        out.write_text(page(runs), encoding="utf-8", errors="replace")
    except (OSError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    flags.DEFINE_multi_string(
        "workdir",
        None,
        "the workdir of a run, a folder or gs://bucket/folder, or several: with commas, or the flag again",
        required=True,
    )
    flags.DEFINE_string(
        "out",
        None,
        "where the page is written; default: report.html in the first workdir, of a bucket NAME_report.html here",
    )
    app.run(main)
