"""The feed-forward half of a block, plain or gated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from petatron.config.schema.model import GATED_ACTIVATIONS, ModelConfig
from petatron.kernels import activation as reference
from petatron.layers.forward_context import Pass
from petatron.layers.linear import Linear
from petatron.layers.ops.recompute_output import MaybeTensors, Remade, Tensors, make
from petatron.layers.token_layout import batch_first, from_rows, to_rows


class ActivationKernels(Protocol):
    """`kernels/activation.py` or a faster twin."""

    def plain(self, x_RF: Tensor, name: str) -> Tensor: ...

    def plain_backward(
        self, grad_RF: Tensor, x_RF: Tensor, name: str, *, again: bool
    ) -> tuple[Tensor, Tensor | None]: ...

    def gated(self, gate_up_RG: Tensor, name: str) -> Tensor: ...

    def gated_backward(
        self, grad_RF: Tensor, gate_up_RG: Tensor, name: str, *, again: bool
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True, slots=True)
class _MakeActivation:
    kernels: ActivationKernels
    name: str

    @property
    def _gated(self) -> bool:
        return self.name in GATED_ACTIVATIONS

    def forward(self, *inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        (x,) = inputs
        assert x is not None
        return (self.again((x,)),), (x,)

    def backward(self, kept: Tensors, grads: MaybeTensors, *, again: bool) -> tuple[MaybeTensors, Tensor | None]:
        (x,), (grad,) = kept, grads
        assert grad is not None
        by_batch = batch_first(x)
        rows, grad_rows = to_rows(x, by_batch=by_batch), to_rows(grad, by_batch=by_batch)
        back = self.kernels.gated_backward if self._gated else self.kernels.plain_backward
        x_grad, made = back(grad_rows, rows, self.name, again=again)
        value = None if made is None else from_rows(made, x, by_batch=by_batch)
        return (from_rows(x_grad, x, by_batch=by_batch),), value

    def again(self, kept: Tensors) -> Tensor:
        (x,) = kept
        by_batch = batch_first(x)
        rows = to_rows(x, by_batch=by_batch)
        made = self.kernels.gated(rows, self.name) if self._gated else self.kernels.plain(rows, self.name)
        return from_rows(made, x, by_batch=by_batch)


class Activation(nn.Module):
    """The function between an MLP's products, by name; a gated one halves the width."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.kernels: ActivationKernels = reference

    def forward(self, x: Tensor) -> Remade:
        (value,), source = make(_MakeActivation(self.kernels, self.name), x)
        return Remade(value, source)


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.act = Activation(config.activation)
        self.up = Linear(config.hidden_size, (width,), bias=config.add_bias_linear)
        self.down = Linear(width, (config.hidden_size,), bias=config.add_bias_linear)

    def forward(self, x_SBD: Tensor | Remade, passing: Pass | None = None) -> Tensor:
        return self.down(self.inner(x_SBD))

    def inner(self, x_SBD: Tensor | Remade) -> Remade:
        """What goes into the last GEMM."""
        return self.act(self.up(x_SBD))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one product, stored as two logical tensors."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.act = Activation(config.activation)
        self.gate_up = Linear(config.hidden_size, (width, width), bias=config.add_bias_linear)
        self.down = Linear(width, (config.hidden_size,), bias=config.add_bias_linear)

    def forward(self, x_SBD: Tensor | Remade, passing: Pass | None = None) -> Tensor:
        return self.down(self.inner(x_SBD))

    def inner(self, x_SBD: Tensor | Remade) -> Remade:
        """What goes into the last GEMM."""
        return self.act(self.gate_up(x_SBD))


def build_mlp(config: ModelConfig, width: int | None = None) -> MLP | GatedMLP:
    """The dense MLP of a config, or one of another inner width."""
    width = width or config.ffn_hidden_size
    assert width is not None
    return GatedMLP(config, width) if config.activation in GATED_ACTIVATIONS else MLP(config, width)
