"""bench.device goes through its stages on a CPU; what a GPU makes of them is for a GPU to say."""

import itertools
import json

import pytest

from dora_jax.bench import device

CALLS = "read", "kernel", "decode-8B", "decode-0.6B"
OTHERS = "read", "train-0.6B", "gap", "memory", "flashinfer"


def measured(tmp_path, *stages):
    """The entries by stage, without what failed."""
    for stage in stages:
        device.stage(stage, tmp_path / "out.json", "tiny")
    entries = json.loads((tmp_path / "out.json").read_text())
    assert not [e for e in entries if e.get("error")]
    return {stage: {e["name"]: e for e in entries if e["stage"] == stage} for stage in stages}


@pytest.mark.slow
def test_the_kernel_and_the_engine_are_measured(tmp_path):
    found = measured(tmp_path, *CALLS)
    assert found["kernel"]["tiny: ours"]["value"] > 0
    assert found["kernel"]["tiny: error of ours against the reference"]["value"] < 0.02
    for late, name in itertools.product(("on", "off"), ("decode-8B", "decode-0.6B")):
        assert found[name][f"results late: {late}"]["value"] > 0
        assert 0 <= found[name][f"results late: {late}: idle"]["value"] < 1


@pytest.mark.slow
def test_the_other_stages(tmp_path):
    assert {*CALLS, *OTHERS} == set(device.STAGES), "each stage goes through on a CPU"
    found = measured(tmp_path, *OTHERS)
    assert 0 < found["gap"]["ratio of the two, bfloat16, reference"]["value"] < 2
    assert found["train-0.6B"]["reference, remat full"]["value"] > 0
    assert "peak memory with both" in found["memory"]


def test_a_run_goes_on_where_it_stopped_and_records_what_failed(tmp_path, monkeypatch):
    """A stage in a process of its own; the second run finds it done."""
    out = tmp_path / "out.json"
    *_, last = device.device(["read"], out, "tiny")
    entries = device.Record(out).entries
    assert device.DONE in last
    assert {"read speed", device.DONE} <= {e["name"] for e in entries}
    list(device.device(["read"], out, "tiny"))
    assert device.Record(out).entries == entries
    monkeypatch.setattr(device, "LIMIT_S", 0.01)
    list(device.device(["read"], out, "tiny", again=True))
    [failed] = device.Record(out).entries
    assert "cut off after 0.01 s" in failed["error"]
    record = device.Record(out, "kernel")
    with record.attempt("one kernel"):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    assert "RESOURCE_EXHAUSTED" in device.Record(out).entries[-1]["error"]
