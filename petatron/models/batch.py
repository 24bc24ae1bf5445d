"""`Batch`: the named arrays of a micro-batch, with the dimension along which context parallelism splits each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from petatron.base.errors import DataError
from petatron.kernels.attention.document_layout import Documents, KeySpans

SEGMENT_IDS = "segment_ids"
"""The array [B, S] of the segment of each position; -1: none."""


@dataclass(frozen=True, slots=True)
class SequencePart:
    """The part of every sequence that a rank has under context parallelism: its index, and the sum over the ranks of all parts."""

    index: int
    all_reduce: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SamplePart:
    """The samples of a micro-batch that a rank has under data parallelism: its index, and the all-gather of what all ranks have of theirs,
    along the first dimension. Gradients of all its uses, on all ranks, are summed.
    """

    index: int
    all_gather: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Batch:
    """One micro-batch on one rank, passed from the loader to the model: named arrays, batch dimension first.

    Of text: tokens, labels and loss_mask are [batch, sequence]; labels are the tokens shifted by one, and loss_mask is 1.0 where
    a position counts. positions is None when they are 0, 1, 2, ... in every row; else [sequence] or [batch, sequence].
    documents is None when a row is one document; else it has their boundaries in the whole sequence, also where context
    parallelism shards the others.

    Other models have arrays of other names in `arrays`. `sequence_dims` has the dimension along the sequence of those where it is
    not 1, and None for those without one. A sample may have several rows (`rows_per_sample`: a pair has two, one after the other).
    sequence_part is None where a rank has whole sequences; sample_part, where it has all samples, or the objective reads its own alone.

    Of an encoder-decoder, tokens and documents are the decoder's; source_documents are those of the encoder's sequence, and key_spans say
    what each token of the decoder sees of it. Both are of whole sequences, and None where all of it is one document.

    Of a model that reads images, source_documents are the images among the patches of a micro-batch, and window_documents the windows that
    some of its layers have of them.

    Texts that are compared or weighted as wholes are segments: an answer, one side of a pair. Several of them may be packed into a row, and
    `num_segments` is how many the micro-batch has; the array "segment_ids" [B, S] says which of them a position is of, -1: of none.

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
    rows_per_sample: int
    sequence_part: SequencePart | None
    source_documents: Documents | None
    window_documents: Documents | None
    key_spans: KeySpans | None
    sample_part: SamplePart | None
    num_segments: int | None

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
        rows_per_sample: int = 1,
        sequence_part: SequencePart | None = None,
        source_documents: Documents | None = None,
        window_documents: Documents | None = None,
        key_spans: KeySpans | None = None,
        sample_part: SamplePart | None = None,
        num_segments: int | None = None,
    ) -> None:
        """Arrays of text that are given by name replace those of `arrays`: so `dataclasses.replace` works with either."""
        text = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "positions": positions}
        given = {name: x for name, x in text.items() if x is not None}
        object.__setattr__(self, "arrays", {**given, **arrays, **given} if arrays else given)
        object.__setattr__(self, "documents", documents)
        object.__setattr__(self, "sequence_dims", sequence_dims or {})
        object.__setattr__(self, "rows_per_sample", rows_per_sample)
        object.__setattr__(self, "sequence_part", sequence_part)
        object.__setattr__(self, "source_documents", source_documents)
        object.__setattr__(self, "window_documents", window_documents)
        object.__setattr__(self, "key_spans", key_spans)
        object.__setattr__(self, "sample_part", sample_part)
        object.__setattr__(self, "num_segments", num_segments)

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
        return next(iter(self.arrays.values())).shape[0] // self.rows_per_sample

    @property
    def has_first_part(self) -> bool:
        """Whether this rank has the first part of its sequences: it alone counts what is computed of whole ones."""
        return self.sequence_part is None or self.sequence_part.index == 0

    def sequence_sum(self, x_BS: Tensor) -> Tensor:
        """Sums over each whole sequence, whatever part of it this rank has: [B, S, ...] to [B, ...]; gradients flow to all parts.

        >>> Batch(torch.zeros(2, 3)).sequence_sum(torch.ones(2, 3))
        tensor([3., 3.])
        """
        total = x_BS.sum(dim=1)
        return total if self.sequence_part is None else self.sequence_part.all_reduce(total)

    def segment_sum(self, x_BS: Tensor) -> Tensor:
        """Sums over each segment, whatever part of the sequences this rank has: [B, S] to [segments]; gradients flow to all parts.

        >>> ids = torch.tensor([[0, 0, 1, -1], [2, 2, 2, -1]])
        >>> Batch(arrays={"segment_ids": ids}, num_segments=3).segment_sum(torch.ones(2, 4))
        tensor([2., 1., 3.])
        """
        if self.num_segments is None:
            raise DataError(
                "The batch has no segments. Its kind of dataset does not say which positions belong together."
            )
        ids = self[SEGMENT_IDS]
        # Not `index_add`, which adds in another order every time on a GPU.
        in_segment = torch.arange(self.num_segments, device=ids.device).unsqueeze(1) == ids.reshape(1, -1)
        total = torch.where(in_segment, x_BS.reshape(1, -1), x_BS.new_zeros(())).sum(dim=1)
        return total if self.sequence_part is None else self.sequence_part.all_reduce(total)

    def all_samples(self, x_B: Tensor) -> tuple[Tensor, int]:
        """Returns what all data-parallel ranks have of their samples of this micro-batch, and where this rank's begin; gradients flow back.

        >>> Batch(torch.zeros(2, 3)).all_samples(torch.ones(2))
        (tensor([1., 1.]), 0)
        """
        part = self.sample_part
        return (x_B, 0) if part is None else (part.all_gather(x_B), part.index * x_B.shape[0])

    def with_arrays(self, **arrays: Tensor) -> Batch:
        """Returns the batch with further arrays, or others in place of its own.

        >>> sorted(Batch(torch.zeros(2, 3)).with_arrays(loss_weights=torch.ones(2, 3)).arrays)
        ['loss_weights', 'tokens']
        """
        return replace(self, arrays={**self.arrays, **arrays})

    def sequence_dim(self, name: str) -> int | None:
        """Returns the dimension of an array along the sequence."""
        return self.sequence_dims.get(name, -1 if name == "positions" else 1)

    def to(self, device: torch.device) -> Batch:
        """Copies the batch to a device; asynchronous from pinned memory."""
        return self._with(
            lambda x: x.to(device, non_blocking=True), lambda described: described.to(device, non_blocking=True)
        )

    def pin_memory(self) -> Batch:
        """Copies the batch to page-locked memory, from which copies to a device are asynchronous."""
        return self._with(Tensor.pin_memory, lambda described: described.pin_memory())

    def clone(self) -> Batch:
        """Copies the arrays to memory of their own; documents are shared."""
        return self._with(Tensor.clone, lambda described: described)

    def _with(
        self, function: Callable[[Tensor], Tensor], of_described: Callable[[Documents | KeySpans], Documents | KeySpans]
    ) -> Batch:
        """Applies functions to the arrays, and to what describes documents."""
        arrays = {name: function(x) for name, x in self.arrays.items()}
        described = {
            name: None if value is None else of_described(value)
            for name in ("documents", "source_documents", "window_documents", "key_spans")
            for value in (getattr(self, name),)
        }
        return replace(self, arrays=arrays, **described)
