"""The table of where documents come from: read back, merged, and refused where it is damaged."""

from __future__ import annotations

import doctest
import json
import os
from pathlib import Path

import numpy as np
import pytest

from petatron.base.errors import DataError
from petatron.cli.main import main
from petatron.data import document_provenance as module
from petatron.data.document_provenance import (
    DocumentIds,
    DocumentProvenance,
    ProvenanceTable,
    ProvenanceWriter,
    provenance_of,
    sources_path,
)
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.indexed_writer import merge_datasets
from tests.unit.data.inputs.corpora import FILES, jsonl, run


def test_examples() -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("name", FILES)
def test_every_format_has_lines_and_ids(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name]())
    run(tmp_path, tmp_path / name)
    sources = ProvenanceTable(tmp_path / "out_text_document")
    lines = [sources[number].line for number in range(len(sources))]
    in_csv = name.partition(".")[2].startswith(("csv", "tsv"))
    assert lines == ([2, 3, 5, 6, 7] if in_csv else [1, 2, 3, 4, 5])  # the second text has two lines
    ids = [sources[number].id for number in range(len(sources))]
    in_tar = "tar" in name
    assert ids == [f"{'shard/' if in_tar else ''}doc-{number}" for number in range(5)]
    assert {sources[number].file for number in range(5)} == {str(tmp_path / name)}


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (1.5, "1.5"), (None, None), ("", None), ({"a": 1}, '{"a": 1}'), ("é" * 2000, "é" * 1000)],
)
def test_values_of_ids(tmp_path: Path, value: object, text: str | None) -> None:
    (tmp_path / "x.jsonl").write_bytes(jsonl([{"text": "a", "name": value}, {"text": "b"}]))
    run(tmp_path, tmp_path / "x.jsonl", id_key="name")
    sources = ProvenanceTable(tmp_path / "out_text_document")
    assert [sources[number].id for number in range(2)] == [text, None]


def test_every_key_has_the_sources_of_its_documents(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "title": "", "id": 1},
        {"text": "", "title": "b", "id": 2},
        {"text": "c", "title": "d", "id": 3},
    ]
    (tmp_path / "x.jsonl").write_bytes(jsonl(rows))
    run(tmp_path, tmp_path / "x.jsonl", json_keys=("text", "title"))
    for key, ids in (("text", ["1", "3"]), ("title", ["2", "3"])):
        sources = ProvenanceTable(tmp_path / f"out_{key}_document")
        assert [sources[number].id for number in range(2)] == ids


def test_sources_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(jsonl())
    run(tmp_path, tmp_path / "x.jsonl")
    assert sources_path(tmp_path / "out_text_document").exists()
    run(tmp_path, tmp_path / "x.jsonl", document_sources=False)
    assert not sources_path(tmp_path / "out_text_document").exists()
    assert provenance_of(IndexedDataset(tmp_path / "out_text_document")) is None


@pytest.fixture
def datasets(tmp_path: Path) -> list[str]:
    for name, rows in (("a", 3), ("b", 2)):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl([{"text": name, "id": f"{name}{row}"} for row in range(rows)]))
        run(tmp_path, tmp_path / f"{name}.jsonl", name=name)
    run(tmp_path, tmp_path / "b.jsonl", tmp_path / "a.jsonl", name="both")
    return [str(tmp_path / f"{name}_text_document") for name in ("a", "b", "both")]


def test_merged_datasets_have_merged_sources(
    datasets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COPIED_DOCUMENTS", 2)
    merged = str(tmp_path / "merged")
    assert main(["data", "merge", "--input", *datasets, "--output-prefix", merged]) == 0
    assert f"{merged}.sources" in capsys.readouterr().out
    sources = ProvenanceTable(merged)
    assert sources.files == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    ids = [sources[number].id for number in range(len(sources))]
    assert ids == ["a0", "a1", "a2", "b0", "b1", "b0", "b1", "a0", "a1", "a2"]
    assert sources[6] == DocumentProvenance(str(tmp_path / "b.jsonl"), 2, "b1")
    assert main(["data", "inspect", merged, "--document", "6"]) == 0
    assert f"\nfrom {tmp_path}/b.jsonl:2 (id b1)\n" in capsys.readouterr().out


def test_datasets_of_which_one_has_no_sources(datasets: list[str], tmp_path: Path) -> None:
    merge_datasets(datasets, tmp_path / "merged")
    sources_path(datasets[1]).unlink()
    merge_datasets(datasets, tmp_path / "merged")
    assert not sources_path(tmp_path / "merged").exists()


def test_sources_of_another_dataset(datasets: list[str], tmp_path: Path) -> None:
    os.replace(sources_path(datasets[0]), sources_path(datasets[1]))
    with pytest.raises(DataError, match=r"b_text_document\.sources is of another dataset: it has 3 documents, and"):
        provenance_of(IndexedDataset(datasets[1]))


def damage(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize(
    ("offset", "content"),
    [(0, b"X"), (8, b"\x09"), (12, b"\x05"), (16, b"\xff" * 8), (24, b"\xff" * 8), (16, b"\x00"), (-1, b"x")],
)
def test_a_damaged_table(datasets: list[str], offset: int, content: bytes) -> None:
    path = sources_path(datasets[0])
    damage(path, offset if offset >= 0 else path.stat().st_size + offset, content)
    with pytest.raises(DataError, match=r"a_text_document\.sources (cannot be understood|is of another)"):
        provenance_of(IndexedDataset(datasets[0]))


@pytest.mark.parametrize("size", [0, 10, 40, 95])
def test_a_truncated_table(datasets: list[str], size: int) -> None:
    os.truncate(sources_path(datasets[0]), size)
    with pytest.raises(DataError, match=r"a_text_document\.sources cannot be"):
        ProvenanceTable(datasets[0])


@pytest.mark.parametrize(("place", "value"), [(8, 1 << 40), (16, 7), (8 + 20, 0)])
def test_a_damaged_entry(datasets: list[str], tmp_path: Path, place: int, value: int) -> None:
    damage(sources_path(datasets[0]), 32 + place, value.to_bytes(8, "little")[: 4 if place == 16 else 8])
    with pytest.raises(DataError, match=r"a_text_document\.sources is damaged"):
        merge_datasets(datasets, tmp_path / "merged")
    sources = ProvenanceTable(datasets[0])
    with pytest.raises(DataError, match="is damaged at document"):
        [sources[number] for number in range(3)]
    with pytest.raises(IndexError):
        sources[3]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with (
        pytest.raises(DataError, match=r"Cannot write .*x\.sources: .*No space left"),
        ProvenanceWriter(tmp_path / "x", ["a"]) as writer,
    ):
        writer.add(0, np.array([1]), DocumentIds.of(None, 1))
    assert not list(tmp_path.iterdir())


def test_the_summary_as_json(datasets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_bytes(jsonl([{"text": "a"}, {"text": ""}]) + b"\n")
    words = ["data", "preprocess", "--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "o")]
    words += ["--tokenizer-type", "ByteTokenizer", "--workers", "1"]
    assert main([*words, "--json", str(tmp_path / "none" / "s.json")]) == 2
    assert main([*words, "--json", str(tmp_path / "s.json"), "--no-document-sources"]) == 0
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["lines"], summary["documents"], summary["without_text"], summary["blank"]) == (3, 1, 1, 1)
    printed = capsys.readouterr().out
    assert "3 lines read: 1 written, 1 without text, 1 blank\n" in printed and ".sources" not in printed
