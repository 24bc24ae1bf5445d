"""What a forward pass carries past every block besides the activations."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of one micro-batch through some layers.

    rotation: cos and sin of the positions held here, for rotary embedding.
    document_starts_BS: for every position of the *whole* sequence, on every context-parallel rank, the first position of
        its document, which attention must not look behind; None when a row is one document.
    extra_loss_scale: what a layer's own loss (router balance) is multiplied by before it joins the gradient; None when no
        gradient is wanted.
    reports: what layers have to say of this pass, one vector under each layer's number, to be added up over micro-batches
        and ranks. A layer that is computed again in the backward pass writes the same again.
    """

    rotation: Rotation | None = None
    document_starts_BS: Tensor | None = None
    extra_loss_scale: Tensor | None = None
    reports: dict[int, Tensor] = field(default_factory=dict)
