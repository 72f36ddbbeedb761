# python -m dora_jax.simulate --config=configs/sim/elastic.py:64
"""Elastic roles: `dora` with the trainer's chips its own, and lent to the rollouts while the trainer waits.

Argument: 64, 128 or 4096 chips of sim/fair.py, whose work, costs and overheads these are. The first split is the fastest of
that table, where no chips are lent: the trainer has next to nothing to wait for. The others give the trainer more chips than
it can use, as a run does whose answers have grown longer since its split was chosen.
"""

from dora_jax.config_files import load_file

# size -> rollout chips of each split, groups outstanding beyond the batch in units of P, K
SPLITS = {"64": ((28, 20, 16), 0.5, 3), "128": ((48, 32), 0.75, 4), "4096": ((2816, 2048), 3.0, 8)}


def get_config(arg="64"):
    if arg not in SPLITS:
        raise ValueError(f"the argument {arg!r} is none of {', '.join(SPLITS)}")
    c = load_file(f"sim/fair:{arg}")
    chips, inflight, bound = SPLITS[arg]
    c.seeds = 1
    c.rows = tuple(_row(c, each, inflight, bound, elastic) for each in chips for elastic in (False, True))
    return c


def _row(c, chips, inflight, bound, elastic):
    point = {"hardware.rollout_chips": chips, "orchestrator.inflight": inflight, "orchestrator.max_versions": bound}
    label = f"{chips}+{c.hardware.chips - chips} {'lent' if elastic else 'split'}"
    return {"label": label, "mode": "dora", "set": {**point, "orchestrator.elastic": elastic}}
