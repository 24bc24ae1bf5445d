"""The rows of the vocabulary that a device holds: token embedding and output head share this view."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from petatron.layers.seam import Seam, same


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which rows of the vocabulary this device holds, and how ranks that hold the others are asked.

    `size` ids exist; this device holds `rows` of them from `first` on. `ranks` combine partial results by maximum and by sum,
    None where all is here; `join` puts partial logits [V, ...] one after the other along dimension 0.
    """

    size: int
    first: int
    rows: int
    ranks: tuple[Seam, Seam] | None = None
    join: Seam = same

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of the table held here, and which ids lie elsewhere (their row is -1); None when all are here."""
        if self.rows == self.size:
            return ids, None
        local = ids - self.first
        elsewhere = (local < 0) | (local >= self.rows)
        return local.masked_fill(elsewhere, -1), elsewhere

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Logits over all ids, on every device; for generation and tests, never for training."""
        return self.join(logits.movedim(-1, 0).contiguous()).movedim(0, -1)[..., : self.size]
