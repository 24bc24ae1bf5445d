"""Buckets: ranges of a flat buffer whose gradients are reduced together, and allocated and freed together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from petatron.sharding.shard_spec import Placement


@dataclass(frozen=True, slots=True)
class BucketParam:
    """One parameter's place in its group; `grad_order` is its position among the gradients of its stage's backward pass.

    `grads_per_micro_batch` is how many gradients it gets per micro-batch: 2 for a tied embedding with both its ends on one rank.
    """

    name: str
    parameter: nn.Parameter
    placement: Placement
    start: int
    grad_order: int
    grads_per_micro_batch: int = 1

    @property
    def end(self) -> int:
        return self.start + self.parameter.numel()


@dataclass(frozen=True, slots=True)
class Bucket:
    """A range of a group's buffers, and the parameters in it."""

    begin: int
    end: int
    params: tuple[BucketParam, ...]


class BucketGrads:
    """The gradients of a bucket. Their memory can be freed and allocated again: views of `flat` stay valid, their values do not.

    freed: whether the memory is freed now. Callers read this flag instead of calling `allocate`, which asks the storage.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype, device: torch.device | str) -> None:
        self.flat = torch.zeros(bucket.end - bucket.begin, dtype=dtype, device=device)
        self.freed = False
        self._padded = sum(slot.parameter.numel() for slot in bucket.params) < self.flat.numel()

    def free(self) -> None:
        self.flat.untyped_storage().resize_(0)
        self.freed = True

    def allocate(self) -> None:
        """Allocates the memory if it is freed. Nothing writes the gradients of padding, which are zero."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() < self.flat.nbytes:
            storage.resize_(self.flat.nbytes)
            if self._padded:
                self.flat.zero_()
        self.freed = False
