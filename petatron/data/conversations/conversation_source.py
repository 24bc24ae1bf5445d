"""A source of conversations: its files, encoded once and cached, and what of them could not be encoded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.format_text import count_with_noun
from petatron.base.log import get_logger
from petatron.base.safe_files import write_atomic
from petatron.data.conversations.conversation_files import content_digest, conversation_files
from petatron.data.conversations.conversation_settings import SETTINGS_FLAG
from petatron.data.conversations.encoded_records import ARRAYS, EncodingJob, RefusedRecord, encode_files
from petatron.data.document_provenance import DocumentProvenance
from petatron.data.index_cache import Arrays, IndexLog, cached_digest, fingerprint, load_or_build
from petatron.data.inputs.input_file import InputFile
from petatron.data.tokenizer import Tokenizer

_FORMAT = 1
_SHOWN = 5
_OF_ENCODING = ("encode_workers", "packed", "long_samples")
"""Settings that change no token."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of tokens with their weights in the loss: row i has `ids[bounds[i]:bounds[i + 1]]`."""

    ids: NDArray[np.int32]
    weights: NDArray[np.uint8] | NDArray[np.float32]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def has_weights(self) -> bool:
        """Whether some weights are neither 0 nor 1."""
        return self.weights.dtype != np.uint8

    def row(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.uint8] | NDArray[np.float32]]:
        begin, end = int(self.bounds[number]), int(self.bounds[number + 1])
        return self.ids[begin:end], self.weights[begin:end]


@dataclass(frozen=True, slots=True)
class EncodedSource:
    """The records of a source that encode: their rows, several of each in their order, their labels, files and lines."""

    name: str
    rows: Rows
    labels: NDArray[np.float32]
    fingerprint: str
    paths: tuple[str, ...]
    files: NDArray[np.int32]
    lines: NDArray[np.int64]

    @property
    def num_records(self) -> int:
        return len(self.lines)

    def provenance(self, record: int) -> DocumentProvenance:
        return DocumentProvenance(self.paths[int(self.files[record])], int(self.lines[record]), None)


def open_encoded(
    name: str, job: EncodingJob, tokenizer: Tokenizer, *, cache: Path | None, log: IndexLog | None
) -> EncodedSource:
    """Encodes the files of a word of `--data-path`, or reads what is cached; raises `DataError` for records that are refused."""
    files = conversation_files(name)
    digests = [_digest(file, cache) for file in files]
    settings = {name: value for name, value in asdict(job.settings).items() if name not in _OF_ENCODING}
    key: dict[str, object] = {
        "kind": job.encode.__name__,
        "conversations": _FORMAT,
        "content": digests,
        "tokenizer": str(tokenizer.fingerprint),
        "template": [job.template.source, job.template.tool_use, list(job.template.special_tokens)],
        "settings": settings,
    }
    refused: list[RefusedRecord] = []

    def build() -> Arrays:
        fails = job.settings.on_error == "fail"
        arrays, left_out = encode_files(name, files, job, tokenizer, max_refused=_SHOWN if fails else None)
        if left_out and fails:
            raise DataError(_fail_text(left_out))
        refused.extend(left_out)
        return arrays | {"refused": np.array([entry.line for entry in left_out], np.int64)}

    arrays = load_or_build(cache, key, (*ARRAYS, "refused"), build=build, log=log, is_slow=True)
    stem = fingerprint(key)
    if len(arrays["refused"]):
        _warn_refused(name, arrays, refused, None if cache is None else cache / f"{stem}-left-out.jsonl")
    rows = Rows(arrays["ids"], arrays["weights"], arrays["bounds"])
    if not len(rows):
        raise DataError(f"{name} has no conversations. Give a file with one in each line.")
    paths = tuple(file.path for file in files)
    return EncodedSource(name, rows, arrays["labels"], stem, paths, arrays["files"], arrays["lines"])


def _digest(file: InputFile, cache: Path | None) -> str:
    if file.is_remote:
        return f"{file.path} {file.size} {file.version}"
    return cached_digest(cache, Path(file.path), "conversations", lambda: content_digest(file))


def _fail_text(refused: Sequence[RefusedRecord]) -> str:
    fix = f"Repair or remove such records, or count and leave them out with {SETTINGS_FLAG} on_error=skip."
    if len(refused) == 1:
        return f"{refused[0]}. {fix}"
    shown = "\n".join(f"  {entry}" for entry in refused[:_SHOWN])
    return f"Records that make no sample, the first {min(len(refused), _SHOWN)}:\n{shown}\n{fix}"


def _warn_refused(
    name: str, arrays: Mapping[str, NDArray], refused: Sequence[RefusedRecord], path: Path | None
) -> None:
    """Says how many records are left out and why; of cached ones the reasons are in the list."""
    count = len(arrays["refused"])
    text = f"{name}: {count_with_noun(count, 'record')} of {count + len(arrays['lines']):,} left out"
    if refused:
        kinds = Counter(entry.kind for entry in refused)
        text += f" ({', '.join(f'{number:,} {kind}' for kind, number in kinds.most_common())}; the first: {refused[0]})"
        if path is not None:
            try:
                write_atomic(path, "".join(json.dumps(asdict(entry)) + "\n" for entry in refused))
            except OSError as error:
                text += f"; the list cannot be written to {path} ({error})"
    if path is not None and path.is_file():
        text += f"; all are listed in {path}"
    get_logger(__name__).warning("WARNING: %s", text)
