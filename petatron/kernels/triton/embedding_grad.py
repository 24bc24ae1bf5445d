"""Gradient of an embedding table in Triton: deterministic, without atomic additions.

Token ids are stably sorted, so that the tokens of an id are adjacent, a segment. Only the device knows the number of segments, and
the host must know the grid: so there is a program for every sorted position, and those that do not start a piece return at once.

A segment may be one token or, for a padding id, all of them. It is cut at every 32nd position into pieces of at most 32
tokens; one program sums a piece, in order. A piece that is a whole segment is added straight to its row of the table. Of the
others, a window of 32 positions has at most two: one that continues from the window before (the head), and one that starts
here and continues in the next (the tail). Their sums are stored, and a second kernel, with a program for every window, adds
to each tail the heads that continue it, 16 at a time.

Bytes on an H200 for T = 32,768 tokens, D = 2048, V = 128,256: reading the gradients 134 MB, writing at most T rows of 8 KB,
268 MB, and reading them first when accumulating; 0.1 to 0.2 ms at 4.0 TB/s, and 0.05 ms for the sort. A first write also
clears the table, 1.05 GB or 0.27 ms, which is the larger part. Stored partial sums: 17 MB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.kernel_launch import kernel_launcher

_WINDOW = 32
_RUN = 16


@triton.jit
def _add_row(out, token, columns, mask, values, row_size, ACCUMULATE: tl.constexpr):
    row = out + token.to(tl.int64) * row_size + columns
    if ACCUMULATE:
        values += tl.load(row, mask=mask).to(tl.float32)
    tl.store(row, values, mask=mask)


@triton.jit
def _embedding_grad_pieces(
    ids,
    order,
    grad,
    out,
    heads,
    tails,
    num_tokens,
    num_rows,
    row_size,
    grad_stride,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    position = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < row_size
    window = position // WINDOW
    token = tl.load(ids + position)
    goes_on = tl.load(ids + position - 1, mask=position > 0, other=-1) == token
    if (token >= 0) & (token < num_rows) & ((position % WINDOW == 0) | (goes_on == 0)):
        places = position + tl.arange(0, WINDOW)
        inside = (places < (window + 1) * WINDOW) & (places < num_tokens)
        count = tl.sum((tl.load(ids + places, mask=inside, other=-1) == token).to(tl.int32), axis=0)
        total = tl.zeros((BLOCK,), tl.float32)
        step = 0
        while step < count:
            source = tl.load(order + position + step).to(tl.int64)
            total += tl.load(grad + source * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
            step += 1
        after = position + count
        continues = tl.load(ids + after, mask=after < num_tokens, other=-1) == token
        aside = window.to(tl.int64) * row_size + columns
        if goes_on:
            tl.store(heads + aside, total, mask=mask)
        else:
            if continues:
                tl.store(tails + aside, total, mask=mask)
            else:
                _add_row(out, token, columns, mask, total, row_size, ACCUMULATE)


@triton.jit
def _embedding_grad_segments(
    ids,
    heads,
    tails,
    out,
    num_tokens,
    num_rows,
    row_size,
    WINDOW: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    window = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < row_size
    end = (window + 1) * WINDOW
    token = tl.load(ids + end - 1, mask=end < num_tokens, other=-1)
    continues = tl.load(ids + end, mask=end < num_tokens, other=-2) == token
    began_before = tl.load(ids + window * WINDOW - 1, mask=window > 0, other=-1) == token
    if continues & (began_before == 0) & (token >= 0) & (token < num_rows):
        total = tl.load(tails + window.to(tl.int64) * row_size + columns, mask=mask, other=0.0)
        following = window + 1
        matches = RUN
        while matches == RUN:
            windows = following + tl.arange(0, RUN)
            firsts = tl.load(ids + windows * WINDOW, mask=windows * WINDOW < num_tokens, other=-1)
            same = firsts == token
            aside = windows.to(tl.int64)[:, None] * row_size + columns[None, :]
            total += tl.sum(tl.load(heads + aside, mask=same[:, None] & mask[None, :], other=0.0), axis=0)
            matches = tl.sum(same.to(tl.int32), axis=0)
            following += RUN
        _add_row(out, token, columns, mask, total, row_size, ACCUMULATE)


def embedding_grad(ids_T: Tensor, grad_TD: Tensor, out_VD: Tensor, *, accumulate: bool) -> None:
    """As `kernels/embedding_grad.py`; the table's gradient is float32 or bfloat16, sums are in float32."""
    assert out_VD.dtype in (torch.float32, torch.bfloat16), f"no gradient of a table in {out_VD.dtype}"
    assert out_VD.is_contiguous() and grad_TD.stride(1) == 1
    tokens, size = grad_TD.shape
    sorted_ids, order = torch.sort(ids_T.to(torch.int32), stable=True)
    windows = triton.cdiv(tokens, _WINDOW)
    heads, tails = torch.empty(2, windows, size, dtype=torch.float32, device=out_VD.device)
    if not accumulate:
        out_VD.zero_()
    rows, block = out_VD.shape[0], min(triton.next_power_of_2(size), 1024)
    constants = {"WINDOW": _WINDOW, "ACCUMULATE": accumulate, "num_warps": 4}
    kernel_launcher(_embedding_grad_pieces, BLOCK=block, **constants)(
        tokens,
        (sorted_ids, order, grad_TD, out_VD, heads, tails),
        (tokens, rows, size, grad_TD.stride(0)),
        grid_y=triton.cdiv(size, block),
    )
    block = min(block, 256)
    kernel_launcher(_embedding_grad_segments, RUN=_RUN, BLOCK=block, **constants)(
        windows, (sorted_ids, heads, tails, out_VD), (tokens, rows, size), grid_y=triton.cdiv(size, block)
    )
