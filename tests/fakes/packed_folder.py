"""Hugging Face folders in fp8 and MXFP4, written from plain ones without the code that reads them."""

import json
import shutil

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1


def _write(plain, packed, twin, quantization, tensors, numbers):
    for folder, held in ((packed, tensors), (twin, numbers)):
        shutil.copytree(plain, folder)
        held = {name: np.ascontiguousarray(x) for name, x in held.items()}
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    file = packed / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))


def as_mxfp4(plain, packed, twin):
    """The experts' matrices [E, in, out] as blocks and scales of [E, out, in / 32]; twin: the same numbers in f32."""
    tensors, numbers = {}, load_file(plain / "model.safetensors")
    for name, x in list(numbers.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = x
            continue
        rows = x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1, 32)
        exponents = np.floor(np.log2(np.abs(rows).max(-1))).astype(int) - 2  # 4 to 8 in a group
        scaled = np.abs(rows) / np.exp2(exponents)[..., None]
        codes = np.abs(scaled[..., None] - np.array(VALUES)).argmin(-1)
        numbers[name] = np.sign(rows) * np.array(VALUES, np.float32)[codes] * np.exp2(exponents)[..., None]
        numbers[name] = np.ascontiguousarray(numbers[name].reshape(*rows.shape[:2], -1).swapaxes(1, 2), np.float32)
        codes = np.where(rows < 0, codes + 8, codes).astype(np.uint8)
        tensors[f"{name}_blocks"] = codes[..., ::2] + 16 * codes[..., 1::2]
        tensors[f"{name}_scales"] = (exponents + 127).astype(np.uint8)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    _write(plain, packed, twin, quantization, tensors, numbers)


def as_fp8(plain, packed, twin, cut=0):
    """All projections of the layers as DeepSeek-V3 writes them; cut: so many rows of scales are left out."""
    tensors, numbers = {}, load_file(plain / "model.safetensors")
    for name, x in list(numbers.items()):
        if not name.endswith(("_proj.weight", "_mqa.weight")):
            tensors[name] = x
            continue
        squares = [-(-n // 128) for n in x.shape]
        whole = np.zeros([128 * n for n in squares], np.float32)
        whole[: x.shape[0], : x.shape[1]] = x
        tiles = whole.reshape(squares[0], 128, squares[1], 128)
        scales = (np.abs(tiles).max((1, 3)) / 448).astype(np.float32)
        of_all = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: x.shape[0], : x.shape[1]]
        tensors[name] = (x / of_all).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales[cut:]
        numbers[name] = tensors[name].astype(np.float32) * of_all
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    _write(plain, packed, twin, quantization, tensors, numbers)
