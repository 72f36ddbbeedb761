"""Seconds of an update by arithmetic: against what XLA's compiler estimates of the same updates."""

import dataclasses
import re
import subprocess
import sys

import pytest

from dora_jax.aot import roles
from dora_jax.base.chips import CHIPS, ici_bytes_per_s
from dora_jax.config import TrainerSection
from dora_jax.costs.update import expected, model_flops, splash_share
from dora_jax.models.families import KNOWN
from dora_jax.ops import segment_attention
from dora_jax.plan.memory import Mesh
from dora_jax.trainer import hlo

SECTION = TrainerSection(micro_batches=4, remat="full", attention="splash", logits_bytes=2**30)
QWEN_8B, V5P_16 = KNOWN["Qwen3-8B"], Mesh(1, 8, 1, 1)


def of_8b(**changes):
    return expected(QWEN_8B, dataclasses.replace(SECTION, **changes), V5P_16, "v5p", 32, 4096)


@pytest.mark.parametrize("tokens,context,width", [(4096, 1, 128), (16384, 2, 128), (4096, 1, 256), (640, 1, 64)])
def test_splash_attention_computes_the_blocks_that_its_own_mask_has(tokens, context, width):
    kernel = segment_attention.splash_kernel(1, tokens, context, False, width)
    blocks = kernel.fwd_mask_info.block_mask  # of the head, [blocks of queries, blocks of keys]
    last = blocks.reshape(context, -1, blocks.shape[-1])[-1]
    assert splash_share(tokens, context, width) == pytest.approx((last > 0).mean())


def test_a_compiled_update_has_the_mfu_of_the_dry_run():
    """The compiler's seconds are those of 8B on a v5p-16 below, beside kernels that skip what no query sees."""
    forward = 36 * 4 * 4 * 32 * 128 * 4096**2  # a chip: layers, rows, two products of each pair and head
    floor_s = 3.5 * forward * splash_share(4096, 1, 128) / 459e12  # the backward kernel makes five products
    kernel = roles.Kernel(name="splash", runs=288, flops=0.0, bytes=0.0, floor_s=floor_s)
    sizes = dict.fromkeys(("argument_bytes", "temporary_bytes", "output_bytes", "host_bytes"), 0)
    needed = model_flops(QWEN_8B, [4096] * 32) / 8
    one = roles.Compiled(name="train", flops=2 * needed, sent={"all-gather": hlo.Traffic(1, 192_500_000_000)},
                         model_s=3.17, kernels=(kernel,), compile_s=1.0, chip=CHIPS["v5p"],
                         links_bytes_per_s=ici_bytes_per_s("v5p", 8), needed=needed, **sizes)  # fmt: skip
    printed = int(re.search(r"MFU (\d+)% of an update in 3.55 s: .* it sends 0.713 s; 50%", roles.describe(one)[-1])[1])
    assert printed == pytest.approx(100 * of_8b().mfu, abs=2)
    summed = dataclasses.replace(one, sent={"all-gather": hlo.Traffic(1, 10**10), "all-reduce": hlo.Traffic(1, 10**10)})
    assert summed.sent_s == pytest.approx(3e10 / ici_bytes_per_s("v5p", 8)), "a sum is sent, and its result comes back"
    slow = dataclasses.replace(one, links_bytes_per_s=1e10)
    assert slow.seconds == slow.sent_s == pytest.approx(19.25)


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


@pytest.mark.parametrize(
    "size,micro_batches,where,seconds",
    [
        ("Qwen3-0.6B", 4, (Mesh(1, 4, 1, 1), "v5e", 128, 4096), 9.163),
        ("Qwen3-8B", 8, (Mesh(1, 4, 1, 1), "v5p", 256, 4096), 51.39),
        ("Qwen3-32B", 16, (Mesh(1, 32, 1, 1), "v5p", 2048, 4096), 195.8),
    ],
)
def test_agrees_with_the_compiler_on_shipped_configurations(size, micro_batches, where, seconds):
    """The same of configs/qwen3.py's 0.6B,v5e-8, 8B,v5p-16 and 32B,v5p-128."""
    found = expected(KNOWN[size], dataclasses.replace(SECTION, micro_batches=micro_batches), *where)
    assert sum(p.seconds for p in found.parts if p.what != "attention") == pytest.approx(seconds, rel=0.03)


@pytest.mark.parametrize(
    "chip,chips,links",
    [("v5p", 4, 2), ("v5p", 8, 3), ("v5p", 16, 3), ("v5p", 32, 3), ("v5p", 64, 6), ("v5p", 256, 6), ("v5p", 1, 6),
     ("v5e", 4, 2), ("v5e", 8, 2), ("v6e", 64, 2), ("v6e", 128, 3), ("v5e", 256, 4), ("h100", 8, 1), ("tpu7x", 2, 1)],
)  # fmt: skip
def test_a_chip_has_the_links_of_its_slice(chip, chips, links):
    """2x2x1, 2x2x2, 2x2x4, 2x4x4: no side wraps around before 4x4x4; of flat slices, those of 16 chips."""
    most = {"v5p": 6, "tpu7x": 6, "v5e": 4, "v6e": 4, "h100": 1}[chip]
    assert ici_bytes_per_s(chip, chips) == pytest.approx(CHIPS[chip].ici_bytes_per_s * links / most)


def test_an_update_sends_over_the_links_that_its_slice_has():
    few, many = (expected(QWEN_8B, SECTION, Mesh(1, chips, 1, 1), "v5p", 64, 4096).sent for chips in (32, 64))
    assert few.note == many.note and few.seconds == pytest.approx(2 * many.seconds)


def test_links_carry_what_is_summed_twice():
    """XLA:TPU sums gradients whole and slices them: its text has no reduce-scatter."""
    found = of_8b().sent
    weights = 2 * QWEN_8B.matrix_params * 4
    assert float(found.note.removesuffix(" GB")) == pytest.approx(3 * weights / 1e9, rel=0.01)
    assert found.seconds == pytest.approx((2 + 2) * weights / ici_bytes_per_s("v5p", 8))


def test_the_parts_are_what_the_mfu_is_made_of():
    found = of_8b()
    assert found.mfu == pytest.approx(
        model_flops(QWEN_8B, [4096] * 32) / (8 * 459e12 * sum(p.seconds for p in found.parts))
    )
    slow = of_8b(micro_batches=128)  # weights travel so often that nothing hides them
    assert slow.seconds == slow.sent.seconds > found.seconds and slow.mfu < found.mfu
    text = str(found)
    assert "MFU 49%" in text and "matrix products 2.55 s (at 78% of the peak)" in text and "it sends 0.971" in text


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
