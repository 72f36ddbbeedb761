"""What of a family's folder the decoder does not compute: refused in a sentence, or ignored with a line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dora_jax.models import hf
from dora_jax.models.families import KNOWN
from dora_jax.models.hf_config import read_config

GOLDEN = Path(__file__).parent / "data" / "golden"


def folder(tmp_path, family, changes=None, tensors=None):
    copy = tmp_path / family
    shutil.copytree(GOLDEN / family, copy)
    config = json.loads((copy / "config.json").read_text()) | (changes or {})
    (copy / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(load_file(copy / hf.SINGLE) | tensors, copy / hf.SINGLE, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "deepseek_v3",
            {"scoring_func": "softmax"},
            "scoring_func='softmax'; the decoder computes scoring_func='sigmoid'",
        ),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'; the decoder computes topk_method='noaux_tc'"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "has quantization_config="),
        ("deepseek_v3", {"n_routed_experts": 6}, "experts.count 6 does not fall into 4 groups"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank=None; a whole number of at least 1 is needed"),
        ("longcat_flash", {"architectures": ["LongcatCausalLM"]}, "names the architecture 'LongcatCausalLM'; known: "),
        (
            "qwen3",
            {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]},
            "'Olmo2.*does not compute norms behind",
        ),
        (
            "qwen3",
            {"model_type": "gemma3_text", "architectures": None},
            "'gemma3_text'; .* layers that attend in windows",
        ),
        (
            "qwen3",
            {"model_type": "qwen3_5_text", "architectures": None},
            "'qwen3_5_text'; .* layers of linear attention",
        ),
        ("longcat_flash", {"oe_vocab_size": 9}, "has oe_vocab_size: the decoder computes no n-gram embeddings"),
        ("longcat_flash", {"zero_expert_type": "copy"}, "zero_expert_type='copy'; the decoder computes"),
        (
            "qwen3_moe",
            {"mlp_only_layers": [1]},
            "mlp_only_layers=.1.; the decoder takes dense layers before the others",
        ),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 2},
            "decoder_sparse_step=2; the decoder computes decoder_sparse_step=1 only",
        ),
        ("qwen3_moe", {"num_experts": 5}, "has num_local_experts and num_experts that disagree"),
        ("mistral", {"sliding_window": 4096}, "sliding_window=4096; the decoder computes sliding_window=None only"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(tmp_path, family, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(folder(tmp_path, family, changes))


def test_a_mixture_needs_no_shared_expert(tmp_path):
    assert read_config(folder(tmp_path, "deepseek_v3", {"n_shared_experts": 0})).experts.shared == 0


def test_a_window_that_is_left_out_is_one_of_4096(tmp_path):
    copy = folder(tmp_path, "mistral")
    config = json.loads((copy / "config.json").read_text())
    del config["sliding_window"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="leaves sliding_window out, which means 4096"):
        read_config(copy)


@pytest.mark.parametrize(
    ("family", "name"), [("deepseek_v3", "model.layers.2.eh_proj.weight"), ("longcat_flash", "model.mtp.norm.weight")]
)
def test_multi_token_prediction_is_ignored_with_a_line(tmp_path, capsys, family, name):
    hf.check(folder(tmp_path, family, tensors={name: np.zeros((2, 2), np.float32)}))
    assert f"1 tensors of multi-token prediction are ignored ({name}, ...)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="which the qwen3_moe of config.json does not have"):
        hf.check(folder(tmp_path, "qwen3_moe", tensors={name: np.zeros((2, 2), np.float32)}))


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("Qwen3-30B-A3B", 30.5e9, 3.3e9), ("DeepSeek-V3", 671.0e9, 37.5e9), ("LongCat-Flash", 560.7e9, 27.9e9)],
)
def test_known_sizes_have_the_parameters_that_their_authors_name(name, total, active):
    cfg = KNOWN[name]
    assert cfg.matrix_params == pytest.approx(total, rel=2e-3) and cfg.active_params == pytest.approx(active, rel=2e-2)
