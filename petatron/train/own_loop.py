"""The state of a training loop of your own: restored from a checkpoint, and saved in one.

run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "10", "--save", "mine", "--load", "mine"])
mesh = petatron.launch(run)
model = petatron.build_model(run, mesh)
optimizer = petatron.build_optimizer(run, model)
state = petatron.restore(run, model, optimizer)
for batches in petatron.build_loader(run, mesh, state=state):
    loss = model.train_step(batches)
    optimizer.step()
    state.advance(batches)
state.save()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from petatron.checkpoint.manager import CheckpointManager
from petatron.config import RunConfig
from petatron.config.schema.training import TokenizerConfig
from petatron.data.tokenizer import Tokenizer
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.initial_model import HasConfig, config_of
from petatron.train.state.run_facts import TrainProgress, build_run_facts
from petatron.train.state.run_model import Model
from petatron.train.state.save_and_load import LOOP_FACTS, has_weights, save_with_manager
from petatron.train.state.train_state import TrainState


def restore(run: RunConfig | HasConfig, model: ParallelModel, optimizer: MixedPrecisionOptimizer) -> TrainState:
    """Restores what the checkpoint in `--load` has besides weights, and returns the state of the run; every rank calls it.

    That is: master weights and moments of the optimizer, loss scale, random states and FP8 histories of the model, and in
    `state.progress` the iteration and the data position, for `build_loader(run, mesh, state=state)`. In any layout, and with the
    checks and flags of `petatron train` (`--ckpt-step`, `--finetune`, `--no-load-optim`, `--no-load-rng`, ...).
    `state.resume_changes` says what differs from the run that saved it. Without a checkpoint it is the state at iteration 0, so
    that one script serves the first start and every restart.

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
    own = model if isinstance(model, Model) else None
    tokenizer = own.saved_companions() if own is not None else None
    state = TrainState.of(config, model, optimizer, tokenizer)
    load = config.checkpoint.load
    if load is not None and not config.checkpoint.finetune and has_weights(load, model.mesh):
        state.load(load)
    if own is not None:
        own.unrestored_notice = None
    return state


def save_checkpoint(
    folder: str | Path,
    *,
    step: int,
    model: ParallelModel,
    optimizer: MixedPrecisionOptimizer | None = None,
    moments: bool = True,
    facts: Mapping[str, Any] | None = None,
    random_states: bool = True,
    tokenizer: Tokenizer | None = None,
    state: TrainState | None = None,
) -> None:
    """Publishes a checkpoint; every rank calls it. Without an optimizer or `moments` it can only be finetuned from.

    The weights are in `folder/step-N/model`, with the tokenizer, which is that of the model's run unless another is given:
    `petatron generate folder` and transformers open it directly. The checkpoint also has the settings of the run that
    `build_model` built the model for, and its position: that of `state`, else `step` global batches from the first sample.
    `petatron.restore` and `petatron train --load folder` continue from there. `facts` are JSON values of your own, which
    `load_checkpoint` returns.

    >>> import petatron, tempfile
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> folder = tempfile.mkdtemp()
    >>> petatron.save_checkpoint(folder, step=7, model=model, facts={"note": "first"})
    >>> petatron.load_checkpoint(folder, model=model)
    {'note': 'first'}
    """
    mesh, own = model.mesh, model if isinstance(model, Model) else None
    recorded = dict(facts or {})
    if state is not None:
        recorded = {**state.facts(), LOOP_FACTS: recorded}
    elif own is not None and own.run is not None and _can_train(own.run):
        recorded = {
            **build_run_facts(own.run, TrainProgress.after_steps(own.run, step)),
            LOOP_FACTS: recorded,
        }
    if tokenizer is not None and "config" in recorded:  # the settings of the run say nothing about this one
        recorded["config"] = {**recorded["config"], "tokenizer": asdict(TokenizerConfig())}
    companions = tokenizer if tokenizer is not None or own is None else own.saved_companions()
    save_with_manager(
        CheckpointManager(folder, mesh.control, world_axis=mesh.world, device=mesh.device),
        step=step,
        model=model,
        optimizer=optimizer,
        moments=moments,
        facts=recorded,
        random_states=random_states,
        tokenizer=companions,
    )


def _can_train(run: RunConfig) -> bool:
    """Whether the settings say how the run trains; those of a model that only generates do not."""
    return run.optim.lr is not None and (run.train.train_iters or run.train.train_samples) is not None
