"""`petatron plan cache`: what generation keeps, and the figures of docs/mamba.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from petatron.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "mamba.md"


def plan(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, dict[str, int], str]:
    """Returns the exit code, the numbers by the words before them, and the errors."""
    code = main(["plan", "cache", *words.split()])
    captured = capsys.readouterr()
    rows = re.findall(r"^(.+?) {2,}([\d,]+)", captured.out, re.MULTILINE)
    return code, {name: int(number.replace(",", "")) for name, number in rows}, captured.err


def test_attention_grows_and_a_state_does_not(capsys: pytest.CaptureFixture[str]):
    _, found, _ = plan(capsys, "llama3-8b --bf16")
    assert found["of each token"] == 32 * 2 * 8 * 128 * 2 and found["of each sequence"] == 0
    assert found["a sequence of 8,192 tokens"] == 8192 * found["of each token"]
    _, found, _ = plan(capsys, "mamba2-2.7b --bf16")
    states, windows = 80 * 64 * 128 * 4, 3 * (5120 + 2 * 128) * 2
    assert found["of each sequence"] == 64 * (states + windows) == found["a sequence of 1,048,576 tokens"]
    _, half, _ = plan(capsys, "nemotron-h-8b --bf16 --tp 2")
    _, whole, _ = plan(capsys, "nemotron-h-8b --bf16")
    assert {name: 2 * number for name, number in half.items()} == whole


def test_depths_of_multi_token_prediction_keep_nothing(capsys: pytest.CaptureFixture[str]):
    _, found, _ = plan(capsys, "deepseek-v3 --bf16")
    assert found["of each token"] == 61 * (512 + 64) * 2


def test_help_and_problems(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "cache", "--help"]) == 0
    assert "usage: petatron plan cache" in capsys.readouterr().out
    code, _, errors = plan(capsys, "llama3-8b --tp 3")
    assert code == 2 and "--tensor-model-parallel-size 3" in errors


@pytest.mark.parametrize("preset", ["llama3-8b", "bamba-9b", "nemotron-h-8b", "mamba2-2.7b"])
def test_the_page_has_the_figures(capsys: pytest.CaptureFixture[str], preset: str):
    _, found, _ = plan(capsys, f"{preset} --bf16")
    [row] = re.findall(rf"\| `{preset}` \|(.+)\|", PAGE.read_text())
    assert [int(cell.replace(",", "")) for cell in row.split("|")] == [
        found["of each token"],
        found["of each sequence"],
        found["a sequence of 8,192 tokens"],
        found["a sequence of 1,048,576 tokens"],
    ]
