"""The router: chooses each token's experts and their weights.

Scores come from logits W x (+ b) by a softmax or by sigmoids. The K best are chosen, possibly only among the best groups of experts
(DeepSeek), possibly with a load-balancing bias per expert. The bias affects the choice and never the weights, so it changes no
gradient.

    softmax               weights = softmax over the chosen logits
    softmax, pre-softmax  weights = the chosen entries of the softmax over all experts; they add up to less than 1
    sigmoid               weights = the chosen sigmoids, divided by their sum if there are several
    sinkhorn              in training the choice is the top K of the Sinkhorn-normalized logits; weights = entries of the
                          softmax over all, or the sigmoid for K = 1

With a capacity, an expert accepts at most ceil(capacity factor x T K / E) of this rank's T tokens; more are dropped. T depends
on the layout, so what is dropped does too. Priority is by weight, or by position over all sequences; ties go to the earlier
position, then to the earlier sequence. Everything else handles tokens in memory order, whichever that is.

S sequence, B batch, T = S x B tokens in memory order, D hidden, E experts, K choices per token, G groups of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from petatron.config.schema.model import MoEConfig
from petatron.kernels.cpu_matmul import matmul
from petatron.kernels.moe.permute import Permutation, build_permutation, sort_by_expert
from petatron.layers.moe.load_balancing import (
    SINGLE_RANK,
    ReductionGroup,
    count_choices_BE,
    load_balancing_loss,
    router_statistics,
    sinkhorn,
    z_loss,
)
from petatron.layers.token_rows import from_rows, is_batch_first, to_rows

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class RouterFunctions(NamedTuple):
    """x W^T of rows, and functions over the last dimension, by autograd; `kernels/batch_invariant` has others."""

    multiply: Callable[[Tensor, Tensor], Tensor]
    sigmoid: Callable[[Tensor], Tensor]
    softmax: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]


PLAIN_FUNCTIONS = RouterFunctions(
    multiply=lambda x, weight: matmul(x, weight.t()),
    sigmoid=torch.sigmoid,
    softmax=lambda x: x.softmax(dim=-1),
    total=lambda x: x.sum(dim=-1),
)


@dataclass(frozen=True, slots=True)
class Routing:
    """The choices of all tokens: what dispatch and combine need.

    experts_TK: the experts of each token; `num_experts` marks a dropped choice.
    weights_TK: the factors on their outputs.
    may_drop: whether choices may have been dropped.
    capacity: the most of these tokens that an expert accepts; None means all.
    pad_to_capacity: whether every expert's input is padded to the capacity.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    num_experts: int
    may_drop: bool = False
    capacity: int | None = None
    pad_to_capacity: bool = False

    def permutation(self) -> Permutation:
        """Returns the choices sorted by expert. Where some may be dropped, only a capacity avoids reading their number from the device."""
        max_rows = None if self.capacity is None else self.num_experts * self.capacity
        sizes = {"capacity": self.capacity if self.pad_to_capacity else None, "max_rows": max_rows}
        return build_permutation(self.experts_TK, self.num_experts, may_drop=self.may_drop, **sizes)


class Router(nn.Module):
    """Chooses experts and computes its losses. `sequence_group` and `stage_group` are the ranks that it is balanced over."""

    def __init__(self, hidden_size: int, num_experts: int, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if moe.moe_router_linear_bias else None
        self.expert_bias: Tensor | None
        expert_bias = torch.zeros(num_experts, dtype=torch.float32) if moe.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", expert_bias)
        self.sequence_group: ReductionGroup = SINGLE_RANK
        self.stage_group: ReductionGroup = SINGLE_RANK
        self.functions = PLAIN_FUNCTIONS

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Keeps the bias in float32, where small steps add up, and zeroes it when it leaves the meta device."""
        was_meta = self.expert_bias is not None and self.expert_bias.is_meta
        super()._apply(fn, recurse)
        if self.expert_bias is not None:
            bias = self.expert_bias.to(torch.float32)
            self.expert_bias = torch.zeros_like(bias) if was_meta and not bias.is_meta else bias
        return self

    def forward(self, x_SBD: Tensor, *, with_loss: bool) -> tuple[Routing, Tensor | None, Tensor]:
        """Returns the routing, this rank's share of the router's losses if wanted, and `load_balancing.router_statistics`."""
        moe, experts = self.moe, self.weight.shape[0]
        if x_SBD.dim() == 2:  # packed tokens of generation
            x_SBD = x_SBD.unsqueeze(1)
        batch_first = is_batch_first(x_SBD)
        logits_TE = self._logits(to_rows(x_SBD, batch_first=batch_first))
        scores_TE = self._scores(logits_TE)
        chosen_TK, weights_TK = self._select_experts(logits_TE, scores_TE)
        z_T = logits_TE.logsumexp(dim=-1)
        counts_BE = count_choices_BE(from_rows(chosen_TK, x_SBD, batch_first=batch_first), num_experts=experts)
        routing = Routing(chosen_TK, weights_TK, experts)
        if moe.moe_expert_capacity_factor is not None:
            routing = self._apply_capacity(routing, moe.moe_expert_capacity_factor, x_SBD)
        loss = None
        if with_loss:
            scores_SBE = from_rows(scores_TE, x_SBD, batch_first=batch_first)
            group = self.sequence_group
            losses = (
                load_balancing_loss(moe, scores_SBE, counts_BE, sequence_group=group, stage_group=self.stage_group),
                z_loss(moe, z_T, sequence_group=group),
            )
            parts = [part for part in losses if part is not None]
            loss = torch.stack(parts).sum() if parts else None
        statistics = router_statistics(
            scores_TE,
            z_T,
            counts_BE.sum(0),
            dropped=(routing.experts_TK == experts).sum(),
            aux_loss=loss,
            num_ranks=self.sequence_group.num_ranks,
        )
        return routing, loss, statistics

    def _logits(self, x_TD: Tensor) -> Tensor:
        """Computes logits in `moe_router_dtype`, and returns them in at least float32."""
        moe, dtype = self.moe, x_TD.dtype
        if moe.moe_router_dtype is not None:
            dtype = torch.promote_types(dtype, _DTYPES[moe.moe_router_dtype])
        x_TD = x_TD.to(dtype)
        if self.training and moe.moe_input_jitter_eps:
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - moe.moe_input_jitter_eps, 1 + moe.moe_input_jitter_eps)
        logits = self.functions.multiply(x_TD, self.weight.to(dtype))
        logits = logits if self.bias is None else logits + self.bias.to(dtype)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if moe.moe_router_force_load_balancing:
            # Random values, but the gradient still flows, so backward costs the same.
            logits = torch.randn_like(logits) + (logits - logits.detach())
        return logits

    def _scores(self, logits_TE: Tensor) -> Tensor:
        """Returns scores over all experts that add up to 1, for load balancing and statistics."""
        if self.moe.moe_router_score_function == "softmax":
            return self.functions.softmax(logits_TE)
        sigmoid = self.functions.sigmoid(logits_TE)
        return sigmoid / (self.functions.total(sigmoid).unsqueeze(-1) + 1e-20)

    def _select_experts(self, logits_TE: Tensor, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the chosen experts [T, K] and the weights of their outputs."""
        moe, k = self.moe, self.moe.moe_router_topk
        if moe.moe_router_load_balancing_type == "sinkhorn":
            every = logits_TE.sigmoid() if k == 1 else logits_TE.softmax(dim=-1)
            chosen = (sinkhorn(logits_TE, self.sequence_group) if self.training else every).topk(k, dim=-1).indices
            weights = every.gather(1, chosen)
        elif moe.moe_router_score_function == "sigmoid":
            every = self.functions.sigmoid(logits_TE)
            chosen = self._topk_experts(every)
            weights = every.gather(1, chosen)
            weights = weights / (self.functions.total(weights).unsqueeze(-1) + 1e-20) if k > 1 else weights
        elif moe.moe_router_pre_softmax:
            chosen = self._topk_experts(scores_TE)
            weights = scores_TE.gather(1, chosen)
        else:
            chosen = self._topk_experts(logits_TE)
            weights = self.functions.softmax(logits_TE.gather(1, chosen))
        factor = moe.moe_router_topk_scaling_factor
        return chosen, weights if factor is None else weights * factor

    @torch.no_grad()
    def _topk_experts(self, ranking_TE: Tensor) -> Tensor:
        """Returns the top K experts of each token, bias included, from its top groups where experts are grouped."""
        moe, k = self.moe, self.moe.moe_router_topk
        if self.expert_bias is not None:
            ranking_TE = ranking_TE + self.expert_bias
        if moe.moe_router_num_groups is not None and moe.moe_router_group_topk is not None:
            groups_TGE = ranking_TE.unflatten(-1, (moe.moe_router_num_groups, -1))
            # By default the sum of the experts it would contribute if choices were spread evenly over the top groups.
            count = moe.moe_router_group_score_topk or max(1, k // moe.moe_router_group_topk)
            best = (
                self.functions.total(groups_TGE.topk(count, dim=-1).values)
                .topk(moe.moe_router_group_topk, dim=-1)
                .indices
            )
            selected_TG = torch.zeros_like(groups_TGE[..., 0], dtype=torch.bool).scatter_(1, best, True)
            ranking_TE = groups_TGE.masked_fill(~selected_TG[..., None], float("-inf")).flatten(1)
        return ranking_TE.topk(k, dim=-1).indices

    def _apply_capacity(self, routing: Routing, capacity_factor: float, x_SBD: Tensor) -> Routing:
        """Drops choices beyond an expert's capacity: those with the lowest weights, or the last ones.

        Priority must not depend on the memory layout, so the choices are sorted in sequence-first order.
        """
        moe, experts, batch_first = self.moe, routing.num_experts, is_batch_first(x_SBD)
        tokens, k = routing.experts_TK.shape
        # No token chooses an expert twice, so a capacity above the number of tokens is never used.
        capacity = min(tokens, max(1, math.ceil(tokens * k * capacity_factor / experts)))

        def sequence_first(of_TK: Tensor) -> Tensor:
            return to_rows(from_rows(of_TK, x_SBD, batch_first=batch_first), batch_first=False)

        priority = sequence_first(routing.weights_TK.detach()) if moe.moe_token_drop_policy == "probs" else None
        sorted_choices = sort_by_expert(sequence_first(routing.experts_TK), experts, priority=priority)
        dropped = sorted_choices.position_in_expert_TK >= capacity
        dropped_TK = to_rows(from_rows(dropped, x_SBD, batch_first=False), batch_first=batch_first)
        return Routing(
            routing.experts_TK.masked_fill(dropped_TK, experts),
            routing.weights_TK,
            experts,
            may_drop=True,
            capacity=capacity,
            pad_to_capacity=moe.moe_pad_expert_input_to_capacity,
        )
