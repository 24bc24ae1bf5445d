"""The experts of an MoE layer: MLPs whose GEMMs are grouped over all local experts.

The router's weight of a row may be applied to the activation, W (w a) instead of w (W a), where it costs nothing: see
`kernels/moe/permute.py`.

R rows in the order of their experts, D width, O output width, E local experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.config.schema.sections.mlp import GATED_ACTIVATIONS
from petatron.kernels.activation import GluVariant
from petatron.kernels.linear_gemms import Gemm
from petatron.kernels.moe.grouped_gemm import ExpertCounts, GroupedGemm, WriteGrad
from petatron.kernels.moe.permute import REFERENCE, MoEKernels
from petatron.layers.adapters.adapter import Adapter
from petatron.layers.mlp import Activation
from petatron.layers.ops.linear_op import GemmOp, WeightGradTarget
from petatron.layers.ops.recompute_output import (
    MaybeTensors,
    RecomputableOutput,
    Tensors,
    apply_recomputable,
    as_recomputable,
)
from petatron.layers.parallel_slots import TensorSlot


class GroupedLinear(nn.Module):
    """x W^T + b with a W and b per expert; `grouped_gemm`, `kernels`, `weight_grad_target` and `adapter` are slots.

    `bias_scale` multiplies the bias: 0 on all but one of the ranks whose partial outputs are summed.
    """

    tensor_slots: Mapping[str, TensorSlot] = {"weight_grad_target": "weight-gradient target"}

    def __init__(self, num_experts: int, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if bias else None
        self.bias_scale = 1.0
        self.grouped_gemm: Callable[[ExpertCounts, WriteGrad], Gemm] = GroupedGemm
        self.kernels: MoEKernels = REFERENCE
        self.weight_grad_target: WeightGradTarget | None = None
        self.adapter: Adapter | None = None

    def weights(self) -> tuple[nn.Parameter | None, ...]:
        """Returns the parameters whose gradients a weight-gradient target gets."""
        return self.weight, *(() if self.adapter is None else self.adapter.params(self))

    def kernel_slots(self) -> Mapping[str, str]:
        return {"kernels": "expert permutation"}

    def forward(self, x_RD: Tensor | RecomputableOutput, counts: ExpertCounts) -> Tensor:
        gemm = self.grouped_gemm(counts, self.kernels.write_grad)
        gemm_op = GemmOp(gemm, self.weight_grad_target)
        if self.adapter is not None:
            gemm_op = self.adapter.adapt_gemm_op(
                self, gemm_op, low_rank_gemm=GroupedGemm(counts, self.kernels.write_grad)
            )
        y_RO = gemm_op(as_recomputable(x_RD), self.weight)
        if self.bias is None:
            return y_RO
        bias = self.bias if self.bias_scale == 1.0 else self.bias * self.bias_scale
        if isinstance(counts, int):
            return (y_RO.unflatten(0, (-1, counts)) + bias[:, None]).flatten(0, 1)
        rows = y_RO.shape[0]
        # Rows of no expert (padding) get a zero bias of their own: their gradients may be anything.
        sizes = torch.cat([counts, rows - counts.sum(0, keepdim=True)])
        return y_RO + F.pad(bias, (0, 0, 0, 1)).repeat_interleave(sizes, dim=0, output_size=rows)


@dataclass(frozen=True, slots=True)
class _RecomputableWeightedActivation:
    """(inner, weight of each row) to the weighted activation."""

    kernels: MoEKernels
    name: str
    variant: GluVariant | None
    report_saved: Callable[[Tensors], Tensors]
    requantized_in_backward: bool = False

    def forward(self, *inputs: Tensor) -> tuple[Tensors, Tensors]:
        return (self.recompute(inputs),), self.report_saved(inputs)

    def backward(
        self, saved: Tensors, grads: MaybeTensors, *, recompute_output: bool
    ) -> tuple[MaybeTensors, Tensor | None]:
        (inner, weight), (grad,) = saved, grads
        assert grad is not None
        inner_grad, weight_grad, output = self.kernels.weighted_activation_backward(
            grad.contiguous(), inner, weight, self.name, self.variant, recompute_output=recompute_output
        )
        return (inner_grad, weight_grad), output

    def recompute(self, saved: Tensors) -> Tensor:
        inner, weight = saved
        return self.kernels.weighted_activation(inner, weight, self.name, self.variant)


class RoutedExperts(nn.Module):
    """down(act(up(x))) of every row's expert; for a gated activation gate and up are one GEMM, `gate_up`.

    The slot `kernels` holds the row kernels: permute, unpermute and the weighted activation.
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        inner: int,
        *,
        activation: str,
        bias: bool,
        glu_variant: GluVariant | None = None,
        grouped_gemm: bool = True,
    ) -> None:
        """`inner` is the width between the two GEMMs; without `grouped_gemm` experts run one after the other."""
        super().__init__()
        self.act = Activation(activation, glu_variant)
        self.kernels: MoEKernels = REFERENCE
        gated = activation in GATED_ACTIVATIONS
        self.first_linear_name = "gate_up" if gated else "up"
        self.fp8_linears = (self.first_linear_name, "down")
        first = GroupedLinear(num_experts, width, 2 * inner if gated else inner, bias=bias)
        self.add_module(self.first_linear_name, first)
        self.down = GroupedLinear(num_experts, inner, width, bias=bias)
        if not grouped_gemm:
            for linear in (first, self.down):
                linear.grouped_gemm = partial(GroupedGemm, looped=True)

    def kernel_slots(self) -> Mapping[str, str]:
        return {"kernels": "expert permutation"}

    @property
    def applies_router_weights(self) -> bool:
        """Whether the router's weights may be applied to the activation: a bias of the last GEMM would not be weighted."""
        return self.down.bias is None

    def forward(self, x_RD: Tensor, counts: ExpertCounts, weight_R: Tensor | None = None) -> Tensor:
        inner = self.get_submodule(self.first_linear_name)(x_RD, counts)
        if weight_R is None:
            return self.down(self.act(inner), counts)
        activation = _RecomputableWeightedActivation(
            self.kernels, self.act.name, self.act.variant, self.act.report_saved
        )
        (value,), handle = apply_recomputable(activation, inner, weight_R)
        return self.down(RecomputableOutput(value, handle), counts)
