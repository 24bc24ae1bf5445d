"""`ModelIO`, what a pipeline stage takes and returns: named tensors at the boundaries, named losses, named outputs.

A model is cut into stages. Each boundary between two stages is declared, as the tensors that the later stage takes, and
`parallel/pipeline/executor.py` sends and receives just these. A stage that returns no tensor of a name that the next one takes
forwards the one it took itself: the output of an encoder reaches every stage of the decoder, and the gradients of all its uses are
summed on the way back. A loss may be computed on any stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from petatron.models.batch import Batch

SequenceOrder = Literal["zigzag", "contiguous"]
"""How context parallelism distributes a sequence: zigzag balances causal attention, a scan needs contiguous parts."""


PerWhat = Literal["token", "sample", "segment"]
LOSS_MASK, SEGMENT_MASK = "loss_mask", "segment_mask"


@dataclass(frozen=True, slots=True)
class BoundaryTensor:
    """One tensor [S, B, width] that a stage takes from the stage before it.

    B and S are the sizes of the batch's array `like` [B, S]. With sequence parallelism a `sequence_sharded` tensor has S / tp rows.
    A dtype of None is the run's compute dtype. Without `requires_grad` no gradient is computed for it, and none is sent back. With `rows`
    it is one tensor [rows, 1, width] of the model, whatever the batch. `computed_by` are the modules of earlier stages that it
    depends on, layers by their index; None: all of them. Where these are frozen, it needs no gradient.
    """

    name: str
    width: int
    like: str = "tokens"
    dtype: torch.dtype | None = None
    requires_grad: bool = True
    sequence_sharded: bool = True
    rows: int | None = None
    computed_by: frozenset[str] | None = None

    def shape(self, batch: Batch, *, sequence_shards: int = 1) -> tuple[int, int, int]:
        """Returns the local shape, with the sequence in `sequence_shards` shards.

        >>> tokens = torch.zeros(2, 8, dtype=torch.int64)
        >>> BoundaryTensor("hidden", 16).shape(Batch(tokens), sequence_shards=4)
        (2, 2, 16)
        """
        if self.rows is not None:
            return self.rows, 1, self.width
        size, length = batch[self.like].shape[:2]
        return length // sequence_shards if self.sequence_sharded else length, size, self.width

    def is_computed_by(self, param: str) -> bool:
        """Whether a parameter of an earlier stage is one of those that the tensor is computed by.

        >>> BoundaryTensor("patches", 8, computed_by=frozenset(["vision", "layers.0"])).is_computed_by("layers.0.mlp.up.weight")
        True
        """
        if self.computed_by is None:
            return True
        module, index, *_ = param.split(".")
        return (f"{module}.{index}" if module == "layers" else module) in self.computed_by


def _default_mask(spec: LossSpec | MetricSpec) -> None:
    """Gives what is per token the mask of the loss, and what is per segment that of segments, unless it has another."""
    masks = {"token": LOSS_MASK, "segment": SEGMENT_MASK}
    if spec.mask is None and spec.per in masks:
        object.__setattr__(spec, "mask", masks[spec.per])


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A named loss: the mean of its token losses over the positions where the batch's array `mask` [B, S] is 1.

    A step minimizes the sum over losses of weight x (sum of masked token losses / number of valid tokens), both over the global batch.
    `token_weights` names an array of factors on token losses; they do not change the number of tokens, and are 1 in a batch without it.
    A loss per sample is the mean over samples, or over those where the array `mask` [samples] is 1. A loss per segment has a value for each
    element of its mask, as many as a micro-batch has segments, or pairs or groups of them.

    >>> LossSpec("z loss", weight=1e-4).mask, LossSpec("preference loss", per="sample").mask
    ('loss_mask', None)
    """

    name: str
    mask: str | None = None
    weight: float = 1.0
    per: PerWhat = "token"
    token_weights: str | None = None

    __post_init__ = _default_mask


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A named metric: the mean over the samples of the global batch, or over its tokens, or the largest of these values; `mask` as that of
    a loss.

    >>> MetricSpec("accuracy").mask, MetricSpec("entropy", per="token").mask
    (None, 'loss_mask')
    """

    name: str
    mask: str | None = None
    per: PerWhat = "sample"
    reduction: Literal["mean", "max"] = "mean"

    __post_init__ = _default_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIO:
    """What a model takes and gives: `boundaries[k]` are the tensors into stage k, none into the first one.

    `losses` are those that the model computes itself; `outputs` names what a forward pass can collect, and an objective can ask
    for. `extend_batch` adds arrays that the model computes of whole sequences, before context parallelism splits them.
    """

    boundaries: tuple[tuple[BoundaryTensor, ...], ...]
    losses: tuple[LossSpec, ...]
    outputs: tuple[str, ...] = ()
    sequence_order: SequenceOrder = "zigzag"
    extend_batch: Callable[[Batch], Batch] | None = None

    def __post_init__(self) -> None:
        assert self.boundaries and not self.boundaries[0], "nothing comes before the first stage"
        for names in (*([x.name for x in boundary] for boundary in self.boundaries), [x.name for x in self.losses]):
            twice = [name for name, count in Counter(names).items() if count > 1]
            assert not twice, f"{', '.join(twice)} declared twice"


class StageOutput(NamedTuple):
    """The result of one forward of a stage. A tuple of dicts: `fully_shard` finds the tensors in it."""

    tensors: dict[str, Tensor]
    """For the next stage."""
    losses: dict[str, Tensor]
    """Token losses [S, B] by the name of the loss."""
    collected: dict[str, Tensor]
    """The outputs that were asked for and that this stage computes."""
