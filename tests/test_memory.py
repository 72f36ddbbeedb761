"""The memory plan against sums made by hand, and against the parameters that the decoder makes."""

import dataclasses
import math

import jax
import pytest

from dora_jax.config import Config, ModelSection, OrchestratorSection, RolloutSection, TrainerSection
from dora_jax.models import decoder
from dora_jax.models.families import KNOWN, new_config
from dora_jax.models.lora_config import Lora, adapter_params
from dora_jax.plan import budget, memory, presets

QWEN_8B = KNOWN["Qwen3-8B"]
GIB = 2**30
SMALL = new_config("qwen3", vocab_size=100, d_model=8, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=16)
SECTION = presets.on_cpu(RolloutSection(slots=4, max_prompt_tokens=32, max_new_tokens=32))
CONFIG = Config(
    rollout=SECTION,
    trainer=presets.on_cpu(TrainerSection(pack_tokens=64, micro_batches=2)),
    orchestrator=OrchestratorSection(groups_per_step=2, group_size=4),
    model=ModelSection(dtype="bfloat16"),
)


def changed(**sections):
    return dataclasses.replace(
        CONFIG, **{name: dataclasses.replace(getattr(CONFIG, name), **changes) for name, changes in sections.items()}
    )


@pytest.mark.parametrize(
    "model",
    [
        SMALL,
        dataclasses.replace(SMALL, tie_embeddings=False),
        KNOWN["Qwen3-0.6B"],
        QWEN_8B,
        new_config("qwen2", vocab_size=90, d_model=8, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=2, d_ff=12),
        KNOWN["Qwen3-30B-A3B"],
        KNOWN["DeepSeek-V3"],
        KNOWN["LongCat-Flash"],
    ],
)
def test_parameters_are_those_of_the_decoder(model):
    made = sum(math.prod(x.shape) for x in jax.tree.leaves(decoder.abstract_params(model)))
    assert model.matrix_params + model.gain_params == made


def test_state_by_hand():
    mesh = memory.Mesh(1, 2, 2, 1)
    weights = SMALL.matrix_params / 4 + SMALL.gain_params
    lines = {line.what: line.bytes for line in memory.trainer_state(SMALL, CONFIG, mesh)}
    published = 3 * (2 * weights + 2 * SMALL.wide_params)  # gains stay in float32
    assert lines == {"masters": 4 * weights, "moments": 8 * weights, "published versions": published}
    assert memory.trainer_state(SMALL, changed(trainer={"moments": "bfloat16"}), mesh)[1].bytes == 4 * weights
    hosted = memory.trainer_state(SMALL, changed(trainer={"optimizer_memory": "host"}), mesh)[1]
    assert hosted.bytes == 8 * weights and "frees them between updates alone" in hosted.note
    kl = {line.what for line in memory.trainer_state(SMALL, changed(trainer={"kl": "k3"}), mesh)}
    assert "reference model" in kl


def test_state_of_8b_over_eight_chips():
    """12 bytes a parameter: what XLA says of the update's arguments, but for the batch."""
    state = memory.trainer_state(QWEN_8B, CONFIG, memory.Mesh(1, 8, 1, 1))[:2]
    assert memory.total(state) / GIB == pytest.approx(11.45, abs=0.01)


@pytest.mark.parametrize("tensor, heads", [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_kv_of_a_token_by_hand(tensor, heads):
    """Two of 36 layers x heads x 128 x bfloat16; beyond 8 devices heads are replicated."""
    rollout = dataclasses.replace(SECTION, tensor=tensor)
    assert memory.token_bytes(QWEN_8B, rollout, "bfloat16") == 2 * 36 * heads * 128 * 2
    assert memory.token_bytes(QWEN_8B, dataclasses.replace(rollout, kv="float8"), "bfloat16") == 2 * 36 * heads * 128


@pytest.mark.parametrize(
    "name, tensor, numbers",
    [
        ("Qwen3-30B-A3B", 4, 48 * 2 * 128),  # one head of four
        ("DeepSeek-V3", 32, 61 * 576),  # latents, on every device
        ("LongCat-Flash", 32, 2 * 28 * 576),  # two attentions a layer
    ],
)
def test_kv_of_a_token_of_sparse_models(name, tensor, numbers):
    rollout = dataclasses.replace(SECTION, tensor=tensor)
    assert memory.token_bytes(KNOWN[name], rollout, "bfloat16") == 2 * numbers
    padded = 640 if KNOWN[name].latent else 576  # 20.4 GiB of LongCat-Flash's pool, as XLA has it
    on_tpu = memory.token_bytes(KNOWN[name], dataclasses.replace(rollout, attention="tpu"), "bfloat16")
    assert on_tpu == 2 * numbers * padded // 576


def test_memory_of_experts_by_hand():
    """One layer's experts forward and backward: rows of an even load and a quarter, sums of their gradients."""
    model, tokens, mesh = KNOWN["Qwen3-30B-A3B"], 4096, memory.Mesh(1, 1, 1, 1, 8)
    assert model.active_params / 1e9 == pytest.approx(3.35, rel=0.01)
    assert model.expert_layer_params == 128 * 3 * 2048 * 768
    row = 6 * 2048 + 3 * 2 * 768
    found = {
        (kind, dispatch): memory.expert_activations(model, kind, dispatch, tokens, mesh, 2, 1)
        for kind, dispatch in (("megablox", "gather"), ("megablox", "all_to_all"), ("ragged_dot", "gather"))
    }
    sums = 4 * model.expert_layer_params / 8
    gathered = 2 * 4 * 8 * tokens * 2048
    assert found["megablox", "gather"] == gathered + sums + 2 * 1.25 * 8 * tokens * row
    assert found["megablox", "all_to_all"] == 4 * 2 * 8 * tokens * 2048 + sums + 2 * 1.25 * 8 * tokens * row
    assert found["ragged_dot", "gather"] == 2 * 8 * 8 * tokens * row  # every choice of every device
    step = memory.expert_activations(model, "megablox", "gather", tokens, mesh, 2, 4)  # a scan's, of four layers
    assert step == found["megablox", "gather"] + 3 * sums


def test_weights_of_an_instance_by_hand():
    resident, incoming = memory.instance_weights(SMALL, changed(rollout={"residents": 2}))
    whole = 2 * SMALL.matrix_params + 4 * SMALL.gain_params
    assert (resident.bytes, incoming.bytes) == (2 * whole, whole)
    small, _ = memory.instance_weights(SMALL, changed(rollout={"weights": "int8"}))
    assert small.bytes == whole - 3 * SMALL.layer_params()


def test_adapters_of_an_instance_stand_beside_one_base():
    config = dataclasses.replace(changed(rollout={"residents": 4}), lora=Lora(rank=8))
    base, resident, incoming = memory.instance_weights(SMALL, config)
    assert base.bytes == 2 * SMALL.matrix_params + 4 * SMALL.gain_params
    assert resident.bytes == 4 * incoming.bytes == 4 * 2 * adapter_params(SMALL, config.lora)


def test_page_table_by_hand():
    rollout = dataclasses.replace(SECTION, slots=256, max_prompt_tokens=1024, max_new_tokens=31744)
    assert memory.table_bytes(rollout, 64) == 256 * 5 * 128 * 4  # 512 pages, and those that 8 steps may touch
    assert not memory.table_fits(rollout, 32)


def test_pages_are_their_share_of_what_is_left():
    asked = Config(
        slice="v6e-8",
        placement="disjoint",
        model=ModelSection(size="Qwen3-8B"),
        rollout=RolloutSection(instances=2, tensor=2, memory_share=0.5, max_prompt_tokens=1024, max_new_tokens=3072),
        trainer=TrainerSection(pack_tokens=4096, remat="full", micro_batches=32),
    )
    found = presets.machines(asked)
    done, _ = presets.resolve(asked, found, QWEN_8B)
    planned = budget.of(done, found, QWEN_8B)
    left = 32e9 - memory.total(planned.instance)
    page = 64 * 2 * 36 * 4 * 128 * 2
    assert done.rollout.pages == int(0.5 * left / page) - 1
    assert 0.49 * left < planned.pages_bytes <= 0.5 * left


@pytest.mark.parametrize("leaves, moments", [("device", "device"), ("host", "device"), ("device", "host")])
def test_a_device_that_is_lent_holds_what_stays_and_an_instance(leaves, moments):
    """Moments in host memory are there between updates, which is when a device is lent."""
    asked = Config(
        slice="v5p-16",
        placement="disjoint",
        model=ModelSection(size="Qwen3-8B"),
        orchestrator=OrchestratorSection(elastic=True),
        rollout=RolloutSection(instances=2, tensor=2, max_prompt_tokens=1024, max_new_tokens=3072),
        trainer=TrainerSection(
            pack_tokens=4096, remat="full", micro_batches=32, fsdp=4, lent_memory=leaves, optimizer_memory=moments
        ),
    )
    found = presets.machines(asked)
    planned = budget.of(presets.resolve(asked, found, QWEN_8B)[0], found, QWEN_8B)
    names, has = [line.what for line in planned.lent], found.trainer.memory_bytes
    stays = leaves == "device"
    assert ("masters" in names, "moments" in names) == (stays, stays and moments == "device")
    assert "published versions" in names and "moments" in [line.what for line in planned.trainer]
    assert names[-5:-1] == ["resident versions", "incoming version", "logits and noise", "one layer"]
    assert memory.total(planned.trainer) <= has and memory.total(planned.lent) <= has and not budget.problems(planned)
    assert ("KV pages" in [line.what for line in planned.trainer]) == (leaves == "device")
    more = dataclasses.replace(planned.config.rollout, pages=4 * planned.config.rollout.pages)
    wrong = budget.problems(dataclasses.replace(planned, config=dataclasses.replace(planned.config, rollout=more)))
    field = {"device": "trainer.lent_memory: while it is lent", "host": "rollout.pages: while it is lent"}[leaves]
    assert any(line.startswith(field) for line in wrong), wrong
    assert "memory of a device of the trainer while it is lent" in budget.describe(planned)


def test_one_device_holds_a_version_once():
    asked = Config(slice="laptop", model=ModelSection(size="Qwen3-0.6B"), rollout=RolloutSection())
    found = presets.machines(asked)
    planned = budget.of(presets.resolve(asked, found, KNOWN["Qwen3-0.6B"])[0], found, KNOWN["Qwen3-0.6B"])
    assert (
        planned.aliased and planned.crowd == 2 and "resident versions" not in {line.what for line in planned.instance}
    )


@pytest.mark.parametrize(
    "model, changes, mesh, rank, gib",
    [
        (QWEN_8B, {"rows": 32, "micro_batches": 4}, (1, 8, 1, 1), 0, 16.28),
        (QWEN_8B, {"rows": 32, "micro_batches": 4, "remat": "dots"}, (1, 8, 1, 1), 0, 25.86),
        (QWEN_8B, {"rows": 32, "micro_batches": 4, "pack_tokens": 16384}, (1, 8, 4, 2), 0, 6.78),
        (QWEN_8B, {"rows": 256, "micro_batches": 16}, (1, 4, 1, 1), 0, 34.17),
        (KNOWN["Gemma-3-4B"], {"rows": 256, "micro_batches": 8}, (1, 4, 1, 1), 0, 26.59),
        (KNOWN["Gemma-3-27B"], {"rows": 1024, "micro_batches": 32}, (1, 16, 1, 1), 0, 36.18),
        (KNOWN["Gemma-3-27B"], {"rows": 512, "micro_batches": 128}, (1, 4, 2, 1), 0, 46.79),
        (KNOWN["Gemma-3-27B"], {"rows": 256, "micro_batches": 16}, (1, 4, 1, 1), 16, 38.07),
        (KNOWN["Qwen3.5-4B"], {"rows": 256, "micro_batches": 8}, (1, 4, 1, 1), 0, 33.60),
        (KNOWN["Qwen3-30B-A3B"], {"rows": 32, "micro_batches": 4}, (1, 1, 1, 1, 8), 0, 33.91),
        (KNOWN["Qwen3.5-35B-A3B"], {"rows": 256, "micro_batches": 8}, (1, 1, 1, 1, 4), 16, 27.19),
        (KNOWN["Qwen3.5-35B-A3B"], {"rows": 1024, "micro_batches": 16}, (1, 2, 1, 1, 8), 0, 38.79),
        (KNOWN["Qwen3.5-4B"], {"rows": 128, "micro_batches": 16}, (1, 4, 1, 1), 16, 6.6),
        (KNOWN["Qwen3.5-4B"], {"rows": 128, "micro_batches": 8}, (1, 4, 1, 1), 16, 11.5),
    ],
)
def test_an_update_is_planned_with_what_xla_held_and_little_more(model, changes, mesh, rank, gib):
    """Compiled for v5p, the third and the last but one for v5e, the last for v6e, by libtpu 0.0.42.1: the peak beside
    the arguments, with the program's code. rank: of adapters, where they are trained."""
    options = {"remat": "full", "attention": "splash", "logits_bytes": 2**30, "expert_matmul": "megablox"}
    config = changed(trainer=options | {"pack_tokens": 4096} | changes)
    work = memory.trainer_work(model, dataclasses.replace(config, lora=Lora(rank=rank)), memory.Mesh(*mesh))
    assert gib <= memory.total(work) / GIB <= 1.15 * gib


def test_a_decode_call_of_a_hybrid_is_planned_with_a_layers_states():
    """Qwen3.5-35B-A3B on v5p-8, compiled: 1.15 GiB beside weights and pages, of 320 rows with states of 512 KiB and
    more a layer on each of four devices."""
    model = KNOWN["Qwen3.5-35B-A3B"]
    rollout = {"slots": 320, "tensor": 4, "attention": "tpu", "prefill_tokens": 1024, "prefill_call_tokens": 1024}
    work = memory.instance_work(model, changed(rollout=rollout))
    states = {line.what: line.bytes for line in work}["states of one layer"]
    each = 8 * 128 * 128 * 4 + 3 * (4 + 4 + 8) * 128 * 2
    assert states == memory.LINEAR_STATES * 320 * each and 1.15 <= memory.total(work) / GIB <= 1.15 * 1.15
    assert "states of one layer" not in {line.what for line in memory.instance_work(QWEN_8B, changed(rollout=rollout))}


def test_an_update_with_other_attention_is_planned_with_a_bound():
    """Compiled as above, with the reference's attention, for v5p-16: 13.76 GiB."""
    options = {"rows": 32, "micro_batches": 4, "pack_tokens": 4096, "remat": "full", "logits_bytes": 2**26}
    model = dataclasses.replace(QWEN_8B, n_layers=24)
    work = memory.trainer_work(model, changed(trainer=options), memory.Mesh(1, 8, 1, 1))
    assert 13.76 <= memory.total(work) / GIB


@pytest.mark.parametrize("name, layers", [("Qwen3-8B", 1), ("gpt-oss-20b", 2), ("Gemma-3-27B", 6), ("Gemma-4-E2B", 5)])
def test_layers_of_one_repeat_are_those_of_a_step_of_the_scan(name, layers):
    assert KNOWN[name].repeat == layers == len(decoder.runs(KNOWN[name])[0].layers)


def test_linear_layers_keep_no_results_of_kernels():
    """Compiled for v5p-16, Qwen3.5-4B's backward pass finds four arrays [8, 8, 4096, 2560] and one [8, 8, 4, 4, 4096, 256]
    in bfloat16: what its 32 layers were given, and what the attention of eight gave."""
    model, tokens = KNOWN["Qwen3.5-4B"], 8 * 4096
    section = dataclasses.replace(CONFIG.trainer, attention="splash", remat="full")
    assert model.n_layers * memory.saved_activations(model, "full", tokens, 1, 2) == 4 * 2 * 8 * tokens * 2560
    sums = 4 * 8 * model.n_heads * tokens  # float32, of each head
    assert memory.kernel_results(model, section, tokens, 1, 2) == 2 * 8 * 4 * 4 * tokens * 256 + sums
