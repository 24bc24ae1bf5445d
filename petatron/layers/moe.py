"""A mixture of experts in the place of the MLP: each token goes through the few experts that a router picks for it.

    y = sum over the chosen experts of weight x expert(x)  [+ gate(x) x shared(x)]

Tokens reach their experts through the slot `dispatcher`, which on one device only sorts them; `parallel/expert.py` fills it with
communication. All else here works on each token alone, so it does not matter which tokens of the batch are on this device;
the router's losses, which look at all of them, are in `balance.py`. With a latent size the routed experts work in a narrower
space, which saves most of the communication.

S sequence, B batch, D hidden, T = S x B tokens in the order in which they lie in memory.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from petatron.config.schema import ModelConfig, MoEConfig
from petatron.kernels.grouped import Counts
from petatron.kernels.moe import RowKernels, combine, take, weight_of_rows
from petatron.layers.balance import attach
from petatron.layers.experts import RoutedExperts
from petatron.layers.linear import Linear
from petatron.layers.mlp import build_mlp
from petatron.layers.passing import Pass
from petatron.layers.remade import Remade, remade
from petatron.layers.router import Router, Routing
from petatron.layers.rows import batch_first, from_rows, to_rows


class RunExperts(Protocol):
    """Rows in the order of the experts held here, and how many each has, to what the experts make of them.

    Where it `takes_weights`, the router's weight of each row may be given too. Rows are made and summed with its `kernels`.
    """

    @property
    def kernels(self) -> RowKernels: ...

    @property
    def takes_weights(self) -> bool: ...

    def __call__(self, x_RD: Tensor, counts: Counts, weight_R: Tensor | None = None, /) -> Tensor: ...


class Dispatcher(Protocol):
    """Take tokens [T, D] to their experts, and bring back the weighted sum of what each token's experts make of it."""

    def __call__(self, x_TD: Tensor, routing: Routing, experts: RunExperts, /) -> Tensor: ...


def dispatch_here(x_TD: Tensor, routing: Routing, experts: RunExperts) -> Tensor:
    """All experts are on this device: sort, compute, put back."""
    arrangement, kernels = routing.arranged(), experts.kernels
    rows = take(x_TD, arrangement, kernels=kernels)
    if not experts.takes_weights:
        return combine(experts(rows, arrangement.counts), routing.weights_TK, arrangement, kernels=kernels)
    weight_R = weight_of_rows(routing.weights_TK, arrangement)
    return combine(experts(rows, arrangement.counts, weight_R), None, arrangement, kernels=kernels)


class MoE(nn.Module):
    """Routed experts, and a shared one that every token passes. `number` is the layer's, for its reports."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, *, number: int) -> None:
        super().__init__()
        hidden, latent, shared = config.hidden_size, moe.moe_latent_size, moe.moe_shared_expert_intermediate_size
        self.number = number
        self.router = Router(hidden, moe)
        self.experts = RoutedExperts(config, moe, latent or hidden)
        self.latent_down = Linear(hidden, (latent,), bias=config.add_bias_linear) if latent else None
        self.latent_up = Linear(latent, (hidden,), bias=config.add_bias_linear) if latent else None
        self.shared = build_mlp(config, shared) if shared else None
        self.shared_gate = Linear(hidden, (1,), bias=False) if shared and moe.moe_shared_expert_gate else None
        self.dispatcher: Dispatcher = dispatch_here

    def forward(self, x: Tensor | Remade, passing: Pass) -> Tensor:
        normal = remade(x)
        x_SBD = normal.value
        routing, extra_loss, report = self.router(x_SBD, with_loss=passing.extra_loss_scale is not None)
        passing.reports[self.number] = report
        inner = x_SBD if self.latent_down is None else self.latent_down(normal)
        by_batch = batch_first(x_SBD)
        y_TD = self.dispatcher(to_rows(inner, by_batch=by_batch), routing, self.experts)
        y_SBD = from_rows(y_TD, x_SBD, by_batch=by_batch)
        if self.latent_up is not None:
            y_SBD = self.latent_up(y_SBD)
        if self.shared is not None:
            together = self.shared(normal)
            if self.shared_gate is not None:
                together = self.shared_gate(normal).sigmoid() * together
            y_SBD = y_SBD + together
        if extra_loss is None or passing.extra_loss_scale is None:
            return y_SBD
        return attach(y_SBD, extra_loss * passing.extra_loss_scale.to(extra_loss.dtype))
