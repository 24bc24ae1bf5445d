"""The rows of the vocabulary that a device holds: token embedding and output head share this view."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from petatron.layers.seam import Seam, identity


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which rows of the vocabulary this device holds, and how ranks that hold the others are asked.

    `vocab_size` ids exist; this device holds `num_ids` of them from `first_id` on. `all_reduce_max_sum` combine partial results by
    maximum and by sum, None where all is here; `all_gather_logits` puts partial logits [V, ...] one after the other along dimension 0.
    """

    vocab_size: int
    first_id: int
    num_ids: int
    all_reduce_max_sum: tuple[Seam, Seam] | None = None
    all_gather_logits: Seam = identity

    def to_local_ids(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of the table held here, and which ids lie elsewhere (their row is -1); None when all are here."""
        if self.num_ids == self.vocab_size:
            return ids, None
        local = ids - self.first_id
        elsewhere = (local < 0) | (local >= self.num_ids)
        return local.masked_fill(elsewhere, -1), elsewhere

    def full_logits(self, logits: Tensor) -> Tensor:
        """Logits over all ids, on every device; for generation and tests, never for training."""
        return self.all_gather_logits(logits.movedim(-1, 0).contiguous()).movedim(0, -1)[..., : self.vocab_size]
