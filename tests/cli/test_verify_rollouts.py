"""`petatron verify --rollouts`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from petatron.base.errors import ConfigError
from petatron.cli.subcommands.verify_rollouts import main

FLAGS = "--rollouts tiny-llama --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --vocab-size 97".split()
SMALL = "--prompts 2 --longest-prompt 20 --new-tokens 3 --batches 2 --chunk 3".split()


def run(*flags: str, folder: Path) -> tuple[int, dict]:
    code = main([*FLAGS, *SMALL, *flags, "--json", str(folder / "results.json")])
    return code, json.loads((folder / "results.json").read_text())


def test_no_bit_differs_and_the_cost_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, results = run("--exact-rollouts", folder=tmp_path)
    assert code == 0 and [case["differing"] for case in results["cases"]] == [0, 0]
    assert [case["tokens"] for case in results["other_mode"]] == [18, 18]
    printed = capsys.readouterr().out
    assert "SAME: 0 of 36 log-probabilities differ." in printed and "times as long" in printed


def test_a_planted_difference_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = "--exact-rollouts --no-cost --inject key-tile --longest-prompt 60 --prompts 4 --init-method-std 0.5".split()
    code, results = run(*flags, folder=tmp_path)
    assert code == 1 and all(case["differing"] for case in results["cases"]) and "DIFFERENT" in capsys.readouterr().out


def test_what_cannot_be_measured():
    with pytest.raises(ConfigError, match="plants a difference among numbers that are equal"):
        main([*FLAGS, *SMALL, "--inject", "key-tile"])
    with pytest.raises(ConfigError, match="more than the 64 positions"):
        main([*FLAGS, *SMALL, "--longest-prompt", "62"])
