"""Every format gives the documents of JSON lines; what is damaged is named with its file and line."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import lzma
import tarfile
import tracemalloc
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from petatron.base.errors import DataError
from petatron.data.inputs import arrow_memory_limit, arrow_rows
from petatron.data.inputs.expand_inputs import expand_inputs
from petatron.data.inputs.input_formats import format_of_head
from petatron.data.inputs.input_slice import InputSlice, ReadOptions
from tests.unit.data.inputs.corpora import (
    BYTES,
    COMPRESSIONS,
    FILES,
    ROWS,
    TEXTS,
    arrow,
    csv_text,
    documents,
    jsonl,
    parquet,
    run,
    tar,
)


@pytest.mark.parametrize("name", FILES)
def test_a_format_gives_the_documents_of_json_lines(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name]())
    report = run(tmp_path, tmp_path / name, block_bytes=100)
    assert documents(tmp_path / "out_text_document") == list(TEXTS)
    assert (report.documents, report.malformed) == (len(TEXTS), 0)


@pytest.mark.parametrize("name", ["corpus.parquet", "corpus.arrow", "corpus.tar", "corpus.jsonl.xz"])
def test_a_name_without_an_ending_is_told_by_its_content(tmp_path: Path, name: str) -> None:
    (tmp_path / "shard-0").write_bytes(FILES[name]())
    assert run(tmp_path, tmp_path / "shard-0").documents == len(TEXTS)


def test_json_lines_that_are_none_say_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(parquet())
    with pytest.raises(DataError, match=r"x\.jsonl is not JSON lines: read it with --input-format parquet"):
        run(tmp_path, tmp_path / "x.jsonl")
    assert run(tmp_path, tmp_path / "x.jsonl", input_format="parquet").documents == len(TEXTS)
    assert format_of_head(arrow(stream=True)) == "arrow"


@pytest.mark.parametrize("name", ["corpus.parquet", "corpus.arrow", "corpus.csv", "corpus.tar"])
def test_the_limit_of_documents_counts_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name]())
    run(tmp_path, tmp_path / name, tmp_path / name, max_documents=7)
    assert documents(tmp_path / "out_text_document") == [*TEXTS, *TEXTS[:2]]


# Damage


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("corpus.jsonl", "corpus.csv", "corpus.tsv")])
def test_a_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    content = FILES[name]()
    used = len(content.rstrip(b"\x00"))  # a tar ends with blocks of zeros
    for cut in (3 * used // 4, used // 2):
        (tmp_path / name).write_bytes(content[:cut])
        with pytest.raises(DataError, match=rf"{name}(:| cannot| is)") as caught:
            run(tmp_path, tmp_path / name)
        assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_streams_that_follow_one_another(tmp_path: Path, name: str) -> None:
    pack = COMPRESSIONS[name]
    padding = bytes(8) if name == "xz" else b""
    (tmp_path / "x").write_bytes(pack(jsonl(ROWS[:2])) + padding + pack(jsonl(ROWS[2:])) + padding)
    run(tmp_path, tmp_path / "x")
    assert documents(tmp_path / "out_text_document") == list(TEXTS)


@pytest.mark.parametrize("name", ["bz2", "xz"])
def test_what_follows_a_stream_is_damage(tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_bytes(COMPRESSIONS[name](jsonl()) + b"garbage")
    with pytest.raises(DataError, match="x cannot be read beyond line"):
        run(tmp_path, tmp_path / "x")


def test_a_huge_dictionary_needs_consent(tmp_path: Path) -> None:
    packed = bytearray(lzma.compress(jsonl()))
    # After the header of the stream, that of a block: its size, filters with the size of the dictionary in one byte, a checksum.
    block, size = 12, (packed[12] + 1) * 4
    packed[packed.index(b"\x21\x01") + 2] = 40
    checksum = zlib.crc32(bytes(packed[block : block + size - 4]))
    packed[block + size - 4 : block + size] = checksum.to_bytes(4, "little")
    (tmp_path / "x").write_bytes(packed)
    with pytest.raises(DataError, match="dictionary is very large, which --max-line-bytes"):
        run(tmp_path, tmp_path / "x")


def test_a_column_that_is_missing_or_no_text(tmp_path: Path) -> None:
    for content, name in ((parquet(), "x.parquet"), (arrow(), "x.arrow")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"column 'body' does not exist in .*{name}. Its text columns: id, text"):
            run(tmp_path, tmp_path / name, json_keys=("body",))
        with pytest.raises(DataError, match=rf"column 'n' is not text in .*{name}"):
            run(tmp_path, tmp_path / name, json_keys=("n",))
    (tmp_path / "x.csv").write_bytes(csv_text())
    with pytest.raises(DataError, match=r"x\.csv has no column 'body'. Its columns: id, text, n"):
        run(tmp_path, tmp_path / "x.csv", json_keys=("body",))


def test_rows_without_a_text_are_malformed(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": None}, {"text": "b"}]
    (tmp_path / "x.parquet").write_bytes(parquet(rows))
    with pytest.raises(DataError, match=r"x\.parquet:2: key 'text' holds neither a string"):
        run(tmp_path, tmp_path / "x.parquet")
    assert run(tmp_path, tmp_path / "x.parquet", on_error="skip").problems[0].startswith(f"{tmp_path}/x.parquet:2: ")
    assert documents(tmp_path / "out_text_document") == ["a", "b"]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_columns_of_lists_are_sentences(tmp_path: Path, form: str) -> None:
    rows = [{"text": ["one", "two"]}, {"text": ["three"]}]
    (tmp_path / f"x.{form}").write_bytes(parquet(rows) if form == "parquet" else arrow(rows))
    report = run(tmp_path, tmp_path / f"x.{form}")
    assert (report.documents, report.sequences) == (2, 3)


def test_bytes_of_a_column_that_are_no_text(tmp_path: Path) -> None:
    column = pa.array([b"good", b"caf\xe9", b"fine"]).cast(pa.binary()).view(pa.string())
    buffer = io.BytesIO()
    pa.parquet.write_table(pa.table({"text": column}), buffer)
    (tmp_path / "x.parquet").write_bytes(buffer.getvalue())
    report = run(tmp_path, tmp_path / "x.parquet", on_error="skip")
    assert report.problems == [f"{tmp_path}/x.parquet:2: not UTF-8 text (unexpected end of data)"]
    assert documents(tmp_path / "out_text_document") == ["good", "fine"]


def test_offsets_of_an_arrow_file_are_not_believed(tmp_path: Path) -> None:
    content = bytearray(arrow([{"text": "a" * 1000}, {"text": "b"}]))
    place = bytes(content).index(b"\xe8\x03\x00\x00\xe9\x03\x00\x00")
    content[place : place + 4] = (1 << 30).to_bytes(4, "little")
    (tmp_path / "x.arrow").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.arrow cannot be understood \(ArrowInvalid"):
        run(tmp_path, tmp_path / "x.arrow")


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b'text,n\n"a\nb",1\nc,2,3\nd,4\n', 4, "3 fields, and the first line names 2"),
        (b'text,n\na,1\n"b"x,2\nc,3\n', 3, "not CSV"),
        (b"text,n\na,1\ncaf\xe9,2\nc,3\n", 3, "not UTF-8 text"),
        (b'text,n\na,1\nb,2\n"c,3\n', 4, "not CSV .unexpected end of data"),
    ],
)
def test_a_malformed_row_of_csv_is_named_by_its_line(tmp_path: Path, content: bytes, line: int, reason: str) -> None:
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(DataError, match=rf"x\.csv:{line}: {reason}"):
        run(tmp_path, tmp_path / "x.csv")
    assert run(tmp_path, tmp_path / "x.csv", on_error="skip").malformed == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"text,text\na,b\n", "the column 'text' is there twice"), (b'"text\na\n', "does not name columns")],
)
def test_a_csv_without_names(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(DataError, match=rf"x\.csv:1: .*{message}"):
        run(tmp_path, tmp_path / "x.csv")


def test_an_unclosed_quote_ends_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b'text\ngood\n"open\n' + b"line\n" * 100)
    with pytest.raises(DataError, match=r"x\.csv:3: the row is longer than 50 bytes \(a quote without its end\?\)"):
        run(tmp_path, tmp_path / "x.csv", max_line_bytes=50)


def test_windows_line_ends(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"text\r\none\r\ntwo\r\n")
    run(tmp_path, tmp_path / "x.csv")
    assert documents(tmp_path / "out_text_document") == ["one", "two"]
    (tmp_path / "x.txt").write_bytes(b"one\r\n\r\ntwo\r\nlines\r\n")
    run(tmp_path, tmp_path / "x.txt", input_format="text")
    assert documents(tmp_path / "out_text_document") == ["one", "two\r\nlines"]


# WebDataset


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_samples_of_a_tar(tmp_path: Path, form: int) -> None:
    long_name = "folder/" * 13 + "b" * 40 if form != tarfile.USTAR_FORMAT else "folder/b"
    members = [
        ("a.json", b'{"text": "from json", "title": "A"}'),
        ("a.png", bytes(700)),
        (f"{long_name}.txt", b"long name"),
        ("c.json", b'{"text": "hidden by the text", "title": "C"}'),
        ("c.txt", b"text"),
        ("only.png", bytes(3)),
    ]
    (tmp_path / "x.tar").write_bytes(tar(members, form))
    run(tmp_path, tmp_path / "x.tar")
    assert documents(tmp_path / "out_text_document") == ["from json", "long name", "text"]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("a.txt", b"good"), ("b.json", b"[1]")], "b: a JSON list, not an object"),
        ([("a.txt", b"good"), ("b.json", b"{")], "b: Expecting property name"),
        ([("a.txt", b"good"), ("b.txt", b"\xff")], "b: 'utf-8' codec"),
        ([("a.txt", b"good"), ("b.json", b"{}")], "no key 'text'"),
        ([("a.txt", b"good"), ("b.txt", b"x" * 2000)], "a file of b is longer than a line may be"),
    ],
)
def test_a_malformed_sample_is_named_by_its_number(
    tmp_path: Path, members: list[tuple[str, bytes]], reason: str
) -> None:
    (tmp_path / "x.tar").write_bytes(tar(members))
    with pytest.raises(DataError, match=rf"x\.tar:2: .*{reason}"):
        run(tmp_path, tmp_path / "x.tar", max_line_bytes=1000)


@pytest.mark.parametrize("size", [1 << 40, -1])
def test_sizes_in_a_tar_are_not_believed(tmp_path: Path, size: int) -> None:
    for kind in (b"0", b"x", b"L"):
        info = tarfile.TarInfo("a.txt")
        info.type = kind
        info.size = size if size > 0 else 5
        header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
        if size < 0:
            header[124:136] = b"\xff" * 12
            header[148:156] = b"%06o\x00 " % (sum(header[:148]) + 8 * 32 + sum(header[156:]))
        (tmp_path / "x.tar").write_bytes(bytes(header) + bytes(2000))
        with pytest.raises(DataError, match=r"x\.tar cannot be read beyond sample 1: (it|the name)"):
            run(tmp_path, tmp_path / "x.tar")


# Lines


def test_a_key_that_is_there_twice_is_malformed(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(
        b'{"text": "a", "text": "b"}\n{"text": "c", "n": 1, "n": 2, "meta": {"text": 1, "text": 2}}\n'
    )
    with pytest.raises(DataError, match=r"x\.jsonl:1: the key 'text' is there twice"):
        run(tmp_path, tmp_path / "x.jsonl")
    assert run(tmp_path, tmp_path / "x.jsonl", on_error="skip").malformed == 1
    assert documents(tmp_path / "out_text_document") == ["c"]


@pytest.mark.parametrize("limit", [40, 60, 100])
@pytest.mark.parametrize("block_bytes", [1, 7, 64, 10_000])
def test_long_lines_are_skipped_with_their_numbers(tmp_path: Path, limit: int, block_bytes: int) -> None:
    texts = ["a", "b" * 50, "c", "d" * 200, "e" * 50, "f"]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    report = run(tmp_path, tmp_path / "x.jsonl", max_line_bytes=limit, block_bytes=block_bytes, on_error="skip")
    long = [number for number, line in enumerate(lines, 1) if len(line) > limit]
    reason = f"the line is longer than {limit} bytes"
    assert report.problems == [f"{tmp_path}/x.jsonl:{number}: {reason}" for number in long]
    assert documents(tmp_path / "out_text_document") == [text for text, line in zip(texts, lines) if len(line) <= limit]


def test_long_documents_of_text_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("one\n\n" + "long line " * 20 + "\nits end\n\ntwo\n\n" + "many\n" * 40 + "\nlast")
    report = run(tmp_path, tmp_path / "x.txt", input_format="text", max_line_bytes=100, on_error="skip")
    assert documents(tmp_path / "out_text_document") == ["one", "two", "last"]
    assert [problem.partition(": ")[0] for problem in report.problems] == [f"{tmp_path}/x.txt:{n}" for n in (3, 8)]


# What is not installed


@pytest.mark.parametrize("name", ["corpus.parquet", "corpus.arrow"])
def test_a_missing_library_names_the_extra(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_bytes(FILES[name]())
    real = importlib.import_module

    def blocked(module: str) -> object:
        if module.startswith("pyarrow"):
            raise ImportError(module)
        return real(module)

    monkeypatch.setattr(arrow_rows.importlib, "import_module", blocked)
    with pytest.raises(DataError, match=r"pip install 'petatron\[data\]'"):
        run(tmp_path, tmp_path / name)


def test_gzip_that_holds_no_newline_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(jsonl().rstrip()))
    assert run(tmp_path, tmp_path / "x.gz").documents == len(TEXTS)


# Little that stands for much


def _one_value_in_all_rows(path: Path, value: str, rows: int) -> None:
    """Writes the value once, into a dictionary."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))
    table = pa.table({"text": column})
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 30, store_schema=False)
    else:
        with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_value_that_is_in_every_row_is_in_memory_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(arrow_rows, "_BATCH_BYTES", 4 << 20)
    _one_value_in_all_rows(tmp_path / name, "a" * (1 << 20), 200)
    assert (tmp_path / name).stat().st_size < 4000
    (file,) = expand_inputs([str(tmp_path / name)], "auto")
    before, peak, numbers = pa.total_allocated_bytes(), 0, []
    for block in InputSlice(file, ReadOptions(("text",), max_line_bytes=1 << 10)).blocks():
        numbers += [refused.line for refused in block.refused]
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert numbers == list(range(1, 201))
    assert peak < 32 << 20, "200 MiB, if all rows were there at once"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_value_that_is_in_every_row_is_read(tmp_path: Path, name: str) -> None:
    _one_value_in_all_rows(tmp_path / name, "abc", 600)
    assert run(tmp_path, tmp_path / name).documents == 600


def test_a_page_whose_size_is_hidden_is_read_row_by_row() -> None:
    assert arrow_rows._first_fields(bytes([0x15, 4, 0x15, 0x90, 3])) == (2, 200)
    assert arrow_rows._first_fields(bytes([0x05, 2, 4, 0x15, 8])) is None


def test_a_length_in_a_file_takes_no_memory(tmp_path: Path) -> None:
    """A message of an arrow stream that says that it has 2 GB."""
    content = bytearray(arrow(stream=True))
    content[4:8] = (0x7FFFFFFF).to_bytes(4, "little")
    (tmp_path / "a.arrow").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"a\.arrow"):
            run(tmp_path, tmp_path / "a.arrow")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_huge_line_is_counted_in_bounded_memory(tmp_path: Path, name: str) -> None:
    """Of 128 MiB here, which a few kilobytes stand for; zstd makes up to 32 MiB at once."""
    long = b'{"text": "' + b"a" * (128 << 20) + b'"}\n'
    (tmp_path / "a").write_bytes(COMPRESSIONS[name](b'{"text": "one"}\n' + long + b'{"text": "last"}\n'))
    (file,) = expand_inputs([str(tmp_path / "a")], "jsonl")
    tracemalloc.start()
    try:
        blocks = list(InputSlice(file, ReadOptions(("text",), max_line_bytes=1 << 20)).blocks())
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()
    assert [(refused.line, refused.kind) for block in blocks for refused in block.refused] == [(2, "too long")]
    assert b"".join(block.data for block in blocks) == b'{"text": "one"}\n{"text": "last"}\n'


@pytest.mark.parametrize("form", [None, *COMPRESSIONS])
def test_odd_lines_are_the_same_under_every_compression(tmp_path: Path, form: str | None) -> None:
    lines = [
        b'{"text": "one"}\r',
        b"",
        b'{"text": "a", "text": "b"}',
        b'{"text": "\\ud800"}',
        b"\xff",
        b'{"text": "last"}\r',
    ]
    content = b"\n".join(lines)
    (tmp_path / "a.jsonl").write_bytes(COMPRESSIONS[form](content) if form else content)
    report = run(tmp_path, tmp_path / "a.jsonl", on_error="skip", tokenizer=BYTES)
    assert documents(tmp_path / "out_text_document") == ["one", "last"]
    assert (report.documents, report.malformed) == (2, 3)
    for line, problem in zip((3, 4, 5), report.problems):
        assert problem.startswith(f"{tmp_path / 'a.jsonl'}:{line}: ")


@pytest.mark.parametrize("name", [*COMPRESSIONS, "jsonl", "csv", "tar", "parquet", "arrow"])
def test_an_empty_file_is_named_or_has_no_documents(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(jsonl())
    (tmp_path / f"a.{name}").write_bytes(COMPRESSIONS[name](b"") if name in COMPRESSIONS else b"")
    inputs = (tmp_path / "rows.jsonl", tmp_path / f"a.{name}")
    if name in ("parquet", "arrow", "tar"):
        with pytest.raises(DataError, match=rf"a\.{name}"):
            run(tmp_path, *inputs)
    else:
        assert run(tmp_path, *inputs).documents == len(TEXTS)


def test_a_key_that_is_there_twice_in_a_sample(tmp_path: Path) -> None:
    twice = b'{"text": "a", "text": "b", "x": 1, "x": 2}'
    (tmp_path / "a.tar").write_bytes(tar([("1.json", twice), ("2.json", twice), ("2.txt", b"its own")]))
    with pytest.raises(DataError, match=r"a\.tar:1: 1: the key 'text' is there twice"):
        run(tmp_path, tmp_path / "a.tar")
    assert run(tmp_path, tmp_path / "a.tar", on_error="skip").documents == 1
    assert documents(tmp_path / "out_text_document") == ["its own"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dictionary", [False, True])
def test_a_batch_that_decompresses_to_gigabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, dictionary: bool
) -> None:
    texts = pa.array(["a" * 1000] * 1000)
    column = pa.array(["a" * 1_000_000]).dictionary_encode() if dictionary else texts
    table = pa.table({"text": column})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(tmp_path / "a.arrow", table.schema, options=options) as writer:
        writer.write_table(table)
    assert run(tmp_path, tmp_path / "a.arrow").documents == len(column)
    monkeypatch.setattr(arrow_memory_limit, "MAX_BATCH_BYTES", 500_000)
    with pytest.raises(DataError, match=r"a\.arrow .*a batch has more than 500,000 bytes when it is decompressed"):
        run(tmp_path, tmp_path / "a.arrow")


def test_names_in_a_tar_are_printed_without_control_characters(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar([("\x1b[31m.json", b"[]")]))
    with pytest.raises(DataError) as caught:
        run(tmp_path, tmp_path / "a.tar")
    assert "\x1b" not in str(caught.value)
