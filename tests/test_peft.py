"""PEFT folders: ours are peft's to read and peft's are ours, and what the decoder does not compute is refused."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dora_jax.models import decoder, hf, lora, peft
from dora_jax.models.lora_config import Lora
from dora_jax.ops.segment_attention import segment_attention
from tests.fakes.hf_folder import QWEN3
from tests.fakes.hf_models import EXTRAS, NEWER, tokens, torch_logits, torch_model

LORA = Lora(rank=2, alpha=3.0, targets=("attention", "mlp"))


def adapter(cfg=QWEN3):
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), lora.abstract(cfg, LORA))


def edited(path, **fields):
    file = path / peft.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return path


@pytest.fixture
def saved(tmp_path):
    peft.save(tmp_path / "adapter", QWEN3, LORA, adapter(), "base")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"use_dora": True}, "adapter_config.json has use_dora=True; the decoder computes adapters without it only"),
        ({"r": 4}, "has r=4, and lora.rank is 2: they must be equal"),
        ({"lora_alpha": 32}, "has lora_alpha=32, and lora.alpha is 3: they must be equal"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank_pattern="),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "has init_lora_weights='pissa_niter_4'; the decoder computes True only",
        ),
        ({"alora_invocation_tokens": [3, 4]}, "has alora_invocation_tokens="),
        ({"of_a_later_peft": {"a": 1}}, "has of_a_later_peft=.*; the decoder computes adapters without it only"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "only adapters of matrices are read"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_is_refused(saved, fields, message):
    with pytest.raises(ValueError, match=message):
        peft.check(edited(saved, **fields), LORA)


OTHER_VALUES = {list: ["x"], dict: {"x": 1}, bool: True, int: 5, str: "x"}
UNREAD = {"r", "lora_alpha"}  # compared with the section lora instead


def test_every_option_of_peft_is_computed_or_refused(saved):
    """Each field of its class at another value than its default: what changes the function is refused."""
    theirs = pytest.importorskip("peft")
    edited(
        saved,
        **json.loads(json.dumps(theirs.LoraConfig(r=2, lora_alpha=3).to_dict(), default=str)) | {"peft_type": "LORA"},
    )
    peft.check(saved, LORA)
    accepted, options = set(), theirs.LoraConfig().to_dict()
    for name, default in options.items():
        kept = (saved / peft.CONFIG).read_text()
        value = "olora" if name == "init_lora_weights" else OTHER_VALUES.get(type(default), "x") if default else ["x"]
        try:
            peft.check(edited(saved, **{name: value}), LORA)
            accepted.add(name)
        except ValueError as error:
            assert name in str(error)
        (saved / peft.CONFIG).write_text(kept)
    print(f"of {len(options)} options {len(accepted)} are read or change nothing: {', '.join(sorted(accepted))}")
    assert accepted == set(peft.READ) - UNREAD - {"target_parameters"}


@pytest.mark.slow
def test_a_folder_comes_back_and_no_tensor_is_passed_over(saved, tmp_path):
    jax.tree.map(np.testing.assert_array_equal, peft.load(saved, QWEN3, LORA, 0), adapter())
    file = saved / peft.TENSORS
    tensors = load_file(file)
    some = {name: x for name, x in tensors.items() if ".q_proj." in name}
    save_file(some, file)
    found = peft.load(saved, QWEN3, LORA, 5)["layers"]  # the others are fresh
    np.testing.assert_array_equal(found["q_proj"]["b"], adapter()["layers"]["q_proj"]["b"])
    assert not found["up_proj"]["b"].any() and found["up_proj"]["a"].any()
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": np.zeros((2, 4), np.float32)}, file)
    with pytest.raises(ValueError, match=r"holds base_model.model.lm_head.lora_A.weight, which is no matrix"):
        peft.load(saved, QWEN3, LORA, 0)
    with pytest.raises(ValueError, match="base.safetensors|holds no adapter_config.json, so it is no PEFT folder"):
        peft.load(tmp_path, QWEN3, LORA, 0)


CASES = [
    ("deepseek_v3", ("attention", "mlp")),
    *(
        pytest.param(family, targets, marks=pytest.mark.slow)
        for family in EXTRAS
        for targets in (("attention",), ("attention", "mlp"), ("attention", "experts"), ("attention", "mlp", "experts"))
        if "experts" not in targets or family in ("qwen3_moe", "deepseek_v3", "longcat_flash")
    ),
    *(pytest.param(family, ("attention", "mlp"), marks=pytest.mark.slow) for family in NEWER),
    pytest.param("gemma4_text moe", ("attention", "mlp", "experts"), marks=pytest.mark.slow),
]
REFUSED = {"longcat_flash": "some of which compute nothing", "gemma4_text moe": "which are one tensor"}  # as adapters


@pytest.mark.parametrize(("family", "targets"), CASES)
def test_peft_computes_what_our_folder_says_and_we_what_theirs_says(family, targets, tmp_path):
    theirs = pytest.importorskip("peft")
    shape = Lora(rank=2, alpha=3.0, targets=targets)
    model = torch_model(family, tied=False)
    model.save_pretrained(tmp_path / "base")
    cfg, base = hf.load(tmp_path / "base")
    rng = np.random.default_rng(2)
    ours = jax.tree.map(lambda x: rng.normal(size=x.shape, scale=0.3).astype(np.float32), lora.abstract(cfg, shape))
    at = jnp.broadcast_to(jnp.arange(tokens().shape[1]), tokens().shape)
    attend = segment_attention(jnp.zeros_like(at), at)

    @jax.jit
    def logits(found):
        options = dict(adapters=found, adapter_gain=shape.gain)
        return decoder.logits(cfg, base, decoder.forward(cfg, base, jnp.asarray(tokens()), at, attend, **options))

    if cfg.linear_layers:
        with pytest.raises(ValueError, match=f"no adapters of the attention of {family}, several of whose matrices"):
            peft.save(tmp_path / "ours", cfg, shape, ours, str(tmp_path / "base"))
        return
    if family in REFUSED and "experts" in targets:
        with pytest.raises(ValueError, match=f"no adapters of the experts of {cfg.family}, {REFUSED[family]}"):
            peft.save(tmp_path / "ours", cfg, shape, ours, str(tmp_path / "base"))
        return
    peft.save(tmp_path / "ours", cfg, shape, ours, str(tmp_path / "base"))
    jax.tree.map(np.testing.assert_array_equal, peft.load(tmp_path / "ours", cfg, shape, 0), ours)
    wrapped = theirs.PeftModel.from_pretrained(model, tmp_path / "ours").eval()
    # rounded to float32, torch's are further from Gemma 4's than ours are
    reference = copy.deepcopy(wrapped).double() if family == "gemma4_text" else wrapped
    np.testing.assert_allclose(logits(ours), torch_logits(reference, tokens()), atol=2e-4)
    wrapped.save_pretrained(tmp_path / "theirs")  # and the way back
    try:
        found = peft.load(tmp_path / "theirs", cfg, shape, 0)
    except ValueError as error:  # of experts it makes one tensor, of another rank
        assert "experts" in targets and "has alpha_pattern={'.*" in str(error)
    else:
        np.testing.assert_array_equal(logits(found), logits(ours))
