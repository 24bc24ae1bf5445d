"""Plans a fetch: which files to download, and which shards of an earlier fetch to keep.

Shard K of a split is made from file K of that split. What is fetched follows from the options alone, so running a command again
changes nothing, and a folder that holds shards of other options is refused rather than mixed or emptied.

SOURCE.json says where the shards of a folder come from, under which license, and which of them are complete. It is written before the
first download and after every shard, so that an interrupted fetch goes on with the same revision and makes no complete shard again.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.safe_files import write_atomic
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import is_count, read_limited_json, reading_untrusted
from petatron.data.fetch.dataset_hub import HUB_URL, DatasetHub, HubDataset, no_file_matches, open_hub
from petatron.data.fetch.known_datasets import KNOWN_DATASETS, Join, KnownDataset
from petatron.data.fetch.text_rows import file_kind
from petatron.data.inputs.line_blocks import MAX_LINE_BYTES

RECORD_FILE = "SOURCE.json"
_FORMAT = 1
_MAX_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One JSON lines file and the dataset's file that it was made from. `complete` is false where a limit ended it."""

    file: str
    source: str
    source_bytes: int | None
    documents: int
    bytes: int
    rows: int
    not_text: int
    empty: int
    too_long: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """A whole SOURCE.json; `shards` by split. What is above them must be the same when a fetch is resumed."""

    dataset: str
    repository: str
    hub: str
    revision: str | None
    text_key: str
    join: str
    files: Mapping[str, tuple[str, ...]]
    license: str | None
    page: str
    max_documents: int | None
    max_bytes: int | None
    shards: Mapping[str, tuple[ShardRecord, ...]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        content = {"format": _FORMAT, **asdict(self)}
        write_atomic(folder / RECORD_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_record(folder: Path) -> SourceRecord | None:
    """Returns what is recorded in a folder; None if nothing is."""
    path = folder / RECORD_FILE
    if not path.exists():
        return None
    fix = "Remove it to fetch everything again, or give another --output"
    with reading_untrusted(path, lambda path, why: DataError(f"{path} {why}. {fix}.")):
        content = read_limited_json(path, _MAX_BYTES)
        if content.pop("format") != _FORMAT:
            raise ValueError("it has another format")
        content["license"] = content.pop("licence", None) or content.get("license")  # older records spell it so
        content["shards"] = {
            split: tuple(ShardRecord(**shard) for shard in shards) for split, shards in content["shards"].items()
        }
        for shard in (shard for shards in content["shards"].values() for shard in shards):
            if not all(is_count(count) for count in (shard.documents, shard.bytes, shard.rows)) or "/" in shard.file:
                raise ValueError("it has a shard that no fetch writes")
        content["files"] = {split: tuple(globs) for split, globs in content["files"].items()}
        return SourceRecord(**content)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """What to fetch, and where to. `dataset` is a name of the table, or OWNER/NAME, which needs `files`."""

    dataset: str
    output: str
    files: tuple[str, ...] = ()
    text_key: str | None = None
    join: Join | None = None
    splits: tuple[str, ...] = ()
    max_documents: int | None = None
    max_bytes: int | None = None
    hub: str | None = None
    revision: str | None = None
    max_line_bytes: int = MAX_LINE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """What will be downloaded: files with their sizes by split. `record` has what is there already."""

    hub: DatasetHub
    dataset: HubDataset
    files: dict[str, tuple[str, ...]]
    sizes: dict[str, int]
    record: SourceRecord
    folder: Path
    max_line_bytes: int


def plan_fetch(options: FetchOptions) -> FetchPlan:
    """Asks the hub about the dataset and compares with what the output folder has; downloads nothing."""
    known = _known(options)
    folder = Path(options.output)
    before = read_record(folder)
    hub = open_hub(options.hub)
    # A resumed fetch goes on with the revision that it began with, whatever the newest is by now.
    revision = options.revision or (before.revision if before and before.repository == known.repository else None)
    dataset = hub.describe(known.repository, revision)
    globs = {split: known.splits[split] for split in options.splits or known.splits}
    readable = [name for name in dataset.files if file_kind(name) is not None]
    files = {
        split: tuple(name for name in readable if any(fnmatchcase(name, glob) for glob in patterns))
        for split, patterns in globs.items()
    }
    for split, names in files.items():
        if not names:
            raise no_file_matches(dataset, globs[split], readable)
    text_files = all(file_kind(name) == "text" for names in files.values() for name in names)
    record = SourceRecord(
        dataset=options.dataset,
        repository=dataset.repository,
        hub=options.hub or HUB_URL,
        revision=dataset.revision,
        text_key=options.text_key or known.text_key,
        join=options.join or ("file" if text_files else known.join),
        files={**(before.files if before else {}), **globs},
        license=dataset.license,
        page=dataset.page,
        max_documents=options.max_documents,
        max_bytes=options.max_bytes,
    )
    sizes = hub.file_sizes(dataset, [name for names in files.values() for name in names])
    record = replace(record, shards=_shards_to_reuse(folder, record, before, files, sizes))
    return FetchPlan(
        hub=hub,
        dataset=dataset,
        files=files,
        sizes=sizes,
        record=record,
        folder=folder,
        max_line_bytes=options.max_line_bytes,
    )


def _known(options: FetchOptions) -> KnownDataset:
    """The table's entry, or one made of the flags; raises every problem of the options at once."""
    known, problems = KNOWN_DATASETS.get(options.dataset), []
    for flag, limit in (("--max-documents", options.max_documents), ("--max-bytes", options.max_bytes)):
        if limit is not None and limit < 1:
            problems.append(f"{flag} {limit} must be at least 1")
    if known is None and "/" not in options.dataset:
        close = difflib.get_close_matches(options.dataset, KNOWN_DATASETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(KNOWN_DATASETS)};"
        problems.append(
            f"{printable(options.dataset)} is not a known dataset: {hint} any other is OWNER/NAME --files GLOB"
        )
    elif known is None:
        known = KnownDataset(options.dataset, {"train": options.files})
    elif options.files:
        problems.append(f"--files is for OWNER/NAME: fetch {known.repository} --files ... instead of {options.dataset}")
    missing = [split for split in options.splits if known is not None and split not in known.splits]
    if missing and known is not None:
        problems.append(f"--splits {' '.join(missing)}: {options.dataset} has {', '.join(known.splits)}")
    if problems or known is None:
        raise DataError(f"Cannot fetch: {'; '.join(problems)}.")
    return known


def _shards_to_reuse(
    folder: Path,
    record: SourceRecord,
    before: SourceRecord | None,
    files: dict[str, tuple[str, ...]],
    sizes: dict[str, int],
) -> dict[str, tuple[ShardRecord, ...]]:
    """Returns the shards of an earlier fetch that this one would make again; raises if the folder is of another."""
    if before is None:
        strangers = [name for split in files if (folder / (name := shard_name(split, 0))).exists()]
        if strangers:
            raise DataError(f"{folder} has {', '.join(strangers)}, which no fetch wrote. Give another --output.")
        return dict.fromkeys(files, ())
    for name in ("repository", "revision", "text_key", "join"):
        recorded, asked = getattr(before, name), getattr(record, name)
        if recorded != asked:
            raise _other_fetch(folder, f"its {name} is {recorded!r}, not {asked!r}")
    same_limits = (before.max_documents, before.max_bytes) == (record.max_documents, record.max_bytes)
    kept = dict(before.shards)
    for split, names in files.items():
        if before.files.get(split, record.files[split]) != record.files[split]:
            raise _other_fetch(folder, f"its {split} is made from {' '.join(before.files[split])}")
        there = [shard for shard in before.shards.get(split, ()) if _is_there(folder, shard)]
        expected = {name: shard_name(split, number) for number, name in enumerate(names)}
        if gone := [shard.file for shard in there if expected.get(shard.source) != shard.file]:
            raise _other_fetch(
                folder, f"{', '.join(gone)} is made from a file that the dataset does not have there now"
            )
        _check_within_limits(folder, record, split, there)
        kept[split] = tuple(
            shard
            for shard in there
            if (shard.complete or same_limits) and shard.source_bytes == sizes.get(shard.source)
        )
    return kept


def _other_fetch(folder: Path, why: str) -> DataError:
    return DataError(f"{folder / RECORD_FILE} is of another fetch: {why}. Give another --output, or remove the folder.")


def _is_there(folder: Path, shard: ShardRecord) -> bool:
    path = folder / shard.file
    return path.is_file() and not path.is_symlink() and path.stat().st_size == shard.bytes


def _check_within_limits(folder: Path, record: SourceRecord, split: str, shards: Sequence[ShardRecord]) -> None:
    for flag, limit, count in (
        ("--max-documents", record.max_documents, sum(shard.documents for shard in shards)),
        ("--max-bytes", record.max_bytes, sum(shard.bytes for shard in shards)),
    ):
        if limit is not None and count > limit:
            raise DataError(
                f"{folder} has {count:,} {flag.removeprefix('--max-')} of {split} already, more than {flag} {limit:,}. Give another "
                "--output, or a larger limit."
            )


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.jsonl"
