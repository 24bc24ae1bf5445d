"""MXFP8 casts and GEMMs (OCP Microscaling formats): 32 elements along the reduction (K) dimension share an E8M0 scale.

A scale is a power of two, 2^(byte - 127), stored as `float8_e8m0fnu`: 33 bytes per block. The blocks of an operand are slices of its
rows, along K. A tensor is cast in both orientations (`cast_and_gemm.py`), each from the unquantized tensor: the blocks of one orientation
are not those of the other. With amax = 1.m x 2^e and the largest
finite number of the format 1.75 x 2^top

    byte = e - top + 127 if 1.m <= 1.75 else e - top + 128,     from 0 to 254

is the smallest scale with which nothing saturates: Transformer Engine and Blackwell's conversion instruction round this way (towards plus
infinity). The formula of the OCP specification, always e - top + 127, saturates a block whose 1.m is above 1.75. A block of zeros has the
scale 1. So has a block with infinities or NaN; these elements become NaN.

There are three implementations of a GEMM:

- Blackwell has block-scaled GEMMs (`torch._scaled_mm`), with scales in the swizzled layout of its tensor memory (`swizzled`).
- An e4m3 or e5m2 number times a power of two is a bfloat16 number, except near overflow and underflow. GPUs before Blackwell multiply
  dequantized operands in bfloat16: products equal Blackwell's, and both accumulate in float32. Grouped GEMMs do so on every GPU.
- The reference multiplies in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.fp8.cast_and_gemm import (
    CastKernel,
    Fp8Matrix,
    Fp8Operand,
    Orientation,
    max_exponent,
    quantize,
)
from petatron.kernels.moe.grouped_gemm import GroupedGemm, looped_linear
from petatron.kernels.size_limits import MX_BLOCK

_LARGEST_BYTE, _BIAS = 254, 127
_SWIZZLED_ROWS, _SWIZZLED_COLUMNS = 128, 4


@dataclass(frozen=True, slots=True)
class MxKernels:
    """One implementation of each operation; the functions below are the reference."""

    cast_block_1x32: CastKernel
    cast_rowwise_operand: Callable[[Tensor, torch.dtype], Fp8Operand]
    cast_matrices: Callable[[Tensor, torch.dtype], Fp8Matrix]
    gemm: Callable[..., Tensor]
    grouped_gemm: Callable[..., Tensor]


def scale_bytes(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the E8M0 scales of blocks as bytes, from their amax."""
    bits = amax.to(torch.float32).view(torch.int32)
    byte = (((bits + 0x1FFFFF) >> 23) - max_exponent(dtype)).clamp(0, _LARGEST_BYTE)
    ordinary = (bits > 0) & (bits < 0x7F800000)
    return torch.where(ordinary, byte, _BIAS).to(torch.uint8)


def cast_rowwise_operand(x_RC: Tensor, dtype: torch.dtype) -> Fp8Operand:
    """Casts one orientation; the length of a row is a multiple of 32."""
    blocks = x_RC.unflatten(1, (-1, MX_BLOCK))
    scale = scale_bytes(blocks.abs().amax(dim=2), dtype).view(torch.float8_e8m0fnu)
    values = quantize(blocks, scale.to(torch.float32).unsqueeze(2), dtype)
    return Fp8Operand(values.flatten(1).contiguous(), scale.contiguous(), "block_1x32")


def cast_block_1x32(x_RC: Tensor, dtype: torch.dtype, *, orientation: Orientation = "both") -> Fp8Matrix:
    """Casts the requested orientations, each from the unquantized tensor."""
    rows = None if orientation == "columns" else cast_rowwise_operand(x_RC, dtype)
    return Fp8Matrix(rows, None if orientation == "rows" else cast_rowwise_operand(x_RC.t(), dtype))


def cast_matrices(x_ERC: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    """Casts the matrices of all experts in both orientations; values are [E, R, C] and [E, C, R], scales [E, R, C / 32] and so on."""
    return Fp8Matrix(*(_cast_each_matrix(x, dtype) for x in (x_ERC, x_ERC.transpose(1, 2))))


def _cast_each_matrix(x_ERC: Tensor, dtype: torch.dtype) -> Fp8Operand:
    cast = cast_rowwise_operand(x_ERC.flatten(0, 1), dtype)
    return Fp8Operand(cast.values.view(x_ERC.shape), cast.scale.view(*x_ERC.shape[:2], -1), "block_1x32")


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns [..., C] in a dtype, from scales [..., C / 32]."""
    blocks = values.to(torch.float32).unflatten(-1, (-1, MX_BLOCK))
    return (blocks * scale.to(torch.float32).unsqueeze(-1)).flatten(-2).to(dtype)


def emulated_gemm(a: Fp8Operand, b: Fp8Operand, *, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
    """a b^T on dequantized operands, in at least float32; `fast` (fast accumulation) is ignored."""
    left, right = (dequantize(x.values, x.scale, torch.promote_types(dtype, torch.float32)) for x in (a, b))
    result = (left @ right.t()).to(dtype)
    return result if out is None else out.copy_(result)


def bfloat16_gemm(a: Fp8Operand, b: Fp8Operand, *, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
    """a b^T on operands dequantized to bfloat16, accumulated in float32; `fast` (fast accumulation) is ignored."""
    left, right = (dequantize(x.values, x.scale, torch.bfloat16) for x in (a, b))
    result = left @ right.t() if dtype == torch.bfloat16 else torch.mm(left, right.t(), out_dtype=dtype)
    return result if out is None else out.copy_(result)


def hardware_gemm(a: Fp8Operand, b: Fp8Operand, *, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
    """Blackwell's block-scaled GEMM, for CUDA devices of capability 10 and above; `fast` (fast accumulation) is ignored."""
    result = torch._scaled_mm(a.values, b.values.t(), swizzled(a.scale), swizzled(b.scale), out_dtype=dtype)
    return result if out is None else out.copy_(result)


def swizzled(scale_RC: Tensor) -> Tensor:
    """Returns scales in the layout in which Blackwell's tensor cores read them, flat.

    Tiles of 128 rows by 4 columns follow one another, row of tiles by row of tiles, padded with zero bytes. In a tile the scale of row r
    and column c is the byte 16 (r mod 32) + 4 (r div 32) + c.
    """
    rows, columns = scale_RC.shape
    padding = (0, -columns % _SWIZZLED_COLUMNS, 0, -rows % _SWIZZLED_ROWS)
    padded = F.pad(scale_RC.view(torch.uint8), padding)
    tiles = padded.unflatten(1, (-1, _SWIZZLED_COLUMNS)).unflatten(0, (-1, 4, _SWIZZLED_ROWS // 4))
    return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten().view(torch.float8_e8m0fnu)


def emulated_grouped_gemm(
    x_RD: Tensor, row_scale: Tensor, weight: Fp8Operand, counts: Tensor, *, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Computes the GEMM of each expert's rows with its matrix, in a loop: `weight` is [E, O, D], `counts` [E] the rows of each expert."""
    wide = torch.promote_types(dtype, torch.float32)
    rows, matrices = dequantize(x_RD, row_scale, wide), dequantize(weight.values, weight.scale, wide)
    return looped_linear(rows, matrices, counts).to(dtype)


def bfloat16_grouped_gemm(
    x_RD: Tensor, row_scale: Tensor, weight: Fp8Operand, counts: Tensor, *, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Computes `emulated_grouped_gemm` in one kernel, on operands dequantized to bfloat16."""
    rows, matrices = (dequantize(*x, torch.bfloat16) for x in ((x_RD, row_scale), (weight.values, weight.scale)))
    return GroupedGemm(counts).forward(rows, matrices)[0].to(dtype)


REFERENCE = MxKernels(
    cast_block_1x32=cast_block_1x32,
    cast_rowwise_operand=cast_rowwise_operand,
    cast_matrices=cast_matrices,
    gemm=emulated_gemm,
    grouped_gemm=emulated_grouped_gemm,
)
"""Plain torch on any device."""
BFLOAT16 = replace(REFERENCE, gemm=bfloat16_gemm, grouped_gemm=bfloat16_grouped_gemm)
"""For CUDA devices without block-scaled GEMMs."""
BLACKWELL = replace(BFLOAT16, gemm=hardware_gemm)
"""For CUDA devices of capability 10 and above."""
