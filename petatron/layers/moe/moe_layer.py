"""The MoE layer, in the place of the MLP: a router selects a few experts for each token.

    y = sum over the chosen experts of weight x expert(x)  [+ gate(x) x shared(x)]

or expert(weight x x), for one expert per token, where the router's weights are applied to the input (Llama 4).

The slot `dispatcher` takes tokens to their experts: on one device it only permutes them; with expert parallelism it communicates
(`parallel/expert_parallel_token_dispatcher.py`) and may overlap the two halves of the shared expert with that. All else here is
per token, so it does not matter which tokens of the batch this rank has; the router's losses, which depend on all of them, are in
`load_balancing.py`. With a latent size the routed experts work in a narrower space, which saves most of the communication.

S sequence, B batch, D hidden, T = S x B tokens in memory order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from petatron.config.schema.model import MoEConfig
from petatron.kernels.moe.grouped_gemm import ExpertCounts
from petatron.kernels.moe.permute import MoEKernels, permute, permute_router_weights, unpermute
from petatron.kernels.size_limits import grouped_gemm_supports
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.mlp import MLP, MLPSpec, mlp_flops
from petatron.layers.moe.experts import RoutedExperts
from petatron.layers.moe.load_balancing import ReductionGroup, attach_aux_loss
from petatron.layers.moe.router import Router, Routing
from petatron.layers.ops.recompute_output import RecomputableOutput, as_recomputable
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import FULL, BackwardMoment, BranchModule, ChannelMixerSpec
from petatron.layers.spec.param_spec import REPLICATED, ParamSpec, linear_params, with_prefix
from petatron.layers.token_rows import from_rows, is_batch_first, to_rows
from petatron.sharding.initial_values import NormalValues
from petatron.sharding.shard_spec import Section, Shard

_ROUTER_BYTES = {None: 0, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec(ChannelMixerSpec):
    """Routed experts of inner `width`, in a space of `latent_size` if there is one, and a shared one.

    routing: the settings of the router and of token dispatch.
    """

    region = "moe"
    inner_regions = ("shared_experts",)

    num_experts: int
    latent_size: int | None
    shared: MLPSpec | None
    shared_gate: bool
    routing: MoEConfig

    @property
    def expert_hidden_size(self) -> int:
        """The width of an expert's input and output."""
        return self.latent_size or self.hidden_size

    @property
    def decode_is_capturable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether grouped GEMMs run all experts, and no choice is dropped: the host need not know how many rows an expert has."""
        routing = self.routing
        supported = grouped_gemm_supports(self.expert_hidden_size, self.width)
        return routing.moe_grouped_gemm and routing.moe_expert_capacity_factor is None and supported

    def batch_dependence(self) -> str | None:
        routing = self.routing
        variants = {
            "a capacity of experts, which drops tokens": routing.moe_expert_capacity_factor is not None,
            "noise on the router's input": bool(routing.moe_input_jitter_eps),
            "balancing of choices within a batch (sinkhorn)": routing.moe_router_load_balancing_type == "sinkhorn",
            "random choices of experts": routing.moe_router_force_load_balancing,
        }
        return next((name for name, has in variants.items() if has), None)

    def build(self, layer_index: int) -> MoELayer:
        return MoELayer(self, layer_index=layer_index)

    def params(self) -> Mapping[str, ParamSpec]:
        hidden, std = self.hidden_size, self.std
        router = ParamSpec(shape=(self.num_experts, hidden), init=NormalValues(std), weight_decay=True, is_gemm=True)
        params = {"router.weight": router}
        if self.routing.moe_router_linear_bias:
            params["router.bias"] = ParamSpec(shape=(self.num_experts,))
        params |= with_prefix("experts", self._expert_params())
        if self.latent_size is not None:
            down = linear_params(hidden, self.latent_size, REPLICATED, bias=self.bias, std=std)
            up = linear_params(self.latent_size, hidden, REPLICATED, bias=self.bias, std=std)
            params |= with_prefix("latent_down", down) | with_prefix("latent_up", up)
        if self.shared is not None:
            params |= with_prefix("shared", self.shared.params())
        if self.shared_gate:
            params["shared_gate.weight"] = replace(router, shape=(1, hidden))
        return params

    def _expert_params(self) -> dict[str, ParamSpec]:
        experts, outer, inner = self.num_experts, self.expert_hidden_size, self.width
        active = Fraction(self.routing.moe_router_topk, experts)
        sections = tuple(Section(name, inner, inner) for name in ("gate", "up")) if self.gated else ()
        first = Shard(ep=0, tp=1, sections=sections)
        params: dict[str, ParamSpec] = {}
        for name, rows, columns, std, shard in (
            ("gate_up" if self.gated else "up", inner * (2 if self.gated else 1), outer, self.std, first),
            ("down", outer, inner, self.out_std, Shard(ep=0, tp=2)),
        ):
            params[f"{name}.weight"] = ParamSpec(
                shape=(experts, rows, columns),
                shard=shard,
                init=NormalValues(std),
                role="hidden_matrix",
                weight_decay=True,
                is_gemm=True,
                active=active,
            )
            if self.bias:
                params[f"{name}.bias"] = ParamSpec(shape=(experts, rows), shard=shard, active=active)
        return params

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        """Returns the bytes for an even load, without the few numbers per token and choice that routing saves."""
        if self.region in recomputed:
            return 0
        rows, width = self._routed_rows(shape), self.expert_hidden_size
        saved = shape.activation_bytes(rows, width) * (1 if self._applies_router_weights(shape) else 2)
        saved += shape.activation_bytes(rows, (2 if self.gated else 1) * (self.width // shape.etp))
        saved += shape.activation_bytes(shape.tokens, self.latent_size or 0)
        if self._router_casts_input(shape):
            tensors = 2 if self.routing.moe_input_jitter_eps else 1
            saved += tensors * shape.tokens * self.hidden_size * self._router_element_bytes(shape)
        if self.shared is None:
            return saved
        saved += shape.activation_bytes(shape.tokens, self.hidden_size) if self.shared_gate else 0
        return saved + (0 if "shared_experts" in recomputed else self.shared.saved_bytes(shape, ()))

    def region_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> Mapping[str, int]:
        total = self.saved_bytes(shape, recomputed)
        if self.region in recomputed:
            return {}
        rows = self._routed_rows(shape)
        first = shape.activation_bytes(rows, self.expert_hidden_size)
        activation = shape.activation_bytes(rows, (2 if self.gated else 1) * (self.width // shape.etp))
        is_shared_saved = self.shared is not None and "shared_experts" not in recomputed
        shared = self.shared.saved_bytes(shape, ()) if self.shared is not None and is_shared_saved else 0
        rest = total - first - activation - shared
        rest += 0 if "layernorm" in recomputed else self.saved_input_bytes(shape, recomputed)
        return {"moe": rest, "expert_fc1": first, "moe_act": activation, "shared_experts": shared}

    def saved_input_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        """The router saves its input, if that is not cast."""
        if self.region in recomputed or self._router_casts_input(shape):
            return 0
        return shape.activation_bytes(shape.tokens, self.hidden_size)

    def regathered_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        """Only the shared expert gathers its input."""
        gathers = self.shared is not None and not {self.region, "shared_experts", FULL}.isdisjoint(recomputed)
        if not gathers or not shape.sequence_parallel or shape.fp8_recipe is not None:
            return 0
        return shape.activation_bytes(shape.gathered_tokens, self.hidden_size)

    def backward_moments(self, shape: ActivationShape) -> Sequence[BackwardMoment]:
        """The activation's backward, and the first weight's gradient, which exists once in the weights' precision."""
        rows, inner, first = self._routed_rows(shape), self.width // shape.etp, 2 if self.gated else 1
        stream = self.stream_grad_bytes(shape)
        activation = stream + shape.activation_bytes(rows, self.expert_hidden_size + (2 + first) * inner)
        weight = self.num_experts // shape.ep * first * inner * self.expert_hidden_size * shape.element_bytes
        weight_grad = stream + weight + shape.activation_bytes(rows, self.expert_hidden_size + first * inner)
        return [BackwardMoment(activation, 1 / 3 if self.gated else 1 / 2), BackwardMoment(weight_grad, 1.0)]

    def recompute_flops(self, shape: ActivationShape, region: str) -> float:
        if region != "shared_experts":
            return self.norm_flops(shape) + self._flops(shape)[0]
        return 0.0 if self.shared is None else self.shared.recompute_flops(shape, self.shared.region)

    def forward_flops(self, shape: ActivationShape) -> float:
        return self.norm_flops(shape) + sum(self._flops(shape))

    def _flops(self, shape: ActivationShape) -> tuple[float, float]:
        """Returns the operations up to the last tensor that is saved, and those of a GEMM after it."""
        first, between, last = mlp_flops(
            self._routed_rows(shape), width=self.expert_hidden_size, inner=self.width // shape.etp, gated=self.gated
        )
        repeated = 2.0 * shape.tokens * self.hidden_size * self.num_experts + first + between
        if self._applies_router_weights(shape) and not self.latent_size and self.shared is None:
            return repeated, last
        repeated += last
        if self.latent_size:
            way_out = 1 if self.shared is not None else 0  # the last GEMM, unless a shared expert follows
            repeated += (1 + way_out) * 2.0 * shape.tokens * self.hidden_size * self.latent_size
        if self.shared is None:
            return repeated, 0.0
        first, between, last = self.shared.gemm_flops(shape)
        repeats_last = self.shared_gate or shape.fp8_recipe is not None
        return repeated + first + between + (last if repeats_last else 0.0), 0.0

    def _routed_rows(self, shape: ActivationShape) -> int:
        return shape.tokens * self.routing.moe_router_topk * shape.etp

    def _applies_router_weights(self, shape: ActivationShape) -> bool:
        """Whether experts apply the router's weights: these are local and there is no bias. Else the experts' outputs are saved."""
        weights_are_local = shape.ep * shape.etp == 1 or self.routing.moe_token_dispatcher_type == "allgather"
        return weights_are_local and not self.bias

    def _router_casts_input(self, shape: ActivationShape) -> bool:
        """Whether the router's input is a tensor of its own, instead of the norm's output."""
        return bool(self.routing.moe_input_jitter_eps) or self._router_element_bytes(shape) > shape.element_bytes

    def _router_element_bytes(self, shape: ActivationShape) -> int:
        return max(shape.element_bytes, _ROUTER_BYTES[self.routing.moe_router_dtype])


class ExpertsFunction(Protocol):
    """Maps rows, sorted by local expert with a count for each, to the experts' outputs.

    Where it `applies_router_weights`, each row's router weight may be passed too. Rows are permuted with its `kernels`.
    """

    @property
    def kernels(self) -> MoEKernels: ...

    @property
    def applies_router_weights(self) -> bool: ...

    def __call__(self, x_RD: Tensor, counts: ExpertCounts, weight_R: Tensor | None = None, /) -> Tensor: ...


class TokenDispatcher(Protocol):
    """Dispatches tokens [T, D] to their experts and returns the weighted sum of each token's expert outputs.

    `shared` may be computed during communication; the layer computes the halves that the dispatcher did not.
    """

    def __call__(
        self, x_TD: Tensor, routing: Routing, experts: ExpertsFunction, shared: SharedExpertRun | None = None, /
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ExpertParallelSlots:
    """What expert parallelism sets; `adds_bias` is true on one of the ranks whose partial outputs of an expert are summed."""

    dispatcher: TokenDispatcher
    sequence_group: ReductionGroup
    stage_group: ReductionGroup
    adds_bias: bool


@runtime_checkable
class RoutesTokens(Protocol):
    """A branch that sends tokens to experts: what expert parallelism and router statistics need of it.

    Methods only: since Python 3.12 a check at run time looks for members in the class, where submodules are not.
    """

    def indexed_router(self) -> tuple[int, Router]:
        """Returns the index of the layer, and its router."""
        ...

    def set_expert_parallel(self, slots: ExpertParallelSlots) -> None: ...


def dispatch_locally(
    x_TD: Tensor, routing: Routing, experts: ExpertsFunction, shared: SharedExpertRun | None = None
) -> Tensor:
    """Permutes, runs the experts and unpermutes: all experts are on this device."""
    permutation, kernels = routing.permutation(), experts.kernels
    rows = permute(x_TD, permutation, kernels=kernels)
    if not experts.applies_router_weights:
        return unpermute(experts(rows, permutation.counts), routing.weights_TK, permutation, kernels=kernels)
    weight_R = permute_router_weights(routing.weights_TK, permutation)
    return unpermute(experts(rows, permutation.counts, weight_R), None, permutation, kernels=kernels)


class SharedExpertRun:
    """One forward pass of the shared expert in two halves: first GEMM and activation, then second GEMM and gate.

    A dispatcher may overlap them with communication: in this order, each once.
    """

    __slots__ = ("_expert", "_intermediate", "_layer", "_output", "_x")

    def __init__(self, layer: MoELayer, expert: MLP, x: RecomputableOutput) -> None:
        self._layer, self._expert, self._x = layer, expert, x
        self._intermediate: Tensor | RecomputableOutput | None = None
        self._output: Tensor | None = None

    def first_half(self) -> None:
        assert self._intermediate is None
        if self._layer.shared_runs_in_halves:
            self._intermediate = self._expert.intermediate(self._x).apply()  # now, beside communication
        else:
            self._intermediate = self._expert(self._x)

    def second_half(self) -> None:
        assert self._intermediate is not None and self._output is None
        y = self._intermediate if isinstance(self._intermediate, Tensor) else self._expert.down(self._intermediate)
        gate = self._layer.shared_gate
        self._output = y if gate is None else self._layer.router.functions.sigmoid(gate(self._x)) * y

    def output(self) -> Tensor:
        """Returns the shared expert's output; computes the halves that have not run yet."""
        if self._intermediate is None:
            self.first_half()
        if self._output is None:
            self.second_half()
        assert self._output is not None
        return self._output


class MoELayer(BranchModule):
    """Routed experts, and optionally a shared one for every token. `layer_index` keys the router statistics."""

    saves_input = True

    def __init__(self, spec: MoESpec, *, layer_index: int) -> None:
        super().__init__()
        hidden, latent = spec.hidden_size, spec.latent_size
        self.layer_index = layer_index
        self.router = Router(hidden, spec.num_experts, spec.routing)
        self.experts = RoutedExperts(
            spec.num_experts,
            spec.expert_hidden_size,
            spec.width,
            activation=spec.activation,
            bias=spec.bias,
            glu_variant=spec.glu_variant,
            grouped_gemm=spec.routing.moe_grouped_gemm,
        )
        self.latent_down = Linear(hidden, (latent,), bias=spec.bias) if latent else None
        self.latent_up = Linear(latent, (hidden,), bias=spec.bias) if latent else None
        self.shared = None if spec.shared is None else spec.shared.build(layer_index)
        self.shared_gate = Linear(hidden, (1,), bias=False) if spec.shared_gate else None
        self.applies_weights_to_input = spec.routing.moe_apply_probs_on_input
        self.shared_runs_in_halves = True
        """False where the shared expert is one recompute region: it then runs whole, in its first half."""
        self.dispatcher: TokenDispatcher = dispatch_locally

    def recompute_regions(self) -> Mapping[str, nn.Module]:
        return ({} if self.shared is None else {"shared_experts": self.shared}) | {"moe": self}

    def offload_regions(self) -> Mapping[str, Sequence[nn.Module]]:
        regions: dict[str, Sequence[nn.Module]] = {
            "moe": (self,),
            "expert_fc1": (self.experts.get_submodule(self.experts.first_linear_name),),
            "moe_act": (self.experts.act,),
        }
        return regions if self.shared is None else regions | {"shared_experts": self.shared.offload_regions()["mlp"]}

    def region_is_recomputed(self, name: str) -> None:
        if name == "shared_experts":
            self.shared_runs_in_halves = False

    def indexed_router(self) -> tuple[int, Router]:
        return self.layer_index, self.router

    def set_expert_parallel(self, slots: ExpertParallelSlots) -> None:
        self.dispatcher = slots.dispatcher
        self.router.sequence_group, self.router.stage_group = slots.sequence_group, slots.stage_group
        self.experts.down.bias_scale = 1.0 if slots.adds_bias else 0.0

    def forward(self, x: Tensor | RecomputableOutput, context: ForwardContext) -> Tensor:
        normed = as_recomputable(x)
        x_SBD = normed.value
        routing, aux_loss, statistics = self.router(x_SBD, with_loss=context.aux_loss_scale is not None)
        context.router_statistics[self.layer_index] = statistics
        inner = x_SBD if self.latent_down is None else self.latent_down(normed)
        batch_first = is_batch_first(x_SBD)
        inner_TD = to_rows(inner, batch_first=batch_first)
        if self.applies_weights_to_input:  # one expert per token: the weight of its only choice
            weights_T1 = routing.weights_TK
            inner_TD = (inner_TD * weights_T1).to(inner_TD.dtype)
            routing = replace(routing, weights_TK=torch.ones_like(weights_T1))
        shared = None if self.shared is None else SharedExpertRun(self, self.shared, normed)
        y_SBD = from_rows(self.dispatcher(inner_TD, routing, self.experts, shared), x_SBD, batch_first=batch_first)
        if self.latent_up is not None:
            y_SBD = self.latent_up(y_SBD)
        if shared is not None:
            y_SBD = y_SBD + shared.output()
        if aux_loss is None or context.aux_loss_scale is None:
            return y_SBD
        return attach_aux_loss(y_SBD, aux_loss * context.aux_loss_scale.to(aux_loss.dtype))
