"""Families whose layers differ: each with transformers' logits and greedy tokens, on text longer than two windows."""

import json

import jax
import numpy as np
import pytest

from dora_jax.models import hf
from dora_jax.models.hf_config import read_config
from tests.fakes.hf_models import NEWER, our_logits, tokens, torch_logits, torch_model, transformers


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", NEWER)
def test_same_logits_both_ways(family, tied, tmp_path):
    """Unrolled and under scan; import, export and import again give the same bits, and transformers reads the export."""
    library = transformers()
    model = torch_model(family, tied=tied)
    model.save_pretrained(tmp_path / "theirs")
    expected = torch_logits(model, tokens())
    for serving in (True, False):
        found = our_logits(tmp_path / "theirs", tokens(), serving)
        np.testing.assert_allclose(found, expected, atol=2e-5 * max(1.0, expected.std()))
    cfg, params = hf.load(tmp_path / "theirs")
    hf.save(tmp_path / "ours", cfg, params, tmp_path / "theirs")
    again, reread = hf.load(tmp_path / "ours")
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, reread, params)
    loaded = library.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(torch_logits(loaded, tokens()), expected)


@pytest.mark.parametrize("family", NEWER)
def test_a_field_that_is_left_out_is_as_in_transformers_or_refused(tmp_path, family):
    library = transformers()
    file, whole = tmp_path / "config.json", tmp_path / "whole"
    whole.mkdir()
    config = torch_model(family, tied=False).config.to_dict()
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
            continue
        assert ours == theirs, name
