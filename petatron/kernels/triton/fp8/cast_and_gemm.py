"""FP8 casts that read a tensor once and write it in both orientations: the Triton implementation of `kernels/fp8/cast_and_gemm.py`.

A tile of 128 x 128 numbers is read, scaled, rounded, and written as it is and transposed, in runs of 128 bytes both ways. The cost
of a cast depends on its scale. Per number of a bfloat16 tensor, at 4.0 TB/s and 10^9 numbers:

    | scale of         | passes                                  | bytes    | ms   |
    |------------------|-----------------------------------------|----------|------|
    | tensor           | amax (2), cast (2 + 1 + 1)              | 6        | 1.50 |
    | tensor, known    | cast; `amax` is given                   | 4        | 1.00 |
    | tensor, delayed  | cast, which computes amax as well       | 4        | 1.00 |
    | rows             | amax by row and column (2), cast (4)    | 6        | 1.50 |
    | rows, only       | cast, a program holds its row           | 3        | 0.75 |
    | blocks, squares  | cast, each tile has its own amax        | 4 + 8/128| 1.02 |

So a scale per row costs no more than one per tensor. The second of two passes goes through the tensor backwards: what the
first read last is still in the L2 cache (50 MB, of 134 for 16384 x 4096).

amax is computed in integers: without its sign, a float's bits order as its value does, with infinity above all numbers and NaN above
infinity, so integer maxima (in registers, or atomic in memory) are exact, lose no NaN and do not depend on their order. Scales come
from the same bits.

R rows, C columns.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.fp8.cast_and_gemm import (
    BLOCK,
    BLOCK_SCALE_MULTIPLE,
    Fp8Kernels,
    Fp8Matrix,
    Fp8Operand,
    hardware_gemm,
    hardware_grouped_gemm,
    max_exponent,
)

_TILE = BLOCK
_WARPS = 8
_REGISTERS_LINES, _REGISTERS_BLOCKS = 80, 128
"""Per thread, so that three and two tiles are resident on a multiprocessor; more would leave it waiting for memory."""
_ELEMENTS_OF_WARP = 512
_RUN = 16384
"""Elements of which one program computes amax: eight loads of 16 bytes per thread."""
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_NOT_FINITE = tl.constexpr(0x7F800000)


@triton.jit
def magnitude_bits(x):
    """Returns the bits of |x|."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _scale_bits(bits, TOP: tl.constexpr):
    """Returns the bits of the scale for an amax, see `power_of_two_scale`."""
    exponent = ((bits + 0x1FFFFF) >> 23) - 127 - TOP
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    return tl.where((bits > 0) & (bits < _NOT_FINITE), (exponent + 127) << 23, 127 << 23)


@triton.jit
def inverse_scale(scale_bits):
    """Returns 1 / scale, of a power of two in bits."""
    return ((254 << 23) - scale_bits).to(tl.float32, bitcast=True)


@triton.jit
def quantise_unclamped(x, inverse, dtype: tl.constexpr):
    """x / scale in FP8, with a scale from the tensor itself, so that no value is too large."""
    x = x.to(tl.float32)
    # x - x is 0, and NaN where x is not finite.
    return (x * inverse + (x - x)).to(dtype)


@triton.jit
def _quantise_clamped(x, inverse, dtype: tl.constexpr, TOP: tl.constexpr):
    x = x.to(tl.float32)
    limit: tl.constexpr = 1.75 * 2**TOP
    # Minimum and maximum drop NaN, so it is added back.
    return (tl.minimum(tl.maximum(x * inverse, -limit), limit) + (x - x)).to(dtype)


@triton.jit
def _tile_offsets(tile, R, C, TILE: tl.constexpr):
    across = tl.cdiv(C, TILE)
    row = (tile // across) * TILE + tl.arange(0, TILE)
    column = (tile % across) * TILE + tl.arange(0, TILE)
    return row, column, (row < R)[:, None] & (column < C)[None, :]


@triton.jit
def _load(x_RC, row, column, inside, C):
    return tl.load(x_RC + row.to(tl.int64)[:, None] * C + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(out_RC, values, row, column, inside, C):
    tl.store(out_RC + row.to(tl.int64)[:, None] * C + column[None, :], values, mask=inside)


@triton.jit
def _store_columns(out_CR, values, row, column, R, C):
    inside = (column < C)[:, None] & (row < R)[None, :]
    tl.store(out_CR + column.to(tl.int64)[:, None] * R + row[None, :], tl.trans(values), mask=inside)


@triton.jit
def _amax(x, amax, count, RUN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * RUN + tl.arange(0, RUN)
    bits = magnitude_bits(tl.load(x + at, mask=at < count, other=0.0))
    tl.atomic_max(amax, tl.max(bits, axis=0), sem="relaxed")


@triton.jit
def _update_scale(history_L, scale, LENGTH: tl.constexpr, RECENT: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    bits = tl.load(history_L + at, mask=at < LENGTH, other=0)
    bits = tl.where(bits < _NOT_FINITE, bits, 0)
    following = tl.load(history_L + (at + 1) % LENGTH, mask=at < LENGTH, other=0)
    following = tl.where(following < _NOT_FINITE, following, 0)
    tl.debug_barrier()  # every entry is read before any is overwritten
    tl.store(history_L + at, tl.where(at == 0, 0, following), mask=at < LENGTH)
    largest = tl.max(tl.where((at == 0) | (not RECENT), bits, 0), axis=0)
    tl.store(scale, _scale_bits(largest, TOP))


@triton.jit
def _cast_tensor(
    x_RC, rows_RC, columns_CR, scale, amax, R, C, DELAYED: tl.constexpr, TOP: tl.constexpr, TILE: tl.constexpr
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, column, inside = _tile_offsets(tile, R, C, TILE)
    x = _load(x_RC, row, column, inside, C)
    dtype: tl.constexpr = rows_RC.dtype.element_ty
    if DELAYED:
        values = _quantise_clamped(x, inverse_scale(tl.load(scale)), dtype, TOP)
    else:
        scale_bits = _scale_bits(tl.load(amax), TOP)
        if tile == 0:
            tl.store(scale, scale_bits)
        values = quantise_unclamped(x, inverse_scale(scale_bits), dtype)
    _store_rows(rows_RC, values, row, column, inside, C)
    _store_columns(columns_CR, values, row, column, R, C)
    if DELAYED:  # last, so that fewer registers are in use at once
        tl.atomic_max(amax, tl.max(magnitude_bits(x)), sem="relaxed")


@triton.jit
def _row_and_column_amax(x_RC, rows_R, columns_C, R, C, TILE: tl.constexpr):
    row, column, inside = _tile_offsets(tl.program_id(0), R, C, TILE)
    bits = magnitude_bits(_load(x_RC, row, column, inside, C))
    tl.atomic_max(rows_R + row, tl.max(bits, axis=1), mask=row < R, sem="relaxed")
    tl.atomic_max(columns_C + column, tl.max(bits, axis=0), mask=column < C, sem="relaxed")


@triton.jit
def _cast_rows_and_columns(
    x_RC,
    rows_RC,
    columns_CR,
    amax_R,
    amax_C,
    scale_R,
    scale_C,
    R,
    C,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, column, inside = _tile_offsets(tile, R, C, TILE)
    x = _load(x_RC, row, column, inside, C)
    dtype: tl.constexpr = rows_RC.dtype.element_ty
    bits_R = _scale_bits(tl.load(amax_R + row, mask=row < R, other=0), TOP)
    if tile % tl.cdiv(C, TILE) == 0:
        tl.store(scale_R + row, bits_R, mask=row < R)
    _store_rows(rows_RC, quantise_unclamped(x, inverse_scale(bits_R)[:, None], dtype), row, column, inside, C)
    bits_C = _scale_bits(tl.load(amax_C + column, mask=column < C, other=0), TOP)
    if tile < tl.cdiv(C, TILE):
        tl.store(scale_C + column, bits_C, mask=column < C)
    _store_columns(columns_CR, quantise_unclamped(x, inverse_scale(bits_C)[None, :], dtype), row, column, R, C)


@triton.jit
def _cast_whole_rows(x_RC, rows_RC, scale_R, C, TOP: tl.constexpr, WIDTH: tl.constexpr):
    """One row per program, which holds all of it: a single pass."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    x = tl.load(x_RC + row * C + column, mask=column < C, other=0.0)
    bits = _scale_bits(tl.max(magnitude_bits(x), axis=0), TOP)
    tl.store(scale_R + row, bits)
    values = quantise_unclamped(x, inverse_scale(bits), rows_RC.dtype.element_ty)
    tl.store(rows_RC + row * C + column, values, mask=column < C)


@triton.jit
def _cast_blocks(x_RC, rows_RC, columns_CR, scale_R, scale_C, R, C, TOP: tl.constexpr, TILE: tl.constexpr):
    """`scale_R` is [C / 128, R] in memory, `scale_C` [R / 128, C]."""
    tile = tl.program_id(0)
    across = tl.cdiv(C, TILE)
    row, column, inside = _tile_offsets(tile, R, C, TILE)
    x = _load(x_RC, row, column, inside, C)
    dtype: tl.constexpr = rows_RC.dtype.element_ty
    bits = magnitude_bits(x)
    bits_R = _scale_bits(tl.max(bits, axis=1), TOP)
    bits_C = _scale_bits(tl.max(bits, axis=0), TOP)
    tl.store(scale_R + (tile % across).to(tl.int64) * R + row, bits_R, mask=row < R)
    tl.store(scale_C + (tile // across).to(tl.int64) * C + column, bits_C, mask=column < C)
    _store_rows(rows_RC, quantise_unclamped(x, inverse_scale(bits_R)[:, None], dtype), row, column, inside, C)
    _store_columns(columns_CR, quantise_unclamped(x, inverse_scale(bits_C)[None, :], dtype), row, column, R, C)


@triton.jit
def _cast_square_blocks(
    x_RC,
    rows_RC,
    columns_CR,
    scale_rows,
    scale_columns,
    R,
    C,
    rows_stride,
    columns_stride,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    across = tl.cdiv(C, TILE)
    row, column, inside = _tile_offsets(tile, R, C, TILE)
    x = _load(x_RC, row, column, inside, C)
    bits = _scale_bits(tl.max(magnitude_bits(x)), TOP)
    tl.store(scale_rows + (tile // across) * rows_stride + tile % across, bits)
    tl.store(scale_columns + (tile % across) * columns_stride + tile // across, bits)
    values = quantise_unclamped(x, inverse_scale(bits), rows_RC.dtype.element_ty)
    _store_rows(rows_RC, values, row, column, inside, C)
    _store_columns(columns_CR, values, row, column, R, C)


def update_amax(x_RC: Tensor, amax: Tensor) -> None:
    x_RC = x_RC.contiguous()
    _amax[(triton.cdiv(x_RC.numel(), _RUN),)](x_RC, _bits(amax), x_RC.numel(), RUN=_RUN, num_warps=_WARPS)


def update_scale(history_L: Tensor, scale: Tensor, dtype: torch.dtype, *, most_recent: bool) -> None:
    length = history_L.numel()
    _update_scale[(1,)](
        _bits(history_L),
        _bits(scale),
        LENGTH=length,
        RECENT=most_recent,
        TOP=max_exponent(dtype),
        BLOCK=triton.next_power_of_2(length),
        num_warps=1,
    )


def cast_tensor(x_RC: Tensor, dtype: torch.dtype, *, amax: Tensor | None = None) -> Fp8Matrix:
    x_RC = x_RC.contiguous()
    if amax is None:
        amax = torch.zeros(1, dtype=torch.float32, device=x_RC.device)
        update_amax(x_RC, amax)
    return _cast_with_scale(x_RC, dtype, torch.empty_like(amax), amax, delayed=False)


def cast_delayed(x_RC: Tensor, dtype: torch.dtype, *, scale: Tensor, amax: Tensor) -> Fp8Matrix:
    return _cast_with_scale(x_RC.contiguous(), dtype, scale, amax, delayed=True)


def cast_rows(x_RC: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    one = cast_matrices(x_RC[None], dtype)
    scales = (one.rows.scale[0, :, None], one.columns.scale[0, :, None])
    return Fp8Matrix(
        Fp8Operand(one.rows.values[0], scales[0], "rows"), Fp8Operand(one.columns.values[0], scales[1], "rows")
    )


def cast_rows_only(x_RC: Tensor, dtype: torch.dtype) -> Fp8Operand:
    x_RC = x_RC.contiguous()
    R, C = x_RC.shape
    rows, scale_R = torch.empty_like(x_RC, dtype=dtype), x_RC.new_empty((R, 1), dtype=torch.float32)
    width = max(triton.next_power_of_2(C), 16)
    warps = min(max(width // _ELEMENTS_OF_WARP, 1), _WARPS)
    _cast_whole_rows[(R,)](x_RC, rows, _bits(scale_R), C, TOP=max_exponent(dtype), WIDTH=width, num_warps=warps)
    return Fp8Operand(rows, scale_R, "rows")


def cast_matrices(x_ERC: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    """Two launches per expert, and no copy: the transposed matrices come out of the same pass."""
    x_ERC = x_ERC.contiguous()
    E, R, C = x_ERC.shape
    rows, columns = _outputs(x_ERC, dtype)
    amax = torch.zeros((E, R + C), dtype=torch.int32, device=x_ERC.device)
    scale_R, scale_C = (x_ERC.new_empty((E, each), dtype=torch.float32) for each in (R, C))
    scales = _bits(scale_R), _bits(scale_C)
    options = {"TOP": max_exponent(dtype), "maxnreg": _REGISTERS_LINES}
    for x, to_rows, to_columns, peaks, *bits in zip(x_ERC, rows, columns, amax, *scales, strict=True):
        _launch(_row_and_column_amax, x, peaks[:R], peaks[R:], R, C)
        _launch(_cast_rows_and_columns, x, to_rows, to_columns, peaks[:R], peaks[R:], *bits, R, C, **options)
    return Fp8Matrix(Fp8Operand(rows, scale_R, "rows"), Fp8Operand(columns, scale_C, "rows"))


def cast_blocks(x_RC: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    x_RC = x_RC.contiguous()
    R, C = x_RC.shape
    rows, columns = _outputs(x_RC, dtype)
    scale_R = x_RC.new_empty((triton.cdiv(C, BLOCK), R), dtype=torch.float32)
    scale_C = x_RC.new_empty((triton.cdiv(R, BLOCK), C), dtype=torch.float32)
    scales = _bits(scale_R), _bits(scale_C)
    _launch(_cast_blocks, x_RC, rows, columns, *scales, R, C, TOP=max_exponent(dtype), maxnreg=_REGISTERS_BLOCKS)
    return Fp8Matrix(Fp8Operand(rows, scale_R.t(), "blocks"), Fp8Operand(columns, scale_C.t(), "blocks"))


def cast_blocks_2d(x_RC: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    x_RC = x_RC.contiguous()
    R, C = x_RC.shape
    rows, columns = _outputs(x_RC, dtype)
    scale_rows, scale_columns = _empty_block_scales(x_RC, R, C), _empty_block_scales(x_RC, C, R)
    scales, strides = (_bits(scale_rows), _bits(scale_columns)), (scale_rows.stride(0), scale_columns.stride(0))
    _launch(_cast_square_blocks, x_RC, rows, columns, *scales, R, C, *strides, TOP=max_exponent(dtype))
    return Fp8Matrix(Fp8Operand(rows, scale_rows, "squares"), Fp8Operand(columns, scale_columns, "squares"))


def _cast_with_scale(x_RC: Tensor, dtype: torch.dtype, scale: Tensor, amax: Tensor, *, delayed: bool) -> Fp8Matrix:
    R, C = x_RC.shape
    rows, columns = _outputs(x_RC, dtype)
    numbers = _bits(scale), _bits(amax)
    _launch(_cast_tensor, x_RC, rows, columns, *numbers, R, C, DELAYED=delayed, TOP=max_exponent(dtype))
    return Fp8Matrix(Fp8Operand(rows, scale, "tensor"), Fp8Operand(columns, scale, "tensor"))


def _outputs(x_RC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocates the rows and the columns."""
    # Triton 3.6 garbles a transposed FP8 tile that was float32; nothing here is.
    assert x_RC.element_size() == 2, f"{x_RC.dtype} is not half precision"
    *experts, R, C = x_RC.shape
    return torch.empty_like(x_RC, dtype=dtype), x_RC.new_empty((*experts, C, R), dtype=dtype)


def _empty_block_scales(x: Tensor, rows: int, length: int) -> Tensor:
    """Returns scales that are all 1, as the padding stays."""
    across = triton.cdiv(triton.cdiv(length, BLOCK), BLOCK_SCALE_MULTIPLE) * BLOCK_SCALE_MULTIPLE
    return torch.ones((triton.cdiv(rows, BLOCK), across), dtype=torch.float32, device=x.device)


def _launch(kernel: triton.JITFunction, x_RC: Tensor, *arguments: Tensor | int, **options: int) -> None:
    """Launches a program per tile of the matrix."""
    tiles = triton.cdiv(x_RC.shape[0], _TILE) * triton.cdiv(x_RC.shape[1], _TILE)
    kernel[(tiles,)](x_RC, *arguments, TILE=_TILE, num_warps=_WARPS, **options)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


TRITON = Fp8Kernels(
    update_amax=update_amax,
    update_scale=update_scale,
    cast_tensor=cast_tensor,
    cast_delayed=cast_delayed,
    cast_rows=cast_rows,
    cast_blocks=cast_blocks,
    cast_blocks_2d=cast_blocks_2d,
    cast_rows_only=cast_rows_only,
    cast_matrices=cast_matrices,
    gemm=hardware_gemm,
    grouped_gemm=hardware_grouped_gemm,
)
"""For CUDA devices of capability 9.0."""
