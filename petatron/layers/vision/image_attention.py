"""Attention among the patches of an image, or of a window of it, and the layer that has it.

The patches of all images of a micro-batch are one sequence, [P, 1, D], whose documents are images or windows. Context-parallel ranks share
the sequences of the decoder and not this one: each encodes all images, and takes what its part of the text refers to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from petatron.layers.attention import Attention, AttentionSpec
from petatron.layers.core_attention import CoreAttention
from petatron.layers.parallel_slots import ContextSlot
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.transformer_layer import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAttentionSpec(AttentionSpec):
    """Attention among patches.

    in_windows: a patch sees those of its window; else those of its image. most_visible: how many these are, at most.
    """

    in_windows: bool
    most_visible: int

    sequence_sharding = "any"

    def build(self, layer_index: int) -> ImageAttention:
        return ImageAttention(self, layer_index)

    def _seen_on_both_sides(self, seq_length: int) -> int:
        return min(seq_length, self.most_visible)

    def context_parallel_bytes(self, shape: ActivationShape) -> int:
        return 0


class ImageAttention(Attention):
    """Attention whose sequence every context-parallel rank has whole."""

    def __init__(self, spec: ImageAttentionSpec, layer_index: int) -> None:
        super().__init__(spec, layer_index)
        self.core = _WholeSequenceAttention(dropout=spec.dropout)


class _WholeSequenceAttention(CoreAttention):
    context_slots: Mapping[str, ContextSlot] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayerSpec(LayerSpec):
    """A layer over patches: `seq_length` of them for each sample."""

    __hash__ = LayerSpec.__hash__

    def shape_of(self, shape: ActivationShape) -> ActivationShape:
        """Returns the patches of a micro-batch, which context-parallel ranks do not share."""
        assert self.seq_length is not None
        return replace(shape, sequence=self.seq_length, whole_sequence=self.seq_length)

    @property
    def in_windows(self) -> bool:
        return isinstance(self.mixer, ImageAttentionSpec) and self.mixer.in_windows
