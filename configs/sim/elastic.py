# python -m dora_jax.simulate --config=configs/sim/elastic.py:64
"""Elastic roles: `dora` with the trainer's chips its own, and lent to the rollouts while the trainer waits.

Argument: 64, 128 or 4096 chips of sim/fair.py, whose work, costs and overheads these are. The first split is the
fastest of that table, where no chips are lent: the trainer has next to nothing to wait for. The others give the trainer
more chips than it can use, as a run does whose answers have grown longer since its split was chosen.

At 4,096 chips the first version's deadline falls due at the eighth step, and steps before it are short: ten are left
out. There little can be gained. A group of the longest answers runs through all K steps, K * step_s >= longest *
token_s, and a token takes 21 ms in a batch of one and 37 in one of 256 (sim/bound.py: 152 s a step at least, alone on
the fastest instance). More chips make batches smaller and these tokens hardly faster, and chips that are held delay the
training of what is ready: lent whenever the trainer waited, they took 5.88 minutes a step for 5.45 of the split (one
seed). So chips are lent only where they make the rollouts faster by a fifth (roles.LEAST_GAIN): 5.65 minutes, and 5.76
where no chip was lent in the steps that are measured, so that nothing is left between these but chance. What shortens
the step there is a larger K, or drafts: with these the same 2,048 + 2,048 chips take 3.78 minutes, 0.9 % of it rollout
only (the row "dora, drafts" of fair.py).

Rollout chips do not train, because a split with more chips for the trainer, which lends them, gives what that could.
Minutes a step at 64 chips, one seed, by the mean length of an answer; of the best split both sides work all the time:

    rollout chips     16 lent  20 lent  24 lent     20     24     28     36     44
    2,400 tokens        13.62    13.04    12.76      -      -  12.55  15.35  20.17
    1,200 tokens         7.97        -        -   7.37   7.39   7.93      -      -

Where answers become half as long, chips of 28 + 36 that changed sides for nothing would gain 7 %; 24 + 40 has it
without.
"""

from dora_jax.config.files import load_file

# size -> rollout chips of each split, groups outstanding beyond the batch in units of P, K
SPLITS = {"64": ((28, 20, 16), 0.5, 3), "128": ((48, 32), 0.75, 4), "4096": ((2816, 2048), 3.0, 8)}


def get_config(arg="64"):
    if arg not in SPLITS:
        raise ValueError(f"the argument {arg!r} is none of {', '.join(SPLITS)}")
    c = load_file(f"sim/fair:{arg}")
    chips, inflight, bound = SPLITS[arg]
    c.seeds = 1
    if arg == "4096":
        c.steps, c.warmup_steps = 20, 10
    c.rows = tuple(_row(c, each, inflight, bound, elastic) for each in chips for elastic in (False, True))
    return c


def _row(c, chips, inflight, bound, elastic):
    point = {"hardware.rollout_chips": chips, "orchestrator.inflight": inflight, "orchestrator.max_versions": bound}
    label = f"{chips}+{c.hardware.chips - chips} {'lent' if elastic else 'split'}"
    return {"label": label, "mode": "dora", "set": {**point, "orchestrator.elastic": elastic}}
