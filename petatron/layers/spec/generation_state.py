"""What a branch keeps of the tokens before, while text is generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from petatron.kernels.attention.paged import PagedBatch

Pages = Mapping[str, Tensor]
"""The pages of one layer, by the names of its rows: [pages, page size, ...]."""


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
        total = 0
        for _, shape in self.rows:
            elements = 1
            for size in shape:
                elements *= size
            total += elements
        return total


@dataclass(frozen=True, slots=True, eq=False)
class GenerationStep:
    """One step of generation: where each token's rows belong, and the pages of every layer of this rank by its index."""

    batch: PagedBatch
    pages: Mapping[int, Pages]
