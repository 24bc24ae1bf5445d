"""SOURCE.json: where the shards of a folder come from, under which license, and which of them are complete.

It is written before the first download and after every shard, so that an interrupted fetch goes on with the same revision and makes no
complete shard again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.safe_files import write_atomic
from petatron.base.untrusted_files import is_count, read_limited_json, reading_untrusted

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
