"""`ParallelModel`: a model on a mesh, ready to be trained by any loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from petatron.mesh import collectives
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rng import RandomStreams
from petatron.models.batch import Batch
from petatron.models.spec import ModelSpec
from petatron.models.stage_module import StageModule
from petatron.parallel.context import split_batch
from petatron.parallel.data.gradient_reduction import GradientReducer
from petatron.parallel.parallelize import ParallelizeResult
from petatron.parallel.pipeline.cuda_graph import GraphCapture, GraphedSteps
from petatron.parallel.pipeline.executor import LossScales, PipelineExecutor, StepResult
from petatron.parallel.router_statistics import RouterStatistics
from petatron.schedule.actions import TimedAction
from petatron.schedule.pipeline_plan import PipelinePlan
from petatron.sharding.flat_shard import all_gather_params


class ParallelModel:
    """This rank's stages of a model with their parameter groups and gradient reduction.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> loss = model.train_step(next(petatron.build_loader(run, model.mesh)))
    >>> bool(loss.isfinite())
    True
    """

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        parallelized: ParallelizeResult,
        plan: PipelinePlan,
        router_statistics: RouterStatistics,
        mesh: ParallelMesh,
        rng_streams: RandomStreams,
        *,
        spec: ModelSpec,
        dtype: torch.dtype,
        sequence_parallel: bool,
    ) -> None:
        self.spec = spec
        self.stages = stages
        self.mesh = mesh
        self.rng_streams = rng_streams
        self.plan = plan
        self.sequence_parallel = sequence_parallel
        self.placements = parallelized.placements
        self.param_groups = parallelized.param_groups
        self.gradient_reducer = parallelized.gradient_reducer
        self.fp8_gemms = parallelized.fp8_gemms
        self._weight_grad_queue = parallelized.weight_grad_queue
        self.router_statistics = router_statistics
        self.dtype = dtype
        self._pipeline = PipelineExecutor(
            stages,
            mesh.pp,
            empty_stage_input=self._empty_stage_input,
            weight_grad_queue=parallelized.weight_grad_queue,
            combined_passes=parallelized.combined_passes,
        )
        self._run_step: Callable[..., StepResult] = self._pipeline.run

    def use_cuda_graphs(self, graph_capture: GraphCapture) -> None:
        """Captures and replays training steps as CUDA graphs from now on (`parallel/pipeline/cuda_graph.py`)."""
        assert isinstance(self.gradient_reducer, GradientReducer), "fully_shard communicates inside a step"
        self._run_step = GraphedSteps(self._pipeline.run, self.gradient_reducer, graph_capture).run

    @property
    def module(self) -> StageModule:
        """The whole model, where one rank has all its layers in one stage."""
        assert self.plan.ranks == self.plan.virtual == 1, "the model is spread over pipeline stages"
        return next(iter(self.stages.values()))

    @property
    def layout_key(self) -> str:
        """Identifies a layout as far as RNG streams are concerned."""
        return f"{self.mesh.layout} sequence_parallel={self.sequence_parallel} {self.plan}"

    def train_step(
        self,
        batches: Sequence[Batch],
        *,
        loss_scale: float = 1.0,
        timeline: Callable[[list[TimedAction]], None] | None = None,
    ) -> Tensor:
        """Runs forward and backward of this rank's micro-batches; gradients are reduced when it returns.

        Returns the mean loss per valid token of the *global* batch, on the device. One formula for every layout: the sum of
        token losses over all ranks and micro-batches, divided by their number of valid tokens. `timeline` receives when each
        action ran; timing synchronises the device after each.
        """
        self._set_mode(training=True)
        batches = [split_batch(batch, self.mesh.cp) for batch in batches]
        self._weight_grad_queue.start_step()
        self.gradient_reducer.start_step(len(batches))
        self.fp8_gemms.new_step()
        tokens = self._count_tokens(batches)
        aux_loss_scale = torch.full_like(tokens, loss_scale / (len(batches) * self.mesh.dp.size))
        scales = LossScales(token_loss=loss_scale / tokens, aux_loss=aux_loss_scale)
        clock = self._clock if timeline is not None else None
        result = self._run_step(
            self.plan.training_schedule(len(batches), rank=self.mesh.pp.rank), batches, scales, clock=clock
        )
        self.gradient_reducer.finish_grad_sync()
        self.fp8_gemms.weights_changed()  # the optimizer changes them next; no forward runs before
        self.router_statistics.update(result.router_statistics)
        if timeline is not None:
            timeline(result.timed_actions)
        return self._total_loss(result) / tokens

    def evaluate(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Returns the sum of the token losses of the global batch and the number of valid tokens, without gradients."""
        self._set_mode(training=False)
        self.fp8_gemms.weights_changed()
        batches = [split_batch(batch, self.mesh.cp) for batch in batches]
        tokens = self._count_tokens(batches)
        result = self._pipeline.run(self.plan.evaluation_schedule(len(batches), rank=self.mesh.pp.rank), batches)
        return self._total_loss(result), tokens

    def all_gather_params(self) -> None:
        """All-gathers weights that were changed from outside, and drops their FP8 caches."""
        self.fp8_gemms.weights_changed()
        all_gather_params(self.param_groups)

    def _count_tokens(self, batches: Sequence[Batch]) -> Tensor:
        count = torch.stack([batch.loss_mask.sum(dtype=torch.float64) for batch in batches]).sum()
        first = self.mesh.tp.rank == 0 and self.mesh.pp.rank == 0  # the others count the same tokens
        return self._sum(count, over="dp_cp", here=first).clamp(min=1.0)

    def _total_loss(self, result: StepResult) -> Tensor:
        """Sums over the global batch; ranks of one tensor-parallel group have the same share of it."""
        return self._sum(result.loss_sum, over="losses", here=self.mesh.tp.rank == 0)

    def _sum(self, x: Tensor, *, over: str, here: bool) -> Tensor:
        """Sums a scalar over an axis, on all ranks; `here` is true on one of the ranks with the same value.

        Uses the communicator of the whole world, which every run has for the gradient norm: eight bytes do not justify
        another, and adding zeros changes no bit.
        """
        if self.mesh[over].size == 1:
            return x
        return collectives.all_reduce(x if here else torch.zeros_like(x), self.mesh.world)

    def _set_mode(self, *, training: bool) -> None:
        for stage in self.stages.values():
            if stage.training != training:  # traversing all modules costs a small model a tenth of its step
                stage.train(training)

    def _empty_stage_input(self, batch: Batch) -> Tensor:
        """Returns an empty tensor of a stage input's shape: this rank's part of the sequence."""
        size, length = batch.tokens.shape
        rows = length // self.mesh.tp.size if self.sequence_parallel else length
        hidden = self.spec.config.hidden_size
        return torch.empty(rows, size, hidden, dtype=self.dtype, device=self.mesh.device)

    def _clock(self) -> float:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        return time.time()  # perf_counter has another zero on every machine
