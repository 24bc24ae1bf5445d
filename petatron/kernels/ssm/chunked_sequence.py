"""Cuts sequences into chunks and joins them again, for chunked recurrences, with what else these share: options, gradients, decays in a
chunk, sums from the end.

S sequence, B batch, H heads, P head dim; inside, c chunks of q tokens, g groups of r heads each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Required, TypedDict, Unpack

import torch
from torch import Tensor


class ChunkOptions(TypedDict, total=False):
    """What a recurrence in chunks takes besides its inputs.

    starts_SB: whether a token begins a document; the state before it is dropped, also the initial one.
    initial_state: that before the first token; None: zero.
    """

    chunk_size: Required[int]
    starts_SB: Tensor | None
    initial_state: Tensor | None


def recurrence_grads(
    recurrence: Callable[..., tuple[Tensor, Tensor]],
    output_grads: tuple[Tensor, Tensor | None],
    inputs: Sequence[Tensor],
    **options: Unpack[ChunkOptions],
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the inputs in their dtypes, and of the initial state, None where there is none.

    Runs the recurrence again under autograd, so that nothing but the inputs is saved for backward.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    initial_state = options.get("initial_state")
    state_leaves = [] if initial_state is None else [initial_state.detach().requires_grad_()]
    with torch.enable_grad():
        outputs = recurrence(*leaves, **{**options, "initial_state": next(iter(state_leaves), None)})
    given = [(output, grad) for output, grad in zip(outputs, output_grads, strict=True) if grad is not None]
    used, grads_of_used = zip(*given, strict=True)
    grads = torch.autograd.grad(used, [*leaves, *state_leaves], grads_of_used)
    return grads if state_leaves else (*grads, None)


def to_chunks(x_SBHP: Tensor, chunk_size: int) -> Tensor:
    """[S, B, H, P] as [B, c, H, q, P], padded with zeros."""
    missing = -x_SBHP.shape[0] % chunk_size
    if missing:
        x_SBHP = torch.cat((x_SBHP, x_SBHP.new_zeros((missing, *x_SBHP.shape[1:]))))
    return x_SBHP.unflatten(0, (-1, chunk_size)).permute(2, 0, 3, 1, 4)


def from_chunks(x: Tensor, length: int) -> Tensor:
    """[b, c, g, r, q, p] as [S, B, H, P], without padding."""
    return x.flatten(2, 3).permute(1, 3, 0, 2, 4).flatten(0, 1)[:length]


def decay_matrix(cumsum: Tensor, resets: Tensor | None = None) -> Tensor:
    """Returns L_ij = exp(cumsum_i - cumsum_j) of cumulative log decays where j <= i and both have the same count of resets, else 0."""
    size = cumsum.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=cumsum.device).tril()
    if resets is not None:
        causal = causal & (resets[..., :, None] == resets[..., None, :])
    return (cumsum[..., :, None] - cumsum[..., None, :]).masked_fill(~causal, -torch.inf).exp()


def reverse_cumsum(x: Tensor, *, dim: int = -1) -> Tensor:
    """Returns the sums of x_i and all after it along a dimension."""
    return x.flip(dim).cumsum(dim=dim).flip(dim)


def sums_after(x: Tensor, *, dim: int) -> Tensor:
    """Returns the sums of all after x_i along a dimension, without a difference."""
    after = x.roll(-1, dim)
    after.select(dim, -1).zero_()
    return reverse_cumsum(after, dim=dim)
