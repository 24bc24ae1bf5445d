"""Loads an average of the weights in the place of a checkpoint's weights (`--weights ema`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from petatron.base.errors import CheckpointError
from petatron.base.format_text import abbreviate_names
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.manifest import Manifest
from petatron.checkpoint.tensor_chunk import MASTER_PREFIX, WEIGHT_PREFIX


def read_manifest_with_weights(step: Path, kind: str) -> Manifest:
    """Reads a step's manifest and tables, with the tensors of a kind as the weights; weights that have none of it stay (frozen ones)."""
    manifest = step_folder.read_manifest(step)
    tensors = manifest.tensors
    others = {key.partition("/")[2]: tensor for key, tensor in tensors.items() if key.startswith(f"{kind}/")}
    names = {key.removeprefix(WEIGHT_PREFIX) for key in tensors if key.startswith(WEIGHT_PREFIX)} & others.keys()
    if not names:
        kinds = sorted({key.partition("/")[0] for key in tensors})
        raise CheckpointError(f"{step} has no weights {kind}/. Its kinds of state are {', '.join(kinds)}.")
    unlike = [name for name in names if others[name].shape != tensors[WEIGHT_PREFIX + name].shape]
    if unlike:
        raise CheckpointError(
            f"{step} has {abbreviate_names(sorted(unlike))} of {kind}/ in another shape than the model's."
        )
    kept = {
        key: tensor
        for key, tensor in tensors.items()
        if not (key.startswith(MASTER_PREFIX) and key.removeprefix(MASTER_PREFIX) in names)
    }
    return replace(manifest, tensors=kept | {WEIGHT_PREFIX + name: others[name] for name in names}, tables=())
