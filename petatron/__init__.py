"""Petatron: train language models of any size on any number of devices, and prove that the layout does not matter.

The names below are the public API; each is imported when it is first used. A loop of your own reads like this:

    run = petatron.load("llama3-8b", ["--tp", "2", "--mock-data", "--lr", "3e-4", "--train-iters", "100"])
    mesh = petatron.launch(run)
    model = petatron.build_model(run, mesh)
    optimizer = petatron.build_optimizer(run, model)
    for batches in petatron.build_loader(run, mesh):
        loss = model.train_step(batches)
        optimizer.step()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from petatron.config import RunConfig, load_config
    from petatron.infer.sample import generate
    from petatron.mesh.mesh import ParallelMesh
    from petatron.models.base import Batch
    from petatron.optim.master import MasterOptimizer
    from petatron.train.build import build_loader, build_model, build_optimizer, launch, load
    from petatron.train.model import Model
    from petatron.train.persist import load_checkpoint, save_checkpoint
    from petatron.train.pretrained import from_pretrained
    from petatron.train.run import run_training
    from petatron.train.state import TrainState

__version__ = "0.1.0"

_HOMES = {
    "Batch": "petatron.models.base",
    "MasterOptimizer": "petatron.optim.master",
    "Model": "petatron.train.model",
    "ParallelMesh": "petatron.mesh.mesh",
    "RunConfig": "petatron.config",
    "TrainState": "petatron.train.state",
    "build_loader": "petatron.train.build",
    "build_model": "petatron.train.build",
    "build_optimizer": "petatron.train.build",
    "from_pretrained": "petatron.train.pretrained",
    "generate": "petatron.infer.sample",
    "launch": "petatron.train.build",
    "load": "petatron.train.build",
    "load_checkpoint": "petatron.train.persist",
    "load_config": "petatron.config",
    "save_checkpoint": "petatron.train.persist",
    "run_training": "petatron.train.run",
}

__all__ = [
    "Batch",
    "MasterOptimizer",
    "Model",
    "ParallelMesh",
    "RunConfig",
    "TrainState",
    "build_loader",
    "build_model",
    "build_optimizer",
    "from_pretrained",
    "generate",
    "launch",
    "load",
    "load_checkpoint",
    "load_config",
    "run_training",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'petatron' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
