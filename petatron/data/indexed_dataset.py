"""Token files: `<prefix>.bin` contains bare token ids, `<prefix>.idx` the offsets of each sequence and document.

The layout is the one Megatron reads and writes, byte for byte:

    offset      bytes  content (little-endian)
    0           9      magic b"MMIDIDX\\0\\0"
    9           8      uint64 version, 1
    17          1      uint8 code of the token type
    18          8      uint64 S, number of sequences
    26          8      uint64 D, number of documents + 1
    34          4S     int32 tokens in each sequence
    34+4S       8S     int64 byte offset of each sequence in the .bin
    34+12S      8D     int64 first sequence of each document, then S
    34+12S+8D   S      int8 mode of each sequence; only multimodal files have it, and no header bit says so

A document is usually one sequence; with presplit sentences it is several, one after the other. Nothing in
the format detects a truncated or mixed-up copy, so opening checks every count against the sizes of both files, before
anything is built from it and in arithmetic that cannot wrap: where sequences end is computed in uint64.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from petatron.base.errors import DataError
from petatron.base.remote_address import is_remote
from petatron.base.untrusted_files import open_regular_file, reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.index_cache import cached_digest
from petatron.data.object_storage.chunked_tokens import ChunkedTokens
from petatron.data.object_storage.storage_cache import ObjectStorageCache, RemoteObject, copied_index

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}

# Whole-index checks and sums run over this many entries at a time, so their temporaries stay small.
CHUNK_ENTRIES = 1 << 22
_BLOCK_SEQUENCES, _BLOCK_TOKENS = 1 << 16, 1 << 22


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def optimal_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest dtype Megatron's tools use for this vocabulary: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def dtype_code(dtype: DTypeLike) -> int:
    """Returns the code of a token dtype in the file header."""
    wanted = np.dtype(dtype).newbyteorder("<")
    if wanted not in DTYPE_CODES:
        known = ", ".join(str(np.dtype(known)) for known in DTYPE_CODES)
        raise DataError(f"Tokens of type {np.dtype(dtype)} cannot be stored. Use one of {known}.")
    return DTYPE_CODES[wanted]


class IndexedDataset:
    """Memory-mapped reader of one prefix. Checks both files when it opens; afterwards reads never fail.

    A prefix may be an address (s3://bucket/corpus) with a cache: then the index is a local copy, which is mapped, and reads of tokens may
    raise `DataError`.

    >>> from petatron.data.indexed_writer import IndexedWriter
    >>> import tempfile, os
    >>> prefix = os.path.join(tempfile.mkdtemp(), "demo")
    >>> with IndexedWriter(prefix, "uint16") as writer:
    ...     writer.add_document([5, 6, 7])
    >>> IndexedDataset(prefix).get(0, offset=1).tolist()
    [6, 7]
    """

    def __init__(self, prefix: str | Path, *, object_storage: ObjectStorageCache | None = None) -> None:
        self.prefix = str(prefix)
        self.idx, self.bin = idx_path(prefix), bin_path(prefix)
        self._remote: ChunkedTokens | None = None
        self._digest: str | None = None
        if is_remote(self.prefix):
            self._open_remote(object_storage)
        else:
            self._open_local()

    def _open_local(self) -> None:
        for path in (self.idx, self.bin):
            with reading_untrusted(path, data_file_error):
                if not path.exists():
                    raise DataError(f"{path} does not exist. {_missing_hint(self.prefix, path)}")
                open_regular_file(path).close()
        self.bin_bytes = self.bin.stat().st_size
        with reading_untrusted(self.idx, data_file_error):
            self.num_tokens = self._open_index()
        with reading_untrusted(self.bin, data_file_error):
            self._tokens = _mmap_file(self.bin)

    def _open_remote(self, cache: ObjectStorageCache | None) -> None:
        if cache is None:
            raise DataError(
                f"{self.prefix} is in object storage. Give --object-storage-cache-path a folder for its index and its chunks where "
                "there is such a flag, or copy the files to a disk."
            )
        index, tokens = (RemoteObject.find(f"{self.prefix}{end}") for end in (".idx", ".bin"))
        self.bin_bytes = tokens.size
        self.idx = copied_index(index, cache)
        with reading_untrusted(self.idx, data_file_error):
            self.num_tokens = self._open_index()
        self._remote = ChunkedTokens(tokens, cache)

    def _open_index(self) -> int:
        """Maps the index, checks it against both files, returns the number of tokens."""
        self.dtype, self.num_sequences, num_boundaries = self._read_header()
        sequences = self.num_sequences
        index = _mmap_file(self.idx)
        lengths_end = HEADER.size + 4 * sequences
        offsets_end = lengths_end + 8 * sequences
        documents_end = offsets_end + 8 * num_boundaries
        self.lengths: NDArray[np.int32] = np.frombuffer(index, "<i4", sequences, HEADER.size)
        self.offsets: NDArray[np.int64] = np.frombuffer(index, "<i8", sequences, lengths_end)
        self.document_indices: NDArray[np.int64] = np.frombuffer(index, "<i8", num_boundaries, offsets_end)
        self.modes: NDArray[np.int8] | None = None
        if len(index) > documents_end:
            self.modes = np.frombuffer(index, "i1", sequences, documents_end)
        self.num_documents = num_boundaries - 1
        tokens = self._check_sequences()
        self._check_documents()
        return tokens

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Returns tokens of sequence `index`, from token `offset`, at most `length` of them. A read-only view, no copy."""
        return self._read(int(self.offsets[index]), int(self.lengths[index]), offset, length)

    def get_sequences(self, first: int, stop: int) -> NDArray:
        """Returns the tokens of consecutive sequences, of a file whose documents have several of them: these are contiguous there."""
        length = int(self.lengths[first:stop].sum(dtype=np.int64))
        return self._read(int(self.offsets[first]), length, 0, length)

    def get_document(self, index: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Returns the same for a whole document, whose sequences are contiguous."""
        if self.one_sequence_per_document:
            return self.get(index, offset, length)
        first = int(self.document_indices[index])
        start = int(self.offsets[first]) if first < self.num_sequences else 0
        return self._read(start, int(self.document_lengths[index]), offset, length)

    @cached_property
    def one_sequence_per_document(self) -> bool:
        """Whether every document is one sequence, as for language models trained on whole documents."""
        if self.num_documents != self.num_sequences:
            return False
        starts = range(0, self.num_sequences, CHUNK_ENTRIES)
        parts = ((start, self.document_indices[start : start + CHUNK_ENTRIES]) for start in starts)
        return all(np.array_equal(part, np.arange(start, start + len(part))) for start, part in parts)

    @property
    def unit(self) -> str:
        """What a sequence of this file is called: a document, unless some document has several or none."""
        return "documents" if self.one_sequence_per_document else "sequences"

    @cached_property
    def document_lengths(self) -> NDArray[np.integer]:
        """Tokens of each document."""
        if self.one_sequence_per_document:
            return self.lengths
        ends = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
        return np.diff(ends[self.document_indices])

    def digest(self, cache_dir: str | Path | None = None) -> str:
        """Hashes the name, the index and the size of the tokens: the cache key of sample indices.

        With a cache folder the index is read once, until it changes, and not by every rank at every start.
        """
        if self._digest is None:
            tokens = f"{self.bin.name}:{self.bin_bytes}"
            self._digest = cached_digest(cache_dir, self.idx, tokens, partial(self._hash, tokens))
        return self._digest

    def _hash(self, tokens: str) -> str:
        content = hashlib.blake2b(tokens.encode(), digest_size=16)
        with open_regular_file(self.idx) as file:
            while block := file.read(1 << 22):
                content.update(block)
        return content.hexdigest()

    def _read(self, start: int, available: int, offset: int, length: int | None) -> NDArray:
        count = available - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > available:
            raise IndexError(f"tokens {offset}..{offset + count} asked of a sequence of {available} in {self.prefix}")
        first = start + offset * self.dtype.itemsize
        if self._remote is not None:
            return np.frombuffer(self._remote.read(first, count * self.dtype.itemsize), self.dtype)
        return np.frombuffer(self._tokens, self.dtype, count, first)

    def blocks(self) -> Iterator[tuple[int, NDArray]]:
        """Yields all tokens in the order of the sequences, as views of many sequences each, with the first of these.

        A block ends at the end of a sequence where sequences follow one another in the file; otherwise it is one sequence.
        """
        itemsize = self.dtype.itemsize
        sequence, window = 0, _BLOCK_SEQUENCES
        while sequence < self.num_sequences:
            lengths = self.lengths[sequence : sequence + window].astype(np.int64)
            starts = self.offsets[sequence : sequence + window]
            ends = np.cumsum(lengths)
            follows = (starts == starts[0] + (ends - lengths) * itemsize) & (
                ends <= max(_BLOCK_TOKENS, int(lengths[0]))
            )
            count = len(follows) if bool(follows.all()) else max(1, int(np.argmin(follows)))
            if total := int(ends[count - 1]):
                yield sequence, self._read(int(starts[0]), total, 0, total)
            sequence += count
            window = min(2 * count, _BLOCK_SEQUENCES)

    def token_in_block(self, sequence: int, place: int) -> tuple[int, int]:
        """Returns the sequence and the position in it of a token of a block that begins with `sequence`."""
        ends = np.cumsum(self.lengths[sequence : sequence + _BLOCK_SEQUENCES], dtype=np.int64)
        number = int(np.searchsorted(ends, place, side="right"))
        return sequence + number, place - (int(ends[number - 1]) if number else 0)

    def check_token_ids(self) -> None:
        """Raises for a file of floating-point numbers, which Megatron's format allows and which are no token ids."""
        if self.dtype.kind == "f":
            raise DataError(
                f"{self.idx} says that {self.bin.name} holds {self.dtype} numbers, and token ids are whole numbers. "
                "Give a dataset that `petatron data preprocess` or Megatron's tools made of text."
            )

    def _read_header(self) -> tuple[np.dtype, int, int]:
        with open_regular_file(self.idx) as file:
            head = file.read(HEADER.size)
            size = os.fstat(file.fileno()).st_size
        if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
            raise DataError(
                f"{self.idx} is not a token index: it starts with {head[:9]!r}, not {MAGIC!r}. "
                "Give the prefix of a dataset written by `petatron data preprocess` or Megatron's preprocess_data.py."
            )
        if size < HEADER.size:
            raise DataError(_truncated(self.idx, size, HEADER.size))
        _, version, code, sequences, boundaries = HEADER.unpack(head)
        if version != VERSION:
            raise DataError(
                f"{self.idx} has format version {version}; only {VERSION} is known. Preprocess the data again."
            )
        if code not in DTYPES:
            raise DataError(
                f"{self.idx} has token type code {code}; known are {', '.join(map(str, DTYPES))}. "
                "The file is damaged: copy it again, or preprocess the data again."
            )
        if sequences == 0:
            raise DataError(
                f"{self.idx} is empty: it holds no sequences. Preprocess the data again, from non-empty text."
            )
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if size < expected:
            raise DataError(_truncated(self.idx, size, expected))
        if size not in (expected, expected + sequences):
            raise DataError(
                f"{self.idx} has {size:,} bytes, but {sequences:,} sequences and {boundaries - 1:,} documents take "
                f"{expected:,} (or {expected + sequences:,} with modes). The file is damaged: copy it again."
            )
        return DTYPES[code], sequences, boundaries

    def _check_sequences(self) -> int:
        """Checks each sequence against the size of the .bin; returns the number of tokens."""
        size, itemsize = self.bin_bytes, self.dtype.itemsize
        tokens, furthest = 0, 0
        for start in range(0, self.num_sequences, CHUNK_ENTRIES):
            lengths = self.lengths[start : start + CHUNK_ENTRIES].astype(np.int64)
            offsets = self.offsets[start : start + CHUNK_ENTRIES]
            if int(lengths.min()) < 0 or int(offsets.min()) < 0:
                bad = start + int(np.argmax((lengths < 0) | (offsets < 0)))
                raise DataError(
                    f"{self.idx} gives sequence {bad} length {self.lengths[bad]} and byte offset {self.offsets[bad]}; "
                    "neither may be negative. The file is damaged: copy it again."
                )
            tokens += int(lengths.sum())
            # Neither is negative, so below 2^63 + 2^34: as int64 the sum would wrap for an offset near 2^63.
            furthest = max(furthest, int((offsets.view("<u8") + (lengths * itemsize).view("<u8")).max()))
        if furthest > size:
            raise DataError(
                f"{self.prefix}.bin is truncated: it has {size:,} bytes, its index needs {furthest:,}. "
                f"Copy it again together with {self.idx.name}, or preprocess the data again."
            )
        if tokens * itemsize > size:
            raise DataError(
                f"{self.idx} counts {tokens:,} tokens of {itemsize} bytes, but {self.bin.name} has only {size:,} bytes: sequences overlap. "
                "Preprocess the data again; to use documents more often, name the dataset several times or give it a weight."
            )
        if tokens == 0:
            raise DataError(f"{self.prefix} is empty: all {self.num_sequences:,} sequences have no tokens.")
        return tokens

    def _check_documents(self) -> None:
        boundaries = self.document_indices
        if len(boundaries) < 2 or boundaries[0] != 0 or boundaries[-1] != self.num_sequences:
            ends = f"from {boundaries[0]} to {boundaries[-1]}" if len(boundaries) else "nothing"
            raise DataError(
                f"{self.idx}: documents cover {ends}, but must cover sequences from 0 to {self.num_sequences}. "
                "The file is damaged, or its writer was interrupted: preprocess the data again."
            )
        if self.one_sequence_per_document:
            return
        if bool((boundaries[1:] < boundaries[:-1]).any()):  # a difference could wrap
            raise DataError(f"{self.idx}: document boundaries go backwards. The file is damaged: copy it again.")
        sizes = self.lengths.astype(np.int64) * self.dtype.itemsize
        if bool((self.offsets[1:] != self.offsets[:-1] + sizes[:-1]).any()):
            raise DataError(
                f"{self.idx}: documents have several sequences, and these do not lie one after the other in {self.bin.name}. "
                "Write the dataset again with `petatron data preprocess`."
            )


def _mmap_file(path: Path) -> mmap.mmap:
    # Not numpy.memmap: slicing one costs far more than reading a short sequence does.
    with open_regular_file(path) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _truncated(path: Path, size: int, expected: int) -> str:
    return (
        f"{path} is truncated: it has {size:,} bytes, its header needs {expected:,}. "
        "Copy it again, or preprocess the data again."
    )


def _missing_hint(prefix: str, path: Path) -> str:
    """A prefix is easily given with its extension, without `_text_document`, or from the wrong folder."""
    if prefix.endswith((".bin", ".idx")):
        return f"Give the prefix without the extension: {prefix[:-4]}."
    if idx_path(f"{prefix}_text_document").is_file():
        return f"Did you mean {prefix}_text_document?"
    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist either."
    nearby = sorted(index.stem for index in path.parent.glob("*.idx"))[:5]
    return f"Datasets in {path.parent}: {', '.join(nearby)}." if nearby else f"There is no dataset in {path.parent}."
