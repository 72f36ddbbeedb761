# python -m dora_jax.simulate --config=configs/sim/tilts.py:sampling
"""`dora` with a stride against `partial`, where sampling is the slower side and where the trainer is, and with every
assumption 20 % off either way.

Argument: "sampling" or "trainer", the slower side, which the split of the chips makes: all rows have the same. Then
",64" for the 64 chips and the 512 x 16 samples a step of sim/fair.py: 20 of them are five instances that sample, or 32
are eight. Else 12 chips are three, for 128 x 16 samples a step. Then ",points": what was tried for each row instead.

    dora, every version     rollouts take each version
    dora, stride            they take every s-th one
    partial                 weights are swapped under running samples, which are prefilled again; nothing is charged for
                            leaving their KV, nor for balancing
    partial, KV reused      they are not prefilled again: each goes on with KV that older weights wrote, wherever it
                            goes, at no cost; no engine is better

For each row there are six points (POINTS), and TUNED has the fastest of those with a mean lag of at most 2, of one
seed; it stays for the blocks in which something is 20 % off. With K versions a deadline falls due at step K first, so
that the first steps are not measured.
"""

from dora_jax.sim import paper

# of the slower side and the size: chips, of them those that sample
CHIPS = {
    ("sampling", ""): (44, 12), ("trainer", ""): (24, 12),
    ("sampling", "64"): (64, 20), ("trainer", "64"): (64, 32),
}  # fmt: skip
GROUPS = {"": 128, "64": 512}
STEPS = {"": (12, 6), "64": (8, 5)}  # the first ones are not measured
ROWS = ("dora, every version", "dora, stride", "partial", "partial, KV reused")
# of each row: (inflight, K, stride); K and stride mean nothing to `partial`
POINTS = {
    "dora, every version": [(load, bound, 1) for bound in (3, 6) for load in (0.75, 1.0, 1.5)],
    "dora, stride": [(1.25, 4, 2), (1.25, 6, 2), (0.75, 6, 3), (1.0, 6, 3), (0.5, 8, 4), (0.5, 10, 4)],
    "partial": [(load, 3, 1) for load in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)],
    "partial, KV reused": [(load, 3, 1) for load in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)],
}
TUNED = {
    ("sampling", "", "dora, every version"): (1.0, 6, 1), ("sampling", "", "dora, stride"): (0.75, 6, 3),
    ("sampling", "", "partial"): (1.0, 3, 1), ("sampling", "", "partial, KV reused"): (2.0, 3, 1),
    ("trainer", "", "dora, every version"): (0.75, 3, 1), ("trainer", "", "dora, stride"): (1.0, 6, 3),
    ("trainer", "", "partial"): (1.0, 3, 1), ("trainer", "", "partial, KV reused"): (1.0, 3, 1),
    ("sampling", "64", "dora, every version"): (1.0, 3, 1), ("sampling", "64", "dora, stride"): (1.0, 6, 3),
    ("sampling", "64", "partial"): (1.0, 3, 1), ("sampling", "64", "partial, KV reused"): (0.5, 3, 1),
    ("trainer", "64", "dora, every version"): (1.5, 3, 1), ("trainer", "64", "dora, stride"): (1.25, 6, 2),
    ("trainer", "64", "partial"): (1.25, 3, 1), ("trainer", "64", "partial, KV reused"): (1.25, 3, 1),
}  # fmt: skip
DRAFTS = {"draft.tokens": 7, "draft.rows": 512}
FIELDS = {"acceptance": "draft.acceptance", "overhead": "cost.decode_overhead_s", "trainer": "cost.train_utilisation",
          "sigma": "workload.sigma", "length": "workload.mean_tokens"}  # fmt: skip


def get_config(arg="sampling"):
    side, *more = (arg or "sampling").split(",")
    size, points = "64" if "64" in more else "", "points" in more
    if more != [word for word, there in (("64", size), ("points", points)) if there] or (side, size) not in CHIPS:
        raise ValueError(
            f"the argument {arg!r} is not sampling or trainer, then ,64 or nothing, then ,points or nothing"
        )
    c = paper.setting(64)
    c.steps, c.warmup_steps = STEPS[size]
    c.seeds, c.report_tokens = 1 if points else 3, 256
    c.hardware.chips, c.hardware.rollout_chips = CHIPS[side, size]
    c.hardware.speeds = 1.1, 1.0, 0.9
    c.orchestrator.groups_per_step = GROUPS[size]
    c.cost.balance_s = 16.0  # 4 % of a step, of each version that is taken
    c.cost.publish_s, c.cost.control_s = 2.0, 0.1
    if points:
        c.rows = tuple(_row(name, point, f"{name} {point}") for name in ROWS for point in POINTS[name])
        return c
    blocks = {"as assumed": {}, "drafts": DRAFTS}
    for what, field in FIELDS.items():
        section, leaf = field.split(".")
        for sign, factor in (("-20 %", 0.8), ("+20 %", 1.2)):
            changed = {field: factor * c[section][leaf]}
            blocks[f"{what} {sign}"] = DRAFTS | changed if what == "acceptance" else changed
    tuned = {name: TUNED[side, size, name] for name in ROWS}
    c.rows = tuple(
        _row(name, tuned[name], f"{block}: {name}", changes) for block, changes in blocks.items() for name in ROWS
    )
    return c


def _row(name, point, label, changes=None):
    inflight, bound, stride = point
    at = {"orchestrator.inflight": inflight, "orchestrator.max_versions": bound, "orchestrator.stride": stride}
    if name.startswith("partial"):
        at |= {"orchestrator.swapped_kv": "reused" if "reused" in name else "dropped"}
    return {"label": label, "mode": name.partition(",")[0], "set": at | (changes or {})}
