"""The bench of the orchestrator on a small fleet: it does all that the large one does, and adds up."""

from __future__ import annotations

from dora_jax.bench.orchestrator import Options, measure, report


def test_a_fleet_at_work():
    body = measure(
        Options(instances=8, seconds=60.0, warm_s=400.0, residents=2, mtbf_s=200.0, codec=True, snapshot_s=30.0)
    )
    cost, summary = body.cost, body.brain.summary()
    assert summary["base"] >= 3 and summary["moves"] and cost.events["InstanceDown"]
    assert cost.events["InstanceReported"] > 300 and cost.events["SampleDone"] > 200
    assert sum(map(len, body.runs)) > 400
    assert set(cost.kind_ns) <= {"decisions", *cost.events} and cost.bytes and cost.decode_ns
    assert cost.snapshots and cost.children_s > 0  # the second is not begun where the first still goes on
    body.brain.state.ledger.check()
    lines = list(report(body))
    assert "of one core" in lines[0] and any("journal and wire" in line for line in lines)


def test_samples_that_are_given_up_end():
    """Mode `rollpacker` starts more of them than it trains; without an end each keeps its slot, and no step follows."""
    body = measure(Options(instances=2, seconds=300.0, warm_s=100.0, mtbf_s=0.0, snapshot_s=0.0, mode="rollpacker"))
    summary = body.brain.summary()
    assert body.cost.events["SampleCancelled"] and summary["base"] >= 1
    assert sum(summary["versions"].values()) == sum(map(len, body.runs))
