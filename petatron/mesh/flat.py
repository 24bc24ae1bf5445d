"""Flat buffers: all parameters of one kind in one contiguous tensor, with their gradients in another of the same layout.

The gradient reduction works on ranges of the gradient buffer, the optimizer updates whole buffers, and the checkpoint
looks at boxes of logical tensors inside them. `Slot` says where a parameter lies; `FlatGroup.view` finds it again in any
tensor of the group's layout (weights, gradients, master weights, moments).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petatron.mesh.spec import Piece, Placement


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in its group; `arrival` is its turn among all gradients of a backward pass."""

    name: str
    parameter: nn.Parameter
    placement: Placement
    start: int
    arrival: int

    @property
    def end(self) -> int:
        return self.start + self.parameter.numel()


class FlatGroup:
    """Parameters that share a dtype and an update rule, in the order their gradients are expected to be ready."""

    def __init__(self, slots: list[Slot], *, decay: bool) -> None:
        first, size = slots[0].parameter, slots[-1].end
        self.slots = slots
        self.decay = decay
        self.weights = torch.empty(size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(size, dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
        for slot in self.slots:
            view = self.view(self.weights, slot)
            view.copy_(slot.parameter.detach())
            slot.parameter.data = view

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """A parameter-shaped view into a tensor of this group's layout."""
        return flat[slot.start : slot.end].view(slot.placement.shape)

    def pieces(self, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Every logical piece with its view into a tensor of this group's layout."""
        for slot in self.slots:
            whole = self.view(flat, slot)
            for piece in slot.placement.pieces:
                yield piece, whole[piece.local_slices()]


def flatten_parameters(
    model: nn.Module, placements: Mapping[str, Placement], decays: Callable[[str, nn.Parameter], bool]
) -> list[FlatGroup]:
    """Move a model's parameters into flat buffers, one per dtype and per answer of `decays` (does weight decay touch it?).

    The order is that of the backward pass, last layer first.
    """
    members: dict[tuple[torch.dtype, bool], list[Slot]] = {}
    for turn, (name, parameter) in enumerate(reversed(list(model.named_parameters()))):
        slots = members.setdefault((parameter.dtype, decays(name, parameter)), [])
        slots.append(Slot(name, parameter, placements[name], slots[-1].end if slots else 0, turn))
    return [FlatGroup(slots, decay=decay) for (_, decay), slots in members.items()]
