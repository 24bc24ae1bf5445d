"""Every step gives the documents of JSON lines whatever the format of its inputs; what cannot be read or written is named at first."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from petatron.base.errors import DataError
from petatron.cli.main import main
from petatron.data.curate.contamination.decontaminate import DecontaminateOptions, decontaminate_documents
from petatron.data.curate.dedup.dedup_documents import DedupOptions, dedup_documents
from petatron.data.curate.dedup.min_hash import MinHashOptions
from petatron.data.curate.files import step_files
from petatron.data.curate.files.step_files import StepFiles, check_step_files
from petatron.data.curate.filter.filter_documents import FilterOptions, filter_documents
from petatron.data.curate.source_stats import file_stats
from petatron.data.curate.split_documents import split_documents
from tests.unit.data.inputs.corpora import COMPRESSIONS, arrow, csv_text, jsonl, parquet, run, tar

_WORDS = "a museum by the river shows the tools of those who built its bridges long ago"
_TEXTS = (
    _WORDS,
    "short",
    f"{_WORDS} and boats",
    'with, a "quote"\nand a line',
    "日本 \u2028 語",
    _WORDS.upper(),
    "the end",
)
_ROWS = [{"id": f"doc-{number}", "text": text, "n": number} for number, text in enumerate(_TEXTS)]


def _webdataset(rows: Sequence[Mapping[str, Any]] = _ROWS) -> bytes:
    members: list[tuple[str, bytes]] = []
    for row in rows:
        meta = json.dumps({"n": row["n"]}).encode()
        members += [(f"{row['id']}.json", meta), (f"{row['id']}.txt", row["text"].encode())]
    return tar(members)


_FILES: dict[str, Callable[[], bytes]] = {
    "rows.parquet": lambda: parquet(_ROWS),
    "rows.arrow": lambda: arrow(_ROWS),
    "stream.arrow": lambda: arrow(_ROWS, stream=True),
    "rows.csv": lambda: csv_text(_ROWS),
    "rows.tsv.gz": lambda: gzip.compress(csv_text(_ROWS, delimiter="\t")),
    "rows.tar": _webdataset,
    "rows.tar.zst": lambda: COMPRESSIONS["zst"](_webdataset()),
    "rows.txt": lambda: "\n\n".join(_TEXTS).encode(),
}
_EVALUATION = "those who built its bridges long ago and boats"


def _dedup(files: StepFiles) -> Any:
    options = DedupOptions(near=MinHashOptions(threshold=0.6), exact_jaccard=True, report_pairs=f"{files.output}.pairs")
    return dedup_documents(files, options)


def _filter(files: StepFiles) -> Any:
    return filter_documents(files, FilterOptions(min_chars=8, save_dropped=True))


def _decontaminate(files: StepFiles) -> Any:
    path = Path(f"{files.output}.eval.jsonl")
    path.write_text(json.dumps({"q": _EVALUATION}))
    options = DecontaminateOptions(against=(str(path),), ngram=8, report=f"{files.output}.matches")
    return decontaminate_documents(files, options)


def _split(files: StepFiles) -> Any:
    return split_documents(files, held_out=0.5, seed=1)


_STEPS: dict[str, Callable[[StepFiles], Any]] = {
    "dedup": _dedup,
    "filter": _filter,
    "decontaminate": _decontaminate,
    "split": _split,
}


def _files(path: Path, name: str = "out", **options: Any) -> StepFiles:
    text = {"input_format": "text"} if path.suffix == ".txt" else {}
    return StepFiles(inputs=(str(path),), output=str(path.parent / name), block_bytes=200, **{**text, **options})


def _records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of an output by the folder that they are in."""
    records: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.rglob("*.jsonl*")):
        content = path.read_bytes()
        if path.suffix == ".zst":
            import zstandard

            content = zstandard.ZstdDecompressor().decompressobj().decompress(content)
        elif path.suffix == ".gz":
            content = gzip.decompress(content)
        records[str(path.parent.relative_to(folder))] = [json.loads(line) for line in content.splitlines()]
    return records


@pytest.mark.parametrize("step", _STEPS)
@pytest.mark.parametrize("name", _FILES)
def test_a_step_gives_the_documents_of_json_lines(tmp_path: Path, name: str, step: str) -> None:
    (tmp_path / name).write_bytes(_FILES[name]())
    (tmp_path / "rows.jsonl").write_bytes(jsonl(_ROWS))
    expected = _STEPS[step](_files(tmp_path / "rows.jsonl", "expected"))
    summary = _STEPS[step](_files(tmp_path / name))
    assert (summary.lines, summary.kept, summary.dropped) == (expected.lines, expected.kept, expected.dropped)
    given, wanted = _records(tmp_path / "out"), _records(tmp_path / "expected")
    assert given.keys() == wanted.keys() and sum(map(len, wanted.values())) > 2
    for part, records in wanted.items():
        keys = {"text", "dropped_by"} if name.endswith(".txt") else records[0].keys() if records else ()
        assert [{key: str(value) for key, value in record.items()} for record in given[part]] == [
            {key: str(value) for key, value in record.items() if key in keys} for record in records
        ]
    assert (tmp_path / "out.pairs").exists() == (step == "dedup")
    for report in ("pairs", "matches"):  # where rows have no lines of their own, places are numbers of rows
        if (path := tmp_path / f"out.{report}").exists() and not name.endswith((".csv", ".gz", ".txt")):
            ours, theirs = path.read_text(), (tmp_path / f"expected.{report}").read_text()
            theirs = theirs.replace("rows.jsonl", name).replace("expected.eval", "out.eval")
            assert ours == theirs.replace(f"out.eval.{name}", "out.eval.jsonl")


@pytest.mark.parametrize("name", _FILES)
def test_statistics_are_those_of_json_lines(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(_FILES[name]())
    (tmp_path / "rows.jsonl").write_bytes(jsonl(_ROWS))
    files = (_files(tmp_path / "rows.jsonl"), _files(tmp_path / name))
    first, second = (file_stats(check_step_files(part, step="x"), None, duplicates=True)[0].as_json() for part in files)
    assert {**first, "source": ""} == {**second, "source": ""} and first["duplicates"] == 1


def test_places_are_lines_of_the_original_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,"two\nlines"\n2,other\n3,"two\nlines"\n')
    (tmp_path / "b.txt").write_bytes(b"other\n\n\nlast\nline\n\nLast Line\n")
    for name, places in (("a.csv", (5, 2)), ("b.txt", (7, 4))):
        dedup_documents(_files(tmp_path / name, name[0]), DedupOptions(report_pairs=str(tmp_path / "pairs")))
        (pair,) = map(json.loads, (tmp_path / "pairs").read_text().splitlines())
        assert (pair["line"], pair["duplicate_of"]["line"], pair["kept"]["line"]) == (places[0], places[1], places[1])
        assert pair["file"] == str(tmp_path / name)


def test_values_that_json_does_not_have(tmp_path: Path) -> None:
    row = {"text": "a", "bytes": b"\xff\x00", "day": date(2024, 2, 29), "price": Decimal("1.50"), "none": None,
           "time": datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC), "nan": float("nan"), "nested": [{"x": float("inf"), "y": "z"}]}  # fmt: skip
    pa.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    _split(_files(tmp_path / "a.parquet"))
    (record,) = (record for records in _records(tmp_path / "out").values() for record in records)
    assert record == {
        "text": "a", "bytes": "/wA=", "day": "2024-02-29", "price": "1.50", "none": None, "time": "2024-01-02T03:04:05+00:00",
        "nan": None, "nested": [{"x": None, "y": "z"}],
    }  # fmt: skip


def test_a_value_that_cannot_be_read_is_a_malformed_row(tmp_path: Path) -> None:
    days = pa.array([0, 2**31 - 1, 1], pa.int32()).cast(pa.date32())
    table = pa.table({"text": ["first text", "second text", "third text"], "day": days})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet:2: the value of the column 'day' cannot be read"):
        _filter(_files(tmp_path / "a.parquet"))
    summary = _filter(_files(tmp_path / "a.parquet", on_error="skip"))
    assert (summary.num_kept, summary.dropped["malformed"]) == (2, 1)
    assert run(tmp_path, tmp_path / "a.parquet").documents == 3, "preprocess reads the text alone"


def test_records_nested_too_deeply_are_malformed(tmp_path: Path) -> None:
    deep = b'{"text": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}"
    (tmp_path / "a.tar").write_bytes(tar([("1.json", deep), ("2.txt", b"long enough")]))
    summary = _filter(_files(tmp_path / "a.tar", on_error="skip"))
    assert summary.lines == 2 and summary.num_kept == 1


@pytest.mark.parametrize("step", _STEPS)
@pytest.mark.parametrize(
    ("name", "content", "line", "reason"),
    [
        ("a.csv", b"text,n\nlong enough,1\nlong too,2,3\nand this,3\n", 3, "3 fields"),
        ("a.parquet", parquet([{"text": "long enough"}, {"text": None}, {"text": "and this"}]), 2, "neither a string"),
        ("a.tar", tar([("1.txt", b"long enough"), ("2.json", b"[]"), ("3.txt", b"and this")]), 2, "not an object"),
        ("a.jsonl", b'{"text": "long enough"}\n{"text": "a", "text": "b"}\n{"text": "and this"}', 2, "there twice"),
        ("a.txt", b"long enough\n\nx\xff\n\nand this", 3, "not UTF-8"),
        ("a.jsonl", b'{"text": "long enough"}\n{"text": "' + b"x" * 300 + b'"}\n{"text": "and this"}', 2, "is longer"),
        ("b.csv", b"text\nlong enough\n" + b"x" * 300 + b"\nand this\n", 3, "is longer"),
    ],
)
def test_malformed_rows_are_named_and_counted(
    tmp_path: Path, step: str, name: str, content: bytes, line: int, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}:{line}: .*{reason}.*--on-error skip"):
        _STEPS[step](_files(tmp_path / name, max_line_bytes=200))
    assert not (tmp_path / "out").exists()
    summary = _STEPS[step](_files(tmp_path / name, max_line_bytes=200, on_error="skip"))
    kind = "too long" if "longer" in reason else "malformed"
    assert (summary.lines, summary.num_kept, summary.dropped[kind]) == (3, 2, 1)
    assert summary.problems[0].startswith(f"{tmp_path / name}:{line}: ")
    texts = [record["text"] for records in _records(tmp_path / "out").values() for record in records]
    assert sorted(texts) == ["and this", "long enough"]


def test_folders_patterns_and_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "more").mkdir(parents=True)
    (corpus / "a.parquet").write_bytes(parquet(_ROWS))
    (corpus / "more" / "b.parquet").write_bytes(parquet(_ROWS[:2]))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(jsonl(_ROWS[:1])))
    (tmp_path / "notes").write_bytes(parquet(_ROWS[:1]))
    words = ("--input", str(corpus), str(tmp_path / "*.gz"), str(tmp_path / "notes"), "--output", str(tmp_path / "out"))
    assert main(["data", "split", *words, "--workers", "1"]) == 0
    names = sorted(
        str(path.relative_to(tmp_path / "out" / "train")) for path in (tmp_path / "out" / "train").rglob("*.*")
    )
    assert names == ["c.jsonl.gz", "corpus/a.jsonl", "corpus/more/b.jsonl", "notes.jsonl"]
    assert "read     11 lines of 4 files" in capsys.readouterr().out
    assert main(["data", "stats", str(corpus), str(tmp_path / "notes"), "--input-format", "parquet"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in printed[1:4]] == [
        str(corpus / "a.parquet"), str(corpus / "more" / "b.parquet"), str(tmp_path / "notes")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "part", "message"),
    [
        (("a.parquet", "a.jsonl"), "", "a.parquet and .*a.jsonl would both be written as a.jsonl; rename one"),
        (("a.csv", "a.tsv"), "", "would both be written as a.jsonl"),
        (
            ("summary.json", "b.jsonl"),
            "",
            "summary.json would be written as summary.json, which is the file of the counts",
        ),
        (("b.jsonl", "dropped/b.jsonl"), "dropped", "would both be written as dropped/b.jsonl"),
        (("b.jsonl", "b.jsonl"), "", "several inputs would be written as b.jsonl; name each file once"),
    ],
)
def test_names_that_collide_are_told_before_any_work(
    tmp_path: Path, names: Sequence[str], part: str, message: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    files = StepFiles(inputs=tuple(str(tmp_path / name) for name in names), output=str(tmp_path / "out"))
    with pytest.raises(DataError, match=message):
        filter_documents(files, FilterOptions(min_chars=1, save_dropped=bool(part)))
    assert not (tmp_path / "out").exists()


def test_the_output_of_an_earlier_step_in_the_input_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(_ROWS))
    files = StepFiles(inputs=(str(tmp_path),), output=str(tmp_path / "out"), overwrite=True)
    _split(files)
    with pytest.raises(DataError, match=r"--output .*out contains the input .*a\.jsonl"):
        _split(files)


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"input x+.* cannot be read: File name too long"):
        _split(StepFiles(inputs=("x" * 300,), output=str(tmp_path / "out")))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.csv", "rows.tar"])
@pytest.mark.parametrize("part", ["hashed", "compared", "written"])
def test_a_file_that_changes_in_any_pass_is_noticed(tmp_path: Path, name: str, part: str) -> None:
    path = tmp_path / name
    path.write_bytes(_FILES[name]())

    def change(progress: Any) -> None:
        if progress.part == part:
            status = os.stat(path)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    options = DedupOptions(near=MinHashOptions(), exact_jaccard=True)
    with pytest.raises(DataError, match=rf"{name} has changed while it was read"):
        dedup_documents(_files(path), options, change)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_replaced_between_the_passes_is_noticed_by_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a server that says nothing of its versions."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([{"text": _WORDS}, {"text": f"{_WORDS} x"}]))
    monkeypatch.setattr(step_files.InputFile, "check_unchanged", lambda self: None)

    def change(progress: Any) -> None:
        if progress.part == "hashed":
            path.write_bytes(path.read_bytes().replace(b'"text"', b'"t xt"', 1))

    with pytest.raises(DataError, match=r"a\.jsonl has changed while it was read"):
        dedup_documents(_files(path), DedupOptions(near=MinHashOptions(threshold=0.1), exact_jaccard=True), change)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.csv", "rows.tar"])
def test_evaluation_files_of_any_format(tmp_path: Path, name: str) -> None:
    rows = [{"id": "1", "text": "nothing", "n": 1}, {"id": "2", "text": _EVALUATION, "n": 2}]
    content = {"rows.parquet": parquet(rows), "rows.csv": csv_text(rows), "rows.tar": _webdataset(rows)}[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "a.jsonl").write_bytes(jsonl(_ROWS))
    report = tmp_path / "report"
    options = DecontaminateOptions(against=(str(tmp_path / name),), ngram=8, report=str(report))
    summary = decontaminate_documents(_files(tmp_path / "a.jsonl"), options)
    assert summary.dropped == {"contaminated": 1}
    match = json.loads(report.read_text().splitlines()[0])
    assert match["against"] == {"file": str(tmp_path / name), "line": 3 if name == "rows.csv" else 2}
    (tmp_path / name).write_bytes(b"text\na,b\n" if name == "rows.csv" else content[: len(content) // 3])
    with pytest.raises(DataError, match=name):
        decontaminate_documents(_files(tmp_path / "a.jsonl", "other"), options)


def test_columns_that_cannot_all_be_kept(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["text", "x", "x"])
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"The column 'x' is there twice in .*a\.arrow"):
        _split(_files(tmp_path / "a.arrow"))
    assert run(tmp_path, tmp_path / "a.arrow").documents == 1
    with pytest.raises(DataError, match="The column 'x' is there twice"):
        run(tmp_path, tmp_path / "a.arrow", json_keys=("x",))
    buffer = io.StringIO()
    csv.writer(buffer).writerow(["text", "a"])
    (tmp_path / "a.csv").write_bytes(buffer.getvalue().encode().replace(b"a", b"\xe4") + b"x,y\n")
    with pytest.raises(DataError, match=r"a\.csv:1: the names of the columns are not UTF-8"):
        _split(_files(tmp_path / "a.csv"))


def test_a_column_with_a_dot_in_its_name(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.Table.from_pylist([{"text": "x", "a.b": 1, "a": {"b": 2}}]), tmp_path / "a.parquet")
    _split(_files(tmp_path / "a.parquet"))
    (record,) = (record for records in _records(tmp_path / "out").values() for record in records)
    assert record == {"text": "x", "a.b": 1, "a": {"b": 2}}


def test_the_folder_of_a_step_is_an_input_of_the_next(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(_ROWS))
    kept = _filter(_files(tmp_path / "a.jsonl", "kept"))
    assert (tmp_path / "kept" / "dropped" / "a.jsonl").stat().st_size
    summary = _split(_files(tmp_path / "kept", "parts"))
    assert list(summary.inputs) == [str(tmp_path / "kept" / "a.jsonl")] and summary.lines == kept.num_kept
    assert run(tmp_path, tmp_path / "parts").documents == kept.num_kept
    (tmp_path / "kept" / "summary.json").write_text('{"text": "a document of this name"}\n')
    with pytest.raises(DataError, match=r"summary\.json would be written as summary\.json"):
        _dedup(_files(tmp_path / "kept", "other"))
