# python -m dora_jax.simulate --config=configs/sim/tilts.py:sampling
"""`dora` with a stride against `partial` on three instances, where sampling is the slower side and where the trainer
is, and with every assumption 20 % off either way.

Argument: "sampling" or "trainer", the slower side, which the number of the trainer's chips makes: all rows have the
same chips. Then ",points": what was tried for each row instead. The work is that of sim/fair.py, 128 x 16 samples a
step.

    dora, every version     rollouts take each version
    dora, stride            they take every s-th one
    partial                 weights are swapped under running samples, which are prefilled again; nothing is charged for
                            leaving their KV, nor for balancing
    partial, KV reused      they are not prefilled again: each goes on with KV that older weights wrote, wherever it
                            goes, at no cost; no engine is better

For each row there are six points (POINTS), and TUNED has the fastest of those with a mean lag of at most 2, of one
seed; it stays for the blocks in which something is 20 % off. With K versions a deadline falls due at step K first, so
that six steps are not measured.
"""

from dora_jax.sim import paper

CHIPS = {"sampling": 44, "trainer": 24}  # 12 of them sample
ROWS = ("dora, every version", "dora, stride", "partial", "partial, KV reused")
# of each row: (inflight, K, stride); K and stride mean nothing to `partial`
POINTS = {
    "dora, every version": [(load, bound, 1) for bound in (3, 6) for load in (0.75, 1.0, 1.5)],
    "dora, stride": [(1.25, 4, 2), (1.25, 6, 2), (0.75, 6, 3), (1.0, 6, 3), (0.5, 8, 4), (0.5, 10, 4)],
    "partial": [(load, 3, 1) for load in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)],
    "partial, KV reused": [(load, 3, 1) for load in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)],
}
TUNED = {
    ("sampling", "dora, every version"): (1.0, 6, 1), ("sampling", "dora, stride"): (0.75, 6, 3),
    ("sampling", "partial"): (1.0, 3, 1), ("sampling", "partial, KV reused"): (2.0, 3, 1),
    ("trainer", "dora, every version"): (0.75, 3, 1), ("trainer", "dora, stride"): (1.0, 6, 3),
    ("trainer", "partial"): (1.0, 3, 1), ("trainer", "partial, KV reused"): (1.0, 3, 1),
}  # fmt: skip
DRAFTS = {"draft.tokens": 7, "draft.rows": 512}
FIELDS = {"acceptance": "draft.acceptance", "overhead": "cost.decode_overhead_s", "trainer": "cost.train_utilisation",
          "sigma": "workload.sigma", "length": "workload.mean_tokens"}  # fmt: skip


def get_config(arg="sampling"):
    side, *points = (arg or "sampling").split(",")
    if side not in CHIPS or points not in ([], ["points"]):
        raise ValueError(f"the argument {arg!r} is not sampling or trainer, then ,points or nothing")
    c = paper.setting(64)
    c.steps, c.warmup_steps, c.seeds, c.report_tokens = 12, 6, 1 if points else 3, 256
    c.hardware.chips, c.hardware.rollout_chips = CHIPS[side], 12
    c.hardware.speeds = 1.1, 1.0, 0.9
    c.orchestrator.groups_per_step = 128
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
    c.rows = tuple(
        _row(name, TUNED[side, name], f"{block}: {name}", changes) for block, changes in blocks.items() for name in ROWS
    )
    return c


def _row(name, point, label, changes=None):
    inflight, bound, stride = point
    at = {"orchestrator.inflight": inflight, "orchestrator.max_versions": bound, "orchestrator.stride": stride}
    if name.startswith("partial"):
        at |= {"orchestrator.swapped_kv": "reused" if "reused" in name else "dropped"}
    return {"label": label, "mode": name.partition(",")[0], "set": at | (changes or {})}
