from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petatron.base.errors import DataError
from petatron.cli.main import main
from petatron.data.curate.dedup import duplicate_links
from petatron.data.curate.dedup.dedup_documents import EXACT, NEAR, DedupOptions, dedup_documents
from petatron.data.curate.dedup.duplicate_links import DuplicateLinks, link_equal_keys
from petatron.data.curate.dedup.min_hash import MinHashOptions
from petatron.data.curate.files.output_folder import OutputFiles
from petatron.data.curate.files.step_files import StepFiles, check_step_files
from tests.unit.data.curate.planted import jaccard, pairs, random_text, read_texts, write_lines


def files_of(*inputs: Path, name: str = "out", **settings) -> StepFiles:
    return StepFiles(inputs=tuple(map(str, inputs)), output=str(inputs[0].parent / name), **settings)


def test_equal_texts_are_one(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", ["Hello  World", "other", "hello world\n", "!", "?"])
    second = write_lines(tmp_path / "b.jsonl", ["other", "new", "e\u0301", "\u00e9"])
    summary = dedup_documents(files_of(first, second), DedupOptions())
    assert read_texts(tmp_path / "out" / "a.jsonl") == ["Hello  World", "other", "!", "?"]
    assert read_texts(tmp_path / "out" / "b.jsonl") == ["new", "e\u0301"]
    assert (summary.lines, summary.num_kept, dict(summary.dropped)) == (9, 6, {EXACT: 3})
    content = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert content["lines"] == 9 and content["dropped"] == {EXACT: 3} and content["inputs"][str(first)] == 5
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.jsonl", "b.jsonl", "summary.json"]


@pytest.mark.parametrize("exact_jaccard", [False, True])
def test_planted_near_duplicates(tmp_path: Path, exact_jaccard: bool) -> None:
    """Pairs of similarity 0.8 among pairs of 0.7 and 0.5 and single documents."""
    draw = random.Random(7)
    planted = list(pairs(draw, 600, shingles_per_word=45))
    assert {round(jaccard(*pair), 6) for pair in planted} == {0.8}
    others = [*pairs(draw, 200, shingles_per_word=15), *pairs(draw, 200, shingles_per_word=85 / 3)]
    assert {round(jaccard(*pair), 2) for pair in others} == {0.5, 0.7}
    singles = [random_text(draw, draw.randint(20, 300)) for _ in range(600)]
    texts = [*(text for pair in (*planted, *others) for text in pair), *singles]
    path = write_lines(tmp_path / "a.jsonl", [" ".join(text) for text in texts])
    report = tmp_path / "pairs.jsonl"
    options = DedupOptions(near=MinHashOptions(), exact_jaccard=exact_jaccard, report_pairs=str(report))
    summary = dedup_documents(files_of(path), options)
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    reported = {(row["duplicate_of"]["line"], row["line"]) for row in rows}
    expected = {(2 * index + 1, 2 * index + 2) for index in range(len(planted))}
    recall = len(reported & expected) / len(expected)
    precision = len(reported & expected) / len(reported)
    assert recall >= 0.95 and precision >= 0.99, (recall, precision)
    assert summary.dropped[NEAR] == len(reported) and summary.details["clusters"] == len(reported)
    if exact_jaccard:
        assert {row["similarity"] for row in rows} == {0.8}


def test_the_first_of_a_cluster_is_kept_whatever_the_workers(tmp_path: Path) -> None:
    draw = random.Random(3)
    texts = [text for pair in pairs(draw, 24, shingles_per_word=60) for text in pair]
    draw.shuffle(texts)
    path = write_lines(tmp_path / "a.jsonl", [*(" ".join(text) for text in texts), "", "short", "Short"])
    options = DedupOptions(near=MinHashOptions(), exact_jaccard=True, report_pairs=str(tmp_path / "pairs"))
    results = []
    for workers, memory_bytes in ((1, 1 << 30), (2, 1000)):
        files = files_of(path, name=f"out{workers}", workers=workers, block_bytes=4000)
        dedup_documents(files, replace(options, memory_bytes=memory_bytes))
        output = tmp_path / f"out{workers}"
        results.append([(output / name).read_bytes() for name in ("a.jsonl", "summary.json")])
        results[-1].append(b"".join(sorted((tmp_path / "pairs").read_bytes().splitlines())))
    assert results[0] == results[1]
    kept = read_texts(tmp_path / "out1" / "a.jsonl")
    assert kept[-2:] == ["", "short"] and len(kept) == 26


def test_a_chain_is_one_cluster() -> None:
    links = DuplicateLinks.of(6)
    links.connect(np.array([4, 2]), np.array([5, 4]))
    links.connect(np.array([1]), np.array([5]))
    assert links.labels.tolist() == [0, 1, 1, 3, 1, 1] and links.duplicates.sum() == 3


def test_those_that_differ_from_a_leader_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys are equal; documents are similar where they have the same remainder of 3."""
    monkeypatch.setattr(duplicate_links, "_COMPARED_PAIRS", 4)

    def link(leaders: int) -> DuplicateLinks:
        monkeypatch.setattr(duplicate_links, "_MAX_LEADERS", leaders)
        links = DuplicateLinks.of(9)
        link_equal_keys(
            links,
            lambda start, stop: np.zeros(stop - start, np.uint64),
            lambda first, second: np.where(first % 3 == second % 3, 1.0, -1.0),
            is_candidate=np.arange(9) != 4,
            memory_bytes=1 << 20,
            keep_pairs=True,
        )
        return links

    links = link(3)
    assert links.labels.tolist() == [0, 1, 2, 0, 4, 2, 0, 1, 2] and links.uncompared == 0
    assert sum(len(first) for first, _, _ in links.pairs) == 5
    links = link(1)
    assert links.labels.tolist() == [0, 1, 2, 0, 4, 5, 0, 7, 8] and links.uncompared == 5


def test_every_line_is_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    content = (
        b'\xef\xbb\xbf{"text": "one"}\r\n\n[]\n{"text": "one"}\r\n{"text": ["a", "b"]}\n \n{"text": "\\ud800"}\nno'
    )
    path.write_bytes(content)
    assert main(["data", "dedup", "--input", str(path), "--output", str(tmp_path / "o"), "--workers", "1"]) == 1
    assert "a.jsonl:3: a JSON list, not an object. Correct the line" in capsys.readouterr().err
    assert not (tmp_path / "o").exists() and list(tmp_path.iterdir()) == [path]
    flags = ["--on-error", "skip", "--near", "--workers", "1"]
    assert main(["data", "dedup", "--input", str(path), "--output", str(tmp_path / "o"), *flags]) == 0
    printed = capsys.readouterr()
    for part in ("read     8 lines of 1 file", "kept     3", "1 (12.5%): exact duplicate", "2 (25.0%): blank"):
        assert part in printed.out
    assert "a.jsonl:8: not JSON" in printed.err
    kept = (tmp_path / "o" / "a.jsonl").read_bytes()
    assert kept == b'{"text": "one"}\r\n{"text": ["a", "b"]}\n{"text": "\\ud800"}\n'


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_compressed_in_and_out(tmp_path: Path, ending: str) -> None:
    import zstandard

    lines = write_lines(tmp_path / "plain", ["a", "a", "b"]).read_bytes()
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(gzip.compress(lines) if ending == "gz" else zstandard.compress(lines))
    dedup_documents(files_of(path), DedupOptions())
    content = (tmp_path / "out" / path.name).read_bytes()
    plain = gzip.decompress(content) if ending == "gz" else zstandard.decompress(content, max_output_size=1000)
    assert plain == b'{"text": "a"}\n{"text": "b"}\n'
    dedup_documents(files_of(path, name="plainly", compression="none"), DedupOptions())
    assert (tmp_path / "plainly" / "a.jsonl").read_bytes() == plain
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="cannot be read beyond line"):
        dedup_documents(files_of(path, name="other"), DedupOptions())
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("library", [bz2, gzip, lzma])
@pytest.mark.parametrize("content", [b"", b"a line\n"])
def test_an_output_is_compressed_like_its_input(tmp_path: Path, library: Any, content: bytes) -> None:
    (tmp_path / "like").write_bytes(library.compress(content))
    files = StepFiles(inputs=(str(tmp_path / "like"),), output=str(tmp_path / "out"))
    with OutputFiles(tmp_path / "out", check_step_files(files, step="copy")) as output:
        output.write(0, b"kept\n")
    assert library.decompress((tmp_path / "out" / "like").read_bytes()) == b"kept\n"


def test_a_text_that_begins_like_bzip2_is_plain(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'BZh is no JSON\n{"text": "x"}\n')
    dedup_documents(files_of(path, on_error="skip"), DedupOptions())
    assert (tmp_path / "out" / "a.jsonl").read_bytes() == b'{"text": "x"}\n'


def test_problems_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["a"])
    other = tmp_path / "sub"
    other.mkdir()

    def fails(*words_of_command: str, code: int = 1) -> str:
        assert main(["data", "dedup", *words_of_command]) == code
        return capsys.readouterr().err

    message = fails("--input", str(path), str(path), "gone", "--output", str(tmp_path), "--near", "--workers", "0")
    for part in ("input gone does not exist", "--workers 0", "a.jsonl; name each file once", "contains the input"):
        assert part in message
    flags = ("--input", str(path), "--output", str(other / "out"), "--workers", "1")
    message = fails(*flags, "--bands", "3", "--exact-jaccard", code=2)
    assert "--bands has no effect without --near" in message and "--exact-jaccard has no effect" in message
    message = fails(*flags, "--near", "--bands", "0", "--threshold", "1.5")
    assert "--bands 0 is not from 1" in message and "--threshold 1.5 is not above 0" in message
    assert "does not exist" in fails(*flags, "--report-pairs", str(tmp_path / "no" / "where"), code=2)
    (other / "out").write_text("")
    assert "exists and is not a folder" in fails(*flags)


def test_only_the_output_of_a_step_is_replaced(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["a"])
    output = tmp_path / "out"
    output.mkdir()
    dedup_documents(files_of(path), DedupOptions())  # an empty folder is free
    with pytest.raises(DataError, match="is not empty"):
        dedup_documents(files_of(path), DedupOptions())
    write_lines(path, ["b"])
    dedup_documents(files_of(path, overwrite=True), DedupOptions())
    assert read_texts(output / "a.jsonl") == ["b"]
    (output / "summary.json").write_text("[]")
    with pytest.raises(DataError, match="no curation step wrote"):
        dedup_documents(files_of(path, overwrite=True), DedupOptions())
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.jsonl", "out"}


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["a", "b"])

    def change(progress) -> None:
        if progress.part == "hashed":
            write_lines(path, ["a", "b", "c"])

    with pytest.raises(DataError, match="has changed while it was read"):
        dedup_documents(files_of(path), DedupOptions(), change)
    assert list(tmp_path.iterdir()) == [path]


def test_empty_inputs(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("")
    summary = dedup_documents(files_of(path), DedupOptions(near=MinHashOptions(), exact_jaccard=True))
    assert summary.lines == 0 and (tmp_path / "out" / "a.jsonl").read_bytes() == b""


@pytest.mark.parametrize(("rows", "size"), [(8, 1), (4, 2), (2, 4)])
def test_other_bands(tmp_path: Path, rows: int, size: int) -> None:
    near = MinHashOptions(bands=16, rows=rows)
    assert near.row_dtype.itemsize == size
    draw = random.Random(5)
    texts = [" ".join(text) for pair in pairs(draw, 20, shingles_per_word=200) for text in pair]
    summary = dedup_documents(files_of(write_lines(tmp_path / "a", texts)), DedupOptions(near=near))
    assert summary.dropped[NEAR] == 20
