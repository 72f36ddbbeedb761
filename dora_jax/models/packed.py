"""Weights of a Hugging Face folder in 8 or 4 bits, read as the numbers that they stand for.

Consumes open safetensors files; `unpacked` finds the tensors of two formats by their names, and puts one that reads
like a plain tensor in the place of each: only the bytes of what is asked for are read, and become float32.
  fp8    NAME f8e4m3 [out, in], and NAME_scale_inv: a factor for each square of 128 x 128, as DeepSeek-V3 writes them
  mxfp4  NAME_blocks u8 [experts, out, in / 32, 16], and NAME_scales u8 [experts, out, in / 32]: two numbers e2m1 a
         byte, the low half first, times 2 ** (scale - 127); NAME is [experts, in, out], as gpt-oss has it in 16 bits
Law: a scale that does not belong to its tensor is a ValueError that names both.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

SQUARE = 128  # of fp8, rows and columns that one factor is of
GROUP = 32  # of mxfp4, numbers that one scale is of
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)  # by three bits; the fourth is the sign
Stored = Any  # an open safetensors file, or a slice of one
Tensors = dict[str, tuple[Stored, Path, str]]  # name in a folder of text alone -> (open file, its path, name there)
SCALE_INV, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"


@dataclasses.dataclass(frozen=True)
class Packed:
    """What a safetensors handle is asked for, of one tensor."""

    values: Stored
    scales: Stored
    file: Path  # that of the values
    stored: str

    def get_slice(self, name: str) -> Packed:
        return self

    def get_tensor(self, name: str) -> np.ndarray:
        return self[tuple(slice(0, n) for n in self.get_shape())]

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> list[int]:
        shape = self.values.get_shape()
        return shape if len(shape) == 2 else [shape[0], shape[2] * GROUP, shape[1]]

    def __getitem__(self, at: tuple[slice, ...]) -> np.ndarray:
        if len(at) == 2:
            squares = tuple(slice(x.start // SQUARE, -(-x.stop // SQUARE)) for x in at)
            factors = self.scales[squares].astype(np.float32)
            for axis, x in enumerate(at):  # one for each row, and each column
                of_square = np.arange(x.start, x.stop) // SQUARE - x.start // SQUARE
                factors = factors.take(of_square, axis)
            with self.file.open("rb") as file:  # the library's slices have no numpy type for 8 bits
                header = int.from_bytes(file.read(8), "little")
                begin = json.loads(file.read(header))[self.stored]["data_offsets"][0]
            whole = np.memmap(self.file, np.uint8, "r", 8 + header + begin, tuple(self.get_shape()))
            return whole[at].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * factors
        experts, inner, outer = at
        groups = slice(inner.start // GROUP, -(-inner.stop // GROUP))
        out = np.empty([x.stop - x.start for x in at], np.float32)
        for row, e in enumerate(range(experts.start, experts.stop)):  # one at a time: 32 are 2 GB
            of_one = slice(e, e + 1), outer, groups
            bytes_OxGxB = self.values[of_one][0]
            codes = np.stack([bytes_OxGxB & 15, bytes_OxGxB >> 4], axis=-1).reshape(*bytes_OxGxB.shape[:2], GROUP)
            exponents = self.scales[of_one][0].astype(np.int32)[..., None] - 127
            numbers = np.ldexp(np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7]), exponents)
            first = inner.start - groups.start * GROUP
            out[row] = numbers.reshape(len(numbers), -1)[:, first : first + out.shape[1]].T
        return out


def unpacked(tensors: Tensors) -> Tensors:
    """The same tensors, with one in the place of each that is packed."""
    plain = dict(tensors)
    for name, (handle, file, stored) in tensors.items():
        base = name.removesuffix(BLOCKS)
        scales = f"{base}{SCALES}" if base != name else f"{name}{SCALE_INV}"
        if scales not in tensors:
            continue
        scale_handle, _, scale_stored = tensors[scales]
        packed = Packed(handle.get_slice(stored), scale_handle.get_slice(scale_stored), file, stored)
        shape, of_scales = (x.get_shape() for x in (packed.values, packed.scales))
        wanted = shape[:3] if base != name else [-(-n // SQUARE) for n in shape]
        if len(shape) != (4 if base != name else 2) or of_scales != wanted or (base != name and shape[3] != GROUP // 2):
            raise ValueError(
                f"{file} holds {name} of shape {tuple(shape)}, to which {scales} of shape {tuple(of_scales)} does not "
                "belong"
            )
        del plain[name], plain[scales]
        plain[base] = packed, file, stored.removesuffix(BLOCKS)
    return plain
