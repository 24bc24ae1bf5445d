"""What a resumed run may change, and the effect of each change: every difference from the checkpoint is reported.

Another model or schedule is refused (with a flag that allows it). Every other change is accepted, and the log tells what continues
and what restarts. The checkpoint contains the whole resolved config to compare with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from petatron.config import RunConfig
from petatron.config.declared_rules import unused_settings
from petatron.config.saved_config import absolute_value, with_absolute_paths, without_private_paths
from petatron.config.schema.fields import fields_by_path

# The effect of a changed setting, by path, by the name of its feature, or by section; the first of them that is there counts.
_DATA_ORDER_CHANGES = (
    "samples come from the new data in its own order, from sample {samples:,} of it on; some may be seen "
    "again, others never"
)
_BATCH_SIZE_CHANGES = "the next global batch begins at sample {samples:,}; none is lost or repeated"
_RUN_LENGTH_CHANGES = "the run now ends there; it continues at iteration {iteration:,}"
_LAYOUT_CHANGES = "weights, optimizer state and data order continue; random states (dropout) start anew"
_PRECISION_CHANGES = "weights continue from the widest precision that was saved"
_FP8_CHANGES = "matrix products are done so from iteration {iteration:,} on; weights and optimizer state are not in FP8 and continue"
_FP8_GATHER_CHANGES = "weights travel so from iteration {iteration:,} on; no product in FP8 depends on it"
_INITIAL_LOSS_SCALE_UNUSED = "a dynamic loss scale goes on where the checkpoint's stood"
_TAKES_EFFECT_NOW = "takes effect from iteration {iteration:,} on"
_EFFECTS: Mapping[str, str] = {
    "model.seq_length": _DATA_ORDER_CHANGES,
    "train.seed": _DATA_ORDER_CHANGES,
    "data": _DATA_ORDER_CHANGES,
    "train.train_iters": _RUN_LENGTH_CHANGES,
    "train.train_samples": _RUN_LENGTH_CHANGES,
    "train.global_batch_size": _BATCH_SIZE_CHANGES,
    "train.micro_batch_size": _BATCH_SIZE_CHANGES,
    "train.rampup_batch_size": _BATCH_SIZE_CHANGES,
    "parallel": _LAYOUT_CHANGES,
    "precision.fp16": _PRECISION_CHANGES,
    "precision.bf16": _PRECISION_CHANGES,
    "precision.fp64": _PRECISION_CHANGES,
    "precision.initial_loss_scale": _INITIAL_LOSS_SCALE_UNUSED,
    "precision.fp8_param_gather": _FP8_GATHER_CHANGES,
    "FP8": _FP8_CHANGES,
    "precision": _TAKES_EFFECT_NOW,
    "model": _TAKES_EFFECT_NOW,
    "moe": _TAKES_EFFECT_NOW,
    "optim": _TAKES_EFFECT_NOW,
    "schedule": _TAKES_EFFECT_NOW,
    "memory": _TAKES_EFFECT_NOW,
    "train": _TAKES_EFFECT_NOW,
}
_IGNORED_SETTINGS = (
    "checkpoint",
    "log",
    "launch",
    "tokenizer",
    "data.num_workers",
    "data.data_cache_path",
    "train.device",
    "train.cuda_graphs",  # no bit depends on it; older checkpoints have a boolean
    "train.exit_interval",
    "train.exit_duration_in_mins",
    "train.exit_signal_grace_s",
)


def config_for_checkpoint(run: RunConfig) -> dict[str, Any]:
    """Returns the config as stored in a checkpoint: with absolute paths, since a run may resume from another folder, and without
    those of private keys.
    """
    return json.loads(json.dumps(asdict(without_private_paths(with_absolute_paths(run)))))


def resume_changes(
    saved_config: Mapping[str, Any], run: RunConfig, *, iteration: int, consumed_samples: int
) -> list[str]:
    """Returns one line per kind of effect: which settings differ from the checkpoint's, and what that means.

    Settings that have no effect in this run are left out.

    >>> from petatron.validate import load_config
    >>> flags = "--mock-data --lr 1e-3 --train-iters".split()
    >>> then = config_for_checkpoint(load_config([*flags, "10"], preset="tiny-llama").config)
    >>> resume_changes(then, load_config([*flags, "20"], preset="tiny-llama").config, iteration=5, consumed_samples=5)[-1]
    'train_iters 10 -> 20: the run now ends there; it continues at iteration 5'
    """
    now, unused = config_for_checkpoint(run), unused_settings(run)
    found: dict[str, list[str]] = {}
    for section in sorted(saved_config.keys() & now.keys()):
        for name in sorted(saved_config[section].keys() | now[section].keys()):
            known = fields_by_path().get(f"{section}.{name}")
            # A setting that came later had its default then, in the form that JSON gives it.
            default = None if known is None else json.loads(json.dumps(known.default))
            before, after = saved_config[section].get(name, default), now[section].get(name)
            if known is not None and "path" in known.marks:
                before = json.loads(
                    json.dumps(absolute_value(known, before))
                )  # older checkpoints have paths as they were typed
            effect = _effect(section, name)
            if before != after and effect is not None and f"{section}.{name}" not in unused:
                found.setdefault(effect, []).append(f"{name} {before} -> {after}")
    return [
        f"{', '.join(settings)}: {effect.format(iteration=iteration, samples=consumed_samples)}"
        for effect, settings in found.items()
    ]


def _effect(section: str, name: str) -> str | None:
    path = f"{section}.{name}"
    if section in _IGNORED_SETTINGS or path in _IGNORED_SETTINGS:
        return None
    info = fields_by_path().get(path)
    names = (path, "" if info is None else info.feature.name, section)
    return next((_EFFECTS[key] for key in names if key in _EFFECTS), None)
