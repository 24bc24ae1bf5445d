"""`--check-weight-hash-across-dp-replicas-interval`: ranks that hold the same weights must hold the same bits."""

from __future__ import annotations

import hashlib

import torch

from petatron.base.errors import TrainError
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.mesh import Axis
from petatron.parallel.parallel_model import ParallelModel
from petatron.sharding.flat_buffer import FlatParamGroup
from petatron.train.hooks.step_hook import StepHook
from petatron.train.report.log_records import StepMetrics


class ReplicaCheck(StepHook):
    """Compares digests of the weights every `interval` iterations."""

    def __init__(self, model: ParallelModel, interval: int) -> None:
        self._model, self._interval = model, interval

    def after_step(self, metrics: StepMetrics) -> None:
        if metrics.iteration % self._interval:
            return
        differing: set[int] = set()
        for axis, digest in self._digests():
            digests = all_gather_json(digest, axis)
            differing |= {rank for rank, other in zip(axis.ranks, digests, strict=True) if other != digests[0]}
        everywhere = all_gather_json(sorted(differing), self._model.mesh.control)
        if wrong := sorted({rank for ranks in everywhere for rank in ranks}):
            raise TrainError(
                f"After iteration {metrics.iteration} the weights of rank {', '.join(map(str, wrong))} differ from those of its replicas, "
                "which hold the same ones. Look at the hardware of these ranks; resume from a checkpoint before it began."
            )

    def _digests(self) -> list[tuple[Axis, str]]:
        """Returns the digest of each group's weights, and the ranks that hold the same."""
        digests: list[tuple[Axis, str]] = []
        for group in self._model.param_groups:
            if isinstance(group, FlatParamGroup):
                group.start_due_gather()
                group.wait_for_params()
                weights, axis = [group.flat_weights], group.axes.data_parallel
            else:
                weights, axis = group.weights(), group.replica_axis
            digest = hashlib.sha256()
            for weight in weights:
                digest.update(weight.detach().contiguous().cpu().view(torch.uint8).numpy())
            digests.append((axis, digest.hexdigest()))
        return digests
