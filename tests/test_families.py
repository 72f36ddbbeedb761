"""What of a family's folder the decoder does not compute: refused in a sentence, or ignored with a line."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dora_jax.models import decoder, hf
from dora_jax.models.families import KNOWN
from dora_jax.models.hf_config import read_config
from dora_jax.ops.segment_attention import segment_attention
from tests.fakes.hf_models import EXTRAS, NEWER, SIZES, our_logits, tokens, torch_logits, torch_model, transformers

GOLDEN = Path(__file__).parent / "data" / "golden"


def folder(tmp_path, family, changes=None, tensors=None):
    copy = tmp_path / family
    shutil.copytree(GOLDEN / family, copy)
    config = json.loads((copy / "config.json").read_text()) | (changes or {})
    (copy / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(load_file(copy / hf.SINGLE) | tensors, copy / hf.SINGLE, metadata={"format": "pt"})
    return copy


ALL_LINEAR = {"layer_types": ["linear_attention"] * 2}


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
            "has hidden_act='silu'; the decoder computes hidden_act='gelu_pytorch_tanh' only",
        ),
        (
            "qwen3",
            {"model_type": "qwen3_5_text", "architectures": None, "partial_rotary_factor": 1.0} | ALL_LINEAR,
            "linear layers need it, .* and other layers, whose queries are grouped, beside them",
        ),
        (
            "qwen3",
            {"model_type": "qwen3_5_text", "architectures": None, "attn_output_gate": False},
            "attn_output_gate=False; the decoder computes attn_output_gate=True only",
        ),
        (
            "qwen3",
            {"model_type": "qwen3_5_text", "architectures": None, "layer_types": ["linear_attention", "mamba"]},
            "has layer_types that are not 2 of full_attention and linear_attention",
        ),
        ("longcat_flash", {"oe_vocab_size": 9}, "has oe_vocab_size: the decoder computes no n-gram embeddings"),
        ("longcat_flash", {"zero_expert_type": "copy"}, "zero_expert_type='copy'; the decoder computes"),
        ("qwen3_moe", {"decoder_sparse_step": 9}, "leaves no layer behind experts.first_dense 2"),
        (
            "deepseek_v3",
            {"num_key_value_heads": 2},
            "num_key_value_heads=2; latent attention has as many as num_attention",
        ),
        ("deepseek_v3", {"model_type": "deepseek_v4"}, "model_type='deepseek_v4' .*The nearest is deepseek_v3, whose"),
        ("qwen3", {"model_type": "qwen33"}, "The nearest is qwen3, whose layers may be other ones all the same"),
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
    [
        ("Qwen3-30B-A3B", 30.5e9, 3.3e9),
        ("DeepSeek-V3", 671.0e9, 37.5e9),
        ("LongCat-Flash", 560.7e9, 27.9e9),
        ("Gemma-3-270M", 268e6, 268e6),
        ("Gemma-3-1B", 1.0e9, 1.0e9),
        ("Gemma-3-4B", 3.88e9, 3.88e9),
        ("Gemma-3-12B", 11.77e9, 11.77e9),
        ("Gemma-3-27B", 27.01e9, 27.01e9),
        ("Gemma-4-E2B", 4.63e9, 4.63e9),
        ("Gemma-4-31B", 30.7e9, 30.7e9),
        ("Gemma-4-26B-A4B", 25.2e9, 3.8e9),
        ("gpt-oss-20b", 20.91e9, 4.19e9),  # 3.6 without the embedding
        ("gpt-oss-120b", 116.8e9, 5.71e9),
        ("Qwen3.5-35B-A3B", 34.66e9, 3.45e9),
    ],
)
def test_known_sizes_have_the_parameters_that_their_authors_name(name, total, active):
    cfg = KNOWN[name]
    assert cfg.matrix_params == pytest.approx(total, rel=2e-3) and cfg.active_params == pytest.approx(active, rel=2e-2)


@pytest.mark.parametrize(
    "changes",
    [{"decoder_sparse_step": 2, "mlp_only_layers": [], "num_hidden_layers": 5}, {"mlp_only_layers": [1, 3]}],
    ids=["every second", "two of four"],
)
def test_layers_without_experts_stand_anywhere(tmp_path, changes):
    """Unrolled, under scan and in an engine's loop; what is exported is the same model."""
    transformers()
    model = torch_model("qwen3_moe", tied=False, **{"num_hidden_layers": 4} | changes)
    model.save_pretrained(tmp_path / "theirs")
    expected = torch_logits(model, tokens())
    for serving in (True, False):
        np.testing.assert_allclose(our_logits(tmp_path / "theirs", tokens(), serving), expected, atol=2e-5)
    cfg, params = hf.load(tmp_path / "theirs")
    at = np.broadcast_to(np.arange(tokens().shape[1]), tokens().shape)
    attend = segment_attention(np.zeros_like(at), at)
    hidden, _, ids = decoder.forward_carrying(cfg, params, tokens(), at, lambda state: attend, [])
    np.testing.assert_allclose(decoder.logits(cfg, params, hidden), expected, atol=2e-5)
    assert len(ids) == cfg.expert_layers == 2
    hf.save(tmp_path / "ours", cfg, params, tmp_path / "theirs")
    again, reread = hf.load(tmp_path / "ours")
    assert again == cfg and read_config(tmp_path / "ours") == cfg
    jax.tree.map(np.testing.assert_array_equal, reread, params)


def test_kimi_k2_is_read_as_the_deepseek_v3_that_it_is(tmp_path):
    copy = folder(tmp_path, "deepseek_v3", {"model_type": "kimi_k2"})
    assert read_config(copy) == read_config(GOLDEN / "deepseek_v3") and hf.check(copy)
    config = json.loads((copy / "config.json").read_text())
    del config["n_group"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="leaves n_group out, and no class in transformers has a default of kimi"):
        read_config(copy)


FULL = {name: dict(SIZES | extras) for name, extras in EXTRAS.items()}


@pytest.mark.parametrize("family", [*EXTRAS, *NEWER])
def test_a_field_that_is_left_out_says_what_it_says_in_transformers_or_is_refused(tmp_path, family):
    """Each field of the class, one at a time: read as what transformers then writes in full."""
    library = transformers()
    file, whole, reported = tmp_path / "config.json", tmp_path / "whole", {}
    whole.mkdir()
    known = FULL.get(family)
    config = library.AutoConfig.for_model(family, **known) if known else torch_model(family, tied=False).config
    config = config.to_dict()
    for name in config:
        file.write_text(json.dumps({field: x for field, x in config.items() if field != name}))
        try:
            library.AutoConfig.from_pretrained(tmp_path).save_pretrained(whole)
            theirs = read_config(whole)
        except Exception as error:  # their classes refuse by errors of their own
            theirs = error
        try:
            ours = read_config(tmp_path)
        except ValueError:
            reported[name] = "refused"
            continue
        assert ours == theirs, name
        reported[name] = "equal"
    refused = [name for name, what in reported.items() if what == "refused"]
    print(f"{family}: {len(reported) - len(refused)} fields equal, {len(refused)} refused: {', '.join(refused)}")
    assert len(reported) - len(refused) > 20


@pytest.mark.parametrize("family", [name for name in NEWER if name.startswith("gemma4")])
def test_gemma4_as_the_hub_spells_it(tmp_path, family):
    """Heads of the layers that attend in full stand beside the others', not layer by layer; what is left out has the
    value of its class; a folder may hold keys of layers that read others'."""
    transformers()
    torch_model(family, tied=True).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config, cfg = json.loads(file.read_text()), hf.check(tmp_path)
    each = list(config.pop("per_layer_config").values())
    hub = {"global_head_dim": each[0]["head_dim"], "num_global_key_value_heads": each[0].get("num_key_value_heads")}
    file.write_text(json.dumps(config | hub))
    assert read_config(tmp_path) == cfg
    tensors = load_file(tmp_path / hf.SINGLE)
    if cfg.kv_owners < cfg.n_layers:
        tensors[f"model.layers.{cfg.n_layers - 1}.self_attn.k_proj.weight"] = np.zeros((16, 16), np.float32)
        save_file(tensors, tmp_path / hf.SINGLE, metadata={"format": "pt"})
        assert hf.check(tmp_path) == cfg
    hf.save(tmp_path / "out", *hf.load(tmp_path))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written[name] for name in hub} == hub and read_config(tmp_path / "out") == cfg
    shapes = {name: x.shape for name, x in load_file(tmp_path / "out" / hf.SINGLE).items()}
    read = [f"model.layers.{i}.self_attn.{x}_{y}.weight" for i in range(cfg.kv_owners, cfg.n_layers) for x in "kv"
            for y in ("proj", "norm")]  # fmt: skip
    assert shapes == {name: x.shape for name, x in tensors.items() if name not in read}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size_per_layer_input": 30}, "vocab_size_per_layer_input=30; the decoder computes as many as vocab"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers=7, and no earlier layer of a kind to read"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers=8, and no earlier layer of a kind to read"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'; the decoder computes"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu'; the decoder computes"),
        ({"per_layer_config": {"3": {"head_dim": 16}}}, "a per_layer_config other than one for all layers of full_att"),
        ({"per_layer_config": {"x": {"head_dim": 16}}}, "a per_layer_config other than one for all layers of full_att"),
        (
            {"per_layer_config": {"3": {"head_dim": 16, "a": 1}, "7": {"head_dim": 16, "a": 1}}},
            "has a in per_layer_config; the decoder computes heads there only",
        ),
        (
            {"per_layer_config": {"3": {"head_dim": 0}, "7": {"head_dim": 0}}},
            "head_dim=0; a whole number of at least 1",
        ),
    ],
)
def test_a_gemma4_that_the_decoder_does_not_compute_is_refused_by_name(tmp_path, changes, message):
    transformers()
    config = torch_model("gemma4_text", tied=True).config.to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)
