"""Looking at checkpoints without a run: where they are, what they hold, and whether they still are what was saved.

A check goes from the outside in, and each stage trusts only what the one before it found good: the manifest against its own
digest, the ranks' tables against the manifest, every file against size and digests, the files' headers against the tables, and
config.json against the configuration the run had. Everything that is wrong is found in one pass.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from petatron.base.errors import CheckpointError, PetatronError
from petatron.base.untrusted_files import open_file, reading
from petatron.checkpoint.convert.hf_folder import read_model_settings
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.block_digest import is_strong, same_content
from petatron.checkpoint.files.disk import BLOCK_BYTES, StoredFile, read_fully
from petatron.checkpoint.files.entry_layout import entry_box
from petatron.checkpoint.files.manifest import Manifest, StoredBox
from petatron.checkpoint.files.safetensors_file import DTYPES, Slot, read_header
from petatron.checkpoint.files.signature import SIGNATURE, signature_problem
from petatron.config.schema.model_identity import SPELLINGS
from petatron.sharding.boxes import tiling_problem

Note = Callable[[int, int], None]
"""Told how much of how much work is done."""

_CONFIG = f"{step_folder.MODEL}/config.json"
_SHOWN = 3
_THREADS = 4


# Where


def locate(path: Path, step: int | None = None) -> Path:
    """The folder of one checkpoint: `path` itself, or a step (None: the newest) of those in it."""
    if _is_step(path):
        if step is not None:
            raise CheckpointError(f"{path} is one checkpoint. Leave out --step, or give {path.parent}.")
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder. Give one that --save wrote to, or a step-N in it.")
    found = step_folder.steps(path)
    wanted = step_folder.latest_step(path) if step is None else step
    if wanted in found:
        return found[wanted]
    if wanted is not None:
        have = ", ".join(map(str, found)) or "none"
        raise CheckpointError(f"{path} has no complete checkpoint of step {wanted}; it has: {have}.")
    if (path.parent / step_folder.MANIFEST).is_file():
        raise CheckpointError(f"{path} is a part of a checkpoint. Give {path.parent}.")
    if (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a Hugging Face model without a manifest: nothing says what it should hold. `petatron checkpoint "
            "convert` makes a checkpoint of it."
        )
    left = ", ".join(folder.name for folder in unfinished(path))
    more = f" ({left}: incomplete)" if left else ""
    raise CheckpointError(f"{path} holds no checkpoint{more}. Give a folder that --save wrote to, or a step-N in it.")


def _is_step(path: Path) -> bool:
    return (path / step_folder.MANIFEST).is_file() or (path.is_dir() and path.name.startswith("step-"))


def unfinished(folder: Path) -> list[Path]:
    """Steps under their final name that have no manifest. A save never leaves one: its manifest has been lost."""
    complete = set(step_folder.steps(folder).values())
    return [path for path in sorted(folder.glob("step-*")) if not path.suffix and path not in complete]


# What


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A logical tensor; `key` is kind/name."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int

    @property
    def kind(self) -> str:
        return self.key.split("/", 1)[0]


@dataclass(frozen=True, slots=True)
class Summary:
    """A checkpoint without its tensors' values. `run` are the facts of the training run, if one saved it.

    file_time_s: when its manifest was last written, which a copy may have made later than the save.
    """

    source: Path
    step: int
    file_time_s: float
    layout: str
    run: Mapping[str, Any]
    tensors: tuple[TensorFacts, ...]
    files: Mapping[str, int]

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's configuration by section; empty when no training run saved it."""
        return run_config(self.run)

    @property
    def progress(self) -> Mapping[str, float]:
        """The numbers that say how far the run was."""
        found = self.run.get("progress")
        return {k: v for k, v in found.items() if isinstance(v, int | float)} if isinstance(found, dict) else {}

    def bytes_in(self, part: str) -> int:
        """Size of the model folder or of the state folder."""
        return sum(size for name, size in self.files.items() if name.startswith(f"{part}/"))


def summarize(source: Path) -> Summary:
    """What a manifest and its tables say; no other file is opened."""
    manifest = step_folder.read_manifest(source)
    return Summary(
        source=source,
        step=manifest.step,
        file_time_s=(source / step_folder.MANIFEST).stat().st_mtime,
        layout=manifest.layout,
        run=run_facts(manifest),
        tensors=tuple(
            TensorFacts(key, tensor.shape, tensor.dtype, math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize)
            for key, tensor in sorted(manifest.tensors.items())
        ),
        files={name: file.size_bytes for name, file in sorted(manifest.files.items())},
    )


def run_facts(manifest: Manifest) -> Mapping[str, Any]:
    """What the training loop recorded: progress, config, data, schedule."""
    facts = manifest.facts.get("facts")
    return facts if isinstance(facts, dict) else {}


def run_config(run: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The configuration among the facts of a run; other programs may have put anything there."""
    found = run.get("config")
    if not isinstance(found, dict):
        return {}
    return {section: values for section, values in found.items() if isinstance(values, dict)}


# Whether


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a file of a checkpoint, and what to do about it."""

    file: Path
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a check of one checkpoint found; it is sound when there is nothing."""

    source: Path
    num_files: int
    num_bytes: int
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        return not self.findings


def examine(
    source: Path,
    note: Note = lambda done, total: None,
    *,
    content: bool = True,
    trusted: Sequence[bytes] | None = None,
) -> Report:
    """Check everything about a checkpoint; without `content`, all that can be known without reading the files through.

    trusted: public keys, of which one must have signed it.
    """
    tables, findings = [], []
    try:
        head = step_folder.read_head(source)
        for table in head.tables:
            try:
                tables.append(step_folder.read_table(source, table))
            except CheckpointError as error:
                findings.append(Finding(source / table.path, str(error)))
        if findings:  # of what the others describe, nothing would seem complete
            return Report(source, 0, 0, tuple(findings))
        manifest = step_folder.complete(source, head, tables)
    except CheckpointError as error:
        return Report(source, 0, 0, (Finding(source / step_folder.MANIFEST, str(error)),))
    total, done = sum(file.size_bytes for file in manifest.files.values()), 0
    for name, expected in manifest.files.items():
        problem = _file_problem(source / name, expected, partial(_further, note, done, total), content=content)
        done += expected.size_bytes
        if problem is not None:
            findings.append(_damaged(source / name, problem))
    broken = {finding.file for finding in findings}
    for path, target in step_folder.linked_parts(source, manifest).items():
        text = f"{path} is a symbolic link to {target}, where it can change unseen. Put a copy in its place."
        findings.append(Finding(path, text))
    for path in step_folder.extra_files(source, manifest):
        what = f" is a symbolic link to {path.readlink()}, and" if path.is_symlink() else ""
        text = f"{path}{what} is not part of the checkpoint: the manifest does not name it. Move it elsewhere."
        findings.append(Finding(path, text))
    if source.name.startswith("step-") and not source.name.startswith(step_folder.step_name(manifest.step)):
        findings.append(_damaged(source / step_folder.MANIFEST, f"is that of step {manifest.step}"))
    findings += _table_findings(source, manifest, broken)
    if trusted is not None:
        findings += _signature_findings(source, manifest, trusted)
    if _CONFIG in manifest.files and source / _CONFIG not in broken:
        findings += _config_findings(source / _CONFIG, run_facts(manifest))
    return Report(source, len(manifest.files), total, tuple(findings))


def _signature_findings(source: Path, manifest: Manifest, trusted: Sequence[bytes]) -> Iterator[Finding]:
    problem = signature_problem(source, (source / step_folder.MANIFEST).read_bytes(), trusted)
    if problem is not None:
        yield Finding(source / SIGNATURE, problem)
        return
    tables = {table.path for table in manifest.tables}  # of these the manifest itself has strong digests
    weak = [
        name for name, file in manifest.files.items() if name not in tables and not all(map(is_strong, file.blocks))
    ]
    if weak:
        text = f"{source} has digests that a signature is not worth much for ({weak[0]} ...): it was saved without --sign-key."
        yield Finding(source / step_folder.MANIFEST, f"{text} Save it again with a key.")


def newest_sound(folder: Path, known: Mapping[Path, bool], note: Note = lambda done, total: None) -> Path | None:
    """The newest step of a folder that is sound; those in `known` have been examined."""
    for source in reversed(step_folder.steps(folder).values()):
        if known[source] if source in known else examine(source, note).sound:
            return source
    return None


def _further(note: Note, before: int, total: int, done: int) -> None:
    note(before + done, total)


def _damaged(path: Path, why: str) -> Finding:
    return Finding(path, str(step_folder.damage(path, why)))


def _file_problem(path: Path, expected: StoredFile, note: Callable[[int], None], *, content: bool) -> str | None:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != expected.size_bytes:
        return f"has {size} bytes where {expected.size_bytes} were saved"
    if not content:
        return None
    try:
        differing = [number for number, same in _blocks(path, expected, note) if not same]
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if not differing:
        return None
    begin = differing[0] * BLOCK_BYTES
    end = min(begin + BLOCK_BYTES, expected.size_bytes)
    where = f"its digest differs in bytes {begin} to {end}"
    more = f" and {len(differing) - 1} more blocks of {len(expected.blocks)}" if len(differing) > 1 else ""
    return f"does not have the content that was saved ({where}{more})"


def _blocks(path: Path, expected: StoredFile, note: Callable[[int], None]) -> Iterator[tuple[int, bool]]:
    """Every block of a file, and whether it is what was saved."""

    def check(number: int) -> bool:
        begin = number * BLOCK_BYTES
        whole = buffers.get()
        buffer = whole[: min(BLOCK_BYTES, expected.size_bytes - begin)]
        count = read_fully(file.fileno(), buffer, begin)
        same = count == len(buffer) and same_content([buffer], expected.blocks[number])
        buffers.put(whole)
        return same

    count = -(-expected.size_bytes // BLOCK_BYTES)
    if count != len(
        expected.blocks
    ):  # so that a manifest made by others cannot claim fewer digests than there are bytes
        yield from ((number, False) for number in range(count))
        return
    threads = min(_THREADS, os.cpu_count() or 1, max(count, 1))
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(threads):
        buffers.put(memoryview(bytearray(min(BLOCK_BYTES, expected.size_bytes))))
    with open_file(path, buffering=0) as file, ThreadPoolExecutor(threads) as pool:
        for number, same in enumerate(pool.map(check, range(count))):
            note(min((number + 1) * BLOCK_BYTES, expected.size_bytes))
            yield number, same


def _table_findings(source: Path, manifest: Manifest, broken: set[Path]) -> Iterator[Finding]:
    """The manifest's table against itself, and against the headers of the files that are good."""
    problems: dict[Path, list[str]] = {}
    headers: dict[str, Mapping[str, Slot]] = {}
    for name in manifest.files:
        if name.endswith(".safetensors") and source / name not in broken:
            try:
                headers[name] = read_header(source / name, aligned=True)
            except (OSError, ValueError, MemoryError) as error:
                problems.setdefault(source / name, []).append(f"cannot be understood: {error}")
    for key, tensor in manifest.tensors.items():
        gap = tiling_problem(tensor.shape, [stored.box for stored in tensor.boxes])
        if gap is not None:
            problems.setdefault(source / step_folder.MANIFEST, []).append(f"does not describe all of {key}: {gap}")
        for stored in tensor.boxes:
            if stored.file in headers:
                problem = _entry_problem(stored, tensor.dtype, headers[stored.file].get(stored.name))
                if problem is not None:
                    problems.setdefault(source / stored.file, []).append(problem)
    for name, file in manifest.local.items():
        if file in headers and name not in headers[file]:
            problems.setdefault(source / file, []).append(f"lacks {name}")
    for path, found in problems.items():
        more = f" (and {len(found) - _SHOWN} more of that kind)" if len(found) > _SHOWN else ""
        yield _damaged(path, "; ".join(found[:_SHOWN]) + more)


def _entry_problem(stored: StoredBox, dtype: str, slot: Slot | None) -> str | None:
    if slot is None:
        return f"lacks {stored.name}"
    if slot.dtype != dtype:
        return f"has {stored.name} in {slot.dtype} where {dtype} was saved"
    box = entry_box(stored.box, stored.box.start, stored.at, transposed=stored.transposed)
    if len(box.shape) != len(slot.shape) or any(end > size for end, size in zip(box.stop, slot.shape)):
        return f"has {stored.name} in another shape, {list(slot.shape)}"
    return None


def _config_findings(path: Path, run: Mapping[str, Any]) -> Iterator[Finding]:
    """config.json must describe the model that the run trained."""
    try:
        model, moe = read_model_settings(path.parent)
        with reading(path, step_folder.damage):
            differing = list(_config_differences(model | moe, run))
    except PetatronError as error:
        yield _damaged(path, f"cannot be understood: {' '.join(str(error).split())}")
        return
    if differing:
        yield _damaged(path, f"is of another model: {'; '.join(differing)}")


def _config_differences(values: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[str]:
    saved = run.get("model") or {}
    for name, value in sorted(json.loads(json.dumps(values)).items()):  # tuples as the lists that were saved
        if name in saved and name not in SPELLINGS and saved[name] != value:
            yield f"{name} is {value} there and {saved[name]} in the manifest"


def kinds(summary: Summary) -> dict[str, tuple[int, str, int]]:
    """Tensors, dtypes and bytes of every kind of state."""
    found: dict[str, list[TensorFacts]] = {}
    for tensor in summary.tensors:
        found.setdefault(tensor.kind, []).append(tensor)
    return {
        kind: (
            len(tensors),
            ", ".join(dtype for dtype, _ in Counter(tensor.dtype for tensor in tensors).most_common()),
            sum(tensor.num_bytes for tensor in tensors),
        )
        for kind, tensors in found.items()
    }
