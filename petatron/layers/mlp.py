"""The MLP of a transformer layer, plain or gated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from petatron.config.schema.model import GATED_ACTIVATIONS, ModelConfig
from petatron.kernels import activation as reference
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.ops.recompute_output import MaybeTensors, Recomputable, Tensors, apply_recomputable
from petatron.layers.token_layout import from_rows, is_batch_first, to_rows


class ActivationKernels(Protocol):
    """The interface of `kernels/activation.py` and its faster implementations."""

    def activation(self, x_RF: Tensor, name: str) -> Tensor: ...

    def activation_backward(
        self, grad_RF: Tensor, x_RF: Tensor, name: str, *, recompute_output: bool
    ) -> tuple[Tensor, Tensor | None]: ...

    def gated_activation(self, gate_up_RG: Tensor, name: str) -> Tensor: ...

    def gated_activation_backward(
        self, grad_RF: Tensor, gate_up_RG: Tensor, name: str, *, recompute_output: bool
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True, slots=True)
class _RecomputableActivation:
    kernels: ActivationKernels
    name: str

    @property
    def _gated(self) -> bool:
        return self.name in GATED_ACTIVATIONS

    def forward(self, *inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        (x,) = inputs
        assert x is not None
        return (self.recompute((x,)),), (x,)

    def backward(
        self, saved: Tensors, grads: MaybeTensors, *, recompute_output: bool
    ) -> tuple[MaybeTensors, Tensor | None]:
        (x,), (grad,) = saved, grads
        assert grad is not None
        batch_first = is_batch_first(x)
        rows, grad_rows = to_rows(x, batch_first=batch_first), to_rows(grad, batch_first=batch_first)
        back = self.kernels.gated_activation_backward if self._gated else self.kernels.activation_backward
        x_grad, output = back(grad_rows, rows, self.name, recompute_output=recompute_output)
        value = None if output is None else from_rows(output, x, batch_first=batch_first)
        return (from_rows(x_grad, x, batch_first=batch_first),), value

    def recompute(self, saved: Tensors) -> Tensor:
        (x,) = saved
        batch_first = is_batch_first(x)
        rows = to_rows(x, batch_first=batch_first)
        output = (
            self.kernels.gated_activation(rows, self.name) if self._gated else self.kernels.activation(rows, self.name)
        )
        return from_rows(output, x, batch_first=batch_first)


class Activation(nn.Module):
    """The activation function of an MLP, by name; a gated one halves the width."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.kernels: ActivationKernels = reference

    def forward(self, x: Tensor) -> Recomputable:
        (value,), handle = apply_recomputable(_RecomputableActivation(self.kernels, self.name), x)
        return Recomputable(value, handle)


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.act = Activation(config.activation)
        self.up = Linear(config.hidden_size, (width,), bias=config.add_bias_linear)
        self.down = Linear(width, (config.hidden_size,), bias=config.add_bias_linear)

    def forward(self, x_SBD: Tensor | Recomputable, context: ForwardContext | None = None) -> Tensor:
        return self.down(self.intermediate(x_SBD))

    def intermediate(self, x_SBD: Tensor | Recomputable) -> Recomputable:
        """Returns the input of the last GEMM."""
        return self.act(self.up(x_SBD))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one GEMM, stored as two logical tensors."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.act = Activation(config.activation)
        self.gate_up = Linear(config.hidden_size, (width, width), bias=config.add_bias_linear)
        self.down = Linear(width, (config.hidden_size,), bias=config.add_bias_linear)

    def forward(self, x_SBD: Tensor | Recomputable, context: ForwardContext | None = None) -> Tensor:
        return self.down(self.intermediate(x_SBD))

    def intermediate(self, x_SBD: Tensor | Recomputable) -> Recomputable:
        """Returns the input of the last GEMM."""
        return self.act(self.gate_up(x_SBD))


def build_mlp(config: ModelConfig, width: int | None = None) -> MLP | GatedMLP:
    """Builds the dense MLP of a config, or one of another inner width."""
    width = width or config.ffn_hidden_size
    assert width is not None
    return GatedMLP(config, width) if config.activation in GATED_ACTIVATIONS else MLP(config, width)
