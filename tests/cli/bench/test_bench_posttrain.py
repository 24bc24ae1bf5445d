"""`petatron bench posttrain`: our side alone; `tests/trl` has it beside TRL."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from petatron.base.errors import ConfigError, TrainError
from petatron.bench import posttrain
from petatron.cli.bench import main

TINY = "tiny-llama --num-layers 1 --vocab-size 2048 --device cpu --no-bf16 --steps 3 --first-steps 1".split()
ROWS = "--seq-length 128 --global-batch-size 2 --micro-batch-size 1".split()
ANSWERS = "--prompts 2 --answers 2 --answer-tokens 8 --prompt-tokens 24 --seq-length 64 --micro-batch-size 2".split()


def test_steps_and_their_parts_are_measured(tmp_path: Path, capsys):
    path = tmp_path / "measured.json"
    assert main(["posttrain", "grpo", *TINY, *ANSWERS, "--json", str(path)]) == 0
    values, text = json.loads(path.read_text()), capsys.readouterr().out
    side = values["sides"]["petatron"]
    assert len(side["step_s"]) == 2 and min(side["step_s"]) > 0 and "2 answers of 8 to each" in text
    assert side["tokens"] == pytest.approx(32, abs=8)
    assert side["phases_s"]["draw"] > 0 and sum(side["phases_s"].values()) < values["step_s"]["petatron"]
    assert "draw" in text and "train" in text


def test_problems_are_told_at_once():
    flags = "--answers 1 --steps 1 --first-steps 1 --answer-tokens 100 --seq-length 64 --vocab-size 500".split()
    with pytest.raises(ConfigError) as error:
        main(["posttrain", "grpo", "tiny-llama", "--device", "cpu", "--no-bf16", *flags])
    for rule in (
        "--answers",
        "--steps",
        "--vocab-size 500 is less than the 2,048 ids",
        "shorter than a prompt with its answer, 164 tokens",
    ):
        assert rule in str(error.value)


def test_a_side_that_fails_is_told():
    with pytest.raises(TrainError, match=r"-c raise failed:\n(.|\n)*No active exception"):
        posttrain._run([sys.executable, "-c", "raise"])
