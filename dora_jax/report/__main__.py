"""One HTML page of one or several runs:  python -m dora_jax.report --workdir=runs/a[,runs/b] [--out=page.html]

The page needs no network and opens by file://. A run that goes on may be reported at any time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from absl import app, flags

from dora_jax.report.load import load
from dora_jax.report.page import page


def define_flags() -> None:
    flags.DEFINE_list("workdir", None, "the workdir of a run, or several with commas between them", required=True)
    flags.DEFINE_string("out", None, "where the page is written; default: report.html in the first workdir")


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        print(f"error: {argv[1]!r} is not understood; the flags are --workdir and --out", file=sys.stderr)
        return 2
    folders = [Path(name) for name in flags.FLAGS.workdir]
    names = [folder.name or str(folder) for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    out = Path(flags.FLAGS.out) if flags.FLAGS.out else folders[0] / "report.html"
    try:
        runs = [load(folder, name) for folder, name in zip(folders, names, strict=True)]
        out.write_text(page(runs), encoding="utf-8", errors="replace")
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    define_flags()
    app.run(main)
