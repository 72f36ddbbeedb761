# python -m dora_jax.simulate --config=configs/sim/drafts.py:64
"""`partial` and `dora` of configs/sim/fair.py with drafts from siblings and without, by the share of guesses that hold.

Argument: 64, 128 or 4096 chips; none: 64 and 128. A call verifies 7 tokens of a sample at most. It draws E tokens in
the mean where a share `a` of the guesses holds, E = (1 - a^8) / (1 - a). Seer (OSDI 26) reports E = 1.70 for suffixes
of a sample alone and 2.85 with those of its siblings, which is a = 0.41 and 0.66; the table of fair.py assumes 0.6 (E =
2.46). In the rows "32 rows" no batch of more samples of a version on an instance drafts; in the others the cost of a
call alone decides.

Minutes a step at 64 chips, 20 of which sample (one seed): too few at 0.41 or with few rows; from 0.6 on the trainer is
the limit.

    share of guesses that hold     0.41      0.6     0.66     0.6, 32 rows
    partial                       12.07    10.76    10.91            13.70
    dora                          12.71    10.84    10.72            14.36
"""

from dora_jax.config.files import load_file

MODES = ("partial", "dora")
SIZES = ("64", "128", "4096")
ACCEPTANCES = (0.41, 0.6, 0.66)


def get_config(arg=None):
    if arg is not None and arg not in SIZES:
        raise ValueError(f"the argument {arg!r} is none of {', '.join(SIZES)}")
    c = load_file(f"sim/fair{f':{arg}' if arg else ''}")
    c.seeds = 1
    found = {row["label"]: row for row in c.rows}
    wanted = [f"{size} {mode}" for size in ([arg] if arg else SIZES[:2]) for mode in MODES]
    c.rows = tuple(row for label in wanted for row in (found[label], *_drafting(found[f"{label}, drafts"])))
    return c


def _drafting(row):
    for share in ACCEPTANCES:
        yield {**row, "label": f"{row['label']} {share}", "set": {**row["set"], "draft.acceptance": share}}
    yield {**row, "label": f"{row['label']} 0.6, 32 rows", "set": {**row["set"], "draft.rows": 32}}
