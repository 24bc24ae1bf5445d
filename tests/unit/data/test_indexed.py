from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import DataError
from petatron.data.indexed_dataset import DTYPES, IndexedDataset, optimal_dtype
from petatron.data.indexed_writer import IndexedWriter, merge_datasets


def reference_files(documents: list[list[list[int]]], code: int = 8, char: str = "H") -> tuple[bytes, bytes]:
    """.idx and .bin of documents of sentences, from the definition of the layout alone."""
    sequences = [sentence for document in documents for sentence in document]
    size = struct.calcsize(f"<{char}")
    lengths = [len(sequence) for sequence in sequences]
    offsets = [size * sum(lengths[:i]) for i in range(len(lengths))]
    boundaries = [0]
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(boundaries))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(offsets)}q", *offsets)
    index += struct.pack(f"<{len(boundaries)}q", *boundaries)
    flat = [token for sequence in sequences for token in sequence]
    return index, struct.pack(f"<{len(flat)}{char}", *flat)


DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [[65535, 7]]]


def write_reference(prefix: Path, **kwargs: object) -> None:
    index, tokens = reference_files(DOCUMENTS, **kwargs)  # type: ignore[arg-type]
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(tokens)


def test_writer_writes_the_layout_byte_for_byte(tmp_path: Path) -> None:
    prefix = tmp_path / "sub" / "ours"
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in DOCUMENTS:
            flat = [token for sentence in document for token in sentence]
            writer.add_document(flat, [len(sentence) for sentence in document])
    index, tokens = reference_files(DOCUMENTS)
    assert Path(f"{prefix}.idx").read_bytes() == index
    assert Path(f"{prefix}.bin").read_bytes() == tokens
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["ours.bin", "ours.idx"]


def test_reader_reads_the_layout(tmp_path: Path) -> None:
    write_reference(tmp_path / "x")
    data = IndexedDataset(tmp_path / "x")
    assert (data.num_sequences, data.num_documents, data.num_tokens) == (4, 3, 8)
    assert data.dtype == np.uint16
    assert data.lengths.tolist() == [3, 1, 2, 2] and data.lengths.dtype == np.int32
    assert data.offsets.tolist() == [0, 6, 8, 12] and data.offsets.dtype == np.int64
    assert data.document_indices.tolist() == [0, 1, 3, 4]
    assert data.modes is None
    assert [data.get(i).tolist() for i in range(4)] == [[1, 2, 3], [4], [5, 6], [65535, 7]]
    assert data.get(0, 1).tolist() == [2, 3] and data.get(0, 1, 1).tolist() == [2]
    assert data.document_lengths.tolist() == [3, 3, 2]
    assert [data.get_document(i).tolist() for i in range(3)] == [[1, 2, 3], [4, 5, 6], [65535, 7]]
    assert data.get_document(1, 1, 2).tolist() == [5, 6]
    with pytest.raises(IndexError):
        data.get(0, 2, 5)


def test_multimodal_modes_are_accepted(tmp_path: Path) -> None:
    write_reference(tmp_path / "x")
    with (tmp_path / "x.idx").open("ab") as file:
        file.write(bytes([0, 1, 0, 1]))
    modes = IndexedDataset(tmp_path / "x").modes
    assert modes is not None and modes.tolist() == [0, 1, 0, 1]
    with pytest.raises(DataError, match="multimodal"):
        merge_datasets([tmp_path / "x"], tmp_path / "y")


@pytest.mark.parametrize(
    ("code", "char"), [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (6, "d"), (7, "f"), (8, "H")]
)
def test_every_token_type(tmp_path: Path, code: int, char: str) -> None:
    index, tokens = reference_files([[[1, 2]], [[3]]], code, char)
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(tokens)
    data = IndexedDataset(tmp_path / "x")
    assert data.get(0).tolist() == [1, 2] and data.get(1).tolist() == [3]
    with IndexedWriter(tmp_path / "y", DTYPES[code]) as writer:
        writer.add_document(np.array([1, 2], DTYPES[code]))
        writer.add_document(np.array([3], DTYPES[code]))
    assert (tmp_path / "y.idx").read_bytes() == index and (tmp_path / "y.bin").read_bytes() == tokens


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), min_size=1, max_size=8
    ).filter(lambda documents: any(sentence for document in documents for sentence in document))
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]) -> None:
    folder = tmp_path_factory.mktemp("trip")
    with IndexedWriter(folder / "x", "uint16") as writer:
        for document in documents:
            writer.add_document([t for s in document for t in s], np.array([len(s) for s in document], np.int64))
    index, tokens = reference_files(documents)
    assert (folder / "x.idx").read_bytes() == index and (folder / "x.bin").read_bytes() == tokens
    data = IndexedDataset(folder / "x")
    expected = [[t for s in document for t in s] for document in documents]
    assert [data.get_document(i).tolist() for i in range(data.num_documents)] == expected
    assert data.document_lengths.tolist() == [len(document) for document in expected]


def test_add_many_equals_add_document(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", "int32") as writer:
        writer.add_sequences(np.arange(10), np.array([3, 0, 7]))
        writer.add_sequences(np.arange(2), np.array([1, 1]), sequences_per_document=np.array([2]))
    with IndexedWriter(tmp_path / "b", "int32") as writer:
        writer.add_document([0, 1, 2])
        writer.add_document([])
        writer.add_document(range(3, 10))
        writer.add_document([0, 1], [1, 1])
        assert (writer.num_documents, writer.num_sequences, writer.num_tokens) == (4, 5, 12)
    for end in ("idx", "bin"):
        assert (tmp_path / f"a.{end}").read_bytes() == (tmp_path / f"b.{end}").read_bytes()


def test_inconsistent_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lengths sum to 4"), IndexedWriter(tmp_path / "a", "int32") as writer:
        writer.add_sequences(np.arange(3), np.array([4]))
    with pytest.raises(ValueError, match="documents cover 3"), IndexedWriter(tmp_path / "a", "int32") as writer:
        writer.add_sequences(np.arange(3), np.array([1, 2]), sequences_per_document=np.array([3]))
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_no_files_and_keeps_the_old_ones(tmp_path: Path) -> None:
    write_reference(tmp_path / "x")
    before = (tmp_path / "x.idx").read_bytes()
    with (
        pytest.raises(DataError, match=r"70000.*do not fit the type uint16"),
        IndexedWriter(tmp_path / "x", "uint16") as writer,
    ):
        writer.add_document([1])
        writer.add_document([70000])
    assert (tmp_path / "x.idx").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_unwritable_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="Cannot write"):
        IndexedWriter(tmp_path / "file" / "x", "uint16")
    with pytest.raises(DataError, match="complex128 cannot be stored"):
        IndexedWriter(tmp_path / "x", "complex128")


def test_a_full_disk_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with (
        pytest.raises(DataError, match=r"No space left on device.*Free some space"),
        IndexedWriter(tmp_path / "x", "uint16") as writer,
    ):
        writer.add_document([1])
    assert list(tmp_path.iterdir()) == []
    writer = IndexedWriter(tmp_path / "x", "uint16")
    writer._lengths.close()
    with Path("/dev/full").open("wb+", buffering=0) as writer._lengths, pytest.raises(DataError, match="No space left"):
        writer.add_document([1])
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_optimal_dtype() -> None:
    assert optimal_dtype(65499) == np.uint16 and optimal_dtype(65500) == np.int32


def patch(path: Path, offset: int, value: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)


# S = 4 sequences, D = 4 boundaries: lengths at 34, offsets at 50, documents at 82, end at 114.
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda idx, bin: idx.unlink(), r"x\.idx does not exist"),
        (lambda idx, bin: bin.unlink(), r"x\.bin does not exist"),
        (lambda idx, bin: idx.write_bytes(b""), "not a token index"),
        (lambda idx, bin: patch(idx, 0, b"PK"), r"not a token index: it starts with b'PK"),
        (lambda idx, bin: patch(idx, 9, b"\x02"), "format version 2; only 1"),
        (lambda idx, bin: patch(idx, 17, b"\x09"), "token type code 9"),
        (lambda idx, bin: idx.write_bytes(idx.read_bytes()[:20]), r"truncated: it has 20 bytes, its header needs 34"),
        (lambda idx, bin: idx.write_bytes(idx.read_bytes()[:-1]), r"truncated: it has 113 bytes, its header needs 114"),
        (lambda idx, bin: idx.write_bytes(idx.read_bytes() + b"??"), r"116 bytes.*take 114"),
        (lambda idx, bin: patch(idx, 18, struct.pack("<Q", 0)), "holds no sequences"),
        (
            lambda idx, bin: bin.write_bytes(bin.read_bytes()[:-1]),
            r"x\.bin is truncated: it has 15 bytes, its index needs 16",
        ),
        (lambda idx, bin: patch(idx, 34, struct.pack("<i", -3)), "sequence 0 length -3"),
        (lambda idx, bin: patch(idx, 50, struct.pack("<q", -8)), "byte offset -8"),
        (lambda idx, bin: patch(idx, 82, struct.pack("<q", 1)), "from 1 to 4, but must cover sequences from 0 to 4"),
        (lambda idx, bin: patch(idx, 106, struct.pack("<q", 3)), "from 0 to 3"),
        (lambda idx, bin: patch(idx, 90, struct.pack("<q", 5)), "go backwards"),
        (lambda idx, bin: patch(idx, 58, struct.pack("<q", 2)), "do not lie one after the other"),
        (lambda idx, bin: (patch(idx, 34, bytes(16)), patch(idx, 50, bytes(32))), "have no tokens"),
    ],
)
def test_damage_is_found_on_opening(tmp_path: Path, damage: object, message: str) -> None:
    write_reference(tmp_path / "x")
    damage(tmp_path / "x.idx", tmp_path / "x.bin")  # type: ignore[operator]
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


def test_hints_for_a_mistyped_prefix(tmp_path: Path) -> None:
    write_reference(tmp_path / "x_text_document")
    with pytest.raises(DataError, match=r"Did you mean .*x_text_document\?"):
        IndexedDataset(tmp_path / "x")
    with pytest.raises(DataError, match="without the extension"):
        IndexedDataset(tmp_path / "x_text_document.bin")
    with pytest.raises(DataError, match=r"Datasets in .*: x_text_document\."):
        IndexedDataset(tmp_path / "other")
    with pytest.raises(DataError, match=r"folder .* does not exist either"):
        IndexedDataset(tmp_path / "nowhere" / "x")


def test_digest_follows_content_not_time(tmp_path: Path) -> None:
    write_reference(tmp_path / "x")
    first = IndexedDataset(tmp_path / "x").digest()
    write_reference(tmp_path / "x")
    assert IndexedDataset(tmp_path / "x").digest() == first
    with IndexedWriter(tmp_path / "x", "uint16") as writer:
        writer.add_document([1])
    assert IndexedDataset(tmp_path / "x").digest() != first


def test_merge(tmp_path: Path) -> None:
    write_reference(tmp_path / "a")
    with IndexedWriter(tmp_path / "b", "uint16") as writer:
        writer.add_document([9, 8])
    merged = merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    index, tokens = reference_files([*DOCUMENTS, [[9, 8]]])
    assert (tmp_path / "c.idx").read_bytes() == index and (tmp_path / "c.bin").read_bytes() == tokens
    assert merged.num_documents == 4
    with IndexedWriter(tmp_path / "wide", "int32") as writer:
        writer.add_document([9, 8])
    with pytest.raises(DataError, match=r"wide has tokens of type int32.*same tokenizer"):
        merge_datasets([tmp_path / "a", tmp_path / "wide"], tmp_path / "d")
    (tmp_path / "c.bin").unlink()
    with pytest.raises(DataError, match=r"merged: \S*c\.bin, \S*none\.idx, \S*none\.bin do not exist"):
        merge_datasets([tmp_path / "a", tmp_path / "c", tmp_path / "none"], tmp_path / "d")
    with pytest.raises(DataError, match=r"c\.bin does not exist"):
        merge_datasets([tmp_path / "a", tmp_path / "c"], tmp_path / "d")
    with pytest.raises(DataError, match="Nothing to merge"):
        merge_datasets([], tmp_path / "d")
    with pytest.raises(DataError, match="both an input and the output"):
        merge_datasets([tmp_path / "a"], tmp_path / "a")


def test_merge_of_scattered_sequences(tmp_path: Path) -> None:
    """Offsets need not be in order when documents are single sequences."""
    index, tokens = reference_files([[[1, 2]], [[3, 4]]])
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(tokens)
    patch(tmp_path / "a.idx", 34 + 8, struct.pack("<qq", 4, 0))
    merged = merge_datasets([tmp_path / "a"], tmp_path / "c")
    assert [merged.get(i).tolist() for i in range(2)] == [[3, 4], [1, 2]]
