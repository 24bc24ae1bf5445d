"""Finds and verifies checkpoints without a run.

Verification goes from the outside in, and each stage trusts only what the stage before it verified: the manifest against its own digest,
the ranks' tables against the manifest, every file against size and digests, file headers against the tables, and config.json against
the run's configuration. One pass finds all problems.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from petatron.base.errors import CheckpointError, PetatronError
from petatron.base.safe_files import symlink_target
from petatron.base.untrusted_files import open_regular_file, read_limited_bytes, reading_untrusted
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.block_digest import is_sha256, matches_digest
from petatron.checkpoint.files.digested_file_io import BLOCK_BYTES, StoredFile, read_into
from petatron.checkpoint.files.manifest import MAX_MANIFEST_BYTES, Manifest, StoredBox
from petatron.checkpoint.files.map_box_to_entry import addressed_shape, entry_box
from petatron.checkpoint.files.safetensors_file import TensorInfo, read_header
from petatron.checkpoint.files.signature import SIGNATURE_FILE, read_signature, signature_problem
from petatron.checkpoint.files.step_list import check_steps_not_lost, read_latest, warn_of_unusable_latest
from petatron.checkpoint.huggingface.folder_as_checkpoint import HuggingFaceFolder
from petatron.checkpoint.inspect.run_metadata_check import run_metadata_problems
from petatron.checkpoint.inspect.summarize_checkpoint import run_metadata
from petatron.config.schema.model_identity import identity_differences
from petatron.sharding.boxes import tiling_problem

ProgressCallback = Callable[[int, int], None]
"""Called with the work done and the total."""

_CONFIG_FILE = f"{step_folder.MODEL_FOLDER}/config.json"
_MAX_SHOWN = 3
_THREADS = 4


def find_checkpoint(path: Path, step: int | None = None, *, warn: bool = True) -> Path:
    """Returns the folder of one checkpoint: `path` itself, or a step (None: the newest) of those in it.

    warn: whether to log that the file `latest` does not say which step is the newest.
    """
    if (path / step_folder.MANIFEST_FILE).is_file() or (path.is_dir() and path.name.startswith("step-")):
        if step is not None:
            raise CheckpointError(f"{path} is one checkpoint. Leave out --step, or give {path.parent}.")
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder. Give one that --save wrote to, or a step-N in it.")
    steps = step_folder.list_steps(path)
    wanted = step_folder.latest_step(path) if step is None else step
    if wanted in steps:
        if step is None and warn:
            warn_of_unusable_latest(path)
        return steps[wanted]
    if wanted is not None:
        have = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{path} has no complete checkpoint of step {wanted}; it has: {have}.")
    if (path.parent / step_folder.MANIFEST_FILE).is_file():
        raise CheckpointError(f"{path} is a part of a checkpoint. Give {path.parent}.")
    if (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a Hugging Face model without a manifest: nothing says what it should hold. `petatron checkpoint "
            "convert` makes a checkpoint of it."
        )
    check_steps_not_lost(path)
    left = ", ".join(folder.name for folder in steps_without_manifest(path))
    more = f" ({left}: incomplete)" if left else ""
    raise CheckpointError(f"{path} holds no checkpoint{more}. Give a folder that --save wrote to, or a step-N in it.")


def steps_without_manifest(folder: Path) -> list[Path]:
    """Returns step folders that lost their manifest; a save never leaves such a folder."""
    complete = set(step_folder.list_steps(folder).values())
    return [path for path in sorted(folder.glob("step-*")) if not path.suffix and path not in complete]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with a file of a checkpoint, and what to do about it."""

    file: Path
    text: str


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The findings of one checkpoint; a checkpoint without findings is valid."""

    source: Path
    num_files: int
    num_bytes: int
    findings: tuple[Finding, ...]

    @property
    def is_valid(self) -> bool:
        return not self.findings


def verify_checkpoint(
    source: Path,
    on_progress: ProgressCallback = lambda done, total: None,
    *,
    read_content: bool = True,
    trusted_keys: Sequence[bytes] | None = None,
) -> VerificationReport:
    """Checks everything about a checkpoint; without `read_content`, only what needs no reading of whole files.

    trusted_keys: public keys; one of them must have signed the checkpoint.
    """
    tables, findings = [], []
    try:
        head = step_folder.read_manifest_head(source)
        for table in head.tables:
            try:
                tables.append(step_folder.read_table(source, table))
            except CheckpointError as error:
                findings.append(Finding(source / table.path, str(error)))
        if findings:  # without all tables, every tensor would seem incomplete
            return VerificationReport(source, 0, 0, tuple(findings))
        manifest = step_folder.complete_manifest(source, head, tables)
    except CheckpointError as error:
        return VerificationReport(source, 0, 0, (Finding(source / step_folder.MANIFEST_FILE, str(error)),))
    total, done = sum(file.size_bytes for file in manifest.files.values()), 0
    for name, expected in manifest.files.items():
        report = partial(lambda before, read: on_progress(before + read, total), done)
        problem = file_problem(source / name, expected, report, read_content=read_content)
        done += expected.size_bytes
        if problem is not None:
            findings.append(_damage_finding(source / name, problem))
    broken = {finding.file for finding in findings}
    for path, target in step_folder.symlinks_in_step(source, manifest).items():
        text = f"{path} is a symbolic link to {target}, where it can change unseen. Put a copy in its place."
        findings.append(Finding(path, text))
    for path in step_folder.extra_files(source, manifest):
        what = f" is a symbolic link to {path.readlink()}, and" if path.is_symlink() else ""
        text = f"{path}{what} is not part of the checkpoint: the manifest does not name it. Move it elsewhere."
        findings.append(Finding(path, text))
    if source.name.startswith("step-") and not source.name.startswith(step_folder.step_name(manifest.step)):
        findings.append(_damage_finding(source / step_folder.MANIFEST_FILE, f"is that of step {manifest.step}"))
    findings += [
        _damage_finding(source / step_folder.MANIFEST_FILE, problem)
        for problem in run_metadata_problems(run_metadata(manifest), step=manifest.step)
    ]
    findings += _table_findings(source, manifest, broken)
    findings += _signature_findings(source, manifest, trusted_keys)
    if _CONFIG_FILE in manifest.files and source / _CONFIG_FILE not in broken:
        findings += _config_findings(source / _CONFIG_FILE, run_metadata(manifest))
    return VerificationReport(source, len(manifest.files), total, tuple(findings))


def _signature_findings(source: Path, manifest: Manifest, trusted_keys: Sequence[bytes] | None) -> Iterator[Finding]:
    """Checks the format of a signature; with trusted keys, also that one of them signed."""
    if trusted_keys is None:
        try:
            read_signature(source)
        except CheckpointError as error:
            yield Finding(source / SIGNATURE_FILE, str(error))
        return
    path = source / step_folder.MANIFEST_FILE
    with reading_untrusted(path, step_folder.damaged_error):
        content = read_limited_bytes(path, MAX_MANIFEST_BYTES)
    problem = signature_problem(source, content, trusted_keys)
    if problem is not None:
        yield Finding(source / SIGNATURE_FILE, problem)
        return
    tables = {table.path for table in manifest.tables}  # the manifest has SHA-256 digests of the tables
    weak = [
        name
        for name, file in manifest.files.items()
        if name not in tables and not all(map(is_sha256, file.block_digests))
    ]
    if weak:
        text = f"{source} has digests that a signature is not worth much for ({weak[0]} ...): it was saved without --sign-key."
        yield Finding(source / step_folder.MANIFEST_FILE, f"{text} Save it again with a key.")


def latest_findings(folder: Path, reported: Sequence[Path] = ()) -> tuple[Finding, ...]:
    """Checks the file `latest` of a folder of steps, if there is one; `reported` are steps whose problems are known."""
    path = folder / step_folder.LATEST_FILE
    target, (named, problem) = symlink_target(path, folder), read_latest(folder)
    if named is not None and step_folder.step_name(named) in [step.name for step in reported]:
        problem = None
    if target is not None:
        problem = f"is a symbolic link to {target}, where it can change unseen"
    newest = max(step_folder.list_steps(folder), default=None)
    fix = (
        ""
        if newest is None
        else f", or write the name of a step into a new file, such as {step_folder.step_name(newest)}"
    )
    return () if problem is None else (Finding(path, f"{path} {problem}. Restore it from a copy{fix}."),)


def newest_valid(
    folder: Path, known_valid: Mapping[Path, bool], on_progress: ProgressCallback = lambda done, total: None
) -> Path | None:
    """Returns the newest valid step of a folder; `known_valid` has the results of steps that are verified already."""
    for source in reversed(step_folder.list_steps(folder).values()):
        if known_valid[source] if source in known_valid else verify_checkpoint(source, on_progress).is_valid:
            return source
    return None


def _damage_finding(path: Path, why: str) -> Finding:
    return Finding(path, str(step_folder.damaged_error(path, why)))


def file_problem(
    path: Path,
    expected: StoredFile,
    on_progress: Callable[[int], None] = lambda done: None,
    *,
    read_content: bool = True,
) -> str | None:
    """Returns how a file differs from what was saved, as a predicate; None if it does not."""
    problem = step_folder.size_problem(path, expected)
    if problem is not None or not read_content:
        return problem
    try:
        differing = [number for number, same in _verify_blocks(path, expected, on_progress) if not same]
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if not differing:
        return None
    begin = differing[0] * BLOCK_BYTES
    end = min(begin + BLOCK_BYTES, expected.size_bytes)
    where = f"its digest differs in bytes {begin} to {end}"
    more = f" and {len(differing) - 1} more blocks of {len(expected.block_digests)}" if len(differing) > 1 else ""
    return f"does not have the content that was saved ({where}{more})"


def _verify_blocks(path: Path, expected: StoredFile, on_progress: Callable[[int], None]) -> Iterator[tuple[int, bool]]:
    """Yields the number of every block, and whether its digest matches."""

    def check(number: int) -> bool:
        begin = number * BLOCK_BYTES
        memory = buffers.get()
        buffer = memory[: min(BLOCK_BYTES, expected.size_bytes - begin)]
        count = read_into(file.fileno(), [buffer], begin)
        same = count == len(buffer) and matches_digest([buffer], expected.block_digests[number])
        buffers.put(memory)
        return same

    count = -(-expected.size_bytes // BLOCK_BYTES)
    if count != len(expected.block_digests):  # a forged manifest may have fewer digests than blocks
        yield from ((number, False) for number in range(count))
        return
    threads = min(_THREADS, os.cpu_count() or 1, max(count, 1))
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(threads):
        buffers.put(memoryview(bytearray(min(BLOCK_BYTES, expected.size_bytes))))
    with open_regular_file(path, buffering=0) as file, ThreadPoolExecutor(threads) as pool:
        for number, same in enumerate(pool.map(check, range(count))):
            on_progress(min((number + 1) * BLOCK_BYTES, expected.size_bytes))
            yield number, same


def _table_findings(source: Path, manifest: Manifest, broken: set[Path]) -> Iterator[Finding]:
    """Checks that the tables cover every tensor, and agree with the headers of the valid files."""
    problems: dict[Path, list[str]] = {}
    headers: dict[str, Mapping[str, TensorInfo]] = {}
    for name in manifest.files:
        if name.endswith(".safetensors") and source / name not in broken:
            try:
                headers[name] = read_header(source / name, aligned=True)
            except (OSError, ValueError, MemoryError) as error:
                problems.setdefault(source / name, []).append(f"cannot be understood: {error}")
    for key, tensor in manifest.tensors.items():
        gap = tiling_problem(tensor.shape, [stored.box for stored in tensor.boxes])
        if gap is not None:
            problems.setdefault(source / step_folder.MANIFEST_FILE, []).append(f"does not describe all of {key}: {gap}")
        for stored in tensor.boxes:
            if stored.file in headers:
                problem = _entry_problem(stored, tensor.dtype, headers[stored.file].get(stored.entry_name))
                if problem is not None:
                    problems.setdefault(source / stored.file, []).append(problem)
    for name, file in manifest.local.items():
        if file in headers and name not in headers[file]:
            problems.setdefault(source / file, []).append(f"lacks {name}")
    for path, texts in problems.items():
        more = f" (and {len(texts) - _MAX_SHOWN} more of that kind)" if len(texts) > _MAX_SHOWN else ""
        yield _damage_finding(path, "; ".join(texts[:_MAX_SHOWN]) + more)


def _entry_problem(stored: StoredBox, dtype: str, info: TensorInfo | None) -> str | None:
    if info is None:
        return f"lacks {stored.entry_name}"
    if info.dtype != dtype:
        return f"has {stored.entry_name} in {info.dtype} where {dtype} was saved"
    box = entry_box(stored.box, stored.box.start, stored)
    entry_shape = addressed_shape(info.shape, stored)
    if len(box.shape) != len(entry_shape) or any(end > size for end, size in zip(box.stop, entry_shape)):
        return f"has {stored.entry_name} in another shape, {list(info.shape)}"
    return None


def _config_findings(path: Path, metadata: Mapping[str, Any]) -> Iterator[Finding]:
    """Checks that config.json describes the model that the run trained."""
    try:
        model, moe = HuggingFaceFolder(path.parent).settings()
        values, saved = model | moe, metadata.get("model") or {}
        with reading_untrusted(path, step_folder.damaged_error):
            differing = [
                f"{name} is {values[name]} there and {saved[name]} in the manifest"
                for name in identity_differences(values, saved)
            ]
    except PetatronError as error:
        yield _damage_finding(path, f"cannot be understood: {' '.join(str(error).split())}")
        return
    if differing:
        yield _damage_finding(path, f"is of another model: {'; '.join(differing)}")
