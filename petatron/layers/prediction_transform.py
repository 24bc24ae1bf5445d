"""The transform before BERT's output head: a GEMM, an activation and a norm. D hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from petatron.kernels.activation import activation
from petatron.layers.linear import Linear
from petatron.layers.norm import NormSpec
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import REPLICATED, ParamSpec, linear_params, with_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionTransformSpec:
    norm: NormSpec
    activation: str
    bias: bool
    std: float

    def build(self) -> PredictionTransform:
        return PredictionTransform(self)

    def params(self) -> Mapping[str, ParamSpec]:
        width = self.norm.width
        dense = linear_params(width, width, REPLICATED, bias=self.bias, std=self.std)
        return with_prefix("dense", dense) | with_prefix("norm", self.norm.params())

    def saved_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes of the inputs of GEMM and activation, and of what the norm saves."""
        return 2 * shape.activation_bytes(shape.tokens, self.norm.width) + self.norm.saved_bytes(shape, shape.tokens)


class PredictionTransform(nn.Module):
    def __init__(self, spec: PredictionTransformSpec) -> None:
        super().__init__()
        self.activation = spec.activation
        self.dense = Linear(spec.norm.width, (spec.norm.width,), bias=spec.bias)
        self.norm = spec.norm.build()

    def forward(self, x_SBD: Tensor) -> Tensor:
        return self.norm(activation(self.dense(x_SBD), self.activation))
