"""x W^T for few rows (a skinny GEMM): all its time is the reading of the weight.

A program reads a strip of 64 output rows, or a part of its length where there are fewer strips than multiprocessors (split-K); the
program that ends last of a strip adds the parts, in their order, so the result does not depend on which was last. Weights do not depend
on the kernel before, so the beginning of the strips is prefetched into the L2 cache before the program waits for it
(`pdl.py`); more than a few megabytes of them would displace each other.

FP8 weights are widened in registers. The bits of an e4m3 number, sign and the rest apart, are those of a bfloat16 number 2^120 times
smaller, subnormal ones included: three instructions for two numbers in the high bytes of a word and four for those in the low bytes,
where a conversion takes six for two. So the four numbers of a word are stored in the order that this gives (`PERMUTED_ORDER`). Sums are
scaled back afterwards: tensor cores keep subnormal numbers. More rows than a block read the weight once more, from the L2 cache.

A decode step of one sequence on an H200, in us, by what is prefetched (MB):

| model, weights       | library | 0     | 2     | 6     | 16    |
|----------------------|---------|-------|-------|-------|-------|
| Llama-1B, bf16       | 1,166   | 1,004 | 1,002 |       |       |
| Llama-1B, FP8        |         | 940   | 881   |       |       |
| 8B shape, bf16       | 4,765   | 4,496 | 4,382 | +0 %  | +3 %  |
| 8B shape, FP8        |         | 3,090 | 3,075 | +2 %  | +10 % |

For one row a kernel without tensor cores that reads straight into registers is faster alone (105 instead of 115 us for the four GEMMs
of an 8B layer), and slower in a decode step (4,929 us): its many programs leave no room for the next kernel to start early.

R rows, D input width, O output width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels import few_rows_gemm as reference
from petatron.kernels.few_rows_gemm import PERMUTED_ORDER, Fp8Weight
from petatron.kernels.fp8.cast_and_gemm import E4M3, Fp8Operand
from petatron.kernels.triton.pdl import pdl_options_for, pdl_wait_and_trigger

_STRIP = 64
_LENGTH = 128
_ENOUGH_STRIPS = 200
"""More strips than that keep every multiprocessor of a large GPU busy without splitting them."""
_MAX_SPLITS = 4
_MAX_PREFETCHED = 2 * 2**20
_BLOCK_ROWS = 64
"""Rows of one program."""
_MAX_ROWS = 64
"""More rows of a 16-bit weight are the library's."""
MAX_FP8_ROWS = 128
"""More rows are worth a weight that is dequantized as a whole, and the library's GEMM."""
_DEQUANTIZED = 4096


@triton.jit
def _few_rows_gemm(
    x,
    weight,
    scale,
    out,
    partial,
    counters,
    rows,
    outputs,
    x_stride,
    LENGTH: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    STRIP: tl.constexpr,
    TILE: tl.constexpr,
    FP8: tl.constexpr,
    PERMUTED: tl.constexpr,
    PREFETCHED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    strip, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    output, row, column = strip * STRIP + tl.arange(0, STRIP), block * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE)
    part_length: tl.constexpr = LENGTH // SPLITS
    begin = split * part_length
    inside = output < outputs
    lines = weight + output.to(tl.int64) * LENGTH + begin
    if USE_PDL and PREFETCHED > 0:
        _prefetch(lines, inside, PREFETCHED)
    pdl_wait_and_trigger(USE_PDL)
    # The operand of the tensor cores' longer side comes from shared memory, and widened weights are in registers.
    total = tl.zeros((ROWS, STRIP), tl.float32) if FP8 else tl.zeros((STRIP, ROWS), tl.float32)
    for start in range(0, part_length, TILE):
        at = begin + start + column
        a = tl.load(x + row[:, None] * x_stride + at[None, :], mask=(row < rows)[:, None], other=0.0)
        w = tl.load(lines[:, None] + start + column[None, :], mask=inside[:, None], other=0)
        if FP8:
            if PERMUTED:
                w = _widen_bits(w)
            else:
                w = w.to(tl.float8e4nv, bitcast=True).to(a.dtype)
            total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
        else:
            total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
    if FP8:
        if PERMUTED:
            total = total * 1.329227995784916e36
        total = total * tl.load(scale + output, mask=inside, other=0.0)[None, :]
    else:
        total = tl.trans(total)
    place = row[:, None] * outputs + output[None, :]
    mask = inside[None, :] & (row < rows)[:, None]
    if SPLITS == 1:
        tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(partial + split * rows * outputs + place, total, mask=mask)
        tl.debug_barrier()
        counter = counters + block * tl.num_programs(0) + strip
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counter, 0)
            total = tl.zeros((ROWS, STRIP), tl.float32)
            for part in range(SPLITS):
                total += tl.load(partial + part * rows * outputs + place, mask=mask, other=0.0, volatile=True)
            tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _prefetch(lines, inside, size: tl.constexpr):
    """Prefetches `size` bytes from each address into the L2 cache."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [lines.to(tl.int64), tl.zeros_like(inside).to(tl.int32) + size, inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _widen_bits(w):
    """e4m3 numbers, four bytes in `PERMUTED_ORDER`, as bfloat16 ones 2^120 times smaller in their natural order."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 sign, rest;
        shr.b32 rest, $2, 4;
        and.b32 sign, $2, 0x80008000;
        lop3.b32 $0, rest, 0x07f007f0, sign, 0xEA;
        shl.b32 rest, $2, 4;
        shl.b32 sign, $2, 8;
        and.b32 sign, sign, 0x80008000;
        lop3.b32 $1, rest, 0x07f007f0, sign, 0xEA;
        }
        """,
        "=r,=r,r",
        [w],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _dequantize(weight, scale, out, elements, LENGTH: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < elements
    wide = _widen_bits(tl.load(weight + at, mask=inside, other=0)).to(tl.float32) * 1.329227995784916e36
    wide = wide * tl.load(scale + at // LENGTH, mask=inside, other=0.0)
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=inside)


def pack_fp8(operand: Fp8Operand, dtype: torch.dtype) -> Fp8Weight:
    """Returns a quantized weight as the kernels read it, for activations of a dtype."""
    weight = reference.pack_fp8(operand, dtype)
    if not weight.values.is_cuda or dtype != torch.bfloat16 or weight.values.shape[1] % _LENGTH:
        return weight
    quads = weight.values.view(torch.uint8).unflatten(1, (-1, 4))
    return replace(weight, values=quads[:, :, list(PERMUTED_ORDER)].flatten(1).view(E4M3), permuted=True)


def dequantize_weight(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Returns the whole weight."""
    if not weight.permuted:
        return reference.dequantize_weight(weight, dtype)
    values = weight.values
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    _dequantize[(triton.cdiv(values.numel(), _DEQUANTIZED),)](
        values.view(torch.int8), weight.scale, out, values.numel(), LENGTH=values.shape[1], TILE=_DEQUANTIZED
    )
    return out


def few_rows_gemm(x_RD: Tensor, weight: Tensor | Fp8Weight, counters: Tensor) -> Tensor:
    """x W^T in the precision of x. `counters` is a zeroed int32 workspace, zero again afterwards, of a number per 64 output rows."""
    fp8 = isinstance(weight, Fp8Weight)
    values = weight.values if fp8 else weight
    rows, (outputs, length) = x_RD.shape[0], values.shape
    strips, block = triton.cdiv(outputs, _STRIP), min(_BLOCK_ROWS, max(16, triton.next_power_of_2(rows)))
    blocks, splits = triton.cdiv(rows, block), _num_splits(strips, length)
    lacks_counters = splits > 1 and strips * blocks > counters.numel()
    if rows > (MAX_FP8_ROWS if fp8 else _MAX_ROWS) or length % _LENGTH or x_RD.stride(-1) != 1 or lacks_counters:
        return reference.many_rows_gemm(x_RD, dequantize_weight(weight, x_RD.dtype) if fp8 else weight)
    out = x_RD.new_empty((rows, outputs))
    operands = (x_RD, values.view(torch.int8), weight.scale) if fp8 else (x_RD, values, values)
    partial = out if splits == 1 else x_RD.new_empty((splits, rows, outputs), dtype=torch.float32)
    _few_rows_gemm[(strips, splits, blocks)](
        *operands,
        out,
        partial,
        counters,
        rows,
        outputs,
        x_RD.stride(0),
        LENGTH=length,
        SPLITS=splits,
        ROWS=block,
        STRIP=_STRIP,
        TILE=_LENGTH,
        FP8=fp8,
        PERMUTED=fp8 and weight.permuted,
        PREFETCHED=_prefetched_bytes(outputs * splits, length // splits * values.element_size()),
        num_warps=4,
        num_stages=4,
        **pdl_options_for(rows, x_RD),
    )
    return out


def _prefetched_bytes(lines: int, length: int) -> int:
    """Returns how many bytes of each line are prefetched, in cache lines.

    >>> _prefetched_bytes(4096, 4096), _prefetched_bytes(28672, 4096), _prefetched_bytes(1024, 512)
    (512, 0, 512)
    """
    return min(length, _MAX_PREFETCHED // lines // 128 * 128)


def _num_splits(strips: int, length: int) -> int:
    """Returns into how many parts the length of each strip is cut.

    >>> _num_splits(448, 4096), _num_splits(64, 4096), _num_splits(64, 768)
    (1, 4, 2)
    """
    if strips >= _ENOUGH_STRIPS:
        return 1
    return next(count for count in (_MAX_SPLITS, 2, 1) if length // _LENGTH % count == 0)
