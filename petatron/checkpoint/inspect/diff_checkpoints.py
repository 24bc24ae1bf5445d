"""Compares two checkpoints, whatever layouts saved them: settings, and every logical tensor.

Tensors are compared in boxes of a few million elements, many small ones in a batch, each filled from either checkpoint through the
same reads a load makes. So memory is bounded, bytes are checked against their digests, and the two layouts do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.checkpoint.files.manifest import Manifest, StoredTensor
from petatron.checkpoint.files.safetensors_file import DTYPES
from petatron.checkpoint.files.step_folder import MANIFEST_FILE, damaged_error, read_manifest
from petatron.checkpoint.inspect.summarize_checkpoint import run_config, run_metadata
from petatron.checkpoint.inspect.verify_checkpoint import ProgressCallback
from petatron.checkpoint.load.reshard_reads import BoxRead, ReadPlan, execute_reads
from petatron.checkpoint.tensor_chunk import MASTER_PREFIX, WEIGHT_PREFIX, Chunk
from petatron.sharding.boxes import overlap, tiling_problem
from petatron.sharding.flat_shard import range_boxes

_BATCH_ELEMENTS = 4 << 20


@dataclass(slots=True)
class TensorDiff:
    """How far a tensor is from its counterpart. `second_key` differs from `key` where one side has no master weights."""

    key: str
    second_key: str
    elements: int
    differing: int = 0
    largest: float = 0.0
    scale: float = 0.0

    @property
    def relative(self) -> float:
        """Returns the largest absolute difference over the largest absolute value of either side."""
        if self.largest == 0:
            return 0.0
        return self.largest / self.scale if math.isfinite(self.largest) and self.scale else math.inf

    def update(self, a: Tensor, b: Tensor) -> None:
        """Adds the values of a box of the tensor."""
        unequal = (a != b) & ~((a != a) & (b != b))  # the same NaN on both sides is no difference
        count = int(unequal.sum())
        a, b = (value.double() if not value.is_floating_point() else value for value in (a, b))
        finite = [value.abs().nan_to_num(0.0, 0.0, 0.0).max().item() for value in (a, b) if value.numel()]
        self.scale = max([self.scale, *finite])
        if count:
            self.differing += count
            gap = (a[unequal] - b[unequal]).abs().max().item()
            self.largest = max(self.largest, gap if math.isfinite(gap) else math.inf)


_TensorPair = tuple[TensorDiff, tuple[int, ...], torch.dtype]
"""The difference of a tensor, its shape, and the dtype in which it is compared."""
_PairBox = tuple[_TensorPair, tuple[int, ...], tuple[int, ...]]
"""A pair, and start and shape of a box of it."""


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """Differences between two checkpoints: settings (name, first, second), keys of one side only, tensors that cannot be
    compared and why, and all others, the worst first."""

    settings: tuple[tuple[str, Any, Any], ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    unlike: tuple[str, ...]
    tensors: tuple[TensorDiff, ...]

    def allclose(self, rtol: float) -> bool:
        """Whether all tensors are on both sides, and equal up to a tolerance."""
        alone = self.only_first or self.only_second or self.unlike
        return not alone and all(tensor.relative <= rtol for tensor in self.tensors)


def diff_checkpoints(
    first: Path, second: Path, on_progress: ProgressCallback = lambda done, total: None
) -> CheckpointDiff:
    """Compares two checkpoints; every byte that is read is checked."""
    manifests = read_manifest(first), read_manifest(second)
    for source, manifest in zip((first, second), manifests):
        for key, tensor in manifest.tensors.items():
            gap = tiling_problem(tensor.shape, [stored.box for stored in tensor.boxes])
            if gap is not None:
                raise damaged_error(source / MANIFEST_FILE, f"does not describe all of {key}: {gap}")
    pairs, unlike = _match_tensors(manifests[0].tensors, manifests[1].tensors)
    diffs = [diff for diff, _, _ in pairs]
    total, done = sum(diff.elements for diff in diffs), 0
    for batch in _box_batches(pairs):
        first_values = _read_batch(first, manifests[0], [diff.key for (diff, _, _), _, _ in batch], batch)
        second_values = _read_batch(second, manifests[1], [diff.second_key for (diff, _, _), _, _ in batch], batch)
        for ((diff, _, _), _, shape), a, b in zip(batch, first_values, second_values):
            diff.update(a, b)
            done += math.prod(shape)
        on_progress(done, total)
    return CheckpointDiff(
        settings=tuple(_setting_diffs(run_metadata(manifests[0]), run_metadata(manifests[1]))),
        only_first=tuple(sorted(manifests[0].tensors.keys() - {diff.key for diff in diffs} - unlike.keys())),
        only_second=tuple(sorted(manifests[1].tensors.keys() - {diff.second_key for diff in diffs} - unlike.keys())),
        unlike=tuple(unlike.values()),
        tensors=tuple(sorted(diffs, key=lambda diff: (-diff.relative, diff.key))),
    )


def _setting_diffs(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields differences of progress, data and every field of the configuration."""
    configs = run_config(first), run_config(second)
    sections = [
        ("progress", _section(first, "progress"), _section(second, "progress")),
        *(
            (name, *(_section(config, name) for config in configs))
            for name in dict.fromkeys([*configs[0], *configs[1]])
        ),
    ]
    if first.get("data") != second.get("data"):
        yield "data", first.get("data"), second.get("data")
    for section, old, new in sections:
        for name in dict.fromkeys([*old, *new]):
            if old.get(name) != new.get(name):
                yield f"{section}.{name}", old.get(name), new.get(name)


def _section(metadata: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = metadata.get(name)
    return section if isinstance(section, dict) else {}


def _match_tensors(
    first: Mapping[str, StoredTensor], second: Mapping[str, StoredTensor]
) -> tuple[list[_TensorPair], dict[str, str]]:
    """Pairs tensors, and tells why some that have the same name cannot be compared."""
    pairs: list[_TensorPair] = []
    unlike: dict[str, str] = {}
    for key in dict.fromkeys([*first, *second]):
        ours, theirs = _matching_key(key, first), _matching_key(key, second)
        if ours is None or theirs is None:
            continue
        a, b = first[ours], second[theirs]
        dtype = _common_dtype(DTYPES[a.dtype], DTYPES[b.dtype])
        if a.shape != b.shape:
            unlike[key] = f"{key} is {list(a.shape)} in the first and {list(b.shape)} in the second"
        elif dtype is None:
            unlike[key] = f"{key} is {a.dtype} in the first and {b.dtype} in the second"
        else:
            pairs.append((TensorDiff(ours, theirs, math.prod(a.shape)), a.shape, dtype))
    return pairs, unlike


def _matching_key(key: str, tensors: Mapping[str, StoredTensor]) -> str | None:
    """Returns a tensor's key on one side; a full-precision run has no master weights other than the model's own."""
    if key in tensors:
        return key
    plain = WEIGHT_PREFIX + key.removeprefix(MASTER_PREFIX)
    return plain if key.startswith(MASTER_PREFIX) and plain in tensors else None


def _common_dtype(first: torch.dtype, second: torch.dtype) -> torch.dtype | None:
    if first.is_floating_point and second.is_floating_point:
        return torch.float64 if torch.float64 in (first, second) else torch.float32
    return first if first == second else None


def _box_batches(pairs: Sequence[_TensorPair]) -> Iterator[list[_PairBox]]:
    """Yields boxes of all pairs in order, in batches of bounded size."""
    batch: list[_PairBox] = []
    room = _BATCH_ELEMENTS
    for pair in pairs:
        at, end = 0, pair[0].elements
        while at < end:
            stop = min(end, at + room)
            batch += [(pair, start, shape) for start, shape, _ in range_boxes(pair[1], at, stop)]
            room -= stop - at
            at = stop
            if room == 0:
                yield batch
                batch, room = [], _BATCH_ELEMENTS
    if batch:
        yield batch


def _read_batch(source: Path, manifest: Manifest, keys: Sequence[str], batch: Sequence[_PairBox]) -> list[Tensor]:
    values: list[Tensor] = []
    reads: list[BoxRead] = []
    for key, ((_, logical_shape, dtype), start, shape) in zip(keys, batch):
        chunk = Chunk(key, logical_shape, start, torch.empty(shape, dtype=dtype))
        values.append(chunk.tensor)
        for stored in manifest.tensors[key].boxes:
            common = overlap(chunk.box, stored.box)
            if common is not None:
                reads.append(BoxRead(chunk, stored, common))
    execute_reads(source, ReadPlan(tuple(reads), ()), manifest.files)
    return values
