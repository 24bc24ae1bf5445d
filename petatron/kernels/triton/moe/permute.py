"""Permute, unpermute, and the weighted activation between the experts' GEMMs, each in one pass.

One program has one token, and so reads or writes the token once, however many rows it has: a gather with a program per row
would read every token K times. Sums are in float32 over the K rows in their order, without atomic adds. A program holds
its token's whole row in registers.

In the backward of the weighted activation, with a = f(gate) up (f and f' are in `activation.py`), and g the gradient of its
output,

    gradient of gate = w g up f'(gate),   of up = w g f(gate),   of w = sum over the row of g a

the last of which is why a program has whole rows here, too, and iterates over them.

Device memory traffic in bf16 at 4.0 TB/s, for 32768 tokens (Mixtral: K 2, D 4096, F 14336; Qwen3-30B: K 8, D 2048, F 768);
one H200 gave 3.6 to 4.4 TB/s, each within 0.04 ms of these:

| kernel                                          | elements          | Mixtral ms | Qwen3-30B ms |
|-------------------------------------------------|-------------------|------------|--------------|
| permute_rows, unpermute_rows                    | T D + R D         | 0.20       | 0.30         |
| unpermute_backward (where weights are not in a) | T D + 2 R D       | 0.34       | 0.57         |
| weighted_activation                             | 3 R F             | 1.41       | 0.30         |
| weighted_activation_backward, recompute_output  | 6 R F             | 2.82       | 0.60         |

T tokens, K choices per token, R rows, D width, F inner width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.activation import GATE_ACTIVATIONS, GluVariant
from petatron.kernels.moe import permute as reference
from petatron.kernels.moe.permute import MoEKernels, Permutation
from petatron.kernels.triton.activation import activation_and_slope
from petatron.kernels.triton.kernel_launch import kernel_launcher

MAX_ROW_WIDTH = 2**15
"""The widest row that fits in registers; wider ones use the reference."""
_TILE = 2048  # elements of a tile of the activation


@triton.jit
def _permute(
    x_TD, rows_RD, row_TK, choice_R, rows, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_TD + token * WIDTH + column, mask=column < WIDTH)
    for k in tl.static_range(K):
        choice = token * K + k
        row = tl.load(row_TK + choice)
        wanted = column < WIDTH
        if not ALL:  # a dropped choice may have the row of another
            wanted = wanted & (tl.load(choice_R + row, mask=row < rows, other=-1) == choice)
        tl.store(rows_RD + row * WIDTH + column, x, mask=wanted)


@triton.jit
def _unpermute(
    rows_RD,
    weights_TK,
    out_TD,
    row_TK,
    kept_TK,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ALL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(K):
        choice = token * K + k
        wanted = column < WIDTH
        if not ALL:
            wanted = wanted & (tl.load(kept_TK + choice) != 0)
        row = tl.load(row_TK + choice)
        part = tl.load(rows_RD + row * WIDTH + column, mask=wanted, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights_TK + choice).to(tl.float32)
        total += part
    tl.store(out_TD + token * WIDTH + column, total.to(out_TD.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _unpermute_backward(
    grad_TD,
    rows_RD,
    weights_TK,
    grad_RD,
    grad_weights_TK,
    row_TK,
    kept_TK,
    choice_R,
    rows,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    grad = tl.load(grad_TD + token * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    # Two loops, because a load after a store has to wait for it.
    for k in tl.static_range(K):
        choice = token * K + k
        wanted = column < WIDTH
        if not ALL:
            wanted = wanted & (tl.load(kept_TK + choice) != 0)
        row = tl.load(row_TK + choice)
        part = tl.load(rows_RD + row * WIDTH + column, mask=wanted, other=0.0).to(tl.float32)
        tl.store(grad_weights_TK + choice, tl.sum(part * grad, axis=0).to(grad_weights_TK.dtype.element_ty))
    for k in tl.static_range(K):
        choice = token * K + k
        wanted = column < WIDTH
        row = tl.load(row_TK + choice)
        if not ALL:
            wanted = wanted & (tl.load(choice_R + row, mask=row < rows, other=-1) == choice)
        weighted = grad * tl.load(weights_TK + choice).to(tl.float32)
        tl.store(grad_RD + row * WIDTH + column, weighted.to(grad_RD.dtype.element_ty), mask=wanted)


@triton.jit
def _weighted_activation(
    gate_up,
    weight_R,
    out_RF,
    rows,
    NAME: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = gate_up + row[:, None] * (2 * WIDTH) + column[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_R + row, mask=row < rows, other=0.0).to(tl.float32)
    active, _ = activation_and_slope(gate, NAME)
    made = active * up * weight[:, None]
    tl.store(out_RF + row[:, None] * WIDTH + column[None, :], made.to(out_RF.dtype.element_ty), mask=mask)


@triton.jit
def _weighted_activation_backward(
    grad_RF,
    gate_up,
    weight_R,
    grad_gate_up,
    grad_weight_R,
    made_RF,
    rows,
    NAME: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RECOMPUTE_OUTPUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    weight = tl.load(weight_R + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    dots = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
        narrow = row[:, None] * WIDTH + column[None, :]
        broad = row[:, None] * (2 * WIDTH) + column[None, :]
        gate = tl.load(gate_up + broad, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + broad + WIDTH, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_RF + narrow, mask=mask, other=0.0).to(tl.float32)
        active, slope = activation_and_slope(gate, NAME)
        dots += grad * active * up
        grad *= weight
        tl.store(grad_gate_up + broad, (grad * up * slope).to(grad_gate_up.dtype.element_ty), mask=mask)
        tl.store(grad_gate_up + broad + WIDTH, (grad * active).to(grad_gate_up.dtype.element_ty), mask=mask)
        if RECOMPUTE_OUTPUT:
            # The same order of factors as in forward, for the same bits.
            tl.store(made_RF + narrow, (active * up * weight).to(made_RF.dtype.element_ty), mask=mask)
    tl.store(grad_weight_R + row, tl.sum(dots, axis=1).to(grad_weight_R.dtype.element_ty), mask=row < rows)


def permute_rows(x_TD: Tensor, permutation: Permutation) -> Tensor:
    """Copies the token of every row; zeros in padding."""
    tokens, width = x_TD.shape
    if width > MAX_ROW_WIDTH:
        return reference.permute_rows(x_TD, permutation)
    out = _empty_rows(x_TD, permutation)
    if out.shape[0] and tokens:
        row_TK, choice_R = permutation.row_TK.contiguous(), permutation.choice_R.contiguous()
        constants = {"K": row_TK.shape[1], "ALL": permutation.kept_TK is None, **_row_options(width)}
        kernel_launcher(_permute, **constants)(tokens, (x_TD.contiguous(), out, row_TK, choice_R), (out.shape[0],))
    return out


def unpermute_rows(rows_RD: Tensor, permutation: Permutation, *, weights_TK: Tensor | None = None) -> Tensor:
    """Sums each token's rows, each times the weight of its choice."""
    row_TK, width = permutation.row_TK.contiguous(), rows_RD.shape[1]
    if width > MAX_ROW_WIDTH:
        return reference.unpermute_rows(rows_RD, permutation, weights_TK=weights_TK)
    if not rows_RD.shape[0] or not row_TK.shape[0]:
        return rows_RD.new_zeros(row_TK.shape[0], width)
    out = rows_RD.new_empty(row_TK.shape[0], width)
    constants = {"K": row_TK.shape[1], "ALL": permutation.kept_TK is None, **_row_options(width)}
    weights = row_TK if weights_TK is None else weights_TK.contiguous()
    tensors = (rows_RD.contiguous(), weights, out, row_TK, _kept_mask(permutation))
    kernel_launcher(_unpermute, WEIGHTED=weights_TK is not None, **constants)(row_TK.shape[0], tensors)
    return out


def unpermute_backward(
    grad_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, permutation: Permutation
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a weighted sum: of the rows (zeros in padding), and of the weights."""
    row_TK = permutation.row_TK.contiguous()
    if rows_RD.shape[1] > MAX_ROW_WIDTH:
        return reference.unpermute_backward(grad_TD, rows_RD, weights_TK, permutation)
    if not rows_RD.shape[0] or not row_TK.shape[0]:
        return torch.zeros_like(rows_RD), torch.zeros_like(weights_TK)
    weights_TK, grad_RD = weights_TK.contiguous(), _empty_rows(rows_RD, permutation)
    grad_weights = torch.empty_like(weights_TK)
    constants = {"K": row_TK.shape[1], "ALL": permutation.kept_TK is None, **_row_options(rows_RD.shape[1])}
    places = row_TK, _kept_mask(permutation), permutation.choice_R.contiguous()
    tensors = (grad_TD.contiguous(), rows_RD.contiguous(), weights_TK, grad_RD, grad_weights, *places)
    kernel_launcher(_unpermute_backward, **constants)(row_TK.shape[0], tensors, (grad_RD.shape[0],))
    return grad_RD, grad_weights


def weighted_activation(inner_RG: Tensor, weight_R: Tensor, name: str, variant: GluVariant | None = None) -> Tensor:
    """The activation times the weight of each row; an ungated or a bounded one uses the reference."""
    if name not in GATE_ACTIVATIONS or variant is not None:
        return reference.weighted_activation(inner_RG, weight_R, name, variant)
    rows, width = inner_RG.shape[0], inner_RG.shape[1] // 2
    out = inner_RG.new_empty(rows, width)
    if rows:
        shape = _tile_options(width)
        programs, across = triton.cdiv(rows, shape["ROWS"]), triton.cdiv(width, shape["BLOCK"])
        launch = kernel_launcher(_weighted_activation, NAME=name, num_warps=4, **shape)
        launch(programs, (inner_RG.contiguous(), weight_R.contiguous(), out), (rows,), across)
    return out


def weighted_activation_backward(
    grad_RF: Tensor,
    inner_RG: Tensor,
    weight_R: Tensor,
    name: str,
    variant: GluVariant | None = None,
    *,
    recompute_output: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of the input and of the weights, and the weighted activation if `recompute_output`."""
    if name not in GATE_ACTIVATIONS or variant is not None:
        return reference.weighted_activation_backward(
            grad_RF, inner_RG, weight_R, name, variant, recompute_output=recompute_output
        )
    rows, width = grad_RF.shape
    inner_RG, weight_R = inner_RG.contiguous(), weight_R.contiguous()
    grad_inner, grad_weight = torch.empty_like(inner_RG), torch.empty_like(weight_R)
    output = inner_RG.new_empty(rows, width) if recompute_output else None
    if rows:
        shape = _tile_options(width)
        constants = {"NAME": name, "RECOMPUTE_OUTPUT": recompute_output, **shape}
        made = grad_inner if output is None else output
        tensors = (grad_RF.contiguous(), inner_RG, weight_R, grad_inner, grad_weight, made)
        launch = kernel_launcher(_weighted_activation_backward, num_warps=4, **constants)
        launch(triton.cdiv(rows, shape["ROWS"]), tensors, (rows,))
    return grad_inner, grad_weight, output


@triton.jit
def _write_grad(out, grad, count, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(grad + at, mask=at < count, other=0.0).to(out.dtype.element_ty)
    if ACCUMULATE:
        values += tl.load(out + at, mask=at < count, other=0.0)
    tl.store(out + at, values, mask=at < count)


def write_grad(out: Tensor, grad: Tensor, accumulate: bool) -> None:
    """See the reference, which reads and writes a number at a time if the dtypes differ."""
    if not (out.is_contiguous() and grad.is_contiguous()):
        reference.write_grad(out, grad, accumulate)
        return
    count = out.numel()
    launch = kernel_launcher(_write_grad, ACCUMULATE=accumulate, BLOCK=_TILE, num_warps=4)
    launch(triton.cdiv(count, _TILE), (out, grad), (count,))


def _row_options(width: int) -> dict[str, int]:
    """Returns a block that holds a row, 16 elements per thread: two loads of 16 bytes in half precision."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def _tile_options(width: int) -> dict[str, int]:
    """Returns a tile of a few rows and 256 columns, which a warp reads at once, or 512 where they divide the rows."""
    block = 512 if width % 512 == 0 else 256
    return {"WIDTH": width, "BLOCK": block, "ROWS": _TILE // block}


def _empty_rows(like: Tensor, permutation: Permutation) -> Tensor:
    """Allocates all rows. Every row with a choice is written; padding has none, so it is zeroed."""
    make = like.new_empty if permutation.valid_R is None else like.new_zeros
    return make((permutation.choice_R.shape[0], like.shape[1]))


def _kept_mask(permutation: Permutation) -> Tensor:
    """Returns which choices have a row, as bytes; any tensor, which is not read, when all have."""
    kept_TK = permutation.kept_TK
    return permutation.row_TK if kept_TK is None else kept_TK.contiguous().view(torch.uint8)


TRITON = MoEKernels(
    permute_rows, unpermute_rows, unpermute_backward, weighted_activation, weighted_activation_backward, write_grad
)
