"""Eight-bit floats: numbers with a scale, and products of them. The reference, which also runs on the CPU.

A matrix product on Hopper takes both operands with the summed dimension last. A layer has three products over three tensors,
so each tensor is cast in both orientations, from one reading of it:

    y  [T, O] = x  [T, D] . w  [O, D]        rows of x,     rows of w
    dx [T, D] = g  [T, O] . wT [D, O]        rows of g,     columns of w
    dw [O, D] = gT [O, T] . xT [D, T]        columns of g,  columns of x

A scale is what a number of eight bits is multiplied with to be itself again. It belongs to

    tensor    everything                                            one number
    rows      each row of an operand, so each orientation has its own   [rows, 1]
    blocks    each 128 numbers of a row                             [rows, ceil(length / 128)], rows adjacent in memory
    squares   each 128 x 128 numbers                                [ceil(rows / 128), ceil(length / 128) up to a multiple of 4]

(the layouts of blocks and squares are cuBLAS's). Every scale is a power of two. Multiplying by one is exact, so a number's
eight bits do not depend on its neighbours, as long as it is not so small that it leaves the normal range; that costs up to
one bit of range and none of precision. Hence both orientations hold the same numbers, and so do two ranks that split
a tensor and take each the scale of its own part: layouts agree. With a maximum of amax = 1.m x 2^e in the tensor, and a
format whose largest number is 1.75 x 2^top (448 is 1.75 x 2^8, 57344 is 1.75 x 2^15),

    scale = 2^(e - top) if 1.m <= 1.75 else 2^(e - top + 1),    exponent = ((bits(amax) + 0x1FFFFF) >> 23) - 127 - top

in integers, so that every implementation finds the same. A tensor of zeros has the scale 1. What is too large for its scale
(with delayed scaling) becomes the largest number; what is not finite becomes NaN, whatever the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.alignment import is_aligned

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128
BLOCK_SCALE_MULTIPLE = 4
_EXPONENT_LIMIT = 126

Scaling = Literal["tensor", "rows", "blocks", "squares"]


@dataclass(frozen=True, slots=True)
class Fp8Operand:
    """A matrix [rows, length] in eight bits, contiguous, `length` being what a product sums over, and its scale."""

    values: Tensor
    scale: Tensor
    scaling: Scaling


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix in both orientations: as it is, and transposed."""

    rows: Fp8Operand
    columns: Fp8Operand


class CastKernel(Protocol):
    """A cast whose scale comes from the numbers themselves."""

    def __call__(self, x_RC: Tensor, dtype: torch.dtype) -> Fp8Matrix: ...


class UpdateScaleKernel(Protocol):
    def __call__(
        self, history_L: Tensor, scale: Tensor, dtype: torch.dtype, *, latest: int, cleared: int, most_recent: bool
    ) -> None:
        """Set `scale` [1] from a history of largest magnitudes: all of them, or the one at `latest`.

        What is not finite counts as 0, here and from now on: its NaN went on its way when it was met. The entry `cleared`
        becomes 0, for the step that begins.
        """
        ...


class CastTensorKernel(Protocol):
    def __call__(self, x_RC: Tensor, dtype: torch.dtype, *, amax: Tensor | None = None) -> Fp8Matrix:
        """`amax` [1] float32 is the largest magnitude, where whoever made the tensor knows it."""
        ...


class CastDelayedKernel(Protocol):
    def __call__(self, x_RC: Tensor, dtype: torch.dtype, *, scale: Tensor, amax: Tensor) -> Fp8Matrix:
        """With a scale [1] that is given; `amax` [1] is raised to the largest magnitude met."""
        ...


class Fp8GemmKernel(Protocol):
    def __call__(
        self, a: Fp8Operand, b: Fp8Operand, *, dtype: torch.dtype, fast: bool, out: Tensor | None = None
    ) -> Tensor:
        """a b^T. `fast` sums in fewer bits on devices that have a choice; `out` has the dtype and gets the result."""
        ...


class Fp8GroupedGemmKernel(Protocol):
    def __call__(
        self, x_RD: Tensor, row_scale: Tensor, weight: Fp8Operand, counts: Tensor, *, dtype: torch.dtype, fast: bool
    ) -> Tensor:
        """Each expert's rows times its own matrix: `weight` is [E, O, D] with scales [E, O]; `counts` [E] are rows."""
        ...


@dataclass(frozen=True, slots=True)
class Fp8Kernels:
    """One implementation of each operation."""

    update_amax: Callable[[Tensor, Tensor], None]
    update_scale: UpdateScaleKernel
    cast_tensor: CastTensorKernel
    cast_delayed: CastDelayedKernel
    cast_rows: CastKernel
    cast_blocks: CastKernel
    cast_blocks_2d: CastKernel
    cast_rows_only: Callable[[Tensor, torch.dtype], Fp8Operand]
    gemm: Fp8GemmKernel
    grouped_gemm: Fp8GroupedGemmKernel


def max_exponent(dtype: torch.dtype) -> int:
    """The largest number of a format is 1.75 x 2^this."""
    return 8 if dtype == E4M3 else 15


def power_of_two_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest power of two under which magnitudes up to `amax` fit into a format; 1 for zero, infinity and NaN."""
    bits = amax.to(torch.float32).view(torch.int32)
    exponent = ((bits + 0x1FFFFF) >> 23) - 127 - max_exponent(dtype)
    exponent = exponent.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
    ordinary = (bits > 0) & (bits < 0x7F800000)
    return torch.where(ordinary, ((exponent + 127) << 23), 127 << 23).to(torch.int32).view(torch.float32)


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale, rounded to nearest even; too large becomes the largest, not finite becomes NaN."""
    wide = x.to(torch.float32)
    limit = torch.finfo(dtype).max
    return ((wide * scale.reciprocal()).clamp(-limit, limit) + (wide - wide)).to(dtype)


def update_amax(x_RC: Tensor, amax: Tensor) -> None:
    """Raise `amax` [1] float32 to the largest magnitude of a tensor."""
    amax.copy_(torch.maximum(amax, _amax(x_RC)))


def update_scale(
    history_L: Tensor, scale: Tensor, dtype: torch.dtype, *, latest: int, cleared: int, most_recent: bool
) -> None:
    history_L.nan_to_num_(nan=0.0, posinf=0.0)
    seen = history_L[latest : latest + 1] if most_recent else history_L.amax().reshape(1)
    scale.copy_(power_of_two_scale(seen, dtype))
    history_L[cleared] = 0


def cast_tensor(x_RC: Tensor, dtype: torch.dtype, *, amax: Tensor | None = None) -> Fp8Matrix:
    scale = power_of_two_scale(_amax(x_RC) if amax is None else amax, dtype).reshape(1)
    return _cast_with_scale(x_RC, dtype, scale)


def cast_delayed(x_RC: Tensor, dtype: torch.dtype, *, scale: Tensor, amax: Tensor) -> Fp8Matrix:
    update_amax(x_RC, amax)
    return _cast_with_scale(x_RC, dtype, scale)


def cast_rows(x_RC: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    return Fp8Matrix(cast_rows_only(x_RC, dtype), cast_rows_only(x_RC.t(), dtype))


def cast_rows_only(x_RC: Tensor, dtype: torch.dtype) -> Fp8Operand:
    """One orientation, for products whose other operand is grouped."""
    scale = power_of_two_scale(x_RC.abs().amax(dim=1, keepdim=True), dtype)
    return Fp8Operand(quantise(x_RC, scale, dtype).contiguous(), scale, "rows")


def cast_blocks(x_RC: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    return Fp8Matrix(_cast_blocks_only(x_RC, dtype), _cast_blocks_only(x_RC.t(), dtype))


def cast_blocks_2d(x_RC: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    tiles = _pad_to_multiples(x_RC, BLOCK, BLOCK).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = power_of_two_scale(tiles.abs().amax(dim=(1, 3)), dtype)
    values = quantise(x_RC, _expand_block_scales(scale, x_RC.shape, BLOCK), dtype)
    columns = Fp8Operand(values.t().contiguous(), _pad_block_scales(scale.t()), "squares")
    return Fp8Matrix(Fp8Operand(values.contiguous(), _pad_block_scales(scale), "squares"), columns)


def emulated_gemm(a: Fp8Operand, b: Fp8Operand, *, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
    """The same product in wide numbers: what the hardware does, up to the order and precision of its sums."""
    wide = torch.promote_types(dtype, torch.float32)
    result = (dequantise(a).to(wide) @ dequantise(b).to(wide).t()).to(dtype)
    return result if out is None else out.copy_(result)


def dequantise(operand: Fp8Operand) -> Tensor:
    """The numbers that an operand stands for, in float32."""
    values, scale = operand.values.to(torch.float32), operand.scale
    if operand.scaling == "blocks":
        scale = scale.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
    if operand.scaling == "squares":
        scale = _expand_block_scales(scale, values.shape, BLOCK)
    return values * scale


def emulated_grouped_gemm(
    x_RD: Tensor, row_scale: Tensor, weight: Fp8Operand, counts: Tensor, *, dtype: torch.dtype, fast: bool
) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    rows = (x_RD.to(torch.float32) * row_scale.reshape(-1, 1)).to(wide)
    matrices = (weight.values.to(torch.float32) * weight.scale[..., None]).to(wide)
    sizes = counts.tolist()
    parts = rows[: sum(sizes)].split(sizes)
    products = [part @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)]
    return F.pad(torch.cat(products), (0, 0, 0, x_RD.shape[0] - sum(sizes))).to(dtype)


def hardware_gemm(a: Fp8Operand, b: Fp8Operand, *, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
    """cuBLAS's product, for CUDA devices of capability 9.0. Sizes are multiples of 16; blocks and squares are of e4m3.

    Squares are laid out for the second form of torch's operation, everything else for the first, which writes to `out`. What
    they want, for a [M, K] and b [N, K] and scales as they are passed:

        first     blocks of a  [M, K / 128], rows adjacent in memory;    blocks of b  [K / 128, N], N adjacent
        second    blocks of a  [M, K / 128], rows adjacent in memory;    squares of b [K / 128 up to a multiple of 4, N / 128],
                  the first adjacent
    """
    if b.scaling == "squares":
        assert a.scaling == "blocks"
        left, right = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        result = F.scaled_mm(
            a.values, b.values.t(), a.scale, left, b.scale.t(), right, output_dtype=dtype, use_fast_accum=False
        )
        return result if out is None else out.copy_(result)
    left, right = a.scale, b.scale if b.scaling == "tensor" else b.scale.t()
    quick = fast and a.scaling != "blocks"
    if out is None or not _is_writable(out):
        result = torch._scaled_mm(a.values, b.values.t(), left, right, out_dtype=dtype, use_fast_accum=quick)
        return result if out is None else out.copy_(result)
    return torch._scaled_mm(a.values, b.values.t(), left, right, out_dtype=dtype, use_fast_accum=quick, out=out)


def _is_writable(out: Tensor) -> bool:
    """Whether cuBLAS may write there: rows one after the other, from a multiple of 16 bytes on."""
    return out.is_contiguous() and is_aligned(out)


def hardware_grouped_gemm(
    x_RD: Tensor, row_scale: Tensor, weight: Fp8Operand, counts: Tensor, *, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Torch's grouped product for e4m3 operands with a scale per row; its result is bfloat16."""
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


def _amax(x: Tensor) -> Tensor:
    return x.abs().amax().to(torch.float32).reshape(1)


def _cast_with_scale(x_RC: Tensor, dtype: torch.dtype, scale: Tensor) -> Fp8Matrix:
    values = quantise(x_RC, scale, dtype)
    return Fp8Matrix(
        Fp8Operand(values.contiguous(), scale, "tensor"), Fp8Operand(values.t().contiguous(), scale, "tensor")
    )


def _cast_blocks_only(x_RC: Tensor, dtype: torch.dtype) -> Fp8Operand:
    runs = _pad_to_multiples(x_RC, 1, BLOCK).unflatten(1, (-1, BLOCK))
    scale = power_of_two_scale(runs.abs().amax(dim=2), dtype)
    spread = scale.repeat_interleave(BLOCK, dim=1)[:, : x_RC.shape[1]]
    return Fp8Operand(quantise(x_RC, spread, dtype).contiguous(), scale.t().contiguous().t(), "blocks")


def _pad_to_multiples(x: Tensor, rows: int, columns: int) -> Tensor:
    """With zeros up to multiples of both."""
    return F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))


def _pad_block_scales(scale: Tensor) -> Tensor:
    return F.pad(scale, (0, -scale.shape[1] % BLOCK_SCALE_MULTIPLE), value=1.0).contiguous()


def _expand_block_scales(scale: Tensor, shape: torch.Size, size: int) -> Tensor:
    """A number per square as a number per element of a shape."""
    return scale.repeat_interleave(size, dim=0)[: shape[0]].repeat_interleave(size, dim=1)[:, : shape[1]]


REFERENCE = Fp8Kernels(
    update_amax=update_amax,
    update_scale=update_scale,
    cast_tensor=cast_tensor,
    cast_delayed=cast_delayed,
    cast_rows=cast_rows,
    cast_blocks=cast_blocks,
    cast_blocks_2d=cast_blocks_2d,
    cast_rows_only=cast_rows_only,
    gemm=emulated_gemm,
    grouped_gemm=emulated_grouped_gemm,
)
"""Plain torch on any device."""
