"""Statistics of a corpus: documents and their lengths, tokens, bytes per token, duplicates; of texts or token files.

Memory is 16 bytes for each document: its length and a hash.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from petatron.data.curate.files.document_blocks import parse_block, read_blocks
from petatron.data.curate.files.pass_progress import OnProgress, PassProgress
from petatron.data.curate.files.step_files import StepFiles
from petatron.data.curate.files.step_summary import BLANK
from petatron.data.curate.normalize_text import same_text_key
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.tokenizer import Tokenizer

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
SAMPLED_DOCUMENTS, SAMPLED_TOKENS = 256, 4096
"""Of a token file, decoded to know its bytes per token."""
Unit = Literal["tokens", "bytes"]


@dataclass(frozen=True, slots=True)
class SourceStats:
    """One source. Lengths are in tokens where these are known, else in bytes of UTF-8."""

    name: str
    unit: Unit
    lengths: NDArray[np.int64]
    num_tokens: int | None
    num_bytes: int | None
    bytes_per_token: float | None
    num_duplicates: int | None
    """Documents whose text, or whose tokens, an earlier document has; None where it was not asked for."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Lines that are no documents, by reason."""

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    def percentiles(self) -> dict[int, int]:
        """Returns lengths by percentile, each the length of some document."""
        if not len(self.lengths):
            return dict.fromkeys(PERCENTILES, 0)
        values = np.percentile(self.lengths, PERCENTILES, method="inverted_cdf")
        return dict(zip(PERCENTILES, values.astype(np.int64).tolist()))

    def as_json(self) -> dict[str, Any]:
        histogram = length_histogram(self.lengths)
        return {
            "source": self.name,
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
            "bytes_per_token": self.bytes_per_token,
            "duplicates": self.num_duplicates,
            "left_out": self.left_out,
            "unit": self.unit,
            "mean_length": float(self.lengths.mean()) if len(self.lengths) else 0.0,
            "percentiles": {str(percent): length for percent, length in self.percentiles().items()},
            "histogram": [
                {"from": int(start), "documents": int(documents), "length": int(length)}
                for start, documents, length in zip(histogram.starts, histogram.documents, histogram.length)
            ],
        }


@dataclass(frozen=True, slots=True)
class LengthHistogram:
    """Documents and their lengths in sum, by bins that begin at 0, 1, 2, 4, 8, ..."""

    starts: NDArray[np.int64]
    documents: NDArray[np.int64]
    length: NDArray[np.int64]


def length_histogram(lengths: NDArray[np.int64], *, last_start: int = 0) -> LengthHistogram:
    """Returns the bins up to the longest document, and at least up to that of `last_start`.

    >>> histogram = length_histogram(np.array([0, 1, 2, 3, 9]))
    >>> histogram.starts.tolist(), histogram.documents.tolist(), histogram.length.tolist()
    ([0, 1, 2, 4, 8], [1, 1, 2, 0, 1], [0, 1, 5, 0, 9])
    """
    bins = np.where(lengths > 0, np.frexp(lengths.astype(np.float64))[1], 0)
    count = max(int(bins.max(initial=0)), int(last_start).bit_length()) + 1
    starts = np.concatenate(([0], 1 << np.arange(count - 1)))
    documents = np.bincount(bins, minlength=count)
    length = np.bincount(bins, weights=lengths, minlength=count).astype(np.int64)
    return LengthHistogram(starts, documents, length)


def file_stats(
    files: StepFiles, tokenizer: Tokenizer | None, *, duplicates: bool, on_progress: OnProgress | None = None
) -> list[SourceStats]:
    """Reads files, one source each; malformed lines are counted."""
    result: list[SourceStats] = []
    progress = PassProgress(files, "read", on_progress)
    readings = [_Reading() for _ in files.sources]
    for index, block in read_blocks(files):
        parsed = parse_block(block, files.json_key)
        reading = readings[index]
        texts = [document.text.encode("utf-8", "replace").decode() for document in parsed.documents]
        reading.sizes.append(np.array([len(text.encode()) for text in texts], np.int64))
        if tokenizer is not None:
            reading.tokens.append(np.array([len(ids) for ids in tokenizer.encode_batch(texts)], np.int64))
        if duplicates:
            reading.hashes.append(_hashes([same_text_key(text).encode() for text in texts]))
        reading.left_out += Counter(refused.kind for refused in parsed.malformed)
        reading.left_out[BLANK] += parsed.num_blank
        progress.add_block(index, block, parsed.num_lines)
    for file, reading in zip(files.sources, readings):
        result.append(reading.stats(file.path, has_tokens=tokenizer is not None, duplicates=duplicates))
    return result


@dataclass(slots=True)
class _Reading:
    sizes: list[NDArray[np.int64]] = field(default_factory=list)
    tokens: list[NDArray[np.int64]] = field(default_factory=list)
    hashes: list[NDArray[np.uint64]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def stats(self, path: str, *, has_tokens: bool, duplicates: bool) -> SourceStats:
        sizes = np.concatenate([np.zeros(0, np.int64), *self.sizes])
        lengths = np.concatenate([np.zeros(0, np.int64), *self.tokens]) if has_tokens else sizes
        num_tokens, num_bytes = int(lengths.sum()) if has_tokens else None, int(sizes.sum())
        return SourceStats(
            path,
            "tokens" if has_tokens else "bytes",
            lengths,
            num_tokens,
            num_bytes,
            num_bytes / num_tokens if num_tokens else None,
            _num_duplicates(np.concatenate([np.zeros(0, np.uint64), *self.hashes])) if duplicates else None,
            {reason: count for reason, count in sorted(self.left_out.items()) if count},
        )


def dataset_stats(dataset: IndexedDataset, tokenizer: Tokenizer | None, *, duplicates: bool) -> SourceStats:
    """Reads a token file: its index, all tokens to find duplicates, and some documents as text."""
    lengths = dataset.document_lengths.astype(np.int64)
    hashes = None
    if duplicates:
        documents = (dataset.get_document(index) for index in range(dataset.num_documents))
        hashes = _hashes([document.tobytes() for document in documents])
    return SourceStats(
        dataset.prefix,
        "tokens",
        lengths,
        dataset.num_tokens,
        None,
        None if tokenizer is None else _sampled_bytes_per_token(dataset, tokenizer),
        None if hashes is None else _num_duplicates(hashes),
    )


def joined_stats(sources: Sequence[SourceStats]) -> SourceStats | None:
    """Returns sources as one; None if their lengths are of different units. Duplicates are those within a source."""
    if len({source.unit for source in sources}) > 1:
        return None
    tokens, sizes = [source.num_tokens for source in sources], [source.num_bytes for source in sources]
    duplicates = [source.num_duplicates for source in sources]
    known_tokens, known_bytes = _sum_if_known(tokens), _sum_if_known(sizes)
    return SourceStats(
        "all",
        sources[0].unit,
        np.concatenate([source.lengths for source in sources]),
        known_tokens,
        known_bytes,
        known_bytes / known_tokens if known_tokens and known_bytes is not None else None,
        _sum_if_known(duplicates),
    )


def _sum_if_known(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _hashes(contents: Sequence[bytes]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(hashlib.blake2b(part, digest_size=8).digest() for part in contents), np.uint64)


def _num_duplicates(hashes: NDArray[np.uint64]) -> int:
    return len(hashes) - len(np.unique(hashes))


def _sampled_bytes_per_token(dataset: IndexedDataset, tokenizer: Tokenizer) -> float:
    chosen = np.unique(np.linspace(0, dataset.num_documents - 1, SAMPLED_DOCUMENTS).astype(np.int64))
    num_tokens = num_bytes = 0
    for index in chosen.tolist():
        ids = dataset.get_document(index)[:SAMPLED_TOKENS].tolist()
        ids = ids[:-1] if ids and ids[-1] == tokenizer.eod else ids
        num_tokens += len(ids)
        num_bytes += len(tokenizer.decode(ids).encode())
    return num_bytes / max(num_tokens, 1)
