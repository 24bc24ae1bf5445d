"""`PatchEmbedding`: pixels become the tokens of a vision encoder.

P patches, C pixels of a patch, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petatron.layers.linear import Linear
from petatron.layers.norm import NormSpec
from petatron.layers.parallel_slots import CommSlot, TensorSlot, identity
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.param_spec import REPLICATED, ParamSpec, linear_params, with_prefix
from petatron.layers.vocabulary.embedding import PositionEmbedding
from petatron.sharding.initial_values import NormalValues

CLASS_ROW = 0
"""The row of the table of positions that the class token has, where there is one: those of patches come after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchEmbeddingSpec:
    """The first module of a vision encoder.

    pixel_mean, pixel_std: of each channel, of pixels between 0 and 1. positions: rows of the table of positions, 0 without one; with a
    class token one of them is its.
    """

    hidden_size: int
    channels: int
    pixels_per_channel: int
    bias: bool
    positions: int
    class_token: bool
    norm: NormSpec | None
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    std: float

    @property
    def pixels(self) -> int:
        """The numbers in a patch, those of a channel one after the other."""
        return self.channels * self.pixels_per_channel

    def build(self) -> PatchEmbedding:
        return PatchEmbedding(self)

    def params(self) -> Mapping[str, ParamSpec]:
        width = self.hidden_size
        params = with_prefix("patch", linear_params(self.pixels, width, REPLICATED, bias=self.bias, std=self.std))
        table = ParamSpec(shape=(self.positions, width), init=NormalValues(self.std), weight_decay=True)
        if self.positions:
            params["position.weight"] = table
        if self.class_token:
            params["class_token"] = ParamSpec(shape=(1, width), init=NormalValues(self.std))
        return params | with_prefix("norm", {} if self.norm is None else self.norm.params())

    def saved_bytes(self, shape: ActivationShape) -> int:
        """Returns the bytes of normalized pixels, of marks of class tokens, and of the norm."""
        saved = shape.activation_bytes(shape.tokens, self.pixels)
        saved += shape.tokens if self.class_token else 0
        return saved if self.norm is None else saved + self.norm.saved_bytes(shape, shape.tokens)


class PatchEmbedding(nn.Module):
    """Embeds patches [1, P, C] of uint8 as [P, 1, D]."""

    tensor_slots: Mapping[str, TensorSlot] = {"shard": "sequence shard"}

    def __init__(self, spec: PatchEmbeddingSpec) -> None:
        super().__init__()
        self.spec = spec
        self.shard: CommSlot = identity
        self.patch = Linear(spec.pixels, (spec.hidden_size,), bias=spec.bias)
        self.position = PositionEmbedding(spec.positions, spec.hidden_size) if spec.positions else None
        self.class_token = nn.Parameter(torch.empty(1, spec.hidden_size)) if spec.class_token else None
        self.norm = None if spec.norm is None else spec.norm.build()
        self.mean_std_2C1 = torch.tensor(
            (spec.pixel_mean, spec.pixel_std), dtype=torch.float64, device="cpu"
        ).unsqueeze(-1)

    def forward(self, patches_1PC: Tensor, rows_1P: Tensor | None) -> Tensor:
        """`rows_1P` are those of the table of positions, None without one. A class token has pixels that nothing reads."""
        x_P1D = self.patch(self._normalized(self.shard(patches_1PC.transpose(0, 1))))
        if self.class_token is not None:
            assert rows_1P is not None, "class tokens have a position"
            is_class_P11 = self.shard((rows_1P == CLASS_ROW).t()).unsqueeze(-1)
            x_P1D = torch.where(is_class_P11, self.class_token, x_P1D)
        if self.position is not None:
            assert rows_1P is not None, "patches have positions"
            x_P1D = x_P1D + self.position(rows_1P)
        return x_P1D if self.norm is None else self.norm(x_P1D)

    def _normalized(self, patches_P1C: Tensor) -> Tensor:
        spec, dtype = self.spec, self.patch.weight.dtype
        if self.mean_std_2C1.device != patches_P1C.device:  # once: the table follows the pixels
            self.mean_std_2C1 = self.mean_std_2C1.to(patches_P1C.device)
        wide = torch.promote_types(dtype, torch.float32)
        mean, std = self.mean_std_2C1.to(wide)
        x = patches_P1C.to(wide).unflatten(-1, (spec.channels, spec.pixels_per_channel))
        return ((x / 255.0 - mean) / std).flatten(-2).to(dtype)
