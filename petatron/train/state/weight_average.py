"""The exponential moving average of the weights (EMA; Polyak and Juditsky 1992): often a better model than the last weights.

    average <- decay * average + (1 - decay) * weights        after an update

It begins with a copy of the weights, as `torch.optim.swa_utils.AveragedModel` does. A rank averages the master weights that it updates, in
their precision and sharding, so the average is sharded exactly as the optimizer's state is (ZeRO-1, FSDP, tensor-, pipeline- and
expert-parallel ranks) and nothing is communicated. Frozen weights are their own average, and none is kept. An update that was skipped
on the device counts with weight zero there: the host does not wait for it.

For an evaluation the model takes the average in place. Where master weights are separate they stay, and the model's weights are rounded
from the average, afterwards from them again; where the model's weights are the master weights, both change places, a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from petatron.base.errors import Problem
from petatron.base.untrusted_files import is_count
from petatron.checkpoint.stateful_components import SavedState
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.config import RunConfig
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.state.run_state_components import AlternativeWeights

_SWAP_ELEMENTS = 1 << 24


class WeightAverage(AlternativeWeights):
    """The average of this rank's master weights, one tensor per segment of the optimizer's state."""

    name, title, trained_only = "ema", "averaged weights", True

    def __init__(
        self,
        model: ParallelModel,
        optimizer: MixedPrecisionOptimizer,
        *,
        decay: float,
        start: int = 0,
        interval: int = 1,
    ) -> None:
        """It begins after `start` updates, and takes every `interval`-th update from there."""
        self._model, self._optimizer = model, optimizer
        self._decay, self._start, self._interval = decay, start, interval
        self._averages = [segment.master.detach().clone() for segment in optimizer.segments]
        self._count = 0

    @property
    def is_ready(self) -> bool:
        return self._count > 0

    @torch.no_grad()
    def after_update(self, *, updates: int, skipped: Tensor | None) -> None:
        if updates <= self._start or (updates - self._start) % self._interval:
            return
        self._count += 1
        if self._count == 1:
            self._copy_weights()
            return
        for average, segment in zip(self._averages, self._optimizer.segments, strict=True):
            if skipped is None:
                average.lerp_(segment.master, 1.0 - self._decay)
            else:
                average.lerp_(segment.master, (1.0 - skipped).to(average.dtype) * (1.0 - self._decay))

    @torch.no_grad()
    def _copy_weights(self) -> None:
        for average, segment in zip(self._averages, self._optimizer.segments, strict=True):
            average.copy_(segment.master)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        self._exchange(into_model=True)
        try:
            yield
        finally:
            self._exchange(into_model=False)

    @torch.no_grad()
    def _exchange(self, *, into_model: bool) -> None:
        weights = self._optimizer.trained_weights()
        for average, segment in zip(self._averages, self._optimizer.segments, strict=True):
            if segment.has_master_weights:
                segment.slice_of(weights).copy_(average if into_model else segment.master)
                continue
            for mine, theirs in zip(average.split(_SWAP_ELEMENTS), segment.slice_of(weights).split(_SWAP_ELEMENTS)):
                kept = mine.clone()
                mine.copy_(theirs)
                theirs.copy_(kept)
        self._model.all_gather_params()

    def chunks(self) -> Iterator[Chunk]:
        if not self.is_ready:  # until it begins it is the weights
            self._copy_weights()
        for average, segment in zip(self._averages, self._optimizer.segments, strict=True):
            for shard, view in segment.flat_shard.tensor_shards(average):
                yield Chunk.of_shard(self.name, segment.group, shard, view)

    def values(self) -> dict[str, int]:
        return {"count": self._count}

    def restore(self, saved: SavedState) -> None:
        count = saved.values["count"]
        if not is_count(count):
            raise ValueError(f"its averaged weights are those of {count!r} updates")
        self._count = count
        for average, segment in zip(self._averages, self._optimizer.segments, strict=True):
            pairs = zip(*(segment.flat_shard.tensor_shards(x) for x in (average, segment.master)), strict=True)
            for (shard, mine), (_, weight) in pairs:
                if shard.name in saved.unfrozen:
                    mine.copy_(weight)

    def start_anew(self, reason: str) -> str:
        self._count = 0
        self._copy_weights()
        return f"averaged weights start from the weights now: {reason}"


def build_weight_average(
    run: RunConfig, model: ParallelModel, optimizer: MixedPrecisionOptimizer
) -> WeightAverage | None:
    """Returns the average that `--ema-decay` asks for."""
    train = run.train
    if train.ema_decay is None:
        return None
    return WeightAverage(model, optimizer, decay=train.ema_decay, start=train.ema_start, interval=train.ema_interval)


def weight_average_problems(run: RunConfig) -> Sequence[Problem]:
    """Returns the settings that no average can be kept with."""
    train, memory = run.train, run.memory
    if train.ema_decay is None or not (memory.optimizer_cpu_offload or memory.optimizer_nvme_offload is not None):
        return ()
    offload = "--optimizer-cpu-offload" if memory.optimizer_cpu_offload else "--optimizer-nvme-offload"
    rule = f"averages master weights on the device, and {offload} keeps them elsewhere"
    fix = "Leave one of them out; petatron checkpoint convert --average-last averages saved steps instead."
    return (Problem("--ema-decay", str(train.ema_decay), rule, fix),)
