"""What a resumed run may change, and what each change means: nothing that differs from the checkpoint goes unsaid.

Another model or schedule is refused (with a flag that allows it). Everything else goes on, and the log says what continues
and what starts anew. The checkpoint holds the whole resolved config, so the comparison needs no one to remember anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from petatron.config import RunConfig
from petatron.config.absolute_paths import absolute, anchored
from petatron.config.schema.fields import by_path

# What a change of these settings does, by section and name; a section alone means all of it that is not named elsewhere.
_ORDER = "samples come from the new data in its own order, from sample {samples:,} of it on; some may be seen again, others never"
_BATCHES = "the next global batch begins at sample {samples:,}; none is lost or repeated"
_LENGTH = "the run now ends there; it continues at iteration {iteration:,}"
_LAYOUT = "weights, optimizer state and data order continue; random states (dropout) start anew"
_PRECISION = "weights continue from the widest precision that was saved"
_FP8 = "matrix products are done so from iteration {iteration:,} on; weights and optimizer state are not in FP8 and continue"
_FP8_GATHER = "weights travel so from iteration {iteration:,} on; no product in FP8 depends on it"
_FIRST_SCALE = "a dynamic loss scale goes on where the checkpoint's stood"
_FROM_HERE = "takes effect from iteration {iteration:,} on"
_EFFECTS: Mapping[str, str] = {
    "model.seq_length": _ORDER,
    "train.seed": _ORDER,
    "data": _ORDER,
    "train.train_iters": _LENGTH,
    "train.train_samples": _LENGTH,
    "train.global_batch_size": _BATCHES,
    "train.micro_batch_size": _BATCHES,
    "train.rampup_batch_size": _BATCHES,
    "parallel": _LAYOUT,
    "precision.fp16": _PRECISION,
    "precision.bf16": _PRECISION,
    "precision.fp64": _PRECISION,
    "precision.initial_loss_scale": _FIRST_SCALE,
    "precision.fp8_format": _FP8,
    "precision.fp8_recipe": _FP8,
    "precision.fp8_amax_history_len": _FP8,
    "precision.fp8_amax_compute_algo": _FP8,
    "precision.fp8_param_gather": _FP8_GATHER,
    "precision.first_last_layers_bf16": _FP8,
    "precision.num_layers_at_start_in_bf16": _FP8,
    "precision.num_layers_at_end_in_bf16": _FP8,
    "precision": _FROM_HERE,
    "model": _FROM_HERE,
    "moe": _FROM_HERE,
    "optim": _FROM_HERE,
    "schedule": _FROM_HERE,
    "memory": _FROM_HERE,
    "latent": _FROM_HERE,
    "train": _FROM_HERE,
}
_NO_CHANGE_OF_THE_RUN = (
    "checkpoint",
    "log",
    "launch",
    "tokenizer",
    "data.num_workers",
    "data.data_cache_path",
    "train.device",
)


def plain(run: RunConfig) -> dict[str, Any]:
    """The config as a checkpoint holds it: with absolute paths, since a run may go on from another folder."""
    return json.loads(json.dumps(asdict(anchored(run))))


def changes(then: Mapping[str, Any], run: RunConfig, *, iteration: int, samples: int) -> list[str]:
    """One line per kind of effect: which settings differ from the checkpoint's, and what that means.

    >>> from petatron.config import load_config
    >>> flags = "--mock-data --lr 1e-3 --train-iters".split()
    >>> then = plain(load_config([*flags, "10"], preset="tiny-llama").config)
    >>> changes(then, load_config([*flags, "20"], preset="tiny-llama").config, iteration=5, samples=5)[-1]
    'train_iters 10 -> 20: the run now ends there; it continues at iteration 5'
    """
    now = plain(run)
    found: dict[str, list[str]] = {}
    for section in sorted(then.keys() & now.keys()):
        for name in sorted(then[section].keys() | now[section].keys()):
            known = by_path().get(f"{section}.{name}")
            default = None if known is None else known.default  # a setting that came later had its default then
            before, after = then[section].get(name, default), now[section].get(name)
            if known is not None and "path" in known.marks:
                before = json.loads(
                    json.dumps(absolute(known, before))
                )  # older checkpoints hold paths as they were typed
            effect = _effect(section, name)
            if before != after and effect is not None:
                found.setdefault(effect, []).append(f"{name} {before} -> {after}")
    return [
        f"{', '.join(settings)}: {effect.format(iteration=iteration, samples=samples)}"
        for effect, settings in found.items()
    ]


def _effect(section: str, name: str) -> str | None:
    path = f"{section}.{name}"
    if section in _NO_CHANGE_OF_THE_RUN or path in _NO_CHANGE_OF_THE_RUN:
        return None
    return _EFFECTS.get(path, _EFFECTS.get(section))
