"""Some tokens of each sequence: what an output head computes where few tokens are predicted.

S sequence, P selected tokens of each sequence, B batch, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.layers.token_rows import is_batch_first


def select_tokens(x_SBD: Tensor, positions_BP: Tensor) -> Tensor:
    """Returns [P, B, D], the tokens at different positions of each sequence.

    >>> x_SBD = torch.arange(6.0).view(3, 2, 1)
    >>> select_tokens(x_SBD, torch.tensor([[2, 0], [1, 2]]))[..., 0].tolist()
    [[4.0, 3.0], [0.0, 5.0]]
    """
    return _SelectTokens.apply(x_SBD, positions_BP)  # pyright: ignore[reportReturnType]


def place_tokens(values_PB: Tensor, positions_BP: Tensor, length: int) -> Tensor:
    """Returns values [S, B] of whole sequences from those of some tokens; the others are 0.

    >>> place_tokens(torch.tensor([[5.0, 6.0]]), torch.tensor([[1], [0]]), 2).tolist()
    [[0.0, 6.0], [5.0, 0.0]]
    """
    return values_PB.new_zeros((length, values_PB.shape[1])).scatter(0, positions_BP.t(), values_PB)


class _SelectTokens(AutogradOp):
    """Positions of a sequence differ, so that gradients are copied and not added up: the same bits every time."""

    @staticmethod
    def forward(ctx: Any, x_SBD: Tensor, positions_BP: Tensor) -> Tensor:
        length, batch, width = x_SBD.shape
        ctx.batch_first = is_batch_first(x_SBD)
        row = torch.arange(batch, device=positions_BP.device).unsqueeze(1)
        at_BP = row * length + positions_BP if ctx.batch_first else positions_BP * batch + row
        rows = (x_SBD.transpose(0, 1) if ctx.batch_first else x_SBD).reshape(-1, width)
        ctx.shape = x_SBD.shape
        ctx.save_for_backward(at_BP)
        return rows.index_select(0, at_BP.flatten()).view(batch, -1, width).transpose(0, 1)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        [grad_PBD], (at_BP,) = grads, ctx.saved_tensors
        length, batch, width = ctx.shape
        rows = grad_PBD.new_zeros((length * batch, width))
        rows.index_copy_(0, at_BP.flatten(), grad_PBD.transpose(0, 1).reshape(-1, width))
        if ctx.batch_first:
            return rows.view(batch, length, width).transpose(0, 1), None
        return rows.view(length, batch, width), None
