"""Filling this run's chunks from another run's boxes: first a plan that can refuse, then the reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.checkpoint.boxes import Box, overlap, tiling_problem
from petatron.checkpoint.manifest import Manifest, StoredBox, StoredTensor
from petatron.checkpoint.state import Chunk
from petatron.checkpoint.storage import DTYPE_CODES, MANIFEST, damage

_FLOATING = {code for dtype, code in DTYPE_CODES.items() if dtype.is_floating_point}
_SHOWN = 5


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Copy the common box of a stored box and a chunk."""

    chunk: Chunk
    stored: StoredBox
    common: Box


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A rank's reads, and the keys a lenient load has to leave alone."""

    reads: tuple[Read, ...]
    missing: tuple[str, ...]

    @property
    def files(self) -> set[str]:
        return {read.stored.file for read in self.reads}


def plan_reads(
    source: Path, manifest: Manifest, chunks: Sequence[Chunk], *, wanted: Collection[str], strict: bool
) -> Plan:
    """Decide every read of this rank; `wanted` are the keys that any rank asks for.

    A strict load wants the same keys on both sides. Kinds nobody asks for at all (optimizer state, when only weights are
    loaded) are none of its business.
    """
    reads: list[Read] = []
    problems: list[str] = []
    missing = sorted({chunk.key for chunk in chunks if chunk.tensor.numel() and chunk.key not in manifest.tensors})
    if strict:
        kinds = {key.split("/", 1)[0] for key in wanted}
        surplus = [key for key in manifest.tensors if key.split("/", 1)[0] in kinds and key not in wanted]
        problems += [f"{key} is not in the checkpoint" for key in missing]
        problems += [f"{key} is in the checkpoint, but not in this run" for key in surplus]
    checked: set[str] = set()
    for chunk in chunks:
        stored = manifest.tensors.get(chunk.key)
        if stored is None or not chunk.tensor.numel():
            continue
        problem = _mismatch(chunk, stored)
        if problem is not None:
            problems.append(problem)
            continue
        if chunk.key not in checked:
            gap = tiling_problem(stored.shape, [box.box for box in stored.boxes])
            if gap is not None:
                raise damage(source / MANIFEST, f"does not describe all of {chunk.key}: {gap}")
            checked.add(chunk.key)
        common = ((box, overlap(chunk.box, box.box)) for box in stored.boxes)
        reads += [Read(chunk, box, part) for box, part in common if part is not None]
    if problems:
        raise _does_not_fit(source, problems)
    return Plan(tuple(reads), tuple(missing))


def _mismatch(chunk: Chunk, stored: StoredTensor) -> str | None:
    if stored.shape != chunk.logical_shape:
        return f"{chunk.key} has shape {list(stored.shape)} there and {list(chunk.logical_shape)} in this run"
    code = DTYPE_CODES.get(chunk.tensor.dtype)
    if stored.dtype != code and not (stored.dtype in _FLOATING and code in _FLOATING):
        return f"{chunk.key} holds {stored.dtype} there and {chunk.tensor.dtype} in this run"
    return None


def _does_not_fit(source: Path, problems: Sequence[str]) -> CheckpointError:
    unique = list(dict.fromkeys(problems))
    lines = [f"  {problem}" for problem in unique[:_SHOWN]]
    if len(unique) > _SHOWN:
        lines.append(f"  and {len(unique) - _SHOWN} more")
    fix = "Use the model and optimizer flags it was saved with, or --finetune or --no-load-optim to load less of it."
    return CheckpointError("\n".join([f"{source} does not fit this run:", *lines, fix]))


def fill(source: Path, plan: Plan) -> None:
    """Carry out the reads of a plan, file by file; dtypes are converted on the way."""
    by_file: dict[str, list[Read]] = {}
    for read in plan.reads:
        by_file.setdefault(read.stored.file, []).append(read)
    for file, reads in by_file.items():
        try:
            with safe_open(source / file, framework="pt") as opened:
                for read in reads:
                    part = opened.get_slice(read.stored.name)[read.common.slices_in(read.stored.box)]
                    read.chunk.tensor.detach()[read.common.slices_in(read.chunk.box)].copy_(part)
        except (SafetensorError, OSError) as error:
            raise damage(source / file, f"cannot be read: {error}") from error


def read_local(source: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    """The tensors that a rank saved for itself."""
    prefix = f"local/{rank}/"
    found: dict[str, Tensor] = {}
    for name, file in manifest.local.items():
        if name.startswith(prefix):
            try:
                with safe_open(source / file, framework="pt") as opened:
                    found[name.removeprefix(prefix)] = opened.get_tensor(name).clone()
            except (SafetensorError, OSError) as error:
                raise damage(source / file, f"cannot be read: {error}") from error
    return found
