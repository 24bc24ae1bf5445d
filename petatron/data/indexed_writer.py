"""Writes `.bin`/`.idx` pairs (layout: indexed_dataset.py) as a stream, and merges finished ones.

The index stores lengths first and offsets after, and its header contains the counts, so it can only be written at the end.
Until then lengths are in a spool file next to the output: memory use does not grow with the number of documents. Both
files are written under temporary names and renamed at the end, the index last, so a prefix that has an index is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from petatron.base.errors import DataError
from petatron.base.safe_files import create_file, tmp_path_for
from petatron.data.document_provenance import merge_provenance, sources_path
from petatron.data.finish_or_abort import FinishOrAbort
from petatron.data.indexed_dataset import (
    CHUNK_ENTRIES,
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    bin_path,
    dtype_code,
    idx_path,
)
from petatron.data.recorded_tokenizer import merged_tokenizer, recorded_tokenizer_path


class IndexedWriter(FinishOrAbort):
    """Streams documents into a prefix. Use as a context manager: leaving it finishes, an exception leaves no files.

    >>> import tempfile, os
    >>> prefix = os.path.join(tempfile.mkdtemp(), "demo")
    >>> with IndexedWriter(prefix, "uint16") as writer:
    ...     writer.add_document([1, 2, 3])
    ...     writer.add_document([4, 5, 6, 7], sentence_lengths=[1, 3])
    >>> sorted(os.listdir(os.path.dirname(prefix)))
    ['demo.bin', 'demo.idx']
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike) -> None:
        self.prefix = str(prefix)
        self._code = dtype_code(dtype)
        self.dtype = DTYPES[self._code]
        self.num_sequences = self.num_documents = self.num_tokens = 0
        self._bin, self._idx = bin_path(prefix), idx_path(prefix)
        # Unique names keep two writers of one prefix apart; the last to finish wins, and its pair is complete.
        self._tmp_paths = {
            name: tmp_path_for(Path(f"{prefix}.{name}")) for name in ("bin", "idx", "lengths", "documents")
        }
        try:
            self._bin.parent.mkdir(parents=True, exist_ok=True)
            self._tokens = create_file(self._tmp_paths["bin"], buffering=1 << 20)
            self._lengths = create_file(self._tmp_paths["lengths"], buffering=1 << 16)
            self._documents = create_file(self._tmp_paths["documents"], buffering=1 << 16)
        except OSError as error:
            raise DataError(
                f"Cannot write {self._bin}: {error}. Choose an output prefix in a writable folder."
            ) from error

    def add_document(self, tokens: ArrayLike, sentence_lengths: ArrayLike | None = None) -> None:
        """Adds one document, as one sequence or split into sentences of the given lengths."""
        flat = np.asarray(tokens)
        lengths = np.array([flat.size]) if sentence_lengths is None else np.asarray(sentence_lengths)
        self.add_sequences(flat, lengths, sequences_per_document=np.array([lengths.size]))

    def add_sequences(
        self, tokens: NDArray, lengths: NDArray, *, sequences_per_document: NDArray | None = None
    ) -> None:
        """Adds many sequences at once: their concatenated tokens and their lengths; by default one document each."""
        if int(lengths.sum()) != tokens.size:
            raise ValueError(f"lengths sum to {int(lengths.sum())}, but there are {tokens.size} tokens")
        documents = np.ones(lengths.size, "<i4") if sequences_per_document is None else sequences_per_document
        if int(documents.sum()) != lengths.size:
            raise ValueError(f"documents cover {int(documents.sum())} sequences, but there are {lengths.size}")
        self._write(self._tokens, self._cast_tokens(tokens))
        self._add_counts(lengths, documents)

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Appends a whole dataset of the same token dtype, by copying bytes."""
        assert dataset.dtype == self.dtype, "merge() checks the types first"
        sizes = dataset.lengths.astype(np.int64) * self.dtype.itemsize
        contiguous = bool((dataset.offsets[1:] == dataset.offsets[:-1] + sizes[:-1]).all())
        if contiguous:
            left = int(sizes.sum())
            with dataset.bin.open("rb") as source:
                source.seek(int(dataset.offsets[0]))
                while block := source.read(min(left, 1 << 22)):
                    self._write(self._tokens, np.frombuffer(block, np.uint8))
                    left -= len(block)
        else:
            for index in range(dataset.num_sequences):
                self._write(self._tokens, dataset.get(index))
        self._add_counts(dataset.lengths, np.diff(dataset.document_indices))

    def finish(self) -> None:
        """Writes the index and publishes both files."""
        try:
            with self._writing():
                self._publish()
        finally:
            self.abort()

    def abort(self) -> None:
        """Closes and removes the temporary files; after finish() only the spool files remain to be removed."""
        for file in (self._tokens, self._lengths, self._documents):
            # Closing flushes the buffer, which on a full disk fails again; the file is removed anyway.
            with suppress(OSError):
                file.close()
        for path in self._tmp_paths.values():
            path.unlink(missing_ok=True)

    def _publish(self) -> None:
        with create_file(self._tmp_paths["idx"], buffering=1 << 20) as index:
            index.write(HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1))
            self._lengths.seek(0)
            shutil.copyfileobj(self._lengths, index, 1 << 20)
            _write_running_sum(self._lengths, index, scale=self.dtype.itemsize, with_total=False)
            _write_running_sum(self._documents, index, scale=1, with_total=True)
            index.flush()
            os.fsync(index.fileno())
        self._tokens.flush()
        os.fsync(self._tokens.fileno())
        self._tokens.close()
        # An old index must never describe new tokens, not even if we are killed between the renames; nor may other old files.
        self._idx.unlink(missing_ok=True)
        sources_path(self.prefix).unlink(missing_ok=True)
        recorded_tokenizer_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._tmp_paths["bin"], self._bin)
        os.replace(self._tmp_paths["idx"], self._idx)

    def _add_counts(self, lengths: NDArray, documents: NDArray) -> None:
        if lengths.size and int(lengths.max()) > np.iinfo(np.int32).max:
            raise DataError(
                f"A sequence of {int(lengths.max()):,} tokens is too long for {self.prefix}: the limit is 2^31 - 1."
            )
        self._write(self._lengths, lengths.astype("<i4", copy=False))
        self._write(self._documents, documents.astype("<i4", copy=False))
        self.num_sequences += int(lengths.size)
        self.num_documents += int(documents.size)
        self.num_tokens += int(lengths.sum(dtype=np.int64))

    def _cast_tokens(self, tokens: NDArray) -> NDArray:
        if tokens.dtype == self.dtype or not tokens.size:
            return tokens.astype(self.dtype, copy=False)
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = tokens.min(), tokens.max()
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"Token ids {low}..{high} do not fit the type {self.dtype} of {self.prefix} ({limits.min}..{limits.max}). "
                    "The tokenizer gave ids outside its own vocabulary; check the tokenizer files."
                )
        return tokens.astype(self.dtype)

    def _write(self, file: BinaryIO, array: NDArray) -> None:
        with self._writing():
            file.write(np.ascontiguousarray(array).data)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            fix = "Free some space, or choose another output prefix."
            raise DataError(f"Cannot write {self._bin}: {error}. {fix}") from error


def merge_datasets(prefixes: Sequence[str | Path], output: str | Path) -> IndexedDataset:
    """Merges datasets of one token dtype into a new prefix, in the given order."""
    if not prefixes:
        raise DataError("Nothing to merge: give at least one dataset prefix.")
    if str(output) in {str(prefix) for prefix in prefixes}:
        raise DataError(f"{output} is both an input and the output of the merge. Choose another output prefix.")
    missing = {
        prefix: [path for path in (idx_path(prefix), bin_path(prefix)) if not path.exists()] for prefix in prefixes
    }
    incomplete = [str(path) for paths in missing.values() for path in paths]
    if sum(map(bool, missing.values())) > 1:  # the error of a single dataset says more
        raise DataError(
            f"These datasets cannot be merged: {', '.join(incomplete)} do not exist. Give prefixes of complete .bin/.idx pairs."
        )
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    problems = [
        f"{dataset.prefix} has tokens of type {dataset.dtype}, {datasets[0].prefix} of type {datasets[0].dtype}"
        for dataset in datasets
        if dataset.dtype != datasets[0].dtype
    ]
    problems += [f"{dataset.prefix} is multimodal" for dataset in datasets if dataset.modes is not None]
    if problems:
        raise DataError(
            f"These datasets cannot be merged: {'; '.join(problems)}. Preprocess all with the same tokenizer."
        )
    tokenizer = merged_tokenizer(prefixes)
    with IndexedWriter(output, datasets[0].dtype) as writer:
        for dataset in datasets:
            writer.add_dataset(dataset)
    merge_provenance(datasets, output)
    if tokenizer is not None:
        tokenizer.write(output)
    return IndexedDataset(output)


def _write_running_sum(source: BinaryIO, target: BinaryIO, *, scale: int, with_total: bool) -> None:
    """Writes, as int64, the exclusive prefix sum of the int32 entries of `source`; at the end also the total."""
    source.seek(0)
    total = 0
    while block := source.read(4 * CHUNK_ENTRIES):
        values = np.frombuffer(block, "<i4").astype(np.int64) * scale
        ends = np.cumsum(values) + total
        target.write((ends - values).astype("<i8").data)
        total = int(ends[-1])
    if with_total:
        target.write(np.array([total], "<i8").data)
