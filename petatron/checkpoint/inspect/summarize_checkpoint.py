"""Summarizes what a checkpoint contains, from its manifest and tables alone: tensors, files, progress and configuration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.manifest import METADATA_KEY, Manifest
from petatron.checkpoint.files.safetensors_file import DTYPES
from petatron.config.layout_and_precision_text import layout_text
from petatron.config.saved_config import without_private_settings


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A logical tensor; `key` is kind/name."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    @property
    def kind(self) -> str:
        return self.key.split("/", 1)[0]


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint without its tensors' values. `run_metadata` is that of the training run, if one saved it.

    file_time_s: when its manifest was last written, which a copy may have made later than the save.
    """

    source: Path
    step: int
    file_time_s: float
    layout: str
    run_metadata: Mapping[str, Any]
    tensors: tuple[TensorSummary, ...]
    files: Mapping[str, int]

    @property
    def config(self) -> Mapping[str, Any]:
        """Returns the run's configuration by section; empty when no training run saved it."""
        return run_config(self.run_metadata)

    @property
    def progress(self) -> Mapping[str, float]:
        """Returns the run's progress counters."""
        progress = self.run_metadata.get("progress")
        return {k: v for k, v in progress.items() if isinstance(v, int | float)} if isinstance(progress, dict) else {}

    def bytes_in(self, subfolder: str) -> int:
        """Returns the size of the model folder or of the state folder."""
        return sum(size for name, size in self.files.items() if name.startswith(f"{subfolder}/"))

    @property
    def layout_text(self) -> str:
        """Returns `tp 2, dp 2 (optim sharded), 4 ranks`, or the layout text of another program."""
        parallel: Mapping[str, Any] = self.config.get("parallel") or {}
        if not parallel:
            return self.layout or "unknown"
        return layout_text(parallel)

    def as_json(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.source),
            "step": self.step,
            "file_time_s": self.file_time_s,
            "layout": self.layout,
            "weights_bytes": self.bytes_in("model"),
            "state_bytes": self.bytes_in("state"),
            **self.run_metadata,
            "tensors": [
                {"name": tensor.key, "shape": tensor.shape, "dtype": tensor.dtype, "bytes": tensor.num_bytes}
                for tensor in self.tensors
            ],
            "files": dict(self.files),
        }


def summarize_checkpoint(source: Path) -> CheckpointSummary:
    """Summarizes a manifest and its tables; no other file is opened."""
    manifest = step_folder.read_manifest(source)
    return CheckpointSummary(
        source=source,
        step=manifest.step,
        file_time_s=(source / step_folder.MANIFEST_FILE).stat().st_mtime,
        layout=manifest.layout,
        run_metadata=run_metadata(manifest),
        tensors=tuple(
            TensorSummary(key, tensor.shape, tensor.dtype, math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize)
            for key, tensor in sorted(manifest.tensors.items())
        ),
        files={name: file.size_bytes for name, file in sorted(manifest.files.items())},
    )


def run_metadata(manifest: Manifest) -> Mapping[str, Any]:
    """Returns what the training loop recorded: progress, config, data, schedule."""
    metadata = manifest.metadata.get(METADATA_KEY)
    return metadata if isinstance(metadata, dict) else {}


def run_config(metadata: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Returns the configuration in the metadata of a run, without private settings; other programs may have put anything there."""
    config = metadata.get("config")
    if not isinstance(config, dict):
        return {}
    return without_private_settings({section: values for section, values in config.items() if isinstance(values, dict)})


def summarize_kinds(summary: CheckpointSummary) -> dict[str, tuple[int, str, int]]:
    """Returns tensors, dtypes and bytes of every kind of state."""
    by_kind: dict[str, list[TensorSummary]] = {}
    for tensor in summary.tensors:
        by_kind.setdefault(tensor.kind, []).append(tensor)
    return {
        kind: (
            len(tensors),
            ", ".join(dtype for dtype, _ in Counter(tensor.dtype for tensor in tensors).most_common()),
            sum(tensor.num_bytes for tensor in tensors),
        )
        for kind, tensors in by_kind.items()
    }
