"""gpt-oss in an engine: 48 greedy tokens of 8 prompts against those of transformers, with prompts and answers longer
than two windows, in every setting that changes what is computed."""

import json

import jax
import numpy as np
import pytest

from dora_jax.config import RolloutSection, TrainerSection
from dora_jax.models import decoder, sharding
from dora_jax.models.families import KNOWN
from dora_jax.plan import presets
from dora_jax.rollout.engine import Engine
from dora_jax.trainer import objective
from tests.fakes.hf_models import bfloat16_gaps, check_greedy, greedy_samples, torch_model, transformers
from tests.fakes.packed_folder import as_mxfp4

NEW, WINDOW = 48, 7
PROMPTS = [
    np.random.default_rng(seed).integers(2, 40, length) for seed, length in enumerate((1, 3, 7, 8, 15, 22, 29, 30))
]
NEAR_TIE = 1e-4  # in log-prob
HUB = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}


def compared(setting, model, samples, atol=1e-4, tie=NEAR_TIE):
    check_greedy(setting, model, samples, atol=atol, tie=tie, least=0.8)


SETTINGS = {  # changes of the model, options of the engine
    "as it is": ({}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "experts of two devices": (HUB, {"tensor": 2, "expert": 2}),
    "parts of experts on four devices": (HUB, {"tensor": 4}),
    "one product of all experts": ({}, {"expert_matmul": "ragged_dot"}),
    "a pool for windows": ({}, {"window_pages": 40}),
    "all layers attend in full": ({"layer_types": ["full_attention"] * 5}, {}),
}


@pytest.mark.parametrize("setting", [name if i == 2 else pytest.param(name, marks=pytest.mark.slow)
                                     for i, name in enumerate(SETTINGS)])  # fmt: skip
def test_greedy_tokens_are_those_of_transformers(setting, tmp_path):
    transformers()
    changes, options = SETTINGS[setting]
    model = torch_model("gpt_oss", tied=False, **changes)
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    compared(setting, model, greedy_samples(tmp_path, PROMPTS, NEW, **options))


@pytest.mark.slow
@pytest.mark.parametrize("value", [-1e4, 0.0, 3.0], ids=["without", "zero", "large"])
def test_sinks_are_what_transformers_makes_of_them(value, tmp_path):
    """Far below every score they have no weight: the softmax is an ordinary one."""
    transformers()
    import torch

    model = torch_model("gpt_oss", tied=False)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(value)
    model.save_pretrained(tmp_path)
    compared(f"sinks of {value}", model, greedy_samples(tmp_path, PROMPTS, NEW))


@pytest.mark.slow
def test_a_folder_as_the_hub_spells_it_in_mxfp4(tmp_path):
    """Its numbers are those of a plain twin, which transformers loads; angles stand in the older fields."""
    library = transformers()
    model = torch_model("gpt_oss", tied=False, **HUB)
    model.save_pretrained(tmp_path / "plain")
    as_mxfp4(tmp_path / "plain", tmp_path / "packed", tmp_path / "twin")
    file = tmp_path / "packed" / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    hub = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "experts_per_token": 2, "swiglu_limit": 7.0}
    del config["swiglu_alpha"]
    file.write_text(json.dumps(config | hub))
    twin = library.AutoModelForCausalLM.from_pretrained(tmp_path / "twin").eval()
    twin.generation_config.eos_token_id = None
    compared("mxfp4", twin, greedy_samples(tmp_path / "packed", PROMPTS, NEW))


@pytest.mark.slow
def test_in_bfloat16_log_probs_are_as_near_to_float32_as_those_of_transformers(tmp_path):
    """Routers choose other experts where two are nearly equal: on either side the largest gap is one of those."""
    torch_model("gpt_oss", tied=False).bfloat16().save_pretrained(tmp_path)
    ours, theirs = bfloat16_gaps(tmp_path, PROMPTS, NEW)
    print(f"bfloat16 against float32, mean: ours {ours}, theirs {theirs}")
    assert ours < 1.5 * theirs


def test_kernels_without_sinks_are_refused_by_name():
    section = presets.on_cpu(RolloutSection(attention="tpu"))
    mesh = sharding.make_mesh(jax.devices()[:1], 1, 1, 1)
    cfg = decoder.new_config("gpt_oss", vocab_size=40, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8,
                             d_ff=16)  # fmt: skip
    with pytest.raises(ValueError, match="rollout.attention tpu computes no attention sinks; reference and gpu do"):
        Engine(cfg, section, mesh, seed=0, eos_ids=(), vocab_limit=40)
    trainer = TrainerSection(attention="cudnn")
    (problem,) = objective.model_problems(trainer, KNOWN["gpt-oss-20b"])
    assert "trainer.attention=cudnn needs a model with heads without sinks, and this gpt_oss has none" in problem
