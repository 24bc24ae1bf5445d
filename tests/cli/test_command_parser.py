"""What is wrong with a command line is told at once, below the usage of the command it belongs to."""

from __future__ import annotations

import pytest

from petatron.cli.main import main
from petatron.cli.subcommands.command_parser import CommandParser


def parser() -> CommandParser:
    root = CommandParser(prog="tool", allow_abbrev=False)
    commands = root.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure", allow_abbrev=False)
    one.add_argument("folder")
    one.add_argument("--steps", type=int, default=3)
    one.add_argument("--seconds", type=float, nargs="+")
    one.add_argument("--device", choices=["cpu", "cuda"])
    commands.add_parser("list")
    return root


def told(capsys: pytest.CaptureFixture[str], *words: str, known: bool = False) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        (parser().parse_known_args if known else parser().parse_args)(list(words))
    assert ended.value.code == 2
    usage, _, text = capsys.readouterr().err.partition("error: ")
    assert usage.splitlines()[0].startswith("usage: tool")
    return text.splitlines()


def test_right_words_are_read():
    found = parser().parse_args(["measure", "here", "--steps", "4", "--seconds", "1", "2.5", "--device", "cpu"])
    assert vars(found) == {"command": "measure", "folder": "here", "steps": 4, "seconds": [1.0, 2.5], "device": "cpu"}
    assert parser().parse_known_args(["measure", "here", "--lr", "1"])[1] == ["--lr", "1"]


def test_all_problems_are_told_at_once(capsys: pytest.CaptureFixture[str]):
    words = ("measure", "--steps", "x", "--seconds", "1", "y", "z", "--device", "tpu")
    lines = told(capsys, *words)
    assert lines.pop(4).startswith("  argument --device: invalid choice: 'tpu' (choose from ")
    assert lines == [
        "5 problems in these arguments:",
        "  --steps 'x' is not a whole number",
        "  --seconds 'y' is not a number",
        "  --seconds 'z' is not a number",
        "  the following arguments are required: folder",
    ]


def test_unknown_words_are_told_with_the_others(capsys: pytest.CaptureFixture[str]):
    assert told(capsys, "measure", "here", "--steps", "x", "--second", "1", "--halp") == [
        "2 problems in these arguments:",
        "  --steps 'x' is not a whole number",
        "  unrecognized arguments: --second 1 --halp. Did you mean --seconds?",
    ]


def test_words_left_to_others_are_none(capsys: pytest.CaptureFixture[str]):
    assert told(capsys, "measure", "here", "--steps", "x", "--lr", "1", known=True) == [
        "--steps 'x' is not a whole number"
    ]


def test_without_a_command_nothing_else_is_told(capsys: pytest.CaptureFixture[str]):
    (line,) = told(capsys, "mesure", "--steps", "x")
    assert line.startswith("argument command: invalid choice: 'mesure'")


def test_a_verb_tells_all_at_once(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["bench", "suite", "--seconds", "soon", "--device", "tpu", "--onli", "llama-1b"])
    text = capsys.readouterr().err
    assert "usage: petatron bench suite" in text
    assert "3 problems" in text and "--seconds 'soon' is not a number" in text and "Did you mean --only?" in text
