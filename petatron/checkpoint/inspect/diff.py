"""Two checkpoints side by side, whatever layouts saved them: settings, and every logical tensor.

Tensors are compared in pieces of a few million elements, many small ones together, each filled from either checkpoint
through the same reads a load makes. So memory is bounded, bytes are checked against their digests, and it does not matter how
either side was cut.
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
from petatron.checkpoint.files.step_folder import MANIFEST, damage, read_manifest
from petatron.checkpoint.inspect.inspect import Note, run_config, run_facts
from petatron.checkpoint.load.box_reads import Plan, Read, fill
from petatron.checkpoint.state import MASTERS, WEIGHTS, Chunk
from petatron.sharding.boxes import overlap, tiling_problem
from petatron.sharding.flat_shard import range_boxes

_BATCH_ELEMENTS = 4 << 20


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How far a tensor is from its counterpart. `second_key` differs from `key` where one side has no wider weights."""

    key: str
    second_key: str
    elements: int
    differing: int
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        """The largest difference of an element over the largest element of either side."""
        if self.largest == 0:
            return 0.0
        return self.largest / self.scale if math.isfinite(self.largest) and self.scale else math.inf


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between two checkpoints: settings (name, first, second), keys of one side only, tensors that cannot be
    compared and why, and all others, the worst first."""

    settings: tuple[tuple[str, Any, Any], ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    unlike: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]

    def agrees(self, relative_tolerance: float) -> bool:
        """Whether all tensors are on both sides, and equal up to a tolerance."""
        alone = self.only_first or self.only_second or self.unlike
        return not alone and all(tensor.relative <= relative_tolerance for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class _Pair:
    """The keys under which two checkpoints have the same tensor, and the dtype in which it is compared."""

    key: str
    second_key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def compare(first: Path, second: Path, note: Note = lambda done, total: None) -> Comparison:
    """Compare two checkpoints; every byte that is read is checked."""
    manifests = read_manifest(first), read_manifest(second)
    for source, manifest in zip((first, second), manifests):
        _check_whole(source, manifest)
    pairs, unlike = _pairs(manifests[0].tensors, manifests[1].tensors)
    differences = _differences(pairs, (first, second), manifests, note)
    return Comparison(
        settings=tuple(_settings(run_facts(manifests[0]), run_facts(manifests[1]))),
        only_first=tuple(sorted(manifests[0].tensors.keys() - {pair.key for pair in pairs} - unlike.keys())),
        only_second=tuple(sorted(manifests[1].tensors.keys() - {pair.second_key for pair in pairs} - unlike.keys())),
        unlike=tuple(unlike.values()),
        tensors=tuple(sorted(differences, key=lambda found: (-found.relative, found.key))),
    )


def _check_whole(source: Path, manifest: Manifest) -> None:
    for key, tensor in manifest.tensors.items():
        gap = tiling_problem(tensor.shape, [stored.box for stored in tensor.boxes])
        if gap is not None:
            raise damage(source / MANIFEST, f"does not describe all of {key}: {gap}")


def _settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Progress, data and every field of the configuration that differ."""
    configs = run_config(first), run_config(second)
    sections = [
        ("progress", _table_of(first, "progress"), _table_of(second, "progress")),
        *(
            (name, *(_table_of(config, name) for config in configs))
            for name in dict.fromkeys([*configs[0], *configs[1]])
        ),
    ]
    if first.get("data") != second.get("data"):
        yield "data", first.get("data"), second.get("data")
    for section, old, new in sections:
        for name in dict.fromkeys([*old, *new]):
            if old.get(name) != new.get(name):
                yield f"{section}.{name}", old.get(name), new.get(name)


def _table_of(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = facts.get(name)
    return found if isinstance(found, dict) else {}


def _pairs(first: Mapping[str, StoredTensor], second: Mapping[str, StoredTensor]) -> tuple[list[_Pair], dict[str, str]]:
    """Which tensors meet, and why some that have the same name cannot."""
    pairs: list[_Pair] = []
    unlike: dict[str, str] = {}
    for key in dict.fromkeys([*first, *second]):
        ours, theirs = _partner(key, first), _partner(key, second)
        if ours is None or theirs is None:
            continue
        a, b = first[ours], second[theirs]
        dtype = _common_dtype(DTYPES[a.dtype], DTYPES[b.dtype])
        if a.shape != b.shape:
            unlike[key] = f"{key} is {list(a.shape)} in the first and {list(b.shape)} in the second"
        elif dtype is None:
            unlike[key] = f"{key} is {a.dtype} in the first and {b.dtype} in the second"
        else:
            pairs.append(_Pair(ours, theirs, a.shape, dtype))
    return pairs, unlike


def _partner(key: str, tensors: Mapping[str, StoredTensor]) -> str | None:
    """A tensor's key on a side; a run in full precision has no wider weights than the model's own."""
    if key in tensors:
        return key
    plain = WEIGHTS + key.removeprefix(MASTERS)
    return plain if key.startswith(MASTERS) and plain in tensors else None


def _common_dtype(first: torch.dtype, second: torch.dtype) -> torch.dtype | None:
    if first.is_floating_point and second.is_floating_point:
        return torch.float64 if torch.float64 in (first, second) else torch.float32
    return first if first == second else None


@dataclass(slots=True)
class _Tally:
    """What is known so far of a pair."""

    differing: int = 0
    largest: float = 0.0
    scale: float = 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        unequal = (a != b) & ~((a != a) & (b != b))  # the same NaN on both sides is no difference
        count = int(unequal.sum())
        a, b = (value.double() if not value.is_floating_point() else value for value in (a, b))
        finite = [value.abs().nan_to_num(0.0, 0.0, 0.0).max().item() for value in (a, b) if value.numel()]
        self.scale = max([self.scale, *finite])
        if count:
            self.differing += count
            gap = (a[unequal] - b[unequal]).abs().max().item()
            self.largest = max(self.largest, gap if math.isfinite(gap) else math.inf)


def _differences(
    pairs: Sequence[_Pair], sources: tuple[Path, Path], manifests: tuple[Manifest, Manifest], note: Note
) -> list[TensorDifference]:
    tallies = [_Tally() for _ in pairs]
    total, done = sum(math.prod(pair.shape) for pair in pairs), 0
    for batch in _batches(pairs):
        sides = [
            _read(source, manifest, [(pair.key, pair.second_key)[side] for _, pair, _, _ in batch], batch)
            for side, (source, manifest) in enumerate(zip(sources, manifests))
        ]
        for (number, _, _, shape), a, b in zip(batch, *sides):
            tallies[number].add(a, b)
            done += math.prod(shape)
        note(done, total)
    return [
        TensorDifference(pair.key, pair.second_key, math.prod(pair.shape), tally.differing, tally.largest, tally.scale)
        for pair, tally in zip(pairs, tallies)
    ]


_Part = tuple[int, _Pair, tuple[int, ...], tuple[int, ...]]
"""The number of a pair, the pair, and start and shape of a box of it."""


def _batches(pairs: Sequence[_Pair]) -> Iterator[list[_Part]]:
    """Boxes of all pairs in order, at most so many elements at a time."""
    batch: list[_Part] = []
    room = _BATCH_ELEMENTS
    for number, pair in enumerate(pairs):
        at, end = 0, math.prod(pair.shape)
        while at < end:
            stop = min(end, at + room)
            batch += [(number, pair, start, shape) for start, shape, _ in range_boxes(pair.shape, at, stop)]
            room -= stop - at
            at = stop
            if room == 0:
                yield batch
                batch, room = [], _BATCH_ELEMENTS
    if batch:
        yield batch


def _read(source: Path, manifest: Manifest, keys: Sequence[str], batch: Sequence[_Part]) -> list[Tensor]:
    """One side's values of a batch."""
    values: list[Tensor] = []
    reads: list[Read] = []
    for key, (_, pair, start, shape) in zip(keys, batch):
        chunk = Chunk(key, pair.shape, start, torch.empty(shape, dtype=pair.dtype))
        values.append(chunk.tensor)
        for stored in manifest.tensors[key].boxes:
            common = overlap(chunk.box, stored.box)
            if common is not None:
                reads.append(Read(chunk, stored, common))
    fill(source, Plan(tuple(reads), ()), manifest.files)
    return values
