"""`ModelBeneathAdapters`: the frozen model that adapters are beside, with the weights of the one that is trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from petatron.layers.adapters.disable_adapters import adapters_disabled
from petatron.models.batch import Batch

if TYPE_CHECKING:
    from petatron.parallel.parallel_model import ParallelModel


class RoleModel(Protocol):
    """A model that an objective reads: whatever runs forward passes in the layout of the run."""

    def forward(self, batches: Sequence[Batch], *, collect: Collection[str]) -> list[dict[str, Tensor]]:
        """See `ParallelModel.forward`."""
        ...


class ModelBeneathAdapters:
    """Runs a model without its adapters. It has no tensors of its own, so it costs a forward pass and no memory.

    Its precision, kernels and layout are those of the model: where weights are quantized, they are for both.
    """

    def __init__(self, model: ParallelModel) -> None:
        self.model = model

    def forward(self, batches: Sequence[Batch], *, collect: Collection[str]) -> list[dict[str, Tensor]]:
        """See `ParallelModel.forward`."""
        with adapters_disabled(self.model.stages.values()):
            return self.model.forward(batches, collect=collect)
