"""Latent attention of each query to some chosen tokens, and how an indexer chooses them.

An index score is I(t, s) = sum_j w(t, j) relu(q(t, j) . k(s)), over the heads j of an indexer with one key per token. A query keeps the
tokens of the best K scores among those that it sees. Equal scores are common, as a relu gives many zeros: of these the nearer token
is kept. Scores are ranked in float32, and with the position in one integer, so that no two are equal and every kernel of `topk` agrees.

Attention to the chosen tokens is absorbed (`paged_latent.py`): queries are multiplied with the up-projection of keys, meet the latents
that were gathered for them, and their sums of latents are multiplied with the up-projection of values. With M = C + R numbers of a
token, H heads and blocks of queries, nothing is as large as S x S:

    gathered latents     block x K x M           scores     block x H x K

Backward gathers and multiplies again, block by block: saved are queries, latents and the numbers of the chosen rows.

B batch, Q queries, L keys, H heads, K chosen, C latent, R rotary key, M = C + R, N width of a query head without position, V of a value
head, T rows of queries, A rows of latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.attention.paged_latent import LatentUpProjection
from petatron.kernels.compute_dtype import to_compute_dtype

BLOCK_BYTES = 1 << 27
"""What the largest tensor of a block may need."""
_UNSEEN = torch.iinfo(torch.int64).min
_LOW_HALF = (1 << 32) - 1


def row_blocks(rows: int, bytes_per_row: int) -> Iterator[slice]:
    """Yields slices of rows, of which one needs no more than `BLOCK_BYTES`.

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
    """Rotates vectors by the Hadamard matrix: products of two stay as they are, and outliers are spread over all channels.

    >>> hadamard_rotation(torch.tensor([2.0, 0.0, 0.0, 0.0]))
    tensor([1., 1., 1., 1.])
    """
    wide = to_compute_dtype(x)
    with torch.inference_mode(False):  # the matrix outlives the step that asks for it first
        matrix = _hadamard(x.shape[-1], wide.dtype, wide.device)
    return (wide @ matrix).to(x.dtype)


def index_scores(q_BQHE: Tensor, k_BLE: Tensor, weights_BQH: Tensor, *, relu: bool = True) -> Tensor:
    """Returns I(t, s) [B, Q, L] in the compute dtype; keys may also be [B, Q, L, E], others for each query."""
    q, k, weights = (to_compute_dtype(x) for x in (q_BQHE, k_BLE, weights_BQH))
    if k.dim() == 3:
        products = (q.flatten(1, 2) @ k.mT).unflatten(1, q.shape[1:3])
    else:
        products = q @ k.mT
    products = products.relu() if relu else products
    return (weights.unsqueeze(-2) @ products).squeeze(-2)


def best_positions(scores_BQL: Tensor, visible_BQL: Tensor, count: int) -> Tensor:
    """Returns the positions of the `count` best scores among those visible, [B, Q, K]; -1 where fewer are.

    >>> scores = torch.tensor([[0.5, 0.0, -0.0, -1.0]])
    >>> best_positions(scores, torch.tensor([[True, True, True, False]]), 2).tolist()
    [[0, 2]]
    """
    length = scores_BQL.shape[-1]
    bits = (scores_BQL.to(torch.float32) + 0.0).view(torch.int32)  # + 0.0: -0.0 is 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats descend as their bits ascend
    order = (ascending.to(torch.int64) << 32) | torch.arange(length, device=scores_BQL.device)
    best = order.masked_fill_(~visible_BQL, _UNSEEN).topk(min(count, length), dim=-1).values
    return torch.where(best == _UNSEEN, -1, best & _LOW_HALF)


def gather_rows(rows_AM: Tensor, chosen: Tensor) -> Tensor:
    """Returns the chosen rows, [..., K, M]; any row where none is chosen (-1)."""
    return rows_AM.index_select(0, chosen.clamp(min=0).flatten()).unflatten(0, chosen.shape)


def attention_weights(q_THM: Tensor, k_TKM: Tensor, chosen_TK: Tensor, scale: float) -> Tensor:
    """Returns the softmax over the chosen tokens, [T, H, K]; 0 where none is."""
    scores = (q_THM @ k_TKM.mT) * scale
    return scores.masked_fill_((chosen_TK < 0).unsqueeze(1), -torch.inf).softmax(dim=-1)


def absorbed_queries(q_THE: Tensor, up: LatentUpProjection) -> Tensor:
    """Returns the queries of latents and rotary keys, [T, H, M]."""
    return torch.cat(up.absorb(q_THE), dim=-1)


def attend_gathered(
    q_THE: Tensor, gathered_TKM: Tensor, chosen_TK: Tensor, up: LatentUpProjection, *, scale: float
) -> Tensor:
    """Returns the attention of each query to the rows gathered for it, [T, H, V]; all in the compute dtype."""
    weights = attention_weights(absorbed_queries(q_THE, up), gathered_TKM, chosen_TK, scale)
    return up.values(weights @ gathered_TKM[..., : up.key_HNC.shape[2]])


def attend_chosen_rows(
    q_THE: Tensor, keys: Sequence[Tensor], chosen_TK: Tensor, up: LatentUpProjection, *, scale: float
) -> Tensor:
    """Returns the attention of each query to its chosen rows of latents and rotary keys, which are columns of `keys`, [T, H, V].

    up: in the compute dtype. chosen_TK: rows, or -1.
    """
    out = q_THE.new_empty((*q_THE.shape[:2], up.value_HVC.shape[1]))
    width = sum(part.shape[1] for part in keys)
    for block in row_blocks(q_THE.shape[0], block_bytes(q_THE.shape[1], width, chosen_TK)):
        chosen = chosen_TK[block]
        gathered = to_compute_dtype(torch.cat([gather_rows(part, chosen) for part in keys], dim=-1))
        out[block] = attend_gathered(to_compute_dtype(q_THE[block]), gathered, chosen, up, scale=scale)
    return out


def sparse_latent_attention(
    q_THE: Tensor, keys_AM: Tensor, chosen_TK: Tensor, weight: Tensor, *, nope_dim: int, v_dim: int, scale: float
) -> Tensor:
    """Returns the attention of each query to its chosen rows of `keys_AM` [latent | rotary key], [T, H, V].

    weight: that of the GEMM from latents to [key without position, value] of each head. chosen_TK: rows, or -1.
    """
    args = (q_THE, keys_AM, weight, chosen_TK, nope_dim, v_dim, scale)
    return _SparseLatentAttention.apply(*args)  # pyright: ignore[reportReturnType]


def block_bytes(heads: int, width: int, chosen_TK: Tensor) -> int:
    """Returns the bytes that a query needs in the compute dtype: the rows gathered for it, or its scores."""
    return 8 * chosen_TK.shape[1] * max(width, heads)


class _SparseLatentAttention(AutogradOp):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        q_THE, keys_AM, weight, chosen_TK, *ctx.options = args
        ctx.save_for_backward(q_THE, keys_AM, weight, chosen_TK)
        nope_dim, v_dim, scale = ctx.options
        up = LatentUpProjection.of(to_compute_dtype(weight), nope_dim=nope_dim, v_dim=v_dim)
        return attend_chosen_rows(q_THE, (keys_AM,), chosen_TK, up, scale=scale)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_THE, keys_AM, weight, chosen_TK = ctx.saved_tensors
        nope_dim, v_dim, scale = ctx.options
        wide = to_compute_dtype(weight)
        up, dq = LatentUpProjection.of(wide, nope_dim=nope_dim, v_dim=v_dim), torch.empty_like(q_THE)
        dkeys = torch.zeros(keys_AM.shape, dtype=wide.dtype, device=wide.device)
        dweight = torch.zeros_like(wide)
        up_grad = LatentUpProjection.of(dweight, nope_dim=nope_dim, v_dim=v_dim)
        for block in row_blocks(q_THE.shape[0], block_bytes(q_THE.shape[1], keys_AM.shape[1], chosen_TK)):
            chosen = chosen_TK[block]
            grad, q, gathered = map(to_compute_dtype, (grads[0][block], q_THE[block], gather_rows(keys_AM, chosen)))
            dq_block, dgathered = _block_backward(grad, q, gathered, chosen, up, up_grad, scale)
            dq[block] = dq_block
            # A row gathered where none is chosen has the weight 0, and so no gradient.
            dkeys.index_add_(0, chosen.clamp(min=0).flatten(), dgathered.flatten(0, 1))
        return dq, dkeys.to(keys_AM.dtype), dweight.to(weight.dtype), None, None, None, None


def _block_backward(
    grad_THV: Tensor,
    q_THE: Tensor,
    gathered_TKM: Tensor,
    chosen_TK: Tensor,
    up: LatentUpProjection,
    up_grad: LatentUpProjection,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a block's queries and gathered rows, and adds those of the up-projections to `up_grad`."""
    _, nope_dim, width = up.key_HNC.shape
    queries, latents_TKC = absorbed_queries(q_THE, up), gathered_TKM[..., :width]
    weights_THK = attention_weights(queries, gathered_TKM, chosen_TK, scale)
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
