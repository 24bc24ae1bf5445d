"""The optimizer of a run: fp32 master weights of what this rank updates, clipping, loss unscaling, a skip on the device.

One step, in order: the global gradient norm (of gradients still multiplied by the loss scale); from it one factor that undoes
the loss scale and clips, and whether the update is left out, both on the device; then, in one pass over all elements, the
update rule on the master weights and these rounded to the model's precision; at last the new weights to the ranks that compute
with them. Gradients are read twice and never written. In fp32 and fp64 the master weights *are* the model's. A rank has state
per stretch it owns (`sharding/flat_shard.py`), so how state is sharded is no business of this file; nor is where it lies: a segment
(`state_segments.py`) that is not at home on the device visits it for its update (`state_offload.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from petatron.base.log import get_logger
from petatron.base.text import gigabytes
from petatron.config.schema.parallel import MemoryConfig
from petatron.config.schema.training import OptimizerConfig
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.build import PLAIN, OptimizerKernels, build_rule
from petatron.optim.gradient_norm import GlobalNorm
from petatron.optim.state_offload import DiskSide, Lanes, PinnedSide, Shuttle, Visit
from petatron.optim.state_segments import Range, Segment, cut, plan_ranges
from petatron.optim.state_storage import DeviceHome, DiskHome, Home, HostHome, offload_place
from petatron.optim.update_rules import Elements, StepFacts, Update
from petatron.sharding.flat_shard import ParameterGroup, publish
from petatron.sharding.shard_spec import Piece

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Device scalars of one update: the unscaled gradient norm, and 1.0 where the update was left out."""

    grad_norm: Tensor
    skipped: Tensor


class MasterOptimizer:
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
        groups: Sequence[ParameterGroup],
        mesh: ParallelMesh,
        *,
        memory: MemoryConfig | None = None,
        kernels: OptimizerKernels = PLAIN,
    ) -> None:
        """`memory` says where state lives; None means on the device. Float64 goes by torch's kernels, whatever is given."""
        self._config = config
        self._groups = groups
        weights = self._weights()
        self._device = weights[0].device if weights else mesh.device
        if any(weight.dtype == torch.float64 for weight in weights):
            kernels = PLAIN
        self._rule = build_rule(config, kernels, self._device)
        self._segments = self._place(memory or MemoryConfig(), weights)
        self._shuttle = self._build_shuttle(memory or MemoryConfig())
        self._tell_offloaded(None if memory is None else memory.optimizer_nvme_offload)
        stretches = [stretch for group in groups for stretch in group.stretches]
        self._norm = GlobalNorm(stretches, mesh.world, self._device, kernels.sum_of_squares)
        own = [segment.stretch for segment in self._segments]
        self._master_norm = GlobalNorm(own, mesh.world, self._device, kernels.sum_of_squares)

    def _weights(self) -> list[Tensor]:
        return [weight for group in self._groups for weight in group.weights()]

    def _grads(self) -> list[Tensor]:
        return [grad for group in self._groups for grad in group.grads()]

    def _place(self, memory: MemoryConfig, weights: Sequence[Tensor]) -> list[Segment]:
        """Give every element its state: the master weights as the model has them now, and zero moments."""
        folder = memory.optimizer_nvme_offload
        away = memory.optimizer_cpu_offload or folder is not None
        fraction = memory.optimizer_offload_fraction if away else 0.0
        ranges = list(plan_ranges([weight.numel() for weight in weights], fraction))
        elsewhere: Home = HostHome(self._device)
        if folder is not None:
            num_bytes = sum(
                DiskHome.size_of([one.length], self._state_dtypes(weights[one.index]))
                for one in ranges
                if one.offloaded
            )
            elsewhere = DiskHome(folder, num_bytes)
        here = DeviceHome(self._device)
        return [self._segment(one, weights, elsewhere if one.offloaded else here) for one in ranges]

    def _segment(self, one: Range, weights: Sequence[Tensor], home: Home) -> Segment:
        owners = [(group, stretch) for group in self._groups for stretch in group.stretches]
        group, stretch = owners[one.index]
        weight = weights[one.index][one.begin : one.end]
        wide = torch.promote_types(weight.dtype, torch.float32)
        apart = weight.dtype != wide
        master = home.zeros(one.length, wide).copy_(weight) if apart else weight.detach()
        moments = tuple(home.zeros(one.length, dtype or wide) for dtype in self._rule.moments.values())
        return Segment(one, group, cut(stretch, one.begin, one.end), master, moments, apart)

    def _state_dtypes(self, weight: Tensor) -> list[torch.dtype]:
        """What an element has apart from the model's weight, in the order of `Segment.state`."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        moments = [dtype or wide for dtype in self._rule.moments.values()]
        return moments if weight.dtype == wide else [wide, *moments]

    def _tell_offloaded(self, folder: str | None) -> None:
        away = sum(state.nbytes for one in self._segments if one.range.offloaded for state in one.state)
        if away:
            where = offload_place(folder, self._device)
            _log.info("offload: %s GB of this rank's optimizer state wait in %s", gigabytes(away), where)

    def _build_shuttle(self, memory: MemoryConfig) -> Shuttle | None:
        """What takes state to a device that cannot reach it; a CPU works on it where it lies."""
        away = [segment for segment in self._segments if segment.range.offloaded]
        if self._device.type == "cpu" or not away:
            return None
        length = max(segment.range.length for segment in away)
        dtypes = [state.dtype for state in away[0].state]
        on_disk = memory.optimizer_nvme_offload is not None
        side = DiskSide(dtypes, length, pinned=True) if on_disk else PinnedSide()
        return Shuttle(Lanes.cuda(self._device), side, dtypes, length, self._device)

    @torch.no_grad()
    def step(
        self, *, lr: float | None = None, weight_decay: float | None = None, loss_scale: float = 1.0
    ) -> UpdateResult:
        """One update from the accumulated gradients; `loss_scale` is what they were multiplied with.

        Without a schedule, the learning rate and the weight decay are the config's.
        """
        lr = self._config.lr if lr is None else lr
        assert lr is not None, "neither the config nor the caller gives a learning rate"
        weight_decay = self._config.weight_decay if weight_decay is None else weight_decay
        grads = self._grads()
        norm = self._norm.norm(grads) / loss_scale
        factor = torch.full_like(norm, 1.0 / loss_scale)
        if self._config.clip_grad > 0.0:
            factor = factor * (self._config.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        skipped = (~norm.isfinite()).to(torch.float32)
        update = self._rule.begin(StepFacts(factor=factor, skipped=skipped, lr=lr, weight_decay=weight_decay))
        self._update(update, grads)
        publish(self._groups)
        return UpdateResult(norm, skipped)

    def _update(self, update: Update, grads: Sequence[Tensor]) -> None:
        weights = self._weights()
        visits: list[Visit] = []
        for segment in self._segments:
            work = partial(_update_segment, update, segment, segment.of(grads), segment.of(weights))
            if self._shuttle is not None and segment.range.offloaded:
                visits.append(Visit(segment.state, work))
            else:
                work(segment.state)
        if self._shuttle is not None:
            self._shuttle.run(visits)

    def _settle(self) -> None:
        """Let state that is on its way come home before anyone looks at it."""
        if self._shuttle is not None:
            self._shuttle.settle()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the master weights into the model where it has its own precision, and tell the other ranks."""
        weights = self._weights()
        self._settle()
        for segment in self._segments:
            if segment.apart:
                segment.of(weights).copy_(segment.master)
        publish(self._groups)

    def zero_grad_elements(self) -> Tensor:
        """How many gradient elements are exactly zero, over the whole model."""
        return self._norm.zeros(self._grads())

    def weight_norm(self) -> Tensor:
        """L2 norm of the master weights of the whole model."""
        self._settle()
        return self._master_norm.norm([segment.master for segment in self._segments])

    @property
    def weights_apart(self) -> bool:
        """Whether the master weights are memory of their own, in a wider precision than the model's."""
        return any(segment.apart for segment in self._segments)

    def weights(self) -> Iterator[tuple[ParameterGroup, Piece, Tensor]]:
        """The master weights by logical tensor; the model's own follow from them."""
        self._settle()
        for segment in self._segments:
            for piece, view in segment.stretch.pieces(segment.master):
                yield segment.group, piece, view

    def moments(self) -> Iterator[tuple[str, ParameterGroup, Piece, Tensor]]:
        """Every (kind, group, piece, view) of the update rule's state, by logical tensor."""
        self._settle()
        for segment in self._segments:
            for kind, flat in zip(self._rule.moments, segment.moments):
                for piece, view in segment.stretch.pieces(flat):
                    yield kind, segment.group, piece, view

    def facts(self) -> dict[str, float]:
        """State that is not a tensor of the model's shape: how many updates have been applied."""
        return self._rule.facts()

    def restore_facts(self, facts: dict[str, float]) -> None:
        self._rule.restore(facts)


def _update_segment(update: Update, segment: Segment, grad: Tensor, weight: Tensor, state: tuple[Tensor, ...]) -> None:
    """The update of a segment whose state, in the order of `Segment.state`, is on the device."""
    master, moments = (state[0], state[1:]) if segment.apart else (weight, state)
    elements = Elements(
        grad=grad,
        master=master,
        moments=moments,
        weight=weight if segment.apart else None,
        start=segment.range.begin,
    )
    update(elements, segment.group.decay)
