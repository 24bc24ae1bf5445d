"""The model that draws: the one that is trained, in place, or a copy of its weights in another layout.

Context-parallel ranks have the same weights, and generation keeps sequences whole; so in place they are data-parallel ranks, in the same
order. A copy has memory between `load` and `free` alone; what else it needs (modules, process groups, the plan of the hand-over) stays.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from logging import DEBUG, INFO
from typing import Protocol

import torch

from petatron.base.log import get_logger
from petatron.config.rollout_layout import drawing_config, draws_in_place
from petatron.config.schema.run import RunConfig
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.parallel.parallel_model import ParallelModel
from petatron.posttrain.handover.weight_handover import WeightHandover
from petatron.pretrained.launch_and_build_model import build_initial_model
from petatron.sharding.flat_buffer import FlatParamGroup

_log = get_logger(__name__)
_LABEL = "rollout"


class DrawingModel(Protocol):
    """Every rank calls its methods. handover_s: seconds that weights were handed over for, in all. stays_in_place: weights are in the same
    memory after `free` and `load`, so captured steps that read them stay, too.
    """

    handover_s: float
    stays_in_place: bool
    device: torch.device

    def load(self) -> ParallelModel:
        """Returns the model with the weights of now."""
        ...

    def free(self) -> None:
        """Gives back the memory of weights that are a copy."""
        ...


def open_drawing_model(run: RunConfig, model: ParallelModel, *, iteration: Callable[[], int]) -> DrawingModel:
    """Returns the model that draws, in the layout that a run has for that. `iteration` returns that of the weights now."""
    return ModelInPlace(model) if draws_in_place(run) else CopiedModel(run, model, iteration=iteration)


class ModelInPlace:
    """The weights that are trained, in place."""

    def __init__(self, model: ParallelModel) -> None:
        self.handover_s, self.stays_in_place, self.device = 0.0, True, model.mesh.device
        self._model = model
        if model.mesh.cp.size > 1:
            self._model = copy.copy(model)
            self._model.mesh = _with_whole_sequences(model.mesh)

    def load(self) -> ParallelModel:
        return self._model

    def free(self) -> None:
        """Does nothing: training needs them."""


class CopiedModel:
    """A copy of the weights in a layout of its own."""

    def __init__(self, run: RunConfig, model: ParallelModel, *, iteration: Callable[[], int]) -> None:
        drawing = drawing_config(run)
        mesh = model.mesh.with_layout(Layout.from_config(drawing.parallel), label=_LABEL)
        random_states = model.rng_streams.state()
        self._model = build_initial_model(drawing, mesh, init_weights=False, gradients=False)
        model.rng_streams.restore(random_states)
        ranks_per_node = read_environment().local_world_size
        self._handover = WeightHandover(model, self._model, model.mesh, ranks_per_node=ranks_per_node)
        self._groups = [group for group in self._model.param_groups if isinstance(group, FlatParamGroup)]
        self._frozen, self._iteration, self._loaded = model.frozen_tensors, iteration, -1
        self.handover_s, self.stays_in_place, self.device = 0.0, False, mesh.device
        self._has_weights = True
        self.free()
        if mesh.rank == 0:
            _log.info("answers are drawn in another layout, by a copy of the weights: %s", mesh.describe())

    def load(self) -> ParallelModel:
        iteration = self._iteration()
        if self._has_weights and self._loaded == iteration:
            return self._model
        began = self._clock()
        skipped = self._frozen if self._has_weights else ()
        if not self._has_weights:
            for group in self._groups:
                group.flat_weights.untyped_storage().resize_(group.flat_weights.nbytes)
                group.flat_weights.zero_()  # padding is in no box
        self._handover.run(skipped=skipped)
        seconds = self._clock() - began
        text = "weights of iteration %d were handed over in %.3f s"
        _log.log(INFO if self._loaded < 0 and self._model.mesh.rank == 0 else DEBUG, text, iteration, seconds)
        self._has_weights, self._loaded = True, iteration
        self.handover_s += seconds
        return self._model

    def free(self) -> None:
        if self._has_weights:
            for group in self._groups:
                group.flat_weights.untyped_storage().resize_(0)
        self._has_weights = False

    def _clock(self) -> float:
        if self._model.mesh.device.type == "cuda":
            torch.cuda.synchronize(self._model.mesh.device)
        return time.perf_counter()


class ReceivedModel:
    """The weights on a rank that draws alone, which others hand over when they say so (`drawing_ranks/`)."""

    def __init__(self, model: ParallelModel, handover: WeightHandover) -> None:
        self.handover_s, self.stays_in_place, self.device = 0.0, True, model.mesh.device
        self._model, self._handover = model, handover

    def receive(self) -> None:
        self._handover.run()

    def load(self) -> ParallelModel:
        return self._model

    def free(self) -> None:
        """Does nothing: this rank draws alone."""


def _with_whole_sequences(mesh: ParallelMesh) -> ParallelMesh:
    """Returns the mesh whose data-parallel ranks are all that have the same weights."""
    layout = mesh.layout
    replicas = layout.dp_outer * layout.dp_shard * layout.cp
    return mesh.with_layout(replace(layout, dp_outer=1, dp_shard=replicas, cp=1), label=_LABEL)
