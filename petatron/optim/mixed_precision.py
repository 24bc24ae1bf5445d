"""The mixed-precision optimizer: fp32 master weights of what this rank updates, clipping, loss unscaling, a skip on the device.

One step, in order: the global gradient norm (of gradients still multiplied by the loss scale); from it one factor that undoes
the loss scale and clips, and whether the update is skipped, both on the device; then, in one pass over all elements, the
update rule on the master weights and these rounded to the model's precision; at last the all-gather of the new weights.
Gradients are read twice and never written. In fp32 and fp64 the master weights *are* the model's. A rank has state per flat shard
it owns (`sharding/flat_shard.py`), so this file does not depend on how state is sharded, nor on where it is stored: an offloaded
segment (`state_segments.py`) is copied to the device for its update (`swap_offloaded_state.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from petatron.base.errors import TrainError
from petatron.base.format_text import gigabytes
from petatron.base.log import get_logger
from petatron.config.optimizer_registry import rule_spec, used_rules
from petatron.config.required_settings import required
from petatron.config.schema.memory import MemoryConfig
from petatron.config.schema.optimizer import OptimizerConfig
from petatron.config.schema.optimizers.update_rule_spec import RuleStateTensor
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.build_update_rules import build_update_rule
from petatron.optim.gradient_norm import GlobalNorm, clip_factor
from petatron.optim.matrix_update import MatrixUpdate
from petatron.optim.offload_storage import AllocateZeros, DiskStorage, describe_offload_target
from petatron.optim.state_segments import SegmentRange, StateSegment, plan_ranges, slice_flat_shard
from petatron.optim.swap_offloaded_state import DiskStaging, PinnedStaging, StateSwapper, SwapStreams, SwapTask
from petatron.optim.touched_row_update import TouchedRowUpdate
from petatron.optim.update_by_tensor_sums import TensorUpdate
from petatron.optim.update_rules import (
    TORCH_KERNELS,
    ElementRule,
    MatrixRule,
    OptimizerKernels,
    ParamSlice,
    RuleContext,
    StepScalars,
    TensorRule,
    UpdateFunction,
)
from petatron.sharding.flat_shard import FlatShard, ParameterGroup, all_gather_params
from petatron.sharding.row_sharded_group import RowShardedGroup
from petatron.sharding.shard_spec import TensorShard

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Device scalars of one update: the unscaled gradient norm, and 1.0 where the update was skipped."""

    grad_norm: Tensor
    skipped: Tensor


class MixedPrecisionOptimizer:
    """Updates a model whose parameters live in flat groups.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> optimizer = petatron.build_optimizer(run, model)
    >>> _ = model.train_step(next(petatron.build_loader(run, model.mesh)))
    >>> bool(optimizer.step().grad_norm > 0)
    True
    """

    def __init__(
        self,
        config: OptimizerConfig,
        param_groups: Sequence[ParameterGroup],
        mesh: ParallelMesh,
        *,
        memory: MemoryConfig | None = None,
        kernels: OptimizerKernels = TORCH_KERNELS,
    ) -> None:
        """`memory` says where state is stored; None means on the device. Float64 uses torch's kernels, whatever is given."""
        self._config = config
        trained = [group for group in param_groups if group.spec.trainable]
        self._row_groups = [group for group in trained if isinstance(group, RowShardedGroup)]
        # Last, so that the gradients of the others, by flat shard, have the same indices with and without them.
        self._param_groups = [
            *(group for group in trained if not isinstance(group, RowShardedGroup)),
            *self._row_groups,
        ]
        self._frozen_groups = [group for group in param_groups if not group.spec.trainable]
        weights = self.trained_weights()
        self._device = weights[0].device if weights else mesh.device
        if any(weight.dtype == torch.float64 for weight in weights):
            kernels = TORCH_KERNELS
        # A rank on which a rule of the run updates nothing counts its updates too: every rank saves the same.
        names = dict.fromkeys(
            (*(group.spec.rule for group in self._param_groups), *(rule.name for rule in used_rules(config)))
        )
        context = RuleContext(self._device, kernels)
        self._rules = {name: build_update_rule(name, config, context) for name in names}
        self._rule_specs = {name: rule_spec(config, name) for name in names}
        self.segments = self._allocate_state(memory or MemoryConfig(), weights)
        """The state of this rank by flat shard; offloaded state may still be written back."""
        self._state_swapper = self._build_state_swapper(memory or MemoryConfig())
        self._log_offloaded(None if memory is None else memory.optimizer_nvme_offload)
        self._unit_updates = list(self._build_unit_updates(mesh))
        self._row_updates = [
            TouchedRowUpdate(segment.group, segment)
            for segment in self.segments
            if isinstance(segment.group, RowShardedGroup)
        ]
        dense = [flat_shard for group, flat_shard in self._owners() if not isinstance(group, RowShardedGroup)]
        self._grad_norm = self._global_norm(dense, mesh, kernels)
        owned = [segment.flat_shard for segment in self.segments]
        frozen = [flat_shard for group in self._frozen_groups for flat_shard in group.flat_shards]
        self._weight_norm = self._global_norm([*owned, *frozen], mesh, kernels)

    def _global_norm(self, flat_shards: list[FlatShard], mesh: ParallelMesh, kernels: OptimizerKernels) -> GlobalNorm:
        # A rank whose parameters are all frozen has no tensors to tell the precision that all ranks sum in.
        weights = (weight for group in (*self._param_groups, *self._frozen_groups) for weight in group.weights())
        dtype = next((weight.dtype for weight in weights), torch.float32)
        return GlobalNorm(flat_shards, mesh.world, self._device, kernels.sum_of_squares, dtype=dtype)

    def trained_weights(self) -> list[Tensor]:
        """Returns the model's weights that this rank updates, one tensor per flat shard."""
        return [weight for group in self._param_groups for weight in group.weights()]

    def _grads(self) -> list[Tensor]:
        """Returns the owned gradients but those of row-sharded tables, of which few rows have any."""
        groups = self._param_groups[: len(self._param_groups) - len(self._row_groups)]
        return [grad for group in groups for grad in group.grads()]

    def _allocate_state(self, memory: MemoryConfig, weights: Sequence[Tensor]) -> list[StateSegment]:
        """Allocates the state of every element: the master weights as the model has them now, and zero moments."""
        folder = memory.optimizer_nvme_offload
        away = memory.optimizer_cpu_offload or folder is not None
        fraction = memory.optimizer_offload_fraction if away else 0.0
        ranges = list(plan_ranges([weight.numel() for weight in weights], fraction))
        # Page-locked where a CUDA device copies from it, since only then copies overlap other work.
        elsewhere: AllocateZeros = partial(torch.zeros, pin_memory=self._device.type == "cuda")
        if folder is not None:
            offloaded = [(part.length, part.flat_shard_index) for part in ranges if part.offloaded]
            sizes = (([length], self._state_dtypes(index, weights[index])) for length, index in offloaded)
            elsewhere = DiskStorage(folder, sum(DiskStorage.required_bytes(*size) for size in sizes)).zeros
        here = partial(torch.zeros, device=self._device)
        return [self._build_segment(part, weights, elsewhere if part.offloaded else here) for part in ranges]

    def _build_segment(self, part: SegmentRange, weights: Sequence[Tensor], zeros: AllocateZeros) -> StateSegment:
        owners = self._owners()
        group, flat_shard = owners[part.flat_shard_index]
        weight = weights[part.flat_shard_index][part.begin : part.end]
        wide = torch.promote_types(weight.dtype, torch.float32)
        apart = weight.dtype != wide
        master = zeros(part.length, dtype=wide).copy_(weight) if apart else weight.detach()
        moments = (zeros(part.length, dtype=_state_dtype(state, wide)) for state in self._element_state(group))
        before = sum(shard.length for other, shard in owners[: part.flat_shard_index] if other is group)
        flat_shard = slice_flat_shard(flat_shard, part.begin, part.end)
        return StateSegment(part, group, flat_shard, master, tuple(moments), apart, before + part.begin)

    def _owners(self) -> list[tuple[ParameterGroup, FlatShard]]:
        return [(group, flat_shard) for group in self._param_groups for flat_shard in group.flat_shards]

    def _build_unit_updates(self, mesh: ParallelMesh) -> Iterator[tuple[ParameterGroup, MatrixUpdate | TensorUpdate]]:
        """Yields the updates of groups whose rule needs more than single elements."""
        begin = 0
        for group in self._param_groups:
            first, begin = begin, begin + len(group.flat_shards)
            rule, spec = self._rules[group.spec.rule], self._rule_specs[group.spec.rule]
            if spec.unit == "element":
                continue
            owned = [segment for segment in self.segments if segment.group is group]
            assert not any(segment.range.offloaded for segment in owned), f"state of {spec.name} is offloaded"
            segments = {segment.range.flat_shard_index - first: segment for segment in owned}
            for expert in (False, True):
                placements = [placement for placement in group.placements if placement.expert is expert]
                if not placements:
                    continue
                if spec.unit == "matrix":
                    yield group, MatrixUpdate(group, placements, segments, cast(MatrixRule, rule), spec, mesh)
                else:
                    yield group, TensorUpdate(group, placements, segments, cast(TensorRule, rule), spec, mesh)

    def _element_state(self, group: ParameterGroup) -> list[RuleStateTensor]:
        """Returns the state of a group with a value for each element, in the order of `StateSegment.moments`."""
        spec = self._rule_specs[group.spec.rule]
        shapes = {placement.shape[1:] if placement.expert else placement.shape for placement in group.placements}
        states = {spec.element_state(shape) for shape in shapes}
        if len(states) > 1:
            raise TrainError(
                f"An optimizer group mixes parameters, and {spec.name} has other state for some of their shapes. Change the group that "
                "petatron.models.optimizer_groups.optimizer_group returns with dataclasses.replace instead of building a GroupSpec."
            )
        return list(*states)

    def _state_dtypes(self, flat_shard_index: int, weight: Tensor) -> list[torch.dtype]:
        """Returns the dtypes of an element's state besides the model's weight, in the order of `StateSegment.state`."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        group, _ = self._owners()[flat_shard_index]
        moments = [_state_dtype(state, wide) for state in self._element_state(group)]
        return moments if weight.dtype == wide else [wide, *moments]

    def _log_offloaded(self, folder: str | None) -> None:
        away = sum(state.nbytes for part in self.segments if part.range.offloaded for state in part.state)
        if away:
            where = describe_offload_target(folder, self._device)
            _log.info("offload: %s GB of this rank's optimizer state wait in %s", gigabytes(away), where)

    def _build_state_swapper(self, memory: MemoryConfig) -> StateSwapper | None:
        """Builds the swapper that copies state to a device that cannot address it; a CPU updates it in place."""
        away = [segment for segment in self.segments if segment.range.offloaded]
        if self._device.type == "cpu" or not away:
            return None
        length = max(segment.range.length for segment in away)
        dtypes = [state.dtype for state in away[0].state]
        on_disk = memory.optimizer_nvme_offload is not None
        side = DiskStaging(dtypes, length, pinned=True) if on_disk else PinnedStaging()
        return StateSwapper(SwapStreams.cuda(self._device), side, dtypes, length, self._device)

    @torch.no_grad()
    def step(
        self,
        *,
        lr: float | None = None,
        decoupled_lr: float | None = None,
        weight_decay: float | None = None,
        loss_scale: float = 1.0,
    ) -> UpdateResult:
        """One update from the accumulated gradients; `loss_scale` is what they were multiplied with.

        Without a schedule, learning rates and weight decay are the config's. `decoupled_lr` is that of the embedding and output head.
        """
        lr = required("lr", self._config.lr) if lr is None else lr
        decoupled_lr = self._config.decoupled_lr if decoupled_lr is None else decoupled_lr
        weight_decay = self._config.weight_decay if weight_decay is None else weight_decay
        grads = self._grads()
        norm = self._grad_norm.norm(grads, [group.touched.grads for group in self._row_groups]) / loss_scale
        factor = torch.full_like(norm, 1.0 / loss_scale)
        if self._config.clip_grad > 0.0:
            factor = factor * clip_factor(norm, self._config.clip_grad)
        skipped = (~norm.isfinite()).to(torch.float32)
        step = StepScalars(
            grad_factor=factor,
            skipped=skipped,
            lr=lr,
            decoupled_lr=lr if decoupled_lr is None else decoupled_lr,
            weight_decay=weight_decay,
        )
        self._update(step, grads)
        all_gather_params(self._param_groups)
        return UpdateResult(norm, skipped)

    def _update(self, step: StepScalars, grads: Sequence[Tensor]) -> None:
        weights = self.trained_weights()
        frozen = {id(placement) for group in self._param_groups for placement in group.frozen()}
        started = {name: cast(ElementRule, rule).start_step(step) for name, rule in self._rules.items()}
        updates = {name: update for name, update in started.items() if self._rule_specs[name].unit == "element"}
        visits: list[SwapTask] = []
        for segment in self.segments:
            update = updates.get(segment.group.spec.rule)
            if update is None or isinstance(segment.group, RowShardedGroup):
                continue
            grad, weight = segment.slice_of(grads), segment.slice_of(weights)
            work = partial(_update_segment, update, segment, frozen, grad, weight)
            if self._state_swapper is not None and segment.range.offloaded:
                visits.append(SwapTask(segment.state, work))
            else:
                work(segment.state)
        if self._state_swapper is not None:
            self._state_swapper.run(visits)
        for group, units in self._unit_updates:
            units.run(step.of_group(group.spec), frozen=frozen)
        for rows in self._row_updates:
            rows.run(updates[rows.group.spec.rule])

    def _wait_for_state(self) -> None:
        """Waits until swapped state is back in its storage, before it is read."""
        if self._state_swapper is not None:
            self._state_swapper.synchronize()

    @torch.no_grad()
    def copy_master_to_model_weights(self) -> None:
        """Copies the master weights into the model where it has its own precision, and all-gathers them."""
        weights = self.trained_weights()
        self._wait_for_state()
        for segment in self.segments:
            if segment.has_master_weights:
                segment.slice_of(weights).copy_(segment.master)
        all_gather_params([*self._param_groups, *self._frozen_groups])

    def count_zero_grads(self) -> Tensor:
        """Counts gradient elements that are exactly zero, over the whole model."""
        touched = [group.touched.grads[: group.num_rows] for group in self._row_groups]
        absent = sum(
            (group.num_rows - x.shape[0]) * x.shape[1] for group, x in zip(self._row_groups, touched, strict=True)
        )
        return self._grad_norm.count_zeros(self._grads(), touched, absent=absent)

    def weight_norm(self) -> Tensor:
        """Returns the L2 norm of the weights of the whole model: of master weights, and of those that are frozen."""
        self._wait_for_state()
        frozen = [weight for group in self._frozen_groups for weight in group.weights()]
        return self._weight_norm.norm([*(segment.master for segment in self.segments), *frozen])

    @property
    def has_master_weights(self) -> bool:
        """Whether the master weights are separate tensors, in a wider precision than the model's."""
        return any(segment.has_master_weights for segment in self.segments)

    def master_weights(self) -> Iterator[tuple[ParameterGroup, TensorShard, Tensor]]:
        """Yields the master weights by logical tensor; the model's own follow from them."""
        self._wait_for_state()
        for segment in self.segments:
            for piece, view in segment.flat_shard.tensor_shards(segment.master):
                yield segment.group, piece, view

    def moments(self) -> Iterator[tuple[str, ParameterGroup, TensorShard, Tensor]]:
        """Yields (kind, group, shard, view) of the update rules' state, by logical tensor."""
        self._wait_for_state()
        for segment in self.segments:
            for state, flat in zip(self._element_state(segment.group), segment.moments, strict=True):
                for piece, view in segment.flat_shard.tensor_shards(flat):
                    yield state.kind, segment.group, piece, view
        for group, units in self._unit_updates:
            for kind, piece, view in units.matrix_state():
                yield kind, group, piece, view

    @torch.no_grad()
    def reset_moments(self, names: Collection[str]) -> None:
        """Gives the state of these logical tensors the values it has before the first update."""
        states = (state for rule in self._rule_specs.values() for state in rule.state((1, 1)))
        identities = {state.kind for state in states if state.initial == "identity"}
        for kind, _, piece, view in self.moments() if names else ():
            if piece.name in names:
                view.zero_()
                if kind in identities:
                    view.diagonal(dim1=-2, dim2=-1).fill_(1.0)

    def scalar_state(self) -> dict[str, float]:
        """Returns state that is not a tensor of the model's shape: how many updates have been applied."""
        return {name: value for rule in self._rules.values() for name, value in rule.scalar_state().items()}

    def load_scalar_state(self, state: dict[str, float]) -> None:
        for rule in self._rules.values():
            rule.load_scalar_state(state)


MasterOptimizer = MixedPrecisionOptimizer
"""The name under which `petatron` exports it."""


def _state_dtype(state: RuleStateTensor, main: torch.dtype) -> torch.dtype:
    return main if state.dtype == "main" else torch.bfloat16


def _update_segment(
    update: UpdateFunction,
    segment: StateSegment,
    frozen: Collection[int],
    grad: Tensor,
    weight: Tensor,
    state: tuple[Tensor, ...],
) -> None:
    """Updates a segment whose state, in the order of `StateSegment.state`, is on the device; parameters that are frozen stay."""
    master, moments = (state[0], state[1:]) if segment.has_master_weights else (weight, state)
    elements = ParamSlice(
        grad=grad,
        master=master,
        moments=moments,
        model_weight=weight if segment.has_master_weights else None,
        start=segment.start,
    )
    parts = map(elements.slice_range, segment.flat_shard.trained_ranges(frozen)) if frozen else (elements,)
    for part in parts:
        update(part, segment.group.spec)
