"""Checkpoints on disk: how one is published so that a crash at any instant leaves the last good one, and how it is read.

    FOLDER/step-00000010/manifest.json           what is there, sizes, digests
    FOLDER/step-00000010/rank-00000.safetensors  the boxes rank 0 is primary for, and its local tensors
    FOLDER/latest                                the name of the newest step folder

Files are written and synced in `step-N.tmp`, the manifest last; one rename makes the folder appear, then `latest` moves. A
rename cannot replace a folder that is not empty, so saving a step again first moves the old one to `step-N.replaced`.
Should the crash come between the two renames, readers take the replaced folder, and the next save puts it back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.checkpoint.manifest import (
    Manifest,
    RankTable,
    StoredBox,
    StoredFile,
    StoredTensor,
    UnknownVersion,
    from_json,
    merge,
    to_json,
)
from petatron.checkpoint.state import Chunk

MANIFEST = "manifest.json"
LATEST = "latest"
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_STEP = re.compile(r"step-(\d{8,})(\.tmp|\.replaced)?")


class Disk:
    """The file operations that publishing is made of. Tests replace it to crash between any two of them."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> StoredFile:
        """Write a file through to the device, and say what it holds."""
        digest, size = hashlib.blake2b(digest_size=32), 0
        with path.open("wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
                size += len(part)
            file.flush()
            os.fsync(file.fileno())
        return StoredFile(size, digest.hexdigest())

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder (new files, renames) survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def check_writable(folder: str | Path) -> None:
    """Raise now, rather than at the first save, if checkpoints cannot be written to a folder; makes the folder."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"petatron")
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {folder}: {error.strerror or error}. "
            "Make that folder writable, or give --save another one."
        ) from error


def step_name(step: int) -> str:
    return f"step-{step:08d}"


# Writing


def begin(folder: Path, step: int, disk: Disk) -> None:
    """Clear what an interrupted save left behind, and open the draft of a step."""
    disk.make_folder(folder)
    recover(folder, disk)
    disk.make_folder(folder / f"{step_name(step)}.tmp")


def recover(folder: Path, disk: Disk) -> None:
    """Remove drafts, and bring back a replaced step whose replacement never appeared."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        suffix = match.group(2) if match else None
        if suffix == ".tmp" or path.name == f"{LATEST}.tmp":
            disk.remove(path)
        elif suffix == ".replaced":
            final = path.with_suffix("")
            if final.exists():
                disk.remove(path)
            else:
                disk.rename(path, final)


def write_rank(
    folder: Path, step: int, chunks: Sequence[Chunk], *, rank: int, local: Mapping[str, Tensor], disk: Disk
) -> RankTable:
    """Write a rank's file into the draft of a step."""
    draft, file = folder / f"{step_name(step)}.tmp", f"rank-{rank:05d}.safetensors"
    disk.make_folder(draft)  # on a network file system the first rank's folder may not be visible here yet
    own = {f"local/{rank}/{name}": tensor for name, tensor in local.items()}
    entries, tensors = [], dict(own)
    for chunk in chunks:
        if not chunk.primary or not chunk.tensor.numel():
            continue
        name = f"{chunk.key}@{','.join(map(str, chunk.start))}"
        box = StoredBox(file, name, chunk.box)
        entries.append((chunk.key, StoredTensor(chunk.logical_shape, _code(chunk.key, chunk.tensor), (box,))))
        tensors[name] = chunk.tensor
    stored = disk.write(draft / file, _safetensors(tensors))
    return RankTable(file, stored, tuple(entries), tuple(own))


def _code(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in DTYPE_CODES:
        raise CheckpointError(
            f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold. Save it as {torch.float32}."
        )
    return DTYPE_CODES[tensor.dtype]


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, one tensor at a time, so that a save needs host memory for one tensor only.

    Wider dtypes come first: every tensor then starts at a multiple of its element size, as mapping it into memory needs.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _code(name, tensor), "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        if tensor.numel():
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            yield memoryview(plain.view(torch.uint8).numpy())


def publish(
    folder: Path, step: int, tables: Sequence[RankTable], *, facts: Mapping[str, Any], layout: str, disk: Disk
) -> None:
    """Turn a draft into the newest checkpoint. Until the rename it does not exist for readers."""
    manifest = Manifest(
        step=step,
        layout=layout,
        facts=facts,
        tensors=merge(tables),
        local={name: table.file for table in tables for name in table.local},
        files={table.file: table.stored for table in tables},
    )
    final = folder / step_name(step)
    draft, replaced = folder / f"{final.name}.tmp", folder / f"{final.name}.replaced"
    disk.write(draft / MANIFEST, [to_json(manifest).encode()])
    disk.sync_folder(draft)
    if final.exists():
        disk.rename(final, replaced)
    disk.rename(draft, final)
    disk.sync_folder(folder)
    disk.write(folder / f"{LATEST}.tmp", [f"{final.name}\n".encode()])
    disk.rename(folder / f"{LATEST}.tmp", folder / LATEST)
    disk.sync_folder(folder)
    if replaced.exists():
        disk.remove(replaced)


# Reading


def steps(folder: Path) -> dict[int, Path]:
    """Every complete checkpoint of a folder, oldest first."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():  # in this order a step precedes its .replaced
        match = _STEP.fullmatch(path.name)
        if match and match.group(2) != ".tmp" and (path / MANIFEST).is_file():
            found.setdefault(int(match.group(1)), path)
    return dict(sorted(found.items()))


def latest_step(folder: Path) -> int | None:
    """The step that `latest` names if it is there, else the highest one."""
    found = steps(folder)
    try:
        match = _STEP.fullmatch((folder / LATEST).read_text().strip())
    except (OSError, UnicodeDecodeError):
        match = None
    if match and int(match.group(1)) in found:
        return int(match.group(1))
    return max(found, default=None)


def choose(folder: Path, step: int | None) -> Path:
    """The folder of a step, or of the newest one."""
    found = steps(folder)
    wanted = latest_step(folder) if step is None else step
    if wanted is None:
        raise CheckpointError(f"{folder} holds no checkpoint. Give --load a folder that --save wrote to.")
    if wanted not in found:
        have = ", ".join(map(str, found)) or "none"
        raise CheckpointError(
            f"{folder} has no checkpoint of step {wanted}; it has: {have}. Choose one with --ckpt-step."
        )
    return found[wanted]


def damage(path: Path, why: str) -> CheckpointError:
    """The error for a file of a checkpoint that is not what was saved."""
    here = path.parent
    others = ", ".join(str(step) for step, folder in steps(here.parent).items() if folder != here)
    fix = f"resume from another step with --ckpt-step (there are: {others})" if others else "save a new checkpoint"
    return CheckpointError(f"{path} {why}. Restore it from a copy, or {fix}.")


def read_manifest(source: Path) -> Manifest:
    path = source / MANIFEST
    try:
        manifest = from_json(path.read_text())
    except OSError as error:
        raise damage(path, f"cannot be read: {error.strerror or error}") from error
    except UnknownVersion as error:
        raise CheckpointError(f"{path}: {error}. Use the version of Petatron that saved it, or a newer one.") from error
    except ValueError as error:
        raise damage(path, f"is damaged: {error}") from error
    named = {box.file for tensor in manifest.tensors.values() for box in tensor.boxes} | set(manifest.local.values())
    strange = (named - manifest.files.keys()) | {name for name in manifest.files if Path(name).name != name}
    if strange:
        raise damage(path, f"names the file {min(strange)!r}, which is not one of the checkpoint's files")
    return manifest


def check_file(path: Path, expected: StoredFile, *, verify: bool) -> None:
    """Raise if a file is missing, has another size or, with `verify`, other content than was saved."""
    if not path.is_file():
        raise damage(path, "is missing")
    size = path.stat().st_size
    if size != expected.size_bytes:
        raise damage(path, f"has {size} bytes where {expected.size_bytes} were saved")
    if verify:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
        if digest != expected.digest:
            raise damage(path, "does not have the content that was saved (its digest differs)")
