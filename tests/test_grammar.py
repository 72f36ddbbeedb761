"""Answers that are held to a form: what an engine with any weights samples is of it, and no neighbour notices."""

import json

import jax
import jsonschema
import numpy as np
import pytest

from dora_jax.config import RolloutSection
from dora_jax.models import decoder, grammar, sharding
from dora_jax.models.tokenizer import Tokenizer
from dora_jax.plan import presets
from dora_jax.rollout.engine import Engine
from dora_jax.serving.parser import AnswerParser, ToolCall
from dora_jax.types import SampleId, Sampling
from tests.fakes.engine_rig import finish
from tests.fakes.hf_folder import byte_tokenizer

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["sum", "product"]},
        "ok": {"type": "boolean"},
    },
    "required": ["n", "kind", "ok"],
    "additionalProperties": False,
}
ADD = {"name": "add", "parameters": SCHEMA}
NEW = 90


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def engines(tokenizer):
    """Two of the same weights, whose calls take four steps."""
    sizes = dict(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32)
    cfg = decoder.new_config("qwen3", vocab_size=tokenizer.vocab_size, **sizes)
    section = presets.on_cpu(
        RolloutSection(slots=4, pages=128, page_size=8, max_prompt_tokens=16, max_new_tokens=96, decode_steps=4)
    )
    made = []
    for device in (0, 1):
        mesh = sharding.make_mesh(jax.devices()[device : device + 1], 1, 1, 1)
        options = {"eos_ids": tokenizer.eos_ids, "vocab_limit": tokenizer.vocab_size, "decode": tokenizer.decode}
        engine = Engine(
            cfg,
            section,
            mesh,
            seed=3,
            matcher=lambda text: grammar.Matcher(tokenizer.path, tokenizer.eos_ids, text),
            **options,
        )
        params = decoder.serving_layout(decoder.init_params(cfg, 1), engine.shapes.layout)
        engine.load(0, jax.device_put(params, engine.param_shardings))
        made.append(engine)
    return made


def sampled(engine, samplings):
    for i, own in enumerate(samplings):
        engine.submit(SampleId(i, 0), [65, 66, 67], 0, NEW, sampling=own)
    done = finish(engine, limit=400)
    return [done[SampleId(i, 0)] for i in range(len(samplings))]


def checked(tokenizer, schema, tools=()):
    text = grammar.of(schema, tools)
    tokenizer.check_grammar(text)
    return text


def test_an_answer_is_of_its_schema_and_its_neighbours_draw_as_if_it_were_not_there(engines, tokenizer):
    engine, _ = engines
    text = checked(tokenizer, SCHEMA)
    alone = sampled(engine, [None] * 4)
    held, other, free, again = sampled(
        engine, [Sampling(grammar=text), Sampling(grammar=text, temperature=0), None, None]
    )
    for sample in (held, other):
        assert sample.finish == "stop" and sample.out_ids[-1] in tokenizer.eos_ids
        jsonschema.validate(json.loads(tokenizer.decode(sample.out_ids)), SCHEMA)
        assert np.isfinite(sample.logprobs).all() and (sample.logprobs < 0).all()
    for i, sample in ((2, free), (3, again)):
        np.testing.assert_array_equal(sample.out_ids, alone[i].out_ids)
        np.testing.assert_array_equal(sample.logprobs, alone[i].logprobs)


def test_a_held_answer_moves_between_engines(engines, tokenizer):
    a, b = engines
    own = Sampling(grammar=checked(tokenizer, SCHEMA))
    (whole,) = sampled(a, [own])
    a.submit(SampleId(0, 0), [65, 66, 67], 0, NEW, sampling=own)
    for _ in range(5):
        a.tick()
    b.import_(a.export(SampleId(0, 0)))
    (moved,) = finish(b, limit=400).values()
    np.testing.assert_array_equal(moved.out_ids, whole.out_ids)
    np.testing.assert_array_equal(moved.logprobs, whole.logprobs)


def test_a_required_call_is_one_and_an_answer_or_a_call_is_one_of_both(engines, tokenizer):
    engine, _ = engines
    forced, either = checked(tokenizer, None, [ADD]), checked(tokenizer, {"type": "boolean"}, [ADD])
    samples = sampled(engine, [Sampling(grammar=forced), *(Sampling(grammar=either),) * 3])
    kinds = set()
    for sample in samples:
        found = list(AnswerParser().feed(tokenizer.decode(sample.out_ids), final=True))
        calls = [each for each in found if isinstance(each, ToolCall)]
        if calls:
            ((call,), (_,)) = calls, found
            assert call.name == "add"
            jsonschema.validate(json.loads(call.arguments), SCHEMA)
        else:
            assert isinstance(json.loads("".join(found)), bool)
        kinds.add(bool(calls))
    assert True in kinds


@pytest.mark.parametrize("schema", [{"type": "wat"}, {"type": "string", "pattern": "(?=a)"}])
def test_a_schema_that_nothing_can_be_held_to_is_refused(tokenizer, schema):
    with pytest.raises(ValueError, match=r"\w"):
        checked(tokenizer, schema)
