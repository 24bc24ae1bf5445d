"""Compares a resumed run's settings with its checkpoint's: what may change, and the effect of each change.

Another model or schedule is refused (with a flag that allows it). Every other change is accepted, and the log tells what continues
and what restarts. The checkpoint contains the whole resolved config to compare with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from petatron.config import RunConfig
from petatron.config.saved_config import absolute_value, with_absolute_paths, without_private_paths
from petatron.config.schema.fields import all_fields, fields_by_path
from petatron.config.unused_settings import unused_settings

_SETTINGS_BY_EFFECT: Mapping[str, tuple[str, ...]] = {
    "samples come from the new data in its own order, from sample {samples:,} of it on; some may be seen "
    "again, others never": ("model.seq_length", "train.seed", "data"),
    "the run now ends there; it continues at iteration {iteration:,}": ("train.train_iters", "train.train_samples"),
    "the next global batch begins at sample {samples:,}; none is lost or repeated": (
        "train.global_batch_size",
        "train.micro_batch_size",
        "train.rampup_batch_size",
        "train.step_batch_size_schedule",
    ),
    "weights, optimizer state and data order continue; random states (dropout) start anew": ("parallel",),
    "weights continue from the widest precision that was saved": ("precision.fp16", "precision.bf16", "precision.fp64"),
    "a dynamic loss scale goes on where the checkpoint's stood": ("precision.initial_loss_scale",),
    "weights travel so from iteration {iteration:,} on; no product in FP8 depends on it": (
        "precision.fp8_param_gather",
    ),
    "matrix products are done so from iteration {iteration:,} on; weights and optimizer state are not in FP8 and continue": (
        "FP8",
    ),
    "learning rates follow it from iteration {iteration:,} on; weights and the model's factors stay": ("muP",),
    "answers that are drawn from iteration {iteration:,} on follow it; those that wait for later steps are learned from as they are": (
        "rollout",
    ),
    "takes effect from iteration {iteration:,} on": (
        *("precision", "model", "moe", "optim", "schedule", "memory", "train"),
    ),
}
_EFFECTS = {setting: effect for effect, settings in _SETTINGS_BY_EFFECT.items() for setting in settings}
"""The effect of a changed setting, by its path, by the name of its feature, or by its section; the first of them that is there counts."""
_RATES = (
    "lr",
    "decoupled_lr",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
)
"""Settings of the optimizer that belong to a schedule."""
_IGNORED_SETTINGS = (
    "checkpoint",
    "log",
    "launch",
    "tokenizer",
    "rollout.reward_workers",
    "rollout.rollout_log_gigabytes",
    "data.num_workers",
    "data.data_cache_path",
    "data.object_storage_cache_path",
    "data.object_storage_chunk_bytes",
    "data.object_storage_cache_bytes",
    "train.device",
    "train.cuda_graphs",  # no bit depends on it; older checkpoints have a boolean
    "train.exit_interval",
    "train.exit_duration_in_mins",
    "train.exit_signal_grace_s",
    "train.check_weight_hash_across_dp_replicas_interval",
    "train.manual_gc",
    "train.manual_gc_interval",
    "train.manual_gc_eval",
    "train.empty_unused_memory_level",
)


def config_for_checkpoint(run: RunConfig) -> dict[str, Any]:
    """Returns the config as stored in a checkpoint: with absolute paths, since a run may resume from another folder, and without
    those of private keys.
    """
    return json.loads(json.dumps(asdict(without_private_paths(with_absolute_paths(run)))))


def resume_changes(
    saved_config: Mapping[str, Any],
    run: RunConfig,
    *,
    iteration: int,
    consumed_samples: int,
    with_schedule: bool = True,
) -> list[str]:
    """Returns one line per kind of effect: which settings differ from the checkpoint's, and what that means.

    Settings that have no effect in this run are left out, and without `with_schedule` those of a schedule that it does not follow.

    >>> from petatron.validate import load_config
    >>> flags = "--mock-data --lr 1e-3 --train-iters".split()
    >>> then = config_for_checkpoint(load_config([*flags, "10"], preset="tiny-llama").config)
    >>> resume_changes(then, load_config([*flags, "20"], preset="tiny-llama").config, iteration=5, consumed_samples=5)[-1]
    'train_iters 10 -> 20: the run now ends there; it continues at iteration 5'
    """
    now, unused = config_for_checkpoint(run), unused_settings(run)
    if not with_schedule:
        unused |= {info.path for info in all_fields() if info.section == "schedule" or info.name in _RATES}
    by_effect: dict[str, list[str]] = {}
    for section in sorted(saved_config.keys() & now.keys()):
        for name in sorted(saved_config[section].keys() | now[section].keys()):
            known = fields_by_path().get(f"{section}.{name}")
            # A setting that came later had its default then, in the form that JSON gives it.
            default = None if known is None else json.loads(json.dumps(known.default))
            before, after = saved_config[section].get(name, default), now[section].get(name)
            if known is not None and "path" in known.marks:
                # Older checkpoints have paths as they were typed.
                before = json.loads(json.dumps(absolute_value(known, before)))
            effect = _effect(section, name)
            if before != after and effect is not None and f"{section}.{name}" not in unused:
                by_effect.setdefault(effect, []).append(f"{name} {before} -> {after}")
    return [
        f"{', '.join(settings)}: {effect.format(iteration=iteration, samples=consumed_samples)}"
        for effect, settings in by_effect.items()
    ]


def _effect(section: str, name: str) -> str | None:
    path = f"{section}.{name}"
    if section in _IGNORED_SETTINGS or path in _IGNORED_SETTINGS:
        return None
    info = fields_by_path().get(path)
    names = (path, "" if info is None else info.feature.name, section)
    return next((_EFFECTS[key] for key in names if key in _EFFECTS), None)
