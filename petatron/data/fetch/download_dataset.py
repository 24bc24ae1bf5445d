"""Downloads the files of a public dataset and converts each into a shard of JSON lines for `petatron data preprocess`.

A shard has its name only when it is complete: an interrupted fetch loses at most one shard's work, and the hub library resumes the
download itself. Limits count per split; a file that they leave untouched is not downloaded.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.format_text import count_with_noun
from petatron.base.safe_files import make_folder, open_atomic
from petatron.data.fetch.plan_download import FetchPlan, ShardRecord, SourceRecord, shard_name
from petatron.data.fetch.text_rows import RowCounts, documents_of, read_rows

_DOCUMENTS_PER_REPORT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """Where a fetch is: `rows` is None while the file is downloaded, `reused` if its shard was there already."""

    split: str
    number: int
    of: int
    file: str
    file_bytes: int | None
    rows: int | None = None
    documents: int = 0
    bytes: int = 0
    done: bool = False
    reused: bool = False


def run_fetch(plan: FetchPlan, on_progress: Callable[[FetchProgress], None] = lambda now: None) -> SourceRecord:
    """Downloads and converts; returns what SOURCE.json has at the end."""
    record = plan.record
    with _writing(plan.folder):
        make_folder(plan.folder)
        record.write(plan.folder)
    for split, names in plan.files.items():
        had = {shard.source: shard for shard in record.shards[split]}
        shards: list[ShardRecord] = []
        for number, name in enumerate(names):
            if min(_room(record, shards)) < 1:
                break
            size = plan.sizes.get(name)
            now = FetchProgress(
                split=split, number=number, of=len(names), file=name, file_bytes=size, reused=name in had
            )
            shard = had.pop(name, None) or _make_shard(plan, now, shards, on_progress)
            shards.append(shard)
            record = replace(record, shards={**record.shards, split: (*shards, *had.values())})
            with _writing(plan.folder):
                record.write(plan.folder)
            on_progress(replace(now, rows=shard.rows, documents=shard.documents, bytes=shard.bytes, done=True))
            if not shard.complete:
                break
        if not any(shard.documents for shard in shards):
            raise DataError(
                f"{plan.dataset.repository} gave no document for {split}: {describe_skipped(shards) or '0 rows'}. Check --text-key, "
                "--files and the limits."
            )
    return record


def describe_skipped(shards: Sequence[ShardRecord]) -> str | None:
    """Says how many rows were skipped and why; None if none were."""
    kinds = ("not_text", "empty", "too_long")
    reasons = {kind.replace("_", " "): sum(getattr(shard, kind) for shard in shards) for kind in kinds}
    said = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
    return f"{count_with_noun(sum(reasons.values()), 'row')} skipped: {', '.join(said)}" if said else None


def _room(record: SourceRecord, shards: Iterable[ShardRecord]) -> tuple[float, float]:
    """How many more documents and bytes the limits of a split allow."""
    used = [(shard.documents, shard.bytes) for shard in shards]
    limits = (record.max_documents or math.inf, record.max_bytes or math.inf)
    return limits[0] - sum(count for count, _ in used), limits[1] - sum(size for _, size in used)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"The disk of {folder} is full. Free space, give another --output or a limit (--max-bytes); fetching again keeps "
                "the shards that are complete."
            ) from error
        raise DataError(f"{folder} cannot be written: {error.strerror or error}. Give another --output.") from error


def _make_shard(
    plan: FetchPlan, now: FetchProgress, before: Sequence[ShardRecord], on_progress: Callable[[FetchProgress], None]
) -> ShardRecord:
    """Downloads one file and writes its documents, up to the limits of the split."""
    path = plan.folder / shard_name(now.split, now.number)
    counts = RowCounts()
    documents = size = 0
    complete = True
    max_documents, max_size = _room(plan.record, before)
    on_progress(now)
    plan.hub.local_path(plan.dataset, now.file)
    with _writing(plan.folder), ExitStack() as stack:
        for tmp_file in plan.folder.glob(f".{path.name}.*.tmp"):  # of a fetch that was killed
            tmp_file.unlink(missing_ok=True)
        lines = stack.enter_context(closing(_lines(plan, now, counts, stack)))
        file = stack.enter_context(open_atomic(path))
        for line in lines:
            if documents + 1 > max_documents or size + len(line) > max_size:
                complete = False
                break
            file.write(line)
            documents, size = documents + 1, size + len(line)
            if documents % _DOCUMENTS_PER_REPORT == 0:
                on_progress(replace(now, rows=counts.rows, documents=documents, bytes=size))
    return ShardRecord(
        file=path.name,
        source=now.file,
        source_bytes=now.file_bytes,
        documents=documents,
        bytes=size,
        complete=complete,
        **asdict(counts),
    )


def _lines(plan: FetchPlan, now: FetchProgress, counts: RowCounts, stack: ExitStack) -> Generator[bytes]:
    """The documents of a file as JSON lines; those that cannot be encoded or that preprocessing would refuse are counted."""
    texts = documents_of(
        stack.enter_context(closing(_rows(plan, [now.file]))),
        counts,
        join=plan.record.join,
        following=stack.enter_context(closing(_rows(plan, plan.files[now.split][now.number + 1 :]))),
        continues=now.number > 0,
        max_bytes=plan.max_line_bytes,
    )
    encode = json.JSONEncoder(ensure_ascii=False).encode
    for text in texts:
        try:
            line = f'{{"text": {encode(text)}}}\n'.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            counts.not_text += 1
            continue
        if len(line) > plan.max_line_bytes:
            counts.too_long += 1
        else:
            yield line


def _rows(plan: FetchPlan, names: Iterable[str]) -> Generator[object]:
    for name in names:
        path = plan.hub.local_path(plan.dataset, name)
        yield from read_rows(path, name, plan.record.text_key, max_line_bytes=plan.max_line_bytes)
