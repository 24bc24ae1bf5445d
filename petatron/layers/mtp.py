"""Multi-token prediction (DeepSeek-V3): layers after the last one, each of which predicts one token further ahead.

With h the output of the model after its final norm, depth 0, and t the tokens, depth k = 1, 2, ... of position i computes

    h^k_i = norm(layer(W [norm(E t_{i+k}) ; norm(h^{k-1}_i)]))          and its loss is that of the token t_{i+k+1}

with the embedding E and the output head of the model itself. So a position sees the true tokens up to k ahead of it, and positions at the
end of a sequence, for which there are none, have no loss. Norms, W and the layer are a depth's own, or the same for all depths
(`--mtp-use-repeated-layer`); the layer is of the kind of the model's last one. In a hybrid, whose layers have one branch each, a depth
has several layers in place of one: the first is after W, and after the last comes the norm.

Tokens shifted by k are arrays of the batch, made of whole sequences before context parallelism splits them
(`models/mtp_and_longrope_arrays.py`). Their embeddings come from where the embedding is, the first pipeline stage, and travel to the last
one with the activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from petatron.layers.forward_context import ForwardContext
from petatron.layers.linear import Linear
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import REPLICATED, ParamSpec, linear_params, with_prefix
from petatron.layers.transformer_layer import LayerSpec, Residual, TransformerLayer


def embedding_name(depth: int) -> str:
    """Returns the name of the embeddings of the tokens `depth` positions ahead, between stages.

    >>> embedding_name(1)
    'mtp 1 embedding'
    """
    return f"mtp {depth} embedding"


EMBEDDING_AHEAD = "embedding ahead"
"""The tensor of the forward context with the embeddings that the running depth takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayerSpec(LayerSpec):
    """A layer of a depth of multi-token prediction: its branches, and what is around those of the first and the last one.

    depth: how many tokens ahead the embedding is; 1 where all depths run the same layers. begins, ends: whether it is the first and the
    last layer of its depth. num_runs: how many depths run it. std: of the initial weights of the projection.
    """

    depth: int
    begins: bool
    ends: bool
    num_runs: int = 1
    std: float

    @property
    def runs(self) -> int:
        return self.num_runs

    def build_base(self, layer_index: int) -> MtpLayer:
        return MtpLayer(self, layer_index=layer_index)

    def base_params(self) -> Mapping[str, ParamSpec]:
        width = self.norm.width
        outer: dict[str, ParamSpec] = {}
        for name in self.own_norms:
            outer |= with_prefix(name, self.norm.params())
        if self.begins:
            outer |= with_prefix("projection", linear_params(2 * width, width, REPLICATED, bias=False, std=self.std))
        return outer | dict(LayerSpec.base_params(self))

    @property
    def own_norms(self) -> tuple[str, ...]:
        """The names of the norms around the layer's branches."""
        return (*(("embedding_norm", "hidden_norm") if self.begins else ()), *(("norm",) if self.ends else ()))

    def extra_saved_bytes(self, shape: ActivationShape) -> int:
        """Inputs and statistics of its norms, and the projection's input."""
        norms = len(self.own_norms) * self.norm.saved_bytes(shape, shape.tokens)
        return norms + (shape.activation_bytes(shape.tokens, 2 * self.norm.width) if self.begins else 0)


def depth_layers(
    layers: Sequence[LayerSpec], *, num_depths: int, repeated: bool, std: float
) -> tuple[MtpLayerSpec, ...]:
    """Returns the layers of all depths, each of the given kinds; `repeated` ones are the same for all depths, and there once."""
    return tuple(
        MtpLayerSpec(
            **{field.name: getattr(layer, field.name) for field in fields(LayerSpec)},
            depth=depth,
            begins=place == 0,
            ends=place == len(layers) - 1,
            num_runs=num_depths if repeated else 1,
            std=std,
        )
        for depth in range(1, 1 + (min(num_depths, 1) if repeated else num_depths))
        for place, layer in enumerate(layers)
    )


class MtpLayer(TransformerLayer):
    """A layer of norm(layers(projection([norm(embedding) ; norm(x)]))); the last one returns the sum of the residual stream, normed."""

    def __init__(self, spec: MtpLayerSpec, *, layer_index: int = 0) -> None:
        super().__init__(spec, layer_index=layer_index)
        self.takes_rows = False  # the first one takes embeddings of tokens ahead, [S, B, D]
        width = spec.norm.width
        self.begins, self.ends = spec.begins, spec.ends
        for name in spec.own_norms:
            self.add_module(name, spec.norm.build())
        if spec.begins:
            self.projection = Linear(2 * width, (width,), bias=False)

    def forward(
        self, x_SBD: Tensor, context: ForwardContext, residual: Residual | None = None
    ) -> tuple[Tensor, Residual | None]:
        if self.begins:
            assert residual is None, "the depth before returns the whole stream"
            embedded_SBD = self.embedding_norm(context.tensors[EMBEDDING_AHEAD])
            x_SBD = self.projection(torch.cat((embedded_SBD, self.hidden_norm(x_SBD)), dim=-1))
        y_SBD, rest = super().forward(x_SBD, context, residual)
        if not self.ends:
            return y_SBD, rest
        return self.norm(y_SBD if rest is None else rest.x_SBD + y_SBD), None
