# python -m dora_jax.simulate --config=configs/sim/drafts.py
"""`dora` and `partial` of configs/sim/fair.py with drafts from siblings and without, at 64 and 128 chips.

A version that no instance starts from any more has few rows left, and a decode step of few rows costs what reading the
weights costs: there a call that verifies drafts draws several tokens in a step's time (sim/drafts.py). A call verifies 7
tokens of a sample at most, of a version's last 32 rows on an instance at most (assumed; see rollout.draft_rows). Rows
differ in the share of guessed tokens that hold: 0.6 is near what suffixes of siblings are reported to give, 0.3 and 0.8
stand around it.
"""

from dora_jax.config_files import load_file

MODES = ("partial", "dora")
SIZES = ("64", "128")
ACCEPTANCES = (0.3, 0.6, 0.8)


def get_config(arg=None):
    if arg is not None and arg not in SIZES:
        raise ValueError(f"the argument {arg!r} is none of {', '.join(SIZES)}")
    c = load_file(f"sim/fair{f':{arg}' if arg else ''}")
    wanted = [f"{size} {mode}" for size in ([arg] if arg else SIZES) for mode in MODES]
    c.rows = tuple(each for row in c.rows if row["label"] in wanted for each in _with_drafts(row))
    return c


def _with_drafts(row):
    yield row
    for share in ACCEPTANCES:
        drafts = {"draft.tokens": 7, "draft.acceptance": share}
        yield {**row, "label": f"{row['label']}, drafts {share}", "set": {**row["set"], **drafts}}
