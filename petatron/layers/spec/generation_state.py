"""The state that a layer keeps between tokens during generation: rows of every token in pages, or tensors of a fixed size in a slot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from petatron.kernels.attention.paged_attention import PagedBatch
from petatron.kernels.compute_dtype import compute_dtype
from petatron.layers.spec.generation_step_groups import SequenceGroup

Pages = Mapping[str, Tensor]
"""The pages of one layer, by the names of its rows: [pages, page size, ...]."""
StateSlots = Mapping[str, Tensor]
"""The recurrent states of one layer, by the names of its tensors: [slots, ...]."""


@dataclass(frozen=True, slots=True)
class PagedState:
    """Some rows of every token, by name with their shape on one rank: keys and values, or a latent. They are stored in pages."""

    rows: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def elements_per_token(self) -> int:
        """
        >>> PagedState((("key", (2, 8)), ("value", (2, 8)))).elements_per_token
        32
        """
        return sum(math.prod(shape) for _, shape in self.rows)


class StateTensor(NamedTuple):
    """A tensor that every sequence has one of: its shape on one rank. wide: in at least float32, else in the model's dtype."""

    name: str
    shape: tuple[int, ...]
    wide: bool = False

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return compute_dtype(model_dtype) if self.wide else model_dtype


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Tensors of a fixed size that stand for all tokens before: a state, a window of a convolution. A sequence has one slot of them.

    A branch reads and writes them through the `SequenceGroup`s of a step. A token is taken in once and cannot be taken back,
    so a prefix in pages says nothing of them: models with such branches compute every prompt from its first token.
    """

    tensors: tuple[StateTensor, ...]

    def bytes_per_sequence(self, model_dtype: torch.dtype) -> int:
        """
        >>> RecurrentState((StateTensor("conv", (3, 8)), StateTensor("ssm", (2, 4), wide=True))).bytes_per_sequence(torch.bfloat16)
        80
        """
        return sum(math.prod(tensor.shape) * tensor.dtype(model_dtype).itemsize for tensor in self.tensors)


GenerationState = PagedState | RecurrentState


class RowVectors(NamedTuple):
    """Vectors [F, hidden] on every rank, and the index of each row's [T]; -1 where it takes the embedding of its token."""

    vectors: Tensor
    index_T: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GenerationStep:
    """One step of generation: where each token's rows belong, and the pages of every layer of this rank by its index.

    states: the slots of its recurrent layers, by index. groups: the sequences of the step as those layers compute them. vectors: what some
    rows take instead of the embeddings of their tokens.
    """

    batch: PagedBatch
    pages: Mapping[int, Pages]
    states: Mapping[int, StateSlots] = field(default_factory=dict)
    groups: tuple[SequenceGroup, ...] = ()
    vectors: RowVectors | None = None
