"""The loss of sparse attention's indexer: KL(attention distribution || indexer softmax) (DeepSeek-V3.2, section 2.1).

    target(t, s) = sum_h p_h(t, s) / sum_s sum_h p_h(t, s)       p_h: the attention weights of head h
    loss(t)      = sum_s target (log(target + eps) - log(softmax_s I(t, s) + eps))

over all visible tokens of a query (the dense form, for the warm-up of an indexer), or over its selected tokens (the sparse form), where p
is the softmax over the same tokens. Only the index scores get gradients. The gradients of a block of queries are
computed with its loss, and scaled in backward, so neither scores nor targets outlive their block.

B batch, Q queries, L keys, H attention heads, J indexer heads, E width of a head, K selected tokens of a query, M = latent and rotary key
of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.attention.paged_latent_attention import LatentUpProjection
from petatron.kernels.attention.sparse_latent_attention import absorbed_queries, gather_rows, index_scores, row_blocks
from petatron.kernels.compute_dtype import to_compute_dtype

_EPS = 1e-10


class IndexVectors(NamedTuple):
    """The inputs of index scores: queries [B, Q, J, E], keys [B, L, E], weights of heads [B, Q, J]."""

    query: Tensor
    key: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionTarget:
    """The attention that an indexer is to predict.

    q_BQHE: queries of this rank's heads. keys_BLM: latents and rotary keys. up: to keys and values of heads.
    scale: the factor on scores. visible: makes the mask [B or 1, block, L] of a block of queries.
    selected_BQK: the positions selected for each query, or -1; None: the dense form.
    sum_heads: all-reduces, in place, the sum over this rank's heads over TP.
    """

    q_BQHE: Tensor
    keys_BLM: Tensor
    up: LatentUpProjection
    scale: float
    visible: Callable[[slice], Tensor]
    selected_BQK: Tensor | None
    sum_heads: Callable[[Tensor], Tensor]

    def bytes_per_query(self, index: IndexVectors) -> int:
        batch, _, heads, _ = self.q_BQHE.shape
        heads = max(heads, index.query.shape[2])
        if self.selected_BQK is None:
            return 8 * batch * heads * self.keys_BLM.shape[1]
        return 8 * batch * self.selected_BQK.shape[2] * max(heads, self.keys_BLM.shape[2] + index.key.shape[2])

    def block(self, rows: slice) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the target of a block of queries, the positions of its columns (None in the dense form), and its mask."""
        queries = absorbed_queries(to_compute_dtype(self.q_BQHE[:, rows]).flatten(0, 1), self.up)
        queries = queries.unflatten(0, (self.q_BQHE.shape[0], -1))
        keys = to_compute_dtype(self.keys_BLM)
        if self.selected_BQK is None:
            selected, mask = None, self.visible(rows)
            scores = (queries.flatten(1, 2) @ keys.mT).unflatten(1, queries.shape[1:3])
        else:
            selected = self.selected_BQK[:, rows]
            mask = selected >= 0
            scores = queries @ gather_positions(keys, selected).mT
        weights = (scores * self.scale).masked_fill_(~mask.unsqueeze(2), -torch.inf).softmax(dim=-1)
        target = self.sum_heads(weights.sum(dim=2))
        return target / target.sum(dim=-1, keepdim=True), selected, mask


def gather_positions(keys_BLM: Tensor, positions_BQK: Tensor) -> Tensor:
    """Returns the keys at some positions of each sequence, [B, Q, K, M]; arbitrary rows where the position is -1."""
    batch, length, _ = keys_BLM.shape
    first = torch.arange(0, batch * length, length, device=keys_BLM.device)[:, None, None]
    return gather_rows(keys_BLM.flatten(0, 1), positions_BQK.clamp(min=0) + first)


def indexer_loss(index: IndexVectors, target: AttentionTarget, *, relu: bool) -> Tensor:
    """Returns the sum of the losses of all queries, in the compute dtype."""
    if torch.is_grad_enabled():
        return _IndexerLoss.apply(*index, target, relu)  # pyright: ignore[reportReturnType]
    return _loss_and_grads(index, target, relu=relu, with_grads=False)[0]


def _loss_and_grads(
    index: IndexVectors, target: AttentionTarget, *, relu: bool, with_grads: bool
) -> tuple[Tensor, list[Tensor]]:
    wide = [to_compute_dtype(x.detach()) for x in index]
    total = torch.zeros((), dtype=wide[0].dtype, device=wide[0].device)
    grads = [torch.zeros_like(x) for x in wide] if with_grads else []
    for rows in row_blocks(index.query.shape[1], target.bytes_per_query(index)):
        with torch.no_grad():
            expected, selected, mask = target.block(rows)
        parts = [wide[0][:, rows], wide[1], wide[2][:, rows]]
        with torch.set_grad_enabled(with_grads), saved_tensors_hooks(_save_unchanged, _save_unchanged):
            parts = [part.detach().requires_grad_(with_grads) for part in parts]
            query, key, weight = parts
            key = key if selected is None else gather_positions(key, selected)
            scores = index_scores(query, key, weight, relu=relu).masked_fill(~mask, -torch.inf)
            predicted = scores.softmax(dim=-1)
            loss = (expected * ((expected + _EPS).log() - (predicted + _EPS).log())).sum()
        total += loss.detach()
        if with_grads:
            of_query, of_key, of_weight = torch.autograd.grad(loss, parts)
            grads[0][:, rows], grads[2][:, rows] = of_query, of_weight
            grads[1] += of_key
    return total, grads


def _save_unchanged(saved: Tensor) -> Tensor:
    """Saves a tensor as it is, without the hooks of an enclosing recompute region: the graph of a block does not outlive the call."""
    return saved


class _IndexerLoss(AutogradOp):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, weight: Tensor, target: AttentionTarget, relu: bool) -> Tensor:
        index = IndexVectors(query, key, weight)
        total, grads = _loss_and_grads(index, target, relu=relu, with_grads=True)
        ctx.save_for_backward(*(grad.to(x.dtype) for grad, x in zip(grads, index)))
        return total

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *((grad * grads[0]).to(grad.dtype) for grad in ctx.saved_tensors), None, None
