"""Restores and saves the state of a user's own training loop, from and in checkpoints.

run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "10", "--save", "mine", "--load", "mine"])
mesh = petatron.launch(run)
model = petatron.build_model(run, mesh)
optimizer = petatron.build_optimizer(run, model)
state = petatron.restore(run, model, optimizer)
for batches in petatron.build_loader(run, mesh, state=state):
    settings = state.update_settings()  # learning rate, weight decay and loss scale of the schedules
    loss = model.train_step(batches, loss_scale=settings["loss_scale"])
    state.advance(batches, optimizer.step(**settings))
state.save()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.stateful_components import Stateful, check_names
from petatron.config import RunConfig
from petatron.config.schema.data import TokenizerConfig
from petatron.data.tokenizer import Tokenizer
from petatron.optim.loss_scaler import build_loss_scaler
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.checkpoint_components import model_components
from petatron.pretrained.launch_and_build_model import HasConfig, config_of
from petatron.pretrained.load_checkpoint import LOOP_METADATA, has_weights
from petatron.pretrained.publish_checkpoint import publish_checkpoint
from petatron.pretrained.saveable_model import Model
from petatron.train.state.run_metadata import TrainProgress, run_settings
from petatron.train.state.run_state_components import DataOrder, DataOrderState, LossScaleState, ProgressState
from petatron.train.state.train_state import TrainState


def restore(
    run: RunConfig | HasConfig,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer,
    *,
    components: Sequence[Stateful] = (),
) -> TrainState:
    """Restores what the checkpoint in `--load` has besides weights, and returns the state of the run; every rank calls it.

    That is: master weights and moments of the optimizer, loss scale, random states and FP8 histories of the model, and in
    `state.progress` the iteration and the data position, for `build_loader(run, mesh, state=state)`. In any layout, and with the
    checks and flags of `petatron train` (`--ckpt-step`, `--finetune`, `--no-load-optim`, `--no-load-rng`, ...).
    `state.resume_changes` says what differs from the run that saved it. Without a checkpoint it is the state at iteration 0, so
    that one script serves the first start and every restart. `components` are state of your own (`petatron.Stateful`), which is saved
    and restored with the rest.

    >>> import petatron, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> flags = f"--mock-data --lr 1e-3 --train-iters 2 --save {folder} --load {folder}".split()
    >>> for _ in range(2):
    ...     run = petatron.load("tiny-llama", flags)
    ...     model = petatron.build_model(run, petatron.launch(run))
    ...     optimizer = petatron.build_optimizer(run, model)
    ...     state = petatron.restore(run, model, optimizer)
    ...     print(state.progress.iteration)
    ...     petatron.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
    0
    1
    """
    config = config_of(run)
    tokenizer = model.saved_companions() if isinstance(model, Model) else None
    state = TrainState.of(config, model, optimizer, tokenizer)
    for component in components:
        state.add(component)
    load = config.checkpoint.load
    if load is not None and not config.checkpoint.finetune and has_weights(load, model.mesh):
        state.load(load)
    if isinstance(model, Model):
        model.unrestored_notice = None
    return state


def save_checkpoint(
    folder: str | Path,
    *,
    step: int,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer | None = None,
    moments: bool = True,
    metadata: Mapping[str, Any] | None = None,
    random_states: bool = True,
    tokenizer: Tokenizer | None = None,
    state: TrainState | None = None,
    components: Sequence[Stateful] = (),
) -> None:
    """Publishes a checkpoint; every rank calls it. Without an optimizer or `moments` it can only be finetuned from.

    The weights are in `folder/step-N/model`, with the tokenizer, which is that of the model's run unless another is given:
    `petatron generate folder` and transformers open it directly. The checkpoint also has the settings of the run that
    `build_model` built the model for, and its position: that of `state`, else `step` global batches from the first sample.
    `petatron.restore` and `petatron train --load folder` continue from there. `metadata` are JSON values of your own, which
    `load_checkpoint` returns; `components` are state of your own that `state` does not have.

    >>> import petatron, tempfile
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> folder = tempfile.mkdtemp()
    >>> petatron.save_checkpoint(folder, step=7, model=model, metadata={"note": "first"})
    >>> petatron.load_checkpoint(folder, model=model)
    {'note': 'first'}
    """
    mesh, built = model.mesh, model if isinstance(model, Model) else None
    recorded = dict(metadata or {})
    position: list[Stateful] = []
    if state is not None:
        recorded, position = {**run_settings(state.run), LOOP_METADATA: recorded}, state.own_components()
    elif built is not None and built.run is not None and _can_train(built.run):
        recorded, position = {**run_settings(built.run), LOOP_METADATA: recorded}, _position_after(built.run, step)
    if tokenizer is not None and "config" in recorded:  # the settings of the run say nothing about this one
        recorded["config"] = {**recorded["config"], "tokenizer": asdict(TokenizerConfig())}
    saved = [
        *model_components(model, optimizer, moments=moments, random_states=random_states),
        *position,
        *components,
    ]
    check_names(saved)
    publish_checkpoint(
        CheckpointManager(folder, mesh.control, world_axis=mesh.world, device=mesh.device),
        saved,
        step=step,
        model=model,
        metadata=recorded,
        tokenizer=tokenizer if tokenizer is not None or built is None else built.saved_companions(),
    )


def _position_after(run: RunConfig, step: int) -> list[Stateful]:
    """Returns the state of a run that has trained on `step` global batches and skipped none."""
    return [
        ProgressState(TrainProgress.after_steps(run, step)),
        LossScaleState(build_loss_scaler(run.precision)),
        DataOrderState(DataOrder()),
    ]


def _can_train(run: RunConfig) -> bool:
    """Whether the settings say how the run trains; those of a model that only generates do not."""
    return run.optim.lr is not None and (run.train.train_iters or run.train.train_samples) is not None
