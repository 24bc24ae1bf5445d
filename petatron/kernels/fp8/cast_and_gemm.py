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

from petatron.kernels.alignment import begins_aligned

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128
SQUARES_MULTIPLE = 4
_EXPONENT_LIMIT = 126

Scaling = Literal["tensor", "rows", "blocks", "squares"]


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix [rows, length] in eight bits, contiguous, `length` being what a product sums over, and its scale."""

    values: Tensor
    scale: Tensor
    scaling: Scaling


@dataclass(frozen=True, slots=True)
class Cast:
    """A matrix in both orientations: as it is, and transposed."""

    rows: Operand
    columns: Operand


class CastNow(Protocol):
    """A cast whose scale comes from the numbers themselves."""

    def __call__(self, x_RC: Tensor, dtype: torch.dtype) -> Cast: ...


class NextScale(Protocol):
    def __call__(
        self, history_L: Tensor, scale: Tensor, dtype: torch.dtype, *, latest: int, cleared: int, most_recent: bool
    ) -> None:
        """Set `scale` [1] from a history of largest magnitudes: all of them, or the one at `latest`.

        What is not finite counts as 0, here and from now on: its NaN went on its way when it was met. The entry `cleared`
        becomes 0, for the step that begins.
        """
        ...


class CastTensor(Protocol):
    def __call__(self, x_RC: Tensor, dtype: torch.dtype, *, amax: Tensor | None = None) -> Cast:
        """`amax` [1] float32 is the largest magnitude, where whoever made the tensor knows it."""
        ...


class CastDelayed(Protocol):
    def __call__(self, x_RC: Tensor, dtype: torch.dtype, *, scale: Tensor, amax: Tensor) -> Cast:
        """With a scale [1] that is given; `amax` [1] is raised to the largest magnitude met."""
        ...


class Product(Protocol):
    def __call__(self, a: Operand, b: Operand, *, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
        """a b^T. `fast` sums in fewer bits on devices that have a choice; `out` has the dtype and gets the result."""
        ...


class GroupedProduct(Protocol):
    def __call__(
        self, x_RD: Tensor, row_scale: Tensor, weight: Operand, counts: Tensor, *, dtype: torch.dtype, fast: bool
    ) -> Tensor:
        """Each expert's rows times its own matrix: `weight` is [E, O, D] with scales [E, O]; `counts` [E] are rows."""
        ...


@dataclass(frozen=True, slots=True)
class Fp8Kernels:
    """One implementation of each operation."""

    raise_largest: Callable[[Tensor, Tensor], None]
    next_scale: NextScale
    cast_tensor: CastTensor
    cast_delayed: CastDelayed
    cast_rows: CastNow
    cast_blocks: CastNow
    cast_squares: CastNow
    cast_rows_only: Callable[[Tensor, torch.dtype], Operand]
    product: Product
    grouped_product: GroupedProduct


def top_exponent(dtype: torch.dtype) -> int:
    """The largest number of a format is 1.75 x 2^this."""
    return 8 if dtype == E4M3 else 15


def power_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest power of two under which magnitudes up to `amax` fit into a format; 1 for zero, infinity and NaN."""
    bits = amax.to(torch.float32).view(torch.int32)
    exponent = ((bits + 0x1FFFFF) >> 23) - 127 - top_exponent(dtype)
    exponent = exponent.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
    ordinary = (bits > 0) & (bits < 0x7F800000)
    return torch.where(ordinary, ((exponent + 127) << 23), 127 << 23).to(torch.int32).view(torch.float32)


def to_eight_bits(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale, rounded to nearest even; too large becomes the largest, not finite becomes NaN."""
    wide = x.to(torch.float32)
    limit = torch.finfo(dtype).max
    return ((wide * scale.reciprocal()).clamp(-limit, limit) + (wide - wide)).to(dtype)


def raise_largest(x_RC: Tensor, amax: Tensor) -> None:
    """Raise `amax` [1] float32 to the largest magnitude of a tensor."""
    amax.copy_(torch.maximum(amax, _largest(x_RC)))


def next_scale(
    history_L: Tensor, scale: Tensor, dtype: torch.dtype, *, latest: int, cleared: int, most_recent: bool
) -> None:
    history_L.nan_to_num_(nan=0.0, posinf=0.0)
    seen = history_L[latest : latest + 1] if most_recent else history_L.amax().reshape(1)
    scale.copy_(power_scale(seen, dtype))
    history_L[cleared] = 0


def cast_tensor(x_RC: Tensor, dtype: torch.dtype, *, amax: Tensor | None = None) -> Cast:
    scale = power_scale(_largest(x_RC) if amax is None else amax, dtype).reshape(1)
    return _cast_whole(x_RC, dtype, scale)


def cast_delayed(x_RC: Tensor, dtype: torch.dtype, *, scale: Tensor, amax: Tensor) -> Cast:
    raise_largest(x_RC, amax)
    return _cast_whole(x_RC, dtype, scale)


def cast_rows(x_RC: Tensor, dtype: torch.dtype) -> Cast:
    return Cast(cast_rows_only(x_RC, dtype), cast_rows_only(x_RC.t(), dtype))


def cast_rows_only(x_RC: Tensor, dtype: torch.dtype) -> Operand:
    """One orientation, for products whose other operand is grouped."""
    scale = power_scale(x_RC.abs().amax(dim=1, keepdim=True), dtype)
    return Operand(to_eight_bits(x_RC, scale, dtype).contiguous(), scale, "rows")


def cast_blocks(x_RC: Tensor, dtype: torch.dtype) -> Cast:
    return Cast(_in_blocks(x_RC, dtype), _in_blocks(x_RC.t(), dtype))


def cast_squares(x_RC: Tensor, dtype: torch.dtype) -> Cast:
    tiles = _padded(x_RC, BLOCK, BLOCK).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = power_scale(tiles.abs().amax(dim=(1, 3)), dtype)
    values = to_eight_bits(x_RC, _spread(scale, x_RC.shape, BLOCK), dtype)
    columns = Operand(values.t().contiguous(), _padded_squares(scale.t()), "squares")
    return Cast(Operand(values.contiguous(), _padded_squares(scale), "squares"), columns)


def emulated_product(a: Operand, b: Operand, *, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
    """The same product in wide numbers: what the hardware does, up to the order and precision of its sums."""
    wide = torch.promote_types(dtype, torch.float32)
    result = (widen(a).to(wide) @ widen(b).to(wide).t()).to(dtype)
    return result if out is None else out.copy_(result)


def widen(operand: Operand) -> Tensor:
    """The numbers that an operand stands for, in float32."""
    values, scale = operand.values.to(torch.float32), operand.scale
    if operand.scaling == "blocks":
        scale = scale.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
    if operand.scaling == "squares":
        scale = _spread(scale, values.shape, BLOCK)
    return values * scale


def emulated_grouped_product(
    x_RD: Tensor, row_scale: Tensor, weight: Operand, counts: Tensor, *, dtype: torch.dtype, fast: bool
) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    rows = (x_RD.to(torch.float32) * row_scale.reshape(-1, 1)).to(wide)
    matrices = (weight.values.to(torch.float32) * weight.scale[..., None]).to(wide)
    sizes = counts.tolist()
    parts = rows[: sum(sizes)].split(sizes)
    products = [part @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)]
    return F.pad(torch.cat(products), (0, 0, 0, x_RD.shape[0] - sum(sizes))).to(dtype)


def hardware_product(a: Operand, b: Operand, *, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
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
    return out.is_contiguous() and begins_aligned(out)


def hardware_grouped_product(
    x_RD: Tensor, row_scale: Tensor, weight: Operand, counts: Tensor, *, dtype: torch.dtype, fast: bool
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


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax().to(torch.float32).reshape(1)


def _cast_whole(x_RC: Tensor, dtype: torch.dtype, scale: Tensor) -> Cast:
    values = to_eight_bits(x_RC, scale, dtype)
    return Cast(Operand(values.contiguous(), scale, "tensor"), Operand(values.t().contiguous(), scale, "tensor"))


def _in_blocks(x_RC: Tensor, dtype: torch.dtype) -> Operand:
    runs = _padded(x_RC, 1, BLOCK).unflatten(1, (-1, BLOCK))
    scale = power_scale(runs.abs().amax(dim=2), dtype)
    spread = scale.repeat_interleave(BLOCK, dim=1)[:, : x_RC.shape[1]]
    return Operand(to_eight_bits(x_RC, spread, dtype).contiguous(), scale.t().contiguous().t(), "blocks")


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """With zeros up to multiples of both."""
    return F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))


def _padded_squares(scale: Tensor) -> Tensor:
    return F.pad(scale, (0, -scale.shape[1] % SQUARES_MULTIPLE), value=1.0).contiguous()


def _spread(scale: Tensor, shape: torch.Size, size: int) -> Tensor:
    """A number per square as a number per element of a shape."""
    return scale.repeat_interleave(size, dim=0)[: shape[0]].repeat_interleave(size, dim=1)[:, : shape[1]]


REFERENCE = Fp8Kernels(
    raise_largest=raise_largest,
    next_scale=next_scale,
    cast_tensor=cast_tensor,
    cast_delayed=cast_delayed,
    cast_rows=cast_rows,
    cast_blocks=cast_blocks,
    cast_squares=cast_squares,
    cast_rows_only=cast_rows_only,
    product=emulated_product,
    grouped_product=emulated_grouped_product,
)
"""Plain torch on any device."""
