from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from petatron.cli.main import main
from petatron.data.curate.contamination.decontaminate import DecontaminateOptions, decontaminate_documents
from petatron.data.curate.files.step_files import StepFiles
from tests.unit.data.curate.planted import read_texts, write_lines

QUESTION = "Which of the three old bridges over the river was rebuilt after the great flood of 1910, and why?"
STORY = (
    "A story begins on a cold night when an old sailor tells the children about the island that nobody has seen since."
)


def run(path: Path, *flags: str, code: int = 0) -> Path:
    output = path.parent / "out"
    common = ("--input", str(path), "--output", str(output), "--workers", "1")
    assert main(["data", "decontaminate", *common, *flags]) == code
    return output


@pytest.fixture
def evaluation(tmp_path: Path) -> tuple[Path, Path]:
    questions = tmp_path / "questions.jsonl.gz"
    rows = [{"query": "What is this?"}, {"item": {"question": QUESTION, "choices": ["the old one", STORY]}, "label": 1}]
    questions.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    text = tmp_path / "story.txt"
    text.write_text("\n\nToo short.\n\n" + STORY.replace("night ", "night\n") + "\n")
    return questions, text


def test_documents_with_shared_ngrams_are_dropped(
    tmp_path: Path, evaluation: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [
        "Nothing in common with " + " ".join(QUESTION.split()[:12]),  # twelve words
        "Quiz! which OF the three \u201cold\u201d bridges over the river was rebuilt after the -- great flood, they asked.",
        STORY,
        "short",
    ]
    path = write_lines(tmp_path / "a.jsonl", texts)
    report = tmp_path / "matches.jsonl"
    output = run(path, "--against", *map(str, evaluation), "--report", str(report))
    assert read_texts(output / "a.jsonl") == [texts[0], texts[3]]
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    assert rows[0] == {
        "file": str(path),
        "line": 2,
        "against": {"file": str(evaluation[0]), "line": 2},
        "ngrams": 3,
        "ngram": "which of the three old bridges over the river was rebuilt after the",
    }
    assert rows[1]["line"] == 3 and rows[1]["ngrams"] == len(STORY.split()) - 12
    summary = json.loads((output / "summary.json").read_text())
    assert summary["dropped"] == {"contaminated": 2} and summary["kept"] == 2
    assert summary["evaluation"] == {"texts": 6, "texts of fewer than 13 words": 3, "ngrams": 17}
    printed = capsys.readouterr().out
    assert f"{evaluation[0]}: shares n-grams with 2 documents" in printed and "17 ngrams" in printed


def test_marks_name_the_matches(tmp_path: Path, evaluation: tuple[Path, Path]) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        json.dumps({"text": STORY, "x": 1}),
        '{"text": "fine"}',
        json.dumps({"text": QUESTION, "contamination": 0}),
    ]
    path.write_text("\n".join(lines))
    kept = (run(path, "--against", str(evaluation[1]), str(evaluation[0]), "--mark") / "a.jsonl").read_text()
    first, second, third = kept.splitlines()
    assert second == '{"text": "fine"}'
    mark = {"file": str(evaluation[1]), "line": 5, "ngrams": len(STORY.split()) - 12}
    assert json.loads(first) == {"text": STORY, "x": 1, "contamination": [mark]}
    assert json.loads(third)["contamination"][0]["line"] == 2


def test_equals_a_comparison_of_words(tmp_path: Path) -> None:
    """Against sets of tuples, on random words with short n-grams; with two workers too."""
    draw = random.Random(2)
    texts = [" ".join(draw.choices("abcde", k=draw.randint(0, 60))) for _ in range(300)]
    against = write_lines(tmp_path / "eval.jsonl", [" ".join(draw.choices("abcde", k=30)) for _ in range(3)])
    grams = {tuple(part[at : at + 5]) for text in read_texts(against) for part in [text.split()] for at in range(26)}
    clean = [
        text
        for text in texts
        if not any(tuple(part[at : at + 5]) in grams for part in [text.split()] for at in range(len(part) - 4))
    ]
    assert 50 < len(clean) < 250
    path = write_lines(tmp_path / "a.jsonl", texts)
    options = DecontaminateOptions(against=(str(against),), ngram=5)
    for workers in (1, 2):
        output = tmp_path / f"out{workers}"
        files = StepFiles(inputs=(str(path),), output=str(output), workers=workers, block_bytes=4000)
        decontaminate_documents(files, options)
        assert read_texts(output / "a.jsonl") == clean


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (b'{"q": "few words"}', (), "has no text of 13 words or more, so nothing can match it. Lower --ngram."),
        (b"{no}", (), "eval:1: not JSON"),
        (b"\xff", (), "eval:1: not UTF-8 text"),
        (b"", (), "has no text of 13 words"),
        (b'{"q": "few words"}', ("--ngram", "0"), "--ngram 0 is not from 1 to 1024"),
    ],
)
def test_evaluation_files_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, flags: tuple[str, ...], message: str
) -> None:
    (tmp_path / "eval").write_bytes(content)
    output = run(write_lines(tmp_path / "a.jsonl", ["x"]), "--against", str(tmp_path / "eval"), *flags, code=1)
    assert message in capsys.readouterr().err and not output.exists()


def test_missing_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["x"])
    run(path, "--against", "gone", code=1)
    assert "--against: input gone does not exist" in capsys.readouterr().err
    run(path, "--against", str(path), "--report", str(tmp_path / "no" / "file"), code=2)
    assert "is in a folder that does not exist" in capsys.readouterr().err
