"""Hugging Face folders: what is written is read back on any mesh, and every bad folder is named before a device is."""

import dataclasses
import json
import os
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dora_jax.models import decoder, hf, sharding
from dora_jax.models.hf_config import config_json
from tests.fakes.hf_folder import QWEN3, SIZES, add_tokenizer, draw, folder

ROPE = decoder.RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
CONFIGS = [
    decoder.new_config("qwen3", **SIZES, tie_embeddings=False, rope_theta=1e6),
    decoder.new_config("qwen2", **SIZES, norm_eps=1e-5),
    decoder.new_config("llama", **SIZES, rope_scaling=ROPE, max_position=512),
]
EMBED, UP = "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"


def edit(file, **changes):
    """Sets fields of a JSON file; a value of None takes the field out."""
    raw = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


# -- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: cfg.family)
def test_what_is_written_is_read_back_on_any_mesh(cfg, tmp_path):
    params = draw(cfg)
    hf.save(tmp_path / "one", cfg, params)
    hf.save(tmp_path / "many", cfg, params, max_shard_bytes=2000)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 3
    mesh = sharding.make_mesh(jax.devices(), 2, 2, 2)
    for found, loaded in (hf.load(tmp_path / "one"), hf.load(tmp_path / "many", mesh)):
        assert found == cfg
        jax.tree.map(np.testing.assert_array_equal, loaded, params)
    jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or pytest.fail(f"{x.sharding} is not {s}"),
        loaded,
        sharding.param_specs(cfg, mesh),
    )


@pytest.mark.parametrize("disk", [np.float32, np.float16, jnp.bfloat16])
def test_any_float_on_disk_and_in_memory(disk, tmp_path):
    params = draw(QWEN3)
    hf.save(tmp_path / "a", QWEN3, params, dtype=disk)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == np.dtype(disk).name
    for memory in (jnp.float32, jnp.bfloat16):
        _, loaded = hf.load(tmp_path / "a", dtype=memory)
        wanted = jax.tree.map(lambda y: y.astype(disk), params)
        jax.tree.map(np.testing.assert_array_equal, loaded, decoder.copied(wanted, memory))
        assert loaded["embed"].dtype == memory and loaded["final_norm"].dtype == jnp.float32


def test_each_device_reads_its_own_slice(tmp_path, monkeypatch):
    mesh = sharding.make_mesh(jax.devices(), 2, 2, 2)
    path, read_bytes, plain = folder(tmp_path / "a"), [], hf.read_slice

    def counted(*args):
        value = plain(*args)
        read_bytes.append(value.nbytes)
        return value

    monkeypatch.setattr(hf, "read_slice", counted)
    hf.load(path, mesh)
    largest = max(x.nbytes for x in jax.tree.leaves(draw(QWEN3)))
    assert sum(read_bytes) == sum(x.nbytes for x in jax.tree.leaves(draw(QWEN3)))  # every byte once, replicas share
    assert max(read_bytes) <= largest / 4  # embedding: vocabulary over 2, width over 2


def test_the_tree_is_never_twice_on_the_host(tmp_path):
    cfg = dataclasses.replace(QWEN3, n_layers=16, d_model=64, d_ff=256)
    path = folder(tmp_path / "a", cfg)
    tree_bytes = sum(x.nbytes for x in jax.tree.leaves(draw(cfg)))
    tracemalloc.start()
    _, params = hf.load(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del params
    assert peak_bytes < 1.5 * tree_bytes  # on a CPU the tree itself may count


# -- config.json -----------------------------------------------------------------------------------------------------


def test_both_spellings_are_written_and_either_is_read(tmp_path):
    cfg = CONFIGS[2]
    file = folder(tmp_path / "a", cfg) / "config.json"
    raw = json.loads(file.read_text())
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] and raw["torch_dtype"] == raw["dtype"] == "float32"
    assert raw["rope_scaling"]["rope_type"] == raw["rope_parameters"]["rope_type"] == "llama3"
    edit(file, rope_theta=None, rope_scaling=None, torch_dtype=None)
    assert hf.read_config(tmp_path / "a") == cfg
    file.write_text(json.dumps(raw))
    edit(file, rope_parameters=None, dtype=None)
    assert hf.read_config(tmp_path / "a") == cfg
    edit(file, rope_scaling={**raw["rope_scaling"], "rope_type": None, "type": "llama3"})
    assert hf.read_config(tmp_path / "a") == cfg


@pytest.mark.parametrize("model_type, head_dim", [("qwen3", 128), ("llama", 4)])
def test_head_dim_left_out(model_type, head_dim, tmp_path):
    cfg = decoder.new_config(model_type, **SIZES)
    (tmp_path / "config.json").write_text(json.dumps({**config_json(cfg, "float32", {}), "head_dim": None}))
    assert hf.read_config(tmp_path).head_dim == head_dim


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "the architecture 'GPT2LMHeadModel'; known: Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM",
        ),
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            "the architecture 'Qwen3ForSequenceClassification'; known",
        ),
        ({"architectures": None, "model_type": "olmo2"}, "the architecture 'olmo2'; the decoder does not compute"),
        ({"hidden_act": "gelu"}, "has hidden_act='gelu'; the decoder computes hidden_act='silu' only"),
        ({"attention_bias": True}, "has attention_bias=True"),
        ({"use_sliding_window": True}, "has use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has layer_types other than full_attention"),
        ({"quantization_config": {"bits": 4}}, "has quantization_config="),
        ({"hidden_size": None}, "has hidden_size=None; a whole number of at least 1 is needed"),
        ({"hidden_size": "16"}, "has hidden_size='16'; a whole number"),
        ({"head_dim": "4"}, "has head_dim='4'; a whole number"),
        ({"num_key_value_heads": 0}, "has num_key_value_heads=0; a whole number"),
        ({"vocab_size": True}, "has vocab_size=True; a whole number"),
        ({"rope_theta": "a"}, "has rope_theta='a'; a number is needed"),
        ({"rms_norm_eps": float("inf")}, "has rms_norm_eps=inf; a number is needed"),
        ({"rope_parameters": [1]}, "has rope_parameters=\\[1\\]; a JSON object is needed"),
        ({"architectures": "Qwen3ForCausalLM"}, "has architectures='Qwen3ForCausalLM'; a JSON array is needed"),
        ({"tie_word_embeddings": "no"}, "has tie_word_embeddings='no'; a JSON true or false is needed"),
        ({"num_hidden_layers": 10**9}, "model n_layers is 1000000000; it must be at most 10000"),
        ({"num_key_value_heads": 3}, "model n_heads 4 is not a multiple of n_kv_heads 3"),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            "asks for rope scaling 'longrope'; known: default, llama3, yarn",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope scaling llama3 without low_freq_factor"),
        ({"rope_theta": 5.0}, "gives rope_parameters that disagree with its rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "has partial_rotary_factor=0.5"),
    ],
)
def test_configs_that_are_refused(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(QWEN3, "float32", {})))
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match=message) as error:
        hf.read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_json_that_is_nested_too_deep_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[" * 10**6)
    with pytest.raises(ValueError, match="config.json is nested too deep to be read"):
        hf.read_config(tmp_path)


# -- bad folders -----------------------------------------------------------------------------------------------------


def drop_config(path):
    (path / "config.json").unlink()


def drop_weights(path):
    (path / "model.safetensors").unlink()


def drop_shard(path):
    next(path.glob("model-00002-of-*")).unlink()


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def change_tensors(**changes):
    """A tensor of None is taken out."""

    def change(path):
        tensors = {**load_file(path / "model.safetensors"), UP: np.zeros((24, 16), np.float32), **changes}
        save_file({name: value for name, value in tensors.items() if value is not None}, path / "model.safetensors")

    return change


BAD_FOLDERS = [
    (drop_config, "config.json is missing"),
    (lambda path: (path / "config.json").write_text("{"), "config.json is not JSON"),
    (drop_weights, "holds neither model.safetensors nor model.safetensors.index.json"),
    (truncate, "model.safetensors is truncated or not a safetensors file"),
    (change_tensors(**{UP: None}), f"lacks the tensor {UP}, which qwen3 of its config.json needs"),
    (
        change_tensors(**{UP: np.zeros((16, 24), np.float32)}),
        rf"model.safetensors holds {UP} of shape \(16, 24\); config.json implies \(24, 16\)",
    ),
    (change_tensors(**{UP: np.zeros((24, 16), np.int8)}), f"holds {UP} as I8; known: F32, F16, BF16"),
    (change_tensors(extra=np.zeros(3)), "model.safetensors holds extra, which the qwen3 of config.json does not have"),
    (
        lambda path: add_tokenizer(path, 33),
        "tokenizer.json needs 33 ids, more than the 32 rows of the model's embedding",
    ),
    (lambda path: edit(path / "config.json", num_hidden_layers=3), "lacks the tensor model.layers.2."),
]


@pytest.mark.parametrize("corrupt, message", BAD_FOLDERS, ids=[message[:40] for _, message in BAD_FOLDERS])
def test_a_bad_folder_is_named_before_a_device_is_touched(corrupt, message, tmp_path, monkeypatch):
    path = folder(tmp_path / "a")
    corrupt(path)
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *_: pytest.fail("device memory was touched"))
    with pytest.raises(ValueError, match=message) as error:
        hf.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_weights_that_are_not_finite_are_named(tmp_path):
    path = folder(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    _, params = hf.load(path)
    hf.check_finite(path, params)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        tensors[name].flat[-1] = np.inf if "norm" in name else np.nan
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model holds weights that are not finite, in final_norm, layers.up_proj$"):
        hf.check_finite(path, hf.load(path)[1])


def test_a_missing_shard_is_named(tmp_path):
    path = folder(tmp_path / "a", max_shard_bytes=4000)
    drop_shard(path)
    with pytest.raises(ValueError, match=r"model-00002-of-\d+.safetensors is missing; .* says that it holds model"):
        hf.check(path)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "a/../../outside.safetensors",
        "sub/in",
        "..",
        ".",
        "",
        7,
        None,
        ["x"],
        "a\0b",
        "x" * 5000,
    ],
)
def test_an_index_that_leads_out_of_its_folder_is_refused(name, tmp_path):
    path = folder(tmp_path / "a", max_shard_bytes=4000)
    shard = min(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    shard.rename(tmp_path / "outside.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={tensor: name if file == shard.name else file for tensor, file in weight_map.items()})
    with pytest.raises(ValueError, match="nothing outside its folder is read|is missing"):
        hf.check(path)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "tokenizer.json", "generation_config.json"]
)
def test_a_file_that_is_too_large_is_refused_before_it_is_read(name, tmp_path, monkeypatch):
    path = folder(tmp_path / "a", max_shard_bytes=4000)
    add_tokenizer(path)
    with (path / name).open("wb") as file:
        file.truncate(2 << 30)  # without a block on the disk
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda file, **_: pytest.fail(f"{file} was read") if file.name == name else file.read_bytes().decode(),
    )
    with pytest.raises(ValueError, match=rf"{name} holds 2048 MiB; more than 128 MiB are not read"):
        hf.check(path)


def test_a_mesh_that_does_not_divide_is_named_before_a_device_is_touched(tmp_path, monkeypatch):
    path = folder(tmp_path / "a")
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *_: pytest.fail("device memory was touched"))
    with pytest.raises(ValueError, match="n_kv_heads 2 is not divisible by mesh axis tensor=4"):
        hf.load(path, sharding.make_mesh(jax.devices(), 1, 2, 4))


def test_derived_tensors_of_other_writers_are_no_error(tmp_path):
    path = folder(tmp_path / "a")
    change_tensors(
        **{
            "lm_head.weight": np.zeros((32, 16), np.float32),
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32),
        }
    )(path)
    assert hf.check(path) == QWEN3


# -- saving ----------------------------------------------------------------------------------------------------------


def test_tokenizer_and_end_ids_travel_with_the_model(tmp_path):
    source = folder(tmp_path / "source")
    add_tokenizer(source, chat_template="{{ messages }}")
    edit(source / "config.json", attention_dropout=0.1)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "top_k": 20}))
    out = folder(tmp_path / "out", source_path=source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    config, generation = (json.loads((out / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    assert config["attention_dropout"] == 0.1 and config["eos_token_id"] == [1, 0]
    assert generation == {"eos_token_id": [1, 0], "pad_token_id": 1, "top_k": 20}


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / ".a.part").mkdir()  # a save that was killed
    (tmp_path / ".a.part" / "model.safetensors").write_bytes(b"half")
    folder(tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    with pytest.raises(ValueError, match="exists and is not an empty folder; a model is never written over another"):
        folder(tmp_path / "a")


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_the_umask_alone_says_who_reads_a_folder(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        out = folder(tmp_path / "out", max_shard_bytes=4096)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {mode}


def test_params_of_another_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"layers.attn_norm of shape \(2, 16\), but the model's config implies \(3,"):
        hf.save(tmp_path / "a", dataclasses.replace(QWEN3, n_layers=3), draw(QWEN3))
    assert not (tmp_path / "a").exists()
