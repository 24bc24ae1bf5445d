"""Load balancing of experts, and statistics of it.

Every loss is defined over a whole micro-batch, whichever ranks hold its tokens, so no layout changes what is trained. A rank
computes only the share of its own tokens; the shares, and so their gradients, add up to the loss.

With f_i the share of all choices that went to expert i, P_i the mean score of expert i, and E experts:

    aux_loss          E sum_i f_i P_i            over the tokens of a micro-batch (Switch Transformer, GShard)
    seq_aux_loss      the same of every sequence, mean over the sequences (DeepSeek-V2)
    global_aux_loss   f over the concurrent micro-batches of all data-parallel ranks, P over a micro-batch (Qwen)
    z-loss            mean of (log sum_i exp logit_i)^2 (ST-MoE)

Each is 1 (z-loss: small) when the load is even. f counts, so gradients flow through P alone. Choices dropped by expert
capacity count in f.

S positions and B sequences of this rank, T = S x B tokens in any order, K choices per token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petatron.config.schema.model import MoEConfig
from petatron.layers.parallel_slots import CommSlot, identity

_SINKHORN_TOLERANCE = 1e-4
_SINKHORN_ITERATIONS = 100


@dataclass(frozen=True, slots=True)
class ReductionGroup:
    """Ranks over whose tokens a statistic is reduced: `all_reduce` sums a small tensor over them, in place."""

    num_ranks: int = 1
    all_reduce: CommSlot = identity


SINGLE_RANK = ReductionGroup()


def count_choices_BE(chosen_SBK: Tensor, *, num_experts: int) -> Tensor:
    """Counts how often each sequence chose each expert."""
    chosen_SBE = torch.zeros(*chosen_SBK.shape[:2], num_experts, dtype=torch.bool, device=chosen_SBK.device)
    return chosen_SBE.scatter_(2, chosen_SBK, True).sum(0)


def load_balancing_loss(
    moe: MoEConfig,
    scores_SBE: Tensor,
    counts_BE: Tensor,
    *,
    sequence_group: ReductionGroup,
    stage_group: ReductionGroup,
) -> Tensor | None:
    """Returns this rank's share of a micro-batch's load-balancing loss, coefficient included; None when there is none."""
    kind = moe.moe_router_load_balancing_type
    if moe.moe_aux_loss_coeff == 0.0 or kind in ("none", "sinkhorn"):
        return None
    tokens, experts = scores_SBE[..., 0].numel(), scores_SBE.shape[-1]
    sums_GE = scores_SBE.sum(0)
    counts_GE = counts_BE
    if kind != "seq_aux_loss":
        sums_GE, counts_GE = sums_GE.sum(0, keepdim=True), counts_BE.sum(0, keepdim=True)
    groups = counts_GE.shape[0]
    counted = stage_group if kind == "global_aux_loss" else sequence_group
    total_GE = counted.all_reduce(counts_GE.clone()).to(scores_SBE.dtype)
    share_GE = total_GE * groups / (tokens * counted.num_ranks * moe.moe_router_topk)
    mean_GE = sums_GE * groups / (tokens * sequence_group.num_ranks)
    return moe.moe_aux_loss_coeff * experts * (share_GE * mean_GE).sum() / groups


def z_loss(moe: MoEConfig, z_T: Tensor, *, sequence_group: ReductionGroup) -> Tensor | None:
    """Returns this rank's share of a micro-batch's z-loss; `z_T` is the log-sum-exp of every token's logits."""
    if not moe.moe_z_loss_coeff:
        return None
    return moe.moe_z_loss_coeff * z_T.square().sum() / (z_T.numel() * sequence_group.num_ranks)


class _AttachAuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.loss
        return grads[0], torch.ones((), dtype=dtype, device=device)


def attach_aux_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Returns `x`, and adds the gradient of the scalar `loss` in its backward, as if `loss` were added to the final one."""
    return _AttachAuxLoss.apply(x, loss)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def sinkhorn(logits_TE: Tensor, sequence_group: ReductionGroup) -> Tensor:
    """Returns exp(logits) with rows and columns scaled in turn until all tokens, and all experts, have equal weight.

    Only the sums over tokens are all-reduced. The number of iterations depends on them alone, so it is equal on all ranks.
    """
    tokens, experts = logits_TE.shape
    cost = (logits_TE - logits_TE.amax(dim=1, keepdim=True)).exp()  # `row` absorbs the factor of each row
    column = torch.ones(experts, dtype=cost.dtype, device=cost.device)
    row = torch.ones(tokens, 1, dtype=cost.dtype, device=cost.device)
    for _ in range(_SINKHORN_ITERATIONS):
        row = 1.0 / ((cost * column).sum(1, keepdim=True) * tokens * sequence_group.num_ranks)
        before, column = column, 1.0 / (sequence_group.all_reduce((cost * row).sum(0)) * experts)
        if float((before - column).abs().mean()) <= _SINKHORN_TOLERANCE:
            break
    return row * cost * column


def expert_bias_update(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """Returns the bias after a step: `rate` up for experts chosen less often than the mean, down for the others (DeepSeek-V3).

    `counts_E` are the choices of the whole step, over all ranks and micro-batches.
    """
    counts = counts_E.to(torch.float64)
    return bias_E + rate * (counts.mean() - counts).sign().to(bias_E.dtype)


_STATISTIC_NAMES = ("dropped", "entropy", "z", "extra_loss", "tokens", "micro_batches")


@torch.no_grad()
def router_statistics(
    scores_TE: Tensor, z_T: Tensor, counts_E: Tensor, *, dropped: Tensor, aux_loss: Tensor | None, num_ranks: int
) -> Tensor:
    """Returns router statistics as a float64 vector of sums, which may be added over micro-batches and ranks.

    First the choices of each expert; then dropped choices, the sums of the scores' entropy and of z^2, this rank's share of
    the auxiliary losses, tokens, and their share of a micro-batch (one of `num_ranks`).
    """
    wide = scores_TE.to(torch.float64)
    entropy = -(wide * wide.clamp(min=1e-30).log()).sum()
    zero = torch.zeros((), dtype=torch.float64, device=wide.device)
    loss = zero if aux_loss is None else aux_loss.detach().to(torch.float64)
    extras = [dropped.to(torch.float64), entropy, z_T.to(torch.float64).square().sum(), loss]
    extras += [zero + scores_TE.shape[0], zero + 1.0 / num_ranks]
    return torch.cat([counts_E.to(torch.float64), torch.stack(extras)])


def statistics_length(num_experts: int) -> int:
    """Returns the length of a statistics vector."""
    return num_experts + len(_STATISTIC_NAMES)


def expert_counts(statistics: Tensor) -> Tensor:
    """Returns how often each expert was chosen, from summed or single statistics."""
    return statistics[: -len(_STATISTIC_NAMES)]


@dataclass(frozen=True, slots=True)
class RouterHealth:
    """Router health over the tokens that summed statistics cover.

    load_max_over_mean: choices of the busiest expert over the mean; 1 is even, the number of experts the worst.
    entropy: mean entropy of the scores in nats; 0 is certain, log(experts) undecided.
    dropped: share of the choices that did not fit an expert's capacity.
    z: mean square of the log-sum-exp of the logits; growing means logits drift.
    extra_loss: mean over micro-batches of the load-balancing and z-losses, with their coefficients.
    """

    load_max_over_mean: float
    entropy: float
    dropped: float
    z: float
    extra_loss: float


def router_health(statistics: Tensor) -> RouterHealth:
    """Computes router health from summed statistics; synchronizes with the device."""
    counts = expert_counts(statistics).tolist()
    dropped, entropy, z, loss, tokens, micro_batches = statistics[-len(_STATISTIC_NAMES) :].tolist()
    chosen = max(sum(counts), 1.0)
    return RouterHealth(
        load_max_over_mean=max(counts) * len(counts) / chosen,
        entropy=entropy / max(tokens, 1.0),
        dropped=dropped / chosen,
        z=z / max(tokens, 1.0),
        extra_loss=loss / micro_batches if micro_batches else 0.0,
    )
