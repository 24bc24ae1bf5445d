"""The metadata of a run in its checkpoints: progress, loss scale, schedule, settings, data order.

`petatron train` and loops of your own record the same, so that either resumes from the other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from petatron.base.errors import CheckpointError
from petatron.config import RunConfig
from petatron.config.schema.fields import fields_by_name
from petatron.config.schema.model_identity import identity_differences, model_identity
from petatron.optim.lr_schedule import RunSchedules, schedule_settings
from petatron.train.global_batch_size import BatchSizeSchedule
from petatron.train.state.resume_diff import config_for_checkpoint

_REQUIRED = frozenset({"progress", "scaler", "schedule", "model", "data", "config"})


@dataclass(slots=True)
class TrainProgress:
    """How far a run is. Updates and their samples exclude steps skipped by fp16 overflow; schedules follow them."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    updates: int = 0
    update_samples: int = 0

    @classmethod
    def after_steps(cls, run: RunConfig, steps: int) -> TrainProgress:
        """Returns the progress of a run that has trained on `steps` global batches, and skipped none.

        >>> from petatron.validate import load_config
        >>> flags = "--mock-data --lr 1e-3 --train-iters 10 --global-batch-size 4 --seq-length 8".split()
        >>> TrainProgress.after_steps(load_config(flags, preset="tiny-llama").config, 3).consumed_samples
        12
        """
        samples = BatchSizeSchedule.from_config(run).samples_after(steps)
        return cls(steps, samples, samples * run.model.seq_length, steps, samples)


def run_settings(run: RunConfig, schedules: RunSchedules | None = None) -> dict[str, Any]:
    """Returns the settings of a run in its metadata, which a resumed run is compared with; components record the rest.

    schedules: those that the run follows, where they are not the config's.
    """
    return {
        "model": model_identity(run.model, run.moe),
        "schedule": schedule_settings(run) if schedules is None else schedules.as_settings(),
        "config": config_for_checkpoint(run),
    }


def check_resumable(run: RunConfig, metadata: Mapping[str, Any], folder: str) -> None:
    """Raises for a checkpoint that this run does not continue."""
    missing = _REQUIRED - metadata.keys()
    if missing:
        raise CheckpointError(
            f"The checkpoint in {folder} was not saved by a training run (it lacks its {', '.join(sorted(missing))}). "
            "Use --finetune to start a run from its weights."
        )
    check_same_model(run, metadata, folder)
    optimizer = metadata["config"].get("optim", {}).get("optimizer", run.optim.optimizer)
    if optimizer != run.optim.optimizer and not run.checkpoint.no_load_optim:
        raise CheckpointError(
            f"The checkpoint in {folder} has the state of --optimizer {optimizer}, and {run.optim.optimizer} has another. Restore it, "
            "or say --no-load-optim to go on with the weights and a new state."
        )
    changed = _differences(metadata["schedule"], schedule_settings(run))
    if changed and not (
        run.checkpoint.override_opt_param_scheduler or run.checkpoint.use_checkpoint_opt_param_scheduler
    ):
        lasts = any(text.startswith("lr.decay:") for text in changed)
        decay = " lr.decay is --lr-decay-iters, which is --train-iters unless it is given." if lasts else ""
        raise CheckpointError(
            f"The checkpoint in {folder} was trained with another schedule ({'; '.join(changed)}).{decay} Restore those "
            "values, or say --override-opt-param-scheduler to go on with the new ones, or --use-checkpoint-opt-param-scheduler to "
            "go on with the checkpoint's."
        )


def check_same_model(run: RunConfig, metadata: Mapping[str, Any], folder: str) -> None:
    """Raises if a checkpoint says that its weights belong to another model than the run's."""
    changed = model_differences(run, metadata["model"]) if "model" in metadata else []
    if changed:
        raise CheckpointError(
            f"The checkpoint in {folder} is of another model ({'; '.join(changed)}). Restore those values; or, if all "
            "weights have the same shapes in the changed model, start a new run of it from them with --finetune."
        )


def model_differences(run: RunConfig, saved: Mapping[str, Any]) -> list[str]:
    """Returns the settings by which the run's model is another function of its weights than the saved one."""
    now = model_identity(run.model, run.moe)
    # A setting added after the checkpoint had its default then.
    then = {**{name: fields_by_name()[name].default for name in now}, **saved}
    now = dict.fromkeys(then) | now
    return [f"{name}: {then[name]} then, {now[name]} now" for name in identity_differences(then, now)]


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    names = sorted(name for name in saved.keys() | current.keys() if saved.get(name) != current.get(name))
    return [f"{name}: {saved.get(name)} then, {current.get(name)} now" for name in names]
