"""A job in parts gives the bytes of one part, wherever it is cut and however often it is interrupted."""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from petatron.base.errors import DataError
from petatron.data import preprocess as module
from petatron.data.document_provenance import ProvenanceTable
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.inputs.expand_inputs import expand_inputs
from petatron.data.inputs.line_blocks import line_start
from petatron.data.preprocess_parts.input_cuts import cut_inputs, part_slices
from petatron.data.preprocess_parts.parts_folder import PartsFolder
from tests.unit.data.inputs.corpora import COMPRESSIONS, documents, jsonl, parquet, run

ENDINGS = ("bin", "idx", "sources")
ROWS = [{"id": f"doc-{number}", "text": f"text {number} " * (number % 7)} for number in range(200)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Every line of it is read: some are blank, empty, malformed."""
    random = Random(0)
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [json.dumps(row) for row in ROWS]
    for bad in ("", "   ", "not json", '{"text": 3}', '{"text": ""}', '{"other": 1}'):
        for _ in range(5):
            lines.insert(random.randrange(len(lines)), bad)
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "b.jsonl.gz").write_bytes(COMPRESSIONS["gz"](jsonl(ROWS[:40])))
    for name in ("c", "d", "e"):
        (folder / f"{name}.jsonl").write_bytes(jsonl(ROWS[:7]))
    return folder


def contents(folder: Path, name: str = "out", key: str = "text") -> dict[str, bytes]:
    return {end: (folder / f"{name}_{key}_document.{end}").read_bytes() for end in ENDINGS}


def test_parts_do_not_change_the_output(corpus: Path, tmp_path: Path) -> None:
    inputs = [corpus, corpus / "a.jsonl"]
    whole = run(tmp_path, *inputs, on_error="skip")
    expected = contents(tmp_path)
    assert whole.parts == 1
    for part_bytes in (300, 1000, 5000):
        report = run(tmp_path, *inputs, name="parts", on_error="skip", part_bytes=part_bytes)
        assert contents(tmp_path, "parts") == expected, part_bytes
        assert report.parts > 2 and report.problems == whole.problems
        for name in ("lines", "documents", "without_text", "blank", "malformed", "too_long", "empty", "tokens"):
            assert getattr(report, name) == getattr(whole, name), name
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".parts") == []


def test_every_line_is_accounted_for(corpus: Path, tmp_path: Path) -> None:
    report = run(tmp_path, corpus / "a.jsonl", on_error="skip", max_line_bytes=60, part_bytes=2000)
    lines = (corpus / "a.jsonl").read_text().splitlines()
    assert report.lines == len(lines)
    assert report.blank == sum(not line.strip() for line in lines) == 10
    assert report.malformed == 15 and report.too_long == sum(len(line) > 60 for line in lines) > 10
    assert report.without_text == 5 + sum(row["text"] == "" for row in ROWS)
    accounted = report.documents + report.without_text + report.blank + report.malformed + report.too_long
    assert accounted == report.lines


def test_text_is_cut_between_paragraphs(tmp_path: Path) -> None:
    random = Random(1)
    paragraphs = ["\n".join("word " * random.randrange(1, 9) for _ in range(random.randrange(1, 4))) for _ in range(60)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs) + "\n\n\n")
    run(tmp_path, tmp_path / "book.txt", input_format="text")
    expected = contents(tmp_path)
    for part_bytes in (50, 301):
        report = run(tmp_path, tmp_path / "book.txt", name="parts", input_format="text", part_bytes=part_bytes)
        assert contents(tmp_path, "parts") == expected and report.parts > 5


def test_parquet_is_cut_between_row_groups(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(parquet(ROWS, rows_per_group=10))
    run(tmp_path, tmp_path / "x.parquet")
    expected = contents(tmp_path)
    report = run(tmp_path, tmp_path / "x.parquet", name="parts", part_bytes=1000)
    assert contents(tmp_path, "parts") == expected and report.parts > 3


@pytest.mark.parametrize("name", ["x.jsonl", "x.txt"])
def test_a_problem_in_a_later_part_has_its_line_in_the_file(tmp_path: Path, name: str) -> None:
    if name == "x.jsonl":
        (tmp_path / name).write_bytes(jsonl(ROWS) + b"oops\n" + jsonl(ROWS[:20]))
    else:
        (tmp_path / name).write_bytes(b"fine\n\n" * 100 + b"caf\xe9\n\n" + b"fine\n\n" * 100)
    input_format = "jsonl" if name == "x.jsonl" else "text"
    with pytest.raises(DataError, match=rf"{name}:201: not"):
        run(tmp_path, tmp_path / name, part_bytes=400, input_format=input_format)
    report = run(tmp_path, tmp_path / name, part_bytes=400, on_error="skip", input_format=input_format)
    assert [problem.partition(": ")[0] for problem in report.problems] == [f"{tmp_path}/{name}:201"]


def test_a_long_line_in_a_later_part_has_its_line_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(jsonl(ROWS) + jsonl([{"text": "x" * 500}]) + jsonl(ROWS))
    with pytest.raises(DataError, match=r"x\.jsonl:201: the line is longer than 300 bytes"):
        run(tmp_path, tmp_path / "x.jsonl", part_bytes=1000, max_line_bytes=300)


def test_a_line_starts_where_the_offset_says() -> None:
    import io

    random = Random(2)
    for _ in range(200):
        text = bytes(random.choice(b"ab\n ") for _ in range(random.randrange(1, 40)))
        starts = [0] + [place + 1 for place, byte in enumerate(text) if byte == ord("\n")]
        lines = text.split(b"\n")
        for offset in range(len(text) + 1):
            expected = next((start for start in starts if start >= offset), len(text))
            assert line_start(io.BytesIO(text), offset) == min(expected, len(text)), (text, offset)
            blank = [start for start, line in zip(starts[1:], lines) if not line.strip()]
            after = 0 if not offset else next((start for start in blank if start > expected), len(text))
            assert line_start(io.BytesIO(text), offset, after_blank_line=True) == after, (text, offset)


def test_slices_cover_every_file_once(corpus: Path) -> None:
    files = expand_inputs([str(corpus), str(corpus / "a.jsonl")], "auto")
    for part_bytes in (50, 400, 700, 10**6):
        cuts = cut_inputs(files, part_bytes)
        assert all((a.file, a.offset) < (b.file, b.offset) and a.position <= b.position for a, b in pairwise(cuts))
        slices = [item for part in range(len(cuts)) for item in part_slices(cuts, part, len(files))]
        for number in range(len(files)):
            own_slices = [item for item in slices if item.file == number]
            assert own_slices[0].start == 0 and own_slices[-1].end is None
            assert all(a.end == b.start for a, b in pairwise(own_slices))


# Interruptions


class _Interrupted(BaseException):
    pass


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends when it encodes its next block; nothing that it has begun is removed."""
    real, calls = module._encode_block, iter(range(count))

    def encode(*arguments: object) -> object:
        if next(calls, None) is None:
            raise _Interrupted
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_encode_block", encode)


def test_an_interrupted_job_continues(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, corpus, on_error="skip")
    expected = contents(tmp_path)
    options = {"on_error": "skip", "part_bytes": 2000, "name": "parts"}
    with monkeypatch.context() as patch, pytest.raises(_Interrupted):
        interrupt_after(3, patch)
        run(tmp_path, corpus, **options)
    folder = tmp_path / "parts.parts"
    assert {path.name for path in folder.iterdir() if path.suffix == ".json"} == {
        "job.json", "00000.json", "00001.json", "00002.json",
    }  # fmt: skip
    assert not list(tmp_path.glob("parts_*"))
    encoded: list[bytes] = []
    real = module._encode_block
    monkeypatch.setattr(
        module, "_encode_block", lambda options, block: encoded.append(block.data) or real(options, block)
    )
    with caplog.at_level(logging.INFO):
        report = run(tmp_path, corpus, **options | {"overwrite": False, "part_bytes": 50, "workers": 1})
    assert report.resumed_parts == 3 and report.resumed_tokens > 0
    assert not any(b'"doc-3"' in block for block in encoded[:-4])  # a.jsonl begins in a part that is finished
    assert "3 of" in caplog.text and "parts are finished already" in caplog.text
    assert contents(tmp_path, "parts") == expected and not folder.exists()


def test_a_malformed_line_keeps_what_is_finished(corpus: Path, tmp_path: Path) -> None:
    (corpus / "a.jsonl").write_bytes(jsonl(ROWS))
    (corpus / "z.jsonl").write_bytes(b"oops\n")
    with pytest.raises(DataError, match=r"z\.jsonl:1: not JSON.* keeps the parts that are finished \(\d of \d\): run"):
        run(tmp_path, corpus, part_bytes=3000)
    report = run(tmp_path, corpus, part_bytes=3000, on_error="skip")
    assert report.resumed_parts == report.parts - 1 and report.malformed == 1


def break_job(folder: Path, corpus: Path) -> None:
    """Leaves a job whose last part is not done."""
    (corpus / "z.jsonl").write_bytes(b"oops\n")
    with pytest.raises(DataError, match="keeps the parts"):
        run(folder, corpus, part_bytes=2000, on_error="fail")


@pytest.fixture
def good_corpus(corpus: Path) -> Path:
    (corpus / "a.jsonl").write_bytes(jsonl(ROWS))
    return corpus


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"append_eod": True}, "append_eod was false and is true"),
        ({"json_keys": ("text", "id")}, r'json_keys was \["text"\] and is \["text", "id"\]'),
        ({"document_sources": False}, "document_sources was true and is false"),
        ({"max_documents": 9}, "max_documents was null and is 9"),
    ],
)
def test_another_job_is_refused(good_corpus: Path, tmp_path: Path, options: dict[str, object], message: str) -> None:
    break_job(tmp_path, good_corpus)
    before = sorted(path.name for path in (tmp_path / "out.parts").iterdir())
    with pytest.raises(DataError, match=rf"out\.parts has parts of another job: {message}\..*--overwrite"):
        run(tmp_path, good_corpus, overwrite=False, on_error="skip", **options)
    assert sorted(path.name for path in (tmp_path / "out.parts").iterdir()) == before
    assert run(tmp_path, good_corpus, on_error="skip", **options).resumed_parts == 0


def test_other_inputs_are_refused(good_corpus: Path, tmp_path: Path) -> None:
    break_job(tmp_path, good_corpus)
    (good_corpus / "z.jsonl").write_bytes(jsonl())
    with pytest.raises(DataError, match=r"another job: inputs that have changed: \S+z\.jsonl\. "):
        run(tmp_path, good_corpus, overwrite=False)
    (good_corpus / "z.jsonl").rename(good_corpus / "y.jsonl")
    with pytest.raises(DataError, match=r"new inputs: \S+y\.jsonl; inputs that are no longer named: \S+z\.jsonl\. "):
        run(tmp_path, good_corpus, overwrite=False)


def test_other_order_is_refused(good_corpus: Path, tmp_path: Path) -> None:
    (good_corpus / "z.jsonl").write_bytes(b"oops\n")
    names = [good_corpus / name for name in ("c.jsonl", "d.jsonl", "z.jsonl")]
    with pytest.raises(DataError, match="keeps the parts"):
        run(tmp_path, *names, part_bytes=100)
    with pytest.raises(DataError, match="the inputs have another order"):
        run(tmp_path, names[1], names[0], names[2], overwrite=False)


def test_parts_stand_only_with_what_they_were_made_with(good_corpus: Path, tmp_path: Path) -> None:
    (good_corpus / "a.jsonl").write_bytes(jsonl([{"text": "x" * 300}]) + b"oops\n" + jsonl(ROWS))
    (good_corpus / "z.jsonl").write_bytes(b"\xff" * 3)
    (good_corpus / "zz.jsonl.gz").write_bytes(b"\x1f\x8b damaged")
    options = {"part_bytes": 2000, "overwrite": False}
    with pytest.raises(DataError, match=r"zz\.jsonl\.gz cannot be read"):
        run(tmp_path, good_corpus, **options, on_error="skip", max_line_bytes=250)
    folder, finished = PartsFolder(str(tmp_path / "out")), {"skips": True, "max_line_bytes": 250}
    job = folder.read_job()
    assert len(folder.finished(job, **finished)) == job.num_parts - 1
    assert 0 not in folder.finished(job, **finished | {"max_line_bytes": 500})  # it has left out a long line
    assert 0 not in folder.finished(job, **finished | {"skips": False})
    assert 1 in folder.finished(job, skips=False, max_line_bytes=500)
    assert 1 not in folder.finished(job, skips=True, max_line_bytes=200)
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        run(tmp_path, good_corpus, **options, max_line_bytes=500)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a report that is cut": lambda folder: (folder / "00001.json").write_text("{"),
    "a report of another job": lambda folder: (folder / "00001.json").write_text(
        (folder / "00001.json").read_text().replace('"job": "', '"job": "x')
    ),
    "a report without numbers": lambda folder: (folder / "00001.json").write_text(
        json.dumps(json.loads((folder / "00001.json").read_text()) | {"first_lines": "many"})
    ),
    "a list": lambda folder: (folder / "00001.json").write_text("[]"),
    "a file that is gone": lambda folder: (folder / "00001_text_document.bin").unlink(),
    "a file that is cut": lambda folder: os.truncate(folder / "00001_text_document.idx", 30),
    "a file of an earlier attempt": lambda folder: (folder / ".00001_text_document.bin.123.tmp").write_text("x"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_part_is_done_again(good_corpus: Path, tmp_path: Path, name: str) -> None:
    run(tmp_path, good_corpus, name="whole")
    break_job(tmp_path, good_corpus)
    DAMAGE[name](tmp_path / "out.parts")
    (good_corpus / "z.jsonl").unlink()
    expected = contents(tmp_path, "whole")
    (good_corpus / "z.jsonl").write_bytes(b"oops\n")
    os.utime(good_corpus / "z.jsonl", ns=(0, int(PartsFolder(str(tmp_path / "out")).read_job().files[-1].version)))
    report = run(tmp_path, good_corpus, on_error="skip", overwrite=False)
    assert report.resumed_parts == report.parts - (1 if "earlier" in name else 2)
    got = contents(tmp_path)
    assert {end: got[end] for end in ("bin", "idx")} == {end: expected[end] for end in ("bin", "idx")}
    assert not (tmp_path / "out.parts").exists()


def test_two_processes_do_not_share_a_folder(good_corpus: Path, tmp_path: Path) -> None:
    with PartsFolder(str(tmp_path / "out")).locked(), pytest.raises(DataError, match="Another process writes to"):
        run(tmp_path, good_corpus)
    assert not (tmp_path / "out.parts").exists()


def test_a_folder_that_is_no_job_is_left_alone(good_corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out.parts").mkdir()
    (tmp_path / "out.parts" / "mine.txt").write_text("x")
    with pytest.raises(DataError, match=r"out\.parts is where the parts go, and has other files: mine\.txt"):
        run(tmp_path, good_corpus)
    assert (tmp_path / "out.parts" / "mine.txt").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "link.parts").symlink_to(tmp_path / "other")
    with pytest.raises(DataError, match="symbolic link"):
        run(tmp_path, good_corpus, name="link")


def test_a_job_that_cannot_be_read(good_corpus: Path, tmp_path: Path) -> None:
    break_job(tmp_path, good_corpus)
    (tmp_path / "out.parts" / "job.json").write_text('{"format": 99, "inputs": [], "cuts": [[0, 0, 0]]}')
    with pytest.raises(DataError, match=r"job\.json cannot be understood \(ValueError: it is of another version"):
        run(tmp_path, good_corpus)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("inputs", [[["x"], "jsonl", 1, ""]], "its inputs are no files"),
        ("inputs", [["x", "jsonl", -1, ""]], "its inputs are no files"),
        ("inputs", [["x", "jsonl", None, 2.5]], "its inputs are no files"),
        ("cuts", [[0, 0, 0], [99, 0, 0]], "its inputs are no files"),
        ("cuts", [[1, 0, 0]], "its parts do not follow one another"),
        ("cuts", [[0, 0, 0], [0, 5, 5], [0, 5, 5]], "its parts do not follow one another"),
        ("settings", [], "its settings have no names"),
    ],
)
def test_a_damaged_job_is_named(good_corpus: Path, tmp_path: Path, key: str, value: object, message: str) -> None:
    break_job(tmp_path, good_corpus)
    path = tmp_path / "out.parts" / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(DataError, match=rf"job\.json cannot be understood \(ValueError: {message}"):
        run(tmp_path, good_corpus)


def test_a_part_of_other_tokens_is_named(good_corpus: Path, tmp_path: Path) -> None:
    break_job(tmp_path, good_corpus)
    path = tmp_path / "out.parts" / "00000_text_document.idx"
    content = bytearray(path.read_bytes())
    content[17] = 1  # the code of another dtype
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"(says that its tokens are uint8, and those of the job are|00000_text_document)"
    ):
        run(tmp_path, good_corpus, on_error="skip", overwrite=False)


def test_a_part_with_sources_of_other_files_is_named(good_corpus: Path, tmp_path: Path) -> None:
    break_job(tmp_path, good_corpus)
    path = tmp_path / "out.parts" / "00000_text_document.sources"
    header, names = path.read_bytes(), [f"{number}.jsonl" for number in range(100)]
    count, documents, id_bytes = struct.unpack("<IQQ", header[12:32])
    end = 32 + 20 * documents + id_bytes
    content = header[:12] + struct.pack("<I", len(names)) + header[16:end] + json.dumps(names).encode()
    path.write_bytes(content)
    report = tmp_path / "out.parts" / "00000.json"
    values = json.loads(report.read_text())
    values["file_bytes"] = {name: (tmp_path / "out.parts" / name).stat().st_size for name in values["file_bytes"]}
    report.write_text(json.dumps(values))
    assert count < len(names)
    with pytest.raises(DataError, match="names files that the job does not have"):
        run(tmp_path, good_corpus, on_error="skip", overwrite=False)


def test_a_file_that_changes_during_its_part(
    good_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module._encode_block

    def append(*arguments: object) -> object:
        with (good_corpus / "a.jsonl").open("ab") as file:
            file.write(jsonl())
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_encode_block", append)
    with pytest.raises(
        DataError, match=r"a\.jsonl has changed while it was read \(it had [\d,]+ bytes and has [\d,]+\)"
    ):
        run(tmp_path, good_corpus)
    assert not list(tmp_path.glob("out*"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("petatron").setLevel(logging.INFO)
    yield


# Where documents come from


def test_sources_name_file_line_and_id(corpus: Path, tmp_path: Path) -> None:
    for part_bytes in (10**6, 500):
        run(tmp_path, corpus / "a.jsonl", corpus / "b.jsonl.gz", on_error="skip", part_bytes=part_bytes)
        sources, texts = ProvenanceTable(tmp_path / "out_text_document"), documents(tmp_path / "out_text_document")
        assert len(sources) == len(texts) == IndexedDataset(tmp_path / "out_text_document").num_documents
        lines = (corpus / "a.jsonl").read_text().splitlines()
        for number, text in enumerate(texts):
            source = sources[number]
            row = json.loads(lines[source.line - 1]) if source.file.endswith("a.jsonl") else ROWS[source.line - 1]
            assert (row["text"], row["id"]) == (text, source.id)
        assert str(sources[len(texts) - 1]).startswith(f"{corpus}/b.jsonl.gz:40 (id doc-39")
