from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from petatron.cli.main import main
from petatron.data.curate import source_stats
from petatron.data.curate.source_stats import length_histogram
from petatron.history.draw import histogram as drawing
from petatron.history.draw.histogram import Histogram, histogram_text
from tests.unit.data.conftest import MakeDataset
from tests.unit.data.curate.planted import write_lines

BYTES = ("--tokenizer-type", "ByteTokenizer")


@pytest.mark.parametrize("module", [source_stats, drawing])
def test_examples_in_docstrings(module) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


def stats(*words_of_command: str, code: int = 0) -> None:
    assert main(["data", "stats", *words_of_command]) == code


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["ab", "AB ", "h\u00e9llo", "x" * 100])
    path.write_bytes(path.read_bytes() + b"\n\nno\n")
    stats(str(path), "--json", str(tmp_path / "out.json"))
    printed = capsys.readouterr().out
    assert re.search(rf"4\s+-\s+111 B\s+-\s+27\.8\s+2\s+3\s+100\s+100\s+100\s+25\.0%\s+{re.escape(str(path))}", printed)
    assert "2 blank lines left out" in printed and "1 malformed line left out" in printed
    assert re.search(r"64-127\s+25\.0%  █+\s+90\.1% of the bytes", printed)
    source = json.loads((tmp_path / "out.json").read_text())["sources"][0]
    assert source["documents"] == 4 and source["bytes"] == 111 and source["duplicates"] == 1
    assert source["left_out"] == {"blank": 2, "malformed": 1} and source["percentiles"]["50"] == 3
    assert source["histogram"][2] == {"from": 2, "documents": 2, "length": 5}


def test_datasets_and_files_with_a_tokenizer(
    tmp_path: Path, make_dataset: MakeDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = make_dataset([[104, 195, 169, 256], [105, 256], [105, 256]])
    path = write_lines(tmp_path / "a.jsonl", ["h\u00e9", "four"])
    stats(f"{prefix}.bin", str(path), *BYTES, "--json", str(tmp_path / "out.json"), "--svg", str(tmp_path / "a.svg"))
    printed = capsys.readouterr().out
    assert re.search(r"5\s+15\s+-\s+-\s+3\.0\s+2\s+3\s+4\s+4\s+4\s+20\.0%\s+all", printed)
    dataset, file = json.loads((tmp_path / "out.json").read_text())["sources"]
    assert (dataset["tokens"], dataset["bytes"], dataset["duplicates"]) == (8, None, 1)
    assert dataset["bytes_per_token"] == file["bytes_per_token"] == 1
    assert (file["tokens"], file["bytes"]) == (7, 7)
    picture = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "Lengths of 2 sources" in texts and prefix in texts and "tokens of a document" in texts and "4" in texts
    stats(prefix, "--no-duplicates")
    assert re.search(rf"3\s+8\s+-\s+-\s+2\.7\s+2\s+2\s+4\s+4\s+4\s+-\s+{re.escape(prefix)}", capsys.readouterr().out)


def test_units_that_differ(tmp_path: Path, make_dataset: MakeDataset, capsys: pytest.CaptureFixture[str]) -> None:
    sources = (make_dataset([[1, 2]]), str(write_lines(tmp_path / "a.jsonl", ["x"])))
    stats(*sources)
    printed = capsys.readouterr().out
    assert "lengths in tokens: " in printed and "lengths in bytes: " in printed and "  all" not in printed
    stats(*sources, "--svg", str(tmp_path / "a.svg"), code=2)
    assert "cannot draw lengths in tokens beside lengths in bytes" in capsys.readouterr().err


def test_nothing_to_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("")
    stats(str(tmp_path / "a.jsonl"), "--svg", str(tmp_path / "a.svg"))
    assert "(no documents)" in capsys.readouterr().out
    ElementTree.fromstring((tmp_path / "a.svg").read_text())


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("nothing",), 1, "input nothing does not exist"),
        (("nothing", "--svg", "no/a.svg", "--json", "no/a.json"), 2, "2 problems"),
        (("nothing", "--tokenizer-type", "Other"), 2, "--tokenizer-type Other is not in this version"),
    ],
)
def test_problems(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], code: int, message: str) -> None:
    stats(*flags, code=code)
    assert message in capsys.readouterr().err


def test_bins_are_exact_at_powers_of_two() -> None:
    lengths = np.array([2**power + offset for power in range(1, 50) for offset in (-1, 0)])
    histogram = length_histogram(lengths)
    for start, end, count in zip(histogram.starts, [*histogram.starts[1:], 2**62], histogram.documents):
        assert count == np.count_nonzero((lengths >= start) & (lengths < end))


def test_text_without_unicode() -> None:
    text = histogram_text(Histogram("a", (0, 1, 2), (0.0, 0.5, 0.25)), ["", "one", "two"], ascii_only=True)
    assert text.splitlines() == [f"1     50.0%  {'#' * 40}  one", f"2-3   25.0%  {'#' * 20 + ' ' * 20}  two"]
