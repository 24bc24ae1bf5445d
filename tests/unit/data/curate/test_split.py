from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from petatron.cli.main import main
from petatron.data.curate.split_documents import place_of
from tests.unit.data.curate.planted import read_texts, write_lines


def run(path: Path, *flags: str, name: str = "out", code: int = 0) -> Path:
    output = path.parent / name
    common = ("--input", str(path), "--output", str(output), "--workers", "1")
    assert main(["data", "split", *common, *flags]) == code
    return output


def test_a_split_does_not_depend_on_order_or_other_documents(tmp_path: Path) -> None:
    texts = [f"document number {number}" for number in range(2000)]
    output = run(write_lines(tmp_path / "a.jsonl", texts), "--held-out", "0.1")
    train, held_out = (read_texts(output / part / "a.jsonl") for part in ("train", "held-out"))
    assert sorted(train + held_out) == sorted(texts) and 160 <= len(held_out) <= 240
    assert held_out == [text for text in texts if text in set(held_out)]
    random.Random(1).shuffle(texts)
    copies = [f"  {text.upper()}" for text in texts[:50]]
    again = run(write_lines(tmp_path / "b.jsonl", [*texts[:1000], *copies]), "--held-out", "0.1", name="again")
    again_held_out = read_texts(again / "held-out" / "b.jsonl")
    assert {text.strip().lower() for text in again_held_out} == set(held_out) & set(texts[:1000])
    larger = run(tmp_path / "a.jsonl", "--held-out", "0.2", name="larger")
    assert set(held_out) < set(read_texts(larger / "held-out" / "a.jsonl"))
    other = run(tmp_path / "a.jsonl", "--held-out", "0.1", "--seed", "2", name="other")
    assert set(read_texts(other / "held-out" / "a.jsonl")) != set(held_out)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["kept"] == 2000 and summary["parts"] == {"held-out": len(held_out), "train": len(train)}


def test_places_are_the_same_everywhere() -> None:
    assert [round(place_of(text, 1), 6) for text in ("", "A", "a")] == GOLDEN


GOLDEN = [0.435765, 0.03721, 0.03721]


def test_too_few_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["one"])
    output = run(path, "--held-out", "0.000001")
    assert "no document is held out; 1 are too few" in capsys.readouterr().out
    assert (output / "held-out" / "a.jsonl").read_bytes() == b""


@pytest.mark.parametrize("share", ["0", "1", "nan"])
def test_shares_that_split_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], share: str) -> None:
    run(write_lines(tmp_path / "a.jsonl", ["one"]), "--held-out", share, code=2)
    assert "is not above 0 and below 1" in capsys.readouterr().err
