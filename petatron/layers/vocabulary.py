"""Token ids in, token losses out: the two ends of a language model, which share one view of the vocabulary.

S sequence, B batch, D hidden, V vocabulary rows on this device (padding included).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.kernels.loss import cross_entropy
from petatron.layers.linear import Product
from petatron.layers.seam import Seam, same


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which rows of the vocabulary this device holds, and how ranks that hold the others are asked.

    `size` ids exist; this device holds `rows` of them from `first` on. `max_over` and `sum_over` combine partial results,
    `join` puts partial logits [V, ...] one after the other along dimension 0. On one device all three are the identity.
    """

    size: int
    first: int
    rows: int
    max_over: Seam = same
    sum_over: Seam = same
    join: Seam = same

    def lookup(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Embedding rows of the ids held here, zero for the others."""
        if self.rows == self.size:
            return F.embedding(ids, weight)
        local = ids - self.first
        elsewhere = (local < 0) | (local >= self.rows)
        return F.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere.unsqueeze(-1), 0)

    def token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each target; logits are this device's columns, padding included."""
        return cross_entropy(
            logits[..., : self.rows], targets, first=self.first, max_over=self.max_over, sum_over=self.sum_over
        )

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Logits over all ids, on every device; for generation and tests, never for training."""
        return self.join(logits.movedim(-1, 0).contiguous()).movedim(0, -1)[..., : self.size]


class TokenEmbedding(nn.Module):
    """Rows of a table, one per token id: [B, S] to [S, B, D]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.vocabulary = Vocabulary(vocab_size, 0, vocab_size)
        self.leave: Seam = same

    def forward(self, ids_BS: Tensor) -> Tensor:
        return self.leave(self.vocabulary.lookup(ids_BS.t(), self.weight))


class PositionEmbedding(nn.Module):
    """A learned vector per position, to be added to the tokens: [S] or [B, S] to [S, 1 or B, D]."""

    def __init__(self, num_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))
        self.leave: Seam = same

    def forward(self, positions: Tensor) -> Tensor:
        rows = positions.unsqueeze(1) if positions.dim() == 1 else positions.t()
        return self.leave(F.embedding(rows, self.weight))


class OutputHead(nn.Module):
    """Hidden states to logits over this device's part of the vocabulary: [S, B, D] to [S, B, V].

    A tied head has no weight of its own and multiplies with the token embedding's.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.vocabulary = Vocabulary(vocab_size, 0, vocab_size)
        self.product: Product = F.linear

    def forward(self, x_SBD: Tensor, embedding: Tensor | None) -> Tensor:
        weight = self.weight if self.weight is not None else embedding
        assert weight is not None, "a tied head needs the embedding's weight"
        return self.product(x_SBD, weight)
