"""`ParallelModel`: a model on a mesh, ready to be trained by any loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import TrainError
from petatron.kernels.block_quantization import QuantizedFormat
from petatron.mesh import collectives
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rng import RandomStreams
from petatron.models.batch import Batch, SamplePart
from petatron.models.model_spec import ModelSpec
from petatron.models.objective import NextToken, Objective
from petatron.models.stage_inputs_outputs import ModelIO
from petatron.models.stage_interface import StageModule
from petatron.parallel.context import split_batch
from petatron.parallel.data.gradient_reduction import GradientReducer
from petatron.parallel.layer_losses import LayerLosses
from petatron.parallel.model_beneath_adapters import RoleModel
from petatron.parallel.parallelize import ParallelizeResult
from petatron.parallel.pipeline.auto_cuda_graphs import AutoGraphedSteps, CaptureInputs
from petatron.parallel.pipeline.cuda_graph import CudaGraphCapture, GraphedSteps
from petatron.parallel.pipeline.executor import LossScales, PipelineExecutor, StepResult
from petatron.parallel.pipeline.objective_losses import maxima_of, valid_count
from petatron.parallel.router_statistics import RouterStatistics
from petatron.schedule import RankSchedule
from petatron.schedule.actions import TimedAction
from petatron.schedule.pipeline_plan import PipelinePlan
from petatron.sharding.flat_buffer import FlatParamGroup
from petatron.sharding.flat_shard import all_gather_params
from petatron.sharding.row_sharded_group import RowShardedGroup


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
        io: ModelIO,
        spec: ModelSpec,
        dtype: torch.dtype,
        sequence_parallel: bool,
        objective: Objective | None = None,
        layer_losses: LayerLosses | None = None,
    ) -> None:
        """`objective`: what training minimizes; by default the losses that the model computes itself. `layer_losses`: layers' own."""
        self.io = io
        self.objective = NextToken(losses=io.losses) if objective is None else objective
        self.role_models: dict[str, RoleModel] = {}
        self.spec = spec
        self.stages = stages
        self.mesh = mesh
        self.rng_streams = rng_streams
        self.plan = plan
        self.sequence_parallel = sequence_parallel
        self.placements = parallelized.placements
        self.param_groups = parallelized.param_groups
        self._row_groups = [group for group in self.param_groups if isinstance(group, RowShardedGroup)]
        self.gradient_reducer = parallelized.gradient_reducer
        self.fp8_gemms = parallelized.fp8_gemms
        self.batch_invariant = parallelized.batch_invariant
        """Whether the bits of a token depend on it and its document alone, and an engine has the trainer's (`--exact-rollouts`)."""
        self._weight_grad_queue = parallelized.weight_grad_queue
        self.router_statistics = router_statistics
        self.layer_losses = layer_losses or LayerLosses({}, mesh)
        self.dtype = dtype
        self._pipeline = PipelineExecutor(
            stages=stages,
            axis=mesh.pp,
            io=io,
            objective=self.objective,
            dtype=dtype,
            device=mesh.device,
            sequence_shards=mesh.tp.size if sequence_parallel else 1,
            weight_grad_queue=parallelized.weight_grad_queue,
            combined_passes=parallelized.combined_passes,
        )
        self._run_step: Callable[..., StepResult] = self._run_and_reduce
        self._run_evaluation: Callable[..., StepResult] = self._pipeline.run
        weights = [loss.weight for loss in self.objective.losses]
        self._loss_weights = (
            None if weights == [1.0] else torch.tensor(weights, dtype=torch.float64, device=mesh.device)
        )
        self._means: Tensor | None = None
        self.frozen_tensors: Collection[str] = frozenset()
        """The logical tensors of the whole model that are not trained."""
        self.frozen_format: QuantizedFormat | None = None
        """The form in which the frozen weights of large GEMMs are once they are there; None: the precision of the model."""
        self.has_gradients = True
        """Whether it can be trained: whether anything of it is."""

    def use_cuda_graphs(self, graph_capture: CudaGraphCapture, inputs: CaptureInputs | None = None) -> None:
        """Captures and replays training steps as CUDA graphs from now on (`parallel/pipeline/cuda_graph.py`).

        With `inputs` they decide, after some steps, whether anything is captured (`parallel/pipeline/auto_cuda_graphs.py`).
        """
        reducer = self.gradient_reducer
        assert isinstance(reducer, GradientReducer), "fully_shard communicates inside a step"
        options: dict[str, Any] = {"prepare": self._prepare_graph}
        if inputs is not None:
            options |= {"undo_point": self._undo_point, "warm_up_steps": 1}
            options |= {"any_rank": lambda here: inputs.max_over_ranks([float(here)]) == [1.0]}
        # Reductions that overlap the backward pass are in the graph; others follow it, over any backend.
        run = self._run_and_reduce if reducer.overlap else self._run_passes
        steps = GraphedSteps(run, reducer, graph_capture, **options)
        if inputs is not None:
            steps = AutoGraphedSteps(run, steps, inputs, restart_step=self._start_step)
        self._run_evaluation = partial(steps.run_evaluation, self._pipeline.run)
        self._run_step = steps.run if reducer.overlap else partial(self._run_and_reduce, run=steps.run)

    @property
    def module(self) -> StageModule:
        """The whole model, where one rank has all its layers in one stage."""
        assert self.plan.ranks == self.plan.virtual == 1, "the model is spread over pipeline stages"
        return next(iter(self.stages.values()))

    @property
    def fully_sharded(self) -> bool:
        """Whether ranks hold shards of weights, and gather them for each use."""
        return not isinstance(self.gradient_reducer, GradientReducer)

    @property
    def layout_key(self) -> str:
        """Identifies a layout as far as RNG streams are concerned.

        Checkpoints hold it, so it stays as it is: a setting that is newer is added only where it is not its default.
        """
        key = f"{self.mesh.layout} sequence_parallel={self.sequence_parallel} {self.plan}"
        return f"{key} pp_before_dp" if self.mesh.layout.pp_before_dp else key

    @property
    def named_losses(self) -> dict[str, Tensor]:
        """The mean of each loss in the last training step, before its weight, on the device."""
        means = () if self._means is None else self._means
        return {loss.name: mean for loss, mean in zip(self.objective.losses, means)}

    @property
    def named_metrics(self) -> dict[str, Tensor]:
        """The mean of each metric of the objective in the last training step, and of losses of layers' own, on the device."""
        means = () if self._means is None else self._means[len(self.objective.losses) :]
        metric_specs = self.objective.metric_specs if self.objective.measures_training else ()
        metrics = {metric.name: mean for metric, mean in zip(metric_specs, means)}
        return metrics | self.layer_losses.means

    @property
    def computes_loss(self) -> bool:
        """Whether the last stage of the model is on this rank."""
        return self.plan.ranks * self.plan.virtual - 1 in self.stages

    def train_step(
        self,
        batches: Sequence[Batch],
        *,
        loss_scale: float = 1.0,
        timeline: Callable[[list[TimedAction]], None] | None = None,
    ) -> Tensor:
        """Runs forward and backward of this rank's micro-batches; gradients are reduced when it returns.

        Returns the mean loss per valid token of the *global* batch, on the device. One formula for every layout: the sum of
        token losses over all ranks and micro-batches, divided by their number of valid tokens. Of several losses it is the
        weighted sum, and `named_losses` has each; `named_metrics` has the metrics of the objective. `timeline`
        receives when each action ran; timing synchronizes the device after each.
        """
        if not self.has_gradients:
            raise TrainError(
                "The model was opened with gradients=False: it is frozen as a whole. Open it without that."
            )
        if not self.objective.losses:
            raise TrainError(
                "The model has no loss of its own: it ends with a head on whole texts. Open it with the objective that trains it, such as "
                'flags=["--objective", "classification"].'
            )
        batches = self._prepare(batches)
        self._set_mode(training=True)
        self._start_step(len(batches))
        counts = self._count_valid(batches)
        tokens = self._of_losses(counts)
        aux_loss_scale = torch.full_like(tokens[0], loss_scale / (len(batches) * self.mesh.dp.size))
        token_loss_scale = (loss_scale if self._loss_weights is None else loss_scale * self._loss_weights) / tokens
        scales = LossScales(token_loss=token_loss_scale, aux_loss=aux_loss_scale)
        clock = self._clock if timeline is not None else None
        result = self._run_step(
            self.plan.training_schedule(len(batches), rank=self.mesh.pp.rank), batches, scales, clock=clock
        )
        self.fp8_gemms.end_step()  # the optimizer changes them next; no forward runs before
        self.router_statistics.update(result.router_statistics)
        self.layer_losses.update(result.router_statistics, micro_batches=len(batches))
        if timeline is not None:
            timeline(result.timed_actions)
        self._means = self._total(result) / counts
        return self.total_loss(self._of_losses(self._means))

    def _run_passes(
        self, schedule: RankSchedule, batches: Sequence[Batch], *arguments: Any, **options: Any
    ) -> StepResult:
        """Runs the passes of a step over weights that have changed."""
        self.fp8_gemms.new_step(len(batches))
        for group in self._flat_groups():
            group.start_due_gather()
        result = self._pipeline.run(schedule, batches, *arguments, **options)
        for group in self._flat_groups():
            group.wait_for_params()
        return result

    def _run_and_reduce(
        self, *arguments: Any, run: Callable[..., StepResult] | None = None, **options: Any
    ) -> StepResult:
        """Runs the passes of a step, and finishes the reduction of its gradients."""
        result = (run or self._run_passes)(*arguments, **options)
        self.gradient_reducer.finish_grad_sync()
        return result

    def _start_step(self, num_micro_batches: int) -> None:
        self._weight_grad_queue.start_step()
        for group in self._row_groups:
            group.start_step()
        self.gradient_reducer.start_step(num_micro_batches)

    def _undo_point(self) -> Callable[[], None]:
        """Returns a function that restores the host's bookkeeping after a step that is captured and not run."""
        undo_fp8 = self.fp8_gemms.undo_point()

        def undo() -> None:
            undo_fp8()
            for group in self._flat_groups():
                group.gather_again()

        return undo

    def _prepare_graph(self, *, trains: bool, captured: bool) -> None:
        """Completes all-gathers of weights in flight, which a graph cannot wait for, or leaves them to a graph that trains."""
        for group in self._flat_groups():
            if trains:
                group.gather_in_step(captured=captured)
            else:
                group.wait_for_params()

    def _flat_groups(self) -> Iterator[FlatParamGroup]:
        return (group for group in self.param_groups if isinstance(group, FlatParamGroup))

    def total_loss(self, mean_losses: Tensor) -> Tensor:
        """Returns what training minimizes: the weighted sum of the means of all losses [losses]."""
        return mean_losses[0] if self._loss_weights is None else (mean_losses * self._loss_weights).sum()

    def evaluate(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Returns the sum of the token losses of the global batch and the number of valid tokens, without gradients.

        Of several losses, `evaluate_losses` has each; the quotient of what this returns is their weighted sum.
        """
        sums, tokens = self.evaluate_losses(batches)
        if self._loss_weights is None:
            return sums[0], tokens[0]
        return self.total_loss(sums / tokens) * tokens[0], tokens[0]

    def evaluate_losses(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Returns the sum of the token losses of the global batch and the number of valid tokens, of each loss [losses]."""
        sums, counts = self.evaluate_objective(batches)
        return self._of_losses(sums), self._of_losses(counts)

    def evaluate_objective(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Returns the sums over the global batch and the number of valid tokens or samples, of each loss, then of each metric."""
        batches = self._prepare(batches)
        counts = self._count_valid(batches)
        return self._total(self._run_forward(batches)), counts

    def forward(self, batches: Sequence[Batch], *, collect: Collection[str]) -> list[dict[str, Tensor]]:
        """Runs a forward pass in evaluation mode and returns outputs of each micro-batch by name, on the ranks that compute them.

        With pipeline parallelism other ranks return empty dicts. With context parallelism outputs are those of this rank's part
        of the sequence. Batches without labels have no loss, which saves computing it.

        >>> import petatron, torch
        >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
        >>> model = petatron.build_model(run, petatron.launch(run))
        >>> [outputs] = model.forward([petatron.Batch(torch.zeros(2, 8, dtype=torch.int64))], collect=["logits"])
        >>> outputs["logits"].shape[:2]
        torch.Size([2, 8])
        """
        unknown = [name for name in collect if name not in self.io.outputs]
        if unknown:
            raise TrainError(
                f"The model has no output {', '.join(map(repr, unknown))}. It has: {', '.join(self.io.outputs) or 'none'}."
            )
        return self._run_forward(self.split(batches), collect).collected

    def _run_forward(self, batches: Sequence[Batch], collect: Collection[str] = ()) -> StepResult:
        self._set_mode(training=False)
        self.fp8_gemms.end_step()
        schedule = self.plan.evaluation_schedule(len(batches), rank=self.mesh.pp.rank)
        if collect:
            return self._pipeline.run(schedule, batches, collect=collect)
        return self._run_evaluation(schedule, batches)

    def split(self, batches: Sequence[Batch]) -> list[Batch]:
        """Returns this rank's parts of whole batches, with what the model adds to them."""
        batches = batches if self.io.extend_batch is None else [self.io.extend_batch(batch) for batch in batches]
        return [split_batch(batch, self.mesh.cp, order=self.io.sequence_order) for batch in batches]

    def _prepare(self, batches: Sequence[Batch]) -> list[Batch]:
        """Splits whole batches, and adds what the objective reads: outputs of its models, and what it prepares of them."""
        local, objective = self.split(batches), self.objective
        if objective.reads_all_samples and self.mesh.dp.size > 1:
            part = SamplePart(self.mesh.dp.rank, partial(collectives.gather_from_region, axis=self.mesh.dp))
            local = [replace(batch, sample_part=part) for batch in local]
        for role, wanted in objective.models.items():
            if not wanted.outputs:
                continue
            model = self if wanted.folder is None else self.role_models[role]
            for index, outputs in enumerate(model.forward(batches, collect=wanted.outputs)):
                named = {wanted.array(role, name): x for name, x in outputs.items()}
                local[index] = local[index].with_arrays(**named)
        if self.computes_loss and type(objective).prepare is not Objective.prepare:
            with torch.no_grad():
                local = [objective.prepare(batch) for batch in local]
        return local

    def all_gather_params(self) -> None:
        """All-gathers weights that were changed from outside, and drops their FP8 caches."""
        self.fp8_gemms.end_step()
        all_gather_params(self.param_groups)

    def _count_valid(self, batches: Sequence[Batch]) -> Tensor:
        """Returns the number of valid tokens, or samples, of each loss and metric in the global batch [losses + metrics]."""
        specs = (*self.objective.losses, *self.objective.metric_specs)
        counts = [valid_count(spec, batch) for spec in specs for batch in batches]
        count = torch.stack(counts).view(len(specs), len(batches)).sum(dim=1)
        first = self.mesh.tp.rank == 0 and self.mesh.pp.rank == 0  # the others count the same tokens
        return self._sum(count, over="dp_cp", here=first).clamp(min=1.0)

    def _of_losses(self, values: Tensor) -> Tensor:
        """Returns the values of losses, which come before those of metrics."""
        return values[: len(self.objective.losses)] if self.objective.metric_specs else values

    def _total(self, result: StepResult) -> Tensor:
        """Sums over the global batch, or takes the maxima; ranks of one tensor-parallel group have the same share of it."""
        maxima = maxima_of(self.objective)
        if not maxima:
            return self._sum(result.sums, over="losses", here=self.mesh.tp.rank == 0)
        sums, largest = result.sums.clone(), torch.stack([result.sums[place] for place in maxima])
        for place in maxima:  # by number, which waits for no device
            sums[place].zero_()
        total = self._sum(sums, over="losses", here=self.mesh.tp.rank == 0)
        if self.mesh["losses"].size > 1:
            largest = collectives.all_reduce(largest, self.mesh.world, op="max")
        for place, value in zip(maxima, largest.masked_fill(largest == -torch.inf, 0.0)):
            total[place].copy_(value)
        return total

    def _sum(self, x: Tensor, *, over: str, here: bool) -> Tensor:
        """Sums a few numbers over an axis, on all ranks; `here` is true on one of the ranks with the same value.

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

    def _clock(self) -> float:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        return time.time()  # perf_counter has another zero on every machine
