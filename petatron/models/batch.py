"""`Batch`, which every model shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.base.errors import DataError
from petatron.kernels.attention.documents import Documents


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Batch:
    """One micro-batch on one rank, passed from the loader to the model: named arrays, batch dimension first.

    Of text: tokens, labels and loss_mask are [batch, sequence]; labels are the tokens shifted by one, and loss_mask is 1.0 where
    a position counts. positions is None when they are 0, 1, 2, ... in every row; else [sequence] or [batch, sequence].
    documents is None when a row is one document; else it has their boundaries in the whole sequence, also where context
    parallelism shards the others.

    Other models have arrays of other names in `arrays`. `sequence_dims` has the dimension along the sequence of those where it is
    not 1, and None for those without one.

    >>> text = torch.tensor([[5, 6, 7, 8]])
    >>> Batch(text[:, :-1], text[:, 1:], torch.ones(1, 3)).labels
    tensor([[6, 7, 8]])
    >>> batch = Batch(text, arrays={"image": torch.zeros(1, 3, 8, 8)}, sequence_dims={"image": None})
    >>> list(batch.arrays), batch.sequence_dim("tokens"), batch.sequence_dim("image")
    (['tokens', 'image'], 1, None)
    """

    arrays: Mapping[str, Tensor]
    documents: Documents | None
    sequence_dims: Mapping[str, int | None]

    def __init__(
        self,
        tokens: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        *,
        arrays: Mapping[str, Tensor] | None = None,
        sequence_dims: Mapping[str, int | None] | None = None,
    ) -> None:
        """Arrays of text that are given by name replace those of `arrays`: so `dataclasses.replace` works with either."""
        text = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "positions": positions}
        given = {name: x for name, x in text.items() if x is not None}
        object.__setattr__(self, "arrays", {**given, **arrays, **given} if arrays else given)
        object.__setattr__(self, "documents", documents)
        object.__setattr__(self, "sequence_dims", sequence_dims or {})

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.arrays[name]
        except KeyError:
            known = ", ".join(self.arrays) or "none"
            raise DataError(f"The batch has no array {name!r}. Its arrays: {known}.") from None

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    @property
    def tokens(self) -> Tensor:
        return self["tokens"]

    @property
    def labels(self) -> Tensor:
        return self["labels"]

    @property
    def loss_mask(self) -> Tensor:
        return self["loss_mask"]

    @property
    def positions(self) -> Tensor | None:
        return self.arrays.get("positions")

    @property
    def num_samples(self) -> int:
        return next(iter(self.arrays.values())).shape[0]

    def sequence_dim(self, name: str) -> int | None:
        """Returns the dimension of an array along the sequence."""
        return self.sequence_dims.get(name, -1 if name == "positions" else 1)

    def to(self, device: torch.device) -> Batch:
        """Copies the batch to a device; asynchronous from pinned memory."""
        documents = None if self.documents is None else self.documents.to(device, non_blocking=True)
        return self._with(lambda x: x.to(device, non_blocking=True), documents)

    def pin_memory(self) -> Batch:
        """Copies the batch to page-locked memory, from which copies to a device are asynchronous."""
        return self._with(Tensor.pin_memory, None if self.documents is None else self.documents.pin_memory())

    def clone(self) -> Batch:
        """Copies the arrays to memory of their own; documents are shared."""
        return self._with(Tensor.clone, self.documents)

    def _with(self, function: Callable[[Tensor], Tensor], documents: Documents | None) -> Batch:
        arrays = {name: function(x) for name, x in self.arrays.items()}
        return Batch(documents=documents, arrays=arrays, sequence_dims=self.sequence_dims)
