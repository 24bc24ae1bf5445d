"""Petatron: train language models of any size on any number of devices, and prove that the layout does not matter.

The names below are the public API; each is imported when it is first used. A loop of your own reads like this:

    run = petatron.load("llama3-8b", ["--tp", "2", "--mock-data", "--lr", "3e-4", "--train-iters", "100"])
    mesh = petatron.launch(run)
    model = petatron.build_model(run, mesh)
    optimizer = petatron.build_optimizer(run, model)
    state = petatron.restore(run, model, optimizer)  # with --load: the rest of the checkpoint; else iteration 0
    for batches in petatron.build_loader(run, mesh, state=state):
        settings = state.update_settings()  # learning rate, weight decay and loss scale of the schedules
        loss = model.train_step(batches, loss_scale=settings["loss_scale"])
        state.advance(batches, optimizer.step(**settings))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from petatron.base.version import __version__ as __version__

if TYPE_CHECKING:
    from petatron.base.errors import ConfigError, DataError, PetatronError
    from petatron.checkpoint.stateful_components import SavedState, Stateful
    from petatron.checkpoint.tensor_chunk import Chunk
    from petatron.config import RunConfig
    from petatron.data.batch_loader import stack_arrays
    from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, DataSource, RecordSource, register_dataset
    from petatron.data.external_loader import DataloaderRequest, register_dataloader
    from petatron.infer.generate import generate
    from petatron.mesh.mesh import ParallelMesh
    from petatron.models.batch import Batch
    from petatron.models.decoder_spec import decoder_spec
    from petatron.models.model_spec import ModelSpec
    from petatron.models.objective import ModelRole, NextToken, Objective, register_objective
    from petatron.models.registry import register_model
    from petatron.models.stage_inputs_outputs import LossSpec, MetricSpec
    from petatron.optim.build_update_rules import register_optimizer
    from petatron.optim.mixed_precision import MasterOptimizer
    from petatron.pretrained.from_pretrained import from_pretrained
    from petatron.pretrained.load_checkpoint import load_checkpoint
    from petatron.pretrained.saveable_model import Model
    from petatron.train.build_run import build_loader, build_model, build_optimizer, launch
    from petatron.train.custom_loop import restore, save_checkpoint
    from petatron.train.python_run import Run, load
    from petatron.train.run_training import run_training
    from petatron.train.state.optional_components import register_component
    from petatron.train.state.run_state_components import AlternativeWeights
    from petatron.train.state.train_state import TrainState
    from petatron.validate import load_config

_NAMES = {
    "petatron.base.errors": (
        "ConfigError",
        "DataError",
        "PetatronError",
    ),
    "petatron.checkpoint.tensor_chunk": ("Chunk",),
    "petatron.checkpoint.stateful_components": (
        "SavedState",
        "Stateful",
    ),
    "petatron.config": ("RunConfig",),
    "petatron.data.batch_loader": ("stack_arrays",),
    "petatron.data.dataset_kinds": (
        "DataSource",
        "DatasetKind",
        "DatasetRequest",
        "RecordSource",
        "register_dataset",
    ),
    "petatron.data.external_loader": (
        "DataloaderRequest",
        "register_dataloader",
    ),
    "petatron.infer.generate": ("generate",),
    "petatron.mesh.mesh": ("ParallelMesh",),
    "petatron.models.batch": ("Batch",),
    "petatron.models.decoder_spec": ("decoder_spec",),
    "petatron.models.model_spec": ("ModelSpec",),
    "petatron.models.objective": (
        "ModelRole",
        "NextToken",
        "Objective",
        "register_objective",
    ),
    "petatron.models.registry": ("register_model",),
    "petatron.models.stage_inputs_outputs": (
        "LossSpec",
        "MetricSpec",
    ),
    "petatron.optim.build_update_rules": ("register_optimizer",),
    "petatron.optim.mixed_precision": ("MasterOptimizer",),
    "petatron.pretrained.from_pretrained": ("from_pretrained",),
    "petatron.pretrained.load_checkpoint": ("load_checkpoint",),
    "petatron.pretrained.saveable_model": ("Model",),
    "petatron.train.build_run": (
        "build_loader",
        "build_model",
        "build_optimizer",
        "launch",
    ),
    "petatron.train.custom_loop": (
        "restore",
        "save_checkpoint",
    ),
    "petatron.train.python_run": (
        "Run",
        "load",
    ),
    "petatron.train.run_training": ("run_training",),
    "petatron.train.state.optional_components": ("register_component",),
    "petatron.train.state.run_state_components": ("AlternativeWeights",),
    "petatron.train.state.train_state": ("TrainState",),
    "petatron.validate": ("load_config",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AlternativeWeights",
    "Batch",
    "Chunk",
    "ConfigError",
    "DataError",
    "DataSource",
    "DataloaderRequest",
    "DatasetKind",
    "DatasetRequest",
    "LossSpec",
    "MasterOptimizer",
    "MetricSpec",
    "Model",
    "ModelRole",
    "ModelSpec",
    "NextToken",
    "Objective",
    "ParallelMesh",
    "PetatronError",
    "RecordSource",
    "Run",
    "RunConfig",
    "SavedState",
    "Stateful",
    "TrainState",
    "build_loader",
    "build_model",
    "build_optimizer",
    "decoder_spec",
    "from_pretrained",
    "generate",
    "launch",
    "load",
    "load_checkpoint",
    "load_config",
    "register_component",
    "register_dataloader",
    "register_dataset",
    "register_model",
    "register_objective",
    "register_optimizer",
    "restore",
    "run_training",
    "save_checkpoint",
    "stack_arrays",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'petatron' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
