"""FP8 casts that read a tensor once and write it in both orientations: the Triton implementation of `kernels/fp8/cast_and_gemm.py`.

A tile of 128 x 128 elements is read, scaled, rounded, and written as it is and transposed, in runs of 128 bytes both ways
(`cast_tiles.py`); a cast that is asked for one orientation writes a byte less per element. The cost of a cast depends on its scale. Per
element of a bfloat16 tensor, at 4.0 TB/s and 10^9 elements:

    | scale                     | passes                                       | bytes     | ms           |
    |---------------------------|----------------------------------------------|-----------|--------------|
    | tensorwise                | amax (2), cast (2 + 1 + 1)                   | 6         | 1.50         |
    | tensorwise, given amax    | cast                                         | 4         | 1.00         |
    | tensorwise, given scale   | cast, which computes amax as well            | 4         | 1.00         |
    | tensorwise, speculative   | the same; another cast if the scale differs  | 4 or 8    | 1.00 or 2.00 |
    | rowwise                   | amax by row and column (2), cast (4)         | 6         | 1.50         |
    | rowwise, untransposed     | cast, a program holds its row                | 3         | 0.75         |
    | block_1x128, 128x128      | cast, each tile has its own amax             | 4 + 8/128 | 1.02         |

So a scale per row costs no more than one per tensor. The second of two passes goes through the tensor backwards: what the
first read last is still in the L2 cache (50 MB, of 134 for 16384 x 4096).

R rows, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

from petatron.kernels.fp8.cast_and_gemm import (
    BLOCK,
    BLOCK_SCALE_MULTIPLE,
    Fp8Kernels,
    Fp8Matrix,
    Fp8Operand,
    Orientation,
    Scaling,
    hardware_gemm,
    hardware_grouped_gemm,
    max_exponent,
)
from petatron.kernels.triton.fp8 import cast_tiles
from petatron.kernels.triton.kernel_launch import kernel_launcher

_TILE = BLOCK
_WARPS = 8
_REGISTERS_LINES, _REGISTERS_BLOCKS = 80, 128
"""Per thread, so that three and two tiles are resident on a multiprocessor; more would leave it waiting for memory."""
_ELEMENTS_OF_WARP = 512
_RUN = 16384
"""Elements of which one program computes amax: eight loads of 16 bytes per thread."""


def update_amax(x_RC: Tensor, amax: Tensor) -> None:
    x_RC = x_RC.contiguous()
    count = x_RC.numel()
    kernel_launcher(cast_tiles.amax_of_run, RUN=_RUN, num_warps=_WARPS)(
        triton.cdiv(count, _RUN), (x_RC, _bits(amax)), (count,)
    )


def update_scale(history_L: Tensor, scale: Tensor, dtype: torch.dtype, *, most_recent: bool) -> None:
    length = history_L.numel()
    constants = {"TOP": max_exponent(dtype), "BLOCK": triton.next_power_of_2(length)}
    launch = kernel_launcher(
        cast_tiles.update_scale_from_history, LENGTH=length, RECENT=most_recent, **constants, num_warps=1
    )
    launch(1, (_bits(history_L), _bits(scale)))


def cast_tensor(
    x_RC: Tensor, dtype: torch.dtype, *, amax: Tensor | None = None, orientation: Orientation = "both"
) -> Fp8Matrix:
    x_RC = x_RC.contiguous()
    if amax is None:
        amax = torch.zeros(1, dtype=torch.float32, device=x_RC.device)
        update_amax(x_RC, amax)
    return _cast_tensorwise(x_RC, dtype, torch.empty_like(amax), amax, given_scale=False, orientation=orientation)


def cast_speculative(
    x_RC: Tensor, dtype: torch.dtype, *, previous_scale: Tensor, orientation: Orientation = "both"
) -> Fp8Matrix:
    x_RC = x_RC.contiguous()
    scale, used_scale = torch.empty_like(previous_scale), torch.empty_like(previous_scale)
    amax = torch.zeros_like(previous_scale)
    out = _Outputs.allocate(x_RC, dtype, orientation, scale, scale)
    last, used, peak = _bits(previous_scale), _bits(used_scale), _bits(amax)
    given = {"GIVEN_SCALE": True, "SPECULATIVE": True, **out.constants}
    _launch(cast_tiles.cast_tensor_tile, (x_RC, *out.values, last, peak, used), **given)
    _launch(
        cast_tiles.redo_cast_if_scale_differs,
        (x_RC, *out.values, used, peak, _bits(scale), last),
        most=_redoing_programs(x_RC.device),
        **out.constants,
    )
    return out.matrix("tensorwise")


@cache
def _redoing_programs(device: torch.device) -> int:
    """Returns how many programs are launched to redo a cast, which mostly have nothing to do: as many as are resident."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def cast_with_scale(
    x_RC: Tensor, dtype: torch.dtype, *, scale: Tensor, amax: Tensor, orientation: Orientation = "both"
) -> Fp8Matrix:
    return _cast_tensorwise(x_RC.contiguous(), dtype, scale, amax, given_scale=True, orientation=orientation)


def cast_rowwise(x_RC: Tensor, dtype: torch.dtype, *, orientation: Orientation = "both") -> Fp8Matrix:
    return _cast_each(x_RC[None], dtype, orientation).of_one()


def cast_rowwise_operand(x_RC: Tensor, dtype: torch.dtype) -> Fp8Operand:
    x_RC = x_RC.contiguous()
    R, C = x_RC.shape
    rows, scale_R = torch.empty_like(x_RC, dtype=dtype), x_RC.new_empty((R, 1), dtype=torch.float32)
    width = max(triton.next_power_of_2(C), 16)
    warps = min(max(width // _ELEMENTS_OF_WARP, 1), _WARPS)
    launch = kernel_launcher(cast_tiles.cast_whole_row, TOP=max_exponent(dtype), WIDTH=width, num_warps=warps)
    launch(R, (x_RC, rows, _bits(scale_R)), (C,))
    return Fp8Operand(rows, scale_R, "rowwise")


def cast_matrices(x_ERC: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    """Two launches per expert, and no copy: the transposed matrices come out of the same pass."""
    return _cast_each(x_ERC, dtype, "both").matrix("rowwise")


def _cast_each(x_ERC: Tensor, dtype: torch.dtype, orientation: Orientation) -> _Outputs:
    x_ERC = x_ERC.contiguous()
    E, R, C = x_ERC.shape
    amax = torch.zeros((E, R + C), dtype=torch.int32, device=x_ERC.device)
    scales = (x_ERC.new_empty((E, size), dtype=torch.float32) for size in (R, C))
    out = _Outputs.allocate(x_ERC, dtype, orientation, *scales)
    options = {**out.constants, "maxnreg": _REGISTERS_LINES}
    for x, to_rows, to_columns, peaks, *bits in zip(x_ERC, *out.values, amax, *out.scale_bits, strict=True):
        _launch(cast_tiles.row_and_column_amax_of_tile, (x, peaks[:R], peaks[R:]))
        _launch(cast_tiles.cast_rows_and_columns_tile, (x, to_rows, to_columns, peaks[:R], peaks[R:], *bits), **options)
    return out


def cast_block_1x128(x_RC: Tensor, dtype: torch.dtype, *, orientation: Orientation = "both") -> Fp8Matrix:
    x_RC = x_RC.contiguous()
    R, C = x_RC.shape
    scale_R = x_RC.new_empty((triton.cdiv(C, BLOCK), R), dtype=torch.float32)
    scale_C = x_RC.new_empty((triton.cdiv(R, BLOCK), C), dtype=torch.float32)
    out = _Outputs.allocate(x_RC, dtype, orientation, scale_R, scale_C)
    tensors = (x_RC, *out.values, *out.scale_bits)
    _launch(cast_tiles.cast_block_1x128_tile, tensors, **out.constants, maxnreg=_REGISTERS_BLOCKS)
    return replace(out, scale_rows=scale_R.t(), scale_columns=scale_C.t()).matrix("block_1x128")


def cast_block_128x128(x_RC: Tensor, dtype: torch.dtype, *, orientation: Orientation = "both") -> Fp8Matrix:
    x_RC = x_RC.contiguous()
    R, C = x_RC.shape
    scales = _empty_block_scales(x_RC, R, C), _empty_block_scales(x_RC, C, R)
    out = _Outputs.allocate(x_RC, dtype, orientation, *scales)
    strides = (scale.stride(0) for scale in scales)
    _launch(cast_tiles.cast_block_128x128_tile, (x_RC, *out.values, *out.scale_bits), *strides, **out.constants)
    return out.matrix("block_128x128")


def _cast_tensorwise(
    x_RC: Tensor, dtype: torch.dtype, scale: Tensor, amax: Tensor, *, given_scale: bool, orientation: Orientation
) -> Fp8Matrix:
    out = _Outputs.allocate(x_RC, dtype, orientation, scale, scale)
    tensors, given = (x_RC, *out.values, _bits(scale), _bits(amax), _bits(amax)), {"GIVEN_SCALE": given_scale}
    _launch(cast_tiles.cast_tensor_tile, tensors, **given, SPECULATIVE=False, **out.constants)
    return out.matrix("tensorwise")


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What a cast writes. An orientation that is not wanted has the memory of the other, for its type; nothing is written to it."""

    rows: Tensor
    columns: Tensor
    scale_rows: Tensor
    scale_columns: Tensor
    orientation: Orientation

    @classmethod
    def allocate(
        cls, x: Tensor, dtype: torch.dtype, orientation: Orientation, scale_rows: Tensor, scale_columns: Tensor
    ) -> _Outputs:
        # Triton 3.6 garbles a transposed FP8 tile that was float32; nothing here is.
        assert x.element_size() == 2, f"{x.dtype} is not half precision"
        *experts, R, C = x.shape
        rows = None if orientation == "columns" else torch.empty_like(x, dtype=dtype)
        columns = rows if orientation == "rows" else x.new_empty((*experts, C, R), dtype=dtype)
        assert columns is not None
        return cls(columns if rows is None else rows, columns, scale_rows, scale_columns, orientation)

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        return self.rows, self.columns

    @property
    def scale_bits(self) -> tuple[Tensor, Tensor]:
        return _bits(self.scale_rows), _bits(self.scale_columns)

    @property
    def constants(self) -> dict[str, int]:
        wanted = {"ROWS": self.orientation != "columns", "COLUMNS": self.orientation != "rows"}
        return {**wanted, "TOP": max_exponent(self.rows.dtype)}

    def matrix(self, scaling: Scaling) -> Fp8Matrix:
        return Fp8Matrix(
            Fp8Operand(self.rows, self.scale_rows, scaling) if self.orientation != "columns" else None,
            Fp8Operand(self.columns, self.scale_columns, scaling) if self.orientation != "rows" else None,
        )

    def of_one(self) -> Fp8Matrix:
        """Returns the first of the matrices, with a scale per row."""
        scales = self.scale_rows[0, :, None], self.scale_columns[0, :, None]
        return _Outputs(self.rows[0], self.columns[0], *scales, self.orientation).matrix("rowwise")


def _empty_block_scales(x: Tensor, rows: int, length: int) -> Tensor:
    """Returns scales that are all 1, as the padding stays."""
    across = triton.cdiv(triton.cdiv(length, BLOCK), BLOCK_SCALE_MULTIPLE) * BLOCK_SCALE_MULTIPLE
    return torch.ones((triton.cdiv(rows, BLOCK), across), dtype=torch.float32, device=x.device)


def _launch(
    kernel: triton.JITFunction, tensors: tuple[Tensor, ...], *strides: int, most: int | None = None, **constants: int
) -> None:
    """Launches a program per tile of the first matrix [R, C], or the most there may be, with R, C and strides."""
    R, C = tensors[0].shape
    tiles = triton.cdiv(R, _TILE) * triton.cdiv(C, _TILE)
    programs = tiles if most is None else min(tiles, most)
    kernel_launcher(kernel, TILE=_TILE, num_warps=_WARPS, **constants)(programs, tensors, (R, C, *strides))


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


TRITON = Fp8Kernels(
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
    gemm=hardware_gemm,
    grouped_gemm=hardware_grouped_gemm,
)
"""For CUDA devices of capability 9.0."""
