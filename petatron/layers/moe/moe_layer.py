"""A mixture of experts in the place of the MLP: a router selects a few experts for each token.

    y = sum over the chosen experts of weight x expert(x)  [+ gate(x) x shared(x)]

The slot `dispatcher` takes tokens to their experts: on one device it only permutes them, `parallel/expert_parallel.py` fills it
with communication and may overlap the two halves of the shared expert with it. All else here is per token, so it does not
matter which tokens of the batch this rank has; the router's losses, which depend on all of them, are in `load_balancing.py`.
With a latent size the routed experts work in a narrower space, which saves most of the communication.

S sequence, B batch, D hidden, T = S x B tokens in memory order.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.kernels.moe.grouped_gemm import ExpertCounts
from petatron.kernels.moe.permute import MoEKernels, permute, permute_router_weights, unpermute
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.mlp import MLP, GatedMLP, build_mlp
from petatron.layers.moe.experts import RoutedExperts
from petatron.layers.moe.load_balancing import attach_aux_loss
from petatron.layers.moe.router import Router, Routing
from petatron.layers.ops.recompute_output import Recomputable, as_recomputable
from petatron.layers.token_layout import from_rows, is_batch_first, to_rows


class ExpertsFunction(Protocol):
    """Maps rows, sorted by local expert with a count for each, to the experts' outputs.

    Where it `applies_router_weights`, each row's router weight may be passed too. Rows are permuted with its `kernels`.
    """

    @property
    def kernels(self) -> MoEKernels: ...

    @property
    def applies_router_weights(self) -> bool: ...

    def __call__(self, x_RD: Tensor, counts: ExpertCounts, weight_R: Tensor | None = None, /) -> Tensor: ...


class SharedExpertHalves(Protocol):
    """The shared expert in two halves, which a dispatcher may overlap with communication: in this order, each once."""

    def first_half(self) -> None: ...

    def second_half(self) -> None: ...


class TokenDispatcher(Protocol):
    """Dispatches tokens [T, D] to their experts and returns the weighted sum of each token's expert outputs.

    `shared` may be computed during communication; the layer computes the halves that the dispatcher did not.
    """

    def __call__(
        self, x_TD: Tensor, routing: Routing, experts: ExpertsFunction, shared: SharedExpertHalves | None = None, /
    ) -> Tensor: ...


def dispatch_locally(
    x_TD: Tensor, routing: Routing, experts: ExpertsFunction, shared: SharedExpertHalves | None = None
) -> Tensor:
    """Permutes, runs the experts and unpermutes: all experts are on this device."""
    permutation, kernels = routing.permutation(), experts.kernels
    rows = permute(x_TD, permutation, kernels=kernels)
    if not experts.applies_router_weights:
        return unpermute(experts(rows, permutation.counts), routing.weights_TK, permutation, kernels=kernels)
    weight_R = permute_router_weights(routing.weights_TK, permutation)
    return unpermute(experts(rows, permutation.counts, weight_R), None, permutation, kernels=kernels)


class _SharedExpertRun:
    """One forward pass of the shared expert in two halves: first GEMM and activation, then second GEMM and gate."""

    __slots__ = ("_expert", "_intermediate", "_layer", "_output", "_x")

    def __init__(self, layer: MoELayer, expert: MLP | GatedMLP, x: Recomputable) -> None:
        self._layer, self._expert, self._x = layer, expert, x
        self._intermediate: Tensor | Recomputable | None = None
        self._output: Tensor | None = None

    def first_half(self) -> None:
        assert self._intermediate is None
        self._intermediate = (self._expert.intermediate if self._layer.shared_runs_in_halves else self._expert)(self._x)

    def second_half(self) -> None:
        assert self._intermediate is not None and self._output is None
        y = self._intermediate if isinstance(self._intermediate, Tensor) else self._expert.down(self._intermediate)
        gate = self._layer.shared_gate
        self._output = y if gate is None else gate(self._x).sigmoid() * y

    def output(self) -> Tensor:
        """Returns the shared expert's output; computes the halves that have not run yet."""
        if self._intermediate is None:
            self.first_half()
        if self._output is None:
            self.second_half()
        assert self._output is not None
        return self._output


class MoELayer(nn.Module):
    """Routed experts, and optionally a shared one for every token. `layer_index` keys the router statistics."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, *, layer_index: int) -> None:
        super().__init__()
        hidden, latent, shared = config.hidden_size, moe.moe_latent_size, moe.moe_shared_expert_intermediate_size
        self.layer_index = layer_index
        self.router = Router(hidden, moe)
        self.experts = RoutedExperts(config, moe, latent or hidden)
        self.latent_down = Linear(hidden, (latent,), bias=config.add_bias_linear) if latent else None
        self.latent_up = Linear(latent, (hidden,), bias=config.add_bias_linear) if latent else None
        self.shared = build_mlp(config, shared) if shared else None
        self.shared_gate = Linear(hidden, (1,), bias=False) if shared and moe.moe_shared_expert_gate else None
        self.shared_runs_in_halves = True
        """False where the shared expert is one recompute region: it then runs whole, in its first half."""
        self.dispatcher: TokenDispatcher = dispatch_locally

    def forward(self, x: Tensor | Recomputable, context: ForwardContext) -> Tensor:
        normal = as_recomputable(x)
        x_SBD = normal.value
        routing, aux_loss, statistics = self.router(x_SBD, with_loss=context.aux_loss_scale is not None)
        context.router_statistics[self.layer_index] = statistics
        inner = x_SBD if self.latent_down is None else self.latent_down(normal)
        batch_first = is_batch_first(x_SBD)
        shared = None if self.shared is None else _SharedExpertRun(self, self.shared, normal)
        y_TD = self.dispatcher(to_rows(inner, batch_first=batch_first), routing, self.experts, shared)
        y_SBD = from_rows(y_TD, x_SBD, batch_first=batch_first)
        if self.latent_up is not None:
            y_SBD = self.latent_up(y_SBD)
        if shared is not None:
            y_SBD = y_SBD + shared.output()
        if aux_loss is None or context.aux_loss_scale is None:
            return y_SBD
        return attach_aux_loss(y_SBD, aux_loss * context.aux_loss_scale.to(aux_loss.dtype))
