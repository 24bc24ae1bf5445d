"""`ParallelModel`: a model on a mesh, ready to be trained by any loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from petatron.mesh import collectives
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rng import RandomStreams
from petatron.models.batch import Architecture, Batch
from petatron.models.decoder import Decoder
from petatron.parallel.context import split_batch
from petatron.parallel.data.gradient_reduction import GradientSync
from petatron.parallel.parallelize import Parallelized
from petatron.parallel.pipeline.cuda_graph import Recorder, StepGraphs
from petatron.parallel.pipeline.executor import Outcome, Pipeline, Scales
from petatron.parallel.router_statistics import RouterTotals
from petatron.schedule.actions import TimedAction
from petatron.schedule.pipeline_plan import PipelinePlan
from petatron.sharding.flat_shard import publish


class ParallelModel:
    """This rank's stages of a model, the groups its weights are updated in, and the reduction of its gradients.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> loss = model.train_step(next(petatron.build_loader(run, model.mesh)))
    >>> bool(loss.isfinite())
    True
    """

    def __init__(
        self,
        stages: Mapping[int, Decoder],
        parts: Parallelized,
        plan: PipelinePlan,
        routers: RouterTotals,
        mesh: ParallelMesh,
        streams: RandomStreams,
        *,
        architecture: Architecture,
        dtype: torch.dtype,
        sequence_parallel: bool,
    ) -> None:
        self.architecture = architecture
        self.stages = stages
        self.mesh = mesh
        self.streams = streams
        self.plan = plan
        self.sequence_parallel = sequence_parallel
        self.placements = parts.placements
        self.groups = parts.groups
        self.gradients = parts.gradients
        self.eight_bits = parts.eight_bits
        self._weight_grads = parts.weight_grads
        self.routers = routers
        self.dtype = dtype
        self._pipeline = Pipeline(
            stages,
            mesh.pp,
            activation=self._activation,
            weight_grads=parts.weight_grads,
            combined=parts.combined,
        )
        self._run: Callable[..., Outcome] = self._pipeline.run

    def record_steps(self, recorder: Recorder) -> None:
        """From now on, have the passes of training steps recorded and replayed (`parallel/pipeline/cuda_graph.py`)."""
        assert isinstance(self.gradients, GradientSync), "fully_shard communicates inside a step"
        self._run = StepGraphs(self._pipeline.run, self.gradients, recorder).run

    @property
    def module(self) -> Decoder:
        """The whole model, where one rank holds all its layers in one stage."""
        assert self.plan.ranks == self.plan.virtual == 1, "the model is spread over pipeline stages"
        return next(iter(self.stages.values()))

    @property
    def layout_key(self) -> str:
        """Tells layouts apart as far as random streams are concerned."""
        return f"{self.mesh.layout} sequence_parallel={self.sequence_parallel} {self.plan}"

    def train_step(
        self,
        batches: Sequence[Batch],
        *,
        loss_scale: float = 1.0,
        timeline: Callable[[list[TimedAction]], None] | None = None,
    ) -> Tensor:
        """Forward and backward of this rank's micro-batches; gradients are complete when it returns.

        Returns the mean loss per valid token of the *global* batch, on the device. One formula for every layout: the sum
        of token losses over all ranks and micro-batches, divided by the number of valid tokens among them. `timeline` is
        handed when each action ran; timing them makes the device wait after each.
        """
        self._set_mode(training=True)
        batches = [split_batch(batch, self.mesh.cp) for batch in batches]
        self._weight_grads.begin()
        self.gradients.begin(len(batches))
        self.eight_bits.new_step()
        tokens = self._count_tokens(batches)
        extra = torch.full_like(tokens, loss_scale / (len(batches) * self.mesh.dp.size))
        scales = Scales(loss=loss_scale / tokens, extra=extra)
        clock = self._clock if timeline is not None else None
        outcome = self._run(self.plan.training(len(batches), rank=self.mesh.pp.rank), batches, scales, clock=clock)
        self.gradients.finish()
        self.eight_bits.weights_changed()  # they are about to, and until then nothing is computed with them
        self.routers.update(outcome.reports)
        if timeline is not None:
            timeline(outcome.timed)
        return self._total_loss(outcome) / tokens

    def evaluate(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Sum of the token losses of the global batch and the number of valid tokens, without gradients."""
        self._set_mode(training=False)
        self.eight_bits.weights_changed()
        batches = [split_batch(batch, self.mesh.cp) for batch in batches]
        tokens = self._count_tokens(batches)
        outcome = self._pipeline.run(self.plan.evaluation(len(batches), rank=self.mesh.pp.rank), batches)
        return self._total_loss(outcome), tokens

    def publish(self) -> None:
        """Make weights that were changed from outside known to every rank that computes with them."""
        self.eight_bits.weights_changed()
        publish(self.groups)

    def _count_tokens(self, batches: Sequence[Batch]) -> Tensor:
        count = torch.stack([batch.loss_mask.sum(dtype=torch.float64) for batch in batches]).sum()
        first = self.mesh.tp.rank == 0 and self.mesh.pp.rank == 0  # the others count the same tokens
        return self._sum(count, over="dp_cp", here=first).clamp(min=1.0)

    def _total_loss(self, outcome: Outcome) -> Tensor:
        """Of the global batch; ranks of one tensor-parallel group have the same part of it."""
        return self._sum(outcome.total, over="losses", here=self.mesh.tp.rank == 0)

    def _sum(self, x: Tensor, *, over: str, here: bool) -> Tensor:
        """The sum of a scalar over an axis, on all ranks; `here` on one of those ranks of the world that have the same.

        It travels over the communicator of the whole world, which every run has for the gradient norm: eight bytes are no
        reason for one more, and adding zeros changes no bit.
        """
        if self.mesh[over].size == 1:
            return x
        return collectives.all_reduce(x if here else torch.zeros_like(x), self.mesh.world)

    def _set_mode(self, *, training: bool) -> None:
        for stage in self.stages.values():
            if stage.training != training:  # walking through all modules costs a small model a tenth of its step
                stage.train(training)

    def _activation(self, batch: Batch) -> Tensor:
        """An empty tensor like those that pass between stages: this rank's part of the sequence."""
        size, length = batch.tokens.shape
        rows = length // self.mesh.tp.size if self.sequence_parallel else length
        hidden = next(iter(self.stages.values())).config.hidden_size
        return torch.empty(rows, size, hidden, dtype=self.dtype, device=self.mesh.device)

    def _clock(self) -> float:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        return time.time()  # perf_counter has another zero on every machine
