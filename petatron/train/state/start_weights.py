"""Loads the weights that a run starts from: those of `--load`, else of `--from`, for models that a loop of your own builds.

`petatron train` loads weights, optimizer state and position at once (`train_state.py`). A loop of your own builds its model first, so
that gets the weights; `petatron.restore` brings the rest, and whoever forgets it is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from petatron.base.errors import CheckpointError
from petatron.base.log import get_logger
from petatron.base.untrusted_files import is_count
from petatron.checkpoint.files import step_folder, step_list
from petatron.checkpoint.files.step_list import naming_step_flag
from petatron.checkpoint.inspect.summarize_checkpoint import run_metadata
from petatron.config import CheckpointConfig, RunConfig
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.checkpoint_components import model_components
from petatron.pretrained.detect_model_format import check_load_dir, refuse_unconverted
from petatron.pretrained.load_checkpoint import LoadedState, has_weights, load_state
from petatron.pretrained.saveable_model import StartFolder
from petatron.train.state.check_run_dirs import same_path
from petatron.train.state.run_metadata import check_same_model

_log = get_logger(__name__)


def find_start_folder(config: CheckpointConfig, mesh: ParallelMesh) -> StartFolder | None:
    """Returns the folder that a run's first weights come from; None: they are drawn. Every rank calls it.

    A folder that the run also saves to may be empty at its first start. Any other without weights is an error.
    """
    if config.load is not None:
        continues = config.save is not None and same_path(config.load, config.save)
        check_load_dir(Path(config.load), config, may_be_empty=continues)
        if has_weights(config.load, mesh):
            return StartFolder("--load", config.load)
    if config.pretrained_checkpoint is not None:
        refuse_unconverted(Path(config.pretrained_checkpoint))
        return StartFolder("--pretrained-checkpoint", config.pretrained_checkpoint)
    if config.load is not None:
        _log.warning("--load %s holds no checkpoint yet; training starts at the beginning", config.load)
    return None


@torch.no_grad()
def load_master_weights(
    run: RunConfig, model: ParallelModel, optimizer: MixedPrecisionOptimizer, start: StartFolder
) -> None:
    """Gives the master weights the precision of the folder, where the model's narrower weights are still those it loaded.

    Without it they would begin with values that were rounded to the model's precision. What was changed in the model since it was
    built stays changed.
    """
    narrow = [
        (view, view.to(next(iter(group.weights())).dtype, copy=True)) for group, _, view in optimizer.master_weights()
    ]
    load_start_weights(run, model, start, optimizer)
    for view, weights in narrow:
        changed = view.to(weights.dtype) != weights
        view.copy_(torch.where(changed, weights.to(view.dtype), view))
    optimizer.copy_master_to_model_weights()


def load_start_weights(
    run: RunConfig, model: ParallelModel, start: StartFolder, optimizer: MixedPrecisionOptimizer | None = None
) -> LoadedState:
    """Fills a model, and the master weights of its optimizer, with the weights of the folder; every rank calls it."""
    config, resumes = run.checkpoint, start.resumes(run.checkpoint)
    of_load = start.flag == "--load"

    def check(metadata: Mapping[str, Any]) -> None:
        if resumes:
            check_same_model(run, metadata, start.folder)

    with naming_step_flag("--ckpt-step"):
        loaded = load_state(
            start.folder,
            model_components(model, optimizer, moments=False, random_states=False),
            model=model,
            step=config.ckpt_step if of_load else None,
            fallback=of_load and config.load_fallback,
            strict=False,
            check_metadata=check,
            starts_run=not resumes,
        )
    if loaded is None:
        raise CheckpointError(
            f"{start.flag} {start.folder} holds no checkpoint. Give a folder that --save wrote to, or the folder of a "
            "Hugging Face model."
        )
    return loaded


def unrestored_notice(run: RunConfig, loaded: LoadedState, start: StartFolder) -> str | None:
    """Returns what to tell a loop that trains the model without the optimizer state of its checkpoint; None if that is meant."""
    if not start.resumes(run.checkpoint) or run.checkpoint.no_load_optim or not loaded.has_optimizer_state:
        return None
    return (
        f"only the weights of --load {start.folder} are used: its optimizer state, loss scale and random states are not restored. "
        "Call petatron.restore(run, model, optimizer) before the first step; if the weights alone are meant, say --finetune."
    )


def saved_position(config: CheckpointConfig, mesh: ParallelMesh) -> int:
    """Returns the training samples that the run in `--load` has consumed, if this run continues it; every rank calls it."""
    if config.load is None or config.finetune:
        return 0
    return all_gather_json(_read_position(config) if mesh.control.rank == 0 else 0, mesh.control)[0]


def _read_position(config: CheckpointConfig) -> int:
    """Returns 0 where the folder has no such number: whoever loads the checkpoint reports what is wrong with it."""
    try:
        step = step_list.resolve_step(Path(config.load or ""), config.ckpt_step, warn=False)
        progress = run_metadata(step_folder.read_manifest_head(step)).get("progress")
    except CheckpointError:
        return 0
    samples = progress.get("consumed_samples") if isinstance(progress, dict) else None
    return samples if isinstance(samples, int) and is_count(samples) else 0
