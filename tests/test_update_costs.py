"""Seconds of an update by arithmetic: against what XLA's compiler estimates of the same updates."""

import dataclasses
import subprocess
import sys

import pytest

from dora_jax.config import TrainerSection
from dora_jax.costs.update import expected, model_flops
from dora_jax.models.families import KNOWN
from dora_jax.plan.memory import Mesh

SECTION = TrainerSection(micro_batches=4, remat="full", attention="splash", logits_bytes=2**30)
QWEN_8B, V5P_16 = KNOWN["Qwen3-8B"], Mesh(1, 8, 1, 1)


def of_8b(**changes):
    return expected(QWEN_8B, dataclasses.replace(SECTION, **changes), V5P_16, "v5p", 32, 4096)


V5E_64 = (Mesh(1, 8, 4, 2), "v5e", 32, 16384)


@pytest.mark.parametrize(
    "changes,where,seconds,sent",
    [
        ({}, (V5P_16, "v5p", 32, 4096), 3.17, 192.5),
        ({"remat": "dots"}, (V5P_16, "v5p", 32, 4096), 2.94, 180.4),
        ({}, V5E_64, 4.10, 100.0),
    ],
)
def test_agrees_with_the_compiler_on_8b(changes, where, seconds, sent):
    """libtpu 0.0.42.1: estimated cycles at the chip's clock, attention's kernels left out; GB sent a chip."""
    found = expected(QWEN_8B, dataclasses.replace(SECTION, **changes), *where)
    assert sum(p.seconds for p in found.parts if p.what != "attention") == pytest.approx(seconds, rel=0.1)
    assert float(found.sent.note.removesuffix(" GB")) == pytest.approx(sent, rel=0.1)


def test_the_parts_are_what_the_mfu_is_made_of():
    found = of_8b()
    assert found.mfu == pytest.approx(
        model_flops(QWEN_8B, [4096] * 32) / (8 * 459e12 * sum(p.seconds for p in found.parts))
    )
    slow = of_8b(micro_batches=128)  # weights travel so often that nothing hides them
    assert slow.seconds == slow.sent.seconds > found.seconds and slow.mfu < found.mfu
    text = str(found)
    assert "MFU 50%" in text and "matrix products 2.49 s (at 80% of the peak)" in text and "it sends 0.36" in text


@pytest.mark.parametrize(
    "changes,part", [({"attention": "reference"}, 1), ({"remat": "full"}, 0), ({"micro_batches": 8}, 3)]
)
def test_what_costs_more(changes, part):
    base = dataclasses.replace(SECTION, remat="dots")
    more = expected(QWEN_8B, dataclasses.replace(base, **changes), V5P_16, "v5p", 32, 4096)
    assert more.parts[part].seconds > expected(QWEN_8B, base, V5P_16, "v5p", 32, 4096).parts[part].seconds


def test_a_dry_run_computes_it_without_jax():
    code = "import sys, dora_jax.costs.update; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
