"""Publishes, reads and prunes step folders: a crash at any instant leaves the last good step.

    FOLDER/step-00000010/manifest.json                   the tables, and their digests
    FOLDER/step-00000010/model/                          the weights, as a Hugging Face folder
    FOLDER/step-00000010/state/rank-00000.safetensors    all other state: the boxes rank 0 is primary for
    FOLDER/step-00000010/state/rank-00000.table.json     what rank 0 wrote: files, sizes, digests, boxes
    FOLDER/latest                                        the name of the newest step folder

Files are written and synced in `step-N.tmp`, a rank's table after its files, the manifest last; one rename makes the folder
appear, then `latest` is updated, and only then are old steps pruned. A rename cannot replace a folder that is not empty, so saving a
step again first moves the old one to `step-N.replaced`. After a crash between the two renames, readers use the replaced
folder, and the next save puts it back. A step that is being pruned is first renamed to `step-N.pruned`: a reader never sees half
of one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from petatron.base.errors import CheckpointError
from petatron.base.safe_files import symlink_target
from petatron.base.untrusted_files import not_a_file_reason, read_limited_bytes, reading_untrusted
from petatron.checkpoint.files.block_digest import DigestKind, digest_kind
from petatron.checkpoint.files.digested_file_io import Disk, StoredFile, digest_file
from petatron.checkpoint.files.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    RankTable,
    TableFile,
    UnknownVersionError,
    manifest_from_json,
    manifest_to_json,
    merge_tables,
    table_digest,
    table_from_json,
    table_to_json,
)
from petatron.checkpoint.files.signature import SIGNATURE_FILE, SignFunction
from petatron.checkpoint.files.step_list import (
    LATEST_FILE,
    MANIFEST_FILE,
    MODEL_FOLDER,
    STATE_FOLDER,
    STEP_FOLDER_NAME,
    DamagedCheckpointError,
    damaged_error,
    latest_step,
    list_steps,
    step_name,
)

_VISIBILITY_TIMEOUT_S = 10.0
_MAX_FILE_NAME_BYTES = 255


# Writing


def begin_step(folder: Path, step: int, disk: Disk) -> None:
    """Removes what an interrupted save left behind, and creates the temporary folder of a step."""
    if not folder.exists():
        disk.make_folder(folder)
        disk.sync_folder(folder.parent)
    recover_interrupted(folder, disk)
    if os.path.lexists(tmp_folder := folder / f"{step_name(step)}.tmp"):
        disk.remove(tmp_folder)
    make_tmp_step(folder, step, disk)


def make_tmp_step(folder: Path, step: int, disk: Disk) -> Path:
    """Creates the folder in which a step is written; on a network file system another rank's may not be visible yet."""
    tmp_folder = folder / f"{step_name(step)}.tmp"
    for path in (tmp_folder, tmp_folder / MODEL_FOLDER, tmp_folder / STATE_FOLDER):
        disk.make_folder(path)
    return tmp_folder


def recover_interrupted(folder: Path, disk: Disk) -> None:
    """Removes temporary folders, and restores a replaced step whose replacement never appeared.

    What cannot be removed stays: NFS keeps files that are open somewhere, and that is no reason not to save.
    """
    left = [path for path in sorted(folder.iterdir()) if _is_leftover(path)] if folder.is_dir() else []
    if left:
        # The crashed process may not have synced, and a power cut must not undo the rename of what is removed here.
        disk.sync_folder(folder)
    for path in left:
        step_path = path.with_suffix("")
        if path.suffix == ".replaced" and not step_path.exists():
            if step_path.is_symlink():  # a dangling link that occupies the step's name
                disk.remove(step_path)
            disk.rename(path, step_path)
        else:
            with contextlib.suppress(OSError):
                disk.remove(path)


def _is_leftover(path: Path) -> bool:
    """Whether this is part of an unfinished save, rather than a step or an unrelated file."""
    match = STEP_FOLDER_NAME.fullmatch(path.name)
    return path.name == f"{LATEST_FILE}.tmp" or (match is not None and match.group(2) is not None)


def rank_file_path(rank: int) -> str:
    """Returns the path in a step of a rank's own file of tensors."""
    return f"{STATE_FOLDER}/rank-{rank:05d}.safetensors"


def table_path(rank: int) -> str:
    """Returns the path in a step of a rank's table."""
    return f"{STATE_FOLDER}/rank-{rank:05d}.table.json"


def write_table(tmp_step: Path, rank: int, table: RankTable, disk: Disk) -> TableFile:
    """Writes the table of a rank's files into the temporary folder of a step."""
    content = table_to_json(table)
    path = table_path(rank)
    disk.write(tmp_step / path, [content])
    return TableFile(path, len(content), table_digest(content))


def publish_step(
    folder: Path,
    step: int,
    tables: Sequence[TableFile],
    *,
    metadata: Mapping[str, Any],
    layout: str,
    disk: Disk,
    sign: SignFunction | None = None,
) -> None:
    """Publishes a temporary folder as the newest checkpoint. Until the rename readers do not see it."""
    final = folder / step_name(step)
    tmp_folder, replaced = folder / f"{final.name}.tmp", folder / f"{final.name}.replaced"
    for part in (MODEL_FOLDER, STATE_FOLDER):
        disk.sync_folder(tmp_folder / part)
    content = manifest_to_json(step, layout=layout, metadata=metadata, tables=tables).encode()
    disk.write(tmp_folder / MANIFEST_FILE, [content])
    if sign is not None:
        disk.write(tmp_folder / SIGNATURE_FILE, [sign(content)])
    disk.sync_folder(tmp_folder)
    if os.path.lexists(final):
        disk.rename(final, replaced)
    disk.rename(tmp_folder, final)
    disk.sync_folder(folder)
    disk.write(folder / f"{LATEST_FILE}.tmp", [f"{final.name}\n".encode()])
    disk.rename(folder / f"{LATEST_FILE}.tmp", folder / LATEST_FILE)
    disk.sync_folder(folder)
    if os.path.lexists(replaced):
        disk.remove(replaced)


def check_visible(folder: Path, step: int, table: TableFile) -> None:
    """Checks that another rank's files are visible here too; a network file system may need a moment for that.

    Every rank looks for the files of the next one. If ranks write to different disks, some rank's neighbor is on another one.
    """
    tmp_folder = folder / f"{step_name(step)}.tmp"
    give_up_at = time.monotonic() + _VISIBILITY_TIMEOUT_S
    while (missing := _first_invisible(tmp_folder, table)) is not None:
        if time.monotonic() > give_up_at:
            raise CheckpointError(
                f"{tmp_folder / missing} was written by another rank and is not seen by this one. Give --save a folder that all "
                "machines share; earlier checkpoints are untouched."
            )
        time.sleep(0.2)


def _first_invisible(tmp_step: Path, table: TableFile) -> str | None:
    """Returns a file that is missing or incomplete: the table itself, or one that it names."""
    try:
        content = (tmp_step / table.path).read_bytes()
    except OSError:
        return table.path
    if table_digest(content) != table.digest:
        return table.path
    files = table_from_json(content).files
    return next((name for name, file in files.items() if not _has_size(tmp_step / name, file.size_bytes)), None)


def _has_size(path: Path, size_bytes: int) -> bool:
    try:
        return path.stat().st_size == size_bytes
    except OSError:
        return False


def prune_steps(folder: Path, *, keep: int | None, retain_interval: int | None, disk: Disk) -> list[int]:
    """Removes old steps: all up to the one that `latest` names but the newest `keep` and the multiples of `retain_interval`.

    Steps after `latest` stay, and do not count: someone resumed from an earlier one, and may want that branch or not trust it.
    Links under names that are ours are unlinked.
    """
    if keep is None or not folder.is_dir():
        return []
    for link in stray_symlinks(folder):
        disk.remove(link)
    steps = list_steps(folder)
    current = latest_step(folder)
    if current is None:
        return []
    behind = [step for step in steps if step <= current]
    gone = [step for step in behind[:-keep] if not (retain_interval and step % retain_interval == 0)]
    if not gone:
        return []
    doomed = [folder / f"{step_name(step)}.pruned" for step in gone]
    for step, path in zip(gone, doomed):
        if os.path.lexists(path):
            disk.remove(path)
        disk.rename(steps[step], path)
    disk.sync_folder(folder)  # or a power cut might undo the rename of a step whose files are gone
    for path in doomed:
        disk.remove(path)
    return gone


def stray_symlinks(folder: Path) -> list[Path]:
    """Returns links under names that saving and pruning own and behind which is no step; a step may be a link to other storage."""
    steps = set(list_steps(folder).values())
    owned = [path for path in sorted(folder.iterdir()) if _is_leftover(path) or STEP_FOLDER_NAME.fullmatch(path.name)]
    return [path for path in owned if path.is_symlink() and (path not in steps or _is_leftover(path))]


# Reading


def read_manifest_head(source: Path) -> Manifest:
    """Reads manifest.json, without the tables that it names."""
    path = source / MANIFEST_FILE
    with reading_untrusted(path, damaged_error):
        try:
            manifest = manifest_from_json(read_limited_bytes(path, MAX_MANIFEST_BYTES))
        except UnknownVersionError as error:
            fix = "Use the version of Petatron that saved it, or a newer one."
            raise CheckpointError(f"{path}: {error}. {fix}") from error
        except ValueError as error:
            raise damaged_error(path, f"is damaged: {error}") from error
    strange = [table.path for table in manifest.tables if not _is_step_file(table.path)]
    if strange:
        raise damaged_error(path, f"names the file {min(strange)!r}, which is not one of the checkpoint's files")
    _check_file_names(path, RankTable(manifest.files, tuple(manifest.tensors.items()), manifest.local))
    return manifest


def read_table(source: Path, table: TableFile) -> RankTable:
    """Reads one of the tables that a manifest names, and checks its digest."""
    path = source / table.path
    check_size(path, StoredFile(table.size_bytes, ()))
    with reading_untrusted(path, damaged_error):
        content = read_limited_bytes(path, MAX_MANIFEST_BYTES)
        if table_digest(content) != table.digest:
            raise digest_mismatch_error(path)
        try:
            parsed = table_from_json(content)
        except ValueError as error:
            raise damaged_error(path, f"is damaged: {error}") from error
    _check_file_names(path, parsed)
    return parsed


def _check_file_names(path: Path, table: RankTable) -> None:
    """Checks that a table names only its own files, all inside the step."""
    named = {box.file for _, tensor in table.entries for box in tensor.boxes} | set(table.local.values())
    strange = (named - table.files.keys()) | {name for name in table.files if not _is_step_file(name)}
    if strange:
        raise damaged_error(path, f"names the file {min(strange)!r}, which is not one of the checkpoint's files")


def complete_manifest(source: Path, manifest_head: Manifest, tables: Sequence[RankTable]) -> Manifest:
    """Adds the content of its tables to a manifest. The table files count as files of the checkpoint."""
    if not manifest_head.tables:
        return manifest_head
    try:
        tensors = merge_tables(tables)
    except ValueError as error:
        raise damaged_error(source / MANIFEST_FILE, f"names tables that do not fit each other: {error}") from error
    names = [name for table in tables for name in table.files]
    if len(names) != len(set(names)):
        raise damaged_error(source / MANIFEST_FILE, "names tables of which two describe the same file")
    return replace(
        manifest_head,
        tensors=tensors,
        local={name: file for table in tables for name, file in table.local.items()},
        files={
            **{name: stored for table in tables for name, stored in table.files.items()},
            **{table.path: digest_file(source / table.path) for table in manifest_head.tables},
        },
    )


def read_manifest(source: Path) -> Manifest:
    """Reads the manifest and all its tables."""
    head = read_manifest_head(source)
    return complete_manifest(source, head, [read_table(source, table) for table in head.tables])


def read_manifest_head_to_load(source: Path) -> Manifest:
    """Reads the manifest, without its tables, of a step to load, and checks that it is of this step."""
    head = read_manifest_head(source)
    match = STEP_FOLDER_NAME.fullmatch(source.name)
    if match and int(match.group(1)) != head.step:
        raise damaged_error(source / MANIFEST_FILE, f"is that of step {head.step}: the folder was renamed")
    return head


def check_sizes(source: Path, files: Mapping[str, StoredFile]) -> None:
    """Raises if one of these files is missing or has another size, whether it will be read or not."""
    for name, stored in files.items():
        check_size(source / name, stored)


def _is_step_file(name: str) -> bool:
    """Whether a file name of a manifest stays in its step: `model/x` or `state/x`."""
    folder, _, file = name.partition("/")
    legal = file not in ("", ".", "..") and "/" not in file and "\0" not in file
    short = len(file.encode(errors="surrogatepass")) <= _MAX_FILE_NAME_BYTES
    return folder in (MODEL_FOLDER, STATE_FOLDER) and legal and short


def check_size(path: Path, expected: StoredFile) -> None:
    """Raises if a file is missing or has another size than was saved."""
    if (problem := size_problem(path, expected)) is not None:
        raise damaged_error(path, problem)


def size_problem(path: Path, expected: StoredFile) -> str | None:
    """Returns, as a predicate of the file, why it is not one of the size that was saved."""
    if (reason := not_a_file_reason(path)) is not None:
        return reason
    size = path.stat().st_size
    return None if size == expected.size_bytes else f"has {size} bytes where {expected.size_bytes} were saved"


def check_content(path: Path, expected: StoredFile) -> None:
    """Raises if a file is not exactly what was saved."""
    check_size(path, expected)
    kind: DigestKind = digest_kind(expected.block_digests[0]) if expected.block_digests else "folded"
    if digest_file(path, kind=kind).block_digests != expected.block_digests:
        raise digest_mismatch_error(path)


def digest_mismatch_error(path: Path) -> DamagedCheckpointError:
    return damaged_error(path, "does not have the content that was saved (its digest differs)")


def check_aux_files(source: Path, manifest: Manifest) -> None:
    """Raises if a non-weight file of the model folder (the first table lists them) is damaged; weights are checked when read."""
    files = manifest.files
    if not files and manifest.tables:
        files = read_table(source, manifest.tables[0]).files
    for name, stored in files.items():
        if name.startswith(f"{MODEL_FOLDER}/") and not name.endswith(".safetensors"):
            check_content(source / name, stored)


def extra_files(source: Path, manifest: Manifest) -> list[Path]:
    """Returns files, links and folders in a step that its manifest does not list; of a folder, only itself."""
    known = _listed_paths(source, manifest)
    return [path for path in _step_contents(source) if path not in known]


def symlinks_in_step(source: Path, manifest: Manifest) -> dict[Path, Path]:
    """Returns parts of a step that are links, with their targets; writing there changes the checkpoint.

    The step itself counts when it has the name of a step: a run's folder contains its steps, and other links to one are fine.
    """
    known = _listed_paths(source, manifest)
    parts = [path for path in _step_contents(source) if path in known]
    parts += [source] if STEP_FOLDER_NAME.fullmatch(source.name) else []
    return {path: target for path in parts if (target := symlink_target(path, source)) is not None}


def _listed_paths(source: Path, manifest: Manifest) -> set[Path]:
    return {source / name for name in (*manifest.files, MANIFEST_FILE, SIGNATURE_FILE, MODEL_FOLDER, STATE_FOLDER)}


def _step_contents(source: Path) -> list[Path]:
    """Lists a step, and its two folders where they are no links."""
    inner = [source / part for part in (MODEL_FOLDER, STATE_FOLDER) if not (source / part).is_symlink()]
    return sorted(path for folder in (source, *inner) if folder.is_dir() for path in folder.iterdir())
