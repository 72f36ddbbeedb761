"""Each family's logits and greedy tokens against those of transformers:  python -m tests.soak.families [FAMILY ...]

A tiny random model of each family, in settings that change what is read or computed: its head tied or not, over two
devices, experts shared out among two devices, a folder in bfloat16, a folder with the hub's names of tensors and its
older spelling of config.json, and everything computed in bfloat16. Prompts and answers are longer than two windows.

Prints a row for each setting: the largest difference of 2 x 48 positions' logits, under scan and unrolled; greedy tokens
of 8 prompts x 48 that are equal up to a near-tie of less than 1e-4, and the near-ties; the largest difference of their
log-probs; whether import -> export -> import gives the same bits, and whether transformers reads the export and has the
same logits. All of it in float32, but for the last setting: mean differences of the tokens' log-probs from float32,
of ours and of transformers' own bfloat16. Exits 1 where a row has no such result.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import traceback
from pathlib import Path

import jax
import numpy as np

from dora_jax.models import hf
from tests.fakes.hf_models import (
    EXTRAS,
    NEWER,
    bfloat16_gaps,
    check_greedy,
    greedy_samples,
    our_logits,
    tokens,
    torch_logits,
    torch_model,
    transformers,
)

NEW = 48
PROMPTS = [np.random.default_rng(seed).integers(2, 40, n) for seed, n in enumerate((1, 3, 7, 8, 15, 22, 29, 30))]
SHARED = {"num_key_value_heads": 4, "num_global_key_value_heads": 2}  # two devices have KV heads of their own


def respelled(config: dict) -> dict:
    """A config.json as the hub has it: base and scaling of the angles in fields of their own, patterns as one number."""
    kind, config = config["model_type"], dict(config)
    angles = config.pop("rope_parameters")
    local, full = angles.get("sliding_attention"), angles.get("full_attention", angles)
    if kind == "gemma4_text":  # newer than those fields; heads of full layers stand beside the others'
        each = next(iter(config.pop("per_layer_config").values()))
        heads = {"global_head_dim": each["head_dim"], "num_global_key_value_heads": each.get("num_key_value_heads")}
        return config | heads | {"rope_parameters": angles}
    beside = {name: full[name] for name in ("rope_theta", "partial_rotary_factor") if name in full}
    scaling = {name: x for name, x in full.items() if name not in beside}
    hub = {**beside, "rope_scaling": None if full["rope_type"] == "default" else scaling}
    if kind == "gemma3_text":
        hub |= {"rope_local_base_freq": local["rope_theta"], "sliding_window_pattern": 6}
        del config["layer_types"]
    if kind.startswith("qwen3_5"):
        hub = {"rope_parameters": angles | {"mrope_section": [1, 0, 0], "mrope_interleaved": True}}
        hub |= {"attn_output_gate": True, "full_attention_interval": 4, "mtp_num_hidden_layers": 1}
        del config["layer_types"]
    if kind == "gpt_oss":
        hub |= {"experts_per_token": config["num_experts_per_tok"], "swiglu_limit": 7.0}
        config.pop("swiglu_alpha", None)
    return config | hub


def row(family: str, setting: str, folder: Path) -> str:
    """What was found, in one line."""
    library = transformers()
    import torch

    options = {"two devices": {"tensor": 2}, "experts on two devices": {"tensor": 2, "expert": 2}}.get(setting, {})
    changes = SHARED if options and family in ("gemma4_text dense", "gemma4_text moe") else {}
    model, path = torch_model(family, tied=setting == "tied", **changes), folder / "theirs"
    (model.bfloat16() if "bfloat16" in setting else model).save_pretrained(path)
    padded = family == "longcat_flash"  # its class wants matrices of experts that are none
    if setting == "hub":
        cfg, params = hf.load(path)
        hf.save(folder / "hub", cfg, params, path, padded=padded)
        file = folder / "hub" / "config.json"
        file.write_text(json.dumps(respelled(json.loads((path / "config.json").read_text()))))
        path = folder / "hub"
    if setting == "all in bfloat16":
        ours, theirs = bfloat16_gaps(path, PROMPTS, NEW)
        assert ours < 1.5 * theirs, (ours, theirs)
        return f"mean |dlogp| from float32: ours {ours:.4f}, transformers' own {theirs:.4f}"
    model = library.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    expected = torch_logits(model, tokens())
    found = [np.abs(our_logits(path, tokens(), serving) - expected).max() for serving in (True, False)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        samples = greedy_samples(path, PROMPTS, NEW, **options)
        equal, total, gap = check_greedy(setting, model, samples, atol=1e-4, tie=1e-4, least=0.5)
    ties = [line.split("near-tie ")[1] for line in printed.getvalue().splitlines() if "near-tie" in line]
    cfg, params = hf.load(path)
    hf.save(folder / "ours", cfg, params, path, padded=padded)
    again, reread = hf.load(folder / "ours")
    same = cfg == again and all(jax.tree.leaves(jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), params, reread)))
    loaded, report = library.AutoModelForCausalLM.from_pretrained(
        folder / "ours", dtype=torch.float32, output_loading_info=True
    )
    whole = not any(report[x] for x in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    whole &= np.array_equal(torch_logits(loaded.eval(), tokens()), expected)
    exact = 1e-4 if family.startswith("gemma4") else 5e-5  # it does not scale its scores, which are large
    assert max(found) < exact * max(1.0, expected.std()) and same and whole, (found, same, whole)
    export = f"bits equal, reads it  ties: {'; '.join(ties) or 'none'}"
    return f"{max(found):8.1e} {equal:4d} of {total}  {gap:8.1e}  {export}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", default=[*NEWER, *EXTRAS], help="of tests/fakes/hf_models.py; all")
    options = parser.parse_args()
    for name, value in {"jax_platforms": "cpu", "jax_num_cpu_devices": 2}.items():
        jax.config.update(name, value)
    failed = 0
    print(f"{'family':18} {'setting':22} {'dlogit':>8} {'greedy tokens':11} {'|dlogp|':>8}  export", flush=True)
    for family in options.family:
        mixture = any("experts" in name for name in (EXTRAS | NEWER)[family])
        shared = ("experts on two devices",) if mixture else ()
        for setting in ("untied", "tied", "two devices", *shared, "a folder in bfloat16", "hub", "all in bfloat16"):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    result = row(family, setting, Path(folder))
                except Exception as error:  # a row that fails costs no other
                    traceback.print_exc()
                    result, failed = f"FAILED: {type(error).__name__}: {str(error).strip().splitlines()[0]}", failed + 1
            print(f"{family:18} {setting:22} {result}", flush=True)
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
