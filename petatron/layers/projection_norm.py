"""RMSNorm over all heads of a projection (OLMo 2), whichever ranks have them.

With N channels over all tensor-parallel ranks, s the sum of their squares and r = (s / N + eps)^(-1/2):

    y = x r w        dx = r w dy - x r^3 / N sum(w dy x)        dw = sum over tokens of x r dy

The two sums over channels are all-reduced, one number per token each. A kv head that several ranks share is counted by each of them,
so both sums are divided by how many they are; its gradient is then a partial sum on each, as everything of a shared head is.

S sequence, B batch, H heads of this rank, E head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.compute_dtype import compute_dtype
from petatron.layers.comm_slot import CommSlot, TensorRank, TensorSlot, identity
from petatron.layers.norm import NormWeights, submit_norm_grad


class _ProjectionNorm(AutogradOp):
    @staticmethod
    def forward(ctx: Any, x_SBHE: Tensor, weight: Tensor, norm: ProjectionRMSNorm) -> Tensor:
        wide = x_SBHE.to(compute_dtype(x_SBHE.dtype))
        scale_SB = (norm.sum_over_ranks(wide.square().sum((-2, -1))) / norm.width + norm.eps).rsqrt()
        ctx.save_for_backward(x_SBHE, weight, scale_SB)
        ctx.norm = norm
        return (wide * scale_SB[..., None, None] * norm.effective_weight_HE(weight, wide)).to(x_SBHE.dtype)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_SBHE, weight, scale_SB = ctx.saved_tensors
        norm: ProjectionRMSNorm = ctx.norm
        x = x_SBHE.to(scale_SB.dtype)
        grad, scale = grads[0].to(x.dtype), scale_SB[..., None, None]
        weight_grad = (grad * x * scale).flatten(0, -3).sum(0).flatten()
        grad = grad * norm.effective_weight_HE(weight, x)
        dot = norm.sum_over_ranks((grad * x).sum((-2, -1)))[..., None, None]
        x_grad = scale * grad - x * scale.pow(3) * dot / norm.width
        return x_grad.to(x_SBHE.dtype), submit_norm_grad(norm, norm.weight, weight_grad), None


class ProjectionRMSNorm(NormWeights):
    """x / rms(x) * weight for x [S, B, H, E], the mean square being over all heads of all ranks; `width` counts their channels."""

    tensor_slots: Mapping[str, TensorSlot] = {**NormWeights.tensor_slots, "tensor_rank": "tensor rank"}
    group_sum_slots: Mapping[str, int] = {"all_reduce": 1}

    def __init__(self, width: int, *, eps: float, zero_centered_gamma: bool = False) -> None:
        super().__init__(width, eps=eps, zero_centered_gamma=zero_centered_gamma)
        self.width = width
        self.all_reduce: CommSlot = identity
        self.tensor_rank: TensorRank = (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return _ProjectionNorm.apply(x, self.weight, self)  # pyright: ignore[reportReturnType]

    def effective_weight_HE(self, weight: Tensor, like_SBHE: Tensor) -> Tensor:
        effective = weight.to(like_SBHE.dtype).view(like_SBHE.shape[-2:])
        return effective + 1.0 if self.zero_centered_gamma else effective

    def sum_over_ranks(self, partial_sum_SB: Tensor) -> Tensor:
        replicas = self.tensor_rank[1] * self.weight.numel() / self.width
        return self.all_reduce(partial_sum_SB.contiguous()) / replicas
