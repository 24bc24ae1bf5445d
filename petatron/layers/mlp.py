"""The MLP of a transformer layer, plain or gated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from petatron.config.schema.sections.mlp import GATED_ACTIVATIONS
from petatron.kernels import activation as reference
from petatron.kernels.activation import GluVariant
from petatron.kernels.fp8.amax import attach_amax, new_amax
from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.ops.recompute_output import (
    DeferredOutput,
    MaybeTensors,
    RecomputableOutput,
    SavedTensorsHook,
    Tensors,
)
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import ELEMENTWISE_FLOPS, BackwardMoment, BranchModule, ChannelMixerSpec
from petatron.layers.spec.param_spec import ParamSpec, linear_params, with_prefix
from petatron.layers.token_rows import from_rows, rows_in_memory_order, to_rows
from petatron.sharding.shard_spec import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpec(ChannelMixerSpec):
    """An MLP."""

    region = "mlp"

    def batch_dependence(self) -> str | None:
        return None

    def build(self, layer_index: int) -> MLP:
        return GatedMLP(self) if self.gated else MLP(self)

    def params(self) -> Mapping[str, ParamSpec]:
        rows = {"gate": self.width, "up": self.width} if self.gated else self.width
        first = linear_params(self.hidden_size, rows, Shard(tp=0), bias=self.bias, std=self.std)
        down = linear_params(self.width, self.hidden_size, Shard(tp=1), bias=self.bias, std=self.out_std)
        return with_prefix("gate_up" if self.gated else "up", first) | with_prefix("down", down)

    def saved_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> int:
        if self.region in recomputed:
            return 0
        width = self.width // shape.tp
        first = shape.activation_bytes(shape.gathered_tokens, (2 if self.gated else 1) * width)
        return first + shape.fp8_column_input_bytes(self.hidden_size) + shape.fp8_input_bytes(width)

    def region_bytes(self, shape: ActivationShape, recomputed: Collection[str]) -> Mapping[str, int]:
        return {self.region: self.saved_bytes(shape, recomputed)}

    def backward_moments(self, shape: ActivationShape) -> Sequence[BackwardMoment]:
        """The activation's backward: gradients of its output and input, and the output, if the last GEMM's gradient needs it."""
        inner = (2 if self.gated else 1) + (2 if shape.fp8_recipe is None else 1)
        workspace = shape.activation_bytes(shape.gathered_tokens, inner * (self.width // shape.tp))
        return [BackwardMoment(self.stream_grad_bytes(shape) + workspace, 1 / 3 if self.gated else 1 / 2)]

    def recompute_flops(self, shape: ActivationShape, region: str) -> float:
        """The last GEMM is not repeated, since its input is the last tensor saved; in FP8 the quantized input comes after it."""
        *before, last = self.gemm_flops(shape)
        return self.norm_flops(shape) + sum(before) + (0.0 if shape.fp8_recipe is None else last)

    def forward_flops(self, shape: ActivationShape) -> float:
        return self.norm_flops(shape) + sum(self.gemm_flops(shape))

    def gemm_flops(self, shape: ActivationShape) -> tuple[float, float, float]:
        return mlp_flops(shape.gathered_tokens, width=self.hidden_size, inner=self.width // shape.tp, gated=self.gated)


def mlp_flops(rows: int, *, width: int, inner: int, gated: bool) -> tuple[float, float, float]:
    """Returns the operations of an MLP's first GEMM, of its activation and of its second GEMM."""
    second = 2.0 * rows * width * inner
    return second * (2 if gated else 1), float(ELEMENTWISE_FLOPS * rows * inner), second


class ActivationKernels(Protocol):
    """See `kernels/activation.py`."""

    activation: Callable[..., Tensor]
    activation_backward: Callable[..., tuple[Tensor, Tensor | None]]
    gated_activation: Callable[..., Tensor]
    gated_activation_backward: Callable[..., tuple[Tensor, Tensor | None]]


class _RecomputableActivation:
    """The activation function of a module, with that module's kernels."""

    requantized_in_backward = False

    __slots__ = ("_module",)

    def __init__(self, module: Activation) -> None:
        self._module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensors, Tensors]:
        return (self.recompute(inputs),), self._module.report_saved(inputs)

    def backward(
        self, saved: Tensors, grads: MaybeTensors, *, recompute_output: bool
    ) -> tuple[MaybeTensors, Tensor | None]:
        module, (x,), (grad,) = self._module, saved, grads
        assert grad is not None
        rows, is_rows, batch_first = x, x.dim() == 2, False
        if not is_rows:
            rows, batch_first = rows_in_memory_order(x)
            grad = to_rows(grad, batch_first=batch_first)
        if module.gated:
            amax = new_amax(x) if module.attaches_amax and is_rows else None
            x_grad, output = module.kernels.gated_activation_backward(
                grad, rows, module.name, module.variant, recompute_output=recompute_output, amax=amax
            )
            if amax is not None:
                attach_amax(x_grad, amax)
        else:
            x_grad, output = module.kernels.activation_backward(
                grad, rows, module.name, recompute_output=recompute_output
            )
        if not is_rows:
            x_grad = from_rows(x_grad, x, batch_first=batch_first)
            output = None if output is None else from_rows(output, x, batch_first=batch_first)
        return (x_grad,), output

    def recompute(self, saved: Tensors) -> Tensor:
        (x,) = saved
        if x.dim() == 2:
            return self._of_rows(x, attaches_amax=self._module.attaches_amax)
        rows, batch_first = rows_in_memory_order(x)
        return from_rows(self._of_rows(rows, attaches_amax=False), x, batch_first=batch_first)

    def _of_rows(self, rows: Tensor, *, attaches_amax: bool) -> Tensor:
        """`attaches_amax`: not to rows that become tokens, a tensor to which it is not attached."""
        module = self._module
        if not module.gated:
            return module.kernels.activation(rows, module.name)
        amax = new_amax(rows) if attaches_amax else None
        act = module.kernels.gated_activation(rows, module.name, module.variant, amax=amax)
        if amax is not None:
            attach_amax(act, amax)
        return act


class Activation(nn.Module, SavedTensorsHook):
    """The activation function of an MLP, by name; a gated one halves the width.

    attaches_amax: whether a gated one attaches amax to its output and to its input's gradient, for FP8 casts (`kernels/fp8/amax.py`).
    """

    def __init__(self, name: str, variant: GluVariant | None = None) -> None:
        super().__init__()
        self.name, self.variant, self.gated = name, variant, name in GATED_ACTIVATIONS
        self.kernels: ActivationKernels = reference
        self.attaches_amax = False
        self._function = _RecomputableActivation(self)

    def kernel_slots(self) -> Mapping[str, str]:
        gated = "gated activation" if self.variant is None else "gated activation variant"
        return {"kernels": gated if self.gated else "plain activation"}

    def forward(self, x: Tensor) -> RecomputableOutput:
        return DeferredOutput(self._function, x)


class MLP(BranchModule):
    """down(act(up(x)))."""

    fp8_linears = ("up", "down")
    takes_rows = input_feeds_one_gemm = True

    def __init__(self, spec: MLPSpec) -> None:
        super().__init__()
        self.act = Activation(spec.activation, spec.glu_variant)
        self.add_first_linear(spec)
        self.down = Linear(spec.width, (spec.hidden_size,), bias=spec.bias)

    def add_first_linear(self, spec: MLPSpec) -> None:
        self.up = Linear(spec.hidden_size, (spec.width,), bias=spec.bias)

    def recompute_regions(self) -> Mapping[str, nn.Module]:
        return {"mlp": self}

    def offload_regions(self) -> Mapping[str, Sequence[nn.Module]]:
        return {"mlp": (self.get_submodule(self.fp8_linears[0]), self.act, self.down)}

    def forward(self, x_SBD: Tensor | RecomputableOutput, context: ForwardContext | None = None) -> Tensor:
        return self.down(self.intermediate(x_SBD))

    def intermediate(self, x_SBD: Tensor | RecomputableOutput) -> RecomputableOutput:
        """Returns the input of the last GEMM, whose activation that GEMM may apply."""
        return self.act(self.up(x_SBD))


class GatedMLP(MLP):
    """down(act(gate(x)) * up(x)); gate and up are one GEMM, stored as two logical tensors."""

    fp8_linears = ("gate_up", "down")

    def add_first_linear(self, spec: MLPSpec) -> None:
        self.gate_up = Linear(spec.hidden_size, (spec.width, spec.width), bias=spec.bias)

    def intermediate(self, x_SBD: Tensor | RecomputableOutput) -> RecomputableOutput:
        return self.act(self.gate_up(x_SBD))
