from __future__ import annotations

import json
from pathlib import Path

import pytest

from petatron.cli.main import main
from petatron.data.curate.files.step_files import StepFiles
from petatron.data.curate.filter.filter_documents import FilterOptions, filter_documents
from tests.cli.text_model import train_text_model
from tests.unit.data.curate.planted import read_texts, write_lines
from tests.unit.data.curate.test_filter_rules import PROSE


def run(path: Path, *flags: str, name: str = "out", code: int = 0) -> Path:
    output = path.parent / name
    common = ("--input", str(path), "--output", str(output), "--workers", "1")
    assert main(["data", "filter", *common, *flags]) == code
    return output


def test_documents_are_counted_by_the_rule_that_drops_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [PROSE, "short", "x" * 900, "keep me", PROSE + " secret", "two words", "no a-word"]
    path = write_lines(tmp_path / "a.jsonl", texts, number=1.50)
    flags = ("--min-chars", "6", "--max-chars", "800", "--min-words", "2", "--regex-drop", "sec.et", "nothing",
             "--regex-keep", "me", "tw", "bridge", "--save-dropped")  # fmt: skip
    output = run(path, *flags)
    assert read_texts(output / "a.jsonl") == [PROSE, "keep me", "two words"]
    assert (output / "a.jsonl").read_text().splitlines()[0] == path.read_text().splitlines()[0]
    dropped = [json.loads(line) for line in (output / "dropped" / "a.jsonl").read_text().splitlines()]
    assert [record["dropped_by"] for record in dropped] == ["min_chars", "max_chars", "regex_drop", "regex_keep"]
    assert dropped[0] == {"text": "short", "number": 1.5, "dropped_by": "min_chars"}
    summary = json.loads((output / "summary.json").read_text())
    assert summary["lines"] == 7 and summary["kept"] == 3
    assert summary["dropped"] == {"max_chars": 1, "min_chars": 1, "regex_drop": 1, "regex_keep": 1}
    assert summary["settings"]["min_words"] == "at least 2"
    assert "kept     3 (42.9%)" in capsys.readouterr().out


def test_c4_removes_lines_and_keeps_the_rest_of_the_record(tmp_path: Path) -> None:
    record = {"id": 7, "text": "Home | About\n" + PROSE.replace(". ", ".\n") + "\nShort.\nEnable JavaScript now!"}
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in (record, {"text": "Menu"}, {"text": ["", PROSE]})))
    output = run(path, "--c4", "--language", "en")
    kept = [json.loads(line) for line in (output / "a.jsonl").read_text().splitlines()]
    assert kept == [{"id": 7, "text": PROSE.replace(". ", ".\n")}, {"text": ["", PROSE]}]
    summary = json.loads((output / "summary.json").read_text())
    assert summary["dropped"] == {"c4_no_lines_left": 1} and summary["languages"] == {"en": 2}
    assert summary["removed_lines"] == {"c4_no_terminal_punctuation": 2, "c4_few_words": 1, "c4_javascript": 1}


def test_languages(tmp_path: Path) -> None:
    german = "Das Museum ist heute geschlossen, aber morgen kann man es besuchen."
    path = write_lines(tmp_path / "a.jsonl", [PROSE, german, "1234", f"{PROSE} {german}"])
    assert read_texts(run(path, "--language", "de", "fr") / "a.jsonl") == [german]
    output = run(path, "--language", "en", "--language-threshold", "0.95", name="strict")
    assert read_texts(output / "a.jsonl") == [PROSE]
    counts = json.loads((output / "summary.json").read_text())["languages"]
    assert counts == {"en": 2, "de": 1, "unknown": 1}


def test_workers_change_nothing(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [PROSE, "no"] * 40)
    options = FilterOptions(gopher=True, c4=True, languages=("en",), save_dropped=True)
    contents = []
    for workers in (1, 2):
        output = tmp_path / str(workers)
        files = StepFiles(inputs=(str(path),), output=str(output), workers=workers, block_bytes=3000)
        filter_documents(files, options)
        names = ("a.jsonl", "dropped/a.jsonl", "summary.json")
        contents.append([(output / name).read_bytes() for name in names])
    assert contents[0] == contents[1] and b"c4_no_lines_left" in contents[0][1]


def test_perplexity_by_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = train_text_model(tmp_path / "run")
    texts = ["a" * 300, PROSE, "", "b\ud800c", "abc " * 200]
    path = write_lines(tmp_path / "a.jsonl", texts)
    model = ("--perplexity", str(run_folder), "--perplexity-device", "cpu")
    kept = run(path, *model, "--max-perplexity", "1e9", name="all")
    assert read_texts(kept / "a.jsonl") == texts
    output = run(path, *model, "--max-perplexity", "1", "--save-dropped", name="none")
    assert read_texts(output / "a.jsonl") == [""]
    rows = [json.loads(line) for line in (output / "dropped" / "a.jsonl").read_text().splitlines()]
    assert all(row["dropped_by"] == "max_perplexity" and row["perplexity"] > 1 for row in rows) and len(rows) == 4
    # The same number as the text task of `petatron eval`, of one document shorter than the context.
    document = PROSE[:60]
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": document}))
    assert main(["eval", str(run_folder), "--task", "text", "--data", str(tmp_path / "one.jsonl"), "--device", "cpu",
                 "--out", str(tmp_path / "eval.json")]) == 0  # fmt: skip
    results = json.loads((tmp_path / "eval.json").read_text())["checkpoints"][0]["results"]
    measured = next(iter(results.values()))["metrics"]["perplexity"]["value"]
    output = run(path, *model, "--max-perplexity", "1", "--save-dropped", "--perplexity-tokens", "60", name="first")
    rows = [json.loads(line) for line in (output / "dropped" / "a.jsonl").read_text().splitlines()]
    assert rows[1]["perplexity"] == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        ((), ["petatron data filter has no rules"]),
        (("--gopher", "--limit", "gopher_few_word=3", "--without", "c4_policy"),
         ["gopher_few_word is no rule of this filter. Did you mean gopher_few_words?", "c4_policy is no rule"]),
        (("--limit", "nothing"), ["nothing is not NAME=NUMBER"]),
        (("--regex-drop", "("), ["is no regular expression"]),
        (("--min-chars", "-1"), ["is below 0"]),
        (("--language", "xx", "--language-threshold", "2"), ["--language xx is not in the model. It has ar, cs,", "2 is not above 0"]),
        (("--language-threshold", "0.3", "--c4"), ["--language-threshold has no effect without --language"]),
        (("--stop-words", "the", "--c4"), ["--stop-words has no effect without --gopher"]),
        (("--max-perplexity", "9"), ["--perplexity is missing"]),
        (("--perplexity", "x"), ["--max-perplexity is missing"]),
        (("--perplexity", "x", "--max-perplexity", "0.5", "--perplexity-tokens", "0"), ["0.5 is below 1", "0 is below 1"]),
        (("--perplexity-device", "cpu", "--c4"), ["--perplexity-device has no effect without --perplexity"]),
    ],
)  # fmt: skip
def test_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], messages: list[str]
) -> None:
    run(write_lines(tmp_path / "a.jsonl", ["a"]), *flags, code=2)
    printed = capsys.readouterr().err
    assert all(message in printed for message in messages), printed
    assert not (tmp_path / "out").exists()


def test_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "filter", "--list-rules", "--gopher", "--c4", "--min-chars", "9"]) == 0
    printed = capsys.readouterr().out
    for line in ("c4_javascript", "removes lines", "gopher_top_2_gram", "at most 0.2", "min_chars", "at least 9"):
        assert line in printed
    assert main(["data", "filter", "--list-rules"]) == 0
    assert "no rules are chosen" in capsys.readouterr().out
    assert main(["data", "filter", "--c4"]) == 2
    assert "--input is missing" in capsys.readouterr().err
