"""Latent attention of each query to its top-k tokens, and how an indexer selects them.

An index score is I(t, s) = sum_j w(t, j) relu(q(t, j) . k(s)), over the heads j of an indexer with one key per token. A query selects the
K visible tokens with the highest scores. Equal scores are common, since relu gives many zeros; ties go to the later position. Scores are
ranked in float32, packed with the position into one int64, so that no two are equal and every kernel of `topk` agrees.

Attention to the selected tokens is absorbed (`paged_latent_attention.py`): queries are multiplied with the key up-projection, are scored
against the gathered latents, and the weighted sums of latents are multiplied with the value up-projection. With M = C + R channels per
token, H heads and blocks of queries, no tensor has the size S x S:

    gathered latents     block x K x M           scores     block x H x K

Backward recomputes block by block; saved for it are queries, latents and the indices of the selected rows.

B batch, Q queries, L keys, H attention heads, J indexer heads, K selected tokens of a query, C latent, R rotary key, M = C + R, N width of
a query head without position, V of a value head, E width of a head (N + R; in index scores that of an indexer head), T rows of queries, A
rows of latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.attention.paged_latent_attention import LatentUpProjection
from petatron.kernels.compute_dtype import to_compute_dtype

BLOCK_BYTES = 1 << 27
"""The size limit of the largest tensor of a block."""
_UNSEEN = torch.iinfo(torch.int64).min
_LOW_HALF = (1 << 32) - 1


def row_blocks(rows: int, bytes_per_row: int) -> Iterator[slice]:
    """Yields slices of rows that need at most `BLOCK_BYTES` each.

    >>> [(block.start, block.stop) for block in row_blocks(5, BLOCK_BYTES // 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    count = max(1, BLOCK_BYTES // max(1, bytes_per_row))
    return (slice(start, min(start + count, rows)) for start in range(0, rows, count))


@lru_cache(maxsize=8)
def _hadamard(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the Hadamard matrix of a power of two (Sylvester's), divided by its norm."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < width:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return matrix * width**-0.5


def hadamard_rotation(x: Tensor) -> Tensor:
    """Rotates vectors by the Hadamard matrix: dot products are preserved, and outliers are spread over all channels.

    >>> hadamard_rotation(torch.tensor([2.0, 0.0, 0.0, 0.0]))
    tensor([1., 1., 1., 1.])
    """
    wide = to_compute_dtype(x)
    with torch.inference_mode(False):  # the matrix outlives the step that asks for it first
        matrix = _hadamard(x.shape[-1], wide.dtype, wide.device)
    return (wide @ matrix).to(x.dtype)


def index_scores(q_BQJE: Tensor, k_BLE: Tensor, weights_BQJ: Tensor, *, relu: bool = True) -> Tensor:
    """Returns I(t, s) [B, Q, L] in the compute dtype; keys may also be [B, Q, L, E], different for each query."""
    q, k, weights = (to_compute_dtype(x) for x in (q_BQJE, k_BLE, weights_BQJ))
    if k.dim() == 3:
        products = (q.flatten(1, 2) @ k.mT).unflatten(1, q.shape[1:3])
    else:
        products = q @ k.mT
    products = products.relu() if relu else products
    return (weights.unsqueeze(-2) @ products).squeeze(-2)


def topk_positions(scores_BQL: Tensor, visible_BQL: Tensor, count: int) -> Tensor:
    """Returns the positions of the `count` visible tokens with the highest scores, [B, Q, K]; -1 where fewer are visible.

    >>> scores = torch.tensor([[0.5, 0.0, -0.0, -1.0]])
    >>> topk_positions(scores, torch.tensor([[True, True, True, False]]), 2).tolist()
    [[0, 2]]
    """
    length = scores_BQL.shape[-1]
    bits = (scores_BQL.to(torch.float32) + 0.0).view(torch.int32)  # + 0.0: -0.0 is 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats descend as their bits ascend
    order = (ascending.to(torch.int64) << 32) | torch.arange(length, device=scores_BQL.device)
    best = order.masked_fill_(~visible_BQL, _UNSEEN).topk(min(count, length), dim=-1).values
    return torch.where(best == _UNSEEN, -1, best & _LOW_HALF)


def gather_rows(rows_AM: Tensor, selected: Tensor) -> Tensor:
    """Returns the selected rows, [..., K, M]; arbitrary rows where the index is -1."""
    return rows_AM.index_select(0, selected.clamp(min=0).flatten()).unflatten(0, selected.shape)


def attention_weights(q_THM: Tensor, k_TKM: Tensor, selected_TK: Tensor, scale: float) -> Tensor:
    """Returns the softmax over the selected tokens, [T, H, K]; 0 where the index is -1."""
    scores = (q_THM @ k_TKM.mT) * scale
    return scores.masked_fill_((selected_TK < 0).unsqueeze(1), -torch.inf).softmax(dim=-1)


def absorbed_queries(q_THE: Tensor, up: LatentUpProjection) -> Tensor:
    """Returns absorbed queries, to score against [latent | rotary key], [T, H, M]."""
    return torch.cat(up.absorb(q_THE), dim=-1)


def attend_gathered(
    q_THE: Tensor, gathered_TKM: Tensor, selected_TK: Tensor, up: LatentUpProjection, *, scale: float
) -> Tensor:
    """Returns the attention of each query to the rows gathered for it, [T, H, V]; all in the compute dtype."""
    weights = attention_weights(absorbed_queries(q_THE, up), gathered_TKM, selected_TK, scale)
    return up.values(weights @ gathered_TKM[..., : up.key_HNC.shape[2]])


def attend_selected_rows(
    q_THE: Tensor, keys: Sequence[Tensor], selected_TK: Tensor, up: LatentUpProjection, *, scale: float
) -> Tensor:
    """Returns the attention of each query to its selected rows, [T, H, V].

    keys: the columns [latent | rotary key] of all rows, in one or more tensors. up: in the compute dtype. selected_TK: rows, or -1.
    """
    out = q_THE.new_empty((*q_THE.shape[:2], up.value_HVC.shape[1]))
    width = sum(part.shape[1] for part in keys)
    for block in row_blocks(q_THE.shape[0], block_bytes(q_THE.shape[1], width, selected_TK)):
        selected = selected_TK[block]
        gathered = to_compute_dtype(torch.cat([gather_rows(part, selected) for part in keys], dim=-1))
        out[block] = attend_gathered(to_compute_dtype(q_THE[block]), gathered, selected, up, scale=scale)
    return out


def sparse_latent_attention(
    q_THE: Tensor, keys_AM: Tensor, selected_TK: Tensor, weight: Tensor, *, nope_dim: int, v_dim: int, scale: float
) -> Tensor:
    """Returns the attention of each query to its selected rows of `keys_AM` [latent | rotary key], [T, H, V].

    weight: the KV up-projection, from latents to [key without position, value] of each head. selected_TK: rows, or -1.
    """
    args = (q_THE, keys_AM, weight, selected_TK, nope_dim, v_dim, scale)
    return _SparseLatentAttention.apply(*args)  # pyright: ignore[reportReturnType]


def block_bytes(heads: int, width: int, selected_TK: Tensor) -> int:
    """Returns the bytes that a query needs in the compute dtype: the larger of its gathered rows and its scores."""
    return 8 * selected_TK.shape[1] * max(width, heads)


class _SparseLatentAttention(AutogradOp):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        q_THE, keys_AM, weight, selected_TK, *ctx.options = args
        ctx.save_for_backward(q_THE, keys_AM, weight, selected_TK)
        nope_dim, v_dim, scale = ctx.options
        up = LatentUpProjection.of(to_compute_dtype(weight), nope_dim=nope_dim, v_dim=v_dim)
        return attend_selected_rows(q_THE, (keys_AM,), selected_TK, up, scale=scale)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THE, keys_AM, weight, selected_TK = ctx.saved_tensors
        nope_dim, v_dim, scale = ctx.options
        wide = to_compute_dtype(weight)
        up, dq = LatentUpProjection.of(wide, nope_dim=nope_dim, v_dim=v_dim), torch.empty_like(q_THE)
        dkeys = torch.zeros(keys_AM.shape, dtype=wide.dtype, device=wide.device)
        dweight = torch.zeros_like(wide)
        up_grad = LatentUpProjection.of(dweight, nope_dim=nope_dim, v_dim=v_dim)
        for block in row_blocks(q_THE.shape[0], block_bytes(q_THE.shape[1], keys_AM.shape[1], selected_TK)):
            selected = selected_TK[block]
            grad, q, gathered = map(to_compute_dtype, (grads[0][block], q_THE[block], gather_rows(keys_AM, selected)))
            dq_block, dgathered = _block_backward(grad, q, gathered, selected, up, up_grad, scale)
            dq[block] = dq_block
            # A row gathered for the index -1 has the weight 0, and so no gradient.
            dkeys.index_add_(0, selected.clamp(min=0).flatten(), dgathered.flatten(0, 1))
        return dq, dkeys.to(keys_AM.dtype), dweight.to(weight.dtype), None, None, None, None


def _block_backward(
    grad_THV: Tensor,
    q_THE: Tensor,
    gathered_TKM: Tensor,
    selected_TK: Tensor,
    up: LatentUpProjection,
    up_grad: LatentUpProjection,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a block's queries and gathered rows, and adds those of the up-projections to `up_grad`."""
    _, nope_dim, width = up.key_HNC.shape
    queries, latents_TKC = absorbed_queries(q_THE, up), gathered_TKM[..., :width]
    weights_THK = attention_weights(queries, gathered_TKM, selected_TK, scale)
    mixed_HTC = (weights_THK @ latents_TKC).transpose(0, 1)
    grad_HTV = grad_THV.transpose(0, 1)
    up_grad.value_HVC.add_(grad_HTV.mT @ mixed_HTC)
    dmixed_THC = (grad_HTV @ up.value_HVC).transpose(0, 1)
    dweights = dmixed_THC @ latents_TKC.mT
    dscores = weights_THK * (dweights - (dweights * weights_THK).sum(-1, keepdim=True)) * scale
    dqueries = dscores @ gathered_TKM
    dgathered = dscores.mT @ queries
    dgathered[..., :width] += weights_THK.mT @ dmixed_THC
    dabsorbed_HTC = dqueries[..., :width].transpose(0, 1)
    up_grad.key_HNC.add_(q_THE[..., :nope_dim].transpose(0, 1).mT @ dabsorbed_HTC)
    dnope_THN = (dabsorbed_HTC @ up.key_HNC.mT).transpose(0, 1)
    return torch.cat((dnope_THN, dqueries[..., width:]), dim=-1), dgathered
