"""The kernels of FP8 casts: a tile of a matrix is read once, and written in the wanted orientations.

amax is computed in integers (`triton/amax.py`), and scales come from the same bits.

R rows, C columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from petatron.kernels.triton.amax import atomic_max_amax, magnitude_bits

_NOT_FINITE = tl.constexpr(0x7F800000)


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
def quantize_unclamped(x, inverse, dtype: tl.constexpr):
    """x / scale in FP8, with a scale from the tensor itself, so that no value is too large."""
    x = x.to(tl.float32)
    # x - x is 0, and NaN where x is not finite.
    return (x * inverse + (x - x)).to(dtype)


@triton.jit
def _quantize_clamped(x, inverse, dtype: tl.constexpr, TOP: tl.constexpr):
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
def amax_of_run(x, amax, count, RUN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * RUN + tl.arange(0, RUN)
    atomic_max_amax(amax, magnitude_bits(tl.load(x + at, mask=at < count, other=0.0)))


@triton.jit
def update_scale_from_history(
    history_L, scale, LENGTH: tl.constexpr, RECENT: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr
):
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
def cast_tensor_tile(
    x_RC,
    rows_RC,
    columns_CR,
    scale,
    amax,
    used_scale,
    R,
    C,
    GIVEN_SCALE: tl.constexpr,
    SPECULATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Casts with `scale`, updating amax, if GIVEN_SCALE, else with the scale of amax, which it writes there.

    SPECULATIVE: the scale is copied to `used_scale`.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, column, inside = _tile_offsets(tile, R, C, TILE)
    x = _load(x_RC, row, column, inside, C)
    dtype: tl.constexpr = rows_RC.dtype.element_ty
    if GIVEN_SCALE:
        scale_bits = tl.load(scale)
        if SPECULATIVE and tile == 0:
            tl.store(used_scale, scale_bits)
        values = _quantize_clamped(x, inverse_scale(scale_bits), dtype, TOP)
    else:
        scale_bits = _scale_bits(tl.load(amax), TOP)
        if tile == 0:
            tl.store(scale, scale_bits)
        values = quantize_unclamped(x, inverse_scale(scale_bits), dtype)
    if ROWS:
        _store_rows(rows_RC, values, row, column, inside, C)
    if COLUMNS:
        _store_columns(columns_CR, values, row, column, R, C)
    if GIVEN_SCALE:  # last, so that fewer registers are in use at once
        atomic_max_amax(amax, magnitude_bits(x))


@triton.jit
def redo_cast_if_scale_differs(
    x_RC,
    rows_RC,
    columns_CR,
    used_scale,
    amax,
    scale,
    previous_scale,
    R,
    C,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the scale of amax to `scale` and `previous_scale`; if the cast before used another, a few programs redo all of its tiles."""
    scale_bits = _scale_bits(tl.load(amax), TOP)
    first = tl.program_id(0)
    if first == 0:
        tl.store(scale, scale_bits)
        tl.store(previous_scale, scale_bits)
    if scale_bits != tl.load(used_scale):
        inverse = inverse_scale(scale_bits)
        for tile in range(first, tl.cdiv(R, TILE) * tl.cdiv(C, TILE), tl.num_programs(0)):
            row, column, inside = _tile_offsets(tile, R, C, TILE)
            values = quantize_unclamped(_load(x_RC, row, column, inside, C), inverse, rows_RC.dtype.element_ty)
            if ROWS:
                _store_rows(rows_RC, values, row, column, inside, C)
            if COLUMNS:
                _store_columns(columns_CR, values, row, column, R, C)


@triton.jit
def row_and_column_amax_of_tile(x_RC, rows_R, columns_C, R, C, TILE: tl.constexpr):
    row, column, inside = _tile_offsets(tl.program_id(0), R, C, TILE)
    bits = magnitude_bits(_load(x_RC, row, column, inside, C))
    tl.atomic_max(rows_R + row, tl.max(bits, axis=1), mask=row < R, sem="relaxed")
    tl.atomic_max(columns_C + column, tl.max(bits, axis=0), mask=column < C, sem="relaxed")


@triton.jit
def cast_rows_and_columns_tile(
    x_RC,
    rows_RC,
    columns_CR,
    amax_R,
    amax_C,
    scale_R,
    scale_C,
    R,
    C,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, column, inside = _tile_offsets(tile, R, C, TILE)
    x = _load(x_RC, row, column, inside, C)
    dtype: tl.constexpr = rows_RC.dtype.element_ty
    if ROWS:
        bits_R = _scale_bits(tl.load(amax_R + row, mask=row < R, other=0), TOP)
        if tile % tl.cdiv(C, TILE) == 0:
            tl.store(scale_R + row, bits_R, mask=row < R)
        _store_rows(rows_RC, quantize_unclamped(x, inverse_scale(bits_R)[:, None], dtype), row, column, inside, C)
    if COLUMNS:
        bits_C = _scale_bits(tl.load(amax_C + column, mask=column < C, other=0), TOP)
        if tile < tl.cdiv(C, TILE):
            tl.store(scale_C + column, bits_C, mask=column < C)
        _store_columns(columns_CR, quantize_unclamped(x, inverse_scale(bits_C)[None, :], dtype), row, column, R, C)


@triton.jit
def cast_whole_row(x_RC, rows_RC, scale_R, C, TOP: tl.constexpr, WIDTH: tl.constexpr):
    """One row per program, which holds all of it: a single pass."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    x = tl.load(x_RC + row * C + column, mask=column < C, other=0.0)
    bits = _scale_bits(tl.max(magnitude_bits(x), axis=0), TOP)
    tl.store(scale_R + row, bits)
    values = quantize_unclamped(x, inverse_scale(bits), rows_RC.dtype.element_ty)
    tl.store(rows_RC + row * C + column, values, mask=column < C)


@triton.jit
def cast_block_1x128_tile(
    x_RC,
    rows_RC,
    columns_CR,
    scale_R,
    scale_C,
    R,
    C,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
):
    """`scale_R` is [C / 128, R] in memory, `scale_C` [R / 128, C]."""
    tile = tl.program_id(0)
    across = tl.cdiv(C, TILE)
    row, column, inside = _tile_offsets(tile, R, C, TILE)
    x = _load(x_RC, row, column, inside, C)
    dtype: tl.constexpr = rows_RC.dtype.element_ty
    bits = magnitude_bits(x)
    if ROWS:
        bits_R = _scale_bits(tl.max(bits, axis=1), TOP)
        tl.store(scale_R + (tile % across).to(tl.int64) * R + row, bits_R, mask=row < R)
        _store_rows(rows_RC, quantize_unclamped(x, inverse_scale(bits_R)[:, None], dtype), row, column, inside, C)
    if COLUMNS:
        bits_C = _scale_bits(tl.max(bits, axis=0), TOP)
        tl.store(scale_C + (tile // across).to(tl.int64) * C + column, bits_C, mask=column < C)
        _store_columns(columns_CR, quantize_unclamped(x, inverse_scale(bits_C)[None, :], dtype), row, column, R, C)


@triton.jit
def cast_block_128x128_tile(
    x_RC,
    rows_RC,
    columns_CR,
    scale_rows,
    scale_columns,
    R,
    C,
    rows_stride,
    columns_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    across = tl.cdiv(C, TILE)
    row, column, inside = _tile_offsets(tile, R, C, TILE)
    x = _load(x_RC, row, column, inside, C)
    bits = _scale_bits(tl.max(magnitude_bits(x)), TOP)
    values = quantize_unclamped(x, inverse_scale(bits), rows_RC.dtype.element_ty)
    if ROWS:
        tl.store(scale_rows + (tile // across) * rows_stride + tile % across, bits)
        _store_rows(rows_RC, values, row, column, inside, C)
    if COLUMNS:
        tl.store(scale_columns + (tile % across) * columns_stride + tile // across, bits)
        _store_columns(columns_CR, values, row, column, R, C)
