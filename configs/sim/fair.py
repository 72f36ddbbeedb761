# python -m dora_jax.simulate --config=configs/sim/fair.py
"""Every mode with the same machinery, each at its fastest split, load and bound: the comparison to go by.

Argument: 64, 128 (the published experiment, see sim/paper.py) or 4096 (production_4096.py); none: all three. The chips,
the work and its costs are those of `dora` in the published table. In it are as well:

    speeds          instances are up to 10 % faster or slower than their mean (assumed)
    balance_s       in modes whose versions share the instances, these stand still as long as the paper's did for
                    balancing (0.4 and 1.5 % of a step at 64 and 128 GPUs) and transfers (3.6 and 2.1 %)
    publish_s       2 s from a step's end to its version (assumed); weights then take their time on the links
    control_s       0.1 s from a fact to the command that follows from it (assumed)
    parts           a step begins with the first of its 16 updates whose groups are there

`dora_paper` takes no parts by its definition (orchestrate/modes.py): a second row shows it with parts. TUNED holds
points of the grid of sim/config.py (GridSection). At 64 and 128 chips `--tune` found those of `sync`, `one_step` and
`dora_paper`, with 3 steps after 2; those of `partial` and `dora` are the fastest of about six around what it found. At
4,096 `partial` and `dora` stand at the grid's largest load, where both are fastest, and the other rows are not tuned.
Three seeds.

`rollpacker` and `staleflow` are the rivals of orchestrate/modes.py; a prompt that `rollpacker` issues again has answers
as long as before, which is the best case for it, and its measured steps hold one long round in five. `--tune` found
their points with one seed (`staleflow` at 4,096: the point of `dora`).

At 4,096 chips 20 steps are simulated, and the last 12 measured: with K versions the first deadline falls due at step K.
At K = 8 the longest samples bind. A token takes 31 to 40 ms in a batch of 64 to 400 samples, and 64,000 of them 33 to
43 minutes; eight steps last 35. So each eighth step takes 8 to 14 minutes and the mean is 5.36 (one seed; the floor is
2.54, for a sample that decodes alone). More instances for old versions do not help (5.62 with kv_weight = 40), nor does
less load (7.35 at 1.5). At K = 10 nothing binds any more. The largest lag is 9 then; that of `partial`, with the same
load and the same mean lag of 3.0, is 11. Adapters put an old version's samples into one batch with all others, so that
K is 12 there.

In the rows "adapters" a version is an adapter of 1 % of the weights over one base: an instance holds K + 1 of them, and
one call decodes rows of all. Nothing is balanced then, so that balance_s is 0. Their points are `--tune`'s, those of
`dora` at 64 and 128 chips with fewer rollout chips and a larger K, which an axis at a time does not find.

In the rows "drafts" a call verifies up to 7 tokens that suffixes of siblings guess (sim/drafts.py), as many as pay by
the cost of a call, whatever its batch; configs/sim/drafts.py says where the share of guesses that hold, 0.6, comes
from, and how much it matters. Their points, and those of "adapters and drafts", are the fastest of two to four at an
instance fewer each; at 4,096 chips 2,048 are the fewest that were tried.

Minutes a step of `dora` against `partial` with the same machinery, three seeds (one with both at 4,096
chips). Where both are limited by the trainer alone, a difference of 2 % is one of the tokens that the measured steps
hold:

                                      64                 128               4,096
    neither                    12.35 : 11.47         7.41 : 7.18         4.55 : 4.72
    adapters                   11.41 : 11.50         7.10 : 7.14         4.25 : 4.35
    drafts                     10.64 : 10.63         6.72 : 6.82         3.78 : 3.83
    adapters and drafts        10.68 : 10.66         6.84 : 6.71         3.76 : 3.77
    so, an instance fewer      12.64 : 13.21         6.93 : 7.36                      (one seed)

In the fourth line the trainer works for 99 % of the time in all; at 128 chips `dora` trains 54,179 tokens/s there and
`partial` 53,617. In the fifth sampling is the limit, and what `partial` prefills again at each version makes it slower.

The order of samples has no row, because it gains nothing. Longest expected first, in what resumes, moves and is put
aside, takes 12.39 minutes for 12.38 at 64 chips, 7.38 for 7.40 at 128 and 5.95 for 6.05 at 4,096 (8 steps, K = 8) where
the group's finished siblings say what is left, and 12.39, 7.38 and 5.98 where the true lengths do (three seeds, which
differ by 0.2).

The floor of a row and what versions on instances of their own add to it ("fragments") are explained in sim/bound.py:
the second is what `partial` does not pay.
"""

from dora_jax.config.files import load_file
from dora_jax.sim import paper

SIZES = ("64", "128", "4096")
BALANCE_S = {"64": 0.04 * 14.67 * 60, "128": 0.036 * 10.46 * 60, "4096": 0.036 * 10.46 * 60}
STEPS = {"64": (8, 3), "128": (8, 3), "4096": (20, 8)}  # the first ones are not measured
ADAPTER_SHARE = 0.01  # of the weights: about rank 16 on every matrix
# (mode, what it has beside what all have)
ROWS = (("sync", ""), ("one_step", ""), ("partial", ""), ("dora_paper", ""), ("dora_paper", "parts"), ("dora", ""),
        ("rollpacker", ""), ("staleflow", ""), ("partial", "adapters"), ("dora", "adapters"), ("partial", "drafts"),
        ("dora", "drafts"), ("partial", "adapters and drafts"), ("dora", "adapters and drafts"))  # fmt: skip

# (size, row): rollout chips (0: colocated), groups outstanding beyond the batch in units of P, K
TUNED = {
    ("64", "sync"): (0, 1.15, 3), ("128", "sync"): (0, 1.15, 3), ("4096", "sync"): (0, 1.15, 3),
    ("64", "one_step"): (36, 1.15, 3), ("128", "one_step"): (96, 1.15, 3), ("4096", "one_step"): (3072, 1.15, 3),
    ("64", "partial"): (24, 0.75, 3), ("128", "partial"): (44, 0.75, 3), ("4096", "partial"): (2816, 3.0, 3),
    ("64", "dora_paper"): (28, 2.0, 4), ("128", "dora_paper"): (56, 2.0, 4), ("4096", "dora_paper"): (3072, 3.0, 10),
    ("64", "dora_paper, parts"): (28, 1.15, 3), ("128", "dora_paper, parts"): (56, 1.15, 3),
    ("4096", "dora_paper, parts"): (3072, 3.0, 10),
    ("64", "dora"): (28, 0.5, 3), ("128", "dora"): (48, 0.75, 4), ("4096", "dora"): (2816, 3.0, 10),
    ("64", "rollpacker"): (0, 1.15, 3), ("128", "rollpacker"): (68, 1.15, 3), ("4096", "rollpacker"): (2304, 1.15, 3),
    ("64", "staleflow"): (28, 0.5, 3), ("128", "staleflow"): (48, 0.5, 4), ("4096", "staleflow"): (2816, 3.0, 10),
    ("64", "partial, adapters"): (24, 0.5, 3), ("128", "partial, adapters"): (44, 1.15, 3),
    ("4096", "partial, adapters"): (2688, 3.0, 3),
    ("64", "dora, adapters"): (24, 0.75, 4), ("128", "dora, adapters"): (44, 1.15, 6),
    ("4096", "dora, adapters"): (2688, 3.0, 12),
    ("64", "partial, drafts"): (20, 0.75, 3), ("128", "partial, drafts"): (36, 0.75, 3),
    ("4096", "partial, drafts"): (2048, 3.0, 3),
    ("64", "dora, drafts"): (20, 0.75, 4), ("128", "dora, drafts"): (36, 0.75, 4),
    ("4096", "dora, drafts"): (2048, 3.0, 8),
    ("64", "partial, adapters and drafts"): (20, 0.5, 3), ("128", "partial, adapters and drafts"): (36, 1.15, 3),
    ("4096", "partial, adapters and drafts"): (2048, 3.0, 3),
    ("64", "dora, adapters and drafts"): (20, 0.75, 4), ("128", "dora, adapters and drafts"): (36, 1.15, 6),
    ("4096", "dora, adapters and drafts"): (2048, 3.0, 8),
}  # fmt: skip


def get_config(arg=None):
    if arg is not None and arg not in SIZES:
        raise ValueError(f"the argument {arg!r} is none of {', '.join(SIZES)}")
    sizes = SIZES if arg is None else (arg,)
    c = _setting(sizes[0])
    settings = {size: _setting(size) for size in sizes}
    c.rows = tuple(row for size in sizes for row in _rows(size, settings[size], _differences(c, settings[size])))
    return c


def _rows(size, setting, changes):
    for mode, extra in ROWS:
        label = f"{mode}, {extra}" if extra else mode
        chips, inflight, bound = TUNED.get((size, label), (int(size) // 2, 1.15, 3))
        point = {"hardware.rollout_chips": chips, "orchestrator.inflight": inflight, "orchestrator.max_versions": bound}
        yield {
            "label": f"{size} {label}",
            "mode": mode,
            "set": {**changes, **point, **_machinery(extra, setting, bound)},
        }


def _machinery(extra, setting, bound):
    found = {}
    if "parts" in extra:
        found["orchestrator.decisions"] = {"parts": 16}
    if "adapters" in extra:
        weight_bytes = setting.model.params * setting.model.weight_bytes_per_param
        found |= {"cost.balance_s": 0.0, "hardware.residents": bound + 1,
                  "model.adapter_bytes": ADAPTER_SHARE * weight_bytes}  # fmt: skip
    if "drafts" in extra:
        found |= {"draft.tokens": 7, "draft.rows": setting.hardware.slots}
    return found


def _setting(size):
    c = load_file("sim/production_4096") if size == "4096" else paper.setting(int(size))
    c.steps, c.warmup_steps = STEPS[size]
    c.seeds = 3
    c.hardware.speeds = (1.1, 1.0, 0.9, 1.0)
    c.cost.balance_s, c.cost.publish_s, c.cost.control_s = BALANCE_S[size], 2.0, 0.1
    return c


def _differences(a, b, prefix=""):
    """Dotted fields of `b` that `a` has otherwise."""
    found = {}
    for name, value in b.items():
        if hasattr(value, "items"):
            found |= _differences(a[name], value, f"{prefix}{name}.")
        elif value != a[name]:
            found[prefix + name] = value
    return found
