"""Multi-token prediction (DeepSeek-V3): layers after the last one, each of which predicts one token further ahead.

With h the output of the model after its final norm, depth 0, and t the tokens, depth k = 1, 2, ... of position i computes

    h^k_i = norm(layer(W [norm(E t_{i+k}) ; norm(h^{k-1}_i)]))          and its loss is that of the token t_{i+k+1}

with the embedding E and the output head of the model itself. So a position sees the true tokens up to k ahead of it, and positions at the
end of a sequence, for which there are none, have no loss. Norms, W and the layer are a depth's own; the layer is of the kind of the
model's last one.

Tokens shifted by k are arrays of the batch, made of whole sequences before context parallelism splits them
(`models/mtp_and_longrope_arrays.py`). Their embeddings come from where the embedding is, the first pipeline stage, and travel to the last
one with the activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import REPLICATED, ParamSpec, linear_params, with_prefix
from petatron.layers.transformer_layer import LayerSpec, Residual, TransformerLayer


def embedding_name(depth: int) -> str:
    """Returns the name of the embeddings of the tokens `depth` positions ahead, between stages and in the forward context.

    >>> embedding_name(1)
    'mtp 1 embedding'
    """
    return f"mtp {depth} embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayerSpec(LayerSpec):
    """A depth of multi-token prediction: the branches of a layer, and what is around them.

    depth: how many tokens ahead the embedding is. std: of the initial weights of the projection.
    """

    depth: int
    std: float

    @classmethod
    def like(cls, layer: LayerSpec, *, depth: int, std: float) -> MtpLayerSpec:
        """Makes a depth whose layer is of a kind that the model has."""
        shared: dict[str, Any] = {field.name: getattr(layer, field.name) for field in fields(LayerSpec)}
        return cls(**shared, depth=depth, std=std)

    def build(self, layer_index: int) -> MtpLayer:
        return MtpLayer(self, layer_index=layer_index)

    def params(self) -> Mapping[str, ParamSpec]:
        width = self.norm.width
        norms: dict[str, ParamSpec] = {}
        for name in ("embedding_norm", "hidden_norm", "norm"):
            norms |= with_prefix(name, self.norm.params())
        projection = linear_params(2 * width, width, REPLICATED, bias=False, std=self.std)
        return norms | with_prefix("projection", projection) | dict(LayerSpec.params(self))

    def extra_saved_bytes(self, shape: ActivationShape) -> int:
        """Inputs and statistics of its three norms, and the projection's input."""
        norms = 3 * self.norm.saved_bytes(shape, shape.tokens)
        return norms + shape.activation_bytes(shape.tokens, 2 * self.norm.width)


class MtpLayer(TransformerLayer):
    """norm(layer(projection([norm(embedding) ; norm(x)]))); returns the sum of the residual stream, normed."""

    def __init__(self, spec: MtpLayerSpec, *, layer_index: int = 0) -> None:
        super().__init__(spec, layer_index=layer_index)
        self.takes_rows = False  # it takes embeddings of tokens ahead, [S, B, D]
        width = spec.norm.width
        self.depth = spec.depth
        self.embedding_norm, self.hidden_norm = spec.norm.build(), spec.norm.build()
        self.projection = Linear(2 * width, (width,), bias=False)
        self.norm = spec.norm.build()

    def forward(
        self, x_SBD: Tensor, context: ForwardContext, residual: Residual | None = None
    ) -> tuple[Tensor, Residual | None]:
        assert residual is None, "the depth before returns the whole stream"
        embedding_SBD = context.tensors[embedding_name(self.depth)]
        both = torch.cat((self.embedding_norm(embedding_SBD), self.hidden_norm(x_SBD)), dim=-1)
        y_SBD, rest = super().forward(self.projection(both), context)
        return self.norm(y_SBD if rest is None else rest.x_SBD + y_SBD), None
