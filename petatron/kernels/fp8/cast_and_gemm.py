"""FP8 casts and GEMMs: the reference, which also runs on the CPU.

An FP8 GEMM on Hopper takes both operands with the summed dimension last. A linear has three GEMMs over three tensors, so each tensor
is cast in both orientations, from one read if both are wanted at the same time:

    y  [T, O] = x  [T, D] . w  [O, D]        rows of x,     rows of w
    dx [T, D] = g  [T, O] . wT [D, O]        rows of g,     columns of w
    dw [O, D] = gT [O, T] . xT [D, T]        columns of g,  columns of x

A scale is the factor that dequantizes. It belongs to

    tensorwise      all elements                                          [1]
    rowwise         each row of an operand, so each orientation has its own   [rows, 1]
    block_1x128     each 128 elements of a row                            [rows, ceil(length / 128)], rows adjacent in memory
    block_128x128   each 128 x 128 elements                               [ceil(rows / 128), ceil(length / 128) up to a multiple of 4]

(the layouts of block scales are cuBLAS's). Every scale is a power of two. Multiplying by one is exact, so a quantized element
does not depend on its neighbors, as long as it stays in the normal range; that costs up to one bit of range and none of precision.
Hence both orientations hold the same values, and so do two ranks that shard a tensor, each with the scale of its own shard: layouts
agree. With amax = 1.m x 2^e, and a format whose largest number is 1.75 x 2^top (448 is 1.75 x 2^8, 57344 is 1.75 x 2^15),

    scale = 2^(e - top) if 1.m <= 1.75 else 2^(e - top + 1),    exponent = ((bits(amax) + 0x1FFFFF) >> 23) - 127 - top

in integers, so that every implementation gets the same. A tensor of zeros has the scale 1. Values too large for their scale (with
delayed scaling) saturate; what is not finite becomes NaN, whatever the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.fp8.amax import amax_of
from petatron.kernels.size_limits import BLOCK, Scaling
from petatron.kernels.strides import is_aligned

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK_SCALE_MULTIPLE = 4
_EXPONENT_LIMIT = 126

Orientation = Literal["both", "rows", "columns"]
"""Which orientations a cast writes."""


@dataclass(frozen=True, slots=True)
class Fp8Operand:
    """A contiguous FP8 matrix [rows, length] with its scale; a GEMM sums over `length`."""

    values: Tensor
    scale: Tensor
    scaling: Scaling


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix as it is, and transposed; None for an orientation that its cast was not asked for."""

    rows_or_none: Fp8Operand | None
    columns_or_none: Fp8Operand | None

    @property
    def rows(self) -> Fp8Operand:
        assert self.rows_or_none is not None, "only the columns were cast"
        return self.rows_or_none

    @property
    def columns(self) -> Fp8Operand:
        assert self.columns_or_none is not None, "only the rows were cast"
        return self.columns_or_none


class CastKernel(Protocol):
    """A cast whose scales come from the tensor itself."""

    def __call__(self, x_RC: Tensor, dtype: torch.dtype, /, *, orientation: Orientation = "both") -> Fp8Matrix: ...


@dataclass(frozen=True, slots=True)
class Fp8Kernels:
    """One implementation of each operation; the functions below, the reference, say what each does."""

    update_amax: Callable[[Tensor, Tensor], None]
    update_scale: Callable[..., None]
    cast_tensor: Callable[..., Fp8Matrix]
    cast_speculative: Callable[..., Fp8Matrix]
    cast_with_scale: Callable[..., Fp8Matrix]
    cast_rowwise: CastKernel
    cast_block_1x128: CastKernel
    cast_block_128x128: CastKernel
    cast_rowwise_operand: Callable[[Tensor, torch.dtype], Fp8Operand]
    cast_matrices: Callable[[Tensor, torch.dtype], Fp8Matrix]
    gemm: Callable[..., Tensor]
    grouped_gemm: Callable[..., Tensor]


def max_exponent(dtype: torch.dtype) -> int:
    """Returns the largest exponent: the largest number of a format is 1.75 x 2^this."""
    return 8 if dtype == E4M3 else 15


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the smallest power of two that scales magnitudes up to `amax` into a format; 1 for zero, infinity and NaN."""
    bits = amax.to(torch.float32).view(torch.int32)
    exponent = ((bits + 0x1FFFFF) >> 23) - 127 - max_exponent(dtype)
    exponent = exponent.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
    ordinary = (bits > 0) & (bits < 0x7F800000)
    return torch.where(ordinary, ((exponent + 127) << 23), 127 << 23).to(torch.int32).view(torch.float32)


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale, rounded to nearest even; too large values saturate, non-finite ones become NaN."""
    wide = x.to(torch.float32)
    limit = torch.finfo(dtype).max
    return ((wide * scale.reciprocal()).clamp(-limit, limit) + (wide - wide)).to(dtype)


def update_amax(x_RC: Tensor, amax: Tensor) -> None:
    """Updates `amax` [1] float32 to max(amax, that of the tensor)."""
    amax.copy_(torch.maximum(amax, amax_of(x_RC)))


def update_scale(history_L: Tensor, scale: Tensor, dtype: torch.dtype, *, most_recent: bool) -> None:
    """Sets `scale` [1] from an amax history: the maximum of all entries, or the first, that of the step before.

    The history has that first entry, then those before it, oldest first. The first becomes the last, the oldest is dropped, and
    the new first entry is 0, for the new step: where it is does not depend on the step. A non-finite amax counts as 0, here and
    from now on: its NaN has been propagated already.
    """
    history_L.nan_to_num_(nan=0.0, posinf=0.0)
    amax = history_L[:1] if most_recent else history_L.amax().reshape(1)
    scale.copy_(power_of_two_scale(amax, dtype))
    history_L.copy_(history_L.roll(-1))
    history_L[0] = 0


def cast_tensor(
    x_RC: Tensor, dtype: torch.dtype, *, amax: Tensor | None = None, orientation: Orientation = "both"
) -> Fp8Matrix:
    """`amax` [1] float32 is the tensor's amax, where it is known already."""
    scale = power_of_two_scale(amax_of(x_RC) if amax is None else amax, dtype).reshape(1)
    return _quantize_matrix(x_RC, dtype, scale, orientation)


def cast_speculative(
    x_RC: Tensor, dtype: torch.dtype, *, previous_scale: Tensor, orientation: Orientation = "both"
) -> Fp8Matrix:
    """Casts with `previous_scale` [1] float32 while computing amax, and casts again if the scale of that amax differs.

    The result equals that of `cast_tensor` bit for bit; `previous_scale` is set to its scale. Scales are powers of two and amax
    changes little from step to step, so that mostly the tensor is read once, where `cast_tensor` reads it twice.
    """
    previous_scale.copy_(scale := power_of_two_scale(amax_of(x_RC), dtype))
    return _quantize_matrix(x_RC, dtype, scale, orientation)


def cast_with_scale(
    x_RC: Tensor, dtype: torch.dtype, *, scale: Tensor, amax: Tensor, orientation: Orientation = "both"
) -> Fp8Matrix:
    """Casts with the given scale [1]; raises `amax` [1] to the tensor's."""
    update_amax(x_RC, amax)
    return _quantize_matrix(x_RC, dtype, scale, orientation)


def cast_rowwise(x_RC: Tensor, dtype: torch.dtype, *, orientation: Orientation = "both") -> Fp8Matrix:
    return _cast_each(cast_rowwise_operand, x_RC, dtype, orientation)


def cast_rowwise_operand(x_RC: Tensor, dtype: torch.dtype) -> Fp8Operand:
    """Casts one orientation, for grouped GEMMs."""
    scale = power_of_two_scale(x_RC.abs().amax(dim=1, keepdim=True), dtype)
    return Fp8Operand(quantize(x_RC, scale, dtype).contiguous(), scale, "rowwise")


def cast_matrices(x_ERC: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    """Casts the matrices of all experts in both orientations; values are [E, R, C] and [E, C, R], scales [E, R] and [E, C]."""
    return Fp8Matrix(*(_cast_rowwise_each(x, dtype) for x in (x_ERC, x_ERC.transpose(1, 2))))


def _cast_rowwise_each(x_ERC: Tensor, dtype: torch.dtype) -> Fp8Operand:
    cast = cast_rowwise_operand(x_ERC.flatten(0, 1), dtype)
    return Fp8Operand(cast.values.view(x_ERC.shape), cast.scale.view(x_ERC.shape[:2]), "rowwise")


def cast_block_1x128(x_RC: Tensor, dtype: torch.dtype, *, orientation: Orientation = "both") -> Fp8Matrix:
    return _cast_each(_cast_block_1x128_operand, x_RC, dtype, orientation)


def _cast_each(
    cast: Callable[[Tensor, torch.dtype], Fp8Operand], x_RC: Tensor, dtype: torch.dtype, orientation: Orientation
) -> Fp8Matrix:
    rows = None if orientation == "columns" else cast(x_RC, dtype)
    return Fp8Matrix(rows, None if orientation == "rows" else cast(x_RC.t(), dtype))


def cast_block_128x128(x_RC: Tensor, dtype: torch.dtype, *, orientation: Orientation = "both") -> Fp8Matrix:
    tiles = _pad_to_multiples(x_RC, BLOCK, BLOCK).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = power_of_two_scale(tiles.abs().amax(dim=(1, 3)), dtype)
    values = quantize(x_RC, _expand_block_scales(scale, x_RC.shape, BLOCK), dtype)
    operands = []
    for matrix, scales in ((values, scale), (values.t(), scale.t())):
        padded = F.pad(scales, (0, -scales.shape[1] % BLOCK_SCALE_MULTIPLE), value=1.0)
        operands.append(Fp8Operand(matrix.contiguous(), padded.contiguous(), "block_128x128"))
    return _wanted(operands[0], operands[1], orientation)


def emulated_gemm(a: Fp8Operand, b: Fp8Operand, *, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
    """a b^T on dequantized operands: as the hardware, up to the order and precision of its sums.

    `fast` accumulates in fewer bits on devices that have a choice; `out` has the dtype and receives the result.
    """
    wide = torch.promote_types(dtype, torch.float32)
    result = (dequantize(a).to(wide) @ dequantize(b).to(wide).t()).to(dtype)
    return result if out is None else out.copy_(result)


def dequantize(operand: Fp8Operand) -> Tensor:
    """Returns the values of an operand, in float32."""
    values, scale = operand.values.to(torch.float32), operand.scale
    if operand.scaling == "block_1x128":
        scale = scale.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
    if operand.scaling == "block_128x128":
        scale = _expand_block_scales(scale, values.shape, BLOCK)
    return values * scale


def emulated_grouped_gemm(
    x_RD: Tensor, row_scale: Tensor, weight: Fp8Operand, counts: Tensor, *, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Computes a GEMM of each expert's rows with its matrix: `weight` is [E, O, D] with scales [E, O]; `counts` [E] are rows."""
    wide = torch.promote_types(dtype, torch.float32)
    rows = (x_RD.to(torch.float32) * row_scale.reshape(-1, 1)).to(wide)
    matrices = (weight.values.to(torch.float32) * weight.scale[..., None]).to(wide)
    sizes = counts.tolist()
    parts = rows[: sum(sizes)].split(sizes)
    outputs = [part @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)]
    return F.pad(torch.cat(outputs), (0, 0, 0, x_RD.shape[0] - sum(sizes))).to(dtype)


def hardware_gemm(a: Fp8Operand, b: Fp8Operand, *, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
    """cuBLAS's FP8 GEMM, for CUDA devices of capability 9.0. Sizes are multiples of 16; block scales are of e4m3.

    block_128x128 needs `F.scaled_mm` (second), everything else uses `torch._scaled_mm` (first), which writes to `out`. Their layouts,
    for a [M, K] and b [N, K] and scales as they are passed:

        first     a 1x128   [M, K / 128], rows adjacent in memory;    b 1x128   [K / 128, N], N adjacent
        second    a 1x128   [M, K / 128], rows adjacent in memory;    b 128x128 [K / 128 up to a multiple of 4, N / 128],
                  the first adjacent
    """
    if b.scaling == "block_128x128":
        assert a.scaling == "block_1x128"
        left, right = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        result = F.scaled_mm(
            a.values, b.values.t(), a.scale, left, b.scale.t(), right, output_dtype=dtype, use_fast_accum=False
        )
        return result if out is None else out.copy_(result)
    left, right = a.scale, b.scale if b.scaling == "tensorwise" else b.scale.t()
    fast_accum = fast and a.scaling != "block_1x128"
    if out is None or not (out.is_contiguous() and is_aligned(out)):  # cuBLAS cannot write there
        result = torch._scaled_mm(a.values, b.values.t(), left, right, out_dtype=dtype, use_fast_accum=fast_accum)
        return result if out is None else out.copy_(result)
    return torch._scaled_mm(a.values, b.values.t(), left, right, out_dtype=dtype, use_fast_accum=fast_accum, out=out)


def hardware_grouped_gemm(
    x_RD: Tensor, row_scale: Tensor, weight: Fp8Operand, counts: Tensor, *, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Torch's grouped GEMM for e4m3 operands with a scale per row; its result is bfloat16."""
    ends = counts.cumsum(0).to(torch.int32)
    matrices = weight.values.transpose(1, 2)
    result = torch._scaled_grouped_mm(
        x_RD,
        matrices,
        row_scale.reshape(-1),
        weight.scale,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return result.to(dtype)


def _quantize_matrix(x_RC: Tensor, dtype: torch.dtype, scale: Tensor, orientation: Orientation) -> Fp8Matrix:
    values = quantize(x_RC, scale, dtype)
    rows, columns = (Fp8Operand(matrix.contiguous(), scale, "tensorwise") for matrix in (values, values.t()))
    return _wanted(rows, columns, orientation)


def _wanted(rows: Fp8Operand, columns: Fp8Operand, orientation: Orientation) -> Fp8Matrix:
    return Fp8Matrix(None if orientation == "columns" else rows, None if orientation == "rows" else columns)


def _cast_block_1x128_operand(x_RC: Tensor, dtype: torch.dtype) -> Fp8Operand:
    runs = _pad_to_multiples(x_RC, 1, BLOCK).unflatten(1, (-1, BLOCK))
    scale = power_of_two_scale(runs.abs().amax(dim=2), dtype)
    expanded = scale.repeat_interleave(BLOCK, dim=1)[:, : x_RC.shape[1]]
    return Fp8Operand(quantize(x_RC, expanded, dtype).contiguous(), scale.t().contiguous().t(), "block_1x128")


def _pad_to_multiples(x: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))


def _expand_block_scales(scale: Tensor, shape: torch.Size, size: int) -> Tensor:
    """Expands a number per square to a number per element of a shape."""
    return scale.repeat_interleave(size, dim=0)[: shape[0]].repeat_interleave(size, dim=1)[:, : shape[1]]


REFERENCE = Fp8Kernels(
    update_amax=update_amax,
    update_scale=update_scale,
    cast_tensor=cast_tensor,
    cast_speculative=cast_speculative,
    cast_with_scale=cast_with_scale,
    cast_rowwise=cast_rowwise,
    cast_block_1x128=cast_block_1x128,
    cast_block_128x128=cast_block_128x128,
    cast_rowwise_operand=cast_rowwise_operand,
    cast_matrices=cast_matrices,
    gemm=emulated_gemm,
    grouped_gemm=emulated_grouped_gemm,
)
"""Plain torch on any device."""
