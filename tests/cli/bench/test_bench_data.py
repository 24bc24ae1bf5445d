"""`petatron bench data --against megatron`: both write the same files, and are timed from start to end."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from petatron.base.errors import DataError
from petatron.bench import data
from petatron.bench.preprocessing import compare_with_megatron
from petatron.bench.preprocessing.compare_with_megatron import AgainstMegatron, PreprocessCase
from petatron.data.bpe.train_bpe import train_bpe
from tests.unit.data.vocabularies import LINES


@pytest.fixture
def case(tmp_path: Path) -> PreprocessCase:
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    train_bpe(LINES, 300, tmp_path / "tokenizer.json")
    return PreprocessCase(source, tmp_path / "tokenizer.json", 1, tmp_path)


def test_both_write_the_same_files(case: PreprocessCase):
    against = AgainstMegatron()
    against.measure_round(case)
    assert all(
        len(seconds) == 1 and seconds[0] > 0 for seconds in (*against.seconds.values(), *against.steady.values())
    )
    assert against.wall_ratio == against.seconds["megatron"][0] / against.seconds["petatron"][0]
    assert against.steady_ratio == against.steady["petatron"][0] / against.steady["megatron"][0]


def test_other_files_and_failures_are_errors(case: PreprocessCase, monkeypatch: pytest.MonkeyPatch):
    def run(*arguments: str) -> tuple[float, str]:
        ours = compare_with_megatron.LOOP not in arguments
        for end in ("bin", "idx"):
            (case.folder / (f"petatron_text_document.{end}" if ours else f"megatron.{end}")).write_text(arguments[1])
        (case.folder / "report.json").write_text('{"tokens": 1, "seconds": 1}')
        return 1.0, '{"steady_tokens_per_s": 1}'

    with monkeypatch.context() as patch:
        patch.setattr(compare_with_megatron, "_run", run)
        with pytest.raises(DataError, match=r"wrote different \.bin files of .*corpus\.jsonl"):
            AgainstMegatron().measure_round(case)
    case.source.unlink()
    with pytest.raises(DataError, match=r"megatron_loop .* ended with exit code 1: (.|\n)*FileNotFoundError"):
        AgainstMegatron().measure_round(case)


def test_it_needs_transformers(monkeypatch: pytest.MonkeyPatch):
    args = argparse.Namespace(size_mb=1.0, workers=1, documents=1, vocab=300, repeat=3, against="megatron")
    assert not data.argument_problems(args)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (problem,) = data.argument_problems(args)
    assert "needs transformers" in str(problem) and "petatron[hf]" in str(problem)
