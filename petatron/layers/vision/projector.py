"""`Projector`: the output of a vision encoder becomes vectors of a decoder's stream, which take the places of images in the text.

P patches, F = P / merge^2 vectors, D the encoder's width, H the decoder's; S sequence, B batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.kernels.activation import activation
from petatron.layers.linear import Linear
from petatron.layers.norm import NormSpec
from petatron.layers.parallel_slots import CommSlot, TensorSlot, identity
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import REPLICATED, ParamSpec, linear_params, with_prefix
from petatron.sharding.shard_spec import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSpec:
    """One GEMM, or two with an activation between them.

    merged_patches: how many consecutive patches become one vector. inner_width: between two GEMMs; None: there is one.
    norm: of every patch, before they are merged.
    """

    input_size: int
    output_size: int
    merged_patches: int
    inner_width: int | None
    activation: str
    bias: bool
    norm: NormSpec | None
    std: float

    @property
    def merged_size(self) -> int:
        return self.merged_patches * self.input_size

    def build(self) -> Projector:
        return Projector(self)

    def params(self) -> Mapping[str, ParamSpec]:
        bias, std = self.bias, self.std
        norm = with_prefix("norm", {} if self.norm is None else self.norm.params())
        if self.inner_width is None:
            out = linear_params(self.merged_size, self.output_size, REPLICATED, bias=bias, std=std)
            return norm | with_prefix("out", out)
        up = linear_params(self.merged_size, self.inner_width, Shard(tp=0), bias=bias, std=std)
        out = linear_params(self.inner_width, self.output_size, Shard(tp=1), bias=bias, std=std)
        return norm | with_prefix("up", up) | with_prefix("out", out)

    def saved_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes of the inputs of GEMMs and activation, and of what the norm saves, of a micro-batch's patches."""
        tokens = shape.tokens // self.merged_patches
        saved = shape.activation_bytes(tokens, self.merged_size)
        if self.inner_width is not None:
            gathered = shape.gathered_tokens // self.merged_patches
            saved += 2 * shape.activation_bytes(gathered, self.inner_width // shape.tp)
        return saved if self.norm is None else saved + self.norm.saved_bytes(shape, shape.tokens)


class Projector(nn.Module):
    """Projects the output of a vision encoder, [P, 1, D] to [F, 1, H]."""

    def __init__(self, spec: ProjectorSpec) -> None:
        super().__init__()
        self.spec = spec
        self.norm = None if spec.norm is None else spec.norm.build()
        inner = spec.merged_size if spec.inner_width is None else spec.inner_width
        self.up = None if spec.inner_width is None else Linear(spec.merged_size, (inner,), bias=spec.bias)
        self.out = Linear(inner, (spec.output_size,), bias=spec.bias)

    def forward(self, x_P1D: Tensor) -> Tensor:
        x_P1D = x_P1D if self.norm is None else self.norm(x_P1D)
        merged = x_P1D.reshape(-1, 1, self.spec.merged_size)
        return self.out(merged if self.up is None else activation(self.up(merged), self.spec.activation))


class ImageSplice(nn.Module):
    """Puts the vectors of images in the places that text has for them.

    Both slots are the identity on one device: `shard` takes this rank's part of the sequence, `gathered` all vectors from the parts that
    ranks have of them.
    """

    tensor_slots: Mapping[str, TensorSlot] = {"shard": "sequence shard", "gathered": "gathered sequence shards"}

    def __init__(self) -> None:
        super().__init__()
        self.shard: CommSlot = identity
        self.gathered: CommSlot = identity

    def forward(self, text_SBH: Tensor, images_F1H: Tensor, index_BS: Tensor) -> Tensor:
        """`index_BS` is the index of each token's vector, or -1 where a token is text."""
        return self.place(text_SBH, self.gathered(images_F1H).squeeze(1), index_BS)

    def place(self, text_SBH: Tensor, images_FH: Tensor, index_BS: Tensor) -> Tensor:
        """Does the same with all vectors on every rank."""
        # The output has the memory order of the condition, and ranks share sequences that are in order.
        index_SB = self.shard(index_BS.t().contiguous())
        at_places = F.embedding(index_SB.clamp(min=0), images_FH)
        return torch.where((index_SB >= 0).unsqueeze(-1), at_places.to(text_SBH.dtype), text_SBH)
