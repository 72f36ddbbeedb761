# python -m dora_jax.simulate --config=configs/sim/explore.py:128
"""What each choice of `dora` is worth: one row changes one thing. Argument: 64 or 128 chips as published, or 4096.

Same work, same chips, K = 3 and the same load but where a row says otherwise. Judge by step time, then by mean lag.
"""

from dora_jax.config.files import load_file
from dora_jax.sim import paper

DECISIONS = "orchestrator.decisions"


def get_config(arg="128"):
    if arg not in ("64", "128", "4096"):
        raise ValueError(f"the argument {arg!r} is none of 64, 128, 4096")
    c = load_file("sim/production_4096") if arg == "4096" else paper.setting(int(arg))
    chips = c.hardware.chips
    adapter = 0.01 * c.model.params * c.model.weight_bytes_per_param  # about rank 16 on every matrix
    c.rows = (
        _row("dora"),
        _row("dora_paper", mode="dora_paper"),
        _row("dora_paper, inflight 1.25", {"orchestrator.inflight": 1.25}, mode="dora_paper"),
        _row("dora_paper, inflight 1.5", {"orchestrator.inflight": 1.5}, mode="dora_paper"),
        _row("inflight 1.0625", {"orchestrator.inflight": 1.0625}),
        _row("inflight 1.25", {"orchestrator.inflight": 1.25}),
        _row("inflight 1.5", {"orchestrator.inflight": 1.5}),
        _row("a step is taken at once", {"orchestrator.updates": 1}),
        _row("a step is taken in 4 parts", {"orchestrator.updates": 4}),
        _row("load target does not count the awaited batch", {DECISIONS: {"count_awaited": False}}),
        _row("instances shared by count, not by KV", {DECISIONS: {"kv_weight": 0.0}}),
        _row("admit at publication only", {DECISIONS: {"admit_on": "publish"}}),
        _row("R = 2 resident versions", {"hardware.residents": 2}),
        _row("versions are adapters, R = K + 1", {"hardware.residents": 4, "model.adapter_bytes": adapter}),
        _row("K = 2", {"orchestrator.max_versions": 2}),
        _row("K = 4", {"orchestrator.max_versions": 4}),
        # the bound of any scheme that lends the trainer's chips to rollout while the trainer waits
        _row("rollout also has the trainer's chips", {
            "hardware.chips": chips + chips // 2, "hardware.rollout_chips": chips}),
    )  # fmt: skip
    return c


def _row(label, changes=None, mode="dora"):
    return {"label": label, "mode": mode, "set": changes or {}}
