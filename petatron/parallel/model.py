"""`ParallelModel`: a model on a mesh, ready to be trained by any loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from petatron.mesh import collectives
from petatron.mesh.flat import flatten_parameters
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rng import RandomStreams
from petatron.mesh.spec import Placement
from petatron.models.base import Batch
from petatron.parallel.gradients import GradientSync
from petatron.parallel.pipeline import Pipeline
from petatron.parallel.schedule import forward_only, one_stage


class ParallelModel:
    """This rank's part of a model, its flat weight and gradient buffers, and the reduction of its gradients.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> loss = model.train_step(next(petatron.build_loader(run, model.mesh)))
    >>> bool(loss.isfinite())
    True
    """

    def __init__(
        self,
        module: nn.Module,
        placements: Mapping[str, Placement],
        mesh: ParallelMesh,
        streams: RandomStreams,
        *,
        decays: Callable[[str, nn.Parameter], bool],
        sequence_parallel: bool,
        bucket_size: int,
        overlap: bool,
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.streams = streams
        self.sequence_parallel = sequence_parallel
        self.placements = placements
        self.groups = flatten_parameters(module, placements, decays)
        self.gradients = GradientSync(self.groups, mesh, bucket_size=bucket_size, overlap=overlap)
        self._pipeline = Pipeline(module, self.gradients)

    def train_step(self, batches: Sequence[Batch], *, loss_scale: float = 1.0) -> Tensor:
        """Forward and backward of this rank's micro-batches; gradients are complete when it returns.

        Returns the mean loss per valid token of the *global* batch, on the device. One formula for every layout: the sum
        of token losses over all ranks and micro-batches, divided by the number of valid tokens among them.
        """
        self.module.train()
        self.gradients.zero()
        tokens = self._count_tokens(batches)
        total = self._pipeline.run(
            one_stage(len(batches)), batches, backward_scale=lambda loss: loss * (loss_scale / tokens).to(loss.dtype)
        )
        self.gradients.finish()
        return collectives.all_reduce(total, self.mesh.dp_cp) / tokens

    def evaluate(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Sum of the token losses of the global batch and the number of valid tokens, without gradients."""
        self.module.eval()
        tokens = self._count_tokens(batches)
        total = self._pipeline.run(forward_only(len(batches)), batches)
        return collectives.all_reduce(total, self.mesh.dp_cp), tokens

    def _count_tokens(self, batches: Sequence[Batch]) -> Tensor:
        count = torch.stack([batch.loss_mask.sum(dtype=torch.float64) for batch in batches]).sum()
        return collectives.all_reduce(count, self.mesh.dp_cp).clamp(min=1.0)
