"""Chip costs that can be checked by hand, and workloads as pure functions of (seed, group, index)."""

import dataclasses
import json

import pytest

from dora_jax.base.chips import CHIPS
from dora_jax.config import ConfigError, RolloutSection
from dora_jax.costs import CostOptions, Hardware, MeasuredCosts, ModelSizes, Roofline, open_costs, sizes_of
from dora_jax.costs.update import score_products
from dora_jax.models.families import KNOWN, new_config
from dora_jax.models.families.config import Kind
from dora_jax.plan import memory
from dora_jax.sim.config import WorkloadSection
from dora_jax.sim.workload import Workload, uniform
from dora_jax.types import SampleId

DENSE = ModelSizes(params=32e9)
MOE = ModelSizes(params=560e9, active_params=27e9, experts=512, experts_per_token=12)


def roofline(model=DENSE, hardware=None, **cost):
    return Roofline(model, Hardware(**(hardware or {})), CostOptions(**cost))


def test_a_small_batch_is_bound_by_weights_and_a_large_one_by_flops():
    ideal = {"decode_overhead_s": 0.0, "hbm_efficiency": 1.0, "flops_efficiency": 1.0}
    costs = roofline(hardware={"tensor": 1, "chip": "h200"}, **ideal)
    assert costs.decode_base_s(1) == pytest.approx(64e9 / 4800e9)
    assert costs.decode_base_s(1) == costs.decode_base_s(200)
    assert costs.decode_base_s(2000) == pytest.approx(2 * 32e9 * 2000 / 989e12)
    assert costs.decode_kv_s == pytest.approx(262144 / 4800e9)


def test_adapters_share_one_base_in_memory_and_in_a_tick():
    adapter, four = dataclasses.replace(DENSE, adapter_bytes=0.64e9), {"residents": 4, "chip": "h200"}
    alone, full = roofline(hardware={"chip": "h200"}), roofline(hardware=four)
    costs = roofline(adapter, four)
    page = 16 * 262144
    assert (full.pages - alone.pages) * page == pytest.approx(-3 * 64e9, rel=0.01)
    assert (costs.pages - alone.pages) * page == pytest.approx(-4 * 0.64e9, rel=0.01)
    read_s = 4 * 0.64e9 / (4 * 4800e9 * CostOptions().hbm_efficiency)
    assert costs.decode_base_s(8) - alone.decode_base_s(8) == pytest.approx(read_s)
    assert costs.load_s() < alone.load_s() and costs.mixes and not full.mixes


def test_a_trainer_that_pads_rows_and_repeats_forward_passes_computes_these_too():
    plain, padded, repeats = (
        roofline(hardware={"rollout_chips": 32}, **cost)
        for cost in ({}, {"train_row_tokens": 1000}, {"train_recomputed": 1.0})
    )
    assert padded.train_s(8, 2000, 6e5) == pytest.approx(plain.train_s(8, 8000, 8e6))
    assert repeats.train_s(8, 2000, 6e5) == pytest.approx(plain.train_s(8, 2000, 6e5) * 8 / 6)


def test_tensor_parallel_divides_the_work_and_pays_for_collectives():
    hardware = [{"tensor": t, "chip": "h200"} for t in (1, 4)]
    one, four = (roofline(hardware=h, decode_overhead_s=0.0).decode_base_s(1) for h in hardware)
    collectives = 64 * 2 * CHIPS["h200"].ici_latency_s
    assert one / 4 + collectives < four < one / 4 + 1.1 * collectives


def test_experts_are_read_as_they_are_chosen():
    costs = roofline(MOE, {"tensor": 8, "expert": 4, "chip": "h200"}, decode_overhead_s=0.0)
    touched = [costs.touched_params(batch) for batch in (1, 8, 64, 4096)]
    assert touched[0] == pytest.approx(27e9)
    assert touched == sorted(touched) and touched[-1] == pytest.approx(560e9)


@pytest.mark.parametrize(
    ("size", "chips", "params", "active", "kv_bytes", "copies"),
    [
        ("Qwen3-30B-A3B", 4, 30.5e9, 3.35e9, 2 * 48 * 2 * 4 * 128, 1),
        ("Qwen3-30B-A3B", 8, 30.5e9, 3.35e9, 2 * 48 * 2 * 4 * 128, 2),  # 4 heads of keys and values
        ("DeepSeek-V3", 32, 671e9, 37.6e9, 2 * 61 * 576, 32),  # every chip has the latents
        ("LongCat-Flash", 32, 561e9, 28e9, 2 * 2 * 28 * 576, 32),  # two attentions a layer
    ],
)
def test_a_model_that_is_known_by_name_brings_its_sizes(size, chips, params, active, kv_bytes, copies):
    sizes = sizes_of(ModelSizes(size=size), chips)
    assert (sizes.params, sizes.active_params) == pytest.approx((params, active), rel=0.01)
    assert (sizes.kv_bytes_per_token, sizes.kv_copies) == (kv_bytes, copies)
    hardware = {"tensor": chips, "chip": "v5p"}
    costs = roofline(ModelSizes(size=size), hardware)
    free = chips * 95e9 * 0.9 - 2 * sizes.params
    assert costs.pages == int(free / (kv_bytes * copies * 16)) and costs.kv_bytes(1) == kv_bytes
    assert costs.touched_params(1) == pytest.approx(sizes.active_params)
    assert sizes_of(MOE, chips) is MOE


def test_pages_are_what_weights_leave_and_two_residents_leave_less():
    one, two = (roofline(hardware={"residents": r}).pages for r in (1, 2))
    assert one == int((4 * 80e9 * 0.9 - 64e9) / (262144 * 16)) and two < one
    with pytest.raises(ConfigError, match="leave no KV cache on 1 h800"):
        roofline(hardware={"tensor": 1, "residents": 2})


def test_training_scales_with_the_trainer_and_has_a_fixed_part():
    small, large = (roofline(hardware={"chips": c, "rollout_chips": c // 2}, train_fixed_s=60.0) for c in (64, 128))
    assert small.train_s(100, 10**6, 0.0) - 60 == pytest.approx(2 * (large.train_s(100, 10**6, 0.0) - 60))


def test_measured_costs_are_read_and_interpolated(tmp_path):
    names = [
        "decode_kv_s",
        "prefill_fixed_s",
        "prefill_s_per_token",
        "train_fixed_s",
        "train_s_per_token",
        "load_s",
        "move_fixed_s",
        "move_s_per_token",
        "score_s",
        "pages",
    ]
    data = {"decode": [[1, 0.010], [9, 0.018]], **{name: i + 1 for i, name in enumerate(names)}}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(data))
    costs = open_costs(DENSE, Hardware(), CostOptions(path=str(path)))
    assert [costs.decode_base_s(b) for b in (1, 5, 9, 17)] == pytest.approx([0.010, 0.014, 0.018, 0.026])
    assert (costs.prefill_s(10), costs.train_s(1, 10, 0), costs.load_s(), costs.move_s(10)) == (32, 54, 6, 87)
    del data["load_s"]
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="is no file of measured costs: KeyError 'load_s'"):
        MeasuredCosts(str(path))


# ---------------------------------------------------------------- workload


def lengths(section, groups=200, samples=16):
    work = Workload(section)
    return [[work.length(SampleId(g, i)) for i in range(samples)] for g in range(groups)]


def test_a_length_depends_on_its_identity_only():
    section = WorkloadSection(turns=3.0, environment_s=2.0)
    first, second = Workload(section), Workload(section)
    ids = [SampleId(g, i) for g in (5, 0, 77) for i in (3, 0)]
    assert [first.turns(i) for i in ids] == [second.turns(i) for i in reversed(ids)][::-1]
    other = Workload(dataclasses.replace(section, seed=1))
    assert [first.length(i) for i in ids] != [other.length(i) for i in ids]


def test_uniform_is_uniform_and_never_at_its_ends():
    values = [uniform(3, 1, i) for i in range(20_000)]
    assert 0 < min(values) and max(values) < 1
    for tenth in range(10):
        assert sum(tenth / 10 <= v < (tenth + 1) / 10 for v in values) == pytest.approx(2000, abs=150)


@pytest.mark.parametrize("distribution", ["lognormal", "heavy"])
def test_the_mean_is_as_asked_with_the_cut_included(distribution):
    section = WorkloadSection(distribution=distribution, mean_tokens=900.0, max_new_tokens=8000, group_correlation=0.3)
    flat = [n for group in lengths(section, 1500) for n in group]
    assert sum(flat) / len(flat) == pytest.approx(900, rel=0.03)
    assert max(flat) == 8000 and sorted(flat)[int(0.99 * len(flat))] > 6 * sorted(flat)[len(flat) // 2]


def test_siblings_are_as_alike_as_asked():
    def between(correlation):
        groups = lengths(WorkloadSection(group_correlation=correlation, sigma=0.5), 400, 8)
        means = [sum(g) / len(g) for g in groups]
        mean = sum(means) / len(means)
        return sum((m - mean) ** 2 for m in means)

    assert between(0.0) * 3 < between(0.5) < between(1.0)


def test_lengths_from_a_file(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("3\n5\n\n1000\n")
    section = WorkloadSection(distribution="file", path=str(path), mean_tokens=0.0)
    assert {n for group in lengths(section, 50) for n in group} == {3, 5, 1000}
    path.write_text("three\n")
    with pytest.raises(ConfigError, match="is not a list of lengths"):
        Workload(section)


def test_turns_add_up_to_the_length():
    work = Workload(WorkloadSection(turns=4.0, environment_s=3.0, observation_tokens=11))
    ids = [SampleId(g, 0) for g in range(2000)]
    counts = []
    for id in ids:
        turns = work.turns(id)
        assert sum(t.tokens for t in turns) == work.length(id)
        assert turns[-1].environment_s == 0 and all(
            t.environment_s > 0 and t.observation_tokens == 11 for t in turns[:-1]
        )
        counts.append(len(turns))
    assert sum(counts) / len(counts) == pytest.approx(4.0, rel=0.1)


def test_tasks_of_a_mix_take_turns():
    mix = {"short": {"weight": 3, "mean_tokens": 100.0}, "long": {"mean_tokens": 5000.0, "filtered_share": 1.0}}
    work = Workload(WorkloadSection(mix=mix))
    assert [work.task(g) for g in range(5)] == ["short", "long", "short", "short", "short"]
    assert [g for g in range(8) if work.filtered(g)] == [1, 5]
    assert work.length(SampleId(1, 0)) > 3 * work.length(SampleId(0, 0))
    with pytest.raises(ConfigError, match="workload.mix.short.men_tokens: unknown field; the nearest is mean_tokens"):
        Workload(WorkloadSection(mix={"short": {"men_tokens": 3}}))


@pytest.mark.parametrize(("size", "window", "share"), [("Gemma-3-4B", 1024, 29 / 34), ("Gemma-4-E2B", 512, 12 / 18)])
def test_layers_with_a_window_hold_and_read_what_it_holds(size, window, share):
    """The memory plan finds as many pages in the same memory, but for those that prefixes keep."""
    sizes = sizes_of(ModelSizes(size=size), 1)
    assert sizes.window == window and sizes.window_share == pytest.approx(share)
    costs = roofline(ModelSizes(size=size), {"tensor": 1, "chip": "v6e", "slots": 64, "hbm_share": 0.9})
    chip = CHIPS["v6e"]
    whole = sizes.kv_bytes_per_token / (chip.hbm_bytes_per_s * 0.8)
    assert costs.decode_kv_s + costs.window_kv_s == pytest.approx(whole)
    assert costs.window_kv_s == pytest.approx(share * whole)
    rollout = RolloutSection(
        slots=64, page_size=16, max_prompt_tokens=16, max_new_tokens=30000, decode_steps=1, pages=0
    )
    free = chip.hbm_bytes * 0.9 - 2 * sizes.params
    pages, local = memory.pages_within(KNOWN[size], rollout, "bfloat16", free)
    assert 0 < local < pages
    assert min(costs.pages, memory.enough_pages(rollout)) == pytest.approx(pages, rel=0.05)
    assert pages > 1.4 * free / (16 * sizes.kv_bytes_per_token)
    assert costs.kv_bytes(window) == window * sizes.kv_bytes_per_token
    assert costs.kv_bytes(5000) == pytest.approx(
        sizes.kv_bytes_per_token * (share * window + (1 - share) * 5000), rel=1e-12
    )
    fixed = costs.return_s()
    assert costs.return_s(5000, 9) - fixed == pytest.approx(costs.return_s(5000) + costs.return_s(9) - 2 * fixed)


def test_flops_of_scores_are_those_of_the_pairs_that_see_each_other():
    cfg = new_config("gemma3_text", vocab_size=64, d_model=32, n_layers=5, n_heads=4, n_kv_heads=2, head_dim=16,
                     d_ff=64, kinds=(Kind(window=7), Kind(window=20), Kind()))  # fmt: skip
    for length, before in ((1, 0), (6, 3), (30, 0), (30, 11), (3, 40)):
        pairs = 0
        for layer in range(5):
            window = cfg.kind(layer).window or 1000
            pairs += sum(min(before + i, window) for i in range(1, length + 1))
        assert score_products(cfg, length, before) == 2 * 2 * 4 * 16 * pairs
