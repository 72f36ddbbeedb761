"""What a platform chooses, per platform; what it refuses; every pair of configs/qwen3.py; what slices.py finds."""

import dataclasses
import re
from operator import attrgetter
from pathlib import Path

import pytest
from absl import flags as absl_flags

from dora_jax.base import chips
from dora_jax.bench.harness import TOY
from dora_jax.cli import flags
from dora_jax.config import (
    ClusterSection,
    Config,
    ConfigError,
    ModelSection,
    OrchestratorSection,
    RolloutSection,
    SftSection,
    TaskSection,
    TrainerSection,
)
from dora_jax.config import files as config_files
from dora_jax.models import decoder
from dora_jax.models.families import KNOWN
from dora_jax.models.lora_config import Lora
from dora_jax.plan import devices, presets, validate
from dora_jax.runtime import cluster_backend
from dora_jax.runtime.assembly import run

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
LENGTHS = {"max_prompt_tokens": 1024, "max_new_tokens": 3072}


def on(slice_name, rollout=None, trainer=None, size="Qwen3-0.6B", **changes):
    """A Config for this slice: answers of 4096 tokens in all."""
    return Config(
        slice=slice_name,
        task=TaskSection(name="rows", path="rows.jsonl"),
        placement="disjoint",
        model=ModelSection(size=size),
        rollout=RolloutSection(instances=0, **(LENGTHS | (rollout or {}))),
        trainer=TrainerSection(**({"pack_tokens": 4096, "remat": "full", "micro_batches": 8} | (trainer or {}))),
        **changes,
    )


def resolved(asked):
    return presets.resolve(asked, presets.machines(asked), presets.model_of(asked))


def sentences(asked):
    return presets.problems(presets.plan(asked, presets.machines(asked), presets.model_of(asked)))


def chosen(asked):
    return {choice.field: choice.value for choice in resolved(asked)[1]}


# ------------------------------------------------------------- what is chosen

CPU = {
    "model.dtype": "float32",
    "rollout.attention": "reference",
    "rollout.page_size": 16,
    "rollout.prefill_chunk": 64,
    "rollout.prefill_tokens": 2048,
    "rollout.prefill_call_tokens": 128,
    "rollout.decode_steps": 8,
    "rollout.late_results": "off",
    "rollout.ladder": "on",
    "trainer.attention": "reference",
    "trainer.logits_bytes": 256 * 2**20,
}
TPU = {
    "model.dtype": "bfloat16",
    "rollout.attention": "tpu",
    "rollout.page_size": 64,
    "rollout.decode_steps": 2,
    "rollout.late_results": "on",
    "rollout.ladder": "off",
    "trainer.attention": "splash",
    "trainer.compiler_options": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000},
}
GPU = TPU | {"rollout.attention": "gpu", "trainer.attention": "cudnn", "trainer.compiler_options": None}


@pytest.mark.parametrize(
    "slice_name, expected",
    [
        ("", CPU),
        ("laptop", CPU),
        ("v5e-8", TPU | {"trainer.logits_bytes": 953 * 2**20}),
        ("v5litepod-8", TPU),
        ("v6e-8", TPU | {"trainer.logits_bytes": 2**30}),
        ("h100-8", GPU | {"trainer.logits_bytes": 2**30}),
        ("tpu7x-8", TPU | {"rollout.compiler_options": {"xla_tpu_control_large_2nd_minor_layout_for_x16": 0}}),
    ],
)
def test_a_platform_chooses(slice_name, expected):
    found = chosen(on(slice_name))
    assert {field: found.get(field) for field in expected} == expected
    assert all(choice.reason for choice in resolved(on(slice_name))[1])


def test_nothing_stays_open_and_resolving_again_changes_nothing():
    done, _ = resolved(on("v6e-8"))
    again, choices = presets.resolve(done, presets.machines(done), presets.model_of(done))
    assert again == done and choices == ()
    assert not {field for field in CPU if attrgetter(field)(done) in presets.OPEN} and done.rollout.pages


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"exact": True}},
        {"rollout": {"narrow_rows": 4}},
        {"rollout": {"slots": 8}},
        {"orchestrator": {"mode": "sync"}},
        {"cluster": {"launcher": "process", "hosts_per_instance": 2, "devices_per_host": 1}},
    ],
)
def test_dispatches_of_one_shape_where_tokens_must_repeat_or_few_rows_gain_nothing(changes):
    sections = {name: dataclasses.replace(getattr(Config(), name), **fields) for name, fields in changes.items()}
    assert resolved(Config())[0].rollout.ladder == "on"
    assert resolved(dataclasses.replace(Config(), **sections))[0].rollout.ladder == "off"


@pytest.mark.parametrize(
    ("changes", "ladder", "scored_by"),
    [
        ({}, "off", "the shape that drew all"),
        ({"ladder": "on"}, "on", "as many rows as drew it"),
        ({"narrow_rows": 4}, "off", "as many rows as drew it"),
    ],
)
def test_the_plan_names_the_dispatches_that_score_what_is_exact(changes, ladder, scored_by):
    config, choices = resolved(Config(rollout=RolloutSection(exact=True, **changes)))
    reasons = {choice.field: choice.reason for choice in choices}
    assert config.rollout.ladder == ladder and scored_by in reasons["rollout.exact"]


def test_adapters_are_all_resident():
    config = dataclasses.replace(Config(), lora=Lora(rank=8))
    done, choices = resolved(config)
    assert done.rollout.residents == done.orchestrator.max_versions + 1
    assert "rollout.residents" in {choice.field for choice in choices}
    asked = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, residents=2))
    assert resolved(asked)[0].rollout.residents == 2


@pytest.mark.parametrize(
    ("devices_there", "instances", "residents", "expected"),
    [(1, 0, 0, (2, 1)), (1, 0, 1, (1, 2)), (1, 2, 0, (1, 2)), (4, 0, 0, (1, 2))],
)
def test_a_single_device_has_one_instance_of_two_versions(devices_there, instances, residents, expected):
    asked = Config(cpu_devices=devices_there, rollout=RolloutSection(instances=instances, residents=residents))
    config = presets.resolve(asked, presets.machines(asked))[0]
    made = devices.plan(devices_there, config).instances
    assert (config.rollout.residents, len(made)) == expected


@pytest.mark.parametrize(
    ("devices_there", "asked", "expected"),
    [
        (1, {}, 0.25),
        (2, {}, 1.25),
        (1, {"groups_per_step": 2}, 0.5),
        (1, {"mode": "dora_paper"}, 1.25),
        (1, {"inflight": 1.25}, 1.25),
        (1, {"inflight": 0.75}, 0.75),
    ],
)
def test_few_groups_are_in_flight_where_trainer_and_rollouts_share_the_only_device(devices_there, asked, expected):
    given = Config(cpu_devices=devices_there, orchestrator=OrchestratorSection(**{"inflight": 0.0, **asked}))
    assert resolved(given)[0].orchestrator.inflight == expected


def test_what_the_user_sets_is_kept():
    asked = on(
        "v6e-8",
        {"attention": "tokamax", "page_size": 256, "pages": 77, "late_results": "off", "expert_matmul": "scan"},
        {"logits_bytes": 5, "compiler_options": {"a": 1}},
    )
    done, choices = resolved(asked)
    assert done.rollout == dataclasses.replace(
        asked.rollout,
        slots=32,
        residents=1,
        decode_steps=2,
        ladder="off",
        prefill_chunk=512,
        prefill_tokens=1024,
        prefill_call_tokens=1024,
    )
    assert done.trainer == dataclasses.replace(
        asked.trainer, attention="splash", share_prompts="off", expert_matmul="megablox", row_splits=1
    )
    assert {choice.field for choice in choices} == {
        "rollout.slots",
        "rollout.ladder",
        "rollout.decode_steps",
        "rollout.prefill_chunk",
        "rollout.prefill_tokens",
        "trainer.attention",
        "trainer.expert_matmul",
        "rollout.prefill_call_tokens",
        "model.dtype",
        "trainer.share_prompts",
    }


@pytest.mark.parametrize("slots, new, size", [(32, 3072, 64), (256, 31744, 64), (256, 64512, 128), (512, 64512, 256)])
def test_the_page_table_fits_the_scalar_memory(slots, new, size):
    rollout = {"slots": slots, "max_new_tokens": new}
    assert resolved(on("v5e-8", rollout))[0].rollout.page_size == size
    if size > 64:
        refusals = validate.problems(on("v5e-8", rollout | {"page_size": size // 2, "pages": 2000}), "evaluate")
        assert any(refusal.startswith(f"rollout.page_size {size // 2} makes a page table of") for refusal in refusals)


@pytest.mark.parametrize(
    "size, groups, rollout, slots",
    [
        ("Qwen3-0.6B", 16, {"memory_share": 0.9}, 40),  # 1.25 x 16 groups of 8 over four instances
        ("Qwen3-0.6B", 16, {"max_new_tokens": 15360}, 32),  # the pages hold fewer: the fewest that are chosen
        ("Qwen3-0.6B", 128, {}, 72),
        ("Qwen3-0.6B", 128, {"decode_rows": 48}, 48),  # calls of so many rows
        ("Qwen3-0.6B", 2, {}, 32),
        ("Qwen3-8B", 16, {"tensor": 2}, 56),
    ],
)
def test_slots_are_those_that_groups_ask_for_and_the_memory_holds(size, groups, rollout, slots):
    """Each chosen slot can hold a sample whose length is three quarters of the limit."""
    pack = {"pack_tokens": 1024 + rollout.get("max_new_tokens", 3072), "micro_batches": 32}
    section = OrchestratorSection(groups_per_step=groups, group_size=8)
    asked = on("v6e-8", rollout, pack, size, orchestrator=section)
    done, choices = resolved(asked)
    assert done.rollout.slots == slots and "rollout.slots" in {choice.field for choice in choices}
    planned = presets.plan(asked, presets.machines(asked), presets.model_of(asked)).memory
    assert slots == presets.SLOTS or planned.slots >= slots
    more = dataclasses.replace(asked, rollout=dataclasses.replace(asked.rollout, slots=slots + 48))
    larger = presets.plan(more, presets.machines(more), presets.model_of(more)).memory
    unit = rollout.get("decode_rows", presets.SLOTS_MULTIPLE)
    assert larger.slots < slots + unit or slots + unit > larger.demand


def test_8b_on_a_v5p_fills_its_pages_with_samples():
    tree = config_files.load_file(f"{CONFIGS / 'qwen3.py'}:8B,v5p-16")
    tree.task.path = "rows.jsonl"
    planned = presets.with_model(validate.read(tree, "evaluate"), KNOWN["Qwen3-8B"])
    rollout = planned.config.rollout
    assert rollout.slots == planned.memory.demand == 320
    assert rollout.slots * planned.memory.needed_pages > 0.6 * rollout.pages


@pytest.mark.parametrize("kernel, fits", [("tpu", 112), ("gpu", 320)])
def test_slots_are_no_more_than_the_page_table_of_a_kernel_takes(kernel, fits):
    rollout = {"max_prompt_tokens": 65536, "max_new_tokens": 65536, "pages": 10**6, "attention": kernel}
    asked = on("v5p-16", rollout, {"pack_tokens": 131072, "micro_batches": 1},
               orchestrator=OrchestratorSection(groups_per_step=128, group_size=8))  # fmt: skip
    assert resolved(asked)[0].rollout.slots == fits


@pytest.mark.parametrize("slice_name, changes", [("v6e-8", {"pack_tokens": 4160}), ("h100-8", {"context": 2})])
def test_a_kernel_that_does_not_take_the_rows_is_not_chosen_and_why_is_reported(slice_name, changes):
    (choice,) = (
        choice for choice in resolved(on(slice_name, trainer=changes))[1] if choice.field == "trainer.attention"
    )
    assert choice.value == "reference" and f"trainer.{next(iter(changes))}" in choice.reason


def test_the_quickstart_runs_on_a_cpu_as_it_was_tuned():
    tree = config_files.load_file(f"{CONFIGS / 'quickstart.py'}")
    done, _ = resolved(validate.from_config_dict(tree))
    own = {"rollout.decode_steps": 1}
    assert {field: attrgetter(field)(done) for field in CPU} == CPU | own
    assert done.rollout.pages == 512 and done.rollout.compiler_options == done.trainer.compiler_options == {}
    assert done.trainer.moments == "float32"


# ------------------------------------------------------------------ clusters


def cluster(**changes):
    section = ClusterSection(launcher="ray", trainer_slice="v5p-8", instance_slice="v6e-4")
    asked = on("", {"tensor": 4, "attention": "auto"}, size="Qwen3-8B", cluster=section)
    return dataclasses.replace(asked, rollout=dataclasses.replace(asked.rollout, instances=3), **changes)


def test_trainer_fields_follow_the_trainers_slice_and_rollout_fields_the_replicas():
    found = presets.machines(cluster())
    assert [machine.chip for machine in found] == ["v5p", "v6e"] and [machine.hosts for machine in found] == [1, 1]
    small, large = (
        resolved(cluster(cluster=dataclasses.replace(cluster().cluster, instance_slice=name)))[0].rollout.pages
        for name in ("v6e-4", "v5p-8")
    )
    assert large > 2.5 * small > 0


def test_a_gang_has_the_pages_that_its_controller_reports():
    done, _ = resolved(cluster())
    received = validate.from_config_dict(cluster_backend.gang_config(done), "evaluate")
    assert received.rollout == done.rollout and received.trainer == done.trainer and received.model == done.model
    assert received.cluster.instance_slice == "v6e-4"


def test_a_process_refuses_what_was_resolved_for_another_machine():
    devices.check_slice("cluster.instance_slice", "")
    with pytest.raises(ConfigError, match="cluster.instance_slice: v6e-4, but this process has .* devices of cpu"):
        devices.check_slice("cluster.instance_slice", "v6e-4")
    with pytest.raises(ConfigError, match="^slice: v5e-8, but this process"):
        validate.settle(on("v5e-8"))


def test_virtual_devices_of_a_cluster_are_a_cpu_wherever_ray_puts_them():
    section = dataclasses.replace(cluster().cluster, devices_per_host=4, trainer_hosts=2)
    found = presets.machines(cluster(cluster=section))
    assert [(machine.platform, machine.devices) for machine in found] == [("cpu", 8), ("cpu", 4)]


# ------------------------------------------------------------------ refusals


def scored(trainer_hosts, hosts_per_instance, tensor):
    """A cluster whose trainer has rollout.exact, two virtual devices a process."""
    section = ClusterSection(
        launcher="process", trainer_hosts=trainer_hosts, hosts_per_instance=hosts_per_instance, devices_per_host=2
    )
    return Config(cluster=section, rollout=RolloutSection(exact=True, instances=2, tensor=tensor))


@pytest.mark.parametrize(
    ("processes", "fits"),
    [
        ((2, 2, 4), True),
        ((4, 2, 4), True),
        ((3, 1, 2), True),
        ((3, 1, 1), True),
        ((1, 2, 4), False),
        ((4, 2, 2), False),
    ],
)
def test_a_trainer_that_scores_makes_up_instances(processes, fits):
    assert (not sentences(scored(*processes))) == fits, sentences(scored(*processes))
    with pytest.raises(ConfigError, match="rollout.exact: .* its 2 devices do not make up instances of .*tensor = 3"):
        devices.plan(8, Config(trainer=TrainerSection(fsdp=2), rollout=RolloutSection(exact=True, tensor=3)))


@pytest.mark.parametrize(
    "asked, problem",
    [
        (on("v5e-8", {"attention": "gpu"}), "rollout.attention: the kernel 'gpu' is for gpu, and this is v5e-8"),
        (on("laptop", {"attention": "tpu"}), "rollout.attention: the kernel 'tpu' is for tpu, and this is laptop"),
        (on("h100-8", trainer={"attention": "splash"}), "trainer.attention=splash is a kernel for TPUs"),
        (
            dataclasses.replace(on("h100-8", trainer={"attention": "cudnn"}), model=ModelSection(dtype="float32")),
            "trainer.attention=cudnn computes in bfloat16",
        ),
        (on("v6e-8", {"pages": 10**6}), "rollout.pages: 1000000 pages take"),
        (
            on("v5e-8", {"tensor": 1}, size="Qwen3-8B", trainer={"fsdp": 4}),
            "rollout.tensor: weights, calls and one longest sample need",
        ),
        (
            on("v6e-8", trainer={"fsdp": 4, "remat": "none", "micro_batches": 1}, size="Qwen3-1.7B"),
            "trainer.micro_batches: an update needs",
        ),
        (on("v6e-8", trainer={"fsdp": 4, "micro_batches": 32}, size="Qwen3-32B"), "trainer.fsdp: an update needs"),
        (
            on("v5p-128", size="gpt-oss-20b"),
            "rollout.attention: the kernel 'tpu' computes no attention sinks, which this gpt_oss has; reference does",
        ),
        (
            dataclasses.replace(cluster(), rollout=dataclasses.replace(cluster().rollout, exact=True)),
            "rollout.exact: the trainer scores with the instances' own calls, whose last bits differ on v5p-8 and on v6e-4",
        ),
        (
            scored(trainer_hosts=3, hosts_per_instance=2, tensor=4),
            "rollout.exact: the trainer scores with the instances' own calls, and its 3 processes of 2 devices (cluster.",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_its_field(asked, problem):
    assert any(line.startswith(problem) for line in sentences(asked)), sentences(asked)


def test_a_refusal_names_what_helps():
    (line,) = (
        line
        for line in sentences(on("v6e-8", trainer={"fsdp": 4, "remat": "none", "micro_batches": 1}, size="Qwen3-1.7B"))
        if line.startswith("trainer.")
    )
    count = int(line.rpartition("trainer.micro_batches=")[2])
    assert not any(
        p.startswith("trainer.")
        for p in sentences(on("v6e-8", trainer={"fsdp": 4, "remat": "none", "micro_batches": count}, size="Qwen3-1.7B"))
    )


@pytest.mark.parametrize(
    "name, problem", [("v5e-7", "'v5e-7': 7 is not a power of two"), ("mars-8", "'mars-8' is unknown")]
)
def test_an_unknown_slice_is_refused(name, problem):
    tree = config_files.load_file(f"{CONFIGS / 'quickstart.py'}")
    tree.slice = name
    with pytest.raises(ConfigError, match=f"^slice: {problem}"):
        validate.from_config_dict(tree)


def test_a_folder_of_another_size_is_refused():
    asked = on("v6e-8", size="Qwen3-8B")
    line, *_ = presets.problems(presets.plan(asked, presets.machines(asked), KNOWN["Qwen3-0.6B"]))
    assert line.endswith("has 28 layers of width 1024, and model.size Qwen3-8B has 36 of 4096")


@pytest.mark.parametrize(("tensor", "refused"), [(2, True), (4, False)])
def test_a_kernel_that_reads_one_wide_head_a_device_says_so(tensor, refused):
    asked = on("v6e-8", rollout={"tensor": tensor}, size="Gemma-3-4B")
    asked = dataclasses.replace(asked, rollout=dataclasses.replace(asked.rollout, instances=1))
    lines = presets.problems(presets.plan(asked, presets.machines(asked), KNOWN["Gemma-3-4B"]))
    assert any("reads one KV head of 256 numbers a device, and 4 of them" in line for line in lines) == refused


def test_pages_of_windows_that_no_layer_has_are_refused():
    asked = on("v6e-8", rollout={"window_pages": 200}, size="Qwen3-8B")
    (line,) = presets.problems(presets.plan(asked, presets.machines(asked), KNOWN["Qwen3-8B"]))
    assert line == "rollout.window_pages: no layers of this qwen3 attend within a window beside others in full"


# ------------------------------------------------------------------- qwen3.py

SMALLEST = {"0.6B": "laptop", "1.7B": "v5e-8", "8B": "h100-8", "32B": "v5p-128"}
SLICES = ("laptop", "v5e-8", "v6e-8", "h100-8", "v5p-16", "v5p-128")


@pytest.mark.parametrize("slice_name", SLICES)
@pytest.mark.parametrize("size", SMALLEST)
def test_every_pair_passes_a_dry_run_or_names_the_smallest_slice(size, slice_name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asks = [
        f"--config={CONFIGS / 'qwen3.py'}:{size},{slice_name}",
        "--config.model.path=a",
        "--config.task.path=b.jsonl",
    ]
    if SLICES.index(slice_name) < SLICES.index(SMALLEST[size]):
        with pytest.raises(
            ConfigError, match=f"does not fit {slice_name}; the smallest slice that holds it is {SMALLEST[size]}"
        ):
            flags.parse(["program", *asks, "--dry_run"], "train", absl_flags.FlagValues())
        return
    asked = flags.parse(["program", *asks, "--dry_run"], "train", absl_flags.FlagValues())
    printed = flags.describe(asked)
    assert "memory of a device of the trainer" in printed and "rollout.pages=" in printed
    assert slice_name == "laptop" or "model.dtype=bfloat16" in printed


# ------------------------------------------------------ slices.py, gemma3.py


@pytest.mark.parametrize(
    "asked", ["1B,v5e-8", "4B,v5e-8,adapters", "4B,v5p-16", "27B,v5p-16,adapters", "E2B,v5e-8,adapters", "E2B,v5p-16"]
)
def test_gemma_gets_a_layout_that_fits(asked, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asks = [f"--config={CONFIGS / 'gemma3.py'}:{asked}", "--config.model.path=a", "--config.task.path=b.jsonl"]
    settled = flags.parse(["program", *asks, "--dry_run"], "train", absl_flags.FlagValues())
    assert re.search(
        r"KV pages: \d+ pages of 64 tokens(, and \d+ of the \d+ layers with a window)?\n", flags.describe(settled)
    )
    assert bool(settled.config.lora.rank) == asked.endswith("adapters")


@pytest.mark.parametrize(
    ("asked", "pages", "chosen"),
    [
        ("Qwen3.5-4B,v5e-8,adapters", r"\d+ pages of 64 tokens, and \d+ recurrent states of 49\.1 MiB", {}),
        ("Qwen3.5-4B,v5p-16", r"\d+ pages of 64 tokens, and \d+ recurrent states of 49\.1 MiB", {}),
        (
            "Qwen3.5-35B-A3B,v5p-16,adapters",
            r"\d+ pages of 64 tokens, and \d+ recurrent states of 61\.4 MiB",
            {"expert": 4, "routing_replay": "rollout"},
        ),
        ("gpt-oss-20b,v6e-8,adapters", r"\d+ pages of 64 tokens", {"expert": 4}),
    ],
)
def test_any_known_model_gets_a_layout_that_fits(asked, pages, chosen, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asks = [f"--config={CONFIGS / 'slices.py'}:{asked}", "--config.model.path=a", "--config.task.path=b.jsonl"]
    settled = flags.parse(["program", *asks, "--dry_run"], "train", absl_flags.FlagValues())
    printed = flags.describe(settled)
    assert re.search(rf"KV pages: {pages}\n", printed) and bool(settled.config.lora.rank) == ("adapters" in asked)
    assert {field: getattr(settled.config.trainer, field) for field in chosen} == chosen
    assert ("rollout.attention=tpu" in printed) != asked.startswith("gpt-oss")


def test_where_pages_are_short_layers_with_a_window_have_fewer(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asks = [f"--config={CONFIGS / 'gemma3.py'}:27B,v5p-64", "--config.model.path=a", "--config.task.path=b.jsonl"]
    printed = flags.describe(flags.parse(["program", *asks, "--dry_run"], "train", absl_flags.FlagValues()))
    pages, of_windows = re.search(r"KV pages: (\d+) pages of \d+ tokens, and (\d+) of the 52 layers", printed).groups()
    assert 0 < int(of_windows) < int(pages)


@pytest.mark.parametrize(
    ("asked", "lacking"),
    [
        (
            "Qwen3.5-4B,v5e-8",
            r"an update needs [\d.]+ GiB a device of v5e-8, which has 14.9; the smallest .* is v5p-16",
        ),
        ("Qwen3.5-35B-A3B,v5p-16", r"needs [\d.]+ GiB a device of v5p-8, which has 88.5; the smallest .* is v5p-64"),
        ("gpt-oss-20b,v5e-8,adapters", r"needs [\d.]+ GiB of the 14.9 of a device, and less .* it is v6e-8"),
        ("Qwen9-1B,v5e-8", "the argument is 'Qwen9-1B,v5e-8'; it is SIZE,SLICE or SIZE,SLICE,adapters with a size of"),
        ("4B,v5e-8", r"an update needs [\d.]+ GiB a device of v5e-8, which has 14.9; the smallest .* it is v6e-8"),
        ("27B,v5p-16", r"an update needs [\d.]+ GiB a device of v5p-8, which has 88.5; the smallest .* it is v5p-64"),
        ("E2B,v5e-8", r"Gemma-4-E2B does not fit v5e-8: an update needs [\d.]+ GiB .* that holds it is v5p-16"),
        ("27B", "the argument is '27B'; it is SIZE,SLICE or SIZE,SLICE,adapters with"),
    ],
)
def test_what_does_not_hold_a_model_is_refused_with_its_bytes(asked, lacking):
    file = "gemma3.py" if asked[0] in "24E" else "slices.py"
    asks = [f"--config={CONFIGS / file}:{asked}", "--config.model.path=a", "--config.task.path=b"]
    with pytest.raises(ConfigError, match=lacking):
        flags.parse(["program", *asks, "--dry_run"], "train", absl_flags.FlagValues())


def test_a_fresh_model_of_windows_needs_one():
    sizes = dict(family="gemma3_text", d_model=32, n_layers=6, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=32)
    model = presets.fresh_model(SftSection(window=24, **sizes), 64)
    assert model.windows == (24,) * 5 and model.local_window == 24 and model.query_scale == 16
    with pytest.raises(ValueError, match="sft.window is 0, and gemma3_text needs it"):
        presets.fresh_model(SftSection(**sizes), 64)
    with pytest.raises(ValueError, match="sft.window is 24, and qwen3 has none"):
        presets.fresh_model(SftSection(window=24), 64)


# ----------------------------------------------------------------- sparse.py


@pytest.mark.parametrize(
    ("model", "slice_name", "chosen"),
    [
        (
            "Qwen3-30B-A3B",
            "v5p-16",
            {"expert": 8, "micro_batches": 8, "moments": "bfloat16", "optimizer_memory": "device"},
        ),
        ("Qwen3-30B-A3B", "v6e-64", {"expert": 8, "micro_batches": 4, "moments": "float32"}),
        ("DeepSeek-V3", "v5p-512", {"expert": 64, "expert_dispatch": "all_to_all", "moments": "bfloat16"}),
        ("LongCat-Flash", "v5p-512", {"expert": 64, "expert_dispatch": "all_to_all", "tensor": 2}),
    ],
)
def test_a_sparse_model_gets_a_layout_that_fits(model, slice_name, chosen, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asks = [f"--config={CONFIGS / 'sparse.py'}:{model},{slice_name}", "--config.model.path=a", "--config.task.path=b"]
    asked = flags.parse(["program", *asks, "--dry_run"], "train", absl_flags.FlagValues())
    assert {field: getattr(asked.config.trainer, field) for field in chosen} == chosen
    printed = flags.describe(asked)
    assert f"of which a token meets {KNOWN[model].active_params / 1e9:.2f}e9" in printed
    assert "trainer.expert_matmul=megablox" in printed


def test_a_slice_that_is_too_small_for_a_sparse_model_names_the_one_that_holds_it():
    asks = [f"--config={CONFIGS / 'sparse.py'}:DeepSeek-V3,v5p-128", "--config.model.path=a", "--config.task.path=b"]
    with pytest.raises(
        ConfigError, match="DeepSeek-V3 does not fit v5p-128; the smallest slice that holds it is v5p-512"
    ):
        flags.parse(["program", *asks, "--dry_run"], "train", absl_flags.FlagValues())


def test_a_cpu_that_multiplies_bfloat16_does_so_for_models_that_no_cache_holds(tmp_path):
    cpu, large = chips.Machine(devices=1, host_devices=1, bfloat16=True), KNOWN["Qwen3-0.6B"]

    def types(machine=cpu, model=large, weights="", matmul=""):
        asked = Config(rollout=RolloutSection(weights=weights), trainer=TrainerSection(matmul=matmul))
        found = presets.plan(asked, presets.Machines(machine, machine), model)
        again = presets.with_model(presets.with_model(found, None), model)  # a model that is made later
        assert (again.config, again.choices) == (found.config, found.choices)
        return found.config.rollout.weights, found.config.trainer.matmul

    assert types() == ("bfloat16", "bfloat16")
    assert types(weights="published", matmul="float32") == ("published", "float32")
    assert "rollout.weights: bfloat16 is for a CPU" in sentences(on("v5e-8", {"weights": "bfloat16"}))[0]
    assert types(model=decoder.new_config("qwen3", **TOY)) == ("", "")
    assert types(dataclasses.replace(cpu, bfloat16=False)) == ("", "")
    flags_of = tmp_path / "cpuinfo"
    for flags_there, expected in (("fpu avx512_bf16", True), ("fpu avx512f", False)):
        flags_of.write_text(f"flags\t\t: {flags_there}\n")
        assert devices.multiplies_bfloat16(flags_of) == expected
    assert not devices.multiplies_bfloat16(tmp_path / "none")


@pytest.mark.parametrize(
    "slice_name,answers,row", [("", 40, 256), ("", 400, 512), ("v5e-8", 40, 1024), ("v5e-8", 4000, 4096)]
)
def test_rows_hold_a_longest_sample(slice_name, answers, row):
    asked = on(slice_name, {"max_prompt_tokens": 64, "max_new_tokens": answers}, {"pack_tokens": 0})
    assert resolved(asked)[0].trainer.pack_tokens == row


@pytest.mark.parametrize(
    "slice_name, trainer, splits",
    [
        ("v5p-16", {"pack_tokens": 4096}, 1),
        ("v5p-16", {"pack_tokens": 12288}, 2),
        ("v5p-16", {"pack_tokens": 131072}, 8),
        ("v5p-16", {"pack_tokens": 131072, "context": 2}, 1),
        ("v5p-16", {"pack_tokens": 131072, "row_splits": 2}, 2),
        ("h100-8", {"pack_tokens": 32768}, 1),  # prompts are shared
        ("h100-8", {"pack_tokens": 32768, "share_prompts": "off"}, 8),
        ("laptop", {"pack_tokens": 32768}, 1),
        ("laptop", {"row_splits": 4}, 4),
    ],
)
def test_long_rows_of_short_samples_are_split(slice_name, trainer, splits):
    config, choices = resolved(on(slice_name, trainer=trainer))
    assert config.trainer.row_splits == splits == run.batch_layout(config, 1).splits
    assert config.trainer.share_prompts == "off" or splits == 1
    chosen_here = splits > 1 and "row_splits" not in trainer
    assert [choice.value for choice in choices if choice.field == "trainer.row_splits"] == [splits] * chosen_here
