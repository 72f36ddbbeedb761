"""Hybrids of linear attention and attention: the recurrence, packed rows, and folders as the hub spells them."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dora_jax import costs
from dora_jax.config import Config
from dora_jax.models import decoder, hf, linear_attention, sharding
from dora_jax.models.families import KNOWN
from dora_jax.models.families.config import Delta
from dora_jax.models.hf_config import read_config
from dora_jax.models.linear_attention import Recurrence, RecurrentState
from dora_jax.ops.segment_attention import packed_attention
from dora_jax.plan import presets, validate
from tests.fakes.hf_models import NEWER, SIZES, our_logits, torch_logits, torch_model, transformers

HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
SIZE = Delta(key_heads=2, value_heads=4, key_dim=8, value_dim=6)
LONG = np.random.default_rng(3).integers(0, SIZES["vocab_size"], (2, 210))  # more than three chunks


def inputs(length, rows=1, seed=0):
    """Slow heads and fast ones, inputs whose keys repeat."""
    keys = iter(jax.random.split(jax.random.key(seed), 9))
    mixed = tuple(jax.random.normal(next(keys), (rows, length, n)) for n in SIZE.widths)
    mixed = tuple(jnp.where((jnp.arange(length) % 3 == 0)[None, :, None], x[:, :1], x) for x in mixed)
    gate = -jnp.exp(jax.random.normal(next(keys), (rows, length, 4)) * 2 - 2)
    how = Recurrence(SIZE, tuple(jax.random.normal(next(keys), (4, n)) for n in SIZE.widths))
    return how, mixed, (gate, jax.nn.sigmoid(jax.random.normal(next(keys), gate.shape)))


def nothing(rows=1):
    return RecurrentState(jnp.zeros((rows, 4, 8, 6)), tuple(jnp.zeros((rows, 3, n)) for n in SIZE.widths))


def part(tree, *cut):
    return jax.tree.map(lambda x: x[:, slice(*cut)], tree)


def stepped(how, mixed, gates, state):
    """Position by position: the definition."""
    found, step = [], jax.jit(lambda m, g, s: linear_attention.step(how, m, g, s, jnp.ones(len(s.matrix), bool)))
    for i in range(mixed[0].shape[1]):
        o, state = step(part(mixed, i, i + 1), part(gates, i, i + 1), state)
        found.append(o)
    return jnp.concatenate(found, axis=1), state


def test_chunks_of_any_length_are_the_steps():
    """Packed, in calls of a state and some more positions, and position by position."""
    how, mixed, gates = inputs(150)
    expected, last = stepped(how, mixed, gates, nothing())
    whole = jax.jit(lambda *x: linear_attention.packed(how, *x))(mixed, gates, jnp.ones((1, 150), jnp.int32))
    np.testing.assert_allclose(whole, expected, atol=2e-6)
    state, start = nothing(), 0
    for length in (1, 64, 70, 15):
        real = jnp.array([length])
        at = part(mixed, start, start + length), part(gates, start, start + length)
        o, state = jax.jit(lambda *x: linear_attention.chunk(how, *x))(*at, state, jnp.zeros(1, int), real)
        np.testing.assert_allclose(o, expected[:, start : start + length], atol=2e-6)
        start += length
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(last), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_packed_segments_are_as_each_alone_forwards_and_backwards():
    """Borders inside of chunks and on them, segments shorter than the convolution, several chunks in one."""
    lengths = (30, 2, 32, 71)
    how, mixed, gates = inputs(sum(lengths))
    ids = jnp.repeat(jnp.arange(1, 5), jnp.array(lengths))[None]

    def loss(mixed, gates, cuts):
        each = [linear_attention.packed(how, part(mixed, *c), part(gates, *c), ids[:, slice(*c)]) for c in cuts]
        o = jnp.concatenate(each, axis=1)
        return jnp.sum(o * jnp.cos(jnp.arange(o.size)).reshape(o.shape)), o

    ends = np.cumsum((0, *lengths)).tolist()
    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
    (_, packed), of_packed = grad(mixed, gates, ((0, ends[-1]),))
    (_, alone), of_alone = grad(mixed, gates, tuple(itertools.pairwise(ends)))
    np.testing.assert_allclose(packed, alone, atol=2e-6)
    for ours, theirs in zip(jax.tree.leaves(of_packed), jax.tree.leaves(of_alone), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_no_chunk_is_solved_by_a_call_that_waits_for_the_thread_it_runs_on():
    """LAPACK's, of a batch: two of them at once on two cores never come back."""
    how, mixed, gates = inputs(150)

    def loss(mixed, gates, matrix):
        packed = linear_attention.packed(how, mixed, gates, jnp.ones((1, 150), jnp.int32))
        state, real = nothing()._replace(matrix=matrix), jnp.array([150])
        return jnp.sum(packed) + jnp.sum(linear_attention.chunk(how, mixed, gates, state, jnp.zeros(1, int), real)[0])

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(mixed, gates, nothing().matrix).as_text()
    assert "dot_general" in program and "custom_call" not in program


def test_what_is_not_real_leaves_the_state_to_the_bit():
    """Rows that are done or padding; positions before `kept` and behind `length` of a chunk."""
    how, mixed, gates = inputs(40, rows=3)
    _, state = stepped(how, *(part(x, 0, 5) for x in (mixed, gates)), nothing(3))
    _, after = linear_attention.step(how, part(mixed, 5, 6), part(gates, 5, 6), state, jnp.array([True, False, True]))
    assert all(np.array_equal(x[1], y[1]) for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after)))
    assert all(not np.array_equal(x[0], y[0]) for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after)))
    kept, length = jnp.array([5, 0, 5]), jnp.array([12, 0, 5])
    cut = [jax.tree.map(lambda x: x.at[:, :5].set(9.0).at[:, 12:].set(9.0), tree) for tree in (mixed, gates)]
    o, after = jax.jit(lambda *x: linear_attention.chunk(how, *x))(*cut, state, kept, length)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x[1:], y[1:])
    expected, last = stepped(how, *(part(x, 5, 12) for x in (mixed, gates)), state)
    np.testing.assert_allclose(o[0, 5:12], expected[0], atol=2e-6)
    for x, y in zip(jax.tree.leaves(last), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(x[0], y[0], atol=2e-6)


@pytest.mark.parametrize("family", [HYBRIDS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in HYBRIDS[1:])])
def test_long_rows_and_packed_ones_have_transformers_logits(family, tmp_path):
    """More than three chunks; the same two texts behind one another in a row, over a mesh of four devices."""
    transformers()
    model = torch_model(family, tied=False)
    model.save_pretrained(tmp_path)
    expected = torch_logits(model, LONG)
    for serving in (True, False):
        np.testing.assert_allclose(our_logits(tmp_path, LONG, serving), expected, atol=5e-5)
    mesh = sharding.make_mesh(jax.devices()[:4], 1, 2, 2)
    cfg, params = hf.load(tmp_path, mesh)
    rows = np.stack([np.concatenate([LONG[0], LONG[1]]), np.concatenate([LONG[1], LONG[0]])])
    at = np.tile(np.concatenate([np.arange(210)] * 2), (2, 1))
    segments = jnp.array(np.tile(np.repeat([1, 2], 210), (2, 1)))

    @jax.jit
    def logits(params):
        attend = packed_attention("reference", segments, jnp.array(at), mesh)
        constrain = sharding.constrain_rows(mesh)
        return decoder.logits(cfg, params, decoder.forward(cfg, params, rows, at, attend, constrain=constrain))

    found = np.asarray(logits(params))
    for row, order in zip(found, ([0, 1], [1, 0]), strict=True):
        np.testing.assert_allclose(row, np.concatenate(expected[order]), atol=5e-5)
        assert (row.argmax(-1) == np.concatenate(expected[order]).argmax(-1)).all()


VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_heads": 2,
    "out_hidden_size": 16,
    "patch_size": 4,
    "num_position_embeddings": 4,
}


@pytest.mark.parametrize("family", [pytest.param(HYBRIDS[0], marks=pytest.mark.slow), HYBRIDS[1]])
def test_a_folder_as_the_hub_spells_it(family, tmp_path):
    """With a vision tower, which goes into an export as it is, what stands before the text's names, modules of
    multi-token prediction, fields that say nothing new, and experts of one tensor."""
    library = transformers()
    import torch

    torch.manual_seed(0)
    name = family.removesuffix("_text")
    known = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[name]
    rotary = NEWER[family]["rope_parameters"] | {"mrope_section": [1, 0, 0], "mrope_interleaved": True}
    text = SIZES | NEWER[family] | {"rope_parameters": rotary}
    config = getattr(library, f"{known}Config")(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    model = getattr(library, f"{known}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.15)
    model.save_pretrained(tmp_path / "theirs")
    tensors, file = load_file(tmp_path / "theirs" / hf.SINGLE), tmp_path / "theirs" / "config.json"
    tensors["mtp.fc.weight"] = np.zeros((2, 2), np.float32)
    for layer in range(6):
        names = [x for x in tensors if f".layers.{layer}.mlp.experts." in x]
        of = {
            x: np.stack([tensors[n] for n in sorted(names) if f"{x}_proj" in n])
            for x in ("gate", "up", "down")
            if names
        }
        for n in names:
            del tensors[n]
        if names:
            at = f"model.language_model.layers.{layer}.mlp.experts"
            tensors |= {f"{at}.gate_up_proj": np.concatenate([of["gate"], of["up"]], 1), f"{at}.down_proj": of["down"]}
    assert any("gate_up_proj" in x for x in tensors) == (family == HYBRIDS[1])
    save_file(tensors, tmp_path / "theirs" / hf.SINGLE, metadata={"format": "pt"})
    config = json.loads(file.read_text())
    config["text_config"] |= {
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "full_attention_interval": 4,
        "mtp_num_hidden_layers": 1,
        "layer_types": None,
        "tie_word_embeddings": True,  # the tower's class ties by its own
    }
    file.write_text(json.dumps(config))
    cfg = hf.check(tmp_path / "theirs")
    assert (cfg.family, cfg.tie_embeddings, cfg.linear_layers) == (family, False, 5)
    expected = torch_logits(model, LONG)
    np.testing.assert_allclose(our_logits(tmp_path / "theirs", LONG), expected, atol=5e-5)
    _, params = hf.load(tmp_path / "theirs")
    hf.save(tmp_path / "ours", cfg, params, tmp_path / "theirs")
    assert read_config(tmp_path / "ours") == cfg
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "ours")[1], params)
    written = load_file(tmp_path / "ours" / hf.SINGLE)
    towers = [x for x in tensors if x.startswith("model.visual.")]
    assert towers and all(written[x].tobytes() == tensors[x].tobytes() for x in towers)
    again = getattr(library, f"{known}ForConditionalGeneration").from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(torch_logits(again, LONG), expected)


def test_states_in_f32_while_numbers_are_narrow(tmp_path):
    """In bfloat16 the decay, its bias and the norm's gain stay as they are, on disk too; logits are near."""
    transformers()
    import torch

    model = torch_model("qwen3_5_text", tied=True)
    model.save_pretrained(tmp_path / "theirs")
    cfg, params = hf.load(tmp_path / "theirs", dtype=jnp.bfloat16)
    kinds = {name: x.dtype.name for name, x in params["layers"].items()}
    assert {name for name, kind in kinds.items() if kind == "float32"} == {
        "attn_norm",
        "mlp_norm",
        "delta_norm",
        "delta_rate",
        "delta_bias",
    }
    hf.save(tmp_path / "ours", cfg, params, tmp_path / "theirs")
    _, again = hf.load(tmp_path / "ours", dtype=jnp.bfloat16)
    for name in ("delta_rate", "delta_bias", "delta_q_proj"):
        np.testing.assert_array_equal(again["layers"][name], params["layers"][name])
    hf.save(tmp_path / "last", cfg, again, tmp_path / "ours")
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "last", dtype=jnp.bfloat16)[1], again)
    at = jnp.tile(jnp.arange(210), (2, 1))
    attend = packed_attention("reference", jnp.ones_like(at), at, sharding.make_mesh(jax.devices()[:1], 1, 1, 1))
    hidden = decoder.forward(cfg, params, LONG, at, attend, dtype=jnp.bfloat16)
    ours = np.asarray(decoder.logits(cfg, params, hidden))
    expected, theirs = torch_logits(model, LONG), model.to(torch.bfloat16)
    with torch.no_grad():
        narrow = theirs(torch.tensor(LONG)).logits.float().numpy()
    assert np.abs(ours - expected).mean() < 1.1 * np.abs(narrow - expected).mean() < 0.05


@pytest.mark.parametrize(
    ("name", "params", "state_mib"),
    [
        ("Qwen3.5-4B", 4.2e9, 48),
        ("Qwen3.5-9B", 8.95e9, 48),
        ("Qwen3.5-27B", 26.9e9, 144),
        ("Qwen3.5-35B-A3B", 34.7e9, 60),
    ],
)
def test_known_sizes_have_their_parameters_and_states(name, params, state_mib):
    cfg = KNOWN[name]
    shapes = decoder.abstract_params(cfg)
    assert cfg.matrix_params + cfg.gain_params == sum(x.size for x in jax.tree.leaves(shapes))
    assert cfg.matrix_params == pytest.approx(params, rel=1e-2)
    matrices = cfg.linear_layers * 4 * cfg.rule.state_numbers
    assert matrices == state_mib << 20 and matrices < cfg.state_bytes_on(1, 2) < 1.05 * matrices


def test_what_a_state_cannot_do_is_refused_in_a_sentence():
    config = Config()
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, size="Qwen3.5-9B"),
        rollout=dataclasses.replace(config.rollout, stop_strings=("END",), exact=True),
        environment=dataclasses.replace(config.environment, name="a:b"),
        trainer=dataclasses.replace(config.trainer, share_prompts="on", context=2),
        cluster=dataclasses.replace(config.cluster, hosts_per_instance=2),
    )
    found = validate.model_problems(config)
    assert sum(text.startswith("cluster.hosts_per_instance: a recurrent state") for text in found) == 1, found
    for name in ("rollout.stop_strings", "trainer.share_prompts=on", "trainer.context=2"):
        assert sum(text.startswith(f"{name} is not for linear attention") for text in found) == 1, found
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, size="Qwen3-8B"))
    assert not validate.model_problems(plain)
    asked = dataclasses.replace(Config(), model=config.model)
    chosen = presets.plan(asked, presets.UNKNOWN, presets.model_of(asked)).config.trainer
    assert (chosen.share_prompts, presets.plan(asked, presets.UNKNOWN).config.trainer.share_prompts) == ("off", "on")
    warm = dataclasses.replace(asked, sft=dataclasses.replace(asked.sft, out="base", family="qwen3_5_text"))
    assert presets.plan(warm, presets.UNKNOWN).config.trainer.share_prompts == "off"


def test_costs_count_states():
    """A move of Qwen3.5 9B takes 48 MiB and more beside its KV, and slots' states take memory from pages."""
    sizes = costs.sizes_of(costs.ModelSizes(size="Qwen3.5-9B"), 4)
    cost = costs.Roofline(sizes, costs.Hardware(chip="h100", slots=64), costs.CostOptions())
    none = costs.Roofline(
        dataclasses.replace(sizes, size="", state_bytes=0.0), costs.Hardware(chip="h100", slots=64), costs.CostOptions()
    )
    assert cost.kv_bytes(1000) == 1000 * 32768 + sizes.state_bytes and cost.kv_bytes(0) == 0
    assert 48 << 20 < sizes.state_bytes < 50 << 20 and cost.decode_base_s(64) > none.decode_base_s(64)
    assert (none.pages - cost.pages) * 16 * 32768 == pytest.approx(128 * sizes.state_bytes, rel=1e-3)
