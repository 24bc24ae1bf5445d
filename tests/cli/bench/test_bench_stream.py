"""`petatron bench stream`, and what `bench generate` compares within Petatron: weights in FP8, and prefill with training's forward pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import ConfigError, DataError
from petatron.bench import stream
from petatron.cli.bench import main

SMALL = "--preset tiny-llama --num-layers 1 --hidden-size 32 --ffn-hidden-size 256 --vocab-size 64 --device cpu --fp64 --no-compile".split()
FEW = "--requests 5 --shortest 2 --longest 6 --max-batch-size 3".split()


def found(tmp_path: Path, *words: str) -> dict[str, Any]:
    path = tmp_path / "found.json"
    assert main([*words, *SMALL, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_all_requests_are_answered_by_both_sides(tmp_path: Path, capsys):
    values = found(tmp_path, "stream", *FEW, "--against", "hf-static")
    assert set(values["seconds"]) == {"petatron", "hf-static"}
    assert values["ratio"] == values["seconds"]["hf-static"] / values["seconds"]["petatron"]
    assert 10 <= values["new_tokens"] <= 30 and 10 <= values["prompt_tokens"] <= 30
    assert f"{values['new_tokens']} new ones" in capsys.readouterr().out


def test_a_side_that_makes_too_few_tokens_is_no_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def short(requests: stream.Requests) -> Sequence[Sequence[int]]:
        return [[0] * (count - 1) for _, count in requests]

    monkeypatch.setattr(stream, "_transformers", lambda *_: short)
    with pytest.raises(DataError, match=r"hf made \d+ tokens instead of \d+"):
        found(tmp_path, "stream", *FEW, "--against", "hf")


def test_a_peer_that_does_not_end_is_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def slow(requests: stream.Requests) -> Sequence[Sequence[int]]:
        if all(count == 4 for _, count in requests):
            return []  # the warm-up
        raise TimeoutError

    monkeypatch.setattr(stream, "_transformers", lambda *_: slow)
    values = found(tmp_path, "stream", *FEW, "--against", "hf", "--peer-seconds", "7")
    assert values["unfinished"] == ["hf"] and values["seconds"]["hf"] == 7
    text = capsys.readouterr().out
    assert "not ended after 7 s" in text and f"above {values['ratio']:.2f}x" in text


def test_a_transformers_without_continuous_batching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Model:
        def eval(self) -> Model:
            return self

    monkeypatch.setattr("petatron.bench.peers.huggingface.build_model", lambda *_, **__: Model())
    with pytest.raises(DataError, match="no continuous batching"):
        found(tmp_path, "stream", *FEW, "--against", "hf")


def test_what_does_not_fit_is_refused_at_once(tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        found(tmp_path, "stream", "--requests", "0", "--shortest", "9", "--longest", "8", "--max-batch-size", "0")
    assert [str(problem).split(" is ")[0] for problem in refused.value.problems] == [
        "--requests 0",
        "--max-batch-size 0",
        "--longest 8",
    ]
    with pytest.raises(
        ConfigError, match=r"--peer-seconds nan must be positive.*\n.*--longest 90000 makes sequences of up to 180000"
    ):
        found(tmp_path, "stream", "--longest", "90000", "--peer-seconds", "nan")


SHORT = "--prompt-tokens 4 --new-tokens 3 --repeat 2 --batch 2".split()


def test_rounded_weights_against_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("petatron.bench.generate.copy_bandwidth", lambda device: 1e10)
    values = found(tmp_path, "generate", *SHORT, "--fp8-weights", "--against", "bf16")
    plain = found(tmp_path, "generate", *SHORT)
    assert set(values["tokens_per_s"]) == {"petatron", "bf16"} and values["ratio"] > 0
    assert values["limit_tokens_per_s"] > 2 * plain["limit_tokens_per_s"], "fewer bytes are read"


def test_drafts_against_the_engine_without(tmp_path: Path, capsys):
    words = "--mtp-num-layers 1 --speculative-tokens 2 --against plain".split()
    values = found(tmp_path, "generate", *SHORT, *words)
    assert set(values["tokens_per_s"]) == {"petatron", "plain"} and values["same_tokens"] == 3
    assert values["tokens_per_step"] >= 1 and 0 <= values["acceptance_rate"] <= 1
    assert "tokens per step" in capsys.readouterr().out


def test_prefill_against_the_forward_pass_of_training(tmp_path: Path, capsys):
    values = found(tmp_path, "generate", *SHORT, "--against", "forward")
    assert values["ratio"] == pytest.approx(values["tokens_per_s"]["petatron"] / values["tokens_per_s"]["forward"])
    assert "2 x 4 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--against plain",
            ["--against plain compares the engine with and without drafts. Give --speculative-tokens too."],
        ),
        ("--against bf16", ["--against bf16 compares the engine with quantized weights. Give --fp8-weights too."]),
        (
            "--against forward --fp8-weights --ragged",
            [
                "--against forward compares the same weights. Leave out --fp8-weights.",
                "--ragged has no equal in a batch of training. Leave it out.",
            ],
        ),
    ],
)
def test_comparisons_that_mean_nothing(words: str, said: list[str], tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        found(tmp_path, "generate", *SHORT, *words.split())
    assert [str(problem) for problem in refused.value.problems] == said
