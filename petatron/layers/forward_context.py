"""What a forward pass carries past every block besides the activations."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from petatron.kernels.attention.documents import Documents

RopeCosSin = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward pass of one micro-batch through some layers.

    rope_cos_sin: cos and sin of the positions held here, for rotary embedding.
    documents: where the documents of the *whole* sequence lie, on every context-parallel rank, behind whose starts attention
        must not look; None when a row is one document.
    aux_loss_scale: what a layer's own loss (router balance) is multiplied by before it joins the gradient; None when no
        gradient is wanted.
    router_statistics: what layers have to say of this pass, one vector under each layer's number, to be added up over micro-batches
        and ranks. A layer that is computed again in the backward pass writes the same again.
    """

    rope_cos_sin: RopeCosSin | None = None
    documents: Documents | None = None
    aux_loss_scale: Tensor | None = None
    router_statistics: dict[int, Tensor] = field(default_factory=dict)
